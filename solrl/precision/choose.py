"""Which precision runs here: a refusal or a choice, always with its reason; never a fall-back."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from solrl.config import PrecisionName
from solrl.errors import ConfigError

Precision = PrecisionName
Role = Literal["explore", "regenerate"]
Capability = tuple[int, int]

#: The GPU a precision's own kernels need, as CUDA compute capability, with its name.
NEEDS: dict[str, tuple[Capability, str]] = {
    "nvfp4": ((10, 0), "Blackwell"),
    "fp8": ((8, 9), "Ada, Hopper or later"),
    "bf16": ((8, 0), "Ampere or later"),
}
#: What `solrl.precision.apply` can make of a model in this release.
AVAILABLE: frozenset[str] = frozenset({"nvfp4-emulated", "bf16", "fp32"})


class Resolved(NamedTuple):
    """A precision that runs here (never "auto") and, in one sentence, why it is this one."""

    precision: Precision
    reason: str


def hardware() -> tuple[Capability | None, bool]:
    """(CUDA compute capability or None for a CPU, whether the CPU multiplies BF16 natively)."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    cpu = torch.cpu.get_capabilities()
    return capability, bool(cpu.get("amx_bf16") or cpu.get("avx512_bf16"))


def resolve(
    requested: str,
    *,
    capability: Capability | None,
    amx: bool,
    role: Role = "explore",
) -> Resolved:
    """Check `requested` against the hardware, or choose for "auto".

    capability: CUDA compute capability, None on a CPU. amx: the CPU has AMX-BF16 or AVX512-BF16.
    role: what the model is for; exploring may be coarse, regenerating may not.
    Raises ConfigError where the precision cannot run.
    """
    here = "a CPU" if capability is None else f"a GPU of compute capability {_dotted(capability)}"
    if requested == "auto":
        return _choose(capability, here, role)
    if requested == "fp16":
        raise ConfigError(
            'precision "fp16" is not offered: its range overflows in these models, and a CPU '
            f'cannot run it at all; set precision = "{_high(capability)}" on {here}'
        )
    if requested not in get_args(Precision):
        raise ConfigError(f"precision {requested!r} is not one of {', '.join(get_args(Precision))}")
    if requested == "bf16" and capability is None:
        if not amx:
            raise ConfigError(
                'precision "bf16" on this CPU: it has neither AMX-BF16 nor AVX512-BF16, and '
                "without them a BF16 product is about ten times slower than FP32; set precision "
                '= "fp32", the high precision of a CPU'
            )
        return Resolved("bf16", "asked for, and this CPU multiplies BF16 natively")
    if requested in NEEDS:
        needed, family = NEEDS[requested]
        if capability is None or capability < needed:
            cure = "nvfp4-emulated" if requested == "nvfp4" else _high(capability)
            raise ConfigError(
                f'precision "{requested}" needs {family} (compute capability {_dotted(needed)} or '
                f'higher) and this is {here}; set precision = "{cure}" or "auto"'
            )
    for name in get_args(Precision):
        if name == requested and name in AVAILABLE:
            return Resolved(name, f"asked for, and it runs on {here}")
    raise ConfigError(
        f'precision "{requested}": this release has no native kernels for it yet; set precision = '
        f'"{"nvfp4-emulated" if requested == "nvfp4" else "bf16"}"'
    )


def _choose(capability: Capability | None, here: str, role: Role) -> Resolved:
    if capability is None and role == "explore":
        return Resolved(
            "nvfp4-emulated",
            "auto: a CPU has no FP4 units, so values are quantized exactly as NVFP4 and multiplied "
            "in FP32: its results, not its speed",
        )
    if capability is None:
        return Resolved(
            "fp32",
            "auto: on a CPU the high precision is FP32, which needs no special instructions and "
            "gives every machine the same arithmetic",
        )
    if role == "explore":
        for fast in ("nvfp4", "fp8"):
            if fast in AVAILABLE and capability >= NEEDS[fast][0]:
                return Resolved(fast, f"auto: the fastest precision with kernels for {here}")
    high = _high(capability)
    return Resolved(high, f"auto: the fastest precision this release has kernels for on {here}")


def _high(capability: Capability | None) -> Literal["bf16", "fp32"]:
    return "bf16" if capability is not None and capability >= NEEDS["bf16"][0] else "fp32"


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
