"""Pictures as files: read one safely, write one, lay many out as a sheet."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from solrl import atomic
from solrl.errors import InputError

#: Decoded pixels a picture may have; a small file can claim many more.
MAX_PIXELS = 64_000_000


def read(path: Path) -> NDArray[np.uint8]:
    """uint8 RGB [H, W, 3] of a picture file. Raises InputError when it is none."""
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise InputError(
                    f"{path} is {picture.width} x {picture.height}: more than the "
                    f"{MAX_PIXELS:,} pixels allowed"
                )
            return np.asarray(picture.convert("RGB"))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise InputError(f"picture {path} is not a file") from error
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise InputError(f"{path} cannot be read as a picture: {error}") from error


def decode_png(data: bytes) -> NDArray[np.uint8]:
    """uint8 RGB [H, W, 3] of a PNG that a service of ours made."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as picture:
        return np.asarray(picture.convert("RGB"))


def write_png(path: Path, picture: NDArray[np.uint8] | Image.Image) -> None:
    """Write uint8 RGB [H, W, 3] as PNG, whole or not at all."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    data = io.BytesIO()
    image.save(data, "PNG")
    atomic.write_bytes(path, data.getvalue())


def sheet(
    pictures: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    frames: Sequence[str | None],
    *,
    title: str,
    columns: int = 12,
    side: int = 64,
) -> Image.Image:
    """Lay out uint8 pictures [H, W, 3], each with its caption, framed in a colour or not at all."""
    font = ImageFont.load_default(size=11)
    gap, text = 8, 15
    width, height = side + 2 * gap, side + 2 * gap + text
    rows = -(-len(pictures) // columns)
    head = 28
    canvas = Image.new("RGB", (columns * width, head + rows * height), "white")
    draw = ImageDraw.Draw(canvas)
    draw.text((gap, 6), title, fill="black", font=ImageFont.load_default(size=14))
    for place, (picture, caption, frame) in enumerate(zip(pictures, captions, frames, strict=True)):
        x, y = place % columns * width, head + place // columns * height
        image = Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST)
        canvas.paste(image, (x + gap, y + gap))
        if frame is not None:
            outline = (x + gap - 4, y + gap - 4, x + gap + side + 3, y + gap + side + 3)
            draw.rectangle(outline, outline=frame, width=3)
        centre = x + gap + (side - draw.textlength(caption, font=font)) / 2
        draw.text((centre, y + gap + side + 3), caption, fill="black", font=font)
    return canvas
