"""How every service process starts: its configuration, its log, its exit code."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from solrl.config import Config, load_config
from solrl.errors import ConfigError, SolrlError
from solrl.quiet import quiet_libraries


def config_from(arguments: Sequence[str]) -> Config:
    """`--config FILE [--section.key value]...` -> Config. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        epilog="Any setting of the file can be given as --section.key value."
    )
    parser.add_argument("--config", type=Path, required=True, help="TOML of the run")
    known, rest = parser.parse_known_args(arguments)
    overrides: dict[str, str] = {}
    words = iter(rest)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            raise ConfigError(f"argument {word!r} is not of the form --section.key value")
        if not equals and (value := next(words, "")) == "":
            raise ConfigError(f"argument {word!r} has no value")
        overrides[name] = value
    return load_config(known.config, overrides)


def main(run: Callable[[Config], None]) -> None:
    """Run a service; a known error is one line on stderr. Exit 2: configuration, 1: other."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    quiet_libraries()
    # Its line a call would drown the log; ours has the request id.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        run(config_from(sys.argv[1:]))
    except SolrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
