"""The reward service without HTTP: scorers, their worker thread, their metrics."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from services.worker import Worker
from solrl.clients.http import Priority
from solrl.clients.reward import Cell, RewardInfo
from solrl.config import Config
from solrl.errors import InputError, UnavailableError
from solrl.metrics import Metrics
from solrl.pixels import resize_uint8
from solrl.rewards import Scorer

#: Requests that may wait or run at once.
PLACES: dict[Priority, int] = {"run": 64, "people": 8}

logger = logging.getLogger("solrl.reward")

Scorers = Mapping[str, Scorer]
#: How a request waits for a task of the worker.
Wait = Callable[["Future[list[Cell]]"], Awaitable[list[Cell]]]


class Service:
    """`load` builds the scorers; it is called in the worker thread, which alone runs them."""

    def __init__(self, config: Config, *, load: Callable[[], Scorers], metrics: Metrics) -> None:
        self._load = load
        self._micro_batch = config.reward.micro_batch
        self._infos: dict[str, RewardInfo] = {}
        self._metrics = metrics
        self.worker: Worker[Scorers] = Worker(
            name="reward",
            setup=self._setup,
            places=PLACES,
            people_share=config.services.people_share,
            metrics=metrics,
        )

    def problems(self) -> list[str]:
        """Why pictures cannot be scored now."""
        return [self.worker.problem] if self.worker.problem else []

    def rewards(self) -> list[RewardInfo]:
        """What is served. UnavailableError while it is being loaded."""
        if not self._infos:
            raise UnavailableError(f"{self.worker.problem or 'starting'}; try again shortly")
        return list(self._infos.values())

    def choose(self, names: Sequence[str]) -> list[RewardInfo]:
        """The named scorers, in that order. InputError for an unknown or repeated name."""
        self.rewards()
        for name in names:
            if name not in self._infos:
                raise InputError(f"no reward is called {name!r}; served: {', '.join(self._infos)}")
        if not names or len(set(names)) < len(names):
            raise InputError(f"rewards {list(names)}: name each wanted reward once, at least one")
        return [self._infos[name] for name in names]

    async def score(
        self,
        pixels: Mapping[int, Tensor],
        prompts: Sequence[str],
        rewards: Sequence[RewardInfo],
        *,
        lane: Priority,
        wait: Wait,
    ) -> list[dict[str, Cell]]:
        """One row a picture, one cell a reward; `pixels` as `fit` made them."""
        columns: dict[str, list[Cell]] = {}
        for reward in rewards:
            images = pixels[reward.input_size]
            cells: list[Cell] = []
            for first in range(0, len(images), self._micro_batch):
                part = slice(first, first + self._micro_batch)
                task = partial(self._score, reward.name, images[part], prompts[part])
                cells += await wait(self.worker.submit(lane, task))
            columns[reward.name] = cells
        return [
            {name: cells[row] for name, cells in columns.items()} for row in range(len(prompts))
        ]

    def _score(
        self, name: str, images: Tensor, prompts: Sequence[str], scorers: Scorers
    ) -> list[Cell]:
        begin = time.perf_counter()
        cells = score_cells(scorers[name], images, prompts)
        self._count(name, cells, time.perf_counter() - begin)
        return cells

    def _count(self, name: str, cells: Sequence[Cell], seconds: float) -> None:
        metrics = self._metrics
        metrics.histogram("solrl_score_seconds", scorer=name).observe(seconds)
        metrics.histogram("solrl_score_batch_images", scorer=name).observe(len(cells))
        valued = sum(cell.value is not None for cell in cells)
        metrics.counter("solrl_scored_images_total", scorer=name).inc(valued)
        for kind, retry in (("failed", True), ("input", False)):
            errors = sum(cell.error is not None and cell.retry == retry for cell in cells)
            metrics.counter("solrl_scorer_errors_total", scorer=name, kind=kind).inc(errors)

    def _setup(self) -> Scorers:
        scorers = self._load()
        for name, scorer in scorers.items():
            # Once now, so that the first request does not wait for lazy initialisation.
            blank = torch.zeros(1, scorer.input_size, scorer.input_size, 3, dtype=torch.uint8)
            score_cells(scorer, blank, ["nothing"])
            logger.info("%s %s takes %d px", name, scorer.version, scorer.input_size)
        self._infos = {
            name: RewardInfo(
                name=name,
                version=scorer.version,
                input_size=scorer.input_size,
                input_filter=scorer.input_filter,
            )
            for name, scorer in scorers.items()
        }
        return scorers


def fit(images: Iterable[Tensor], rewards: Sequence[RewardInfo]) -> dict[int, Tensor]:
    """Pictures uint8 [H, W, 3] of any sizes -> by input size of the rewards, uint8 [n, s, s, 3].

    Scorers would do the same; done here, a large picture is let go before the next is decoded.
    """
    fitted: dict[int, list[Tensor]] = {reward.input_size: [] for reward in rewards}
    for image in images:
        for size, column in fitted.items():
            column.append(resize_uint8(image[None], size))
    return {size: torch.cat(column) for size, column in fitted.items()}


def score_cells(scorer: Scorer, images: Tensor, prompts: Sequence[str]) -> list[Cell]:
    """A finite value or an error for each picture; a failing scorer never becomes a number."""
    try:
        values: list[float] = scorer.score(images=images, prompts=prompts).tolist()
    except InputError as error:
        if len(images) == 1:
            return [Cell(error=str(error))]
        # One row is to blame; the others are scored.
        rows = zip(images.split(1), prompts, strict=True)
        return [cell for image, prompt in rows for cell in score_cells(scorer, image, [prompt])]
    except Exception as error:  # any fault of a scorer; the log has it whole
        logger.exception("%s failed", scorer.name)
        fault = Cell(error=f"{scorer.name} failed: {type(error).__name__}: {error}", retry=True)
        return [fault] * len(images)
    if len(values) != len(images):
        fault = Cell(
            error=f"{scorer.name} gave {len(values)} values for {len(images)} images", retry=True
        )
        return [fault] * len(images)
    return [
        Cell(value=value) if math.isfinite(value) else Cell(error=f"the value is {value}")
        for value in values
    ]
