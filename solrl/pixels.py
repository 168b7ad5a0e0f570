"""uint8 pictures as they travel between services: one resize, shared by senders and scorers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl.errors import InputError


def check_pixels(images: Tensor) -> None:
    """Raise InputError unless `images` is uint8 [n, height, width, 3] with no empty side."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
        raise InputError(
            f"images are {images.dtype} {list(images.shape)}; "
            "a scorer takes torch.uint8 [n, height, width, 3] with no empty side"
        )


def resize_uint8(images: Tensor, size: int) -> Tensor:
    """Bicubic, antialiased resize of uint8 [n, H, W, 3] to uint8 [n, size, size, 3].

    Computed in fp32 and rounded once, each picture on its own, so the same picture gives the same
    bytes alone or in a batch; pictures of the right size come back untouched. Scorers apply it to
    what is not of their size, so pixels resized by the sender score the same. Raises InputError.
    """
    check_pixels(images)
    if images.shape[1] == size and images.shape[2] == size:
        return images
    planes = images.permute(0, 3, 1, 2).float()
    resized = F.interpolate(planes, size=(size, size), mode="bicubic", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
