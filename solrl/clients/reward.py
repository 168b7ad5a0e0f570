"""Client of the reward service: numbers for pictures and their prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from solrl.clients.http import HttpClient, Priority
from solrl.clients.tensors import CONTENT_TYPE, pack


class RewardInfo(BaseModel):
    """A scorer and the pixels it works on: square side and resize filter."""

    name: str
    version: str
    input_size: int
    input_filter: str


class RewardList(BaseModel):
    rewards: list[RewardInfo]


class Cell(BaseModel):
    """A value, or why there is none. `retry`: the scorer failed, the picture is not to blame."""

    value: float | None = None
    error: str | None = None
    retry: bool = False


class ScoreAnswer(BaseModel):
    """`scorers` = name -> version; one row a picture, one cell a scorer."""

    scorers: dict[str, str]
    rows: list[dict[str, Cell]]
    seconds: float


@dataclass(frozen=True)
class Scores:
    """One entry a picture: a finite value, or None and the error that excludes the picture."""

    values: list[float | None]
    errors: list[str | None]
    version: str
    seconds: float


class RewardClient(HttpClient):
    """See HttpClient for errors; a scorer that failed by itself is an UnavailableError too."""

    def __init__(
        self, url: str, *, timeout: float, token: str | None = None, priority: Priority = "run"
    ) -> None:
        super().__init__(
            url, name="reward service", timeout=timeout, token=token, priority=priority
        )

    def describe(self) -> list[RewardInfo]:
        return self.parse(RewardList, self.call("GET", "/v1/rewards")).rewards

    def score(
        self,
        images: NDArray[np.uint8],
        prompts: Sequence[str],
        reward: str,
        *,
        request_id: str | None = None,
    ) -> Scores:
        """Score uint8 [n, H, W, 3], each with its own prompt."""
        body = self.call(
            "POST",
            "/v1/score",
            content=pack(
                {"images": images},
                {"prompts": json.dumps(list(prompts)), "rewards": json.dumps([reward])},
            ),
            headers={"Content-Type": CONTENT_TYPE},
            request_id=request_id,
        )
        answer = self.parse(ScoreAnswer, body)
        if len(answer.rows) != len(images):
            raise self.nonsense(f"{len(answer.rows)} rows for {len(images)} images")
        if list(answer.scorers) != [reward] or any(list(row) != [reward] for row in answer.rows):
            raise self.nonsense(f"scorers {list(answer.scorers)}, asked for {reward}")
        cells = [row[reward] for row in answer.rows]
        for place, cell in enumerate(cells):
            if (cell.value is None) == (cell.error is None):
                raise self.nonsense(f"row {place} has not exactly one of value and error")
            if cell.value is not None and not math.isfinite(cell.value):
                raise self.nonsense(f"row {place} has the value {cell.value}")
            if cell.retry:
                raise self.nonsense(f"{reward} failed: {cell.error}")
        return Scores(
            values=[cell.value for cell in cells],
            errors=[cell.error for cell in cells],
            version=answer.scorers[reward],
            seconds=answer.seconds,
        )
