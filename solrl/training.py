"""The learner's mathematics: three policies on one base, one optimizer step an iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from solrl import lora
from solrl.advantages import optimality
from solrl.config import TrainSection
from solrl.embeddings import Embedding, stack
from solrl.lora import Lora
from solrl.losses import diffusion_nft, noised
from solrl.models.sana import LORA_TARGETS, Sana
from solrl.seeds import candidate_seed
from solrl.solvers import uniform_sigmas


@dataclass(frozen=True)
class Sample:
    """One regenerated picture to train on; clean fp32 [C,h,w]."""

    slot: int
    candidate: int
    clean: Tensor
    prompt: Embedding
    advantage: float


@dataclass(frozen=True)
class StepStats:
    """Of one optimizer step; `skipped` says why nothing was changed, '' when it was."""

    loss: float
    policy_loss: float
    kl: float
    gradient_norm: float
    pairs: int
    skipped: str = ""


@dataclass(frozen=True)
class Pair:
    """A sample at one time: noisy is computed from it; eps fp32 [C,h,w]."""

    sample: Sample
    time: float
    noise: Tensor


def training_pairs(
    samples: Sequence[Sample], *, run_seed: int, iteration: int, rollout_steps: int, timesteps: int
) -> list[Pair]:
    """Every sample at the first `timesteps` of its own permuted rollout times, in key order.

    Times and noise are a pure function of (run seed, iteration, slot, candidate).
    """
    times = uniform_sigmas(rollout_steps)[:-1].tolist()
    pairs = []
    for sample in sorted(samples, key=lambda s: (s.slot, s.candidate)):
        seed = candidate_seed(run_seed, "train_noise", iteration, sample.slot, sample.candidate)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(rollout_steps, generator=generator)[:timesteps].tolist()
        noise = torch.randn(timesteps, *sample.clean.shape, generator=generator)
        pairs += [Pair(sample, times[index], eps) for index, eps in zip(chosen, noise, strict=True)]
    return pairs


class Trainer:
    """Holds adapters `trained` and `old` (behaviour) through peft, the EMA beside them.

    The base weights never change. `step` counts optimizer steps taken.
    """

    def __init__(self, model: Sana, config: TrainSection, *, run_seed: int) -> None:
        from peft import LoraConfig

        self._model = model
        self._config = config
        self._run_seed = run_seed
        transformer = cast(Any, model.transformer)
        self._names = lora.target_modules(model.transformer, LORA_TARGETS)
        start = lora.gaussian(
            model.transformer, self._names, rank=config.rank, alpha=config.alpha, seed=run_seed
        )
        for adapter in ("trained", "old"):
            transformer.add_adapter(
                LoraConfig(
                    r=config.rank,
                    lora_alpha=cast(int, config.alpha),
                    target_modules=list(LORA_TARGETS),
                    init_lora_weights="gaussian",
                ),
                adapter_name=adapter,
            )
        self._factors = {name: self._adapter_factors(name) for name in ("trained", "old")}
        for a, b in self._factors["old"].values():
            a.requires_grad_(False)
            b.requires_grad_(False)
        self.put("trained", start)
        self.put("old", start)
        self.ema = start
        self.step = 0
        self.skipped_steps = 0
        parameters = [p for pair in self._factors["trained"].values() for p in pair]
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(
            parameters,
            lr=config.learning_rate,
            betas=config.adam_betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        )

    def _adapter_factors(self, adapter: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        factors = {}
        for name in self._names:
            layer = cast(Any, self._model.transformer.get_submodule(name))
            factors[name] = (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
        return factors

    def get(self, policy: str) -> Lora:
        """A copy of the factors of "trained", "old" or "ema"."""
        if policy == "ema":
            return self.ema
        pairs = {
            name: (a.detach().cpu().clone(), b.detach().cpu().clone())
            for name, (a, b) in self._factors[policy].items()
        }
        return Lora(self._config.rank, self._config.alpha, pairs)

    def put(self, policy: str, weights: Lora) -> None:
        """Overwrite the factors of "trained" or "old" in place."""
        with torch.no_grad():
            for name, (a, b) in self._factors[policy].items():
                a.copy_(weights.pairs[name][0])
                b.copy_(weights.pairs[name][1])

    def train(self, samples: Sequence[Sample], *, iteration: int, rollout_steps: int) -> StepStats:
        """One optimizer step on all samples, then the old policy and the EMA follow.

        A loss or gradient that is not finite changes nothing and is counted in `skipped_steps`.
        """
        config = self._config
        pairs = training_pairs(
            samples,
            run_seed=self._run_seed,
            iteration=iteration,
            rollout_steps=rollout_steps,
            timesteps=config.timesteps,
        )
        if not pairs:
            return StepStats(0.0, 0.0, 0.0, 0.0, 0, "every group has zero spread")
        self._optimizer.zero_grad(set_to_none=True)
        total = policy = kl = 0.0
        for first in range(0, len(pairs), config.micro_batch):
            chunk = pairs[first : first + config.micro_batch]
            loss, chunk_policy, chunk_kl = self._chunk_loss(chunk)
            (loss / len(pairs)).backward()
            total += float(loss.detach()) / len(pairs)
            policy += chunk_policy / len(pairs)
            kl += chunk_kl / len(pairs)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, config.grad_clip))
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            self.skipped_steps += 1
            return StepStats(total, policy, kl, norm, len(pairs), "loss or gradient not finite")
        self._optimizer.step()
        self.step += 1
        self._follow()
        return StepStats(total, policy, kl, norm, len(pairs))

    def _chunk_loss(self, chunk: Sequence[Pair]) -> tuple[Tensor, float, float]:
        """Summed loss of up to `micro_batch` pairs; padding is computed and thrown away."""
        count = len(chunk)
        padded = list(chunk) + [chunk[-1]] * (self._config.micro_batch - count)
        device = self._model.device
        clean = torch.stack([p.sample.clean for p in padded]).to(device)
        times = torch.tensor([p.time for p in padded], dtype=torch.float32, device=device)
        noisy = noised(clean, torch.stack([p.noise for p in padded]).to(device), times)
        tokens, mask = stack([p.sample.prompt for p in padded])
        with torch.no_grad():
            base_velocity = self._velocity(None, noisy, times, tokens, mask)
            old_velocity = self._velocity("old", noisy, times, tokens, mask)
        loss = diffusion_nft(
            velocity=self._velocity("trained", noisy, times, tokens, mask),
            old_velocity=old_velocity,
            base_velocity=base_velocity,
            noisy=noisy,
            clean=clean,
            times=times,
            optimality=torch.tensor(
                [optimality(p.sample.advantage, self._config.adv_clip) for p in padded],
                dtype=torch.float32,
                device=device,
            ),
            nft_beta=self._config.nft_beta,
            kl_weight=self._config.kl_weight,
            adv_clip=self._config.adv_clip,
        )
        return (
            loss.total[:count].sum(),
            float(loss.policy[:count].detach().sum()),
            float(loss.kl[:count].detach().sum()),
        )

    def _velocity(
        self, adapter: str | None, noisy: Tensor, times: Tensor, tokens: Tensor, mask: Tensor
    ) -> Tensor:
        transformer = cast(Any, self._model.transformer)
        if adapter is None:
            transformer.disable_adapters()
        else:
            transformer.enable_adapters()
            transformer.set_adapter(adapter)
        return self._model.velocity(noisy, times, tokens, mask)

    def _follow(self) -> None:
        """old := eta old + (1 - eta) trained; ema := d ema + (1 - d) trained (method, 4)."""
        config = self._config
        trained = self.get("trained")
        eta = min(config.old_decay_slope * self.step, config.old_decay_max)
        self.put("old", self.get("old").lerp(trained, eta))
        decay = min((1 + self.step) / (10 + self.step), config.ema_decay)
        self.ema = self.ema.lerp(trained, decay)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments and step counts, by module and factor; empty before the first step."""
        tensors = {}
        for name, pair in self._factors["trained"].items():
            for factor, parameter in zip("AB", pair, strict=True):
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    tensors[f"{name}.{factor}.{key}"] = value.detach().cpu().clone()
        return tensors

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `optimizer_tensors`; what is not in `tensors` is forgotten."""
        self._optimizer.state.clear()
        for name, pair in self._factors["trained"].items():
            for factor, parameter in zip("AB", pair, strict=True):
                prefix = f"{name}.{factor}."
                state = {
                    # AdamW keeps its step count on the CPU, its moments beside the parameter.
                    key.removeprefix(prefix): value.to(
                        "cpu" if key.endswith(".step") else parameter.device, copy=True
                    )
                    for key, value in tensors.items()
                    if key.startswith(prefix)
                }
                if state:
                    self._optimizer.state[parameter] = state
