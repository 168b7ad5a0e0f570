"""The explorer's front: gRPC for callers, the queue for runs. No torch, no state worth keeping.

`python -m services.explorer --config F`; any number of replicas, each beside its own Triton.
"""

from __future__ import annotations

import hmac
import io
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from numpy.typing import NDArray
from PIL import Image
from prometheus_client import start_http_server

from services.explorer.explore import Ask, Outcome, Scored, count, explore
from services.explorer.neighbours import Neighbours
from services.explorer.queue_loop import QueueLoop
from services.explorer.triton_client import CancelledCall, Policy, TritonClient
from solrl.clients._proto import explorer_pb2 as pb
from solrl.clients._proto import explorer_pb2_grpc
from solrl.clients.explorer import ERROR_KEY, message_options
from solrl.clients.http import TOKEN_VARIABLE
from solrl.clients.reward import RewardClient
from solrl.config import Config
from solrl.errors import (
    AdapterError,
    BusyError,
    ConfigError,
    InputError,
    SolrlError,
    UnavailableError,
    VersionError,
)
from solrl.metrics import Metrics
from solrl.probes import port_is_free, split_address
from solrl.replica import replica_id
from solrl.stack import free_ports

#: Explorations called for at once; more are refused.
CALLS = 16
#: A caller hears of a neighbour's absence after this long; a run is more patient.
RETRY_FOR = 5.0
#: Seconds a call gets to finish after SIGTERM.
DRAIN = 5.0
#: In the health service: "" and the service's name can serve now; this one is merely alive.
ALIVE = "liveness"
SERVICE = pb.DESCRIPTOR.services_by_name["Explorer"].full_name

STATUS = (
    (VersionError, grpc.StatusCode.FAILED_PRECONDITION),
    (AdapterError, grpc.StatusCode.FAILED_PRECONDITION),
    (InputError, grpc.StatusCode.INVALID_ARGUMENT),
    (BusyError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (CancelledCall, grpc.StatusCode.CANCELLED),
)
TO_RANK = {"best": pb.RANK_BEST, "worst": pb.RANK_WORST}

logger = logging.getLogger("solrl.explorer.gateway")


class Gateway(explorer_pb2_grpc.ExplorerServicer):
    """The service of proto/solrl/v1/explorer.proto."""

    def __init__(
        self,
        config: Config,
        *,
        triton: TritonClient,
        reward: RewardClient,
        neighbours: Neighbours,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._triton = triton
        self._reward = reward
        self._neighbours = neighbours
        self._metrics = metrics
        self._free = threading.BoundedSemaphore(CALLS)

    def Explore(
        self, request: pb.ExploreRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ExploreEvent]:
        with self._answering(context):
            ask = _ask(request, self._config)
            if not self._free.acquire(blocking=False):
                raise BusyError(f"{CALLS} explorations are running; try again shortly")
            try:
                in_flight = self._metrics.gauge("solrl_requests_in_flight", lane="people")
                with in_flight.track_inprogress():
                    yield from self._explore(ask, context, thumbnails=request.thumbnails)
            finally:
                self._free.release()

    def _explore(
        self, ask: Ask, context: grpc.ServicerContext, *, thumbnails: bool
    ) -> Iterator[pb.ExploreEvent]:
        over = threading.Event()
        # The caller's cancellation, its deadline and its death all end here.
        if not context.add_callback(over.set):
            raise CancelledCall("the caller went away")
        left = context.time_remaining()
        for event in explore(
            ask,
            triton=self._triton,
            reward=self._reward,
            retry_for=RETRY_FOR,
            timeout=self._config.services.selection_timeout if left is None else left,
            cancelled=over.is_set,
        ):
            if isinstance(event, Outcome):
                count(self._metrics, "people", event)
                yield pb.ExploreEvent(selection=_selection(ask, event))
            else:
                yield pb.ExploreEvent(candidate=_candidate(event, thumbnails=thumbnails))

    def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.LoadAdapterResponse:
        with self._answering(context):
            answer = self._neighbours.load(Path(request.path))
            return pb.LoadAdapterResponse(
                adapter=pb.Adapter(
                    run=answer.run,
                    epoch=answer.epoch,
                    version=answer.version,
                    sha256=answer.sha256,
                ),
                modules_bound=answer.modules_bound,
                modules_expected=answer.modules_expected,
                seconds=answer.seconds,
                canary=answer.canary,
            )

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        """Answers even when Triton does not: then with the problem instead of the model."""
        problems = self._neighbours.all_problems
        try:
            status = self._triton.status(layers=request.layers)
        except UnavailableError as error:
            return pb.StatusResponse(
                replica=self._neighbours.replica, problems=dict.fromkeys([str(error), *problems])
            )
        return pb.StatusResponse(
            replica=self._neighbours.replica,
            base_id=status["base_id"],
            base_sha256=status["base_sha256"],
            precision=status["precision"],
            precision_reason=status["precision_reason"],
            fp4_share=status["fp4_share"],
            solver=status["solver"],
            micro_batch=status["micro_batch"],
            current=pb.Adapter(**status["current"]) if status["current"] else None,
            held_versions=status["held"],
            waiting=status["waiting"],
            problems=problems,
            layers=[_layer(layer) for layer in status.get("layers", ())],
        )

    @contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[None]:
        """A SolrlError as its status code, its message, and its name in the trailing metadata."""
        try:
            yield
        except SolrlError as error:
            kind = type(error).__name__
            self._metrics.counter("solrl_errors_total", kind=kind).inc()
            code = next((c for k, c in STATUS if isinstance(error, k)), grpc.StatusCode.UNAVAILABLE)
            context.set_trailing_metadata(((ERROR_KEY, kind),))
            # Metadata travels in HTTP/2 headers, which are bounded.
            context.abort(code, str(error)[:2000])


class TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without the bearer token; the health service needs none."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

        def refuse(_: Any, context: grpc.ServicerContext) -> None:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "this service needs a bearer token: send the metadata `authorization: Bearer "
                "$SOLRL_TOKEN`",
            )

        self._refuse = grpc.stream_stream_rpc_method_handler(refuse)

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], call: grpc.HandlerCallDetails
    ) -> Any:
        sent = dict(call.invocation_metadata or ()).get("authorization", "")
        if call.method.startswith("/grpc.health.v1.Health/") or hmac.compare_digest(
            str(sent).encode(), self._expected
        ):
            return continuation(call)
        return self._refuse


def _ask(request: pb.ExploreRequest, config: Config) -> Ask:
    policy: Policy = "current"
    match request.WhichOneof("policy"):
        case "base":
            policy = "base"
        case "policy_version":
            if request.policy_version < 0:
                raise InputError(
                    f"policy_version = {request.policy_version} is negative; set `base` for the "
                    "base model, or neither for the version in force"
                )
            policy = request.policy_version
    return Ask(
        prompt=request.prompt,
        seeds=tuple(request.seeds),
        keep=request.keep if request.HasField("keep") else config.explore.keep,
        steps=request.steps if request.HasField("steps") else config.explore.steps,
        guidance=request.guidance if request.HasField("guidance") else 1.0,
        reward=request.reward if request.HasField("reward") else config.reward.name,
        policy=policy,
    )


def _candidate(scored: Scored, *, thumbnails: bool) -> pb.CandidateEvent:
    return pb.CandidateEvent(
        candidate=scored.candidate,
        seed=scored.seed,
        proxy_reward=scored.proxy_reward,
        error=scored.error,
        thumbnail_png=png(scored.image) if thumbnails else b"",
    )


def _selection(ask: Ask, outcome: Outcome) -> pb.Selection:
    return pb.Selection(
        kept=[
            pb.Kept(
                candidate=index,
                seed=outcome.candidates[index].seed,
                rank=TO_RANK[rank],
                proxy_reward=outcome.candidates[index].proxy_reward,
            )
            for index, rank in outcome.kept
        ],
        excluded=outcome.excluded,
        policy_version=outcome.version,
        adapter_sha256=outcome.sha256,
        precision=outcome.precision,
        solver=outcome.solver,
        steps=ask.steps,
        nfe=outcome.nfe,
        reward=ask.reward,
        reward_version=outcome.reward_version,
        seconds_explore=outcome.seconds_explore,
        seconds_score=outcome.seconds_score,
        prompt_truncated=outcome.truncated,
    )


def _layer(layer: dict[str, Any]) -> pb.Layer:
    return pb.Layer(
        name=layer["name"],
        precision=layer["precision"],
        reason=layer["reason"],
        multiply_adds=layer["multiply_adds"],
        bytes=layer["bytes"],
    )


def png(image: NDArray[np.uint8]) -> bytes:
    """uint8 [H,W,3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then finish calls for a few seconds."""
    stopping = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: stopping.set())
    services, replica = config.services, replica_id("explorer")
    host = os.environ.get("SOLRL_BIND", "127.0.0.1")
    _, port = split_address(services.explorer)
    beside = port + 1 if port_is_free(host, port + 1) else free_ports(1)[0]
    metrics_port = int(os.environ.get("SOLRL_METRICS_PORT", beside))
    for taken in (port, metrics_port):
        if not port_is_free(host, taken):
            raise ConfigError(
                f"port {taken} on {host} is taken by another program; stop that one, or name "
                f"another port (services.explorer = {services.explorer!r}, SOLRL_METRICS_PORT)"
            )
    metrics = Metrics("explorer")
    triton = TritonClient(services.triton)
    people = RewardClient(services.reward, timeout=services.call_timeout, priority="people")
    runs = RewardClient(services.reward, timeout=services.call_timeout, priority="run")
    states = health.HealthServicer()

    def show(ready: bool) -> None:
        metrics.gauge("solrl_ready").set(ready)
        for name in ("", SERVICE):
            states.set(name, _serving(ready))

    neighbours = Neighbours(
        services, replica=replica, triton=triton, reward=runs, metrics=metrics, changed=show
    )
    queue_loop = QueueLoop(
        services,
        replica=replica,
        triton=triton,
        reward=runs,
        metrics=metrics,
        ready=lambda: not neighbours.problems,
    )
    show(False)
    states.set(ALIVE, _serving(True))
    gateway = Gateway(config, triton=triton, reward=people, neighbours=neighbours, metrics=metrics)
    server = build_server(gateway, states)
    if server.add_insecure_port(f"{host}:{port}") == 0:
        raise ConfigError(f"cannot listen on {host} port {port}")
    start_http_server(metrics_port, addr=host, registry=metrics.registry)
    server.start()
    logger.info("gRPC %s:%d, metrics http://%s:%d/metrics", host, port, host, metrics_port)
    neighbours.start()
    queue_loop.start()
    try:
        while not stopping.wait(1.0):
            if not (neighbours.alive and queue_loop.alive):
                raise UnavailableError("a thread of the gateway died; the log above says why")
    finally:
        states.enter_graceful_shutdown()
        stopped = server.stop(DRAIN)
        queue_loop.stop()
        neighbours.stop()
        stopped.wait()


def build_server(gateway: Gateway, states: health.HealthServicer) -> grpc.Server:
    """The gRPC server, not yet bound: the service, health, reflection, limits, the token."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    # Health and status must be answered while every exploration slot is taken.
    server = grpc.server(
        ThreadPoolExecutor(CALLS + 8, "grpc"),
        interceptors=[TokenInterceptor(token)] if token else [],
        options=[*message_options(), ("grpc.so_reuseport", 0)],
    )
    explorer_pb2_grpc.add_ExplorerServicer_to_server(gateway, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _serving(yes: bool) -> int:
    response = health_pb2.HealthCheckResponse
    return int(response.SERVING if yes else response.NOT_SERVING)
