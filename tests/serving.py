"""Real uvicorn servers in threads, and small stand-ins for models whose behaviour a test steers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import torch
from fastapi import FastAPI
from torch import Tensor

from services.http import serve
from solrl.embeddings import check_prompt
from solrl.errors import AdapterError, InputError, VersionError
from solrl.generator import Generated, Job, Policy, Reload

#: One client for all tests: making one takes longer than most of them.
HTTP = httpx.Client(trust_env=False, timeout=60)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def eventually(condition: Callable[[], object], *, seconds: float = 60) -> None:
    """Wait for `condition`; fail with its source line when it never comes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.02)


def is_ready(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def running(app: FastAPI, url: str, *, wait_ready: bool = True) -> Iterator[str]:
    """The app behind a real server in a thread."""
    thread = threading.Thread(target=serve, args=(app, url), daemon=True)
    thread.start()
    try:
        if wait_ready:
            eventually(lambda: is_ready(url))
        yield url
    finally:
        app.state.stop()
        thread.join(timeout=30)
        assert not thread.is_alive(), "the server did not stop"


class FakeGenerator:
    """Pictures that tell their seed and version; `gate` holds up work, `log` tells its order."""

    base_id = "fake"
    base_sha256 = "f" * 64
    precision = "fp32"
    precision_reason = "a stand-in"
    latent_shape = (2, 2, 2)
    micro_batch = 4

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.log: list[tuple[str, int]] = []
        self.current: SimpleNamespace | None = None
        self.keeps_before = True
        self._held: list[int] = []

    def warm_up(self) -> None:
        pass

    def held(self) -> list[int]:
        return self._held

    def truncated(self, prompt: str) -> bool:
        return len(prompt.split()) > 8

    def load_adapter(self, folder: Path) -> Reload:
        if not folder.exists():
            raise AdapterError(f"adapter {folder} is incomplete")
        version = int(folder.name)
        before = [self.current.version] if self.current and self.keeps_before else []
        self._held = [*before, version]
        self.current = SimpleNamespace(version=version)
        return Reload("test", 1, version, f"{version:064d}", 8, 8, 0.01, "c")

    def generate(
        self,
        jobs: Sequence[Job],
        *,
        steps: int,
        guidance: float,
        policy: Policy,
        cancelled: Callable[[], bool],
    ) -> Generated | None:
        assert len(jobs) <= self.micro_batch
        check_prompt(jobs[0].prompt)
        self.log.append((jobs[0].prompt, len(jobs)))
        self.started.release()
        assert not cancelled()
        while not self.gate.wait(0.01):
            if cancelled():
                self.log.append((jobs[0].prompt, -1))
                return None
        if jobs[0].prompt == "broken":
            raise RuntimeError("the kernel is broken")
        if isinstance(policy, int) and policy not in self._held:
            raise VersionError(f"policy version {policy} is not held; held: {self._held}, base")
        version = self.current.version if policy == "current" and self.current else None
        seeds = torch.tensor([float(job.seed) for job in jobs])
        latents = seeds[:, None, None, None].expand(-1, *self.latent_shape).contiguous()
        if jobs[0].prompt == "nan latent":
            latents[0, 0, 0, 0] = float("nan")
        images = (seeds % 256).to(torch.uint8)[:, None, None, None].expand(-1, 8, 8, 3)
        return Generated(
            latents, images.contiguous(), policy if isinstance(policy, int) else version, len(jobs)
        )


class FakeScorer:
    """Scores the mean brightness; prompts called nan, foreign and crash do what they say."""

    version = "1"
    input_filter = "bicubic"

    def __init__(self, name: str = "brightness", input_size: int = 8) -> None:
        self.name = name
        self.input_size = input_size
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[tuple[str, int]] = []

    def score(self, *, images: Tensor, prompts: Sequence[str]) -> Tensor:
        self.batches.append((prompts[0], len(images)))
        assert self.gate.wait(60)
        if "crash" in prompts:
            raise RuntimeError("out of memory")
        if "foreign" in prompts:
            raise InputError("brightness does not know 'foreign'")
        values = images.float().mean((1, 2, 3))
        nan = torch.tensor([prompt == "nan" for prompt in prompts])
        return torch.where(nan, torch.nan, values)
