"""Does the explorer rank seeds as the fine model does? `python -m benchmarks.rank_agreement`.

Truth: fp32 at the regenerator's steps. Ceiling: fp32 at the explorer's steps, since the solver
alone already disturbs the order. Then emulated NVFP4 at the explorer's steps, for several lists
of layers left in high precision and both activation scales. Kendall's tau is taken within each
prompt over its seeds and averaged; its interval is over prompts. Printed beside it: the share of
the blocks' multiply-adds that ran in FP4, because skipping everything would agree best.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from solrl import atomic, lora
from solrl.embeddings import Embedding, stack
from solrl.models.sana import LORA_TARGETS, Sana
from solrl.noise import noise_batch
from solrl.precision import Scale, apply, count_multiply_adds, fp4_share
from solrl.rewards import load_scorer
from solrl.seeds import candidate_seed
from solrl.solvers import euler, uniform_sigmas
from solrl.stats import Interval, clustered_mean, kendall_tau
from zoo.data import real_images

OUTSIDE = ("patch_embed*", "time_embed*", "caption_projection*", "proj_out")
CROSS_KV = ("*.attn2.to_k", "*.attn2.to_v")
SKIP_LISTS: dict[str, tuple[str, ...]] = {
    "every block linear in FP4": OUTSIDE,
    "self-attention skipped": (*OUTSIDE, "*.attn1.*"),
    "cross-attention skipped": (*OUTSIDE, "*.attn2.*"),
    "cross k, v and FFN in FP4": (*OUTSIDE, "*.attn1.*", "*.attn2.to_q", "*.attn2.to_out.0"),
    "FFN alone in FP4": (*OUTSIDE, "*.attn1.*", "*.attn2.*"),
    "cross k, v, FFN 1-3 skipped": (*OUTSIDE, *CROSS_KV, "transformer_blocks.[1-3].ff.*"),
    "cross k, v, FFN 1-4 skipped": (*OUTSIDE, *CROSS_KV, "transformer_blocks.[1-4].ff.*"),
    "cross k, v, FFN 1-3, 5 skipped": (*OUTSIDE, *CROSS_KV, "transformer_blocks.[1235].ff.*"),
    # Least error a multiply-add, from a search over single layers.
    "the least sensitive half": (
        *OUTSIDE,
        *CROSS_KV,
        "transformer_blocks.[01].attn2.*",
        "transformer_blocks.[1-3].ff.*",
        "transformer_blocks.0.ff.conv_point",
        "transformer_blocks.4.ff.conv_inverted",
    ),
    "cross k, v, cross 0-1, FFN 0-3": (
        *OUTSIDE,
        *CROSS_KV,
        "transformer_blocks.[01].attn2.*",
        "transformer_blocks.[0-3].ff.*",
    ),
}
Values = NDArray[np.float64]
Score = Callable[[Tensor, Sequence[str]], Tensor]


def distance_score(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Minus the mean squared distance to the prompt's real picture."""
    real = torch.from_numpy(real_images(prompts))
    return -((images.float() - real.float()) / 255).square().flatten(1).mean(1)


def generate(
    model: Sana,
    embeddings: dict[str, Embedding],
    seeds: int,
    *,
    steps: int,
    batch: int,
    run_seed: int,
) -> tuple[Tensor, list[str]]:
    """Pictures uint8 [prompts * seeds, H, W, 3] in prompt order, and the prompt of each."""
    prompts = [prompt for prompt in embeddings for _ in range(seeds)]
    numbers = [
        candidate_seed(run_seed, "audit", 0, slot, candidate)
        for slot in range(len(embeddings))
        for candidate in range(seeds)
    ]
    images = []
    for first in range(0, len(prompts), batch):
        last = first + batch
        tokens, mask = stack([embeddings[prompt] for prompt in prompts[first:last]])

        def velocity(
            x: Tensor, sigma: float, tokens: Tensor = tokens, mask: Tensor = mask
        ) -> Tensor:
            return model.velocity(x, torch.full((len(x),), sigma), tokens, mask)

        noise = noise_batch(numbers[first:last], model.latent_shape)
        latents = euler(velocity, noise, uniform_sigmas(steps))
        assert latents is not None
        images.append(model.decode(latents))
    return torch.cat(images), prompts


def within_prompts(proxy: Values, truth: Values) -> Values:
    """Kendall's tau of each prompt; both [prompts, seeds]."""
    return np.array([kendall_tau(a, b) for a, b in zip(proxy, truth, strict=True)])


def ratio_interval(tau: Values, ceiling: Values) -> Interval:
    """mean(tau) / mean(ceiling), 95 % interval by resampling prompts, the same for both."""
    rows = np.random.default_rng(0).integers(len(tau), size=(4000, len(tau)))
    low, high = np.quantile(tau[rows].mean(1) / ceiling[rows].mean(1), [0.025, 0.975])
    return Interval(float(tau.mean() / ceiling.mean()), float(low), float(high))


class Bench:
    """One base model whose transformer is replaced arm by arm, and what its pictures score."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = Sana.load(options.base, height=32, width=32, max_prompt_tokens=16)
        self.pristine = self.model.transformer
        if options.adapter:
            names = lora.target_modules(self.pristine, LORA_TARGETS)
            merger = lora.Merger(self.pristine, lora.pristine_weights(self.pristine, names))
            weights = lora.from_bytes(options.adapter.read_bytes(), source=str(options.adapter))
            merger.check(weights, source=str(options.adapter))
            merger.merge(weights)
        lines = (options.zoo / "data/prompts/train.txt").read_text(encoding="utf-8").splitlines()
        self.embeddings = {line: self.model.encode(line) for line in lines[: options.prompts]}
        tokens, mask = stack([next(iter(self.embeddings.values()))])
        example = {
            "hidden_states": torch.zeros(1, *self.model.latent_shape),
            "encoder_hidden_states": tokens,
            "encoder_attention_mask": mask,
            "timestep": torch.zeros(1),
        }
        self.counts = count_multiply_adds(self.pristine, example)
        self.score: Score = distance_score
        if options.reward != "distance":
            scorer = load_scorer(options.reward, options.zoo)
            self.score = lambda images, prompts: scorer.score(images=images, prompts=prompts)

    def prepare(self, skip: tuple[str, ...] | None, scale: Scale) -> float:
        """A fresh transformer, emulated unless `skip` is None; its FP4 share of the blocks."""
        # Every list is other code: without this torch refuses the ninth.
        torch.compiler.reset()
        transformer = self.model.transformer = deepcopy(self.pristine)
        share = 0.0
        if skip is not None:
            reports = apply(
                transformer,
                precision="nvfp4-emulated",
                skip=skip,
                activation_scale=scale,
                multiply_adds=self.counts,
            )
            share = fp4_share(reports)
        if self.options.compile:
            for block in cast(Any, transformer).transformer_blocks:
                block.compile(fullgraph=True, dynamic=False)
        return share

    def scores(self, steps: int) -> Values:
        """[prompts, seeds] of the transformer in place."""
        to = self.options
        images, prompts = generate(
            self.model,
            self.embeddings,
            seeds=to.seeds,
            steps=steps,
            batch=to.batch,
            run_seed=to.run_seed,
        )
        values = self.score(images, prompts).reshape(len(self.embeddings), -1)
        return values.double().numpy()


def print_row(row: dict[str, Any]) -> None:
    tau, ratio = row["tau"], row["of_ceiling"]
    print(
        f"{row['name']:32}{row['scale']:8}{row['fp4_share']:6.2f}{tau['mean']:8.3f}"
        f"{tau['low']:9.3f}..{tau['high']:.3f}{ratio['mean']:10.2f}"
        f"{ratio['low']:8.2f}..{ratio['high']:.2f}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=Path("build/zoo/tiny-sana"))
    parser.add_argument(
        "--adapter", type=Path, default=None, help="a LoRA file, merged before quantizing"
    )
    parser.add_argument("--zoo", type=Path, default=Path("zoo"))
    parser.add_argument("--reward", default="emoji_clip", help='or "distance", to the real picture')
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--run-seed", type=int, default=0, help="which audit seeds are drawn")
    parser.add_argument("--explore-steps", type=int, default=6)
    parser.add_argument("--true-steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--scales", nargs="+", choices=("row", "tensor"), default=["row", "tensor"])
    parser.add_argument("--only", nargs="+", default=[""], help="lists whose name holds one")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, default=None, help="write the table here as well")
    options = parser.parse_args()
    images = options.prompts * options.seeds
    if images % options.batch:
        parser.error(
            f"prompts x seeds = {images} is not a multiple of --batch {options.batch}; all "
            "batches have one shape"
        )
    return options


def main() -> None:
    options = arguments()
    torch.set_grad_enabled(False)
    bench = Bench(options)
    print(
        f"{options.base}, adapter {options.adapter}, reward {options.reward}, {options.prompts} "
        f"prompts x {options.seeds} seeds (run seed {options.run_seed}), {options.explore_steps} "
        f"steps against fp32 at {options.true_steps}"
    )
    bench.prepare(None, "row")
    truth = bench.scores(options.true_steps)
    ceiling = within_prompts(bench.scores(options.explore_steps), truth)
    print(f"true score {truth.mean():.4f}, spread within a prompt {truth.std(1).mean():.4f}")
    print(f"{'':32}{'scale':8}{'FP4':>6}{'tau':>8}{'95 %':>15}{'of ceiling':>11}{'95 %':>13}")

    rows: list[dict[str, Any]] = []

    def add(name: str, scale: str, share: float, tau: Values) -> None:
        rows.append(
            {
                "name": name,
                "scale": scale,
                "fp4_share": share,
                "tau": clustered_mean([[value] for value in tau]).as_dict(),
                "of_ceiling": ratio_interval(tau, ceiling).as_dict(),
            }
        )
        print_row(rows[-1])

    add("fp32: the ceiling", "-", 0.0, ceiling)
    for name, skip in SKIP_LISTS.items():
        for scale in options.scales if any(part in name for part in options.only) else ():
            share = bench.prepare(skip, scale)
            add(name, scale, share, within_prompts(bench.scores(options.explore_steps), truth))
    if options.json:
        atomic.write_text(options.json, json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
