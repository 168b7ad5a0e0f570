"""One thread that owns a model, behind a bounded queue where a run's requests go first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Generic, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request

from solrl.clients.http import Priority
from solrl.errors import BusyError, UnavailableError
from solrl.metrics import Metrics

S = TypeVar("S")
R = TypeVar("R")

#: Reloads before a run's requests before people's; the stop mark comes after all work.
Lane = Literal["reload"] | Priority
ORDER: Mapping[str, int] = {"reload": 0, "run": 1, "people": 2, "stop": 3}

#: Seconds after a run's last request in which it is taken to go on.
RUN_QUIET = 120.0

logger = logging.getLogger("solrl.worker")


class Pace:
    """Bounds the share of the time that people's work takes while a run goes on.

    After t seconds of it, the next begins t (1/share - 1) seconds later at the earliest.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest = 1 / share - 1
        self._clock = clock
        self._run_seen = -math.inf
        self._free_at = -math.inf

    def run_seen(self) -> None:
        self._run_seen = self._clock()

    def spent(self, seconds: float) -> None:
        """People's work took this long."""
        now = self._clock()
        if now - self._run_seen <= RUN_QUIET:
            self._free_at = max(self._free_at, now) + seconds * self._rest

    def wait(self) -> float:
        """Seconds until people's work may begin; 0 without a run."""
        return max(0.0, min(self._free_at, self._run_seen + RUN_QUIET) - self._clock())


class Worker(Generic[S]):
    """Runs `setup` once, then tasks on what it returned, one at a time.

    A request holds a place (`admit`) and submits small tasks one after another, so that between
    two tasks of a person's large request those of a run get in. While a run goes on, people's
    tasks take at most `people_share` of the time.
    """

    def __init__(
        self,
        *,
        name: str,
        setup: Callable[[], S],
        places: Mapping[Priority, int],
        people_share: float,
        metrics: Metrics,
    ) -> None:
        self.failure: Exception | None = None
        self._setup = setup
        self._places = dict(places)
        self._taken: dict[Priority, int] = dict.fromkeys(places, 0)
        self._counting = threading.Lock()
        self._ready = False
        self._stopping = self._ended = False
        self._number = itertools.count()
        self._tasks: list[tuple[int, int, Callable[[S], None] | None]] = []
        self._changed = threading.Condition()
        self._pace = Pace(people_share)
        self._busy = metrics.counter("solrl_busy_seconds_total")
        for lane in places:
            gauge = metrics.gauge("solrl_requests_in_flight", lane=lane)
            gauge.set_function(partial(self.in_flight, lane))
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._on_failure: Callable[[], None] = lambda: None

    def start(self, *, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when `setup` raised; the error is then in `failure`."""
        self._on_failure = on_failure
        self._thread.start()

    def stop(self) -> None:
        """Finish what is queued, then end the thread; one still in `setup` is abandoned."""
        self._stopping = True
        self._put("stop", None)
        if self._ready:
            self._thread.join()

    @property
    def problem(self) -> str | None:
        """Why tasks cannot run now; None when they can."""
        if self.failure is not None:
            return f"the model could not be loaded: {self.failure}"
        if not self._ready:
            return "the model is being loaded"
        return None if self._thread.is_alive() else "the worker thread has ended"

    def in_flight(self, lane: Priority) -> int:
        """Requests that hold a place, the running one included."""
        return self._taken[lane]

    @contextmanager
    def admit(self, lane: Priority) -> Iterator[None]:
        """Hold a place. BusyError when all are taken, UnavailableError while nothing can run."""
        if (problem := self.problem) is not None:
            raise UnavailableError(f"{problem}; try again shortly")
        with self._counting:
            if self._taken[lane] >= self._places[lane]:
                raise BusyError(
                    f"{self._taken[lane]} {lane} requests are waiting or running, as many as are "
                    "allowed; try again shortly"
                )
            self._taken[lane] += 1
        try:
            yield
        finally:
            with self._counting:
                self._taken[lane] -= 1

    def submit(self, lane: Lane, task: Callable[[S], R]) -> Future[R]:
        """Queue one task; tasks of a lane run in the order they came.

        The future of one that comes too late, after the end of the thread, has UnavailableError.
        """
        future: Future[R] = Future()

        def run(state: S) -> None:
            if not future.set_running_or_notify_cancel():
                return
            begin = time.perf_counter()
            try:
                result = task(state)
            except Exception as error:  # goes to whoever waits; the thread lives on
                future.set_exception(error)
            else:
                future.set_result(result)
            seconds = time.perf_counter() - begin
            self._busy.inc(seconds)
            self._account(lane, seconds)

        self._account(lane, 0.0)
        if not self._put(lane, run):
            future.set_exception(UnavailableError("the worker thread has ended; try again shortly"))
        return future

    @contextmanager
    def charged(self, lane: Priority) -> Iterator[None]:
        """Around work for a request that is done outside the thread, such as decoding files."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._account(lane, time.perf_counter() - begin)

    def _account(self, lane: Lane, seconds: float) -> None:
        with self._changed:
            if lane == "run":
                self._pace.run_seen()
            elif lane == "people":
                self._pace.spent(seconds)

    def _put(self, lane: str, run: Callable[[S], None] | None) -> bool:
        """Whether it will be run."""
        with self._changed:
            heapq.heappush(self._tasks, (ORDER[lane], next(self._number), run))
            self._changed.notify()
            return not self._ended

    def _next(self) -> Callable[[S], None] | None:
        """The next task, when it may begin; None is the stop mark."""
        with self._changed:
            while True:
                first = self._tasks[0][0] if self._tasks else None
                paced = first == ORDER["people"] and not self._stopping
                wait = self._pace.wait() if paced else 0.0
                if first is not None and wait == 0.0:
                    run = heapq.heappop(self._tasks)[2]
                    self._ended = run is None
                    return run
                self._changed.wait(None if first is None else wait)

    def _work(self) -> None:
        try:
            state = self._setup()
        except Exception as error:  # reported by the main thread, which ends the process
            self.failure = error
            self._on_failure()
            return
        self._ready = True
        logger.info("%s is ready", self._thread.name)
        while (run := self._next()) is not None:
            run(state)


async def outcome(request: Request, future: Future[R], cancelled: threading.Event) -> R:
    """Wait for a task; set `cancelled` when the client goes away (ClientDisconnect)."""
    waiting = asyncio.wrap_future(future)
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=0.5)
            if not waiting.done() and await request.is_disconnected():
                raise ClientDisconnect
    except BaseException:  # also when the server stops and cancels us
        cancelled.set()
        future.cancel()
        raise
    return waiting.result()
