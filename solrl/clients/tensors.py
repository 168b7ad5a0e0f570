"""One safetensors body: the only way arrays travel over HTTP. No pickle, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from solrl.errors import InputError

CONTENT_TYPE = "application/x-safetensors"


def pack(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Arrays by name and text by key -> one body."""
    return save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, dict(metadata))


def unpack(body: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays and metadata of a body. Raises InputError when it is not whole safetensors."""
    try:
        arrays = load(body)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"the body of {len(body)} bytes is not safetensors: {error}") from error
    # The library checked the header but does not hand its metadata out.
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    return arrays, header.get("__metadata__") or {}
