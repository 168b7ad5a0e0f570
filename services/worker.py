"""One thread that owns a model, behind a bounded queue where a run's requests go first."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, Literal, TypeVar

from starlette.requests import ClientDisconnect, Request

from solrl.clients.http import Priority
from solrl.errors import BusyError, UnavailableError

S = TypeVar("S")
R = TypeVar("R")

#: Reloads before a run's requests before people's; the stop mark comes after all work.
Lane = Literal["reload"] | Priority
ORDER: Mapping[str, int] = {"reload": 0, "run": 1, "people": 2, "stop": 3}

logger = logging.getLogger("solrl.worker")


class Worker(Generic[S]):
    """Runs `setup` once, then tasks on what it returned, one at a time.

    A request holds a place (`admit`) and submits small tasks one after another, so that between
    two tasks of a person's large request those of a run get in.
    """

    def __init__(
        self, *, name: str, setup: Callable[[], S], places: Mapping[Priority, int]
    ) -> None:
        self.failure: Exception | None = None
        self._setup = setup
        self._places = dict(places)
        self._taken: dict[Priority, int] = dict.fromkeys(places, 0)
        self._counting = threading.Lock()
        self._ready = False
        self._number = itertools.count()
        self._tasks: queue.PriorityQueue[tuple[int, int, Callable[[S], None] | None]] = (
            queue.PriorityQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._on_failure: Callable[[], None] = lambda: None

    def start(self, *, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when `setup` raised; the error is then in `failure`."""
        self._on_failure = on_failure
        self._thread.start()

    def stop(self) -> None:
        """Finish what is queued, then end the thread; one still in `setup` is abandoned."""
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
        """Queue one task; tasks of a lane run in the order they came."""
        future: Future[R] = Future()

        def run(state: S) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = task(state)
            except Exception as error:  # goes to whoever waits; the thread lives on
                future.set_exception(error)
            else:
                future.set_result(result)

        self._put(lane, run)
        return future

    def _put(self, lane: str, run: Callable[[S], None] | None) -> None:
        self._tasks.put((ORDER[lane], next(self._number), run))

    def _work(self) -> None:
        try:
            state = self._setup()
        except Exception as error:  # reported by the main thread, which ends the process
            self.failure = error
            self._on_failure()
            return
        self._ready = True
        logger.info("%s is ready", self._thread.name)
        while (run := self._tasks.get()[2]) is not None:
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
