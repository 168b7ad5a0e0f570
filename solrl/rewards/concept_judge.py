"""`concept_judge`: which of the known concepts does a picture show?

The independent judge of the demo: a plain convolutional classifier without a text tower, trained
from scratch on picture styles the generator and the reward never saw. Nothing trains against it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from solrl.atomic import sha256_file
from solrl.errors import ConfigError, InputError
from solrl.pixels import resize_uint8
from solrl.rewards import channels_last, check_pairs, in_micro_batches, to_inputs

WIDTHS = (32, 64, 128, 256)
MICRO_BATCH = 64


def concept_of(prompt: str) -> str:
    """The object a caption names: "strawberry, flat style" -> "strawberry"."""
    name, separator, style = prompt.rpartition(", ")
    return name if separator and style.endswith(" style") else prompt


class ConceptNet(nn.Module):
    """[n, 3, 32, 32] in [-1, 1] -> [n, classes] logits; halves the side three times."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for stage, width in enumerate(WIDTHS):
            for repeat in range(2 if stage else 1):
                stride = 2 if stage and repeat == 0 else 1
                layers += [
                    nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                channels = width
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.features(x).mean((2, 3)))
        return logits


class ConceptJudge:
    """Scores the log-probability of the prompted concept among the known ones."""

    name = "concept_judge"
    input_size = 32
    input_filter = "bicubic"

    def __init__(self, *, net: ConceptNet, concepts: Sequence[str], version: str) -> None:
        self.net = net.eval().requires_grad_(False)
        channels_last(self.net)
        self.concepts = tuple(concepts)
        self.version = version
        self._index = {concept: place for place, concept in enumerate(self.concepts)}

    @classmethod
    def load(cls, folder: Path) -> ConceptJudge:
        """Read `model.safetensors` and `config.json`. Raises ConfigError when they are missing."""
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise ConfigError(
                f"{folder} has no model.safetensors; build it with `python -m zoo.train_judge`"
            )
        concepts = json.loads((folder / "config.json").read_text())["concepts"]
        net = ConceptNet(len(concepts))
        net.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
        return cls(net=net, concepts=concepts, version=sha256_file(weights)[:12])

    @torch.inference_mode()
    def log_probabilities(self, images: Tensor) -> Tensor:
        """uint8 [n, H, W, 3] -> fp32 [n, concepts]."""
        inputs = to_inputs(resize_uint8(images, self.input_size))
        return F.log_softmax(in_micro_batches(self.net, inputs, MICRO_BATCH), dim=1)

    def targets(self, prompts: Sequence[str]) -> Tensor:
        """The index of each prompt's concept, int64 [n]. Raises InputError for a foreign one."""
        names = [concept_of(prompt) for prompt in prompts]
        for name in names:
            if name not in self._index:
                raise InputError(
                    f"concept_judge does not know {name!r}; "
                    f"it knows {len(self.concepts)} concepts, such as {self.concepts[0]!r}"
                )
        return torch.tensor([self._index[name] for name in names])

    def score(self, *, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Natural log-probability of each prompt's concept, fp32 [n], at most 0. See Scorer."""
        check_pairs(images, prompts)
        targets = self.targets(prompts)
        return self.log_probabilities(images).gather(1, targets[:, None])[:, 0]

    def top1(self, *, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Whether the prompted concept is the likeliest one, bool [n]. Raises like `score`."""
        check_pairs(images, prompts)
        return self.log_probabilities(images).argmax(1) == self.targets(prompts)
