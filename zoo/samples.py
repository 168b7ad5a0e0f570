"""Pictures drawn by a tiny-sana checkpoint, for training and measuring scorers."""

from pathlib import Path

import torch
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
