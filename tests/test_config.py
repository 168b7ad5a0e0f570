"""Configuration: a typo is an error, precedence is stated, the resolved file is complete."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from solrl.config import Config, documentation, load_config, to_toml
from solrl.errors import ConfigError
from solrl.prompts import read_prompts

ROOT = Path(__file__).resolve().parents[1]


def load(
    overrides: dict[str, str] | None = None, toml: str = "", tmp: Path | None = None
) -> Config:
    if tmp is None:
        return load_config(None, overrides, {})
    path = tmp / "config.toml"
    path.write_text(toml)
    return load_config(path, overrides, {})


# --- bad input -----------------------------------------------------------------------------------

# name: (overrides, what the one message must say)
REFUSED: dict[str, tuple[dict[str, str], list[str]]] = {
    "unknown key": ({"explore.kep": "4"}, ["unknown key 'explore.kep'; did you mean 'keep'?"]),
    "unknown key, near a longer one": (
        {"train.learning_rat": "1"},
        ["unknown key 'train.learning_rat'; did you mean 'learning_rate'?"],
    ),
    "unknown section": ({"trian.rank": "4"}, ["unknown key 'trian'; did you mean 'train'?"]),
    "nothing near": ({"run.zzz": "1"}, ["unknown key 'run.zzz'; known: ", "iterations"]),
    "K > N": (
        {"explore.keep": "98"},
        ["explore.keep = 98 is more than explore.candidates = 96", "lower keep or raise"],
    ),
    "odd K": ({"explore.keep": "7"}, ["explore.keep = 7 is odd", "use 6 or 8"]),
    "K < 2": ({"explore.keep": "0"}, ["explore.keep = 0 is fewer than 2", "compares a picture"]),
    "K = 1": ({"explore.keep": "1"}, ["explore.keep = 1 is fewer than 2", "keep 2 or more"]),
    "N < 2": ({"explore.candidates": "1"}, ["explore.candidates", "greater than or equal to 2"]),
    "more times than steps": (
        {"train.timesteps": "11"},
        ["train.timesteps = 11 is more than regenerate.steps = 10"],
    ),
    "more audit seeds than candidates": (
        {"explore.candidates": "24", "audit.seeds": "25"},
        ["audit.seeds = 25 is more than explore.candidates = 24"],
    ),
    "seed out of range": ({"run.seed": "9007199254740992"}, ["run.seed", "less than 90071992547"]),
    "negative seed": ({"run.seed": "-1"}, ["run.seed", "(seen: -1)"]),
    "not a number": ({"train.rank": "many"}, ["train.rank", "valid integer", "'many'"]),
    "NaN": ({"train.learning_rate": "nan"}, ["train.learning_rate", "finite number"]),
    "infinite": ({"services.call_timeout": "inf"}, ["services.call_timeout", "finite number"]),
    "betas": ({"train.adam_betas": "[0.9, 1.0]"}, ["train.adam_betas = [0.9, 1.0]", "below 1"]),
    "staleness": ({"train.max_staleness": "1"}, ["train.max_staleness", "seen: 1"]),
    "a path as run name": ({"run.name": "../x"}, ["run.name", "'../x'"]),
    "precision": ({"explore.precision": "fp16"}, ["explore.precision", "'nvfp4-emulated'", "fp16"]),
    "no section": ({"rank": "4"}, ["override 'rank' is not of the form section.key"]),
    "two faults at once": (
        {"explore.kep": "4", "train.rank": "0"},
        ["did you mean 'keep'", "train.rank: Input should be greater than or equal to 1 (seen: 0)"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_refused_saying_why(name: str) -> None:
    overrides, texts = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        load(overrides)
    for text in texts:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("[explore]\nkep = 4", "unknown key 'explore.kep'; did you mean 'keep'?"),
        ("[explore\n", "is not TOML"),
        ("explore = 3", "explore: Input should be a valid dictionary"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, toml: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml") as error:
        load(toml=toml, tmp=tmp_path)
    assert text in str(error.value)


def test_overriding_into_what_is_no_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'explore' is a section, not a value"):
        load({"explore.keep": "4"}, "explore = 3", tmp_path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        load_config(tmp_path / "none.toml", {}, {})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary is not TOML"):
        load_config(tmp_path / "binary", {}, {})


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().explore.keep = 2  # type: ignore[misc]


# --- precedence ----------------------------------------------------------------------------------


def test_file_before_environment_before_override(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[train]\nrank = 1\nalpha = 1.0\nweight_decay = 0.5\n[run]\nseed = 9")
    environment = {
        "SOLRL__TRAIN__RANK": "2",
        "SOLRL__TRAIN__ALPHA": "2.0",
        "SOLRL__REWARD__NAME": "other",
        "SOLRL_TOKEN": "not a setting",
        "PATH": "/bin",
    }
    config = load_config(path, {"train.rank": "3", "explore.micro_batch": "7"}, environment)
    assert (config.train.rank, config.train.alpha, config.train.weight_decay) == (3, 2.0, 0.5)
    assert (config.run.seed, config.reward.name, config.explore.micro_batch) == (9, "other", 7)
    assert config.train.learning_rate == Config().train.learning_rate


def test_the_environment_is_read_and_its_typos_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOLRL__RUN__SEED", "77")
    assert load_config(None).run.seed == 77
    monkeypatch.setenv("SOLRL__RUN__SEAD", "78")
    monkeypatch.setenv("SOLRL__TRAIN__RANK", "many")
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"explore.steps": "0"})
    for line, source in (
        (
            "unknown key 'run.sead'; did you mean 'seed'?",
            "the environment variable SOLRL__RUN__SEAD",
        ),
        ("(seen: 'many')", "the environment variable SOLRL__TRAIN__RANK"),
        ("(seen: 0)", "--explore.steps"),
    ):
        assert f"{line}, from {source}" in str(caught.value)


VALUES: list[tuple[str, str, Any]] = [
    ("run.seed", "5", 5),
    ("run.seed", "1_000", 1000),
    ("train.learning_rate", "3e-4", 3e-4),
    ("train.learning_rate", "1", 1.0),
    ("train.adam_betas", "[0.5, 0.9]", (0.5, 0.9)),
    ("train.max_staleness", "0", 0),
    ("run.name", "demo-1", "demo-1"),
    ("run.name", '"quoted"', "quoted"),
    # What looks like a number or a date is still a name.
    ("run.name", "20261130", "20261130"),
    ("run.name", "2026-11-30", "2026-11-30"),
    ("run.name", "true", "true"),
    ("run.name", "1e5", "1e5"),
    ("model.base", "7", "7"),
    ("run.directory", "7", Path("7")),
    ("evaluate.references", "7", Path("7")),
    ("prompts.train", "a = [b", Path("a = [b")),
    ("services.redis", "redis://h:1/0", "redis://h:1/0"),
]


@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values_of_the_command_line(key: str, text: str, value: Any) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(load({key: text}), section), name) == value
    environment = {f"SOLRL__{section}__{name}".upper(): text}
    assert getattr(getattr(load_config(None, {}, environment), section), name) == value


# --- the resolved file ---------------------------------------------------------------------------

ROUND_TRIPS: dict[str, dict[str, str]] = {
    "defaults": {},
    "a path": {"evaluate.references": "build/real"},
    "quotes, backslashes, new lines": {"model.base": 'C:\\x "y"\n\tz'},
    "beyond the basic plane": {"model.base": "modelle/🍓-é"},
    "numbers": {"train.learning_rate": "1e-300", "run.seed": "9007199254740991"},
    "betas": {"train.adam_betas": "[0.0, 0.99999]"},
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_the_resolved_file_loads_back_equal(tmp_path: Path, name: str) -> None:
    config = load(ROUND_TRIPS[name])
    text = to_toml(config)
    assert load(toml=text, tmp=tmp_path) == config
    assert to_toml(load(toml=text, tmp=tmp_path)) == text


def test_the_resolved_file_holds_every_default() -> None:
    tree = tomllib.loads(to_toml(Config()))
    for name, section in Config.model_fields.items():
        fields = section.annotation.model_fields  # type: ignore[union-attr]
        # TOML has no null: a key that is off by default is the only one left out.
        expected = {key for key, field in fields.items() if field.default is not None}
        assert set(tree[name]) == expected


def test_the_documentation_is_that_of_the_models() -> None:
    """`python -m solrl.config > docs/configuration.md` renews it."""
    printed = subprocess.run(
        [sys.executable, "-m", "solrl.config"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert (ROOT / "docs" / "configuration.md").read_text() == printed == documentation()
    for name, section in Config.model_fields.items():
        assert f"## {name}\n" in printed
        for key, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            assert field.description, f"{name}.{key} has no description"
            [row] = [r for r in printed.split(f"## {name}\n")[1].split("## ")[0].splitlines()
                     if r.startswith(f"| `{key}` ")]  # fmt: skip
            assert row.count("|") == 5


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_packaged_configurations_load(path: Path) -> None:
    load_config(path, {}, {})


# --- prompt files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b"a cat\na dog\n", ["a cat", "a dog"]),
        (b"  a cat \r\n\r\n\na cat", ["a cat", "a cat"]),
        ("\ufeffé\n🍓".encode(), ["é", "🍓"]),
    ],
)
def test_read_prompts(tmp_path: Path, data: bytes, prompts: list[str]) -> None:
    (tmp_path / "p.txt").write_bytes(data)
    assert read_prompts(tmp_path / "p.txt") == prompts


@pytest.mark.parametrize(
    ("data", "text"),
    [(None, "cannot be read"), (b" \n\n", "holds no prompt"), (b"\xff\xfe", "cannot be read")],
)
def test_prompt_files_that_are_none(tmp_path: Path, data: bytes | None, text: str) -> None:
    path = tmp_path / "p.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=text) as error:
        read_prompts(path)
    assert str(path) in str(error.value)


# --- two floors ----------------------------------------------------------------------------------

LOWER_FLOOR = [
    "solrl.errors",
    "solrl.atomic",
    "solrl.config",
    "solrl.seeds",
    "solrl.selection",
    "solrl.stats",
    "solrl.ledger",
    "solrl.records",
    "solrl.queue",
    "solrl.adapters",
    "solrl.prompts",
    "solrl.replica",
    *sorted(
        f"solrl.clients.{path.stem}"
        for path in (ROOT / "solrl" / "clients").glob("*.py")
        if path.stem not in ("__init__", "generate_proto")
    ),
]


def test_the_lower_floor_imports_no_torch() -> None:
    """One process for all: each module is looked at right after it was imported."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'diffusers', 'transformers', 'peft'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *LOWER_FLOOR], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
