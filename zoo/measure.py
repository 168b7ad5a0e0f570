"""Measures the reward and the judge: `python -m zoo.measure` writes `zoo/quality.json`.

Samples of the base model are drawn when `build/zoo/tiny-sana` has been assembled.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from solrl.atomic import write_text
from solrl.rewards import Scorer
from solrl.rewards.concept_judge import ConceptJudge
from solrl.rewards.emoji_clip import EmojiClip
from zoo.build_data import BUILD
from zoo.data import concepts, real_images, seen_captions
from zoo.degrade import damaged
from zoo.pictures import GENERATED_STYLES, JUDGE_STYLES, load_pictures, subset
from zoo.samples import draw
from zoo.train_reward import held_out_names

HERE = Path(__file__).resolve().parent
LADDER = {"clean": 0.0, "light": 0.2, "middle": 0.45, "heavy": 0.75, "wrecked": 1.0}
SAMPLED_CAPTIONS = 60
SAMPLES_EACH = 24


def noise_pictures(n: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (n, 32, 32, 3), generator=generator, dtype=torch.uint8)


def choice(clip: EmojiClip, images: Tensor, captions: list[str]) -> dict[str, float]:
    """Picture i belongs to caption i: how often it beats a random other one, and all others."""
    texts = torch.stack([clip.embed_prompt(caption) for caption in captions])
    similarity = clip.embed_images(images) @ texts.T
    own = similarity.diagonal()
    n = len(captions)
    beaten = (own[:, None] > similarity).float().sum(1) / (n - 1)
    return {
        "two_way": beaten.mean().item(),
        "recall_at_1": (beaten == 1).float().mean().item(),
        "cosine": own.mean().item(),
        "pictures": n,
    }


def reward_quality(clip: EmojiClip, build: Path) -> dict[str, dict[str, float]]:
    """Two-way choice and R@1 among the captions of one style, for what was and was not trained."""
    known = concepts()
    codes = [concept.hexcode for concept in known]
    rows: dict[str, dict[str, float]] = {}
    for style in GENERATED_STYLES:
        images, found = subset(load_pictures(style, build), codes)
        rows[f"seen style {style}"] = choice(
            clip, images, [f"{known[i].name}, {style} style" for i in found]
        )
    for style in JUDGE_STYLES:
        images, found = subset(load_pictures(style, build), codes)
        rows[f"unseen style {style}"] = choice(clip, images, [known[i].name for i in found])
    held = held_out_names()
    for style in GENERATED_STYLES:
        pictures = load_pictures(style, build)
        places = [place for place, name in enumerate(pictures.names) if name in held]
        rows[f"unseen emoji {style}"] = choice(
            clip,
            pictures.images[places],
            [f"{pictures.names[place]}, {style} style" for place in places],
        )
    rows["noise"] = choice(clip, noise_pictures(150), [f"{c.name}, flat style" for c in known])
    return rows


def style_choice(clip: EmojiClip) -> float:
    """How often a picture scores higher with its own style in the caption than with another."""
    images, prompts = real_pictures()
    vectors = clip.embed_images(images)
    right = []
    for number, style in enumerate(GENERATED_STYLES):
        for concept in concepts():
            texts = [
                clip.embed_prompt(f"{concept.name}, {other} style") for other in GENERATED_STYLES
            ]
            scores = torch.stack(texts) @ vectors[prompts.index(f"{concept.name}, {style} style")]
            right.append((scores[number] > scores).float().sum() / (len(texts) - 1))
    return torch.stack(right).mean().item()


def real_pictures() -> tuple[Tensor, list[str]]:
    """All concepts in all generated styles, and their captions."""
    captions = [f"{c.name}, {style} style" for style in GENERATED_STYLES for c in concepts()]
    return torch.from_numpy(real_images(captions)), captions


def ladder(scorer: Scorer) -> dict[str, Any]:
    """Mean score of real pictures at rising damage, and how many pictures lose at every rung."""
    images, prompts = real_pictures()
    scores = []
    for strength in LADDER.values():
        generator = torch.Generator().manual_seed(11)
        worse = damaged(images, torch.full((len(images),), strength), generator)
        scores.append(scorer.score(images=worse if strength else images, prompts=prompts))
    scores.append(scorer.score(images=noise_pictures(len(images)), prompts=prompts))
    table = torch.stack(scores, 1)
    rungs = [*LADDER, "noise"]
    return {
        "mean": dict(zip(rungs, table.mean(0).tolist(), strict=True)),
        "falls": {
            f"{a} > {b}": (table[:, i] > table[:, i + 1]).float().mean().item()
            for i, (a, b) in enumerate(itertools.pairwise(rungs))
        },
        "clean > heavy": (table[:, 0] > table[:, 3]).float().mean().item(),
    }


def judge_quality(judge: ConceptJudge, build: Path) -> dict[str, dict[str, float]]:
    known = concepts()
    rows = {}
    for style in (*JUDGE_STYLES, *GENERATED_STYLES):
        images, found = subset(load_pictures(style, build), [c.hexcode for c in known])
        prompts = [known[i].name for i in found]
        rows[style] = {
            "top1": judge.top1(images=images, prompts=prompts).float().mean().item(),
            "log_probability": judge.score(images=images, prompts=prompts).mean().item(),
            "pictures": len(prompts),
        }
    prompts = [concept.name for concept in known]
    rows["noise"] = {
        "top1": judge.top1(images=noise_pictures(150), prompts=prompts).float().mean().item(),
        "log_probability": judge.score(images=noise_pictures(150), prompts=prompts).mean().item(),
        "pictures": 150,
    }
    return rows


def within(statistic: Callable[[Tensor, Tensor], float], x: Tensor, y: Tensor, group: int) -> float:
    """Mean of a correlation taken over each `group` consecutive rows, the samples of one prompt."""
    pairs = zip(x.view(-1, group), y.view(-1, group), strict=True)
    values = [statistic(a, b) for a, b in pairs]
    return sum(values) / len(values)


def pearson(x: Tensor, y: Tensor) -> float:
    return float(pearsonr(x.numpy(), y.numpy()).statistic)


def spearman(x: Tensor, y: Tensor) -> float:
    return float(spearmanr(x.numpy(), y.numpy()).statistic)


def agreement(clip: EmojiClip, judge: ConceptJudge, folder: Path) -> dict[str, Any]:
    """Reward against judge on samples of the checkpoint in `folder`."""
    order = torch.randperm(len(seen_captions()), generator=torch.Generator().manual_seed(3))
    captions = [seen_captions()[place] for place in order[:SAMPLED_CAPTIONS].tolist()]
    images, prompts = draw(folder, captions, SAMPLES_EACH, seed=10_000)
    rewards = clip.score(images=images, prompts=prompts)
    likelihoods = judge.score(images=images, prompts=prompts)
    real = torch.from_numpy(real_images(captions))
    best = rewards.view(-1, SAMPLES_EACH).topk(SAMPLES_EACH // 4).indices
    grouped = likelihoods.view(-1, SAMPLES_EACH)
    return {
        "samples": len(prompts),
        "reward": rewards.mean().item(),
        "reward_std_within": rewards.view(-1, SAMPLES_EACH).std(1).mean().item(),
        "reward_real": clip.score(images=real, prompts=captions).mean().item(),
        "judge": likelihoods.mean().item(),
        "judge_real": judge.score(images=real, prompts=captions).mean().item(),
        "judge_of_best_quarter": grouped.gather(1, best).mean().item(),
        "judge_top1": judge.top1(images=images, prompts=prompts).float().mean().item(),
        "pearson": pearson(rewards, likelihoods),
        "spearman": spearman(rewards, likelihoods),
        "pearson_within": within(pearson, rewards, likelihoods, SAMPLES_EACH),
        "spearman_within": within(spearman, rewards, likelihoods, SAMPLES_EACH),
    }


def print_tables(report: dict[str, Any]) -> None:
    print(f"\n{'reward':28}{'two-way':>9}{'R@1':>7}{'cosine':>8}{'n':>6}")
    for name, row in report["reward"].items():
        print(
            f"{name:28}{row['two_way']:9.3f}{row['recall_at_1']:7.3f}"
            f"{row['cosine']:8.3f}{row['pictures']:6d}"
        )
    print(f"{'right style preferred':28}{report['style_choice']:9.3f}")
    print(f"\n{'judge':28}{'top-1':>9}{'log p':>8}{'n':>6}")
    for name, row in report["judge"].items():
        print(f"{name:28}{row['top1']:9.3f}{row['log_probability']:8.2f}{row['pictures']:6d}")
    for name in ("emoji_clip", "concept_judge"):
        rungs = report["ladder"][name]
        print(f"\nladder of {name}")
        print("  " + "  ".join(f"{rung} {value:.3f}" for rung, value in rungs["mean"].items()))
        print("  " + "  ".join(f"{pair} {share:.2f}" for pair, share in rungs["falls"].items()))
    for name, row in report.get("agreement", {}).items():
        print(f"\nreward and judge on samples of {name}")
        print("  " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--zoo", type=Path, default=HERE)
    parser.add_argument("--output", type=Path, default=HERE / "quality.json")
    options = parser.parse_args()
    clip = EmojiClip.load(options.zoo / "emoji-clip")
    judge = ConceptJudge.load(options.zoo / "concept-judge")
    report: dict[str, Any] = {
        "versions": {"emoji_clip": clip.version, "concept_judge": judge.version},
        "reward": reward_quality(clip, options.build),
        "style_choice": style_choice(clip),
        "judge": judge_quality(judge, options.build),
        "ladder": {scorer.name: ladder(scorer) for scorer in (clip, judge)},
    }
    if (options.build / "tiny-sana").is_dir():
        report["agreement"] = {"tiny-sana": agreement(clip, judge, options.build / "tiny-sana")}
    write_text(options.output, json.dumps(report, indent=1) + "\n")
    print_tables(report)


if __name__ == "__main__":
    main()
