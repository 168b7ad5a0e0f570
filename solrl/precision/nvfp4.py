"""NVFP4: the quantizer, bit-equal to torchao 0.18's `nvfp4_quantize`, in plain torch operations.

An element is E2M1 (0 .5 1 1.5 2 3 4 6 and their negatives). Sixteen consecutive values along K
share an E4M3 block scale, and a tensor (or a row) shares one fp32 tensor scale:
value = element * block scale * tensor scale, 4.5 bits a value. Format: NVIDIA's NVFP4; the
conventions taken from torchao are the block scale's floor at E4M3's smallest normal and the
product with a reciprocal instead of a quotient.

`quantize` makes the stored form; `fake_quantize` gives the same values without storing them, as
element-wise work that `torch.compile` fuses. Layers that compute with it: `layers.py`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from solrl.errors import InputError

Scale = Literal["row", "tensor"]

#: Values that share a block scale.
BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
#: Keeps every reciprocal finite and rounds subnormal numbers to zero, so that all-zero rows need
#: no special case and a processor that flushes subnormals gives the same bits. torchao has no
#: floor: there a tensor whose largest magnitude is below 3.2e-32 ends in Inf and NaN.
TENSOR_SCALE_MIN = 2.0**-116
#: Stored bits a value, the block scale included.
BITS_PER_VALUE = 4.5


class Quantized(NamedTuple):
    """A tensor [..., K] in NVFP4.

    packed: uint8 [..., K/2], two codes a byte, the even index in the low nibble.
    block_scale: float8_e4m3fn [..., K/16].
    tensor_scale: fp32, [] for scale "tensor" and [..., 1] for scale "row".
    """

    packed: Tensor
    block_scale: Tensor
    tensor_scale: Tensor


def quantize(x: Tensor, *, tensor_scale: Scale = "row") -> Quantized:
    """Quantize `x` [..., K] (any float type; computed in fp32).

    Raises InputError when K is not a multiple of 16 or a value is not finite.
    """
    check_k(x.shape[-1])
    if not bool(torch.isfinite(x).all()):
        raise InputError(
            f"NVFP4 cannot hold NaN or Inf: {int((~torch.isfinite(x)).sum())} of {x.numel()} "
            "values are not finite; look for what produced them"
        )
    scaled, block_scale, scale = _scaled(x, tensor_scale)
    element = _round_to_e2m1(scaled)
    magnitude = element.abs()
    # The codes 0..7 of 0 .5 1 1.5 2 3 4 6, and 8 for the sign (which zero keeps too).
    code = torch.where(magnitude < 2, 2 * magnitude, magnitude + 2)
    code = torch.where(magnitude > 4, 7, code) + 8 * torch.signbit(scaled)
    code = code.to(torch.uint8).flatten(-2)
    packed = code[..., 0::2] | (code[..., 1::2] << 4)
    return Quantized(packed, block_scale.squeeze(-1).to(torch.float8_e4m3fn), scale)


def dequantize(quantized: Quantized) -> Tensor:
    """The fp32 values [..., K] that `quantized` stands for."""
    packed, block_scale, scale = quantized
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).int()
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    element = torch.cat([grid, -grid])[codes].unflatten(-1, (-1, BLOCK))
    values: Tensor = element * (block_scale.float() * scale).unsqueeze(-1)
    return values.flatten(-2)


def fake_quantize(x: Tensor, scale: Scale = "row") -> Tensor:
    """`dequantize(quantize(x))` in one pass: fp32 [..., K], the same bits eager and compiled.

    K must be a multiple of 16. Nothing is checked here (that would break a compiled graph): a NaN
    or Inf turns its whole row, or tensor, to NaN. Not differentiable: for inference.
    """
    scaled, block_scale, tensor_scale = _scaled(x, scale)
    # Adding zero gives zero one sign, whatever the compiler makes of signed zeros.
    element = _round_to_e2m1(scaled) + 0.0
    return (element * (block_scale * tensor_scale.unsqueeze(-1))).flatten(-2)


def check_k(k: int) -> None:
    """Raise InputError unless rows of `k` values fall into whole blocks."""
    if k % BLOCK:
        raise InputError(
            f"NVFP4 needs K to be a multiple of {BLOCK}, got K = {k}; leave the layer in high "
            "precision"
        )


def _scaled(x: Tensor, scale: Scale) -> tuple[Tensor, Tensor, Tensor]:
    """`x` in units of its scales [..., K/16, 16], block scale [..., K/16, 1], tensor scale.

    The order of the operations is torchao's: rounding depends on it.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    block_amax = blocks.abs().amax(-1)
    amax = block_amax.amax() if scale == "tensor" else block_amax.amax(-1, keepdim=True)
    tensor_scale = (amax / (E4M3_MAX * E2M1_MAX)).clamp(min=TENSOR_SCALE_MIN)
    block_scale = (block_amax / E2M1_MAX / tensor_scale).clamp(E4M3_MIN_NORMAL, E4M3_MAX)
    block_scale = block_scale.to(torch.float8_e4m3fn).float()
    reciprocal = (1.0 / tensor_scale) / block_scale
    scaled = (blocks * reciprocal.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return scaled, block_scale.unsqueeze(-1), tensor_scale


def _round_to_e2m1(scaled: Tensor) -> Tensor:
    """Nearest E2M1 value, ties to the even code; |scaled| <= 6.

    The grid's step is .5 below 2, 1 below 4 and 2 above, and a tie's even multiple of the step is
    the even code in each range.
    """
    magnitude = scaled.abs()
    per_step = torch.where(magnitude < 2, 2.0, torch.where(magnitude < 4, 1.0, 0.5))
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(scaled * per_step) * step
