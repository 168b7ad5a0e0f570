"""Whole runs through every real service, on a random model a hundred times smaller."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from serving import HTTP, eventually, free_port

from solrl import adapters, queue
from solrl.config import load_config

SOLRL = [sys.executable, "-m", "solrl.cli"]
LEARN_TIMEOUT = 240


class Lab:
    """A running stack and runs on it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.config = folder / "tiny.toml"
        (folder / "train.txt").write_text(
            "strawberry, flat style\nowl, noto style\nstar, 3d style\n"
        )
        (folder / "unseen.txt").write_text("frog, flat style\nguitar, noto style\n")
        self.config.write_text(
            f"""
[run]
directory = "{folder}/runs"
iterations = 2
[model]
base = "{model}"
cache = "{folder}/cache"
[prompts]
train = "{folder}/train.txt"
unseen = "{folder}/unseen.txt"
per_iteration = 2
[explore]
candidates = 12
keep = 4
steps = 2
micro_batch = 8
[regenerate]
steps = 3
micro_batch = 4
[train]
rank = 4
alpha = 8.0
timesteps = 2
micro_batch = 8
[audit]
seeds = 8
every = 1
[evaluate]
steps = 2
train_images = 2
unseen_images = 2
micro_batch = 4
"""
        )
        self.environment = {
            **os.environ,
            "SOLRL_STATE": str(folder / "state"),
            "TORCHDYNAMO_DISABLE": "1",
        }

    def solrl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*SOLRL, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LEARN_TIMEOUT,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    def run(
        self, name: str, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self.solrl("run", str(self.config), "--run.name", name, *arguments, check=check)

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def rows(self, name: str, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.path(name) / "ledger.sqlite") as ledger:
            return ledger.execute(query).fetchall()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"), tiny_model)
    lab.solrl("up", "-d", str(lab.config))
    yield lab
    lab.solrl("down")


@pytest.fixture(scope="module")
def straight(lab: Lab) -> str:
    lab.run("straight")
    return "straight"


def test_a_run_reports_what_it_did(lab: Lab, straight: str) -> None:
    report = json.loads((lab.path(straight) / "report.json").read_text())
    assert report["run"] == straight
    assert report["arm"] == "24-in-96 (NVFP4)"
    assert report["iterations"] == 2
    assert report["precision"]["explorer"] == "nvfp4-emulated"
    assert set(report["phases"]) == {
        "explore", "score", "regenerate", "train", "publish", "evaluate", "other",
    }  # fmt: skip
    assert report["seconds"] == pytest.approx(sum(report["phases"].values()))
    assert min(report["phases"].values()) >= 0
    assert {
        "kendall_tau",
        "kendall_tau_ceiling",
        "spearman_rho",
        "topk_overlap",
        "fp4_share",
    } <= set(report["rank_agreement"])
    assert report["rank_agreement"]["seeds_per_group"] == 8
    assert 0.5 <= report["rank_agreement"]["fp4_share"] < 1
    for prompts in ("train_prompts", "unseen_prompts"):
        for figure in ("reward", "judge", "diversity"):
            cell = report["evaluation"][prompts][figure]
            assert {"base", "tuned", "real", "gain", "ci95"} <= set(cell)
            assert cell["gain"] == pytest.approx(cell["tuned"] - cell["base"], abs=1e-9)
            assert cell["ci95"][0] <= cell["gain"] <= cell["ci95"][1]
    folder = Path(report["adapter"]["path"])
    assert adapters.read_manifest(folder).sha256 == report["adapter"]["sha256"]
    assert adapters.read_manifest(folder).policy == "ema"
    assert (lab.path(straight) / "report.html").read_text().count("data:image/png") == 3


def test_the_ledger_has_every_candidate_once(lab: Lab, straight: str) -> None:
    assert lab.rows(straight, "SELECT count(*) FROM candidates") == [(2 * 2 * 12,)]
    assert lab.rows(
        straight,
        "SELECT iteration, slot, sum(selected_as = 'best'), sum(selected_as = 'worst') "
        "FROM candidates GROUP BY iteration, slot ORDER BY iteration, slot",
    ) == [(i, s, 2, 2) for i in (0, 1) for s in (0, 1)]
    # Selected by proxy reward, trained on the true one, with the version it was explored with.
    assert lab.rows(
        straight,
        "SELECT count(*) FROM candidates c JOIN rewards p USING (iteration, slot, candidate) "
        "WHERE p.stage = 'true' AND c.explore_version = c.iteration "
        "AND c.train_version = c.iteration AND c.selected_as IS NOT NULL",
    ) == [(2 * 2 * 4,)]
    assert (
        lab.rows(
            straight,
            "SELECT selected_as FROM candidates JOIN rewards USING (iteration, slot, candidate) "
            "WHERE iteration = 0 AND slot = 0 AND stage = 'proxy' ORDER BY value, -candidate",
        )
        == [("worst",)] * 2 + [(None,)] * 8 + [("best",)] * 2
    )


def test_training_moved_the_adapter(lab: Lab, straight: str) -> None:
    first, last = (
        load_file(lab.path(straight) / "adapters" / version / adapters.WEIGHTS)
        for version in ("0", "2")
    )
    assert all((first[key] == 0).all() for key in first if "lora_B" in key)
    moved = [key for key in last if "lora_B" in key and last[key].abs().max() > 0]
    assert len(moved) == sum("lora_B" in key for key in last)


def test_a_resumed_run_ends_as_the_straight_one(lab: Lab, straight: str) -> None:
    """Start and resume as a pair: one iteration, kill -9 in the second, resume."""
    learner = subprocess.Popen(
        [*SOLRL, "run", str(lab.config), "--run.name", "resumed", "--run.seed", "0"],
        env=lab.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    checkpoint = lab.path("resumed") / "checkpoints" / "000001"
    deadline = time.monotonic() + LEARN_TIMEOUT
    while not checkpoint.exists():
        assert learner.poll() is None, learner.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    lock = (lab.path("resumed") / "lock").read_text()
    os.kill(int(lock.split()[-1]), signal.SIGKILL)
    said = learner.communicate(timeout=60)[0]
    assert learner.returncode == 128 + signal.SIGKILL
    assert (
        "the learner was ended by SIGKILL (out of memory?); give the same command with --resume"
        in said
    )

    refused = lab.run("resumed", check=False)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr + refused.stdout

    lab.run("resumed", "--resume")
    for version in ("1", "2"):
        assert (
            adapters.read_manifest(lab.path("resumed") / "adapters" / version).sha256
            == adapters.read_manifest(lab.path(straight) / "adapters" / version).sha256
        )
    query = (
        "SELECT iteration, slot, candidate, seed, selected_as, advantage FROM candidates "
        "ORDER BY iteration, slot, candidate"
    )
    assert lab.rows("resumed", query) == lab.rows(straight, query)
    assert (lab.path("resumed") / "epoch").read_text() == "2\n"
    report = json.loads((lab.path("resumed") / "report.json").read_text())
    explored = [i["seconds"]["explore"] for i in report["curves"]]
    assert len(explored) == 2
    assert report["phases"]["explore"] == pytest.approx(sum(explored))


def test_a_disk_that_takes_no_more_pauses_the_run(lab: Lab, straight: str) -> None:
    """A limit on the size of files stands in for a full disk: the same error from the same call."""
    checkpoint = max(
        path.stat().st_size for path in (lab.path(straight) / "checkpoints").rglob("*.safetensors")
    )
    command = shlex.join([*SOLRL, "run", str(lab.config), "--run.name", "full", "--run.seed", "0"])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f {checkpoint // 2 // 1024}; exec {command}"],
        env=lab.environment,
        capture_output=True,
        text=True,
        timeout=LEARN_TIMEOUT,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert f"paused: {lab.path('full')} could not be written" in done.stderr
    assert "goes on from its last checkpoint with --resume" in done.stderr
    assert "Traceback" not in done.stderr
    lab.run("full", "--resume")
    assert (
        adapters.read_manifest(lab.path("full") / "adapters" / "2").sha256
        == adapters.read_manifest(lab.path(straight) / "adapters" / "2").sha256
    )


class Served:
    """A learner as its container runs it; `url` is where it answers."""

    def __init__(self, lab: Lab, like: str, name: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.learner", "--serve"),
                # It holds the addresses of the stack.
                *("--config", str(lab.path(like) / "config.toml")),
                *("--run.name", name, "--run.iterations", "1"),
                *("--services.learner_port", str(port)),
            ],
            env=lab.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def state(self) -> str:
        assert self._process.poll() is None, self._process.communicate()[0]
        try:
            return str(HTTP.get(f"{self.url}/v1/run").json()["state"])
        except httpx.TransportError:
            return "not there yet"

    def metric(self, series: str) -> float:
        lines = HTTP.get(f"{self.url}/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{series} "))

    def stop(self) -> tuple[int, str]:
        """By SIGTERM, as `docker stop` does: exit code, and all that was said."""
        self._process.send_signal(signal.SIGTERM)
        said = self._process.communicate(timeout=60)[0]
        assert "Traceback" not in said, said
        return self._process.returncode, said


def test_a_learner_that_serves_begins_goes_on_and_stays_when_it_is_finished(
    lab: Lab, straight: str
) -> None:
    """The same command each time, as for a container that is started again at any time."""
    folder = lab.path("served")
    learner = Served(lab, straight, "served")
    eventually(lambda: learner.state() != "not there yet", seconds=LEARN_TIMEOUT)
    code, said = learner.stop()
    assert (code, "interrupted: run served goes on with --resume" in said) == (130, True)
    assert not (folder / "evaluation.json").exists()

    learner = Served(lab, straight, "served")
    eventually(lambda: learner.state() == "finished", seconds=LEARN_TIMEOUT)
    assert learner.metric("solrl_iterations_total") == 1
    assert learner.metric('solrl_run_state{state="finished"}') == 1
    for route in ("healthz", "readyz"):
        assert HTTP.get(f"{learner.url}/{route}").status_code == 200
    assert learner.stop()[0] == 0

    made = {path: path.stat().st_mtime_ns for path in results(folder)}
    assert folder / "report.html" in made
    # Meanwhile the stack trains another run.
    with queue.connect(load_config(folder / "config.toml", {}, {}).services.redis) as client:
        queue.hold_stack(client, "another in /elsewhere", "test")
        learner = Served(lab, straight, "served")
        eventually(lambda: learner.state() == "finished", seconds=LEARN_TIMEOUT)
        assert client.get(queue.ACTIVE_RUN) == "another in /elsewhere (test)"
        queue.release_stack(client, "another in /elsewhere", "test")
    status = HTTP.get(f"{learner.url}/v1/run").json()
    assert (status["iterations_done"], status["policy_version"]) == (1, 1)
    assert learner.metric("solrl_iterations_total") == 0
    code, said = learner.stop()
    assert (code, f"run served is finished: {folder}/report.html" in said) == (0, True)
    assert {path: path.stat().st_mtime_ns for path in results(folder)} == made
    assert (folder / "epoch").read_text() == "3\n"


def results(folder: Path) -> list[Path]:
    """What training and evaluation write."""
    return [
        *folder.glob("report.*"),
        *folder.glob("evaluat*"),
        *folder.glob("*.png"),
        *folder.glob("checkpoints/*"),
        *folder.glob("ema/*"),
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run.iteration", "3"], "did you mean 'iterations'"),
        (["--explore.keep", "14"], "explore.keep = 14 is more than explore.candidates = 12"),
        (["--train.rank", "5", "--resume"], "train.rank: was 4, now 5"),
        (["--prompts.train", "nowhere.txt"], "nowhere.txt"),
        (["--prompts.unseen", "TRAIN"], "in both prompts.train and prompts.unseen"),
    ],
)
def test_bad_settings_are_named_and_nothing_is_written(
    lab: Lab, straight: str, arguments: list[str], expected: str
) -> None:
    arguments = [a.replace("TRAIN", str(lab.folder / "train.txt")) for a in arguments]
    name = straight if "--resume" in arguments else "never"
    done = lab.run(name, *arguments, check=False)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not lab.path("never").exists()


def test_two_runs_at_once_on_one_stack_are_refused(lab: Lab, straight: str) -> None:
    first = subprocess.Popen(
        [*SOLRL, "run", str(lab.config), "--run.name", "first", "--run.iterations", "50"],
        env=lab.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + LEARN_TIMEOUT
        while not (lab.path("first") / "checkpoints" / "000001").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        second = lab.run("second", check=False)
        assert second.returncode != 0
        assert "is training run first" in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=60) != 0
