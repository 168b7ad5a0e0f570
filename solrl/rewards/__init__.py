"""Scorers, one file each behind one small interface: pictures and prompts in, numbers out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from solrl.errors import ConfigError, InputError
from solrl.pixels import check_pixels


class Scorer(Protocol):
    """What every scorer offers.

    `input_size` and `input_filter` advertise the pixels it works on: senders resize to them with
    `solrl.pixels.resize_uint8`, anything else is resized inside. `version` changes with the
    weights. Cost is linear in the number of pictures.
    """

    name: str
    version: str
    input_size: int
    input_filter: str

    def score(self, *, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """uint8 [n, H, W, 3] and their n prompts -> fp32 [n], larger is better.

        Raises InputError for other pixels, an empty prompt, or a different number of prompts.
        """
        ...


def check_pairs(images: Tensor, prompts: Sequence[str]) -> None:
    """Raise InputError unless there is one non-empty prompt for each picture."""
    check_pixels(images)
    if len(prompts) != len(images):
        raise InputError(
            f"{len(images)} images came with {len(prompts)} prompts; send one prompt for each image"
        )
    for place, prompt in enumerate(prompts):
        if not prompt.strip():
            raise InputError(f"prompt {place} is empty; a scorer needs the text of every image")


def in_micro_batches(function: Callable[[Tensor], Tensor], inputs: Tensor, size: int) -> Tensor:
    """Apply `function` to [n, ...] in batches of exactly `size` rows, the last one zero-padded.

    A fixed shape runs fixed kernels, so a row's result does not depend on its company.
    """
    parts = []
    for start in range(0, len(inputs), size):
        part = inputs[start : start + size]
        padding = part.new_zeros((size - len(part), *part.shape[1:]))
        parts.append(function(torch.cat([part, padding]))[: len(part)])
    return torch.cat(parts)


def channels_last(module: nn.Module) -> None:
    """Lay the convolutions' weights out for channels-last pictures, the fast order on a CPU."""
    for parameter in module.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def to_inputs(images: Tensor) -> Tensor:
    """uint8 [n, 32, 32, 3] -> fp32 [n, 3, 32, 32] in [-1, 1], channels last in memory."""
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def load_scorer(name: str, zoo: Path) -> Scorer:
    """The scorer called `name` with its weights from the folder `zoo`.

    Raises ConfigError for an unknown name or a folder without weights.
    """
    match name:
        case "emoji_clip":
            from solrl.rewards.emoji_clip import EmojiClip

            return EmojiClip.load(zoo / "emoji-clip")
        case "concept_judge":
            from solrl.rewards.concept_judge import ConceptJudge

            return ConceptJudge.load(zoo / "concept-judge")
    raise ConfigError(f"no scorer is called {name!r}; there are emoji_clip and concept_judge")
