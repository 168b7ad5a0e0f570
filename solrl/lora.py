"""LoRA as numbers: bytes in diffusers' format, merging into a base, drawing a fresh one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from solrl.errors import AdapterError

_PREFIX = "transformer."
#: The header key diffusers reads rank and alpha from.
_METADATA = "lora_adapter_metadata"


@dataclass(frozen=True)
class Lora:
    """`pairs[module] = (A [r, in], B [out, r])`, fp32; acts as W + (alpha / rank) B A."""

    rank: int
    alpha: float
    pairs: Mapping[str, tuple[Tensor, Tensor]]

    def delta(self, module: str) -> Tensor:
        """(alpha / rank) B A of one module, fp32 [out, in]."""
        a, b = self.pairs[module]
        return (self.alpha / self.rank) * (b.float() @ a.float())

    def lerp(self, other: Lora, weight: float) -> Lora:
        """weight * self + (1 - weight) * other, factor by factor (the paper's EMAs)."""
        return Lora(
            self.rank,
            self.alpha,
            {
                name: (
                    weight * a + (1 - weight) * other.pairs[name][0],
                    weight * b + (1 - weight) * other.pairs[name][1],
                )
                for name, (a, b) in self.pairs.items()
            },
        )


def target_modules(transformer: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Names of the linears whose name ends in one of `targets`, sorted."""
    return sorted(
        name
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(tuple("." + t for t in targets))
    )


def gaussian(
    transformer: nn.Module, names: list[str], *, rank: int, alpha: float, seed: int
) -> Lora:
    """A of std 1/rank (peft's "gaussian"), B = 0: acts as the base. A pure function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for name in names:
        linear = cast(nn.Linear, transformer.get_submodule(name))
        a = torch.randn(rank, linear.in_features, generator=generator) / rank
        pairs[name] = (a, torch.zeros(linear.out_features, rank))
    return Lora(rank, alpha, pairs)


def to_bytes(lora: Lora) -> bytes:
    """diffusers' `pytorch_lora_weights.safetensors`; equal weights give equal bytes.

    The header holds one key only: safetensors does not promise an order among several.
    """
    tensors = {}
    for name, (a, b) in lora.pairs.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a.detach().float().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b.detach().float().contiguous()
    metadata = {
        f"{_PREFIX}r": lora.rank,
        f"{_PREFIX}lora_alpha": lora.alpha,
        f"{_PREFIX}target_modules": sorted(lora.pairs),
    }
    return save(tensors, metadata={_METADATA: json.dumps(metadata, sort_keys=True)})


def from_bytes(data: bytes, *, source: str = "adapter") -> Lora:
    """Inverse of `to_bytes`; AdapterError when alpha, a half of a pair or finiteness is missing."""
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise AdapterError(f"{source} is not a safetensors file: {error}") from error
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = json.loads(header.get("__metadata__", {}).get(_METADATA, "{}"))
    if not {f"{_PREFIX}r", f"{_PREFIX}lora_alpha"} <= metadata.keys():
        raise AdapterError(
            f"{source} has no {_METADATA} with r and lora_alpha in its header, so alpha is unknown"
        )
    names = sorted({key.rsplit(".lora_", 1)[0].removeprefix(_PREFIX) for key in tensors})
    pairs = {}
    for name in names:
        try:
            a = tensors[f"{_PREFIX}{name}.lora_A.weight"]
            b = tensors[f"{_PREFIX}{name}.lora_B.weight"]
        except KeyError as error:
            raise AdapterError(f"{source} lacks {error.args[0]}") from error
        if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise AdapterError(f"{source} holds non-finite values in {name}")
        pairs[name] = (a.float(), b.float())
    return Lora(int(metadata[f"{_PREFIX}r"]), float(metadata[f"{_PREFIX}lora_alpha"]), pairs)


def pristine_weights(transformer: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """fp32 copies of the named linears' weights; take them before any layer is quantized."""
    return {
        name: cast(nn.Linear, transformer.get_submodule(name)).weight.detach().float().clone()
        for name in names
    }


class Merger:
    """Writes pristine base + delta into a model in place.

    Every merge starts from the pristine copy, so v1 -> v2 -> v1 is bit-equal. A module with
    `set_weight` (an emulated quantized layer) re-quantizes; shapes never change, so compiled code
    stays valid.
    """

    def __init__(self, transformer: nn.Module, pristine: Mapping[str, Tensor]) -> None:
        self._modules = {name: transformer.get_submodule(name) for name in pristine}
        self._pristine = pristine

    @property
    def names(self) -> list[str]:
        return sorted(self._modules)

    def check(self, lora: Lora, *, source: str) -> None:
        """AdapterError unless the adapter binds exactly these modules, fits and stays finite.

        What passes cannot fail half-way through `merge`.
        """
        missing = sorted(set(self._modules) - set(lora.pairs))
        foreign = sorted(set(lora.pairs) - set(self._modules))
        if missing or foreign:
            raise AdapterError(
                f"{source} binds {len(set(lora.pairs) & set(self._modules))} of "
                f"{len(self._modules)} modules; missing: {', '.join(missing[:4]) or 'none'}; "
                f"unknown: {', '.join(foreign[:4]) or 'none'}"
            )
        for name, (a, b) in lora.pairs.items():
            out, inner = self._pristine[name].shape
            if tuple(a.shape) != (lora.rank, inner) or tuple(b.shape) != (out, lora.rank):
                raise AdapterError(
                    f"{source}: {name} has A {tuple(a.shape)} and B {tuple(b.shape)}, the base "
                    f"needs ({lora.rank}, {inner}) and ({out}, {lora.rank})"
                )
            if not torch.isfinite(self._pristine[name] + lora.delta(name)).all():
                raise AdapterError(f"{source}: base + (alpha/r) B A of {name} overflows")

    def merge(self, lora: Lora | None) -> None:
        """Set every module to base (None) or base + delta."""
        with torch.no_grad():
            for name, module in self._modules.items():
                weight = self._pristine[name]
                if lora is not None:
                    weight = weight + lora.delta(name).to(weight.device)
                if hasattr(module, "set_weight"):
                    cast(Any, module).set_weight(weight)
                else:
                    cast(nn.Linear, module).weight.copy_(weight)
