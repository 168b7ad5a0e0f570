"""One inference copy of a model: fixed-shape micro-batches, adapters merged in, one precision.

Used by the explorer (emulated or native NVFP4), the regenerator and the learner's evaluation.
Not thread-safe: whoever owns it calls it from one thread.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from solrl import adapters, lora, models
from solrl.adapters import Manifest
from solrl.config import Config, load_config
from solrl.embeddings import EmbeddingStore, check_prompt, stack
from solrl.errors import InputError, VersionError
from solrl.models.sana import LORA_TARGETS, SKIP
from solrl.noise import noise_batch
from solrl.precision import LayerReport, apply, count_multiply_adds, hardware, resolve
from solrl.precision.choose import Role
from solrl.quiet import quiet_libraries
from solrl.seeds import candidate_seed, check_seed
from solrl.solvers import euler, uniform_sigmas

Policy = int | Literal["base", "current"]

SOLVER = "euler"


@dataclass(frozen=True)
class Job:
    """One picture to make."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Generated:
    """latents fp32 [n,C,h,w], clean; images uint8 [n,H,W,3]; version None = base; nfe counted."""

    latents: Tensor
    images: Tensor
    version: int | None
    nfe: int


@dataclass(frozen=True)
class Reload:
    """What a reload answers; `seconds` excludes the canary, a digest of one velocity."""

    run: str
    epoch: int
    version: int
    sha256: str
    modules_bound: int
    modules_expected: int
    seconds: float
    canary: str


class Generator:
    """Load with `Generator.load`; then `generate`, `load_adapter`, `held`."""

    def __init__(
        self, config: Config, *, precision: str, role: Role, micro_batch: int, activation: str
    ) -> None:
        capability, amx = hardware()
        resolved = resolve(precision, capability=capability, amx=amx, role=role)
        self.precision: str = resolved.precision
        self.precision_reason = resolved.reason
        self._model = models.load(config.model)
        self.base_id = config.model.base
        self.base_sha256 = models.base_sha256(self._model.folder)
        self.latent_shape = self._model.latent_shape
        self.micro_batch = micro_batch
        self.current: Manifest | None = None
        self._store = EmbeddingStore.of(config.model, self._model)
        transformer = self._model.transformer
        pristine = lora.pristine_weights(
            transformer, lora.target_modules(transformer, LORA_TARGETS)
        )
        counts = count_multiply_adds(transformer, self._example())
        self.layers: list[LayerReport] = apply(
            transformer,
            precision=resolved.precision,
            skip=(SKIP if config.explore.skip is None else config.explore.skip)
            if resolved.precision.startswith("nvfp4")
            else (),
            activation_scale="tensor" if activation == "tensor" else "row",
            multiply_adds=counts,
        )
        self._merger = lora.Merger(transformer, pristine)
        self._held: dict[int, tuple[Manifest, lora.Lora]] = {}
        self._active: int | None = None
        for block in transformer.transformer_blocks:  # type: ignore[union-attr]
            # By block: one compilation serves all of them.
            block.compile(fullgraph=True, dynamic=False)

    @classmethod
    def load(
        cls,
        config: Config,
        *,
        precision: str,
        micro_batch: int,
        activation_scale: str = "row",
        role: Role = "regenerate",
    ) -> Generator:
        """Build from the run's configuration; ConfigError names what is wrong with it."""
        return cls(
            config,
            precision=precision,
            role=role,
            micro_batch=micro_batch,
            activation=activation_scale,
        )

    def held(self) -> list[int]:
        """Adapter versions that can be asked for, besides the base."""
        return sorted(self._held)

    def truncated(self, prompt: str) -> bool:
        """Whether the text encoder cuts this prompt."""
        return self._store.get(check_prompt(prompt)).truncated

    def load_adapter(self, folder: Path) -> Reload:
        """Bind an adapter whole and make it current; on AdapterError the old one keeps serving.

        The version before stays held, for work that began with it.
        """
        manifest = adapters.read_manifest(folder)
        adapters.check_base(manifest, base_sha256=self.base_sha256)
        source = f"adapter version {manifest.version} of run {manifest.run}"
        weights = lora.from_bytes((folder / adapters.WEIGHTS).read_bytes(), source=source)
        self._merger.check(weights, source=source)
        begin = time.perf_counter()
        self._merger.merge(weights)
        seconds = time.perf_counter() - begin
        before = self.current
        self._held = {
            version: entry
            for version, entry in self._held.items()
            if before is not None and version == before.version and before.run == manifest.run
        }
        self._held[manifest.version] = (manifest, weights)
        self._active = manifest.version
        self.current = manifest
        return Reload(
            run=manifest.run,
            epoch=manifest.epoch,
            version=manifest.version,
            sha256=manifest.sha256,
            modules_bound=len(weights.pairs),
            modules_expected=len(self._merger.names),
            seconds=seconds,
            canary=self._canary(),
        )

    def set_weights(self, weights: lora.Lora | None) -> None:
        """Bind factors that live in this process (evaluation); None = base. No version is kept."""
        self._merger.merge(weights)
        self._held, self.current = {}, None
        # Neither the base nor a version: asking for the base merges anew.
        self._active = None if weights is None else -1

    def generate(
        self,
        jobs: Sequence[Job],
        *,
        steps: int,
        guidance: float = 1.0,
        policy: Policy = "current",
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generated | None:
        """Make every job's picture, any number, in padded micro-batches; None once cancelled.

        Raises VersionError for a version not held, InputError for no job, an empty prompt or a bad
        seed.
        """
        if not jobs:
            raise InputError("nothing to make: no prompt and seed was given; give at least one")
        for job in jobs:
            check_prompt(job.prompt)
            check_seed(job.seed)
        version = self._activate(policy)
        parts = []
        for first in range(0, len(jobs), self.micro_batch):
            chunk = list(jobs[first : first + self.micro_batch])
            latents = self._micro_batch(chunk, steps, guidance, cancelled)
            if latents is None:
                return None
            parts.append(latents)
        latents = torch.cat(parts)
        forwards = len(parts) * self.micro_batch * steps
        return Generated(
            latents=latents,
            images=torch.cat([self._model.decode(part) for part in parts]),
            version=version,
            nfe=forwards * (2 if guidance != 1.0 else 1),
        )

    def warm_up(self) -> None:
        """Compile now rather than in the first request."""
        self._canary()

    def _activate(self, policy: Policy) -> int | None:
        if policy == "current":
            if self.current is None:
                # Whatever `set_weights` bound, or the base.
                return None
            wanted: int | None = self.current.version
        else:
            wanted = None if policy == "base" else policy
        if wanted is not None and wanted not in self._held:
            raise VersionError(
                f"policy version {wanted} is not held; held: "
                f"{', '.join(map(str, self.held())) or 'none'}, base"
            )
        if wanted != self._active:
            self._merger.merge(None if wanted is None else self._held[wanted][1])
            self._active = wanted
        return wanted

    def _micro_batch(
        self,
        jobs: list[Job],
        steps: int,
        guidance: float,
        cancelled: Callable[[], bool],
    ) -> Tensor | None:
        padded = jobs + [jobs[-1]] * (self.micro_batch - len(jobs))
        device = self._model.device
        tokens, mask = (
            part.to(device) for part in stack([self._store.get(job.prompt) for job in padded])
        )
        empty_tokens, empty_mask = (
            part.to(device) for part in stack([self._store.get("")] * len(padded))
        )

        def velocity(x: Tensor, sigma: float) -> Tensor:
            times = torch.full((len(padded),), sigma, dtype=torch.float32, device=device)
            with torch.no_grad():
                v = self._model.velocity(x, times, tokens, mask)
                if guidance == 1.0:
                    return v
                # The same shape twice, so guidance needs no second compilation.
                v_empty = self._model.velocity(x, times, empty_tokens, empty_mask)
            return v_empty + guidance * (v - v_empty)

        noise = noise_batch([job.seed for job in padded], self.latent_shape).to(device)
        latents = euler(velocity, noise, uniform_sigmas(steps), cancelled=cancelled)
        return None if latents is None else latents[: len(jobs)].cpu()

    def _canary(self) -> str:
        seed = candidate_seed(0, "canary", 0, 0, 0)
        tokens, mask = stack([self._store.get("")] * self.micro_batch)
        noise = noise_batch([seed] * self.micro_batch, self.latent_shape)
        with torch.no_grad():
            v = self._model.velocity(noise, torch.full((self.micro_batch,), 0.7), tokens, mask)
        return hashlib.sha256(v[0].contiguous().cpu().numpy().tobytes()).hexdigest()[:16]

    def _example(self) -> dict[str, object]:
        """Arguments of one forward, for counting multiply-adds."""
        embedding = self._store.get("")
        device = self._model.device
        return {
            "hidden_states": torch.zeros(1, *self.latent_shape, device=device),
            "encoder_hidden_states": embedding.tokens[None].to(device),
            "encoder_attention_mask": embedding.mask[None].to(device),
            "timestep": torch.zeros(1, device=device),
            "return_dict": False,
        }


def warm(config: Config) -> None:
    """Compile what the run's services will use into torch's cache on disk."""
    wanted: list[tuple[str, Role, int]] = [
        (config.explore.precision, "explore", config.explore.micro_batch),
        (config.regenerate.precision, "regenerate", config.regenerate.micro_batch),
        (config.regenerate.precision, "regenerate", config.evaluate.micro_batch),
    ]
    for precision, role, micro_batch in dict.fromkeys(wanted):
        generator = Generator.load(
            config,
            precision=precision,
            role=role,
            micro_batch=micro_batch,
            activation_scale=config.explore.activation_scale,
        )
        begin = time.perf_counter()
        generator.warm_up()
        print(
            f"   {role}: {generator.precision}, {micro_batch} pictures a forward, compiled in "
            f"{time.perf_counter() - begin:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--warm":
        sys.exit("usage: python -m solrl.generator --warm CONFIG")
    quiet_libraries()
    warm(load_config(Path(sys.argv[2])))
