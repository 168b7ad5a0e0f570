"""The command line: one clear message for bad input, and nothing half done."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from PIL import Image

from solrl import adapters, cli, pictures, stack
from solrl.adapters import Manifest
from solrl.config import load_config, to_toml
from solrl.errors import InputError
from solrl.stack import StackFile

ROOT = Path(__file__).resolve().parent.parent
SOLRL = (sys.executable, "-m", "solrl.cli")


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Solrl = Callable[..., Answer]


@pytest.fixture
def solrl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Solrl:
    """Run a command in this process, in an empty folder without a stack."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOLRL_STATE", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("SOLRL__")]:
        monkeypatch.delenv(name)

    def run(*arguments: str | Path) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            cli.main([str(argument) for argument in arguments])
        code = exited.value.code
        assert code is None or isinstance(code, int)
        return Answer(code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose files exist, as far as can be seen without loading them."""
    model = pipeline(tmp_path / "model", "SanaPipeline")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[run]
name = "one"
directory = "{tmp_path}/runs"
[model]
base = "{model}"
cache = "{tmp_path}/cache"
[prompts]
train = "{tmp_path}/prompts.txt"
unseen = "{tmp_path}/prompts.txt"
"""
    )
    return path


def pipeline(folder: Path, kind: str) -> Path:
    for part in ("transformer", "vae", "text_encoder", "tokenizer"):
        (folder / part).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    return folder


def free_port() -> int:
    return stack.free_ports(1)[0]


def huge_png() -> bytes:
    """A header that claims 50,000 x 50,000 pixels in 60 bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


# --- bad input -------------------------------------------------------------------------------

BAD_RUNS = {
    "unknown key": (["--explore.kep", "8"], r"unknown key 'explore.kep'; did you mean 'keep'"),
    "unknown section": (["--explor.keep=8"], r"unknown key 'explor'; did you mean 'explore'"),
    "K > N": (["--explore.keep", "98"], r"explore.keep = 98 is more than explore.candidates = 96"),
    "K odd": (["--explore.keep", "23"], r"explore.keep = 23 is odd"),
    "K < 2": (["--explore.keep", "0"], r"explore.keep = 0 is fewer than 2"),
    "N < 2": (["--explore.candidates", "1"], r"explore.candidates: .*2 .seen: 1"),
    "seed": (["--run.seed", str(2**53)], r"run.seed: .*seen: 9007199254740992"),
    "name": (["--run.name", "../out"], r"run.name: .*seen: '../out'"),
    "no value": (["--explore.keep"], r"--explore.keep needs a value"),
    "no model": (["--model.base", "nowhere"], r"model.base = 'nowhere' .* is missing"),
    "foreign model": (["--model.base", "foreign"], r"holds a FluxPipeline.*needs a SanaPipeline"),
    "no prompts": (["--prompts.train", "nowhere.txt"], r"prompts.train = 'nowhere.txt' does not"),
    "no run to resume": (["--resume"], r"--resume: there is no run in .*runs/one"),
    "redis down": (
        ["--services.redis", f"redis://127.0.0.1:{free_port()}/0"],
        r"Redis at redis://127.0.0.1:\d+/0 does not answer .*start it",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_RUNS.values(), ids=BAD_RUNS)
def test_a_run_that_cannot_be_is_refused_before_anything_starts(
    solrl: Solrl, config: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    pipeline(tmp_path / "foreign", "FluxPipeline")
    answer = solrl("run", config, *arguments)
    assert answer.code == 2
    assert re.search(message, answer.err, re.DOTALL), answer.err
    assert "Traceback" not in answer.err
    assert answer.err.startswith("error: ")
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "state" / "stack.json").exists()
    assert not (tmp_path / "state" / "supervisor.ini").exists()


def test_a_used_run_directory_is_refused_and_left_alone(
    solrl: Solrl, config: Path, tmp_path: Path
) -> None:
    ledger = tmp_path / "runs" / "one" / "ledger.sqlite"
    ledger.parent.mkdir(parents=True)
    ledger.write_bytes(b"precious")
    answer = solrl("run", config)
    assert answer.code == 2
    assert re.search(r"runs/one is used already; .*--resume.*--run.name", answer.err)
    assert ledger.read_bytes() == b"precious"


def test_a_configuration_that_is_not_there_is_named(solrl: Solrl) -> None:
    for command in (["run", "nowhere.toml"], ["up", "nowhere.toml"]):
        answer = solrl(*command)
        assert answer.code == 2
        assert "nowhere.toml cannot be read" in answer.err


def test_a_port_that_is_taken_is_named(solrl: Solrl, config: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = solrl("up", config, f"--services.reward=http://127.0.0.1:{port}")
    assert answer.code == 2
    assert f"port {port} is taken" in answer.err


BAD_CALLS = {
    "explore, no prompt": (["explore", " "], "the prompt ' ' is empty"),
    "generate, no prompt": (["generate", ""], "the prompt '' is empty"),
    "score, no prompt": (["score", "good.png", "--prompt", ""], "the prompt '' is empty"),
    "policy": (["generate", "a cat", "--policy", "newest"], "policy 'newest' is not current, base"),
    "seed": (
        ["generate", "a cat", "--seed", "-1"],
        "seed -1 is out of range: 0 <= seed",
    ),
    "n": (["generate", "a cat", "--n", "0"], "--n.*greater than or equal to 1"),
    "no picture": (["score", "nowhere.png", "--prompt", "a cat"], "nowhere.png is not a file"),
    "folder": (["score", ".", "--prompt", "a cat"], "picture . is not a file"),
    "not a picture": (
        ["score", "run.toml", "--prompt", "a cat"],
        "run.toml cannot be read",
    ),
    "cut picture": (
        ["score", "cut.png", "--prompt", "a cat"],
        "cut.png cannot be read",
    ),
    "huge picture": (["score", "huge.png", "--prompt", "a cat"], "huge.png .*50000"),
    "unknown option": (["generate", "a cat", "--nn", "3"], "No such option.*--nn"),
    "export, no run": (["export", "nowhere", "out"], "nowhere holds no tuned adapter"),
    "report, no run": (["report", "nowhere"], "nowhere holds no finished run"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_is_one_message_and_writes_nothing(
    solrl: Solrl, config: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    pictures.write_png(tmp_path / "good.png", np.zeros((64, 64, 3), np.uint8))
    (tmp_path / "cut.png").write_bytes((tmp_path / "good.png").read_bytes()[:-30])
    (tmp_path / "huge.png").write_bytes(huge_png())
    before = sorted(tmp_path.rglob("*"))
    answer = solrl(*arguments)
    assert answer.code == 2
    plain = re.sub(r"\x1b\[[0-9;]*m", "", answer.err)
    assert re.search(message, plain, re.DOTALL), plain
    assert "Traceback" not in answer.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "service", "address"),
    [
        (["explore", "a cat"], "explorer", "127.0.0.1:{port}"),
        (["generate", "a cat"], "regenerator", "http://127.0.0.1:{port}"),
        (["score", "good.png", "--prompt", "a cat"], "reward", "http://127.0.0.1:{port}"),
    ],
)
def test_a_service_that_is_down_is_named_with_its_address_and_how_to_start_it(
    solrl: Solrl, tmp_path: Path, command: list[str], service: str, address: str
) -> None:
    pictures.write_png(tmp_path / "good.png", np.zeros((8, 8, 3), np.uint8))
    where = address.format(port=free_port())
    answer = solrl(*command, f"--services.{service}={where}")
    assert answer.code == 2
    assert where in answer.err
    assert "`solrl up`" in answer.err
    assert "Traceback" not in answer.err


# --- good input ------------------------------------------------------------------------------


def test_dry_run_prints_a_file_that_loads_back(
    solrl: Solrl, config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SOLRL__EXPLORE__KEEP", "8")
    monkeypatch.setenv("SOLRL__EXPLORE__STEPS", "4")
    answer = solrl("run", "--explore.keep", "12", config, "--dry-run", "--run.name=other")
    assert answer.code == 0
    (tmp_path / "again.toml").write_text(answer.out)
    again = load_config(tmp_path / "again.toml", environment={})
    # The command line wins over the environment, the environment over the file.
    assert (again.explore.keep, again.explore.steps, again.run.name) == (12, 4, "other")
    assert to_toml(again) == answer.out
    assert not (tmp_path / "runs").exists()


def test_light_commands_import_nothing_heavy() -> None:
    code = """
import contextlib, sys
from solrl import cli
with contextlib.suppress(SystemExit):
    cli.main(["run", "--help"])
heavy = {"torch", "numpy", "PIL", "grpc", "httpx", "redis", "matplotlib", "diffusers"}
sys.exit(" ".join(heavy & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version_and_status(solrl: Solrl) -> None:
    assert solrl("version").out == "solrl 0.1.0\n"
    assert solrl("down").out.startswith("no stack is running")
    answer = solrl("status")
    assert answer.code == 1
    assert "`solrl up`" in answer.out


def test_doctor_names_each_problem_and_its_cure(solrl: Solrl, config: Path) -> None:
    well = solrl("doctor", "--config", config)
    assert well.code == 0, well.out
    assert not [line for line in well.out.splitlines() if line.startswith("problem")]
    port = free_port()
    ill = solrl(
        *("doctor", "--config", config, "--model.base", "nowhere"),
        *("--explore.precision", "nvfp4", "--services.redis", f"redis://127.0.0.1:{port}/0"),
    )
    assert ill.code == 1
    problems = [line.split()[1] for line in ill.out.splitlines() if line.startswith("problem")]
    assert problems == ["Redis", "base", "explore"]
    assert ill.out.count("->") == len(problems)
    assert str(port) in ill.out


def adapter(folder: Path, version: int) -> Manifest:
    weights = f"weights {version}".encode()
    manifest = Manifest(
        run="one",
        epoch=1,
        version=version,
        step=version,
        policy="ema",
        base_id="base",
        base_sha256="0" * 64,
        rank=4,
        alpha=8.0,
        targets=("to_q",),
        sha256=hashlib.sha256(weights).hexdigest(),
    )
    adapters.publish(folder, weights, manifest)
    return manifest


def test_export_copies_the_newest_tuned_adapter(solrl: Solrl, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    adapter(run / "ema" / "9", 9)
    newest = adapter(run / "ema" / "24", 24)
    out = tmp_path / "lora"
    assert solrl("export", run, out).code == 0
    assert adapters.read_manifest(out) == newest
    (tmp_path / "taken").mkdir()
    refused = solrl("export", run, tmp_path / "taken")
    assert refused.code == 2
    assert list((tmp_path / "taken").iterdir()) == []
    nowhere = solrl("export", run, "/proc/lora")
    assert nowhere.code == 2
    assert "choose a place that can be written" in nowhere.err
    (run / "ema" / "24" / adapters.WEIGHTS).write_bytes(b"damaged")
    damaged = solrl("export", run, tmp_path / "other")
    assert damaged.code == 2
    assert "damaged" in damaged.err
    assert not (tmp_path / "other").exists()


def test_a_sheet_has_a_tile_a_picture_and_frames_the_chosen() -> None:
    tiles = [np.full((32, 32, 3), 10 * place, np.uint8) for place in range(13)]
    frames = [cli.FRAMES["best"], None, cli.FRAMES["worst"], *[None] * 10]
    sheet = pictures.sheet(tiles, ["0.1"] * 13, frames, title="a cat", columns=12, side=64)
    pixels = np.asarray(sheet)
    centres = [
        pixels[28 + place // 12 * 95 + 40, place % 12 * 80 + 40].tolist() for place in range(13)
    ]
    assert centres == [[10 * place] * 3 for place in range(13)]
    edges = [pixels[28 + 5, place * 80 + 40].tolist() for place in range(3)]
    assert edges == [[0x2E, 0x9E, 0x44], [255, 255, 255], [0xD0, 0x34, 0x2C]]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
def test_any_kind_of_picture_is_read_as_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("x.tiff" if mode == "CMYK" else "x.png")
    Image.new("RGB", (5, 3), "white").convert(mode).save(path)
    pixels = pictures.read(path)
    assert pixels.shape == (3, 5, 3)
    assert (pixels == 255).all()


def test_a_png_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.png"
    picture = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    pictures.write_png(path, picture)
    assert (pictures.read(path) == picture).all()
    with pytest.raises(InputError, match=r"missing\.png is not a file"):
        pictures.read(tmp_path / "missing.png")


# --- the learner as a child ------------------------------------------------------------------

FAKE_LEARNER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
def note(text):
    with (folder / "notes").open("a") as file:
        file.write(text + "\\n")
def stop(number, frame):
    note(signal.Signals(number).name)
    if "stubborn" not in {mode!r}:
        sys.exit(130)
for kind in (signal.SIGINT, signal.SIGTERM):
    signal.signal(kind, stop)
note(" ".join(sys.argv[1:]))
note(f"pid {{os.getpid()}}")
if {mode!r} == "fail":
    sys.exit(7)
while True:
    time.sleep(0.05)
"""


class Child:
    """`solrl run` with a learner of a test's own, on a stack that is said to be up."""

    def __init__(self, folder: Path, config: Path, mode: str) -> None:
        self.folder = folder
        package = folder / "services" / "learner"
        package.mkdir(parents=True)
        for file in (package.parent / "__init__.py", package / "__init__.py"):
            file.touch()
        (package / "__main__.py").write_text(FAKE_LEARNER.format(folder=str(folder), mode=mode))
        state = folder / "state"
        state.mkdir(exist_ok=True)
        served = load_config(config, environment={})
        (state / "stack.toml").write_text(to_toml(served))
        me = psutil.Process()
        (state / "stack.json").write_text(
            StackFile(
                stack_id="solrl-test",
                owner_pid=me.pid,
                owner_started=me.create_time(),
                ready=True,
                endpoints={name: f"127.0.0.1:{n + 1}" for n, name in enumerate(stack.SERVICES)},
                pids={},
                config_sha256="",
                config=str(state / "stack.toml"),
            ).model_dump_json()
        )
        self.process = subprocess.Popen(
            [*SOLRL, "run", str(config), "--explore.keep", "12"],
            cwd=folder,
            env={**os.environ, "SOLRL_STATE": str(state), "SOLRL__EXPLORE__KEEP": "8"},
            stderr=subprocess.PIPE,
            text=True,
            # As on a terminal, where Ctrl-C goes to the whole foreground group.
            process_group=0,
        )

    def notes(self) -> list[str]:
        path = self.folder / "notes"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, start: str) -> str:
        deadline = time.monotonic() + 120
        while True:
            for line in self.notes():
                if line.startswith(start):
                    return line
            assert time.monotonic() < deadline, f"no {start!r} in {self.notes()}"
            assert self.process.poll() is None or start == "SIGTERM", self.process.communicate()
            time.sleep(0.05)


@pytest.fixture
def child(tmp_path: Path, config: Path) -> Iterator[Callable[[str], Child]]:
    children: list[Child] = []

    def start(mode: str) -> Child:
        children.append(Child(tmp_path, config, mode))
        return children[-1]

    yield start
    for one in children:
        one.process.kill()
        one.process.wait()


def test_the_exit_code_and_the_settings_are_passed_on(child: Callable[[str], Child]) -> None:
    started = child("fail")
    assert started.process.wait(timeout=120) == 7
    words = shlex.split(started.notes()[0])
    assert words[0] == "--config"
    given = load_config(Path(words[1]), environment={})
    assert given.explore.keep == 12
    assert given.services.regenerator == "127.0.0.1:5"


def test_ctrl_c_reaches_the_learner_once(child: Callable[[str], Child]) -> None:
    started = child("obedient")
    started.wait_for("pid")
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.process.wait(timeout=60) == 130
    assert started.notes()[2:] == ["SIGINT"]


def test_a_second_ctrl_c_kills_a_learner_that_does_not_stop(
    child: Callable[[str], Child],
) -> None:
    started = child("stubborn")
    started.wait_for("pid")
    os.killpg(started.process.pid, signal.SIGINT)
    started.wait_for("SIGINT")
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.process.wait(timeout=60) == 128 + signal.SIGKILL


def test_a_learner_whose_parent_is_killed_outright_is_told_to_stop(
    child: Callable[[str], Child],
) -> None:
    started = child("obedient")
    pid = int(started.wait_for("pid").split()[1])
    started.process.kill()
    started.wait_for("SIGTERM")
    psutil.wait_procs([p for p in psutil.process_iter() if p.pid == pid], timeout=60)
    assert not psutil.pid_exists(pid)


def test_a_stack_that_serves_something_else_is_not_used(
    child: Callable[[str], Child], solrl: Solrl, config: Path
) -> None:
    child("obedient").wait_for("pid")
    answer = solrl("run", config, "--run.name", "two", "--explore.micro_batch", "7")
    assert answer.code == 2
    assert "other values of explore.micro_batch" in answer.err


# --- make ------------------------------------------------------------------------------------


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def tools(folder: Path, *names: str) -> str:
    """A PATH that has those programs only."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return str(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sh", "rm", "date", "find"], "no C compiler; install gcc"),
        (["sh", "rm", "date", "find", "gcc"], "no Python 3.11 or 3.12 found; install one"),
    ],
    ids=["no gcc", "no Python"],
)
def test_set_up_names_what_a_bare_machine_lacks(
    tmp_path: Path, names: list[str], message: str
) -> None:
    path = tools(tmp_path / "bin", *names, "make")
    done = make(tmp_path, ".venv/.installed", PATH=path)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_every_make_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    for file in ("configs/demo.toml", "zoo/assemble.py", "solrl/generator.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    plan = make(tmp_path, "-n", "run", "ITERATIONS=2", "SEED=5").stdout
    assert re.search(r"solrl run configs/demo.toml --run.name demo-\d{8}-\d{6}", plan)
    assert re.search(r"--run.iterations 2 --run.seed 5", plan)
    assert "--run.name mine" in make(tmp_path, "-n", "run", "NAME=mine").stdout


# --- README ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The repository as README's reader has it, with everything written going elsewhere."""
    folder = tmp_path_factory.mktemp("readme")
    for entry in ROOT.iterdir():
        if entry.name not in {"build", "runs", ".solrl", ".git"}:
            (folder / entry.name).symlink_to(entry)
    (folder / "build").mkdir()
    for entry in (ROOT / "build").iterdir():
        (folder / "build" / entry.name).symlink_to(entry)
    yield folder
    subprocess.run([*SOLRL, "down"], cwd=folder, check=False)


@pytest.mark.timeout(1500)
def test_readme_commands_work(workplace: Path) -> None:
    """In their order, in one shell each, as they stand; the two long ones are run by .ci/run."""
    blocks = re.findall(
        r"<!-- tested -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert len(blocks) >= 3
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=workplace,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    with Image.open(workplace / "build" / "explore.png") as sheet:
        assert sheet.size == (12 * 80, 28 + 8 * 95)
    assert stack.read_stack(workplace / ".solrl") is None
