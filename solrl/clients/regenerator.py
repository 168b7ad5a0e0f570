"""Client of the regenerator: pictures and clean latents of given seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from solrl.clients.http import HttpClient, Priority
from solrl.clients.tensors import unpack
from solrl.errors import InputError
from solrl.records import ReplicaState

Policy = int | Literal["base", "current"]


@dataclass(frozen=True)
class Regenerated:
    """latents fp32 [n, C, h, w]; images uint8 [n, H, W, 3]; version None = base; adapter sha256.

    A latent may be non-finite, which is for the caller to exclude: see `finite`.
    """

    latents: NDArray[np.float32]
    images: NDArray[np.uint8]
    version: int | None
    adapter_sha256: str | None
    precision: str
    truncated: bool
    seconds: float

    @property
    def finite(self) -> NDArray[np.bool_]:
        """Which pictures have finite latents only, bool [n]."""
        finite: NDArray[np.bool_] = np.isfinite(self.latents).all(axis=(1, 2, 3))
        return finite


class ReloadAnswer(BaseModel):
    """What a load answers; `seconds` excludes the canary."""

    run: str
    epoch: int
    version: int
    sha256: str
    modules_bound: int
    modules_expected: int
    seconds: float
    canary: str


class RegeneratorStatus(BaseModel):
    """What a regenerator holds; `replica` is its registration, with the refusal of an adapter."""

    base_id: str
    base_sha256: str
    precision: str
    micro_batch: int
    latent_shape: tuple[int, int, int]
    held: list[int]
    current: int | None
    replica: ReplicaState


class RegeneratorClient(HttpClient):
    """See HttpClient for errors; VersionError names the versions held."""

    def __init__(
        self, url: str, *, timeout: float, token: str | None = None, priority: Priority = "run"
    ) -> None:
        super().__init__(url, name="regenerator", timeout=timeout, token=token, priority=priority)

    def regenerate(
        self,
        prompt: str,
        seeds: Sequence[int],
        *,
        steps: int,
        guidance: float = 1.0,
        policy: Policy = "current",
        request_id: str | None = None,
    ) -> Regenerated:
        """One picture a seed, in the order of `seeds`."""
        body = self.call(
            "POST",
            "/v1/regenerate",
            json={
                "prompt": prompt,
                "seeds": list(seeds),
                "steps": steps,
                "guidance": guidance,
                "policy": policy,
                "format": "safetensors",
            },
            request_id=request_id,
        )
        try:
            arrays, about = unpack(body)
            answer = _checked(arrays, about)
        except (InputError, KeyError, ValueError) as error:
            raise self.nonsense(f"{type(error).__name__} {error}") from error
        if json.loads(about["seeds"]) != list(seeds):
            raise self.nonsense(f"seeds {about['seeds'][:80]}, asked for {list(seeds)[:4]}...")
        if isinstance(policy, int) and answer.version != policy:
            raise self.nonsense(f"policy version {answer.version}, asked for {policy}")
        if len(answer.latents) != len(seeds) or len(answer.images) != len(seeds):
            raise self.nonsense(
                f"{len(answer.latents)} latents and {len(answer.images)} images "
                f"for {len(seeds)} seeds"
            )
        return answer

    def load_adapter(self, folder: Path) -> ReloadAnswer:
        """Load an adapter by hand. AdapterError when it is refused; the old one keeps serving."""
        return self.parse(ReloadAnswer, self.call("PUT", "/v1/adapter", json={"path": str(folder)}))

    def status(self) -> RegeneratorStatus:
        return self.parse(RegeneratorStatus, self.call("GET", "/v1/adapters"))


def _checked(arrays: dict[str, NDArray[Any]], about: dict[str, str]) -> Regenerated:
    latents, images = arrays["latents"], arrays["images"]
    if latents.dtype != np.float32 or latents.ndim != 4:
        raise ValueError(f"latents are {latents.dtype} {list(latents.shape)}")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images are {images.dtype} {list(images.shape)}")
    return Regenerated(
        latents=latents,
        images=images,
        version=json.loads(about["version"]),
        adapter_sha256=json.loads(about["adapter_sha256"]),
        precision=about["precision"],
        truncated=json.loads(about["truncated"]),
        seconds=float(about["seconds"]),
    )
