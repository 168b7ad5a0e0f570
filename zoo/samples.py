"""Pictures drawn by a tiny-sana checkpoint, for training and measuring scorers."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 10
BATCH = 64


def draw(
    folder: Path, captions: list[str], per_caption: int, seed: int
) -> tuple[Tensor, list[str]]:
    """uint8 [n, 32, 32, 3] and their captions, `per_caption` of each, without guidance.

    `folder` is an assembled pipeline; picture i has its own noise, generator `seed + i`.
    """
    from diffusers import SanaPipeline

    pipeline = SanaPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    prompts = [caption for caption in captions for _ in range(per_caption)]
    images = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        pixels = pipeline(
            part,
            height=32,
            width=32,
            num_inference_steps=STEPS,
            sigmas=torch.linspace(1, 1 / STEPS, STEPS).tolist(),
            max_sequence_length=16,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(part))],
            complex_human_instruction=None,
            use_resolution_binning=False,
            output_type="np",
        ).images
        images.append((torch.from_numpy(pixels) * 255).round().to(torch.uint8))
    return torch.cat(images), prompts


def distance(images: Tensor, real: Tensor) -> Tensor:
    """How far uint8 pictures [n, 32, 32, 3] are from the real ones, fp32 [n], 0 = the same.

    Half colour, the RMS difference at 16 x 16, and half shape, how little the edges point the same
    way; each in units of its average over samples of tiny-sana.
    """
    x, y = (part.permute(0, 3, 1, 2).float() / 255 for part in (images, real))
    colour = F.adaptive_avg_pool2d(x, 16) - F.adaptive_avg_pool2d(y, 16)
    shape = 1 - F.cosine_similarity(edges(x), edges(y))
    return 0.5 * colour.square().mean((1, 2, 3)).sqrt() / 0.13 + 0.5 * shape / 0.6


def edges(x: Tensor) -> Tensor:
    """Differences of neighbouring pixels' brightness, down and across, [n, 2 * 31 * 31]."""
    grey = x.mean(1)
    down = grey[:, 1:, 1:] - grey[:, :-1, 1:]
    across = grey[:, 1:, 1:] - grey[:, 1:, :-1]
    return torch.cat([down, across], 1).flatten(1)
