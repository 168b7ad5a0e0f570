"""The ad hoc call: prompts only. The regenerator makes the pictures, the scorers score them."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.reward.service import Service, Wait, fit
from solrl.clients.http import Priority
from solrl.clients.regenerator import RegeneratorClient
from solrl.clients.reward import Cell, RewardInfo
from solrl.errors import UnavailableError
from solrl.picture_files import png_base64
from solrl.seeds import SEED_LIMIT

MAX_PICTURES = 1024

Seed = Annotated[int, Field(ge=0, lt=SEED_LIMIT)]


class PromptsRequest(BaseModel):
    """`n` pictures a prompt from seeds 0..n-1, or from `seeds`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompts: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        min_length=1, max_length=64, examples=[["strawberry, flat style"]]
    )
    n: int | None = Field(None, ge=1, le=256, description="Pictures a prompt; default 8.")
    seeds: list[Seed] | None = Field(None, min_length=1, max_length=256)
    policy: Annotated[int, Field(ge=0)] | Literal["base", "current"] = "current"
    guidance: float = Field(1.0, ge=1, le=50)
    steps: int | None = Field(None, ge=1, le=200, description="Default: regenerate.steps.")
    rewards: list[str] | None = Field(None, description="Default: the reward trained on.")
    return_images: bool = Field(False, description="Also the pictures, PNG in base64.")

    @model_validator(mode="after")
    def _one_choice_of_seeds(self) -> Self:
        if self.n is not None and self.seeds is not None:
            raise ValueError("n and seeds are both given; give the number of seeds or the seeds")
        pictures = len(self.prompts) * len(self.seed_list)
        if pictures > MAX_PICTURES:
            raise ValueError(f"{pictures} pictures are asked for; at most {MAX_PICTURES} at once")
        return self

    @property
    def seed_list(self) -> list[int]:
        return self.seeds if self.seeds is not None else list(range(self.n or 8))


class Column(BaseModel):
    """A reward of one prompt. `values` follow the seeds; null where `errors` says why."""

    mean: float | None = Field(description="null when there is no value")
    spread: float | None = Field(description="Sample standard deviation; null below two values.")
    values: list[float | None]
    errors: list[str | None] | None = Field(None, description="null when there are none")


class PromptScores(BaseModel):
    prompt: str
    truncated: bool = Field(description="The text encoder cut the prompt.")
    version: int | None = Field(description="Policy version that made the pictures; null is base.")
    precision: str = Field(description="What the pictures were made in.")
    seeds: list[int]
    rewards: dict[str, Column]
    images: list[str] | None = Field(None, description="PNG in base64, in the order of the seeds.")


class PromptsAnswer(BaseModel):
    steps: int
    guidance: float
    scorers: dict[str, str]
    prompts: list[PromptScores]
    seconds: float


async def score_prompt(
    service: Service,
    regenerator: RegeneratorClient,
    asked: PromptsRequest,
    prompt: str,
    rewards: Sequence[RewardInfo],
    *,
    steps: int,
    lane: Priority,
    wait: Wait,
    request_id: str,
) -> PromptScores:
    """Pictures of one prompt, scored. Raises what the regenerator's client raises."""
    seeds = asked.seed_list
    made = await asyncio.to_thread(
        regenerator.regenerate,
        prompt,
        seeds,
        steps=steps,
        guidance=asked.guidance,
        policy=asked.policy,
        request_id=request_id,
    )
    pixels = await asyncio.to_thread(fit, torch.from_numpy(made.images), rewards)
    rows = await service.score(pixels, [prompt] * len(seeds), rewards, lane=lane, wait=wait)
    for row, finite in zip(rows, made.finite, strict=True):
        if not finite:
            row.update({name: Cell(error="the picture's latents are not finite") for name in row})
    images = [png_base64(image) for image in made.images] if asked.return_images else None
    return PromptScores(
        prompt=prompt,
        truncated=made.truncated,
        version=made.version,
        precision=made.precision,
        seeds=seeds,
        rewards={reward.name: column([row[reward.name] for row in rows]) for reward in rewards},
        images=images,
    )


def column(cells: Sequence[Cell]) -> Column:
    """Mean and spread over the values there are. UnavailableError when the scorer failed."""
    if failed := next((cell.error for cell in cells if cell.retry), None):
        raise UnavailableError(failed)
    values = [cell.value for cell in cells if cell.value is not None]
    return Column(
        mean=statistics.fmean(values) if values else None,
        spread=statistics.stdev(values) if len(values) > 1 else None,
        values=[cell.value for cell in cells],
        errors=[cell.error for cell in cells] if len(values) < len(cells) else None,
    )
