"""A trainer on the tiny random pipeline, and samples for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import WIDTH

from solrl import models
from solrl.config import ModelSection, TrainSection
from solrl.embeddings import Embedding
from solrl.training import Sample, Trainer

TOKENS = 8
ROLLOUT_STEPS = 10
LATENTS = (48, 8, 8)


def make_trainer(model: Path, *, run_seed: int = 1, **settings: Any) -> Trainer:
    values: dict[str, Any] = {"rank": 4, "alpha": 8.0, "timesteps": 3, "micro_batch": 4}
    section = ModelSection(base=str(model), max_prompt_tokens=TOKENS)
    return Trainer(models.load(section), TrainSection(**(values | settings)), run_seed=run_seed)


def make_samples(count: int = 4, *, seed: int = 0, **changes: Any) -> list[Sample]:
    """Two slots in turn, advantages from -2 to 2."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        prompt = Embedding(
            torch.randn(TOKENS, WIDTH, generator=generator),
            (torch.arange(TOKENS) < 3 + i % 4).long(),
            False,
        )
        values: dict[str, Any] = {
            "slot": i % 2,
            "candidate": 7 * i,
            "clean": torch.randn(LATENTS, generator=generator),
            "prompt": prompt,
            "advantage": 4.0 * i / max(1, count - 1) - 2.0,
        }
        samples.append(Sample(**(values | changes)))
    return samples


def train(trainer: Trainer, iteration: int, samples: list[Sample] | None = None) -> Any:
    chosen = make_samples(seed=iteration) if samples is None else samples
    return trainer.train(chosen, iteration=iteration, rollout_steps=ROLLOUT_STEPS)
