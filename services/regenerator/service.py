"""The regenerator without HTTP: one generator, its worker thread, its watcher, its metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.worker import Worker
from solrl.clients.http import Priority
from solrl.clients.regenerator import RegeneratorStatus
from solrl.config import Config
from solrl.errors import InputError, UnavailableError, VersionError
from solrl.generator import Generated, Generator, Job, Policy, Reload
from solrl.metrics import Metrics
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

    def __init__(self, config: Config, *, load: Callable[[], Generator], metrics: Metrics) -> None:
        self._config = config
        self._load_generator = load
        self._metrics = metrics
        self.worker: Worker[Generator] = Worker(
            name="regenerator",
            setup=self._setup,
            places=PLACES,
            people_share=config.services.people_share,
            metrics=metrics,
        )
        self.watcher: Watcher | None = None
        self._status: RegeneratorStatus | None = None
        self._hashes: dict[int, str] = {}

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
        run = self._config.run
        allowed = [root.resolve() for root in (run.directory, run.adapters) if root is not None]
        folder = path.resolve()
        if not any(folder.is_relative_to(root) for root in allowed):
            raise InputError(
                f"adapter path {path} is not below {' or '.join(map(str, allowed))}, the only "
                "place adapters are loaded from (run.directory, run.adapters)"
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
        with self.worker.admit(lane):
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
        self._metrics.histogram("solrl_phase_seconds", phase="regenerate").observe(seconds)
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
            self._count(made, order, generator.precision)
            return _Part(
                made=made,
                adapter_sha256=None if made.version is None else self._hashes[made.version],
                truncated=generator.truncated(order.prompt),
                seconds=time.perf_counter() - begin,
            )

        return make

    def _count(self, made: Generated, order: Order, precision: str) -> None:
        pictures = len(made.images)
        forwards = order.steps * (2 if order.guidance != 1.0 else 1)
        finite = made.latents.isfinite().all(dim=3).all(dim=2).all(dim=1)
        self._metrics.counter("solrl_images_total", precision=precision).inc(pictures)
        self._metrics.counter("solrl_nfe_total", precision=precision).inc(pictures * forwards)
        self._metrics.counter("solrl_non_finite_total").inc(int((~finite).sum()))

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
            metrics=self._metrics,
        )
        self._describe(generator, identity)
        self.watcher.start()
        return generator

    def _reload_task(self, folder: Path) -> Callable[[Generator], Reload]:
        def reload(generator: Generator) -> Reload:
            answer = generator.load_adapter(folder)
            self._hashes[answer.version] = answer.sha256
            self._hashes = {v: self._hashes[v] for v in generator.held()}
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
