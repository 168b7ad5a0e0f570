"""Deterministic flow solvers: state in fp32, schedule in fp64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

#: velocity(x [n,C,h,w], sigma) -> v [n,C,h,w]
Velocity = Callable[[Tensor, float], Tensor]


def uniform_sigmas(steps: int) -> Tensor:
    """fp64 [steps + 1] from 1 to 0, evenly spaced (SANA: no shift)."""
    return torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)


def euler(
    velocity: Velocity,
    noise: Tensor,
    sigmas: Tensor,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """Integrate dx/ds = v from sigmas[0] to sigmas[-1] by Euler's rule, x fp32 [n,C,h,w].

    Asks `cancelled` before every step and returns None as soon as it is true. Exact on a
    constant velocity field.
    """
    x = noise.float()
    schedule = sigmas.tolist()
    for now, then in pairwise(schedule):
        if cancelled():
            return None
        x = x + (then - now) * velocity(x, now).float()
    return x
