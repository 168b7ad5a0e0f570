"""The three forms of a score request, read into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.datastructures import UploadFile
from torch import Tensor

from services.http import media_type_of
from solrl.clients.tensors import CONTENT_TYPE, unpack
from solrl.errors import InputError
from solrl.picture_files import decode, from_base64

MAX_IMAGES = 1024
#: Decoded pixels of one request's picture files, together.
MAX_PIXELS = 16 * 4096 * 4096

FORMS = (CONTENT_TYPE, "multipart/form-data", "application/json")


class ScoreRequest(BaseModel):
    """The JSON form."""

    model_config = ConfigDict(extra="forbid", strict=True)

    images: list[str] = Field(
        min_length=1, max_length=MAX_IMAGES, description="Picture files in base64, or data: URLs."
    )
    prompts: list[str] = Field(
        min_length=1, description="One a picture, or one for all.", examples=[["strawberry"]]
    )
    rewards: list[str] | None = Field(None, description="Default: the reward trained on.")


@dataclass(frozen=True)
class Raw:
    """Pictures not yet decoded (`files`, with their names) or already pixels (`images`, NHWC)."""

    files: Sequence[tuple[str, bytes]]
    images: Tensor | None
    prompts: list[str]
    rewards: list[str] | None

    def __len__(self) -> int:
        return len(self.files) if self.images is None else len(self.images)


async def read(request: Request) -> Raw:
    """The body in whichever form it came. InputError, RequestValidationError, 415."""
    match media_type_of(request, FORMS):
        case "application/json":
            return _json(await request.body())
        case "multipart/form-data":
            return await _multipart(request)
        case _:
            return _safetensors(await request.body())


def pictures(raw: Raw) -> Iterator[Tensor]:
    """uint8 [H, W, 3] each, decoded one at a time. InputError names the one that cannot be."""
    yield from raw.images if raw.images is not None else ()
    pixels = 0
    for name, data in raw.files:
        array = decode(data, name=name)
        pixels += array.shape[0] * array.shape[1]
        if pixels > MAX_PIXELS:
            raise InputError(
                f"the pictures up to {name} have {pixels} pixels, at most {MAX_PIXELS} are "
                "decoded for one request; send fewer at once"
            )
        yield torch.from_numpy(array.copy())


def check_prompts(prompts: Sequence[str], images: int) -> list[str]:
    """One prompt a picture; a single one stands for all. Raises InputError."""
    if images < 1 or images > MAX_IMAGES:
        raise InputError(f"{images} images were sent; a request takes 1 to {MAX_IMAGES}")
    if len(prompts) not in (1, images):
        raise InputError(
            f"{images} images came with {len(prompts)} prompts; send one for each, or one for all"
        )
    for place, prompt in enumerate(prompts):
        if not prompt.strip():
            raise InputError(f"prompt {place} is empty; a scorer needs the text of every image")
    return list(prompts) if len(prompts) == images else list(prompts) * images


def _json(body: bytes) -> Raw:
    try:
        form = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error
    files = [
        (f"image {place}", from_base64(text, name=f"image {place}"))
        for place, text in enumerate(form.images)
    ]
    return Raw(files, None, form.prompts, form.rewards)


async def _multipart(request: Request) -> Raw:
    async with request.form(max_files=MAX_IMAGES, max_fields=2 * MAX_IMAGES) as form:
        if unknown := set(form) - {"files", "prompts", "rewards"}:
            raise InputError(
                f"unknown parts {', '.join(sorted(unknown))}; known: files, prompts, rewards"
            )
        files = []
        for place, part in enumerate(form.getlist("files")):
            if not isinstance(part, UploadFile):
                raise InputError(
                    f"part {place} called files is text; send a file (curl: -F files=@a.png)"
                )
            files.append((f"image {place} ({part.filename})", await part.read()))
        prompts, rewards = _texts(form.getlist("prompts")), _texts(form.getlist("rewards"))
        return Raw(files, None, prompts, rewards or None)


def _texts(parts: Sequence[Any]) -> list[str]:
    if not all(isinstance(part, str) for part in parts):
        raise InputError("the parts called prompts and rewards are text, not files")
    return list(parts)


def _safetensors(body: bytes) -> Raw:
    arrays, about = unpack(body)
    if list(arrays) != ["images"] or arrays["images"].dtype != np.uint8:
        seen = {name: f"{array.dtype} {list(array.shape)}" for name, array in arrays.items()}
        raise InputError(f"the body holds {seen}; send one uint8 tensor `images` [n, H, W, 3]")
    images = torch.from_numpy(arrays["images"].copy())
    if images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
        raise InputError(f"images are {list(images.shape)}; send [n, H, W, 3] with no empty side")
    texts = TypeAdapter(list[str])
    try:
        return Raw(
            [],
            images,
            texts.validate_json(about.get("prompts", "")),
            texts.validate_json(about["rewards"]) if "rewards" in about else None,
        )
    except ValidationError as error:
        raise InputError(
            f"the metadata keys prompts and rewards hold JSON lists of text: {error}"
        ) from error
