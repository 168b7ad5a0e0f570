"""The drawn styles of `python -m zoo.build_data`, whole, for those who train on all emoji."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zoo.build_data import BUILD

GENERATED_STYLES = ("flat", "3d", "noto")
JUDGE_STYLES = ("twemoji", "noto-v1", "fluent-color", "fxemoji")


@dataclass(frozen=True)
class Pictures:
    """One style: uint8 [n, 32, 32, 3] on white, with the CLDR name and code points of each."""

    style: str
    images: Tensor
    names: list[str]
    hexcodes: list[str]


def load_pictures(style: str, build: Path = BUILD) -> Pictures:
    """One style as `build_data` left it in `build`."""
    with np.load(build / f"{style}.npz") as archive:
        return Pictures(
            style=style,
            images=torch.from_numpy(archive["images"]),
            names=archive["names"].tolist(),
            hexcodes=archive["hexcodes"].tolist(),
        )


def subset(pictures: Pictures, hexcodes: list[str]) -> tuple[Tensor, list[int]]:
    """The pictures of those `hexcodes` the style has, and the place of each in `hexcodes`."""
    row = {code: place for place, code in enumerate(pictures.hexcodes)}
    found = [place for place, code in enumerate(hexcodes) if code in row]
    return pictures.images[[row[hexcodes[place]] for place in found]], found
