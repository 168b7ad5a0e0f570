"""Scorers: what they prefer, that company and size do not change a score, and what they refuse."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from solrl.errors import ConfigError, InputError
from solrl.pixels import resize_uint8
from solrl.rewards import Scorer, in_micro_batches, load_scorer
from solrl.rewards.concept_judge import ConceptJudge, concept_of
from solrl.rewards.emoji_clip import EmojiClip
from zoo.data import caption, concepts, real_images
from zoo.degrade import KINDS, damaged

ZOO = Path(__file__).resolve().parent.parent / "zoo"


@pytest.fixture(scope="module")
def clip() -> EmojiClip:
    return EmojiClip.load(ZOO / "emoji-clip")


@pytest.fixture(scope="module")
def judge() -> ConceptJudge:
    return ConceptJudge.load(ZOO / "concept-judge")


@pytest.fixture(params=["emoji_clip", "concept_judge"])
def scorer(request: pytest.FixtureRequest, clip: EmojiClip, judge: ConceptJudge) -> Scorer:
    return clip if request.param == "emoji_clip" else judge


def real(style: str, every: int = 1) -> tuple[Tensor, list[str]]:
    """Real pictures of every so-many-th concept, and their captions."""
    captions = [caption(concept, style) for concept in concepts()[::every]]
    return torch.from_numpy(real_images(captions)), captions


def noise(n: int, side: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (n, side, side, 3), generator=generator, dtype=torch.uint8)


def test_resize_leaves_the_right_size_alone_and_treats_each_picture_alone() -> None:
    images = noise(5, 40)
    assert resize_uint8(images, 40) is images
    together = resize_uint8(images, 96)
    assert together.shape == (5, 96, 96, 3)
    assert together.dtype == torch.uint8
    for place in range(5):
        assert torch.equal(resize_uint8(images[place : place + 1], 96)[0], together[place])


def test_resize_does_not_wrap_around_at_black_and_white() -> None:
    """Bicubic overshoots beside an edge; bytes must saturate there, not roll over."""
    image = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    image[:, :, 4:] = 255
    resized = resize_uint8(image, 32)[0, :, :, 0].int()
    assert (resized[:, :12] < 64).all()
    assert (resized[:, 20:] > 191).all()


@pytest.mark.parametrize("n", [1, 4, 5, 9])
def test_micro_batches_are_of_one_size_and_keep_the_rows(n: int) -> None:
    seen: list[int] = []

    def double(part: Tensor) -> Tensor:
        seen.append(len(part))
        return part * 2

    inputs = torch.arange(n * 3.0).view(n, 3)
    assert torch.equal(in_micro_batches(double, inputs, 4), inputs * 2)
    assert set(seen) == {4}


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (noise(2).float(), ["fox", "fox"], "float32"),
        (noise(2).permute(0, 3, 1, 2), ["fox", "fox"], "height, width, 3"),
        (noise(1)[0], ["fox"], "height, width, 3"),
        (noise(0), [], "no empty side"),
        (noise(2), ["fox"], "2 images came with 1 prompts"),
        (noise(2), ["fox", "  "], "prompt 1 is empty"),
    ],
)
def test_what_is_not_pictures_with_prompts_is_refused(
    scorer: Scorer, images: Tensor, prompts: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        scorer.score(images=images, prompts=prompts)


def test_a_score_does_not_depend_on_company_or_place(scorer: Scorer) -> None:
    """Batch norm, padding or kernel choice by batch size would show here."""
    images, prompts = real("3d", every=3)
    together = scorer.score(images=images, prompts=prompts)
    assert together.dtype == torch.float32
    assert together.shape == (len(prompts),)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1))
    shuffled = scorer.score(images=images[order], prompts=[prompts[i] for i in order.tolist()])
    assert torch.equal(shuffled, together[order])
    for place in (0, 17, len(prompts) - 1):
        alone = scorer.score(images=images[place : place + 1], prompts=[prompts[place]])
        assert torch.equal(alone[0], together[place])


def test_pixels_resized_by_the_sender_score_the_same(scorer: Scorer) -> None:
    for images in (real("noto", every=10)[0], noise(15, 150)):
        prompts = real("noto", every=10)[1]
        raw = scorer.score(images=images, prompts=prompts)
        sent = resize_uint8(images, scorer.input_size)
        assert scorer.input_filter == "bicubic"
        assert torch.equal(scorer.score(images=sent, prompts=prompts), raw)


def test_real_pictures_fall_rung_by_rung_with_damage(scorer: Scorer) -> None:
    """A reward that does not fall with damage is hacked within a few iterations."""
    images, prompts = real("flat", every=2)
    scores = [scorer.score(images=images, prompts=prompts)]
    for strength in (0.25, 0.7):
        generator = torch.Generator().manual_seed(2)
        worse = damaged(images, torch.full((len(images),), strength), generator)
        scores.append(scorer.score(images=worse, prompts=prompts))
    scores.append(scorer.score(images=noise(len(images)), prompts=prompts))
    means = [float(values.mean()) for values in scores]
    assert means == sorted(means, reverse=True), means
    assert (scores[0] > scores[2]).float().mean() > 0.85


@pytest.mark.parametrize("style", ["flat", "3d", "noto"])
def test_emoji_clip_finds_the_caption(clip: EmojiClip, style: str) -> None:
    images, prompts = real(style)
    texts = torch.stack([clip.embed_prompt(prompt) for prompt in prompts])
    similarity = clip.embed_images(images) @ texts.T
    own = similarity.diagonal()[:, None]
    assert (own >= similarity).float().mean() > 0.97
    assert (similarity.argmax(1) == torch.arange(len(prompts))).float().mean() > 0.8
    assert clip.score(images=images, prompts=prompts).allclose(own[:, 0], atol=1e-5)


def test_emoji_clip_keeps_prompts_it_has_read(clip: EmojiClip) -> None:
    clip.embed_prompt.cache_clear()
    images, prompts = real("flat", every=50)
    clip.score(images=images.repeat(4, 1, 1, 1), prompts=prompts * 4)
    assert clip.embed_prompt.cache_info().misses == len(prompts)


@pytest.mark.parametrize("style", ["flat", "3d", "noto"])
def test_the_judge_knows_pictures_it_was_not_trained_on(judge: ConceptJudge, style: str) -> None:
    images, prompts = real(style)
    assert judge.top1(images=images, prompts=prompts).float().mean() > 0.75
    scores = judge.score(images=images, prompts=prompts)
    assert (scores <= 0).all()
    total = judge.log_probabilities(images).exp().sum(1)
    assert torch.allclose(total, torch.ones(len(prompts)), atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "concept"),
    [
        ("strawberry, flat style", "strawberry"),
        ("strawberry", "strawberry"),
        ("jack-o-lantern, 3d style", "jack-o-lantern"),
        ("fox, in the snow", "fox, in the snow"),
    ],
)
def test_the_concept_of_a_caption(prompt: str, concept: str) -> None:
    assert concept_of(prompt) == concept


def test_the_judge_refuses_a_concept_it_does_not_know(judge: ConceptJudge) -> None:
    with pytest.raises(InputError, match="does not know 'quark'"):
        judge.score(images=noise(1), prompts=["quark, flat style"])


def test_load_scorer_by_name(tmp_path: Path) -> None:
    judge = load_scorer("concept_judge", ZOO)
    assert judge.name == "concept_judge"
    assert len(judge.version) == 12
    with pytest.raises(ConfigError, match="'clip'"):
        load_scorer("clip", ZOO)
    for name in ("emoji_clip", "concept_judge"):
        with pytest.raises(ConfigError, match="build it with"):
            load_scorer(name, tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_damage_starts_at_none_and_grows(kind: object) -> None:
    assert callable(kind)
    images = real("3d", every=10)[0].permute(0, 3, 1, 2).float() / 255
    change = []
    for strength in (0.0, 0.3, 0.9):
        generator = torch.Generator().manual_seed(4)
        worse = kind(images.clone(), torch.full((len(images),), strength), generator)
        change.append(float((worse.clamp(0, 1) - images).square().mean()))
    assert change[0] < 1e-5
    assert change[0] < change[1] < change[2]
