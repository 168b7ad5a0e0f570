"""Precision: what may run here (`choose`), what a model becomes (`replace`), NVFP4 itself."""

from solrl.precision.choose import Precision, Resolved, Role, hardware, resolve
from solrl.precision.layers import EmulatedConv1x1, EmulatedLinear
from solrl.precision.nvfp4 import Quantized, Scale, dequantize, fake_quantize, quantize
from solrl.precision.replace import LayerReport, apply, count_multiply_adds, fp4_share

__all__ = [
    "EmulatedConv1x1",
    "EmulatedLinear",
    "LayerReport",
    "Precision",
    "Quantized",
    "Resolved",
    "Role",
    "Scale",
    "apply",
    "count_multiply_adds",
    "dequantize",
    "fake_quantize",
    "fp4_share",
    "hardware",
    "quantize",
    "resolve",
]
