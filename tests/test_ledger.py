"""The ledger: an iteration is there whole or not at all, and nothing is there twice."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from solrl.ledger import Ledger, Reward


def candidate(iteration: int, slot: int = 0, number: int = 0, **changes: Any) -> dict[str, Any]:
    row = {
        "iteration": iteration,
        "slot": slot,
        "candidate": number,
        "epoch": 1,
        "prompt_index": 3,
        "prompt": "strawberry, flat style",
        "seed": 2**53 - 1,
        "explore_version": iteration,
        "explore_precision": "nvfp4-emulated",
        "explore_steps": 6,
        "solver": "euler",
        "train_version": None,
        "train_precision": None,
        "train_steps": None,
        "selected_as": None,
        "advantage": None,
    }
    return row | changes


def reward(iteration: int, number: int = 0, stage: str = "proxy", value: Any = 0.5) -> Reward:
    return Reward(iteration, 0, number, stage, "emoji_clip", "1", value)


def commit(ledger: Ledger, iteration: int, rows: Any = None, rewards: Any = None) -> None:
    ledger.commit_iteration(
        [candidate(iteration)] if rows is None else rows,
        [reward(iteration)] if rewards is None else rewards,
        iteration=iteration,
        epoch=1,
        policy_version=iteration,
        metrics='{"contrast": 0.1}',
    )


def counts(ledger: Ledger) -> tuple[int, ...]:
    return tuple(
        ledger.rows(f"SELECT count(*) FROM {table}")[0][0]
        for table in ("candidates", "rewards", "iterations")
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "odd #name?.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    opened = Ledger(path)
    yield opened
    opened.close()


def test_what_is_written_is_read_back(ledger: Ledger) -> None:
    row = candidate(0, number=7, selected_as="best", advantage=1.25, train_version=0)
    commit(ledger, 0, [row], [reward(0, 7), reward(0, 7, "true", 0.75)])
    assert [dict(r) for r in ledger.rows("SELECT * FROM candidates")] == [row]
    values = ledger.rows("SELECT stage, value FROM rewards ORDER BY stage")
    assert [tuple(r) for r in values] == [("proxy", 0.5), ("true", 0.75)]
    assert ledger.rows("SELECT metrics FROM iterations")[0]["metrics"] == '{"contrast": 0.1}'


def test_a_reward_that_failed_is_null_never_a_number(ledger: Ledger) -> None:
    commit(ledger, 0, rewards=[reward(0, 0, value=None), reward(0, 1, value=math.nan)])
    assert [r["value"] for r in ledger.rows("SELECT value FROM rewards")] == [None, None]


FAULTS: dict[str, tuple[Any, Any]] = {
    "candidate twice": ([candidate(1), candidate(1)], []),
    "candidate of an earlier iteration": ([candidate(1), candidate(0)], []),
    "reward twice": ([candidate(1)], [reward(1), reward(1, value=0.6)]),
    "reward of an earlier iteration": ([candidate(1)], [reward(0)]),
    "unknown stage": ([candidate(1)], [reward(1, stage="guess")]),
    "unknown rank": ([candidate(1, selected_as="middle")], []),
    "wrong type": ([candidate(1, seed="many")], []),
    "missing column": ([{k: v for k, v in candidate(1).items() if k != "prompt"}], []),
    "unknown column": ([candidate(1, colour="red")], []),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_iteration_that_fails_half_way_leaves_nothing(ledger: Ledger, name: str) -> None:
    commit(ledger, 0)
    rows, rewards = FAULTS[name]
    with pytest.raises(sqlite3.Error):
        commit(ledger, 1, [candidate(1, slot=1), *rows], [reward(1, 50), *rewards])
    assert counts(ledger) == (1, 1, 1)
    commit(ledger, 1)
    assert counts(ledger) == (2, 2, 2)


def test_a_crash_while_rows_are_made_leaves_nothing(ledger: Ledger) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield candidate(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit(ledger, 0, rows())
    assert counts(ledger) == (0, 0, 0)


def test_an_iteration_twice_is_an_error(ledger: Ledger) -> None:
    commit(ledger, 0)
    with pytest.raises(sqlite3.IntegrityError):
        commit(ledger, 0, [], [])


@pytest.mark.parametrize(("first", "left"), [(0, 0), (2, 2), (3, 3), (9, 4)])
def test_forget_from(ledger: Ledger, first: int, left: int) -> None:
    for iteration in range(4):
        commit(ledger, iteration)
    ledger.forget_from(first)
    assert counts(ledger) == (left, left, left)
    assert ledger.rows("SELECT max(iteration) FROM iterations")[0][0] == (
        left - 1 if left else None
    )


def test_a_reader_sees_committed_iterations_while_the_writer_is_alive(
    ledger: Ledger, path: Path
) -> None:
    commit(ledger, 0)
    reader = Ledger(path, read_only=True)
    assert counts(reader) == (1, 1, 1)
    commit(ledger, 1)
    assert counts(reader) == (2, 2, 2)
    reader.close()


def test_a_reader_cannot_write(ledger: Ledger, path: Path) -> None:
    commit(ledger, 0)
    ledger.close()
    reader = Ledger(path, read_only=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        commit(reader, 1)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.forget_from(0)
    assert counts(reader) == (1, 1, 1)
    reader.close()


def test_reading_a_ledger_that_is_not_there_does_not_make_one(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        Ledger(tmp_path / "none.sqlite", read_only=True)
    assert not list(tmp_path.iterdir())


def test_reopening_keeps_everything(ledger: Ledger, path: Path) -> None:
    commit(ledger, 0)
    ledger.close()
    again = Ledger(path)
    assert counts(again) == (1, 1, 1)
    again.close()


def test_seconds_a_phase_are_summed_over_iterations(ledger: Ledger) -> None:
    """One that ended untimed (its learner was killed) adds nothing; the metrics stay."""
    assert ledger.seconds() == {}
    for iteration in range(3):
        commit(ledger, iteration)
    ledger.time_iteration(0, {"explore": 2.5, "train": 1.0})
    ledger.time_iteration(2, {"explore": 0.5})
    assert ledger.seconds() == {"explore": 3.0, "train": 1.0}
    rows = ledger.rows("SELECT metrics FROM iterations ORDER BY iteration")
    assert [json.loads(row["metrics"]) for row in rows] == [
        {"contrast": 0.1, "seconds": {"explore": 2.5, "train": 1.0}},
        {"contrast": 0.1},
        {"contrast": 0.1, "seconds": {"explore": 0.5}},
    ]
    ledger.forget_from(2)
    assert ledger.seconds() == {"explore": 2.5, "train": 1.0}
