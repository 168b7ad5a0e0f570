"""Client of the explorer's gRPC gateway (proto/solrl/v1/explorer.proto)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

import grpc

from solrl.clients._proto import explorer_pb2 as pb
from solrl.clients._proto import explorer_pb2_grpc
from solrl.clients.http import TOKEN_VARIABLE
from solrl.errors import (
    AdapterError,
    BusyError,
    ConfigError,
    InputError,
    SolrlError,
    UnavailableError,
    VersionError,
)
from solrl.selection import Rank

T = TypeVar("T")

Policy = int | Literal["base", "current"]

#: Environment variable: largest gRPC message in bytes, in and out, read by client and gateway.
LIMIT_VARIABLE = "SOLRL_GRPC_MESSAGE_LIMIT"
DEFAULT_LIMIT = 64 * 1024 * 1024
#: Trailing metadata with the name of the error's class.
ERROR_KEY = "solrl-error"

ERRORS: dict[str, type[SolrlError]] = {
    kind.__name__: kind
    for kind in (InputError, VersionError, AdapterError, BusyError, UnavailableError)
}
#: For errors that gRPC itself makes; the rest may pass.
BY_STATUS: dict[grpc.StatusCode, type[SolrlError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InputError,
    grpc.StatusCode.UNAUTHENTICATED: InputError,
    grpc.StatusCode.UNIMPLEMENTED: InputError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BusyError,
}

RANKS: dict[int, Rank] = {pb.RANK_BEST: "best", pb.RANK_WORST: "worst"}


def message_options() -> list[tuple[str, int]]:
    """gRPC channel or server options for the message limit. Raises ConfigError."""
    text = os.environ.get(LIMIT_VARIABLE, str(DEFAULT_LIMIT))
    if not text.isdecimal() or not 1024 <= int(text) < 2**31:
        raise ConfigError(f"{LIMIT_VARIABLE} = {text!r} is not a number of bytes, 1024 to 2^31 - 1")
    return [
        ("grpc.max_send_message_length", int(text)),
        ("grpc.max_receive_message_length", int(text)),
    ]


@dataclass(frozen=True)
class CandidateEvent:
    """One of the N, scored; `proxy_reward` None = excluded, and `error` says why."""

    candidate: int
    seed: int
    proxy_reward: float | None
    error: str
    thumbnail_png: bytes | None


@dataclass(frozen=True)
class Kept:
    """One of the K."""

    candidate: int
    seed: int
    rank: Rank
    proxy_reward: float


@dataclass(frozen=True)
class SelectionEvent:
    """The K kept, best first then worst; version None = base; seconds of computing."""

    kept: tuple[Kept, ...]
    excluded: int
    policy_version: int | None
    adapter_sha256: str
    precision: str
    solver: str
    steps: int
    nfe: int
    reward: str
    reward_version: str
    seconds_explore: float
    seconds_score: float
    prompt_truncated: bool


@dataclass(frozen=True)
class AdapterInfo:
    run: str
    epoch: int
    version: int
    sha256: str


@dataclass(frozen=True)
class LoadedAdapter:
    """What a reload answers; `seconds` excludes the canary."""

    adapter: AdapterInfo
    modules_bound: int
    modules_expected: int
    seconds: float
    canary: str


@dataclass(frozen=True)
class LayerInfo:
    name: str
    precision: str
    reason: str
    multiply_adds: int
    bytes: int


@dataclass(frozen=True)
class ExplorerStatus:
    """What the explorer serves; `current` None = base; `problems` is empty when all is well."""

    replica: str
    base_id: str
    base_sha256: str
    precision: str
    precision_reason: str
    fp4_share: float
    solver: str
    micro_batch: int
    current: AdapterInfo | None
    held_versions: tuple[int, ...]
    waiting: int
    problems: tuple[str, ...]
    layers: tuple[LayerInfo, ...]


class ExplorerClient:
    """One gateway at `target` (host:port). Thread-safe; close it, or use it as a context manager.

    `timeout` is the deadline of a whole call in seconds. `token` None takes SOLRL_TOKEN.
    Raises InputError, VersionError, AdapterError, BusyError as the gateway says, and
    UnavailableError for what may pass.
    """

    def __init__(self, target: str, *, timeout: float, token: str | None = None) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        self.target = target
        self._timeout = timeout
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        # A proxy set for the internet must not see calls between services.
        options = [*message_options(), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.insecure_channel(target, options=options)
        self._stub = explorer_pb2_grpc.ExplorerStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def explore(
        self,
        prompt: str,
        seeds: Sequence[int],
        *,
        keep: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        policy: Policy = "current",
        reward: str | None = None,
        thumbnails: bool = False,
    ) -> Iterator[CandidateEvent | SelectionEvent]:
        """Candidates as they are scored, then one selection. None takes the gateway's setting.

        Closing the iterator cancels the call.
        """
        # Beyond the wire's 64 bits a seed cannot even be sent; the gateway knows the true range.
        if any(not -(2**63) <= seed < 2**63 for seed in seeds):
            raise InputError("a seed is out of range: 0 <= seed < 2**53")
        request = pb.ExploreRequest(
            prompt=prompt,
            seeds=seeds,
            keep=keep,
            steps=steps,
            guidance=guidance,
            reward=reward,
            thumbnails=thumbnails,
        )
        if policy == "base":
            request.base = True
        elif policy != "current":
            request.policy_version = policy
        call = self._stub.Explore(request, timeout=self._timeout, metadata=self._metadata)
        return self._events(call, tuple(seeds))

    def load_adapter(self, folder: str) -> LoadedAdapter:
        """Bind an adapter folder by hand."""
        request = pb.LoadAdapterRequest(path=folder)
        answer = self._unary(self._stub.LoadAdapter, request)
        return LoadedAdapter(
            adapter=_adapter(answer.adapter),
            modules_bound=answer.modules_bound,
            modules_expected=answer.modules_expected,
            seconds=answer.seconds,
            canary=answer.canary,
        )

    def status(self, *, layers: bool = False) -> ExplorerStatus:
        answer = self._unary(self._stub.Status, pb.StatusRequest(layers=layers))
        return ExplorerStatus(
            replica=answer.replica,
            base_id=answer.base_id,
            base_sha256=answer.base_sha256,
            precision=answer.precision,
            precision_reason=answer.precision_reason,
            fp4_share=answer.fp4_share,
            solver=answer.solver,
            micro_batch=answer.micro_batch,
            current=_adapter(answer.current) if answer.HasField("current") else None,
            held_versions=tuple(answer.held_versions),
            waiting=answer.waiting,
            problems=tuple(answer.problems),
            layers=tuple(
                LayerInfo(x.name, x.precision, x.reason, x.multiply_adds, x.bytes)
                for x in answer.layers
            ),
        )

    def _unary(self, method: Callable[..., T], request: object) -> T:
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def _events(
        self, call: grpc.CallIterator[pb.ExploreEvent], seeds: tuple[int, ...]
    ) -> Iterator[CandidateEvent | SelectionEvent]:
        seen: dict[int, float | None] = {}
        try:
            for event in call:
                if event.HasField("candidate"):
                    candidate = self._candidate(event.candidate, seeds, seen)
                    seen[candidate.candidate] = candidate.proxy_reward
                    yield candidate
                else:
                    yield self._selection(event.selection, seeds, seen)
        except grpc.RpcError as error:
            raise self._error(error) from error
        finally:
            # Left early, the call must end at the gateway too; after its end this does nothing.
            call.cancel()  # type: ignore[no-untyped-call]

    def _candidate(
        self, event: pb.CandidateEvent, seeds: tuple[int, ...], seen: dict[int, float | None]
    ) -> CandidateEvent:
        index = event.candidate
        if not 0 <= index < len(seeds) or seeds[index] != event.seed or index in seen:
            raise self._nonsense(f"candidate {index} with seed {event.seed} was not asked for")
        reward = event.proxy_reward if event.HasField("proxy_reward") else None
        if reward is not None and not math.isfinite(reward):
            raise self._nonsense(f"candidate {index} has the reward {reward}")
        return CandidateEvent(index, event.seed, reward, event.error, event.thumbnail_png or None)

    def _selection(
        self, event: pb.Selection, seeds: tuple[int, ...], seen: dict[int, float | None]
    ) -> SelectionEvent:
        if len(seen) != len(seeds):
            raise self._nonsense(f"{len(seen)} candidates came for {len(seeds)} seeds")
        for one in event.kept:
            if one.rank not in RANKS or seen.get(one.candidate) != one.proxy_reward:
                raise self._nonsense(f"candidate {one.candidate} is kept, but was not seen so")
        return SelectionEvent(
            kept=tuple(
                Kept(one.candidate, one.seed, RANKS[one.rank], one.proxy_reward)
                for one in event.kept
            ),
            excluded=event.excluded,
            policy_version=event.policy_version if event.HasField("policy_version") else None,
            adapter_sha256=event.adapter_sha256,
            precision=event.precision,
            solver=event.solver,
            steps=event.steps,
            nfe=event.nfe,
            reward=event.reward,
            reward_version=event.reward_version,
            seconds_explore=event.seconds_explore,
            seconds_score=event.seconds_score,
            prompt_truncated=event.prompt_truncated,
        )

    def _nonsense(self, what: str) -> UnavailableError:
        return UnavailableError(
            f"the explorer at {self.target} gave an answer that cannot be used: {what}"
        )

    def _error(self, error: grpc.RpcError) -> SolrlError:
        """A gRPC error as the gateway's own, or as what its status code means."""
        code, details = error.code(), error.details() or ""
        named = next((d.value for d in error.trailing_metadata() or () if d.key == ERROR_KEY), None)
        kind = ERRORS.get(str(named)) or BY_STATUS.get(code, UnavailableError)
        text = f"the explorer at {self.target}: {details}"
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            kind = InputError
            text += f"; raise {LIMIT_VARIABLE} (bytes, of client and gateway) or send less"
        elif code is grpc.StatusCode.UNAVAILABLE and named is None:
            text += "; start it with `solrl up`, or correct services.explorer"
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            text += f" (deadline {self._timeout:g} s)"
        return kind(text)


def _adapter(message: pb.Adapter) -> AdapterInfo:
    return AdapterInfo(message.run, message.epoch, message.version, message.sha256)
