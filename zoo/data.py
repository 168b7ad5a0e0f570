"""The default world's data: 150 everyday concepts in three picture styles, and their captions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

DATA = Path(__file__).resolve().parent / "data"
STYLES = ("flat", "3d", "noto")
SIZE = 32
COLUMNS = 15


@dataclass(frozen=True)
class Concept:
    """A thing that can be drawn. `unseen_style` names the style it is never trained in, if any."""

    name: str
    hexcode: str
    unseen_style: str | None


@lru_cache(maxsize=1)
def _concepts() -> tuple[Concept, ...]:
    rows = json.loads((DATA / "concepts.json").read_text(encoding="utf-8"))
    return tuple(Concept(row["name"], row["hexcode"], row["unseen_style"]) for row in rows)


def concepts() -> list[Concept]:
    """The 150 concepts, in the order of the sheets' tiles."""
    return list(_concepts())


def caption(concept: Concept, style: str) -> str:
    """The prompt of one picture, "strawberry, flat style"."""
    if style not in STYLES:
        raise ValueError(f"unknown style {style!r}: use one of {', '.join(STYLES)}")
    return f"{concept.name}, {style} style"


def parse_caption(text: str) -> tuple[str, str]:
    """(concept name, style) of a caption; ValueError when either is not of this world."""
    name, _, rest = text.rpartition(", ")
    style = rest.removesuffix(" style")
    if style not in STYLES or rest == style or name not in {c.name for c in _concepts()}:
        raise ValueError(
            f"caption {text!r} is not of this world: write '<concept>, <style> style' with a "
            f"concept of zoo/data/concepts.json and a style of {', '.join(STYLES)}"
        )
    return name, style


@lru_cache(maxsize=len(STYLES))
def _sheet(style: str) -> NDArray[np.uint8]:
    if style not in STYLES:
        raise ValueError(f"unknown style {style!r}: use one of {', '.join(STYLES)}")
    pixels = np.asarray(Image.open(DATA / f"{style}.webp").convert("RGB"))
    rows = pixels.shape[0] // SIZE
    tiles = pixels.reshape(rows, SIZE, COLUMNS, SIZE, 3).swapaxes(1, 2).reshape(-1, SIZE, SIZE, 3)
    tiles.setflags(write=False)
    return tiles


def load_sheet(style: str) -> NDArray[np.uint8]:
    """The style's pictures of all concepts, uint8 [150, 32, 32, 3], RGB on white."""
    return _sheet(style)


def real_image(caption: str) -> NDArray[np.uint8]:
    """The real picture a caption names, uint8 [32, 32, 3]."""
    name, style = parse_caption(caption)
    index = next(i for i, concept in enumerate(_concepts()) if concept.name == name)
    picture: NDArray[np.uint8] = _sheet(style)[index]
    return picture


def real_images(captions: Sequence[str]) -> NDArray[np.uint8]:
    """The real picture of every caption, [n, 32, 32, 3]."""
    return np.stack([real_image(caption) for caption in captions])


def seen_captions() -> list[str]:
    """Captions of all pairs pretraining may show."""
    return [
        caption(concept, style)
        for style in STYLES
        for concept in _concepts()
        if concept.unseen_style != style
    ]


def unseen_captions() -> list[str]:
    """Captions of the pairs held out of pretraining and RL."""
    return [
        caption(concept, style)
        for style in STYLES
        for concept in _concepts()
        if concept.unseen_style == style
    ]
