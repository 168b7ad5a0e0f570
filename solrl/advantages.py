"""Rewards -> advantages -> r, the optimality DiffusionNFT weighs a sample by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Scale = Literal["global_std", "group_std", "none"]


def advantages(
    groups: Sequence[Sequence[float]],
    *,
    scale: Scale = "global_std",
    centres: Sequence[float] | None = None,
) -> list[list[float]]:
    """A = (R - mean of its group) / (std + 1e-4), group by group as given (method, section 3).

    "global_std" takes the std over all groups' rewards together, "group_std" the group's own,
    "none" divides by 1. `centres` replaces the groups' means (centring on all N proxies). A group
    whose rewards are all equal gets zeros. Groups are lists, never keyed by prompt text, so the
    same prompt twice is two groups. All rewards must be finite.
    """
    everything = np.concatenate([np.asarray(group, np.float64) for group in groups])
    if not np.isfinite(everything).all():
        raise ValueError(f"rewards must be finite, seen {everything[~np.isfinite(everything)][0]}")
    result = []
    for index, group in enumerate(groups):
        rewards = np.asarray(group, np.float64)
        if np.ptp(rewards) == 0.0:
            result.append([0.0] * len(rewards))
            continue
        centre = rewards.mean() if centres is None else centres[index]
        divisor = {
            "global_std": float(everything.std()) + 1e-4,
            "group_std": float(rewards.std()) + 1e-4,
            "none": 1.0,
        }[scale]
        result.append([float(a) for a in (rewards - centre) / divisor])
    return result


def optimality(advantage: float, adv_clip: float) -> float:
    """r = clip(clip(A, -c, c) / 2c + 1/2, 0, 1)."""
    return float(np.clip(np.clip(advantage, -adv_clip, adv_clip) / (2 * adv_clip) + 0.5, 0.0, 1.0))
