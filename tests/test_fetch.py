"""`solrl fetch` against a real server that plays the Hub: what it takes, keeps and refuses."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants, get_session

from solrl.errors import BusyError, InputError, UnavailableError
from solrl.fetch import LOCK, RECORD, Fetched, fetch

MODEL = "owner/tiny"
COMMIT = "c" * 40
NEWER = "d" * 40

INDEX = json.dumps(
    {
        "_class_name": "SanaPipeline",
        "force_zeros": True,
        "safety_checker": [None, None],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Gemma2Model"],
        "tokenizer": ["transformers", "GemmaTokenizer"],
        "transformer": ["diffusers", "SanaTransformer2DModel"],
        "../escape": ["diffusers", "AutoencoderDC"],
    }
).encode()
WEIGHTS = bytes(range(256)) * 1000

NEEDED = {
    "model_index.json": INDEX,
    "scheduler/scheduler_config.json": b'{"shift": 3.0}',
    "text_encoder/config.json": b"{}",
    "text_encoder/model-00001-of-00002.safetensors": b"one",
    "text_encoder/model-00002-of-00002.safetensors": b"two",
    "text_encoder/model.safetensors.index.json": b'{"weight_map": {}}',
    "tokenizer/merges.txt": b"",
    "tokenizer/spiece.model": b"\n\x0espm",
    "tokenizer/tokenizer.json": b'{"version": "1.0"}',
    "transformer/config.json": b'{"a": 1}',
    "transformer/diffusion_pytorch_model.safetensors": WEIGHTS,
}
LEFT_OUT = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "README.md": b"# tiny",
    "whole-pipeline.safetensors": b"everything once more",
    "pipeline.py": b"import os",
    "config.json": b"{}",
    "safety_checker/model.safetensors": b"the index says null",
    "samples/prompts.txt": b"not a component",
    "text_encoder/model.fp16-00001-of-00001.safetensors": b"half",
    "text_encoder/model.safetensors.index.fp16.json": b"half",
    "text_encoder/pytorch_model.bin": b"a pickle",
    "text_encoder/pytorch_model.bin.index.json": b"{}",
    "text_encoder/flax_model.msgpack": b"flax",
    "text_encoder/onnx/config.json": b"{}",
    "transformer/modeling_sana.py": b"import os",
    "transformer/diffusion_pytorch_model.fp16.safetensors": b"half",
    "transformer/diffusion_flax_model.safetensors": b"flax",
    "transformer/openvino_model.xml": b"<xml/>",
    "transformer/openvino_config.json": b"{}",
    "transformer/model.onnx": b"onnx",
    "transformer/training.ckpt": b"a pickle",
}
BIG = "transformer/diffusion_pytorch_model.safetensors"


class Asked(NamedTuple):
    path: str
    start: int
    token: str | None


class Hub(ThreadingHTTPServer):
    """One repository; the public fields decide how it behaves."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = files
        self.revisions = {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT, NEWER: NEWER}
        #: Bytes after which the next answers about BIG break off; then it answers whole.
        self.breaks: list[int] = []
        self.ranges = True
        self.sizes = True
        self.gated: str | None = None
        self.status: int | None = None
        self.silent_on: str | None = None
        self.damaged = False
        self.released = threading.Event()
        self.asked: list[Asked] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def starts(self, path: str) -> list[int]:
        """First bytes asked for of a file, in order."""
        return [asked.start for asked in self.asked if asked.path.endswith(f"/{path}")]

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        close_session()  # or its open connection is served on

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up waiting is what some tests are about."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        start = int((self.headers["Range"] or "bytes=0-")[len("bytes=") : -1])
        hub.asked.append(Asked(path, start, self.headers["Authorization"]))
        if hub.silent_on is not None and hub.silent_on in path:
            hub.released.wait(30)
            self.close_connection = True
        elif hub.status is not None:
            self.refuse(hub.status, None)
        elif info := re.fullmatch(r"/api/models/(.+)/revision/(.+)", path):
            self.info(info[1], info[2])
        elif file := re.fullmatch(rf"/{MODEL}/resolve/([0-9a-f]{{40}})/(.+)", path):
            self.file(file[1], file[2], start)
        else:
            self.refuse(404, "EntryNotFound")

    def info(self, model: str, revision: str) -> None:
        hub = self.server
        if model != MODEL:
            self.refuse(401, "RepoNotFound")
        elif revision not in hub.revisions:
            self.refuse(404, "RevisionNotFound")
        else:
            siblings = [sibling(path, data, hub.sizes) for path, data in hub.files.items()]
            # Public even where the files are gated, as on the Hub itself.
            about = {"id": MODEL, "sha": hub.revisions[revision], "siblings": siblings}
            self.send(200, json.dumps(about).encode())

    def file(self, commit: str, path: str, start: int) -> None:
        hub = self.server
        if hub.gated is not None and self.headers["Authorization"] != f"Bearer {hub.gated}":
            self.refuse(403 if self.headers["Authorization"] else 401, "GatedRepo")
            return
        data = hub.files[path]
        if hub.damaged and path == BIG:
            data = bytes(len(data))
        start = start if hub.ranges else 0
        data, whole = data[start:], len(data)
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(hub.files[path]).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
        self.end_headers()
        if path == BIG and hub.breaks:
            data = data[: hub.breaks.pop(0)]
            self.close_connection = True
        self.wfile.write(data)

    def refuse(self, status: int, code: str | None) -> None:
        self.send(status, b"", {"X-Error-Code": code} if code else {})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def sibling(path: str, data: bytes, sizes: bool) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    about: dict[str, Any] = {"rfilename": path, "blobId": git}
    if sizes:
        about["size"] = len(data)
    if path.endswith(".safetensors"):
        sha256 = hashlib.sha256(data).hexdigest()
        about["lfs"] = {"size": len(data), "sha256": sha256, "pointerSize": 130}
    return about


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running Hub that this process uses, as in an image: told to stay offline."""
    server = Hub({**NEEDED, **LEFT_OUT})
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    use(monkeypatch, server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.close()


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def model_files(folder: Path) -> dict[str, bytes]:
    return {path: data for path, data in tree(folder).items() if path not in (RECORD, LOCK)}


# --- what is taken -------------------------------------------------------------------------------


def test_what_a_pipeline_loads_is_taken_and_nothing_else(hub: Hub, out: Path) -> None:
    fetched = fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED
    assert fetched == Fetched(
        model=MODEL,
        revision=COMMIT,
        commit=COMMIT,
        files={path: len(data) for path, data in NEEDED.items()},
    )
    assert Fetched.model_validate_json((out / RECORD).read_bytes()) == fetched
    # The index is read before it is known what to take; an empty file need not be asked for.
    assert {path: len(hub.starts(path)) for path in NEEDED} == {
        path: 2 if data == INDEX else len(data[:1]) for path, data in NEEDED.items()
    }


def test_the_process_is_offline_again_afterwards(hub: Hub, out: Path) -> None:
    fetch(MODEL, COMMIT, out)
    assert constants.is_offline_mode()
    assert not [asked.path for asked in hub.asked if "agent" in asked.path]


@pytest.mark.parametrize("revision", ["main", "v1"])
def test_a_revision_that_can_move_is_resolved_and_the_commit_to_pin_is_named(
    hub: Hub, out: Path, capsys: pytest.CaptureFixture[str], revision: str
) -> None:
    fetched = fetch(MODEL, revision, out)
    assert (fetched.revision, fetched.commit) == (revision, COMMIT)
    warning = capsys.readouterr().err
    assert f"warning: revision '{revision}' can move; --revision {COMMIT} pins" in warning
    asked = [asked.path for asked in hub.asked if "/resolve/" in asked.path]
    assert all(f"/resolve/{COMMIT}/" in path for path in asked)


def test_a_commit_needs_no_warning_and_progress_is_plain_lines(
    hub: Hub, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch(MODEL, COMMIT, out)
    printed = capsys.readouterr()
    assert printed.err == ""
    assert len(printed.out.splitlines()) == len(NEEDED)
    assert f"{len(NEEDED)}/{len(NEEDED)} {BIG} (256.0 kB)" in printed.out


REFUSED: dict[str, tuple[dict[str, bytes], list[str], str]] = {
    "no index": (
        {},
        ["model_index.json"],
        rf"it has no model_index.json, only {re.escape('.git')}",
    ),
    "index no object": (
        {"model_index.json": b"[]"},
        [],
        "model_index.json .* is not a JSON object",
    ),
    "only pickles": (
        {"transformer/diffusion_pytorch_model.bin": b"p"},
        [path for path in {**NEEDED, **LEFT_OUT} if path.startswith("transformer/diff")],
        r"transformer/ of owner/tiny has only pickled weights \(diffusion_pytorch_model.bin, ",
    ),
    "only a variant": (
        {},
        [BIG],
        r"transformer/ .* only as a variant \(diffusion_pytorch_model.fp16.safetensors\)",
    ),
}


@pytest.mark.parametrize(("more", "less", "message"), REFUSED.values(), ids=REFUSED)
def test_a_repository_that_services_cannot_load_is_refused_before_anything_is_written(
    hub: Hub, out: Path, more: dict[str, bytes], less: list[str], message: str
) -> None:
    hub.files = {path: data for path, data in hub.files.items() if path not in less} | more
    with pytest.raises(InputError, match=message):
        fetch(MODEL, COMMIT, out)
    assert not out.exists()


def test_a_real_pipeline_arrives_byte_for_byte_and_loads(
    hub: Hub, out: Path, tiny_model: Path
) -> None:
    from diffusers import SanaPipeline

    hub.files = {**tree(tiny_model), "README.md": b""}
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == tree(tiny_model)
    assert type(SanaPipeline.from_pretrained(out)) is SanaPipeline


# --- the second call -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["main", COMMIT])
def test_a_whole_folder_needs_no_network(hub: Hub, out: Path, first: str) -> None:
    fetched = fetch(MODEL, first, out)
    hub.close()
    before = tree(out)
    assert fetch(MODEL, COMMIT, out) == fetched
    assert tree(out) == before
    # A branch has to be looked up; the message names what would do without.
    with pytest.raises(UnavailableError, match=f"or ask for --revision {COMMIT}, which .* no net"):
        fetch(MODEL, "main", out)
    assert tree(out) == before


def test_a_branch_that_has_not_moved_downloads_nothing(hub: Hub, out: Path) -> None:
    fetched = fetch(MODEL, "main", out)
    hub.asked.clear()
    assert fetch(MODEL, "main", out) == fetched
    assert [asked.path for asked in hub.asked] == [f"/api/models/{MODEL}/revision/main"]


@pytest.mark.parametrize("damage", ["gone", "cut", "record"])
def test_what_is_missing_from_a_folder_is_fetched_again(hub: Hub, out: Path, damage: str) -> None:
    fetched = fetch(MODEL, COMMIT, out)
    hub.asked.clear()
    match damage:
        case "gone":
            (out / BIG).unlink()
        case "cut":
            (out / BIG).write_bytes(WEIGHTS[:-1])
        case "record":
            (out / RECORD).write_text("{")
    assert fetch(MODEL, COMMIT, out) == fetched
    assert model_files(out) == NEEDED
    assert hub.starts(BIG) == ([] if damage == "record" else [0])
    assert not hub.starts("tokenizer/tokenizer.json")


def test_another_commit_is_refused_and_nothing_is_overwritten(hub: Hub, out: Path) -> None:
    fetch(MODEL, "main", out)
    before = tree(out)
    hub.revisions["main"] = NEWER
    for revision in ("main", NEWER):
        with pytest.raises(InputError, match=f"holds {MODEL} {COMMIT}, not {MODEL} {NEWER}; noth"):
            fetch(MODEL, revision, out)
    with pytest.raises(InputError, match=f"holds {MODEL} {COMMIT}, not owner/other {COMMIT}"):
        fetch("owner/other", COMMIT, out)
    assert tree(out) == before


def test_the_unfinished_download_of_another_commit_is_refused(hub: Hub, out: Path) -> None:
    hub.breaks = [1000, 0]
    with pytest.raises(UnavailableError):
        fetch(MODEL, COMMIT, out)
    before = tree(out)
    with pytest.raises(InputError, match=f"holds {MODEL} {COMMIT}, not {MODEL} {NEWER}"):
        fetch(MODEL, NEWER, out)
    assert tree(out) == before


def test_a_folder_with_something_else_in_it_is_refused(hub: Hub, out: Path) -> None:
    out.mkdir(parents=True)
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"files that are not from here \(thesis.txt\)"):
        fetch(MODEL, COMMIT, out)
    assert tree(out) == {"thesis.txt": b"mine"}
    assert not hub.asked


def test_a_new_volume_is_an_empty_folder(hub: Hub, out: Path) -> None:
    (out / "lost+found").mkdir(parents=True)
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED


def test_a_file_in_the_folders_place_is_refused(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"--out .*file is a file; name a folder"):
        fetch(MODEL, COMMIT, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_two_at_once_are_refused(hub: Hub, out: Path) -> None:
    out.mkdir(parents=True)
    with (out / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # even this is one too many
        with pytest.raises(BusyError, match="another solrl fetch writes to"):
            fetch(MODEL, COMMIT, out)
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED


# --- broken off ----------------------------------------------------------------------------------


def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, out: Path) -> None:
    hub.breaks = [1000, 0]
    with pytest.raises(UnavailableError, match=r"broke off .*call again: what has come is kept"):
        fetch(MODEL, COMMIT, out)
    assert not (out / RECORD).exists()
    assert not (out / BIG).exists()
    assert hub.starts(BIG) == [0, 1000]
    hub.asked.clear()
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED
    assert hub.starts(BIG) == [1000]
    assert not hub.starts("tokenizer/tokenizer.json")


def test_a_connection_that_breaks_is_taken_up_again_while_something_comes(
    hub: Hub, out: Path
) -> None:
    hub.breaks = [1000, 500, 1]
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED
    assert hub.starts(BIG) == [0, 1000, 1500, 1501]


def test_a_server_without_ranges_sends_the_file_from_its_start(hub: Hub, out: Path) -> None:
    hub.ranges = False
    hub.breaks = [1000]
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED


def test_a_file_that_was_whole_but_not_in_its_place_is_not_sent_again(hub: Hub, out: Path) -> None:
    hub.breaks = [1000, 0]
    with pytest.raises(UnavailableError):
        fetch(MODEL, COMMIT, out)
    hub.asked.clear()
    part_of(out).write_bytes(WEIGHTS)
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED
    assert not hub.starts(BIG)


def test_a_file_that_is_not_what_the_commit_says_never_gets_its_name(hub: Hub, out: Path) -> None:
    hub.damaged = True
    with pytest.raises(UnavailableError, match=f"{BIG} arrived damaged; call again"):
        fetch(MODEL, COMMIT, out)
    assert not (out / BIG).exists()
    assert not (out / RECORD).exists()
    hub.damaged = False
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED


def part_of(out: Path) -> Path:
    path = out / BIG
    return path.with_name(f".{path.name}.part")


# --- the disk ------------------------------------------------------------------------------------


def test_too_little_space_is_said_before_anything_is_downloaded(
    hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(map(len, NEEDED.values()))
    usage = shutil.disk_usage(out.parent.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=total - 1))
    with pytest.raises(InputError, match=r"needs 256\.\d kB, but 256\.\d kB are free there; make"):
        fetch(MODEL, COMMIT, out)
    assert not out.exists()
    assert not hub.starts(BIG)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=total))
    fetch(MODEL, COMMIT, out)


def test_only_what_is_still_missing_needs_space(
    hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.breaks = [1000, 0]
    with pytest.raises(UnavailableError):
        fetch(MODEL, COMMIT, out)
    usage = shutil.disk_usage(out)
    rest = len(WEIGHTS) - 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=rest - 1))
    with pytest.raises(InputError, match="are free there"):
        fetch(MODEL, COMMIT, out)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=rest))
    fetch(MODEL, COMMIT, out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Linux device stands in for the disk")
def test_a_disk_that_fills_on_the_way_is_said_and_nothing_is_recorded(hub: Hub, out: Path) -> None:
    hub.breaks = [1000, 0]
    with pytest.raises(UnavailableError):
        fetch(MODEL, COMMIT, out)
    part_of(out).unlink()
    part_of(out).symlink_to("/dev/full")
    with pytest.raises(InputError, match=r"the disk of .*tiny is full; make room, then call again"):
        fetch(MODEL, COMMIT, out)
    assert not (out / RECORD).exists()
    part_of(out).unlink()
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED


# --- the Hub says no, or nothing -----------------------------------------------------------------


class Fault(NamedTuple):
    kind: type[Exception]
    message: str
    #: A field of the Hub and its value.
    hub: tuple[str, Any] = ("status", None)
    model: str = MODEL
    revision: str = COMMIT


FAULTS = {
    "unknown model": Fault(InputError, r"no model 'owner/no' \(HTTP 401\)", model="owner/no"),
    "unknown branch": Fault(InputError, "has no revision 'dev'; give a branch,", revision="dev"),
    "unknown commit": Fault(InputError, "has no revision 'eeee", revision="e" * 40),
    "path as an id": Fault(InputError, "'a/b/c' is no model id: .*OWNER/NAME", model="a/b/c"),
    "empty id": Fault(InputError, "'' is no model id", model=""),
    "gated": Fault(
        InputError,
        f"is gated, and no token is set; accept its licence on .*/{MODEL}, and set HF_TOKEN",
        ("gated", "hf_right"),
    ),
    "private": Fault(InputError, "private, the token: HF_TOKEN is needed", ("status", 401)),
    "forbidden": Fault(InputError, r"\(HTTP 403\)", ("status", 403)),
    "overloaded": Fault(UnavailableError, "HTTP 503; wait a little, then call", ("status", 503)),
    "limited": Fault(UnavailableError, "answered HTTP 429", ("status", 429)),
    "not a Hub": Fault(UnavailableError, "does not answer like a Hub", ("status", 200)),
    "no sizes": Fault(UnavailableError, "gives no file sizes", ("sizes", False)),
    "silent": Fault(UnavailableError, "silent for 0.3 s; check", ("silent_on", "/api/")),
    "silent at files": Fault(UnavailableError, "silent for 0.3 s", ("silent_on", "/resolve/")),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_fault_of_the_hub_is_one_message_and_nothing_is_written(
    hub: Hub, out: Path, fault: Fault
) -> None:
    setattr(hub, *fault.hub)
    with pytest.raises(fault.kind, match=fault.message):
        fetch(fault.model, fault.revision, out, deadline=0.3)
    assert not out.exists()


def test_a_hub_that_falls_silent_in_a_file_is_not_waited_for(hub: Hub, out: Path) -> None:
    hub.silent_on = BIG
    with pytest.raises(
        UnavailableError, match=r"silent for 0.3 s; check the network, then call ag"
    ):
        fetch(MODEL, COMMIT, out, deadline=0.3)
    assert not (out / RECORD).exists()
    hub.silent_on = None
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED


def test_a_gated_model_comes_with_the_right_token_alone(
    hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match="is gated, and the token that is set may not read it"):
        fetch(MODEL, COMMIT, out)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    fetch(MODEL, COMMIT, out)
    assert model_files(out) == NEEDED


def test_no_network_is_said_with_what_to_check(
    hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.close()
    with pytest.raises(UnavailableError, match=f"{hub.url} cannot be reached .*HF_ENDPOINT and pr"):
        fetch(MODEL, COMMIT, out)
    use(monkeypatch, "http://")
    with pytest.raises(UnavailableError, match="cannot be reached"):
        fetch(MODEL, COMMIT, out)
    assert not out.exists()


def test_every_call_has_the_deadline(hub: Hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[float]] = []
    client = get_session()
    send = client.send

    def sent(request: Any, **options: Any) -> Any:
        seen.append(set(request.extensions["timeout"].values()))
        return send(request, **options)

    monkeypatch.setattr(client, "send", sent)
    fetch(MODEL, COMMIT, out, deadline=7)
    assert seen == [{7}] * len(hub.asked)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_goes_online_from_an_offline_image_and_then_needs_no_network(
    hub: Hub, out: Path, tmp_path: Path
) -> None:
    def solrl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
        }
        return subprocess.run(
            [sys.executable, "-m", "solrl.cli", "fetch", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )

    last = f"{out}: {MODEL} at {COMMIT}, {len(NEEDED)} files, 256.4 kB\n"
    first = solrl(MODEL, "--revision", "main", "--out", out)
    assert first.returncode == 0, first.stderr
    assert first.stdout.endswith(last)
    assert first.stdout.startswith(f"1/{len(NEEDED)} model_index.json")
    assert first.stderr.startswith("warning: revision 'main' can move")
    assert model_files(out) == NEEDED

    hub.close()
    again = solrl(MODEL, "--revision", COMMIT, "--out", out)
    assert (again.returncode, again.stdout, again.stderr) == (0, last, "")

    failed = solrl(MODEL, "--revision", NEWER, "--out", tmp_path / "other")
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"error: {hub.url} cannot be reached")
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "other").exists()
