"""Redis Streams as the run uses them: bounded, acknowledged after the effect, reclaimed when idle.

Keys of a run: `<run>:prompts` and `<run>:selected`, each with one consumer group, `<run>:dead`
for entries that failed too often. Keys of a stack: `solrl:announcements`, `solrl:active-run`,
`solrl:replica:<kind>:<id>`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import redis
from pydantic import ValidationError
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from solrl.errors import BusyError, UnavailableError
from solrl.records import Announcement, Record, ReplicaState

R = TypeVar("R", bound=Record)

ANNOUNCEMENTS = "solrl:announcements"
ACTIVE_RUN = "solrl:active-run"
#: Seconds a replica's registration lives without being renewed.
REPLICA_TTL = 15
#: Appends unless the stream is full, in one step: two writers must not both find the last place.
PUT = """
if redis.call("XLEN", KEYS[1]) >= tonumber(ARGV[1]) then return nil end
return redis.call("XADD", KEYS[1], "*", "json", ARGV[2])
"""


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Turns what the client raises inside into UnavailableError naming the address."""
    try:
        yield
    except redis.RedisError as error:
        raise UnavailableError(
            f"Redis at {url} does not answer ({error}); start it with `solrl up`, "
            "or point services.redis at a running one"
        ) from error


def connect(url: str, *, timeout: float = 10.0) -> redis.Redis:
    """A client whose every call has a deadline and which reconnects after a restart.

    Raises UnavailableError naming the address when nobody answers.
    """
    client = redis.Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=timeout,
        socket_connect_timeout=min(timeout, 5.0),
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), retries=6),
    )
    with answering(url):
        client.ping()
    return client


@dataclass(frozen=True)
class Delivery(Generic[R]):
    """An entry read and not yet acknowledged."""

    entry_id: str
    record: R


class Stream(Generic[R]):
    """One stream with one consumer group.

    `limit` bounds unread plus pending entries: `put` raises BusyError instead of trimming, so
    nothing unread is ever lost. Acknowledged entries are deleted. An entry delivered more than
    `max_deliveries` times, or one that does not parse, moves to the dead-letter stream.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        run: str,
        name: str,
        record: type[R],
        limit: int = 1024,
        idle_seconds: float = 60.0,
        max_deliveries: int = 5,
    ) -> None:
        self._redis = client
        self._put = client.register_script(PUT)
        self._record = record
        self._limit = limit
        self._idle_ms = int(idle_seconds * 1000)
        self._max_deliveries = max_deliveries
        self.key = f"{run}:{name}"
        self.dead_key = f"{run}:dead"
        self.group = f"{name}-readers"
        self._cursor = "0-0"
        self.ensure_group()

    def ensure_group(self) -> None:
        try:
            self._redis.xgroup_create(self.key, self.group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    def __len__(self) -> int:
        return int(self._redis.xlen(self.key))

    def put(self, record: R) -> str:
        """Append; BusyError when `limit` entries are waiting."""
        entry_id = self._put(keys=[self.key], args=[self._limit, record.model_dump_json()])
        if entry_id is None:
            raise BusyError(
                f"queue {self.key} holds {self._limit} entries, its bound; "
                "its reader is slow or gone"
            )
        return str(entry_id)

    def take(self, consumer: str, *, count: int = 1, wait: float = 1.0) -> list[Delivery[R]]:
        """Entries whose reader went silent first, else new ones; [] after `wait` seconds."""
        try:
            return self._take(consumer, count, wait)
        except redis.ResponseError as error:
            # The server was replaced by an empty one, or the learner cleared the stream, perhaps
            # while this reader was blocked on it; the learner will feed it again.
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            self.ensure_group()
            return []

    def _take(self, consumer: str, count: int, wait: float) -> list[Delivery[R]]:
        # One call looks at a bounded part of what is pending; the next goes on from there.
        claimed: Any = self._redis.xautoclaim(
            self.key,
            self.group,
            consumer,
            min_idle_time=self._idle_ms,
            start_id=self._cursor,
            count=count,
        )
        self._cursor = claimed[0]
        entries = [entry for entry in claimed[1] if entry[1]]
        if not entries:
            read: Any = self._redis.xreadgroup(
                self.group, consumer, {self.key: ">"}, count=count, block=max(1, int(wait * 1000))
            )
            # redis-py answers a list of pairs (RESP2) or a dict of lists (RESP3).
            if isinstance(read, dict):
                entries = [e for batch in read.values() for chunk in batch for e in chunk]
            else:
                entries = [e for _, batch in read or [] for e in batch]
        return list(self._accept(entries))

    def _accept(self, entries: list[tuple[str, dict[str, str]]]) -> Iterator[Delivery[R]]:
        for entry_id, fields in entries:
            pending: Any = self._redis.xpending_range(
                self.key, self.group, min=entry_id, max=entry_id, count=1
            )
            deliveries = pending[0]["times_delivered"] if pending else 1
            if deliveries > self._max_deliveries:
                self.bury(entry_id, fields, f"delivered {deliveries} times without success")
                continue
            try:
                yield Delivery(entry_id, self._record.model_validate_json(fields.get("json", "")))
            except ValidationError as error:
                self.bury(entry_id, fields, str(error))

    def bury(self, entry_id: str, fields: dict[str, str], reason: str) -> None:
        """Move to the dead-letter stream; the rest flows on."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(
                self.dead_key,
                {"json": fields.get("json", ""), "from": self.key, "reason": reason[:2000]},
            )
            pipe.xack(self.key, self.group, entry_id)
            pipe.xdel(self.key, entry_id)
            pipe.execute()

    def done(self, entry_id: str) -> None:
        """Acknowledge and delete: the effect is durable."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.xack(self.key, self.group, entry_id)
            pipe.xdel(self.key, entry_id)
            pipe.execute()

    def clear(self) -> None:
        """Drop everything waiting; the learner does it when it starts or resumes a run."""
        self._redis.delete(self.key)
        self.ensure_group()


@dataclass(frozen=True)
class Backlog:
    """What waits in a run's streams: entries, and the age of the oldest in seconds, by stream."""

    entries: dict[str, int]
    oldest: dict[str, float]
    dead: int


def backlog(
    client: redis.Redis, run: str, names: Sequence[str] = ("prompts", "selected")
) -> Backlog:
    """Look without taking; ages are by the server's own clock."""
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.xlen(f"{run}:dead")
        for name in names:
            pipe.xlen(f"{run}:{name}")
            pipe.xrange(f"{run}:{name}", count=1)
        answers: list[Any] = pipe.execute()
    (seconds, micro), dead, *rest = answers
    now = seconds + micro / 1e6
    oldest = {
        # An entry's id begins with the milliseconds of its time.
        name: max(0.0, now - int(first[0][0].partition("-")[0]) / 1000) if first else 0.0
        for name, first in zip(names, rest[1::2], strict=True)
    }
    return Backlog(dict(zip(names, rest[::2], strict=True)), oldest, dead)


def announce(client: redis.Redis, announcement: Announcement) -> None:
    client.xadd(
        ANNOUNCEMENTS, {"json": announcement.model_dump_json()}, maxlen=1000, approximate=True
    )


def latest_announcement(client: redis.Redis) -> Announcement | None:
    entries: Any = client.xrevrange(ANNOUNCEMENTS, count=1)
    return Announcement.model_validate_json(entries[0][1]["json"]) if entries else None


def register(client: redis.Redis, state: ReplicaState) -> None:
    """(Re)write a replica's registration; call at least every REPLICA_TTL / 3 seconds."""
    client.set(f"solrl:replica:{state.kind}:{state.id}", state.model_dump_json(), ex=REPLICA_TTL)


def unregister(client: redis.Redis, state: ReplicaState) -> None:
    client.delete(f"solrl:replica:{state.kind}:{state.id}")


def replicas(client: redis.Redis) -> list[ReplicaState]:
    """Registered replicas, sorted by kind and id.

    UnavailableError for a registration that cannot be read, as of another version of solrl.
    """
    # A scan may name a key twice.
    keys = sorted(set(cast(Iterator[str], client.scan_iter("solrl:replica:*", count=100))))
    values = cast(list[str | None], client.mget(keys)) if keys else []
    states = []
    for key, value in zip(keys, values, strict=True):
        try:
            states += [ReplicaState.model_validate_json(value)] if value else []
        except ValidationError as error:
            raise UnavailableError(
                f"{key} in Redis cannot be read; is that replica of another version of solrl? It "
                f"is forgotten {REPLICA_TTL} s after it stopped. {error}"
            ) from error
    return states


def hold_stack(
    client: redis.Redis, run: str, owner: str, *, ttl: int = 30, taking_over: bool = False
) -> None:
    """Take or renew the stack for one run; BusyError naming the holder when it is taken.

    `taking_over` replaces another owner of the same run: for a learner that has the lock of the
    run's directory, which proves the one before dead.
    """
    value = f"{run} ({owner})"
    while not client.set(ACTIVE_RUN, value, nx=True, ex=ttl):
        holder = cast(str | None, client.get(ACTIVE_RUN))
        if holder is None:
            continue  # it ended just now
        if holder == value or (taking_over and holder.startswith(f"{run} (")):
            client.set(ACTIVE_RUN, value, ex=ttl)
            return
        raise BusyError(
            f"the stack is training run {holder}; wait for it, stop it, or start another stack "
            f"with `solrl up` (a dead learner's hold ends after {ttl} s)"
        )


def release_stack(client: redis.Redis, run: str, owner: str) -> None:
    if client.get(ACTIVE_RUN) == f"{run} ({owner})":
        client.delete(ACTIVE_RUN)


def wait_for(
    client: redis.Redis, *, version: int, sha256: str, timeout: float
) -> list[ReplicaState]:
    """Block until every registered replica serves (version, sha256), at least one a kind.

    Raises UnavailableError naming those that do not, or the refusal of one.
    """
    deadline = time.monotonic() + timeout
    while True:
        states = replicas(client)
        missing = [
            f"{s.kind} {s.id} at {s.address}: {s.error or f'serves version {s.version}'}"
            for s in states
            if (s.version, s.sha256) != (version, sha256)
        ]
        missing += [
            f"no {kind} is registered"
            for kind in ("explorer", "regenerator")
            if not any(s.kind == kind for s in states)
        ]
        if not missing:
            return states
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"adapter version {version} is not bound after {timeout:.0f} s: "
                + "; ".join(missing)
            )
        time.sleep(0.05)
