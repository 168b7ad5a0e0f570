"""Layers that compute as NVFP4 would, on any device: both operands quantized, products in fp32.

The weight is quantized when it is set and held dequantized; activations are quantized in the
forward pass, one amax a row by default, so that an image does not depend on its batch mates. Only
the quantizer is claimed to be exact (`nvfp4.py`), not a GPU's order of accumulation. For
inference: no gradient passes the rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from solrl.errors import InputError
from solrl.precision.nvfp4 import Scale, check_k, dequantize, fake_quantize, quantize


class EmulatedLinear(nn.Module):
    """y = q(x) q(W)^T + b for x [..., K], in fp32, cast back to x's dtype.

    `weight` is a buffer [N, K] that `set_weight` overwrites in place, so a compiled model sees the
    new values without compiling again.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation_scale: Scale = "row"
    ) -> None:
        super().__init__()
        out_features, in_features = weight.shape
        check_k(in_features)
        self.in_features = in_features
        self.out_features = out_features
        self.activation_scale = activation_scale
        held = torch.empty(out_features, in_features, dtype=torch.float32, device=weight.device)
        self.register_buffer("weight", held)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.set_weight(weight)

    @classmethod
    def from_linear(cls, linear: nn.Linear, activation_scale: Scale = "row") -> EmulatedLinear:
        return cls(linear.weight, linear.bias, activation_scale)

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Quantize an fp32 master weight [N, K] (or [N, K, 1, 1]) into this layer, in place.

        For a LoRA pass W + (alpha / r) B A, merged from the pristine W each time. Raises
        InputError for another shape or a value that is not finite; the old weight then stays.
        """
        if weight.shape[:2] != self.weight.shape or weight.numel() != self.weight.numel():
            raise InputError(
                f"weight of shape {list(weight.shape)} does not fit this layer's "
                f"{list(self.weight.shape)}"
            )
        flat = weight.detach().reshape(self.weight.shape)
        self.weight.copy_(dequantize(quantize(flat, tensor_scale="tensor")))

    def forward(self, x: Tensor) -> Tensor:
        quantized = fake_quantize(x, self.activation_scale)
        return functional.linear(quantized, self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"activation_scale={self.activation_scale!r}"
        )


class EmulatedConv1x1(EmulatedLinear):
    """A 1x1 convolution as a linear over channels: K = in_channels, a row is a pixel.

    x [B, K, H, W] -> [B, N, H, W].
    """

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, activation_scale: Scale = "row") -> EmulatedConv1x1:
        return cls(conv.weight.flatten(1), conv.bias, activation_scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)
