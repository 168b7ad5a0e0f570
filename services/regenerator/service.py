"""The regenerator without HTTP: one generator, its worker thread, its watcher, its metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from torch import Tensor

from services.worker import Worker
from solrl.clients.http import Priority
from solrl.clients.regenerator import RegeneratorStatus
from solrl.config import Config
from solrl.errors import InputError, SolrlError, UnavailableError, VersionError
from solrl.generator import Generated, Generator, Job, Policy, Reload
from solrl.records import ReplicaState
from solrl.replica import Watcher, replica_id

#: Requests that may wait or run at once.
PLACES: dict[Priority, int] = {"run": 64, "people": 8}

logger = logging.getLogger("solrl.regenerator")


@dataclass(frozen=True)
class Order:
    """One request: pictures of `seeds`, all by one policy version."""

    prompt: str
    seeds: tuple[int, ...]
    steps: int
    guidance: float
    policy: Policy


@dataclass(frozen=True)
class Result:
    """latents fp32 [n, C, h, w]; images uint8 [n, H, W, 3]; seconds computing, not waiting."""

    latents: Tensor
    images: Tensor
    version: int | None
    adapter_sha256: str | None
    precision: str
    truncated: bool
    seconds: float


@dataclass(frozen=True)
class _Part:
    made: Generated
    adapter_sha256: str | None
    truncated: bool
    seconds: float


#: How a request waits for a task of the worker.
Wait = Callable[["Future[_Part]"], Awaitable[_Part]]


class Service:
    """`load` builds the generator; it is called in the worker thread, which alone uses it."""

    def __init__(
        self, config: Config, *, load: Callable[[], Generator], registry: CollectorRegistry
    ) -> None:
        self._config = config
        self._load_generator = load
        self.worker: Worker[Generator] = Worker(
            name="regenerator", setup=self._setup, places=PLACES
        )
        self.watcher: Watcher | None = None
        self._status: RegeneratorStatus | None = None
        self._hashes: dict[int, str] = {}
        self._metrics = _Metrics(registry, self.worker)

    def start(self, on_failure: Callable[[], None]) -> None:
        self.worker.start(on_failure=on_failure)

    def stop(self) -> None:
        if self.watcher is not None:
            self.watcher.stop()
        self.worker.stop()

    def problems(self) -> list[str]:
        """Why a run cannot be served now."""
        found = [self.worker.problem, self.watcher.problem if self.watcher else None]
        return [problem for problem in found if problem]

    def status(self) -> RegeneratorStatus:
        """What is held. UnavailableError while the model is being loaded."""
        if self._status is None or self.watcher is None:
            raise UnavailableError(f"{self.worker.problem or 'starting'}; try again shortly")
        return self._status.model_copy(update={"replica": self.watcher.state})

    def load_adapter(self, path: Path) -> Reload:
        """Load an adapter by hand, from below the runs directory only."""
        runs = self._config.run.directory.resolve()
        folder = path.resolve()
        if not folder.is_relative_to(runs):
            raise InputError(
                f"adapter path {path} is not below the runs directory {runs}, the only place "
                "adapters are loaded from (run.directory)"
            )
        if self.watcher is None:
            raise UnavailableError(f"{self.worker.problem or 'starting'}; try again shortly")
        answer = self.watcher.load(folder)
        assert isinstance(answer, Reload)
        return answer

    async def regenerate(
        self, order: Order, *, lane: Priority, cancelled: threading.Event, wait: Wait
    ) -> Result:
        """Pictures in the order of the seeds, a micro-batch a task, all by one version.

        Raises VersionError, InputError, BusyError.
        """
        with self._metrics.errors_counted(), self.worker.admit(lane):
            size = self.status().micro_batch
            policy = order.policy
            parts: list[_Part] = []
            while (first := len(parts) * size) < len(order.seeds):
                jobs = [Job(order.prompt, seed) for seed in order.seeds[first : first + size]]
                task = self._task(jobs, order, policy, cancelled)
                try:
                    parts.append(await wait(self.worker.submit(lane, task)))
                except VersionError:
                    if order.policy != "current" or not parts:
                        raise
                    # Two swaps passed since the first part: begin again with what is current now.
                    policy, parts = order.policy, []
                    continue
                version = parts[0].made.version
                policy = "base" if version is None else version
        seconds = sum(part.seconds for part in parts)
        self._metrics.seconds.observe(seconds)
        return Result(
            latents=torch.cat([part.made.latents for part in parts]),
            images=torch.cat([part.made.images for part in parts]),
            version=parts[0].made.version,
            adapter_sha256=parts[0].adapter_sha256,
            precision=self.status().precision,
            truncated=parts[0].truncated,
            seconds=seconds,
        )

    def _task(
        self, jobs: list[Job], order: Order, policy: Policy, cancelled: threading.Event
    ) -> Callable[[Generator], _Part]:
        def make(generator: Generator) -> _Part:
            begin = time.perf_counter()
            made = generator.generate(
                jobs,
                steps=order.steps,
                guidance=order.guidance,
                policy=policy,
                cancelled=cancelled.is_set,
            )
            if made is None:
                raise UnavailableError("the request was cancelled")
            self._metrics.count(made, generator.precision)
            return _Part(
                made=made,
                adapter_sha256=None if made.version is None else self._hashes[made.version],
                truncated=generator.truncated(order.prompt),
                seconds=time.perf_counter() - begin,
            )

        return make

    def _setup(self) -> Generator:
        generator = self._load_generator()
        generator.warm_up()
        identity = ReplicaState(
            kind="regenerator",
            id=replica_id("regenerator"),
            address=self._config.services.regenerator,
            base_sha256=generator.base_sha256,
            precision=generator.precision,
        )
        logger.info(
            "%s runs in %s (%s)", generator.base_id, generator.precision, generator.precision_reason
        )
        self.watcher = Watcher(
            self._config.services.redis,
            identity=identity,
            load=lambda folder: self.worker.submit("reload", self._reload_task(folder)).result(),
        )
        self._describe(generator, identity)
        self.watcher.start()
        return generator

    def _reload_task(self, folder: Path) -> Callable[[Generator], Reload]:
        def reload(generator: Generator) -> Reload:
            try:
                answer = generator.load_adapter(folder)
            except SolrlError:
                self._metrics.refused.inc()
                raise
            self._hashes[answer.version] = answer.sha256
            self._hashes = {v: self._hashes[v] for v in generator.held()}
            self._metrics.reloaded(answer)
            assert self.watcher is not None
            self._describe(generator, self.watcher.state)
            return answer

        return reload

    def _describe(self, generator: Generator, state: ReplicaState) -> None:
        # A snapshot, so that asking never waits for the worker.
        self._status = RegeneratorStatus(
            base_id=generator.base_id,
            base_sha256=generator.base_sha256,
            precision=generator.precision,
            micro_batch=generator.micro_batch,
            latent_shape=generator.latent_shape,
            held=generator.held(),
            current=generator.current.version if generator.current else None,
            replica=state,
        )


class _Metrics:
    def __init__(self, registry: CollectorRegistry, worker: Worker[Generator]) -> None:
        self._images = Counter(
            "solrl_images_total", "Pictures made.", ["precision"], registry=registry
        )
        self._nfe = Counter(
            "solrl_nfe_total",
            "Network evaluations of one picture, padding included.",
            ["precision"],
            registry=registry,
        )
        self._non_finite = Counter(
            "solrl_non_finite_total", "Pictures with a non-finite latent.", registry=registry
        )
        self.seconds = Histogram(
            "solrl_regenerate_seconds",
            "Computing time of a request, without waiting.",
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150),
            registry=registry,
        )
        self._version = Gauge(
            "solrl_policy_version", "Adapter version served; -1 is the base.", registry=registry
        )
        self._version.set(-1)
        self._reload_seconds = Histogram(
            "solrl_reload_seconds",
            "Time of an adapter swap, its canary excluded.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=registry,
        )
        self._bound = Gauge(
            "solrl_adapter_modules", "Modules of the adapter served.", ["kind"], registry=registry
        )
        self.refused = Counter(
            "solrl_reloads_refused_total", "Adapters that could not be bound.", registry=registry
        )
        self._errors = Counter(
            "solrl_errors_total", "Requests that failed, by kind.", ["kind"], registry=registry
        )
        in_flight = Gauge(
            "solrl_requests_in_flight", "Requests waiting or running.", ["lane"], registry=registry
        )
        for lane in PLACES:
            in_flight.labels(lane).set_function(partial(worker.in_flight, lane))

    def count(self, made: Generated, precision: str) -> None:
        self._images.labels(precision).inc(len(made.images))
        self._nfe.labels(precision).inc(made.nfe)
        finite = made.latents.isfinite().all(dim=3).all(dim=2).all(dim=1)
        self._non_finite.inc(int((~finite).sum()))

    def reloaded(self, answer: Reload) -> None:
        self._version.set(answer.version)
        self._reload_seconds.observe(answer.seconds)
        self._bound.labels("bound").set(answer.modules_bound)
        self._bound.labels("expected").set(answer.modules_expected)

    @contextmanager
    def errors_counted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._errors.labels(type(error).__name__).inc()
            raise
