"""Rank agreement, clustered intervals and diversity against hand values and simulation."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats as reference

from solrl.stats import clustered_mean, diversity, kendall_tau, spearman_rho, topk_overlap

# name: (a, b, tau-b, rho)
RANKS: dict[str, tuple[list[float], list[float], float, float]] = {
    "same order": ([1, 2, 3, 4], [10, 20, 30, 99], 1.0, 1.0),
    "reversed": ([1, 2, 3, 4], [4, 3, 2, 1], -1.0, -1.0),
    # 5 concordant pairs, 1 discordant; sum d^2 = 2.
    "one swap": ([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6, 1 - 6 * 2 / 60),
    # Tau-b: 5 concordant, 0 discordant, one pair tied on one side: 5 / sqrt(5 * 6).
    "a tie": ([1, 1, 2, 3], [1, 2, 3, 4], 5 / math.sqrt(30), 4.5 / math.sqrt(4.5 * 5)),
    "no spread": ([1, 1, 1], [1, 2, 3], math.nan, math.nan),
}


@pytest.mark.parametrize("name", RANKS)
def test_rank_agreement_by_hand(name: str) -> None:
    a, b, tau, rho = RANKS[name]
    for x, y in ((a, b), (b, a)):
        assert kendall_tau(x, y) == pytest.approx(tau, abs=1e-12, nan_ok=True)
        assert spearman_rho(x, y) == pytest.approx(rho, abs=1e-12, nan_ok=True)


def test_rank_agreement_ignores_monotone_changes_of_scale() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 24))
    assert kendall_tau(np.exp(a).tolist(), b.tolist()) == kendall_tau(a.tolist(), b.tolist())
    assert spearman_rho(np.exp(a).tolist(), b.tolist()) == spearman_rho(a.tolist(), b.tolist())


@pytest.mark.parametrize(
    ("proxy", "true", "k", "overlap"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 2, 1.0),
        ([4, 3, 2, 1], [1, 2, 3, 4], 2, 0.0),
        ([1, 2, 3, 4], [2, 1, 3, 4], 3, 2 / 3),
        ([0, 0, 0, 0], [4, 3, 2, 1], 2, 1.0),  # ties go to the lower index
        ([0, 0, 0, 0], [1, 2, 3, 4], 2, 0.0),
    ],
)
def test_topk_overlap(proxy: list[float], true: list[float], k: int, overlap: float) -> None:
    assert topk_overlap(proxy, true, k) == pytest.approx(overlap)


def test_clustered_mean_by_hand() -> None:
    """Cluster means 1, 2, 6: mean 3, standard error sqrt(7/3), t(.975, 2) = 4.302653."""
    seen = clustered_mean([[0.0, 2.0], [2.0], [5.0, 6.0, 7.0]])
    half = 4.302652729911275 * math.sqrt(7 / 3)
    assert seen.mean == pytest.approx(3.0)
    assert (seen.low, seen.high) == pytest.approx((3 - half, 3 + half))
    assert seen.as_dict() == {"mean": seen.mean, "low": seen.low, "high": seen.high}


def test_clustered_mean_agrees_with_scipy_on_cluster_means() -> None:
    rng = np.random.default_rng(1)
    clusters = rng.standard_normal((12, 7))
    expected = reference.ttest_1samp(clusters.mean(1), 0.0).confidence_interval(0.95)
    seen = clustered_mean(clusters.tolist())
    assert (seen.low, seen.high) == pytest.approx((expected.low, expected.high))


def test_repeating_pictures_of_a_prompt_does_not_narrow_the_interval() -> None:
    clusters = [[0.1, 0.5], [0.9, 0.2], [0.4, 0.3]]
    assert clustered_mean([c * 10 for c in clusters]).high == pytest.approx(
        clustered_mean(clusters).high
    )


def test_the_interval_covers_95_percent_of_clustered_data() -> None:
    """Prompt effects of unit size: an interval over single values would cover about 40 %."""
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(2000):
        data = rng.standard_normal((10, 1)) + 0.3 * rng.standard_normal((10, 20))
        interval = clustered_mean(data.tolist())
        covered += interval.low <= 0 <= interval.high
    assert 0.93 < covered / 2000 < 0.97


@pytest.mark.parametrize(("clusters", "mean"), [([], math.nan), ([[]], math.nan), ([[1, 3]], 2.0)])
def test_too_few_clusters_have_no_interval(clusters: list[list[float]], mean: float) -> None:
    seen = clustered_mean(clusters)
    assert seen.mean == pytest.approx(mean, nan_ok=True)
    assert math.isnan(seen.low)
    assert math.isnan(seen.high)


def test_diversity_is_the_root_mean_square_distance_of_pairs() -> None:
    images = np.random.default_rng(3).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    pixels = images.astype(np.float64) / 255
    squares = [((a - b) ** 2).mean() for a, b in combinations(pixels, 2)]
    assert diversity(images) == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)


@pytest.mark.parametrize(("other", "expected"), [(0, 0.0), (255, 1.0), (51, 0.2)])
def test_diversity_of_flat_pictures(other: int, expected: float) -> None:
    images = np.stack([np.zeros((2, 2, 3), np.uint8), np.full((2, 2, 3), other, np.uint8)])
    assert diversity(images) == pytest.approx(expected)
