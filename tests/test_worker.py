"""The worker thread: who goes first, how much people get while a run goes on, how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from serving import eventually

from services.worker import RUN_QUIET, Lane, Pace, Worker
from solrl.clients.http import Priority
from solrl.errors import BusyError, UnavailableError
from solrl.metrics import Metrics

#: Length of a task on the tests' clock. A waiting worker looks at that clock again after as many
#: real seconds, so it is short.
TASK = 0.02
PATIENCE = 60


class Clock:
    """Moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What every worker measures its tasks and its pace with."""
    clock = Clock()
    monkeypatch.setattr("services.worker.time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr("services.worker.Pace", partial(Pace, clock=clock))
    return clock


# --- the pace ------------------------------------------------------------------------------------


def test_without_a_run_people_never_wait() -> None:
    pace = Pace(0.1, clock=Clock())
    for _ in range(3):
        pace.spent(1000.0)
        assert pace.wait() == 0.0


@pytest.mark.parametrize(
    ("share", "spent", "wait"),
    [(0.1, [2.0], 18.0), (0.25, [4.0], 12.0), (0.5, [3.0], 3.0), (1.0, [1000.0], 0.0),
     (0.5, [0.0], 0.0), (0.25, [1.0, 2.0, 4.0], 21.0)],
)  # fmt: skip
def test_with_a_run_the_next_waits_for_the_rest_of_the_time(
    share: float, spent: list[float], wait: float
) -> None:
    clock = Clock()
    pace = Pace(share, clock=clock)
    pace.run_seen()
    for seconds in spent:
        pace.spent(seconds)
    assert pace.wait() == pytest.approx(wait)
    clock.forward(wait / 2)
    assert pace.wait() == pytest.approx(wait / 2)
    clock.forward(wait)
    assert pace.wait() == 0.0


def test_time_without_work_is_not_saved_up() -> None:
    clock = Clock()
    pace = Pace(0.5, clock=clock)
    pace.run_seen()
    clock.forward(RUN_QUIET)
    pace.run_seen()
    pace.spent(3.0)
    assert pace.wait() == pytest.approx(3.0)


def test_people_are_free_again_when_a_run_is_quiet_for_long() -> None:
    clock = Clock()
    pace = Pace(0.1, clock=clock)
    pace.run_seen()
    pace.spent(1000.0)
    assert pace.wait() == RUN_QUIET, "not the whole rest of what they owe"
    clock.forward(RUN_QUIET - 0.1)
    assert pace.wait() == pytest.approx(0.1)
    clock.forward(0.1)
    assert pace.wait() == 0.0
    # What they do now is not held against them when a run comes back.
    before = Pace(0.1, clock=clock)
    before.spent(1000.0)
    before.run_seen()
    assert before.wait() == 0.0


def test_a_run_that_begins_during_a_task_makes_it_count() -> None:
    clock = Clock()
    pace = Pace(0.5, clock=clock)
    clock.forward(4.0)
    pace.run_seen()
    pace.spent(4.0)
    assert pace.wait() == pytest.approx(4.0)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3, 0.9])
def test_in_the_long_run_people_get_their_share_and_not_more(share: float) -> None:
    clock = Clock()
    pace = Pace(share, clock=clock)
    lengths = np.random.default_rng(0).exponential(1.0, 2000)
    begin, worked = clock.now, 0.0
    for seconds in lengths:
        pace.run_seen()
        while (wait := pace.wait()) > 0:
            clock.forward(min(wait, RUN_QUIET / 2))
            pace.run_seen()
        # Of all that is over when the next may begin.
        assert worked <= share * (clock.now - begin) + 1e-6
        clock.forward(seconds)
        pace.spent(seconds)
        worked += seconds
    clock.forward(pace.wait())
    assert worked / (clock.now - begin) == pytest.approx(share)


# --- the worker ----------------------------------------------------------------------------------


@contextmanager
def working(
    *,
    share: float = 0.5,
    places: Mapping[Priority, int] | None = None,
    metrics: Metrics | None = None,
) -> Iterator[Worker[str]]:
    """A worker that is ready; its state is a word."""
    worker = Worker(
        name="test",
        setup=lambda: "model",
        places=places or {"run": 2, "people": 2},
        people_share=share,
        metrics=metrics or Metrics("reward"),
    )
    worker.start(on_failure=lambda: None)
    eventually(lambda: worker.problem is None)
    yield worker
    worker.stop()


def taking(clock: Clock, seconds: float = TASK) -> Callable[[str], float]:
    """A task that lasts so long on the clock, and answers when it began."""

    def task(state: str) -> float:
        assert state == "model"
        begin = clock.now
        clock.forward(seconds)
        return begin

    return task


def _fail_after(clock: Clock, seconds: float) -> None:
    clock.forward(seconds)
    raise ZeroDivisionError


def test_reloads_go_before_a_run_and_a_run_before_people(clock: Clock) -> None:
    held, order = threading.Event(), list[str]()

    def note(name: str, _: str) -> None:
        order.append(name)

    with working(share=1) as worker:
        first = worker.submit("people", lambda _: held.wait(PATIENCE))
        lanes: list[Lane] = ["people", "run", "reload", "people", "run", "reload"]
        for number, lane in enumerate(lanes):
            last = worker.submit(lane, partial(note, f"{lane} {number}"))
        assert not last.done()
        held.set()
        assert first.result(PATIENCE)
    assert order == ["reload 2", "reload 5", "run 1", "run 4", "people 0", "people 3"]


def test_a_run_is_served_while_people_wait_and_people_get_their_turn(clock: Clock) -> None:
    with working(share=0.5) as worker:
        worker.submit("run", lambda _: None).result(PATIENCE)
        worker.submit("people", taking(clock)).result(PATIENCE)
        for _ in range(3):
            due = clock.now + TASK
            waiting = worker.submit("people", taking(clock))
            for _ in range(5):
                worker.submit("run", lambda _: None).result(PATIENCE)
                worker.submit("reload", lambda _: None).result(PATIENCE)
            # The clock stands still, so that it can only be too early.
            assert not waiting.done()
            clock.forward(TASK)
            assert waiting.result(PATIENCE) == pytest.approx(due)


def test_without_a_run_people_follow_one_another(clock: Clock) -> None:
    begin = clock.now
    with working(share=0.01) as worker:
        begun = [worker.submit("people", taking(clock)) for _ in range(5)]
        assert [future.result(PATIENCE) for future in begun] == pytest.approx(
            [begin + i * TASK for i in range(5)]
        )


def test_a_share_of_one_lets_people_follow_one_another_in_a_run_too(clock: Clock) -> None:
    with working(share=1) as worker:
        worker.submit("run", lambda _: None).result(PATIENCE)
        for future in [worker.submit("people", taking(clock, 100.0)) for _ in range(5)]:
            future.result(PATIENCE)


def test_people_who_waited_for_a_run_are_served_when_it_is_over(clock: Clock) -> None:
    with working(share=0.01) as worker:
        worker.submit("run", lambda _: None).result(PATIENCE)
        worker.submit("people", taking(clock, RUN_QUIET / 2)).result(PATIENCE)
        waiting = worker.submit("people", taking(clock))
        worker.submit("run", lambda _: None).result(PATIENCE)
        assert not waiting.done()
        clock.forward(RUN_QUIET + 1)
        following = worker.submit("people", taking(clock))
        assert waiting.result(PATIENCE) < following.result(PATIENCE)


@pytest.mark.parametrize("lane", ["run", "people"])
def test_work_outside_the_thread_is_charged_to_its_lane(clock: Clock, lane: Priority) -> None:
    """A run's says that it goes on, people's delays their next task; also when it fails."""
    with working(share=0.5) as worker:
        other: Priority = "people" if lane == "run" else "run"
        with worker.charged(other):
            pass
        with pytest.raises(ZeroDivisionError), worker.charged(lane):
            _fail_after(clock, TASK)
        if lane == "run":
            worker.submit("people", taking(clock)).result(PATIENCE)
        due = clock.now + TASK
        waiting = worker.submit("people", taking(clock))
        worker.submit("reload", lambda _: None).result(PATIENCE)
        assert not waiting.done()
        clock.forward(TASK)
        assert waiting.result(PATIENCE) == pytest.approx(due)


def test_places_are_bounded_by_lane_shown_and_given_back() -> None:
    metrics = Metrics("reward")

    def in_flight(lane: Priority) -> float | None:
        return metrics.registry.get_sample_value("solrl_requests_in_flight", {"lane": lane})

    with working(places={"run": 3, "people": 2}, metrics=metrics) as worker:
        assert (in_flight("run"), in_flight("people")) == (0, 0)
        with ExitStack() as held:
            for _ in range(2):
                held.enter_context(worker.admit("people"))
            with pytest.raises(BusyError, match="2 people requests are waiting or running"):
                held.enter_context(worker.admit("people"))
            held.enter_context(worker.admit("run"))
            assert (in_flight("run"), in_flight("people")) == (1, 2)
        with pytest.raises(ZeroDivisionError), worker.admit("people"):
            raise ZeroDivisionError
        assert (in_flight("run"), in_flight("people")) == (0, 0)


def test_the_time_of_all_tasks_is_counted_and_of_nothing_else(clock: Clock) -> None:
    metrics = Metrics("reward")
    with working(share=1, metrics=metrics) as worker:
        lanes: dict[Lane, float] = {"run": 1.0, "people": 2.0, "reload": 4.0}
        for lane, seconds in lanes.items():
            worker.submit(lane, taking(clock, seconds)).result(PATIENCE)
            clock.forward(50.0)
        with worker.charged("run"):
            clock.forward(8.0)
        # Done when a later task is: the time is added after the answer is given.
        worker.submit("reload", lambda _: None).result(PATIENCE)
        busy = metrics.registry.get_sample_value("solrl_busy_seconds_total")
        assert busy == pytest.approx(7.0)


def test_an_error_goes_to_whoever_waits_and_the_thread_lives_on() -> None:
    with working() as worker:
        failed: Future[float] = worker.submit("run", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.result(PATIENCE)
        assert worker.submit("run", str.upper).result(PATIENCE) == "MODEL"


def test_a_task_cancelled_while_it_waits_is_never_begun() -> None:
    held, begun = threading.Event(), list[str]()
    with working() as worker:
        worker.submit("run", lambda _: held.wait(PATIENCE))
        left = worker.submit("run", begun.append)
        assert left.cancel()
        held.set()
        worker.submit("run", lambda _: None).result(PATIENCE)
    assert begun == []


# --- its beginning and its end -------------------------------------------------------------------


def test_a_stopping_worker_finishes_what_is_queued_without_pause_and_then_refuses(
    clock: Clock,
) -> None:
    with working(share=0.001) as worker:
        worker.submit("run", lambda _: None).result(PATIENCE)
        worker.submit("people", taking(clock)).result(PATIENCE)
        queued = [worker.submit("people", taking(clock)) for _ in range(3)]
        queued.append(worker.submit("run", taking(clock)))
        worker.stop()
        assert all(future.done() for future in queued)
        assert worker.problem == "the worker thread has ended"
        with pytest.raises(UnavailableError, match="has ended; try again"), worker.admit("run"):
            pass
        # One that was admitted before, and comes too late with a further part of its work.
        with pytest.raises(UnavailableError, match="has ended; try again"):
            worker.submit("run", str.upper).result(PATIENCE)


def test_a_worker_refuses_until_its_model_is_there_and_can_be_stopped_before() -> None:
    held = threading.Event()
    worker: Worker[bool] = Worker(
        name="test",
        setup=lambda: held.wait(PATIENCE),
        places={"run": 1},
        people_share=0.5,
        metrics=Metrics("reward"),
    )
    worker.start(on_failure=lambda: None)
    assert worker.problem == "the model is being loaded"
    with pytest.raises(UnavailableError, match="being loaded; try again"), worker.admit("run"):
        pass
    worker.stop()  # does not wait for the model
    assert worker.problem == "the model is being loaded"
    held.set()
    eventually(lambda: worker.problem == "the worker thread has ended")


def test_a_model_that_cannot_be_loaded_is_told_once_and_to_everybody() -> None:
    told: list[str] = []

    def broken() -> str:
        raise ValueError("no such file")

    worker = Worker(
        name="test",
        setup=broken,
        places={"people": 1},
        people_share=0.5,
        metrics=Metrics("reward"),
    )
    worker.start(on_failure=lambda: told.append(str(worker.failure)))
    eventually(lambda: told)
    assert told == ["no such file"]
    with (
        pytest.raises(UnavailableError, match="could not be loaded: no such file"),
        worker.admit("people"),
    ):
        pass
    worker.stop()
