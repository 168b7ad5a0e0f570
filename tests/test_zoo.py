"""The default world: its split, its captions, its exactly invertible autoencoder, its pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import SanaPipeline

from zoo.assemble import STAMP, TINY_SANA, assemble
from zoo.data import (
    DATA,
    STYLES,
    caption,
    concepts,
    load_sheet,
    parse_caption,
    real_image,
    seen_captions,
    unseen_captions,
)
from zoo.pretrain_tiny_sana import encode_captions, learning_rate, noised_batch
from zoo.tiny_sana import invertible_autoencoder, to_latents, to_pictures

STEPS = 4


def prompts(name: str) -> list[str]:
    return (DATA / "prompts" / f"{name}.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def assembled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assemble(TINY_SANA, tmp_path_factory.mktemp("zoo") / "tiny-sana")


@pytest.fixture(scope="module")
def pipeline(assembled: Path) -> SanaPipeline:
    loaded = SanaPipeline.from_pretrained(assembled)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_world_has_150_concepts_in_three_styles() -> None:
    names = [concept.name for concept in concepts()]
    assert len(names) == len(set(names)) == 150
    assert all(len(name.split()) <= 4 for name in names)
    for style in STYLES:
        assert load_sheet(style).shape == (150, 32, 32, 3)
        # No tile is blank or drawn twice.
        assert len(np.unique(load_sheet(style).reshape(150, -1), axis=0)) == 150


def test_splits_are_disjoint_and_prompt_files_state_them() -> None:
    seen, unseen, train = prompts("all"), prompts("unseen"), prompts("train")
    assert seen == seen_captions()
    assert unseen == unseen_captions()
    assert (len(seen), len(unseen), len(train)) == (420, 30, 24)
    assert not set(seen) & set(unseen)
    assert set(train) <= set(seen)
    for pairs, each in ((unseen, 10), (train, 8)):
        parsed = [parse_caption(text) for text in pairs]
        assert len({name for name, _ in parsed}) == len(pairs)
        assert all(sum(style == own for _, own in parsed) == each for style in STYLES)


@pytest.mark.parametrize("style", STYLES)
def test_captions_round_trip_to_their_pictures(style: str) -> None:
    for row, concept in enumerate(concepts()):
        text = caption(concept, style)
        assert parse_caption(text) == (concept.name, style)
        assert np.array_equal(real_image(text), load_sheet(style)[row])


@pytest.mark.parametrize(
    "text", ["", "strawberry", "strawberry, flat", "strawberry, oil style", "plumbus, flat style"]
)
def test_foreign_captions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not of this world"):
        parse_caption(text)


def test_autoencoder_is_exactly_invertible() -> None:
    vae = invertible_autoencoder()
    pixels = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.no_grad():
        latents = vae.encode(pixels, return_dict=False)[0]
        back = vae.decode(latents, return_dict=False)[0]
        beyond = vae.decode(vae.encode(3 * pixels, return_dict=False)[0], return_dict=False)[0]
    assert latents.shape == (8, 48, 8, 8)
    assert (back - pixels).abs().max() <= 1e-6
    # The pipeline clips later: the decoder itself must not.
    assert (beyond - 3 * pixels).abs().max() <= 3e-6


def test_latents_are_of_the_noise_s_size_and_give_the_pictures_back() -> None:
    vae = invertible_autoencoder()
    pictures = np.concatenate([load_sheet(style) for style in STYLES])
    latents = to_latents(vae, pictures)
    assert 0.5 < float(latents.square().mean().sqrt()) < 2
    assert np.array_equal(to_pictures(vae, latents), pictures)


def test_committed_autoencoder_is_the_invertible_one(pipeline: SanaPipeline) -> None:
    stored, built = pipeline.vae.state_dict(), invertible_autoencoder().state_dict()
    assert stored.keys() == built.keys()
    assert all(torch.equal(stored[name], built[name]) for name in built)


def test_stock_pipeline_encodes_captions_as_pretraining_did(pipeline: SanaPipeline) -> None:
    texts = ["four leaf clover, noto style", "fox, 3d style", ""]
    ours, mask = encode_captions(texts)
    for row, text in enumerate(texts):
        embeds, embeds_mask, _, _ = pipeline.encode_prompt(
            text,
            do_classifier_free_guidance=False,
            max_sequence_length=16,
            complex_human_instruction=None,
        )
        assert torch.equal(embeds_mask[0], mask[row])
        torch.testing.assert_close(embeds[0], ours[row], rtol=0, atol=1e-5)


def test_every_caption_fits_the_encoder(pipeline: SanaPipeline) -> None:
    lengths = [len(ids) for ids in pipeline.tokenizer(prompts("all") + prompts("unseen")).input_ids]
    assert max(lengths) <= 16


def test_stock_pipeline_samples_deterministically(pipeline: SanaPipeline) -> None:
    def draw(seed: int) -> np.ndarray:
        pictures = pipeline(
            "strawberry, flat style",
            height=32,
            width=32,
            sigmas=np.linspace(1, 1 / STEPS, STEPS).tolist(),
            num_inference_steps=STEPS,
            guidance_scale=1.0,
            generator=torch.Generator("cpu").manual_seed(seed),
            max_sequence_length=16,
            complex_human_instruction=None,
            use_resolution_binning=False,
        ).images
        return np.asarray(pictures[0])

    assert draw(1).shape == (32, 32, 3)
    assert np.array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))


def test_assembling_again_writes_nothing(assembled: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in assembled.rglob("*")}
    assert assemble(TINY_SANA, assembled) == assembled
    assert {path: path.stat().st_mtime_ns for path in assembled.rglob("*")} == before


def test_assembling_replaces_a_stale_folder(tmp_path: Path) -> None:
    target = tmp_path / "tiny-sana"
    target.mkdir()
    (target / STAMP).write_text("of other files")
    (target / "left.txt").write_text("over")
    assemble(TINY_SANA, target)
    assert (target / "text_encoder" / "model.safetensors").is_file()
    assert not (target / "left.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-sana"]


def test_assembling_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model_index\.json"):
        assemble(tmp_path, tmp_path / "target")


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 2e-5), (99, 2e-3), (100, 2e-3), (1350, 1e-3), (2600, 0.0)]
)
def test_learning_rate_warms_up_then_falls_as_a_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, 2600) == pytest.approx(rate, abs=1e-12)


def test_noised_batch_follows_its_times_and_target() -> None:
    clean = torch.randn(64, 48, 8, 8, generator=torch.Generator().manual_seed(5))
    noised, times, velocity = noised_batch(clean, torch.Generator().manual_seed(6))
    # Along the target velocity every x_t leads back to its clean latent.
    torch.testing.assert_close(
        noised - times[:, None, None, None] * velocity, clean, rtol=0, atol=1e-5
    )
    # Stratified: sorted already, one time in each 64th of the distribution.
    assert torch.equal(times, times.sort().values)
    assert 0 < float(times.min()) < 0.2
    assert 0.9 < float(times.max()) < 1
