"""The K kept of N: extremes by proxy reward, whatever the rewards look like."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solrl.selection import Selection, contrast, select_extremes

NAN, INF = math.nan, math.inf

# name: (rewards, keep, best, worst, excluded)
CASES: dict[str, tuple[list[float], int, list[int], list[int], list[int]]] = {
    "plain": ([3, 1, 4, 1.5, 9], 2, [4], [1], []),
    "two each": ([3, 1, 4, 1.5, 9], 4, [4, 2], [1, 3], []),
    "N = K": ([2, 1], 2, [0], [1], []),
    "NaN is neither best nor worst": ([NAN, 1, 2, NAN, 3], 2, [4], [1], [0, 3]),
    "infinite is excluded on both sides": ([INF, 1, 2, -INF, 3], 2, [4], [1], [0, 3]),
    "ties go to the lower index": ([5, 5, 5, 1, 1, 1], 4, [0, 1], [3, 4], []),
    "all equal": ([7, 7, 7, 7, 7], 4, [0, 1], [2, 3], []),
    "zero and minus zero tie": ([0.0, -0.0, 0.0, -0.0], 2, [0], [1], []),
    "fewer finite than K, odd": ([NAN, 3, 1, 2, NAN], 4, [1, 3], [2], [0, 4]),
    "fewer finite than K, even": ([NAN, 3, 1, 2, 4], 6, [4, 1], [2, 3], [0]),
    "N < K": ([2, 1, 3], 24, [2, 0], [1], []),
    "one left": ([NAN, 5], 2, [1], [], [0]),
    "none left": ([NAN, INF], 2, [], [], [0, 1]),
    "no candidates": ([], 2, [], [], []),
    "negative": ([-3, -1, -2], 2, [1], [0], []),
}


@pytest.mark.parametrize("name", CASES)
def test_select_extremes(name: str) -> None:
    rewards, keep, best, worst, excluded = CASES[name]
    selection = select_extremes(rewards, keep)
    assert [i for i, rank in selection.kept if rank == "best"] == best
    assert [i for i, rank in selection.kept if rank == "worst"] == worst
    assert list(selection.excluded) == excluded


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True, width=16), max_size=40),
    st.integers(1, 20).map(lambda half: 2 * half),
)
def test_what_holds_for_any_rewards(rewards: list[float], keep: int) -> None:
    selection = select_extremes(rewards, keep)
    kept = [i for i, _ in selection.kept]
    finite = [i for i, reward in enumerate(rewards) if math.isfinite(reward)]
    assert len(set(kept)) == len(kept) == min(keep, len(finite))
    assert set(kept) <= set(finite)
    assert set(selection.excluded) == set(range(len(rewards))) - set(finite)
    best = [rewards[i] for i, rank in selection.kept if rank == "best"]
    worst = [rewards[i] for i, rank in selection.kept if rank == "worst"]
    left = [rewards[i] for i in finite if i not in kept]
    assert 0 <= len(best) - len(worst) <= 1
    assert best == sorted(best, reverse=True)
    assert worst == sorted(worst)
    if left and best and worst:
        assert min(best) >= max(left)
        assert max(worst) <= min(left)


def test_24_in_96() -> None:
    rewards = [(37 * i) % 96 / 96 for i in range(96)]
    selection = select_extremes(rewards, 24)
    assert [round(96 * rewards[i]) for i, _ in selection.kept] == [
        *range(95, 83, -1),
        *range(12),
    ]


def test_contrast_is_mean_best_minus_mean_worst() -> None:
    rewards = [1.0, 2.0, 3.0, 7.0]
    assert contrast(rewards, select_extremes(rewards, 4)) == 5.0 - 1.5


@pytest.mark.parametrize("kept", [(), ((0, "best"),), ((0, "worst"),)])
def test_contrast_without_two_sides_is_nan(kept: tuple[tuple[int, str], ...]) -> None:
    assert math.isnan(contrast([1.0], Selection(kept, ())))  # type: ignore[arg-type]
