"""DiffusionNFT's loss (method, section 4): contrast two implicit policies on clean latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Floor of the self-normalising weight w.
WEIGHT_FLOOR = 1e-5


@dataclass(frozen=True)
class NftLoss:
    """Per-sample values [n]: total = adv_clip * policy + kl_weight * kl."""

    total: Tensor
    policy: Tensor
    kl: Tensor


def noised(clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """x_t = (1 - t) x0 + t eps, fp32 [n,C,h,w]; times [n]."""
    t = _per_sample(times, clean)
    return (1 - t) * clean + t * noise


def diffusion_nft(
    *,
    velocity: Tensor,
    old_velocity: Tensor,
    base_velocity: Tensor,
    noisy: Tensor,
    clean: Tensor,
    times: Tensor,
    optimality: Tensor,
    nft_beta: float,
    kl_weight: float,
    adv_clip: float,
) -> NftLoss:
    """Velocities, noisy and clean latents [n,C,h,w]; times and optimality r [n].

    v+ = b v + (1-b) v_old, v- = (1+b) v_old - b v; x+- = x_t - t v+-;
    L+- = mean((x+- - x0)^2) / w+-, w+- = stopgrad mean |x+- - x0| in fp64, floored;
    policy = (r L+ + (1-r) L-) / b; kl = mean((v - v_base)^2). Only `velocity` carries gradient.
    At velocity = old_velocity the value is symmetric in r and 1 - r.
    """
    t = _per_sample(times, clean)
    b = nft_beta

    def distance(v: Tensor) -> Tensor:
        error = noisy - t * v - clean
        with torch.no_grad():
            weight = error.double().abs().flatten(1).mean(1).clamp(min=WEIGHT_FLOOR)
        return error.square().flatten(1).mean(1) / weight.to(error.dtype)

    plus = distance(b * velocity + (1 - b) * old_velocity)
    minus = distance((1 + b) * old_velocity - b * velocity)
    policy = (optimality * plus + (1 - optimality) * minus) / b
    kl = (velocity - base_velocity).square().flatten(1).mean(1)
    return NftLoss(adv_clip * policy + kl_weight * kl, policy, kl)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *([1] * (like.dim() - 1)))
