"""Pictures as people send and get them: files in, uint8 RGB out, and back.

What becomes of each kind: palette, grey, CMYK (without its colour profile) and 16-bit pictures
are converted to 8-bit RGB; transparency is laid over white; of an animation the first frame
counts; an EXIF orientation is applied. Refused: other formats, broken files, more than SIDE
pixels a side.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from solrl.errors import InputError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SIDE = 4096

#: First bytes of what people send by mistake.
SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"II*\x00", "a TIFF picture"),
    (b"MM\x00*", "a TIFF picture"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "an XML document"),
    (b"<!DOCTYPE", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"\x80\x04\x95", "a Python pickle"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89PNG", "a damaged PNG"),
    (b"\xff\xd8", "a damaged JPEG"),
    (b"GIF8", "a damaged GIF"),
    (b"RIFF", "a damaged WebP or another RIFF file"),
)


def decode(data: bytes, *, name: str) -> NDArray[np.uint8]:
    """One picture file -> uint8 [H, W, 3]. InputError says what is wrong with `name`."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            # Known from the header; nothing has been decoded yet.
            width, height = picture.size
            if max(width, height) > SIDE:
                raise InputError(
                    f"{name} is {width}x{height} pixels; at most {SIDE}x{SIDE} are decoded"
                )
            picture.load()
            return np.asarray(_to_rgb(ImageOps.exif_transpose(picture)))
    except UnidentifiedImageError as error:
        raise InputError(
            f"{name} is {describe(data)} and cannot be read as a picture; send {', '.join(FORMATS)}"
        ) from error
    except Image.DecompressionBombError as error:
        raise InputError(f"{name} is too large to decode: {error}") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        raise InputError(f"{name} is damaged or cut short: {error}") from error


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I;16"):
        # Pillow would clip 16-bit grey at 255 rather than scale it.
        values = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def describe(data: bytes) -> str:
    """What bytes that are not a picture seem to be, in a few words."""
    if not data:
        return "empty"
    start = data.lstrip()[:16]
    for signature, what in SIGNATURES:
        if start.lower().startswith(signature.lower()):
            return what
    if data[4:8] == b"ftyp":
        return f"an ISO media file ({data[8:12].decode(errors='replace')})"
    if data[8:11] == b'{"_' or data[8:10] == b'{"':
        return "a safetensors file"
    if all(32 <= byte < 127 or byte in b"\r\n\t" for byte in data[:64]):
        return f"text ({data[:24].decode()!r})"
    return f"of an unknown kind (it begins {data[:8].hex(' ')})"


def from_base64(text: str, *, name: str) -> bytes:
    """Plain base64 or a data: URL. Raises InputError."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InputError(f"{name} is not base64: {error}") from error


def png_base64(image: NDArray[Any]) -> str:
    """uint8 [H, W, 3] -> base64 of a PNG."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()
