"""Base against tuned on the same seeds, by the reward trained on and by an independent judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict

from solrl.config import Config
from solrl.generator import Generator, Job
from solrl.lora import Lora
from solrl.seeds import candidate_seed
from solrl.stats import clustered_mean, diversity

Images = NDArray[np.uint8]
#: (images [n,H,W,3], prompts, scorer name) -> n finite numbers
Score = Callable[[Images, Sequence[str], str], list[float]]
PromptSet = Literal["train_prompts", "unseen_prompts"]

_SET_CODE: dict[PromptSet, int] = {"train_prompts": 0, "unseen_prompts": 1}


class Cell(BaseModel):
    """One figure: means of base and tuned, of real pictures when there are any, paired gain.

    `ci95` is None for a single prompt: there is no spread between prompts to estimate it from.
    """

    model_config = ConfigDict(extra="forbid")

    base: float
    tuned: float
    real: float | None
    gain: float
    ci95: tuple[float, float] | None
    images: int


class Pictures(BaseModel):
    """Pictures of one policy: `images[p][s]` is prompt p with evaluation seed s."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompts: list[str]
    images: list[Images]


def evaluation_seed(run_seed: int, prompt_set: PromptSet, prompt: int, picture: int) -> int:
    """Never used in training: a domain of its own."""
    return candidate_seed(run_seed, "eval", _SET_CODE[prompt_set], prompt, picture)


def generate(
    generator: Generator,
    policy: Lora | None,
    prompts: Sequence[str],
    *,
    prompt_set: PromptSet,
    pictures: int,
    guidance: float,
    config: Config,
    progress: Callable[[int], None] = lambda done: None,
) -> Pictures:
    """`pictures` a prompt by `policy` (None = base)."""
    generator.set_weights(policy)
    jobs = [
        Job(prompt, evaluation_seed(config.run.seed, prompt_set, index, picture))
        for index, prompt in enumerate(prompts)
        for picture in range(pictures)
    ]
    images = []
    for first in range(0, len(jobs), generator.micro_batch):
        chunk = jobs[first : first + generator.micro_batch]
        made = generator.generate(chunk, steps=config.evaluate.steps, guidance=guidance)
        assert made is not None
        images.append(made.images.numpy())
        progress(len(chunk))
    everything = np.concatenate(images)
    return Pictures(
        prompts=list(prompts),
        images=[everything[i * pictures : (i + 1) * pictures] for i in range(len(prompts))],
    )


def real_pictures(folder: Path | None, prompts: Sequence[str]) -> list[Images] | None:
    """`<folder>/<prompt>.png` of every prompt, [1,H,W,3] each; None unless all are there."""
    if folder is None:
        return None
    paths = [folder / f"{prompt}.png" for prompt in prompts]
    if not all(path.is_file() for path in paths):
        return None
    return [np.asarray(Image.open(path).convert("RGB"), np.uint8)[None] for path in paths]


def compare(
    base: Pictures,
    tuned: Pictures,
    real: list[Images] | None,
    *,
    scorers: dict[str, str],
    score: Score,
) -> dict[str, Cell]:
    """One cell a scorer (`scorers[label] = name`) and one for diversity; intervals by prompt."""
    cells = {}
    for label, name in scorers.items():
        before, after = (_scores(p.images, p.prompts, name, score) for p in (base, tuned))
        reference = None if real is None else _scores(real, base.prompts, name, score)
        cells[label] = _cell(before, after, reference, base)
    spread = [[[diversity(images)] for images in p.images] for p in (base, tuned)]
    cells["diversity"] = _cell(spread[0], spread[1], None, base)
    return cells


def _scores(
    images: Sequence[Images], prompts: Sequence[str], name: str, score: Score
) -> list[list[float]]:
    flat = score(
        np.concatenate(list(images)),
        [prompt for prompt, group in zip(prompts, images, strict=True) for _ in group],
        name,
    )
    groups, first = [], 0
    for group in images:
        groups.append(flat[first : first + len(group)])
        first += len(group)
    return groups


def _cell(
    before: list[list[float]],
    after: list[list[float]],
    real: list[list[float]] | None,
    pictures: Pictures,
) -> Cell:
    differences = [
        [b - a for a, b in zip(x, y, strict=True)] for x, y in zip(before, after, strict=True)
    ]
    gain = clustered_mean(differences)
    return Cell(
        base=clustered_mean(before).mean,
        tuned=clustered_mean(after).mean,
        real=None if real is None else clustered_mean(real).mean,
        gain=gain.mean,
        ci95=(gain.low, gain.high) if len(differences) > 1 else None,
        images=sum(len(group) for group in pictures.images),
    )
