"""Rank agreement and paired gains with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b; NaN when one side has no spread."""
    return float(stats.kendalltau(a, b).statistic)


def spearman_rho(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rho; NaN when one side has no spread."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(stats.spearmanr(a, b).statistic)


def topk_overlap(proxy: Sequence[float], true: Sequence[float], k: int) -> float:
    """Share of the k best by `true` that are among the k best by `proxy`; ties to lower index."""

    def best(values: Sequence[float]) -> set[int]:
        return set(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])

    return len(best(proxy) & best(true)) / k


@dataclass(frozen=True)
class Interval:
    """A mean over clusters and its 95 % t-interval; NaN bounds for fewer than two clusters."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def clustered_mean(clusters: Sequence[Sequence[float]]) -> Interval:
    """Mean of the cluster means with Student's interval over clusters (prompts).

    Values within a cluster are dependent, so only the spread between clusters counts.
    """
    means = np.array([np.mean(cluster) for cluster in clusters if len(cluster)], np.float64)
    mean = float(means.mean()) if len(means) else math.nan
    if len(means) < 2:
        return Interval(mean, math.nan, math.nan)
    half = float(stats.t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means)))
    return Interval(mean, mean - half, mean + half)


def diversity(images: NDArray[np.uint8]) -> float:
    """Root mean square distance of two pictures of one prompt; uint8 [n,H,W,3] -> [0, 1].

    Uses E|x - y|^2 = 2 var, so it is linear in n.
    """
    pixels = images.reshape(len(images), -1).astype(np.float64) / 255.0
    return float(np.sqrt(2.0 * pixels.var(axis=0, ddof=1).mean()))
