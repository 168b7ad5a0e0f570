"""The ledger: one row a candidate of a run, in SQLite; the learner is its only writer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCHEMA = """
CREATE TABLE IF NOT EXISTS candidates (
  iteration INTEGER NOT NULL, slot INTEGER NOT NULL, candidate INTEGER NOT NULL,
  epoch INTEGER NOT NULL, prompt_index INTEGER NOT NULL, prompt TEXT NOT NULL,
  seed INTEGER NOT NULL,
  explore_version INTEGER NOT NULL, explore_precision TEXT NOT NULL,
  explore_steps INTEGER NOT NULL, solver TEXT NOT NULL,
  train_version INTEGER, train_precision TEXT, train_steps INTEGER,
  selected_as TEXT CHECK (selected_as IN ('best', 'worst')),
  advantage REAL,
  PRIMARY KEY (iteration, slot, candidate)
) STRICT;
CREATE TABLE IF NOT EXISTS rewards (
  iteration INTEGER NOT NULL, slot INTEGER NOT NULL, candidate INTEGER NOT NULL,
  stage TEXT NOT NULL CHECK (stage IN ('proxy', 'true', 'audit', 'ceiling')),
  name TEXT NOT NULL, version TEXT NOT NULL, value REAL,
  PRIMARY KEY (iteration, slot, candidate, stage, name)
) STRICT;
CREATE TABLE IF NOT EXISTS iterations (
  iteration INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, policy_version INTEGER NOT NULL,
  metrics TEXT NOT NULL
) STRICT;
"""


@dataclass(frozen=True)
class Reward:
    """One reward of one candidate: stage 'proxy' (explored), 'true' (regenerated), 'audit'
    (regenerated for rank agreement), 'ceiling' (full precision at the explorer's steps)."""

    iteration: int
    slot: int
    candidate: int
    stage: str
    name: str
    version: str
    value: float | None


class Ledger:
    """Open for writing by the learner, or `read_only` by everyone else."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        if read_only:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)
        else:
            self._db = sqlite3.connect(path, timeout=10)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        self._db.row_factory = sqlite3.Row

    def close(self) -> None:
        self._db.close()

    def commit_iteration(
        self,
        candidates: Iterable[Mapping[str, Any]],
        rewards: Iterable[Reward],
        *,
        iteration: int,
        epoch: int,
        policy_version: int,
        metrics: str,
    ) -> None:
        """Write one iteration whole or not at all; a row that is there already is an error."""
        with self._db:
            for row in candidates:
                names = ", ".join(row)
                marks = ", ".join(f":{name}" for name in row)
                self._db.execute(f"INSERT INTO candidates ({names}) VALUES ({marks})", dict(row))
            self._db.executemany(
                "INSERT INTO rewards VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (r.iteration, r.slot, r.candidate, r.stage, r.name, r.version, r.value)
                    for r in rewards
                ],
            )
            self._db.execute(
                "INSERT INTO iterations VALUES (?, ?, ?, ?)",
                (iteration, epoch, policy_version, metrics),
            )

    def time_iteration(self, iteration: int, seconds: Mapping[str, float]) -> None:
        """Say again, once an iteration has ended, what each phase of it took."""
        with self._db:
            self._db.execute(
                "UPDATE iterations SET metrics = json_set(metrics, '$.seconds', json(?)) "
                "WHERE iteration = ?",
                (json.dumps(seconds), iteration),
            )

    def seconds(self) -> dict[str, float]:
        """Seconds a phase, summed over all iterations."""
        rows = self.rows(
            "SELECT key, SUM(value) AS total "
            "FROM iterations, json_each(metrics, '$.seconds') GROUP BY key"
        )
        return {row["key"]: row["total"] for row in rows}

    def forget_from(self, iteration: int) -> None:
        """Drop rows of `iteration` and later: their checkpoint never became durable."""
        with self._db:
            for table in ("candidates", "rewards", "iterations"):
                self._db.execute(f"DELETE FROM {table} WHERE iteration >= ?", (iteration,))

    def rows(self, query: str, parameters: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        """Read-only query for reports."""
        return self._db.execute(query, parameters).fetchall()
