"""Which candidates are kept: the best and the worst by proxy reward (method: "24-in-96")."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Rank = Literal["best", "worst"]


@dataclass(frozen=True)
class Selection:
    """`kept` = (candidate index, "best" | "worst"), best first, then worst, each from its extreme.

    `excluded` = indices without a finite reward.
    """

    kept: tuple[tuple[int, Rank], ...]
    excluded: tuple[int, ...]


def select_extremes(rewards: Sequence[float], keep: int) -> Selection:
    """Keep the `keep`/2 best and `keep`/2 worst of N rewards; no index twice.

    A NaN or infinite reward excludes its candidate. Ties go to the lower candidate index. When
    fewer than `keep` finite candidates remain all of them are kept, the larger half as best.
    `keep` is even and >= 2 (checked by the configuration).
    """
    finite = [i for i, reward in enumerate(rewards) if math.isfinite(reward)]
    excluded = tuple(i for i, reward in enumerate(rewards) if not math.isfinite(reward))
    take = min(keep, len(finite))
    best = sorted(finite, key=lambda i: (-rewards[i], i))[: (take + 1) // 2]
    rest = sorted(set(finite) - set(best), key=lambda i: (rewards[i], i))
    worst = rest[: take // 2]
    return Selection(
        kept=tuple((i, "best") for i in best) + tuple((i, "worst") for i in worst),
        excluded=excluded,
    )


def contrast(rewards: Sequence[float], selection: Selection) -> float:
    """Mean reward of the kept best minus that of the kept worst; NaN when one side is empty."""
    best = [rewards[i] for i, rank in selection.kept if rank == "best"]
    worst = [rewards[i] for i, rank in selection.kept if rank == "worst"]
    if not best or not worst:
        return math.nan
    return sum(best) / len(best) - sum(worst) / len(worst)
