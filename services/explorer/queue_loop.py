"""Explores what the learner asks for on the queue, and answers with selections."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import redis
from pydantic import ValidationError

from services.explorer.explore import Ask, Outcome, Scored, count, explore
from services.explorer.triton_client import CancelledCall, TritonClient
from solrl import queue
from solrl.clients.reward import RewardClient
from solrl.config import ServiceSection
from solrl.errors import BusyError, InputError, SolrlError, UnavailableError, VersionError
from solrl.metrics import Metrics
from solrl.queue import Delivery, Stream
from solrl.records import PromptRecord, SelectionRecord
from solrl.seeds import candidate_seed

#: While one prompt's last candidates are scored the next one's are generated.
IN_FLIGHT = 2
#: Seconds of silence after which another explorer takes over an entry.
IDLE = 15.0
#: How often entries in flight are shown to be alive, and a stop or a new run is noticed.
TURN = 0.5

logger = logging.getLogger("solrl.explorer.queue")


@dataclass(frozen=True)
class Streams:
    run: str
    epoch: int
    prompts: Stream[PromptRecord]
    selected: Stream[SelectionRecord]


class QueueLoop:
    """Thread that follows the announced run. An entry is done only when its selection is queued.

    What fails for a while stays pending and is taken again later, by this or another explorer;
    what can never work goes to the dead letters with the reason. While `ready()` is false nothing
    is taken, so that a neighbour's absence uses up no deliveries.
    """

    def __init__(
        self,
        services: ServiceSection,
        *,
        replica: str,
        triton: TritonClient,
        reward: RewardClient,
        metrics: Metrics,
        ready: Callable[[], bool],
    ) -> None:
        self._services = services
        self._replica = replica
        self._triton = triton
        self._reward = reward
        self._metrics = metrics
        self._ready = ready
        self._streams: Streams | None = None
        self._flying: dict[str, Future[None]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop at the next solver step; entries in flight stay pending for others."""
        self._stop.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        client: redis.Redis | None = None
        problem = ""
        with ThreadPoolExecutor(IN_FLIGHT, "explore") as pool:
            while not self._stop.is_set():
                try:
                    client = client or queue.connect(self._services.redis)
                    self._turn(client, pool)
                    problem = ""
                # A foreign announcement does not parse; the next one may.
                except (redis.RedisError, UnavailableError, ValidationError) as error:
                    if str(error) != problem:
                        logger.warning("Redis at %s: %s; retrying", self._services.redis, error)
                    problem = str(error)
                    self._stop.wait(1.0)

    def _turn(self, client: redis.Redis, pool: ThreadPoolExecutor) -> None:
        streams = self._follow(client)
        self._flying = {key: work for key, work in self._flying.items() if not work.done()}
        if streams is None or not self._ready():
            self._stop.wait(TURN)
        elif len(self._flying) == IN_FLIGHT:
            wait(self._flying.values(), timeout=TURN, return_when=FIRST_COMPLETED)
        else:
            for delivery in streams.prompts.take(self._replica, wait=TURN):
                if delivery.entry_id not in self._flying:
                    self._flying[delivery.entry_id] = pool.submit(self._work, streams, delivery)
        if streams is not None and self._flying:
            # Resets their idle time and counts no delivery.
            client.xclaim(
                streams.prompts.key,
                streams.prompts.group,
                self._replica,
                min_idle_time=0,
                message_ids=list(self._flying),
                justid=True,
            )

    def _follow(self, client: redis.Redis) -> Streams | None:
        """The streams of the announced run; None before there is one."""
        announced = queue.latest_announcement(client)
        if announced is None:
            return None
        now = self._streams
        if now is None or (now.run, now.epoch) != (announced.run, announced.epoch):
            logger.info("following run %s, epoch %d", announced.run, announced.epoch)
            run = announced.run
            self._streams = Streams(
                run,
                announced.epoch,
                Stream(client, run=run, name="prompts", record=PromptRecord, idle_seconds=IDLE),
                Stream(client, run=run, name="selected", record=SelectionRecord),
            )
        return self._streams

    def _work(self, streams: Streams, delivery: Delivery[PromptRecord]) -> None:
        """Explore one entry to its end, whatever that is. Runs in the pool."""
        record = delivery.record
        name = f"{record.run} iteration {record.iteration} slot {record.slot} ({record.prompt!r})"
        try:
            if record.epoch < streams.epoch:
                logger.info("%s is of epoch %d, long gone; dropped", name, record.epoch)
            else:
                in_flight = self._metrics.gauge("solrl_requests_in_flight", lane="run")
                with in_flight.track_inprogress():
                    self._answer(streams, record)
                logger.info("%s: selected", name)
            self._insist(lambda: streams.prompts.done(delivery.entry_id))
        except CancelledCall:
            logger.info("%s: stopped; it stays pending", name)
        except (SolrlError, redis.RedisError) as error:
            self._metrics.counter("solrl_errors_total", kind=type(error).__name__).inc()
            if isinstance(error, InputError) and not isinstance(error, VersionError):
                logger.error("%s can never be explored: %s", name, error)
                fields, reason = {"json": record.model_dump_json()}, str(error)
                self._insist(lambda: streams.prompts.bury(delivery.entry_id, fields, reason))
            else:
                logger.error("%s failed and stays pending: %s", name, error)
        except Exception:
            # A future's exception would be seen by nobody.
            self._metrics.counter("solrl_errors_total", kind="InternalError").inc()
            logger.exception("%s failed and stays pending", name)

    def _answer(self, streams: Streams, record: PromptRecord) -> None:
        self._wait_for_version(record)
        outcome = self._explore(record)
        count(self._metrics, "run", outcome)
        selection = selection_record(record, outcome, self._replica)
        self._insist(lambda: streams.selected.put(selection))

    def _wait_for_version(self, record: PromptRecord) -> None:
        """Return when our Triton serves exactly the adapter the record was made for."""
        wanted = (record.policy_version, record.adapter_sha256)
        deadline = time.monotonic() + self._services.reload_timeout
        while True:
            current = self._triton.status()["current"] or {}
            if (current.get("version"), current.get("sha256")) == wanted:
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"Triton at {self._triton.target} serves version {current.get('version')} "
                    f"({str(current.get('sha256'))[:12]}), the prompt is for version "
                    f"{wanted[0]} ({wanted[1][:12]}), and no reload came in "
                    f"{self._services.reload_timeout:.0f} s"
                )
            if self._stop.wait(0.1):
                raise CancelledCall("the explorer is being stopped")

    def _explore(self, record: PromptRecord) -> Outcome:
        seeds = tuple(
            candidate_seed(record.run_seed, "explore", record.iteration, record.slot, i)
            for i in range(record.candidates)
        )
        ask = Ask(
            prompt=record.prompt,
            seeds=seeds,
            keep=record.keep,
            steps=record.steps,
            reward=record.reward,
            policy=record.policy_version,
            sha256=record.adapter_sha256,
            request_id=record.request_id,
        )
        *_, outcome = explore(
            ask,
            triton=self._triton,
            reward=self._reward,
            retry_for=self._services.retry_for,
            timeout=self._services.selection_timeout,
            cancelled=self._stop.is_set,
        )
        assert not isinstance(outcome, Scored)
        return outcome

    def _insist(self, act: Callable[[], object]) -> None:
        """Do it, however long Redis is away or its queue is full; CancelledCall on stop."""
        while True:
            try:
                act()
            except (redis.RedisError, BusyError) as error:
                logger.warning("waiting for Redis: %s", error)
            else:
                return
            if self._stop.wait(1.0):
                raise CancelledCall("the explorer is being stopped")


def selection_record(record: PromptRecord, outcome: Outcome, replica: str) -> SelectionRecord:
    """The answer to `record`. `outcome` comes from the version it names."""
    assert outcome.version == record.policy_version
    return SelectionRecord(
        run=record.run,
        epoch=record.epoch,
        iteration=record.iteration,
        slot=record.slot,
        request_id=record.request_id,
        trace_id=record.trace_id,
        prompt=record.prompt,
        prompt_index=record.prompt_index,
        candidates=outcome.candidates,
        policy_version=outcome.version,
        adapter_sha256=outcome.sha256,
        precision=outcome.precision,
        steps=record.steps,
        solver=outcome.solver,
        reward=record.reward,
        reward_version=outcome.reward_version,
        seconds_explore=outcome.seconds_explore,
        seconds_score=outcome.seconds_score,
        replica=replica,
    )
