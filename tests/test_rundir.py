"""The run directory: one owner, whole checkpoints, an exact resume; and the atomic files below."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training_setup import make_trainer, train

from solrl import atomic, lora, rundir
from solrl.config import Config, load_config
from solrl.errors import BusyError, ConfigError, SolrlError
from solrl.rundir import RunDirectory
from solrl.training import Trainer


def config_of(tmp_path: Path, **overrides: str) -> Config:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, {"run.directory": str(tmp_path), "run.name": "r", **dotted}, {})


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[RunDirectory]:
    directory = RunDirectory.create(config_of(tmp_path))
    yield directory
    directory.close()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- start and resume ----------------------------------------------------------------------------


def test_a_new_run_holds_its_resolved_configuration_and_epoch_1(opened: RunDirectory) -> None:
    assert opened.epoch == 1
    assert load_config(opened.path / "config.toml", environment={}) == opened.config
    assert (opened.path / "epoch").read_text() == "1\n"


def test_a_used_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunDirectory.create(config_of(tmp_path)).close()
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"r is already used; continue it with --resume, or"):
        RunDirectory.create(config_of(tmp_path, run__seed="9"))
    assert tree(tmp_path) == before


def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already used"):
        RunDirectory.create(config_of(tmp_path))
    assert tree(tmp_path) == {"r/thesis.txt": b"mine"}


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", "epoch"]])
def test_a_start_that_died_before_it_was_a_run_does_not_block_the_name(
    tmp_path: Path, left: list[str]
) -> None:
    (tmp_path / "r").mkdir()
    for name in left:
        (tmp_path / "r" / name).write_text("1\n")
    with pytest.raises(ConfigError, match="holds no run"):
        RunDirectory.resume(config_of(tmp_path))
    directory = RunDirectory.create(config_of(tmp_path))
    assert directory.epoch == 1
    directory.close()


def test_resuming_what_is_no_run_is_refused_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume: .*r holds no run \(no config.toml\)"):
        RunDirectory.resume(config_of(tmp_path))
    assert not list(tmp_path.iterdir())


def test_every_resume_raises_the_epoch(tmp_path: Path) -> None:
    RunDirectory.create(config_of(tmp_path)).close()
    for epoch in (2, 3, 4):
        directory = RunDirectory.resume(config_of(tmp_path))
        assert directory.epoch == epoch
        directory.close()


def test_a_resume_with_other_settings_names_them_all(tmp_path: Path) -> None:
    RunDirectory.create(config_of(tmp_path)).close()
    before = tree(tmp_path)
    with pytest.raises(ConfigError) as caught:
        RunDirectory.resume(config_of(tmp_path, train__rank="8", explore__steps="5"))
    assert "train.rank: was 32, now 8" in str(caught.value)
    assert "explore.steps: was 6, now 5" in str(caught.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        {"run__iterations": "99"},
        {"run__keep_checkpoints": "5"},
        {"run__adapters": "/elsewhere"},
        {"services__call_timeout": "7.5"},
        {"evaluate__train_images": "3"},
    ],
)
def test_what_a_resume_may_change(tmp_path: Path, change: dict[str, str]) -> None:
    RunDirectory.create(config_of(tmp_path)).close()
    directory = RunDirectory.resume(config_of(tmp_path, **change))
    written = load_config(directory.path / "config.toml", environment={})
    assert written == config_of(tmp_path, **change)
    directory.close()


def test_the_environment_of_a_resume_does_not_rewrite_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory.create(config_of(tmp_path)).close()
    monkeypatch.setenv("SOLRL__TRAIN__RANK", "8")
    RunDirectory.resume(config_of(tmp_path)).close()


def test_two_at_once_are_refused_naming_the_holder(opened: RunDirectory, tmp_path: Path) -> None:
    before = tree(tmp_path)
    with pytest.raises(BusyError, match=f"r is in use by process {os.getpid()}"):
        RunDirectory.resume(config_of(tmp_path))
    assert tree(tmp_path) == before
    opened.close()
    RunDirectory.resume(config_of(tmp_path)).close()


def test_the_lock_ends_with_its_process_even_when_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from solrl.config import load_config\n"
        "from solrl.rundir import RunDirectory\n"
        f"c = load_config(None, {{'run.directory': {str(tmp_path)!r}, 'run.name': 'r'}}, {{}})\n"
        "d = RunDirectory.create(c); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    directory = RunDirectory.resume(config_of(tmp_path))
    assert directory.epoch == 2
    directory.close()


# --- where adapters are published -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapters", "expected"), [(None, "runs/r/adapters/3"), ("policies", "policies/r/3")]
)
def test_adapters_lie_in_the_run_or_in_a_folder_of_their_own(
    tmp_path: Path, adapters: str | None, expected: str
) -> None:
    overrides = {} if adapters is None else {"run__adapters": str(tmp_path / adapters)}
    config = config_of(tmp_path / "runs", **overrides)
    directory = RunDirectory.create(config)
    assert directory.adapter_folder(3) == tmp_path / expected
    assert directory.adapter_folder(4) == directory.adapter_folder(3).with_name("4")
    # It survives the file, and everything else of a run stays in its directory.
    assert load_config(directory.path / "config.toml", environment={}) == config
    assert directory.path == tmp_path / "runs" / "r"
    directory.close()


# --- checkpoints ---------------------------------------------------------------------------------


def save(directory: RunDirectory, trainer: Trainer, done: int, parent: str | None = None) -> None:
    directory.save_checkpoint(trainer, iterations_done=done, parent_adapter=parent)


def snapshot(trainer: Trainer) -> Any:
    return (
        [lora.to_bytes(trainer.get(name)) for name in ("trained", "old", "ema")],
        {k: v.numpy().tobytes() for k, v in trainer.optimizer_tensors().items()},
        trainer.step,
        trainer.skipped_steps,
    )


SETTINGS: dict[str, Any] = {"learning_rate": 0.01, "old_decay_slope": 0.2}


def test_two_and_two_iterations_equal_four(tiny_model: Path, opened: RunDirectory) -> None:
    """Start and resume as a pair: bit-equal, with moments, EMA, old policy and counters."""
    whole = make_trainer(tiny_model, **SETTINGS)
    for iteration in range(4):
        train(whole, iteration)

    first = make_trainer(tiny_model, **SETTINGS)
    for iteration in range(2):
        train(first, iteration)
    save(opened, first, 2, parent="a" * 64)
    opened.close()

    resumed = RunDirectory.resume(opened.config)
    second = make_trainer(tiny_model, **SETTINGS)
    state = resumed.load_checkpoint(second)
    assert state is not None
    assert (state.iterations_done, state.epoch, state.parent_adapter) == (2, 1, "a" * 64)
    assert snapshot(second) == snapshot(first)
    for iteration in range(2, 4):
        train(second, iteration)
    assert snapshot(second) == snapshot(whole)
    resumed.close()


def test_a_checkpoint_before_the_first_step(tiny_model: Path, opened: RunDirectory) -> None:
    save(opened, make_trainer(tiny_model), 0)
    fresh = make_trainer(tiny_model)
    state = opened.load_checkpoint(fresh)
    assert state is not None
    assert state.iterations_done == 0
    assert snapshot(fresh) == snapshot(make_trainer(tiny_model))


def test_skipped_steps_are_kept(tiny_model: Path, opened: RunDirectory) -> None:
    trainer = make_trainer(tiny_model)
    trainer.skipped_steps = 3
    save(opened, trainer, 1)
    fresh = make_trainer(tiny_model)
    opened.load_checkpoint(fresh)
    assert (fresh.step, fresh.skipped_steps) == (0, 3)


def test_no_checkpoint_yet(tiny_model: Path, opened: RunDirectory) -> None:
    assert opened.checkpoints() == []
    assert opened.load_checkpoint(make_trainer(tiny_model)) is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept(tiny_model: Path, tmp_path: Path, keep: int) -> None:
    directory = RunDirectory.create(config_of(tmp_path, run__keep_checkpoints=str(keep)))
    trainer = make_trainer(tiny_model)
    for done in (8, 9, 10, 11):
        save(directory, trainer, done)
    kept = [p.name for p in directory.checkpoints()]
    assert kept == ["000008", "000009", "000010", "000011"][-keep:]
    assert [p.name for p in sorted((directory.path / "checkpoints").iterdir())] == kept
    directory.close()


def test_a_checkpoint_is_never_overwritten(tiny_model: Path, opened: RunDirectory) -> None:
    trainer = make_trainer(tiny_model)
    save(opened, trainer, 1)
    before = tree(opened.path)
    train(trainer, 0)
    with pytest.raises(FileExistsError):
        save(opened, trainer, 1)
    assert tree(opened.path) == before


def test_a_checkpoint_that_fails_half_way_leaves_the_one_before(
    tiny_model: Path, opened: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_model)
    save(opened, trainer, 1)
    before = tree(opened.path)

    def full(_data: dict[str, Any]) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "save", full)
    with pytest.raises(OSError, match="No space left"):
        save(opened, trainer, 2)
    assert tree(opened.path) == before
    assert [p.name for p in (opened.path / "checkpoints").iterdir()] == ["000001"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "trained cut": ("trained.safetensors", cut),
    "old flipped": ("old.safetensors", flip),
    "ema gone": ("ema.safetensors", Path.unlink),
    "optimizer flipped": ("optimizer.safetensors", flip),
    "state cut": ("state.json", cut),
    "state gone": ("state.json", Path.unlink),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_never_skipped(
    tiny_model: Path, opened: RunDirectory, name: str
) -> None:
    trainer = make_trainer(tiny_model)
    for done in (1, 2):
        train(trainer, done)
        save(opened, trainer, done)
    file, damage = DAMAGES[name]
    broken = opened.path / "checkpoints" / "000002" / file
    damage(broken)
    fresh = make_trainer(tiny_model)
    before = snapshot(fresh)
    with pytest.raises(SolrlError, match="is missing or damaged; older checkpoints: 000001") as e:
        opened.load_checkpoint(fresh)
    assert str(broken) in str(e.value)
    assert snapshot(fresh) == before
    # The way back that the message names.
    (opened.path / "checkpoints" / "000002").rename(opened.path / "broken")
    state = opened.load_checkpoint(fresh)
    assert state is not None
    assert state.iterations_done == 1


# --- atomic files --------------------------------------------------------------------------------


class Dies(Exception):
    pass


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    atomic.write_text(path, "old")

    def fails(*_: Any) -> None:
        raise Dies

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fails)
    else:
        monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(Dies):
        atomic.write_text(path, "new")
    assert tree(tmp_path) == {"file": b"old"}


def test_write_replaces_whole_files_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for text in ("first", "2nd: é", ""):
        atomic.write_text(path, text)
        assert path.read_bytes() == text.encode()
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_files_get_the_mode_of_any_new_file(tmp_path: Path) -> None:
    atomic.write_text(tmp_path / "ours", "")
    (tmp_path / "any").write_text("")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "7"
    with atomic.new_directory(target) as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "file").write_text("x")
        assert not target.exists()
    assert tree(target) == {"sub/file": b"x"}
    assert [p.name for p in target.parent.iterdir()] == ["7"]


def test_a_directory_that_fails_is_not_there(tmp_path: Path) -> None:
    def dies() -> None:
        with atomic.new_directory(tmp_path / "7") as aside:
            (aside / "file").write_text("x")
            raise Dies

    with pytest.raises(Dies):
        dies()
    assert not list(tmp_path.iterdir())


def test_a_name_is_never_reused(tmp_path: Path) -> None:
    with atomic.new_directory(tmp_path / "7") as aside:
        (aside / "file").write_text("first")
    with pytest.raises(FileExistsError), atomic.new_directory(tmp_path / "7"):
        pass
    # Two writers that both begin before either is done.
    slow = atomic.new_directory(tmp_path / "8")
    (slow.__enter__() / "file").write_text("slow")
    with atomic.new_directory(tmp_path / "8") as fast:
        (fast / "file").write_text("fast")
    with pytest.raises(OSError, match="not empty"):
        slow.__exit__(None, None, None)
    assert tree(tmp_path) == {"7/file": b"first", "8/file": b"fast"}


def test_sha256_file(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert atomic.sha256_file(tmp_path / "abc").startswith("ba7816bf8f01cfea414140de5dae2223")
