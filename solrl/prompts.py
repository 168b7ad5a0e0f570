"""Prompt files: one prompt a line."""

from __future__ import annotations

from pathlib import Path

from solrl.errors import ConfigError


def read_prompts(path: Path) -> list[str]:
    """The file's non-empty lines, in order. Raises ConfigError when there are none."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt file {path} cannot be read: {error}") from error
    prompts = [line for line in lines if line]
    if not prompts:
        raise ConfigError(f"prompt file {path} holds no prompt; write one a line")
    return prompts
