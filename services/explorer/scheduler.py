"""Merges the seeds of many requests into fixed micro-batches. Knows nothing of Triton.

One thread owns the generator and works through one queue in the order of arrival. An adapter load
stands in that queue like any other work: what came before it runs before it, what came after it
runs with the new version, so no batch ever mixes versions and nothing has to fail.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from solrl.errors import BusyError, InputError, SolrlError, UnavailableError
from solrl.generator import SOLVER, Generator, Job, Policy
from solrl.pixels import resize_uint8
from solrl.precision import fp4_share
from solrl.seeds import check_seed

#: Seeds that may wait; at 96 a prompt, 42 prompts.
WAITING_LIMIT = 4096
STEPS_LIMIT = 1000

logger = logging.getLogger("solrl.explorer.scheduler")


class CancelledWork(SolrlError):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Pictures:
    """One request's share of one micro-batch: images uint8 [n,H,W,3]; version None = base."""

    images: NDArray[np.uint8]
    seeds: tuple[int, ...]
    version: int | None
    info: dict[str, Any]


Answer = Pictures | dict[str, Any]


class Caller(Protocol):
    """Who asked. The last call is one `send(final=True)` or one `fail`, and there always is one."""

    def cancelled(self) -> bool: ...
    def send(self, answer: Answer, *, final: bool) -> None: ...
    def fail(self, error: Exception) -> None: ...


@dataclass(eq=False)
class Exploration:
    """Pictures of one prompt; `size` 0 = native pixels, else the side they are reduced to.

    Raises InputError for a value out of range.
    """

    caller: Caller
    prompt: str
    seeds: Sequence[int]
    steps: int
    guidance: float
    policy: Policy
    size: int = 0
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise InputError("the prompt is empty; give it at least one word")
        if not 1 <= len(self.seeds) <= WAITING_LIMIT:
            raise InputError(f"{len(self.seeds)} seeds were given; allowed: 1 to {WAITING_LIMIT}")
        for seed in self.seeds:
            check_seed(seed)
        if not 1 <= self.steps <= STEPS_LIMIT:
            raise InputError(f"steps = {self.steps} is out of range: 1 to {STEPS_LIMIT}")
        if not 1 <= self.guidance <= 100:
            raise InputError(f"guidance = {self.guidance} is out of range: 1 (none) to 100")
        if self.size < 0:
            raise InputError(f"size = {self.size} is negative; 0 keeps the model's own size")
        self.waiting = deque(self.seeds)


@dataclass(eq=False)
class Load:
    """Bind an adapter folder once everything before it is done."""

    caller: Caller
    path: Path


@dataclass(eq=False)
class Question:
    """What is being served? Answered by the working thread between two solver steps."""

    caller: Caller
    layers: bool = False


@dataclass(frozen=True)
class Part:
    """One request's seeds in a batch."""

    work: Exploration
    seeds: tuple[int, ...]


class Scheduler:
    """`submit` from any thread; `start` and `stop` from the owner's.

    `merge` False gives every request batches of its own, for a model in which a picture depends on
    its batch mates.
    """

    def __init__(
        self, generator: Generator, *, limit: int = WAITING_LIMIT, merge: bool = True
    ) -> None:
        self._generator = generator
        self._merge = merge
        self._limit = limit
        self._queue: deque[Exploration | Load] = deque()
        self._questions: deque[Question] = deque()
        self._batch: list[Part] = []
        self._sha256: dict[int | None, str] = {}
        self._wake = threading.Condition()
        self._closed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the batch at its next solver step and fail what waits."""
        self._close(UnavailableError("the explorer's model is being stopped; try again soon"))
        self._thread.join()

    def submit(self, work: Exploration | Load | Question) -> None:
        """Queue it. Raises BusyError when too many seeds wait, or whatever ended the thread."""
        with self._wake:
            if self._closed is not None:
                raise self._closed
            if isinstance(work, Question):
                self._questions.append(work)
            else:
                seeds = len(work.seeds) if isinstance(work, Exploration) else 0
                if self._waiting() + seeds > self._limit:
                    raise BusyError(
                        f"{self._waiting()} candidates are waiting and {seeds} more exceed the "
                        f"bound of {self._limit}; try again later or add an explorer"
                    )
                self._queue.append(work)
            self._wake.notify()

    def _waiting(self) -> int:
        return sum(len(w.waiting) for w in self._queue if isinstance(w, Exploration))

    def _close(self, reason: Exception) -> None:
        with self._wake:
            self._closed = self._closed or reason
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:
            logger.exception("the scheduler's thread failed")
            self._close(error)
        # Whatever ended the thread, nobody may be left waiting for an answer.
        assert self._closed is not None
        with self._wake:
            callers = {part.work.caller for part in self._batch}
            callers |= {work.caller for work in self._queue}
            callers |= {question.caller for question in self._questions}
            self._batch, self._queue, self._questions = [], deque(), deque()
        for caller in callers:
            caller.fail(self._closed)

    def _step(self) -> bool:
        """Do the next thing; False when closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._closed or self._queue or self._questions)
            if self._closed is not None:
                return False
        self._answer_questions()
        self._drop([w for w in self._explorations() if w.caller.cancelled()])
        with self._wake:
            head = self._queue[0] if self._queue else None
            if isinstance(head, Load):
                self._queue.popleft()
            elif head is not None:
                self._batch = self._gather(head)
        if isinstance(head, Load):
            self._load(head)
        elif self._batch:
            self._generate()
        return True

    def _explorations(self) -> list[Exploration]:
        with self._wake:
            return [work for work in self._queue if isinstance(work, Exploration)]

    def _gather(self, head: Exploration) -> list[Part]:
        """The oldest request's seeds; room that is left goes to later ones that fit.

        Nothing passes a waiting load. Called with the lock held.
        """
        room = self._generator.micro_batch
        parts: list[Part] = []
        for work in self._queue:
            if isinstance(work, Load) or not room or (parts and not self._merge):
                break
            if self._kind(work) == self._kind(head):
                seeds = tuple(work.waiting.popleft() for _ in range(min(room, len(work.waiting))))
                parts.append(Part(work, seeds))
                room -= len(seeds)
        self._queue = deque(w for w in self._queue if isinstance(w, Load) or w.waiting)
        return parts

    def _kind(self, work: Exploration) -> tuple[int, float, Policy]:
        policy = work.policy
        if policy == "current":
            current = self._generator.current
            policy = "base" if current is None else current.version
        return work.steps, work.guidance, policy

    def _generate(self) -> None:
        """Make one batch and answer each of its requests."""
        steps, guidance, policy = self._kind(self._batch[0].work)
        jobs = [Job(part.work.prompt, seed) for part in self._batch for seed in part.seeds]
        begin = time.perf_counter()
        try:
            generated = self._generator.generate(
                jobs, steps=steps, guidance=guidance, policy=policy, cancelled=self._between_steps
            )
        except Exception as error:
            # These requests cannot be served; the others can.
            if not isinstance(error, SolrlError):
                logger.exception("a batch of %d failed", len(jobs))
            self._drop([part.work for part in self._batch], error)
            return
        if generated is None:
            self._drop([part.work for part in self._batch if part.work.caller.cancelled()])
            return
        seconds = time.perf_counter() - begin
        pixels = generated.images
        while self._batch:
            part = self._batch[0]
            images, pixels = pixels[: len(part.seeds)], pixels[len(part.seeds) :]
            if part.work.caller.cancelled():
                self._drop([part.work])
                continue
            info = {
                "sha256": self._sha256.get(generated.version, ""),
                "precision": self._generator.precision,
                "solver": SOLVER,
                "nfe": generated.nfe // self._generator.micro_batch * len(part.seeds),
                "seconds": seconds * len(part.seeds) / len(jobs),
                "truncated": self._generator.truncated(part.work.prompt),
            }
            pictures = Pictures(
                _reduced(images, part.work.size), part.seeds, generated.version, info
            )
            part.work.caller.send(pictures, final=not part.work.waiting)
            self._batch.pop(0)

    def _between_steps(self) -> bool:
        self._answer_questions()
        return self._closed is not None or all(p.work.caller.cancelled() for p in self._batch)

    def _drop(self, works: list[Exploration], error: Exception | None = None) -> None:
        """Forget what is left of these requests and say so to their callers."""
        with self._wake:
            self._queue = deque(w for w in self._queue if w not in works)
            self._batch = [part for part in self._batch if part.work not in works]
        for work in works:
            work.caller.fail(error or CancelledWork("the request was cancelled"))

    def _load(self, load: Load) -> None:
        try:
            reload = self._generator.load_adapter(load.path)
        except Exception as error:
            if not isinstance(error, SolrlError):
                logger.exception("adapter %s failed to load", load.path)
            load.caller.fail(error)
            return
        self._sha256[reload.version] = reload.sha256
        load.caller.send(asdict(reload), final=True)

    def _answer_questions(self) -> None:
        while self._questions:
            question = self._questions.popleft()
            question.caller.send(self._status(layers=question.layers), final=True)

    def _status(self, *, layers: bool) -> dict[str, Any]:
        generator = self._generator
        current = generator.current
        status = {
            "base_id": generator.base_id,
            "base_sha256": generator.base_sha256,
            "precision": generator.precision,
            "precision_reason": generator.precision_reason,
            "fp4_share": fp4_share(generator.layers),
            "solver": SOLVER,
            "micro_batch": generator.micro_batch,
            "held": generator.held(),
            "current": current
            and {key: getattr(current, key) for key in ("run", "epoch", "version", "sha256")},
            "waiting": self._waiting(),
        }
        return {**status, "layers": [asdict(x) for x in generator.layers]} if layers else status


def _reduced(images: Tensor, size: int) -> NDArray[np.uint8]:
    """uint8 [n,H,W,3] as an array, made smaller to `size` when it is larger."""
    if size and max(images.shape[1:3]) > size:
        images = resize_uint8(images, size)
    pixels: NDArray[np.uint8] = images.contiguous().numpy()
    return pixels
