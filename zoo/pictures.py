"""The drawn styles of `python -m zoo.build_data`, whole, for those who train on all emoji."""

from collections.abc import Collection, Sequence
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


def labelled(
    sheets: Sequence[Pictures], first: Sequence[str], without: Collection[str] = ()
) -> tuple[Tensor, Tensor]:
    """Pictures of all `sheets` but those named in `without`, and the class of each, int64 [n].

    A class is a code point: those of `first` in their order, then the others sorted.
    """
    rows = [[n for n, name in enumerate(sheet.names) if name not in without] for sheet in sheets]
    codes = [sheet.hexcodes[n] for sheet, kept in zip(sheets, rows, strict=True) for n in kept]
    place = {code: n for n, code in enumerate([*first, *sorted(set(codes) - set(first))])}
    images = torch.cat([sheet.images[kept] for sheet, kept in zip(sheets, rows, strict=True)])
    return images, torch.tensor([place[code] for code in codes])


def subset(pictures: Pictures, hexcodes: list[str]) -> tuple[Tensor, list[int]]:
    """The pictures of those `hexcodes` the style has, and the place of each in `hexcodes`."""
    row = {code: place for place, code in enumerate(pictures.hexcodes)}
    found = [place for place, code in enumerate(hexcodes) if code in row]
    return pictures.images[[row[hexcodes[place]] for place in found]], found
