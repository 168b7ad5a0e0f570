"""Trains the independent judge: `python -m zoo.train_judge`.

From scratch on the pictures of four styles that neither the generator nor the reward ever sees,
all their emoji as classes, heavily augmented; of the last layer only the concepts are kept.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from solrl.atomic import write_bytes, write_text
from solrl.rewards import to_inputs
from solrl.rewards.concept_judge import ConceptNet
from zoo.build_data import BUILD
from zoo.data import concepts
from zoo.pictures import JUDGE_STYLES, labelled, load_pictures

HERE = Path(__file__).resolve().parent
BATCH = 128
SMOOTHING = 0.1
# Share of the pictures that each blur, box, stain or blend touches.
TOUCHED = 0.35
PEAK_RATE = 2e-3
WARMUP = 100


def uniform(n: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator) * (high - low) + low


def warp(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random turn, zoom, stretch, shift and a smooth wobble; white comes in at the border."""
    n = len(x)
    angle = uniform(n, -0.3, 0.3, generator)
    zoom = uniform(n, -0.2, 0.25, generator).exp()
    stretch = uniform(n, -0.2, 0.2, generator).exp()
    shift = uniform(2 * n, -0.2, 0.2, generator).view(n, 2)
    shear = uniform(n, -0.2, 0.2, generator)
    rows = [
        torch.stack([angle.cos() * zoom * stretch, shear - angle.sin() * zoom, shift[:, 0]], 1),
        torch.stack([angle.sin() * zoom, angle.cos() * zoom / stretch, shift[:, 1]], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    wobble = torch.randn(n, 2, 5, 5, generator=generator) * uniform(n, 0, 0.08, generator).view(
        n, 1, 1, 1
    )
    wobble = F.interpolate(wobble, size=x.shape[2:], mode="bicubic", align_corners=False)
    # Sampling 1 - x fills the outside with white, the ground of every emoji.
    return 1 - F.grid_sample(1 - x, grid + wobble.permute(0, 2, 3, 1), align_corners=False)


def recolour(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mixes the channels a little and changes contrast and brightness, picture by picture."""
    n = len(x)
    mixing = torch.eye(3) + torch.randn(n, 3, 3, generator=generator) * uniform(
        n, 0, 0.2, generator
    ).view(n, 1, 1)
    light = uniform(n, -0.3, 0.3, generator).view(n, 1, 1, 1)
    ink = torch.einsum("nij,njhw->nihw", mixing, 1 - x)
    return 1 - (ink * (1 + light))


def soften(x: Tensor, generator: torch.Generator) -> Tensor:
    """Blurs some of the pictures by going through a random smaller size."""
    side = int(torch.randint(12, 32, (1,), generator=generator))
    small = F.interpolate(x, size=(side, side), mode="bilinear", antialias=True)
    blurred = F.interpolate(small, size=x.shape[2:], mode="bilinear", align_corners=False)
    chosen = torch.rand(len(x), 1, 1, 1, generator=generator) < TOUCHED
    return torch.where(chosen, blurred, x)


def dirty(x: Tensor, generator: torch.Generator) -> Tensor:
    """Pixel noise, cloudy stains and the 4x4 lattice that a patchwise generator leaves."""
    n, _, side, _ = x.shape

    def some(high: float) -> Tensor:
        amount = uniform(n, 0, high, generator) * (torch.rand(n, generator=generator) < TOUCHED)
        return amount.view(n, 1, 1, 1)

    noise = torch.randn(x.shape, generator=generator) * some(0.12)
    clouds = F.interpolate(torch.randn(n, 3, 6, 6, generator=generator), size=side, mode="bicubic")
    lattice = torch.randn(n, 3, 4, 4, generator=generator).repeat(1, 1, side // 4, side // 4)
    return x + noise + clouds * some(0.25) + lattice * some(0.12)


def occlude(x: Tensor, generator: torch.Generator) -> Tensor:
    """Whites out one random box in some of the pictures."""
    n, _, side, _ = x.shape
    low = torch.rand(n, 2, generator=generator) * side
    high = low + torch.rand(n, 2, generator=generator) * side * 0.3
    place = torch.arange(side)
    inside = (place >= low[..., None]) & (place < high[..., None])
    box = inside[:, 0, :, None] & inside[:, 1, None, :]
    box &= (torch.rand(n, generator=generator) < TOUCHED).view(n, 1, 1)
    return x.masked_fill(box[:, None], 1.0)


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 [n, 3, side, side] in [-1, 1] -> the same, each picture changed in its own way."""
    for change in (warp, recolour, soften, occlude, dirty):
        x = change(x, generator)
    return x.clamp(-1, 1)


def mix(x: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blends every picture and its target with another one, most of them not at all."""
    order = torch.randperm(len(x), generator=generator)
    share = uniform(len(x), 0, 0.4, generator) * (torch.rand(len(x), generator=generator) < TOUCHED)
    x = x.lerp(x[order], share.view(-1, 1, 1, 1))
    return x, target.lerp(target[order], share.view(-1, 1))


def train(
    net: nn.Module, images: Tensor, labels: Tensor, *, known: int, steps: int, seed: int
) -> nn.Module:
    """The classifier averaged over training; the first `known` classes fill half of each batch."""
    classes = int(labels.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    net = net.train().to(memory_format=torch.channels_last)
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995), use_buffers=True
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK_RATE, weight_decay=0.05)
    favoured = (labels < known).nonzero()[:, 0]
    start = time.monotonic()
    for step in range(steps):
        warmup = min(1.0, (step + 1) / WARMUP)
        rate = PEAK_RATE * warmup * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.cat(
            [
                favoured[torch.randint(len(favoured), (BATCH // 2,), generator=generator)],
                torch.randint(len(labels), (BATCH // 2,), generator=generator),
            ]
        )
        target = F.one_hot(labels[rows], classes).float()
        target = target * (1 - SMOOTHING) + SMOOTHING / classes
        x, target = mix(augment(to_inputs(images[rows]), generator), target, generator)
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(x.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(net)
        if (step + 1) % 100 == 0:
            spent = time.monotonic() - start
            print(f"step {step + 1} of {steps}  {spent:.0f} s  loss {loss.item():.3f}", flush=True)
    return average.module.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3500, help="batches of 128")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of the styles' npz files")
    parser.add_argument("--output", type=Path, default=HERE / "concept-judge")
    options = parser.parse_args()
    known = concepts()
    images, labels = labelled(
        [load_pictures(style, options.build) for style in JUDGE_STYLES],
        [concept.hexcode for concept in known],
    )
    classes = int(labels.max()) + 1
    print(f"{len(images)} pictures, {classes} classes, {len(known)} of them concepts")
    torch.manual_seed(options.seed)
    net = train(
        ConceptNet(classes),
        images,
        labels,
        known=len(known),
        steps=options.steps,
        seed=options.seed,
    )
    state = net.state_dict()
    for key in ("classify.weight", "classify.bias"):
        state[key] = state[key][: len(known)]
    # Half precision for the convolutions only: batch-norm statistics span too many decades.
    tensors = {
        key: (value.half() if value.ndim > 1 else value).contiguous()
        for key, value in state.items()
    }
    config = {
        "concepts": [concept.name for concept in known],
        "trained_on": list(JUDGE_STYLES),
        "steps": options.steps,
        "seed": options.seed,
    }
    write_bytes(options.output / "model.safetensors", save(tensors))
    write_text(options.output / "config.json", json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
