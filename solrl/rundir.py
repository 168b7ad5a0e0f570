"""A run's directory: config, ledger, checkpoints, adapters. The checkpoint is the only record.

`runs/<name>/` = config.toml, state (lock, epoch), ledger.sqlite, checkpoints/<iterations done>/,
adapters/<version>/, ema/<version>/, evaluation and report files, TensorBoard events.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from solrl import atomic, lora
from solrl.config import Config, load_config, to_toml
from solrl.errors import BusyError, ConfigError, SolrlError
from solrl.training import Trainer

#: Settings a resumed run may change; everything else decides what the run is.
RESUME_MAY_CHANGE = {
    ("run", "iterations"),
    ("run", "directory"),
    ("run", "adapters"),
    ("run", "keep_checkpoints"),
}
RESUME_MAY_CHANGE_SECTIONS = {"services", "evaluate"}


class CheckpointState(BaseModel):
    """Counters of a checkpoint, and the hash of each file beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    iterations_done: int = Field(ge=0)
    epoch: int = Field(ge=1)
    optimizer_steps: int = Field(ge=0)
    skipped_steps: int = Field(ge=0)
    parent_adapter: str | None
    files: dict[str, str]


class RunDirectory:
    """Open with `create` or `resume`; holds an exclusive lock until `close`."""

    def __init__(self, path: Path, config: Config, epoch: int, lock: IO[str]) -> None:
        self.path = path
        self.config = config
        self.epoch = epoch
        self._lock = lock

    @classmethod
    def create(cls, config: Config) -> RunDirectory:
        """A new run; ConfigError when the directory is used already."""
        path = config.run.directory / config.run.name
        # A start that died before config.toml was written leaves only these.
        if path.exists() and {p.name for p in path.iterdir()} - {"lock", "epoch"}:
            raise ConfigError(
                f"run directory {path} is already used; continue it with --resume, or choose "
                "another --run.name"
            )
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        atomic.write_text(path / "epoch", "1\n")
        atomic.write_text(path / "config.toml", to_toml(config))
        return cls(path, config, 1, lock)

    @classmethod
    def resume(cls, config: Config) -> RunDirectory:
        """An earlier run under a new epoch; ConfigError when it is none or its settings differ."""
        path = config.run.directory / config.run.name
        if not (path / "config.toml").is_file():
            raise ConfigError(f"--resume: {path} holds no run (no config.toml)")
        before = load_config(path / "config.toml", environment={}).model_dump(mode="json")
        now = config.model_dump(mode="json")
        changed = [
            f"{section}.{key}: was {before[section][key]!r}, now {value!r}"
            for section, values in now.items()
            if section not in RESUME_MAY_CHANGE_SECTIONS
            for key, value in values.items()
            if before[section][key] != value and (section, key) not in RESUME_MAY_CHANGE
        ]
        if changed:
            raise ConfigError(
                f"--resume: the settings of {path} cannot change:\n  " + "\n  ".join(changed)
            )
        lock = _lock(path)
        epoch = int((path / "epoch").read_text()) + 1
        atomic.write_text(path / "epoch", f"{epoch}\n")
        atomic.write_text(path / "config.toml", to_toml(config))
        return cls(path, config, epoch, lock)

    def close(self) -> None:
        self._lock.close()

    def adapter_folder(self, version: int) -> Path:
        apart = self.config.run.adapters
        folder = self.path / "adapters" if apart is None else apart / self.config.run.name
        return folder / str(version)

    def save_checkpoint(
        self, trainer: Trainer, *, iterations_done: int, parent_adapter: str | None
    ) -> None:
        """Write `checkpoints/<iterations_done>/` whole, then drop the oldest beyond the bound."""
        folder = self.path / "checkpoints" / f"{iterations_done:06d}"
        with atomic.new_directory(folder) as aside:
            contents = {
                **{f"{name}.safetensors": lora.to_bytes(trainer.get(name)) for name in _POLICIES},
                "optimizer.safetensors": save(trainer.optimizer_tensors()),
            }
            for name, data in contents.items():
                (aside / name).write_bytes(data)
            state = CheckpointState(
                iterations_done=iterations_done,
                epoch=self.epoch,
                optimizer_steps=trainer.step,
                skipped_steps=trainer.skipped_steps,
                parent_adapter=parent_adapter,
                files={name: atomic.sha256_file(aside / name) for name in sorted(contents)},
            )
            (aside / "state.json").write_text(state.model_dump_json(indent=2))
        for old in self.checkpoints()[: -self.config.run.keep_checkpoints]:
            shutil.rmtree(old)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoint folders, oldest first."""
        folder = self.path / "checkpoints"
        return sorted(p for p in folder.glob("[0-9]*") if p.is_dir()) if folder.exists() else []

    def load_checkpoint(self, trainer: Trainer) -> CheckpointState | None:
        """Put the newest checkpoint into the trainer; None when there is none yet.

        A damaged one is refused by name, never skipped in favour of an older one.
        """
        folders = self.checkpoints()
        if not folders:
            return None
        newest = folders[-1]
        older = ", ".join(p.name for p in folders[:-1]) or "none"

        def damaged(path: Path) -> SolrlError:
            return SolrlError(
                f"checkpoint file {path} is missing or damaged; older checkpoints: {older}. "
                f"To go back, move {newest} away and resume again"
            )

        try:
            state = CheckpointState.model_validate_json((newest / "state.json").read_bytes())
        except (OSError, ValidationError) as error:
            raise damaged(newest / "state.json") from error
        for name, expected in state.files.items():
            path = newest / name
            if not path.is_file() or atomic.sha256_file(path) != expected:
                raise damaged(path)
        policies = {
            name: lora.from_bytes((newest / f"{name}.safetensors").read_bytes())
            for name in _POLICIES
        }
        trainer.put("trained", policies["trained"])
        trainer.put("old", policies["old"])
        trainer.ema = policies["ema"]
        trainer.step = state.optimizer_steps
        trainer.skipped_steps = state.skipped_steps
        tensors: dict[str, Tensor] = load((newest / "optimizer.safetensors").read_bytes())
        trainer.load_optimizer_tensors(tensors)
        return state


_POLICIES = ("trained", "old", "ema")


def _lock(path: Path) -> IO[str]:
    """The run's exclusive lock; held until closed or the process ends."""
    file = (path / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise BusyError(f"run directory {path} is in use by {holder}") from error
    file.truncate(0)
    file.write(f"process {os.getpid()}\n")
    file.flush()
    return file
