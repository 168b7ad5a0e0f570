"""The explorer on the real Triton binary, with the real generator on a tiny random pipeline."""

from __future__ import annotations

import json
import os
import queue as stdqueue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as stock
from serving import FakeScorer, eventually, free_port, running
from tiny import model_section, publish_adapter, write_pipeline
from tritonclient.utils import InferenceServerException

from services.explorer import triton as launcher
from services.explorer.triton import Server, command, environment, find_server
from services.explorer.triton_client import TritonClient
from services.reward import app as reward_app
from services.reward.service import Service as RewardService
from solrl import queue
from solrl.adapters import Manifest
from solrl.clients.explorer import CandidateEvent, ExplorerClient, SelectionEvent
from solrl.config import (
    AuditSection,
    Config,
    ExploreSection,
    RewardSection,
    ServiceSection,
    to_toml,
)
from solrl.errors import ConfigError, InputError, SolrlError, UnavailableError, VersionError
from solrl.metrics import Metrics
from solrl.probes import grpc_ready
from solrl.queue import Stream
from solrl.records import Announcement, PromptRecord, SelectionRecord
from solrl.seeds import candidate_seed

PROMPT = "a red dog"
STEPS = 3


@dataclass
class Explorer:
    """Triton and gateway as processes, reward as a thread."""

    folder: Path
    config: Config
    file: Path
    adapters: dict[int, tuple[Path, Manifest]]
    triton: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> TritonClient:
        return TritonClient(self.config.services.triton)

    def calls(self, timeout: float = 120) -> ExplorerClient:
        return ExplorerClient(self.config.services.explorer, timeout=timeout)

    def start(self, module: str) -> subprocess.Popen[bytes]:
        """A service process; its log is <folder>/<module>.log."""
        # Compiling would take longer than everything else here together.
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "SOLRL_REPLICA_ID": "explorer-t"}
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(self.file)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start_triton(self) -> None:
        self.triton = self.start("services.explorer.triton")
        eventually(self.answers, seconds=280)

    def answers(self) -> bool:
        assert self.triton is not None
        assert self.triton.poll() is None, self.log("services.explorer.triton")
        try:
            return bool(self.client.status(timeout=5))
        except UnavailableError:
            return False

    def log(self, module: str) -> str:
        return (self.folder / f"{module}.log").read_text()

    def family(self) -> list[psutil.Process]:
        assert self.triton is not None
        return psutil.Process(self.triton.pid).children(recursive=True)

    def shared_memory(self) -> list[tuple[str, int]]:
        port = self.config.services.triton.rpartition(":")[2]
        found = Path("/dev/shm").glob(f"*-triton-{port}-*")
        return sorted((path.name, path.stat().st_size) for path in found)


@pytest.fixture(scope="module")
def explorer(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explorer]:
    folder = tmp_path_factory.mktemp("explorer")
    model = write_pipeline(folder / "model")
    adapters = {}
    for version in (1, 2, 3):
        path = folder / "adapters" / str(version)
        adapters[version] = (path, publish_adapter(path, model, version=version))
    config = Config(
        model=model_section(model, folder / "cache"),
        explore=ExploreSection(
            precision="nvfp4-emulated", micro_batch=4, candidates=10, keep=4, steps=STEPS
        ),
        audit=AuditSection(seeds=8),
        reward=RewardSection(name="brightness"),
        services=ServiceSection(
            redis=redis_url,
            triton=f"127.0.0.1:{free_port()}",
            explorer=f"127.0.0.1:{free_port()}",
            reward=f"http://127.0.0.1:{free_port()}",
        ),
    )
    file = folder / "run.toml"
    file.write_text(to_toml(config))
    explorer = Explorer(folder, config, file, adapters)
    with reward_service(config), processes(explorer):
        yield explorer


@contextmanager
def reward_service(config: Config) -> Iterator[None]:
    metrics = Metrics("reward")
    service = RewardService(config, load=lambda: {"brightness": FakeScorer()}, metrics=metrics)
    with running(reward_app.build(config, service, metrics), config.services.reward):
        yield


@contextmanager
def processes(explorer: Explorer) -> Iterator[None]:
    gateway = explorer.start("services.explorer")
    try:
        explorer.start_triton()
        eventually(lambda: grpc_ready(explorer.config.services.explorer) is None)
        yield
    finally:
        triton = explorer.triton
        for process in (gateway, triton):
            if process is not None:
                process.terminate()
        for process in (gateway, triton):
            if process is not None:
                process.wait(60)
    assert explorer.shared_memory() == []


# --- which server --------------------------------------------------------------------------------


def installed(folder: Path, *, without: str = "") -> Path:
    """What of an installed Triton is looked for."""
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        if not name.startswith(without or "-"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    return folder


def test_an_installed_server_is_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(tmp_path / "tritonserver")
    monkeypatch.setenv("SOLRL_TRITON_SERVER", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/image")
    server = find_server(tmp_path / "cache")
    assert server == Server(folder / "bin" / "tritonserver", folder / "backends")
    words = command(server, "prefix", host="0.0.0.0", grpc=1, http=2, metrics=3)
    assert words[0] == str(folder / "bin" / "tritonserver")
    assert f"--backend-directory={folder}/backends" in words
    assert not (tmp_path / "cache").exists(), "nothing is put together for it"
    paths = environment(server, tmp_path / "config.toml", tmp_path / "cache")
    assert paths["LD_LIBRARY_PATH"] == "/of/the/image"


@pytest.mark.parametrize("without", ["bin/tritonserver", "backends/python"])
def test_a_folder_without_a_server_is_named_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    folder = installed(tmp_path / "tritonserver", without=without)
    monkeypatch.setenv("SOLRL_TRITON_SERVER", str(folder))
    with pytest.raises(ConfigError) as caught:
        find_server(tmp_path / "cache")
    assert f"SOLRL_TRITON_SERVER = '{folder}': there is no {folder / without};" in str(caught.value)


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_name_the_packaged_server_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("SOLRL_TRITON_SERVER", raising=False)
    if value is not None:
        monkeypatch.setenv("SOLRL_TRITON_SERVER", value)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/the/image")
    cache = tmp_path / "cache"
    server = find_server(cache)
    assert server.binary.is_file()
    assert server.backends.is_relative_to(cache)
    assert os.access(server.backends / "python" / "triton_python_backend_stub", os.X_OK)
    paths = environment(server, tmp_path / "config.toml", cache)["LD_LIBRARY_PATH"].split(":")
    assert paths == [*map(str, server.libraries), "/of/the/image"]
    assert len(server.libraries) == 2


def test_no_server_at_all_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.delenv("SOLRL_TRITON_SERVER", raising=False)
    monkeypatch.setattr(launcher, "distribution", nothing)
    with pytest.raises(ConfigError, match=r"no Triton is here: install .*SOLRL_TRITON_SERVER"):
        find_server(tmp_path / "cache")


# --- the service ---------------------------------------------------------------------------------


def made(client: TritonClient, seeds: range, **settings: Any) -> np.ndarray[Any, Any]:
    batches = list(client.generate(PROMPT, list(seeds), steps=STEPS, timeout=120, **settings))
    assert [seed for batch in batches for seed in batch.seeds] == list(seeds)
    return np.concatenate([batch.images for batch in batches])


def test_a_call_explores(explorer: Explorer) -> None:
    with explorer.calls() as client:
        *candidates, selection = client.explore(PROMPT, range(10), thumbnails=True)
    assert isinstance(selection, SelectionEvent)
    rewards = {c.seed: c.proxy_reward for c in candidates if isinstance(c, CandidateEvent)}
    assert set(rewards) == set(range(10))
    best = sorted(rewards, key=lambda seed: -(rewards[seed] or 0))
    assert [kept.seed for kept in selection.kept] == [*best[:2], best[-1], best[-2]]
    assert (selection.precision, selection.solver, selection.nfe) == ("nvfp4-emulated", "euler", 30)
    assert not selection.prompt_truncated


def test_a_long_prompt_is_said_to_be_cut(explorer: Explorer) -> None:
    with explorer.calls() as client:
        *_, selection = client.explore("a red dog " * 5, range(4))
    assert isinstance(selection, SelectionEvent)
    assert selection.prompt_truncated


def test_a_picture_does_not_depend_on_its_batch(explorer: Explorer) -> None:
    """Alone, or merged with another request's seeds, a seed gives the same picture."""
    alone = made(explorer.client, range(1))
    with ThreadPoolExecutor(4) as pool:
        both = list(pool.map(lambda _: made(explorer.client, range(6)), range(4)))
    for pictures in both:
        assert np.abs(pictures[:1].astype(int) - alone.astype(int)).max() <= 1
        assert np.abs(pictures.astype(int) - both[0].astype(int)).max() <= 1
    assert np.abs(both[0][0].astype(int) - both[0][1].astype(int)).max() > 20


def test_stock_tritonclient_can_use_it(explorer: Explorer) -> None:
    answers: stdqueue.Queue[Any] = stdqueue.Queue()

    def tensor(name: str, values: np.ndarray[Any, Any], kind: str) -> stock.InferInput:
        made = stock.InferInput(name, list(values.shape), kind)
        made.set_data_from_numpy(values)
        return made

    with stock.InferenceServerClient(explorer.config.services.triton) as client:
        assert client.is_model_ready("explorer")
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            "explorer",
            [
                tensor("PROMPT", np.array([PROMPT.encode()], dtype=np.object_), "BYTES"),
                tensor("SEEDS", np.arange(6, dtype=np.int64), "INT64"),
                tensor("STEPS", np.array([STEPS], dtype=np.int32), "INT32"),
            ],
            enable_empty_final_response=True,
        )
        results: list[Any] = []
        while True:
            result, error = answers.get(timeout=120)
            assert error is None
            results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    assert [result.as_numpy("IMAGES").shape for result in results] == [
        (4, 32, 32, 3),
        (2, 32, 32, 3),
    ]
    assert np.concatenate([r.as_numpy("SEEDS") for r in results]).tolist() == list(range(6))
    assert json.loads(results[0].as_numpy("INFO")[0])["precision"] == "nvfp4-emulated"
    assert results[0].as_numpy("VERSION").tolist() == [-1]


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"PROMPT": b"x"}, "InputError: the request lacks SEEDS, STEPS"),
        ({"CONTROL": b"{"}, "InputError: CONTROL is not JSON"),
        ({"CONTROL": b'{"reload": 1}'}, "InputError: CONTROL .* is not known"),
        ({"CONTROL": b"\xff"}, "InputError: text is not UTF-8"),
    ],
)
def test_raw_nonsense_is_answered(explorer: Explorer, inputs: dict[str, bytes], says: str) -> None:
    answers: stdqueue.Queue[Any] = stdqueue.Queue()
    tensors = []
    for name, value in inputs.items():
        tensor = stock.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([value], dtype=np.object_))
        tensors.append(tensor)
    with stock.InferenceServerClient(explorer.config.services.triton) as client:
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("explorer", tensors)
        error = answers.get(timeout=60)
    assert isinstance(error, InferenceServerException)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(error.message())


@pytest.mark.parametrize("end", ["closed", "flag", "deadline"])
def test_a_cancelled_request_leaves_the_queue(explorer: Explorer, end: str) -> None:
    gone = threading.Event()
    stream = explorer.client.generate(
        PROMPT,
        list(range(2000)),
        steps=100,
        timeout=3 if end == "deadline" else 120,
        cancelled=gone.is_set,
    )
    waiting = threading.Thread(target=_exhaust, args=[stream])
    if end == "closed":
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    else:
        waiting.start()
        eventually(lambda: explorer.client.status()["waiting"] > 1000)
        if end == "flag":
            gone.set()
        waiting.join(60)
        assert not waiting.is_alive()
    eventually(lambda: explorer.client.status()["waiting"] == 0)


def _exhaust(stream: Iterator[object]) -> None:
    try:
        for _ in stream:
            pass
    except SolrlError:
        return


def test_a_deadline_reaches_triton_through_the_gateway(explorer: Explorer) -> None:
    with explorer.calls(timeout=2) as client, pytest.raises(UnavailableError, match="deadline 2 s"):
        list(client.explore(PROMPT, range(1000), steps=500))
    eventually(lambda: explorer.client.status()["waiting"] == 0)


def test_bad_input_reaches_the_caller_as_such(explorer: Explorer) -> None:
    cases: list[tuple[dict[str, Any], type[SolrlError], str]] = [
        ({"steps": 0}, InputError, "steps = 0"),
        ({"guidance": 0.0}, InputError, "guidance = 0.0"),
        ({"policy": 77}, VersionError, "77 is not held"),
    ]
    with explorer.calls() as client:
        for settings, kind, says in cases:
            with pytest.raises(SolrlError, match=says) as raised:
                list(client.explore(PROMPT, range(4), **settings))
            assert type(raised.value) is kind


def test_failing_requests_leave_shared_memory_flat(explorer: Explorer) -> None:
    def fail(number: int) -> None:
        with pytest.raises(SolrlError):
            made(explorer.client, range(4), policy=100 + number)
        with pytest.raises(InputError):
            made(explorer.client, range(-1, 3))

    fail(0)
    before = explorer.shared_memory()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(250)))
    assert explorer.shared_memory() == before
    assert made(explorer.client, range(2)).shape == (2, 32, 32, 3)


def test_swaps_under_load_fail_nothing_and_mix_nothing(explorer: Explorer) -> None:
    """50 requests across 10 swaps: each is answered whole by one version, with its pictures."""
    client = explorer.client
    reference = {}
    for version, (path, manifest) in explorer.adapters.items():
        reload = client.load_adapter(str(path), timeout=60)
        assert (reload.version, reload.sha256) == (version, manifest.sha256)
        assert reload.modules_bound == reload.modules_expected > 0
        reference[version] = made(client, range(6))
    assert np.abs(reference[1].astype(int) - reference[2].astype(int)).max() > 20

    def ask(_: int) -> set[int | None]:
        batches = list(client.generate(PROMPT, list(range(6)), steps=STEPS, timeout=240))
        versions = {batch.version for batch in batches}
        for batch in batches:
            assert batch.version is not None
            expected = reference[batch.version][list(batch.seeds)]
            assert np.abs(batch.images.astype(int) - expected.astype(int)).max() <= 1
            assert batch.sha256 == explorer.adapters[batch.version][1].sha256
        return versions

    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(ask, number) for number in range(50)]
        for swap in range(10):
            client.load_adapter(str(explorer.adapters[1 + swap % 3][0]), timeout=120)
        seen = [future.result() for future in asked]
    assert all(len(versions) == 1 for versions in seen)
    assert len(set.union(*seen)) > 1, "no swap fell between the requests"


def test_a_run_goes_through_announcement_and_queue(explorer: Explorer) -> None:
    """The learner's view: announce, wait for the replica, feed, collect; equal to a call."""
    client = queue.connect(explorer.config.services.redis)
    path, manifest = explorer.adapters[3]
    prompts = Stream(client, run="explorer-run", name="prompts", record=PromptRecord)
    selected = Stream(client, run="explorer-run", name="selected", record=SelectionRecord)
    queue.announce(
        client,
        Announcement(
            run="explorer-run",
            epoch=1,
            version=3,
            sha256=manifest.sha256,
            path=str(path),
            base_sha256=manifest.base_sha256,
        ),
    )
    eventually(
        lambda: any(
            (s.id, s.version, s.sha256) == ("explorer-t", 3, manifest.sha256)
            for s in queue.replicas(client)
        )
    )
    record = PromptRecord(
        run="explorer-run",
        epoch=1,
        iteration=0,
        slot=0,
        request_id="q",
        trace_id="t",
        prompt=PROMPT,
        prompt_index=0,
        run_seed=5,
        candidates=10,
        keep=4,
        steps=STEPS,
        policy_version=3,
        adapter_sha256=manifest.sha256,
        reward="brightness",
    )
    for _ in range(2):
        prompts.put(record)
    eventually(lambda: len(selected) == 2, seconds=120)
    first, second = (d.record for d in selected.take("learner", count=2))
    assert first.candidates == second.candidates
    eventually(lambda: len(prompts) == 0)
    with explorer.calls() as calls:
        seeds = [candidate_seed(5, "explore", 0, 0, i) for i in range(10)]
        *_, selection = calls.explore(PROMPT, seeds, policy=3)
    assert isinstance(selection, SelectionEvent)
    assert {(k.seed, k.rank, k.proxy_reward) for k in selection.kept} == {
        (c.seed, c.selected_as, c.proxy_reward) for c in first.kept
    }


def test_metrics_are_served(explorer: Explorer) -> None:
    (url,) = set(re.findall(r"http://\S+/metrics", explorer.log("services.explorer")))
    text = httpx.get(url, timeout=30, trust_env=False).text
    for name in ("candidates_total", "phase_seconds", "policy_version", "ready"):
        assert f"# TYPE solrl_{name} " in text


def test_a_taken_port_is_one_clear_message(explorer: Explorer) -> None:
    for module in ("services.explorer.triton", "services.explorer"):
        result = subprocess.run(
            [sys.executable, "-m", module, "--config", str(explorer.file)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 2
        message = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert len(message) == 1
        assert "is taken by another program" in message[0]
        assert "Traceback" not in result.stderr


def test_a_dead_stub_is_noticed_and_everything_comes_back(explorer: Explorer) -> None:
    """Killed in mid-stream: callers hears of it, the launcher ends, a new one serves as before."""
    assert explorer.triton is not None
    client = explorer.client
    client.load_adapter(str(explorer.adapters[2][0]), timeout=60)
    with explorer.calls() as calls:
        # The gateway must know of the adapter to restore it.
        calls.load_adapter(str(explorer.adapters[2][0]))
    stream = client.generate(PROMPT, list(range(2000)), steps=200, timeout=240)
    next(stream)
    (stub,) = [p for p in explorer.family() if "stub" in p.name()]
    stub.kill()
    with pytest.raises(UnavailableError):
        list(stream)
    assert explorer.triton.wait(90) == 1
    assert "the model no longer answers" in explorer.log("services.explorer.triton")
    assert explorer.shared_memory() == []
    eventually(lambda: grpc_ready(explorer.config.services.explorer) == "does not serve yet")
    explorer.start_triton()
    eventually(lambda: grpc_ready(explorer.config.services.explorer) is None)
    eventually(lambda: (explorer.client.status()["current"] or {}).get("version") == 2)


def test_a_killed_launcher_leaves_no_server(explorer: Explorer) -> None:
    """kill -9: Triton ends by itself, and the next launcher clears away what it finds."""
    assert explorer.triton is not None
    family = explorer.family()
    assert family
    os.kill(explorer.triton.pid, signal.SIGKILL)
    explorer.triton.wait(30)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    port = explorer.config.services.triton.rpartition(":")[2]
    left = Path(f"/dev/shm/solrl-triton-{port}-left-by-another")
    left.write_bytes(b"x")
    explorer.triton = explorer.start("services.explorer.triton")
    eventually(lambda: not left.exists(), seconds=120)
    # The fixture stops this one while its model is still loading.
