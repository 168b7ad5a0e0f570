"""The explorer's scheduler on a stand-in generator: order, merging, cancelling, failing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import FakeGenerator, eventually

from services.explorer.scheduler import (
    Answer,
    CancelledWork,
    Exploration,
    Load,
    Pictures,
    Question,
    Scheduler,
)
from solrl.errors import AdapterError, BusyError, InputError, UnavailableError, VersionError
from solrl.generator import Generated, Job, Reload
from solrl.precision import LayerReport


class Generator(FakeGenerator):
    """Pictures whose pixels are their seed; also what the scheduler's status asks for."""

    layers = (LayerReport("transformer_blocks.0.x", "nvfp4-emulated", "", 1, 1, 1),)

    def generate(self, jobs: Sequence[Job], *, steps: int, **settings: Any) -> Generated | None:
        made = super().generate(jobs, steps=steps, **settings)
        return made and replace(made, nfe=self.micro_batch * steps)

    def load_adapter(self, folder: Path) -> Reload:
        reload = super().load_adapter(folder)
        self.current = SimpleNamespace(
            run=reload.run, epoch=1, version=reload.version, sha256=reload.sha256
        )
        return reload


class Caller:
    """Collects answers; `ended` is set by the final one, which must be the last."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.error: Exception | None = None
        self.ended = threading.Event()
        self.gone = False

    def cancelled(self) -> bool:
        return self.gone

    def send(self, answer: Answer, *, final: bool) -> None:
        assert not self.ended.is_set()
        self.answers.append(answer)
        if final:
            self.ended.set()

    def fail(self, error: Exception) -> None:
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()

    def result(self) -> list[Any]:
        """All answers, once it has ended."""
        assert self.ended.wait(60), "no final answer came"
        if self.error is not None:
            raise self.error
        return self.answers

    def seeds(self) -> list[int]:
        return [seed for pictures in self.result() for seed in pictures.seeds]


@pytest.fixture
def generator() -> Generator:
    return Generator()


@pytest.fixture
def scheduler(generator: Generator) -> Iterator[Scheduler]:
    scheduler = Scheduler(generator, limit=100)  # type: ignore[arg-type]
    scheduler.start()
    yield scheduler
    generator.gate.set()
    scheduler.stop()


def ask(
    scheduler: Scheduler, prompt: str, seeds: Sequence[int], *, steps: int = 6, **settings: Any
) -> Caller:
    caller = Caller()
    values = {"guidance": 1.0, "policy": "current", "size": 0, **settings}
    scheduler.submit(Exploration(caller, prompt, seeds, steps, **values))
    return caller


def load(scheduler: Scheduler, folder: Path) -> Caller:
    folder.mkdir(exist_ok=True)
    caller = Caller()
    scheduler.submit(Load(caller, folder))
    return caller


def hold(scheduler: Scheduler, generator: Generator) -> Caller:
    """Keep the thread busy with one batch until `generator.gate` is set."""
    generator.gate.clear()
    caller = ask(scheduler, "first", [0])
    assert generator.started.acquire(timeout=60)
    return caller


def test_seeds_of_many_requests_share_batches(scheduler: Scheduler, generator: Generator) -> None:
    hold(scheduler, generator)
    callers = [ask(scheduler, f"p{i}", [10 * i, 10 * i + 1, 10 * i + 2]) for i in range(4)]
    generator.gate.set()
    for i, caller in enumerate(callers):
        assert caller.seeds() == [10 * i, 10 * i + 1, 10 * i + 2]
        for pictures in caller.result():
            assert [image.max() for image in pictures.images] == [s % 256 for s in pictures.seeds]
            assert (pictures.images == pictures.images[:, :1, :1, :1]).all()
    # 12 seeds in batches of 4, the oldest request first.
    assert generator.log == [("first", 1), ("p0", 4), ("p1", 4), ("p2", 4)]


def test_unequal_settings_share_no_batch(scheduler: Scheduler, generator: Generator) -> None:
    hold(scheduler, generator)
    kinds: list[dict[str, Any]] = [{}, {"steps": 7}, {"guidance": 2.0}, {"policy": "base"}, {}]
    callers = [ask(scheduler, f"p{i}", [i], **kind) for i, kind in enumerate(kinds)]
    generator.gate.set()
    for caller in callers:
        caller.result()
    # "current" is the base here, so the first, fourth and fifth may share; the others may not.
    assert generator.log == [("first", 1), ("p0", 3), ("p1", 1), ("p2", 1)]


def test_requests_are_kept_apart_when_pictures_depend_on_their_batch(generator: Generator) -> None:
    scheduler = Scheduler(generator, merge=False)  # type: ignore[arg-type]
    scheduler.start()
    hold(scheduler, generator)
    callers = [ask(scheduler, f"p{i}", range(3)) for i in range(2)]
    generator.gate.set()
    for caller in callers:
        caller.result()
    scheduler.stop()
    assert generator.log == [("first", 1), ("p0", 3), ("p1", 3)]


def test_one_request_makes_several_batches(scheduler: Scheduler) -> None:
    answers = ask(scheduler, "long", range(10)).result()
    assert [len(pictures.seeds) for pictures in answers] == [4, 4, 2]
    assert [pictures.info["nfe"] for pictures in answers] == [24, 24, 12]
    assert all(pictures.info["precision"] == "fp32" for pictures in answers)


def test_a_load_waits_for_older_work_and_newer_work_waits_for_it(
    scheduler: Scheduler, generator: Generator, tmp_path: Path
) -> None:
    hold(scheduler, generator)
    before = ask(scheduler, "before", range(6))
    loads = [load(scheduler, tmp_path / "1"), load(scheduler, tmp_path / "2")]
    after = ask(scheduler, "after", range(6))
    generator.gate.set()
    assert {pictures.version for pictures in before.result()} == {None}
    assert {pictures.version for pictures in after.result()} == {2}
    assert {pictures.info["sha256"] for pictures in after.result()} == {f"{2:064d}"}
    assert [load.result()[0]["version"] for load in loads] == [1, 2]


def test_a_refused_load_changes_nothing(
    scheduler: Scheduler, generator: Generator, tmp_path: Path
) -> None:
    load(scheduler, tmp_path / "1").result()
    refused = Caller()
    scheduler.submit(Load(refused, tmp_path / "absent"))
    with pytest.raises(AdapterError, match="incomplete"):
        refused.result()
    assert [p.version for p in ask(scheduler, "after", [1]).result()] == [1]


def test_cancelled_seeds_are_dropped_and_others_go_on(
    scheduler: Scheduler, generator: Generator
) -> None:
    first = hold(scheduler, generator)
    gone, stays = ask(scheduler, "gone", range(20)), ask(scheduler, "stays", range(5))
    gone.gone = True
    generator.gate.set()
    assert stays.seeds() == [0, 1, 2, 3, 4]
    first.result()
    with pytest.raises(CancelledWork):
        gone.result()
    assert not gone.answers
    assert ("gone", 4) not in generator.log


def test_a_batch_ends_only_when_all_its_requests_are_cancelled(
    scheduler: Scheduler, generator: Generator
) -> None:
    first = hold(scheduler, generator)
    c, d = ask(scheduler, "c", [1, 2]), ask(scheduler, "d", [3])
    first.gone = True
    eventually(first.ended.is_set)
    eventually(lambda: ("c", 3) in generator.log)
    c.gone = True
    assert not c.ended.wait(0.2), "the batch goes on for d"
    d.gone = True
    eventually(lambda: ("c", -1) in generator.log)
    for caller in (c, d):
        with pytest.raises(CancelledWork):
            caller.result()


@pytest.mark.parametrize(
    ("prompt", "settings", "error"),
    [("broken", {}, RuntimeError), ("x", {"policy": 9}, VersionError)],
)
def test_a_failing_batch_fails_its_requests_alone(
    scheduler: Scheduler, prompt: str, settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ask(scheduler, prompt, range(9), **settings).result()
    assert ask(scheduler, "fine", [7]).seeds() == [7]


def test_a_dying_thread_answers_every_client(scheduler: Scheduler, generator: Generator) -> None:
    """What nobody foresaw must still reach all who wait, and all who come later."""
    hold(scheduler, generator)
    callers = [ask(scheduler, f"p{i}", range(3)) for i in range(3)]
    question = Caller()
    generator.truncated = None  # type: ignore[assignment,method-assign]
    generator.gate.set()
    scheduler.submit(Question(question))
    for caller in callers:
        with pytest.raises(TypeError):
            caller.result()
    assert question.ended.wait(60)
    with pytest.raises(TypeError):
        ask(scheduler, "late", [1])


def test_stopping_answers_every_client(generator: Generator) -> None:
    scheduler = Scheduler(generator)  # type: ignore[arg-type]
    scheduler.start()
    callers = [hold(scheduler, generator), ask(scheduler, "waits", [1])]
    scheduler.stop()
    for caller in callers:
        with pytest.raises(UnavailableError, match="being stopped"):
            caller.result()


def test_a_question_is_answered_between_steps(scheduler: Scheduler, generator: Generator) -> None:
    hold(scheduler, generator)
    ask(scheduler, "waits", range(8))
    question = Caller()
    scheduler.submit(Question(question, layers=True))
    status = question.result()[0]
    assert (status["waiting"], status["current"], status["fp4_share"]) == (8, None, 1.0)
    assert status["layers"][0]["precision"] == "nvfp4-emulated"


def test_the_queue_is_bounded(scheduler: Scheduler, generator: Generator) -> None:
    hold(scheduler, generator)
    ask(scheduler, "large", range(99))
    with pytest.raises(BusyError, match="bound of 100"):
        ask(scheduler, "more", range(2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": " "}, "empty"),
        ({"seeds": []}, "0 seeds"),
        ({"seeds": [-1]}, "seed -1"),
        ({"seeds": [2**53]}, "out of range"),
        ({"steps": 0}, "steps = 0"),
        ({"guidance": float("nan")}, "guidance = nan"),
        ({"guidance": 0.5}, "guidance = 0.5"),
        ({"size": -1}, "size = -1"),
    ],
)
def test_what_can_never_be_made_is_refused(change: dict[str, Any], says: str) -> None:
    values = {"prompt": "p", "seeds": [1], "steps": 6, "guidance": 1.0, "size": 0, **change}
    with pytest.raises(InputError, match=says):
        Exploration(caller=Caller(), policy="current", **values)


def test_pictures_are_only_ever_made_smaller(scheduler: Scheduler) -> None:
    sizes = {
        size: ask(scheduler, "p", [5], size=size).result()[0].images.shape for size in (0, 4, 64)
    }
    assert sizes == {0: (1, 8, 8, 3), 4: (1, 4, 4, 3), 64: (1, 8, 8, 3)}
    assert isinstance(ask(scheduler, "p", [5]).result()[0], Pictures)
