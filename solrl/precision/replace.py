"""Put a model into a precision, layer by layer, and say what became of each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from solrl.errors import ConfigError
from solrl.precision.choose import AVAILABLE, Precision
from solrl.precision.layers import EmulatedConv1x1, EmulatedLinear
from solrl.precision.nvfp4 import BITS_PER_VALUE, BLOCK, Scale

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class LayerReport:
    """What one layer (or one attention's products) computes in, and why.

    multiply_adds: of the counted forward pass, 0 when none was counted.
    bytes: of the weights as this precision stores them (NVFP4: 4.5 bits a weight).
    resident_bytes: what they occupy in this process; the emulation keeps FP32.
    """

    name: str
    precision: str
    reason: str
    multiply_adds: int
    bytes: int
    resident_bytes: int


def apply(
    model: nn.Module,
    *,
    precision: Precision,
    skip: Sequence[str] = (),
    min_side: int = 0,
    activation_scale: Scale = "row",
    multiply_adds: Mapping[str, int] | None = None,
) -> list[LayerReport]:
    """Put `model` into `precision` in place; one report a linear, convolution or counted module.

    "nvfp4-emulated" replaces every `nn.Linear` and 1x1 `nn.Conv2d` except those whose name matches
    a pattern of `skip` (fnmatch), those whose larger side is <= `min_side` (method of the paper's
    presets), LoRA side branches, and those whose K is not a multiple of 16. "bf16" and "fp32" cast
    the whole model. `multiply_adds`: from `count_multiply_adds`, taken before.
    Raises ConfigError for a precision that needs `resolve` first or has no kernels in this
    release, and for a pattern that matches no module.
    """
    if precision not in AVAILABLE:
        raise ConfigError(
            f'a model cannot be put into precision "{precision}"; resolve it to one of '
            f"{', '.join(sorted(AVAILABLE))}"
        )
    counts = multiply_adds or {}
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"skip pattern {pattern!r} matches no module of {type(model).__name__}; modules "
                f"are named like {', '.join(names[1:4])}"
            )
    if precision in ("bf16", "fp32"):
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32)

    reports = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, (nn.Linear, nn.Conv2d)) and not counts.get(name):
            continue
        reason = (
            f"the model runs in {precision}"
            if precision != "nvfp4-emulated"
            else _why_not(name, module, skip, min_side)
        )
        done = module
        if reason is None and isinstance(module, (nn.Linear, nn.Conv2d)):
            done = _emulated(module, activation_scale)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, done)
        reports.append(_report(name, done, reason, counts.get(name, 0)))
    return reports


def fp4_share(
    reports: Iterable[LayerReport], scope_prefix: str | tuple[str, ...] = "transformer_blocks."
) -> float:
    """Share of the multiply-adds under `scope_prefix` that run in FP4, emulated or native.

    The denominator holds linears, convolutions of every kind and the attention products.
    Raises ConfigError when none were counted there.
    """
    scope = [report for report in reports if report.name.startswith(scope_prefix)]
    total = sum(report.multiply_adds for report in scope)
    if not total:
        raise ConfigError(
            f"no multiply-adds were counted under {scope_prefix!r}; give apply() the result of "
            "count_multiply_adds()"
        )
    fp4 = sum(report.multiply_adds for report in scope if report.precision.startswith("nvfp4"))
    return fp4 / total


def count_multiply_adds(model: nn.Module, example_kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Multiply-adds of one forward pass, by the module that does them itself (not its children).

    An attention module's own are its products of queries, keys and values. Runs
    `model(**example_kwargs)` once; count before `torch.compile` and before `apply`.
    """
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={on_cpu: _cpu_attention_flops})
    with torch.no_grad(), counter:
        model(**example_kwargs)
    root = type(model).__name__
    totals = {
        name.removeprefix(root).removeprefix("."): sum(flops.values()) // 2
        for name, flops in counter.get_flop_counts().items()
        if name == root or name.startswith(root + ".")
    }
    own = dict(totals)
    for name, total in totals.items():
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in own:
                own[parent] -= total
                break
    return {name: count for name, count in own.items() if count}


def _why_not(name: str, module: nn.Module, skip: Sequence[str], min_side: int) -> str | None:
    """Why this module is left as it is, or None when it becomes FP4."""
    match module:
        case nn.Conv2d():
            shape = (module.kernel_size, module.stride, module.groups)
            if shape != ((1, 1), (1, 1), 1) or module.padding not in ((0, 0), "valid"):
                return "not a plain 1x1 convolution over all channels"
            k, n = module.in_channels, module.out_channels
        case nn.Linear():
            k, n = module.in_features, module.out_features
        case _:
            return "products of two activations"
    for pattern in skip:
        if fnmatchcase(name, pattern):
            return f"skipped by {pattern!r}"
    if ".lora_A." in name or ".lora_B." in name:
        return "LoRA side branch"
    if max(k, n) <= min_side:
        return f"larger side {max(k, n)} <= {min_side}"
    return f"K = {k} is not a multiple of {BLOCK}" if k % BLOCK else None


def _emulated(module: nn.Linear | nn.Conv2d, activation_scale: Scale) -> EmulatedLinear:
    if isinstance(module, nn.Conv2d):
        return EmulatedConv1x1.from_conv(module, activation_scale)
    return EmulatedLinear.from_linear(module, activation_scale)


def _report(name: str, module: nn.Module, reason: str | None, multiply_adds: int) -> LayerReport:
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    bias_bytes = bias.nbytes if isinstance(bias, Tensor) else 0
    resident = bias_bytes + (weight.nbytes if isinstance(weight, Tensor) else 0)
    if isinstance(module, EmulatedLinear):
        stored = int(module.weight.numel() * BITS_PER_VALUE / 8) + 4 + bias_bytes
        scale = f"activation scale a {module.activation_scale}"
        return LayerReport(name, "nvfp4-emulated", scale, multiply_adds, stored, resident)
    parameter = next(module.parameters(), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    precision = _DTYPE_NAMES.get(dtype, str(dtype))
    return LayerReport(name, precision, reason or "", multiply_adds, resident, resident)


def _cpu_attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))
