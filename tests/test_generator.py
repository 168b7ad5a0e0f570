"""One inference copy: seeds make pictures, adapters swap whole, every batch has one version."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import model_section, publish_adapter
from torch import Tensor

from solrl import adapters, lora, models
from solrl.config import Config
from solrl.embeddings import EmbeddingStore, check_prompt
from solrl.errors import AdapterError, ConfigError, InputError, VersionError
from solrl.generator import Generated, Generator, Job
from solrl.seeds import SEED_LIMIT

JOBS = [Job("a red cat", 1), Job("a blue house", 2), Job("green tree", 3), Job("a red cat", 2)]
#: The same picture in another place of a batch: fp32 products in another order.
TOLERANCE = 1e-4

Load = Callable[..., Generator]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def load(tiny_model: Path, cache: Path, eager: None) -> Load:
    def build(precision: str = "fp32", micro_batch: int = 3, **settings: Any) -> Generator:
        config = Config(model=model_section(tiny_model, cache))
        return Generator.load(config, precision=precision, micro_batch=micro_batch, **settings)

    return build


def generate(generator: Generator, jobs: list[Job] = JOBS, **settings: Any) -> Generated:
    made = generator.generate(jobs, **({"steps": 3} | settings))
    assert made is not None
    return made


# --- seeds and batches ---------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "nvfp4-emulated"])
def test_the_same_job_gives_the_same_bits_again(load: Load, precision: str) -> None:
    one, other = (generate(load(precision)) for _ in range(2))
    assert torch.equal(one.latents, other.latents)
    assert torch.equal(one.images, other.images)
    assert (one.latents.dtype, one.images.dtype) == (torch.float32, torch.uint8)
    assert tuple(one.images.shape) == (4, 32, 32, 3)


def test_a_picture_can_be_made_alone_in_a_batch_and_shuffled(load: Load) -> None:
    generator = load()
    together = generate(generator, JOBS)
    order = [2, 0, 3, 1]
    shuffled = generate(generator, [JOBS[i] for i in order])
    for place, job in enumerate(JOBS):
        alone = generate(generator, [job])
        for other in (alone.latents[0], shuffled.latents[order.index(place)]):
            torch.testing.assert_close(other, together.latents[place], rtol=0, atol=TOLERANCE)
        levels = (alone.images[0].int() - together.images[place].int()).abs()
        assert int(levels.max()) <= 1
    assert float((together.latents[0] - together.latents[1]).abs().mean()) > 100 * TOLERANCE


@pytest.mark.parametrize("precision", ["fp32", "nvfp4-emulated"])
def test_batch_mates_do_not_change_a_picture(load: Load, precision: str) -> None:
    """Same place in the batch, other neighbours: bit-equal, in FP4 too (one amax a row)."""
    generator = load(precision)
    one = generate(generator, [JOBS[0], JOBS[1], JOBS[2]])
    other = generate(generator, [JOBS[0], JOBS[3], Job("dog", 99)])
    assert torch.equal(one.latents[0], other.latents[0])


def test_one_amax_a_tensor_ties_a_picture_to_its_batch_mates(load: Load) -> None:
    """Why rows are the default: the cost of the other choice."""
    generator = load("nvfp4-emulated", activation_scale="tensor")
    one = generate(generator, [JOBS[0], JOBS[1], JOBS[2]])
    other = generate(generator, [JOBS[0], JOBS[3], Job("dog", 99)])
    assert not torch.equal(one.latents[0], other.latents[0])


def test_emulated_fp4_is_another_model_and_says_what_ran(load: Load) -> None:
    high, low = load("fp32"), load("nvfp4-emulated")
    assert (high.precision, low.precision) == ("fp32", "nvfp4-emulated")
    assert "nvfp4-emulated" in {layer.precision for layer in low.layers}
    assert {layer.precision for layer in high.layers} == {"fp32"}
    difference = (generate(high).latents - generate(low).latents).abs().mean()
    assert float(difference) > 10 * TOLERANCE


@pytest.mark.parametrize(("count", "forwards"), [(1, 1), (3, 1), (4, 2), (7, 3)])
def test_network_evaluations_are_counted_with_padding(
    load: Load, count: int, forwards: int
) -> None:
    generator = load()
    jobs = [Job("dog", seed) for seed in range(count)]
    made = generate(generator, jobs, steps=2)
    assert len(made.latents) == len(made.images) == count
    assert made.nfe == forwards * 3 * 2
    assert generate(generator, jobs, steps=2, guidance=2.0).nfe == 2 * made.nfe


def test_guidance_extrapolates_from_the_empty_prompt(load: Load) -> None:
    """One step: x0 = noise - v, so latents are linear in the guidance scale."""
    generator = load()
    one, two, four = (generate(generator, steps=1, guidance=g).latents for g in (1.0, 2.0, 4.0))
    torch.testing.assert_close(four - one, 3 * (two - one), rtol=0, atol=1e-4)
    assert float((two - one).abs().mean()) > 1e-3


def test_cancellation_reaches_between_steps(load: Load) -> None:
    generator = load()
    asked: list[None] = []

    def after_five() -> bool:
        asked.append(None)
        return len(asked) > 5

    # 4 jobs in micro-batches of 3: the second one is cancelled in its third step.
    assert generator.generate(JOBS, steps=3, cancelled=after_five) is None
    assert len(asked) == 6
    assert len(generate(generator).latents) == 4


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job("", 1), "is empty"),
        (Job(" \n\t", 1), "is empty"),
        (Job("dog", -1), "seed -1 is out of range"),
        (Job("dog", SEED_LIMIT), "out of range"),
    ],
)
def test_bad_jobs_are_refused_before_any_work(load: Load, job: Job, message: str) -> None:
    def never() -> bool:
        raise AssertionError("work was begun")

    with pytest.raises(InputError, match=message):
        load().generate([*JOBS, job], steps=3, cancelled=never)


def test_no_job_is_refused(load: Load) -> None:
    with pytest.raises(InputError, match="nothing to make"):
        load().generate([], steps=3)


# --- adapters ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("adapters")

    def publish(version: int, **settings: Any) -> Path:
        folder = root / "-".join(map(str, settings.values())) / str(version)
        if not folder.exists():
            publish_adapter(folder, tiny_model, version=version, **settings)
        return folder

    return publish


Publish = Callable[..., Path]


def test_a_reload_answers_what_it_bound(load: Load, published: Publish) -> None:
    generator = load()
    manifest = adapters.read_manifest(published(1))
    answer = generator.load_adapter(published(1))
    assert (answer.run, answer.epoch, answer.version) == ("test", 1, 1)
    assert answer.sha256 == manifest.sha256
    assert answer.modules_bound == answer.modules_expected == len(manifest.targets) == 8
    assert answer.seconds > 0
    assert generator.current == manifest
    assert generate(generator).version == 1


@pytest.mark.parametrize("precision", ["fp32", "nvfp4-emulated"])
def test_the_canary_changes_with_the_adapter_and_only_with_it(
    load: Load, published: Publish, precision: str
) -> None:
    generator = load(precision)
    one, two, again = (generator.load_adapter(published(v)).canary for v in (1, 2, 1))
    assert one == again != two
    assert load(precision).load_adapter(published(2)).canary == two


@pytest.mark.parametrize("precision", ["fp32", "nvfp4-emulated"])
def test_swapping_back_is_bit_equal(load: Load, published: Publish, precision: str) -> None:
    generator = load(precision)
    base = generate(generator).latents
    first = {}
    for swap in range(20):
        version = 1 + swap % 2
        generator.load_adapter(published(version))
        seen = generate(generator, steps=1).latents
        assert torch.equal(seen, first.setdefault(version, seen))
    assert not torch.equal(first[1], first[2])
    assert torch.equal(generate(generator, policy="base").latents, base)


def test_current_and_the_version_before_are_held(load: Load, published: Publish) -> None:
    generator = load()
    pictures: dict[int | str | None, Tensor] = {"base": generate(generator).latents}
    for version in (1, 2, 3):
        generator.load_adapter(published(version))
        made = generate(generator)
        assert made.version == version
        pictures[version] = made.latents
    assert generator.held() == [2, 3]
    # Any order of asking gives each version's own pictures.
    for policy in (2, "base", 3, 2, "current", "base"):
        made = generate(generator, policy=policy)
        wanted = {"current": 3}.get(str(policy), policy)
        assert made.version == (None if policy == "base" else wanted)
        assert torch.equal(made.latents, pictures[wanted])
    with pytest.raises(VersionError, match="policy version 1 is not held; held: 2, 3, base"):
        generate(generator, policy=1)


def test_before_any_adapter_current_is_the_base(load: Load) -> None:
    generator = load()
    made = generate(generator)
    assert made.version is None
    assert torch.equal(made.latents, generate(generator, policy="base").latents)
    with pytest.raises(VersionError, match="policy version 0 is not held; held: none, base"):
        generate(generator, policy=0)


def test_another_run_takes_the_stack_over(load: Load, published: Publish) -> None:
    """Version numbers of two runs must never be mixed up."""
    generator = load()
    generator.load_adapter(published(1))
    generator.load_adapter(published(2))
    generator.load_adapter(published(5, run="another"))
    assert generator.held() == [5]


def broken_adapter(folder: Path, source: Path, how: str) -> Path:
    """A copy of a good adapter, wrong in one way; its hashes match."""
    manifest = adapters.read_manifest(source)
    made = lora.from_bytes((source / adapters.WEIGHTS).read_bytes())
    pairs = dict(made.pairs)
    first = min(pairs)
    match how:
        case "module missing":
            del pairs[first]
        case "foreign module":
            a, b = pairs[first]
            pairs["transformer_blocks.7.attn1.to_q"] = (a.clone(), b.clone())
        case "NaN":
            pairs[first] = (pairs[first][0] * float("nan"), pairs[first][1])
        case "another width":
            pairs[first] = (pairs[first][0][:, :8].contiguous(), pairs[first][1])
        case "overflow":
            pairs[first] = (pairs[first][0] * 1e30, pairs[first][1] * 1e30)
        case "another base":
            manifest = manifest.model_copy(update={"base_sha256": "0" * 64})
    data = lora.to_bytes(replace(made, pairs=pairs))
    if how == "no alpha":
        data = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
    sha256 = hashlib.sha256(data).hexdigest()
    adapters.publish(folder, data, manifest.model_copy(update={"sha256": sha256}))
    return folder


@pytest.mark.parametrize(
    "fault",
    [
        ("module missing", "binds 7 of 8 modules; missing: transformer_blocks.0.attn1.to_k"),
        ("foreign module", r"unknown: transformer_blocks\.7"),
        ("NaN", "holds non-finite values in transformer_blocks.0"),
        ("another width", "the base needs"),
        ("overflow", "overflows"),
        ("another base", "was trained on base"),
        ("no alpha", "alpha is unknown"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "nvfp4-emulated"])
def test_a_refused_adapter_changes_nothing(
    load: Load, published: Publish, tmp_path: Path, precision: str, fault: tuple[str, str]
) -> None:
    how, message = fault
    generator = load(precision)
    generator.load_adapter(published(1, epoch=2))
    before, current, held = generate(generator), generator.current, generator.held()
    bad = broken_adapter(tmp_path / "9", published(2, epoch=2), how)
    with pytest.raises(AdapterError, match=message):
        generator.load_adapter(bad)
    assert (generator.current, generator.held()) == (current, held)
    after = generate(generator)
    assert after.version == 1
    assert torch.equal(after.latents, before.latents)


def test_weights_of_this_process_for_evaluation(
    load: Load, published: Publish, tiny_model: Path
) -> None:
    generator = load()
    base = generate(generator).latents
    made = lora.from_bytes((published(1) / adapters.WEIGHTS).read_bytes())
    generator.set_weights(made)
    tuned = generate(generator)
    assert tuned.version is None
    assert not torch.equal(tuned.latents, base)
    generator.set_weights(None)
    assert torch.equal(generate(generator).latents, base)
    generator.load_adapter(published(1))
    assert torch.equal(generate(generator).latents, tuned.latents)


def test_the_base_stays_reachable_after_evaluation_weights(load: Load, published: Publish) -> None:
    generator = load()
    base = generate(generator).latents
    generator.set_weights(lora.from_bytes((published(1) / adapters.WEIGHTS).read_bytes()))
    assert torch.equal(generate(generator, policy="base").latents, base)


# --- model folders -------------------------------------------------------------------------------


def test_the_identity_of_a_base_is_in_its_weights(tiny_model: Path, tmp_path: Path) -> None:
    for part in ("transformer", "vae"):
        (tmp_path / part).mkdir()
        for file in (tiny_model / part).iterdir():
            (tmp_path / part / file.name).write_bytes(file.read_bytes())
    assert models.base_sha256(tmp_path) == models.base_sha256(tiny_model)
    config = tmp_path / "vae" / "config.json"
    config.write_text(config.read_text() + " ")
    assert models.base_sha256(tmp_path) != models.base_sha256(tiny_model)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"is not a diffusers pipeline folder \(.*model_index.json is missing\)"),
        ({"model_index.json": "FluxPipeline"}, "holds a FluxPipeline, but model.family = 'sana'"),
        ({"model_index.json": "SanaPipeline"}, "lacks its folder transformer/"),
    ],
)
def test_model_folders_that_are_none(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, pipeline in files.items():
        (tmp_path / name).write_text(json.dumps({"_class_name": pipeline}))
    with pytest.raises(ConfigError, match=message):
        models.load(model_section(tmp_path, tmp_path))


def test_sizes_the_autoencoder_cannot_make(tiny_model: Path, tmp_path: Path) -> None:
    section = model_section(tiny_model, tmp_path).model_copy(update={"height": 30})
    with pytest.raises(ConfigError, match="30 x 32 must be multiples of 4"):
        models.load(section)


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_are_encoded_once_and_kept_by_content(tiny_model: Path, tmp_path: Path) -> None:
    section = model_section(tiny_model, tmp_path)
    model = models.load(section)
    encoded: list[str] = []

    def encode(prompt: str) -> Any:
        encoded.append(prompt)
        return model.encode(prompt)

    stores = [EmbeddingStore(tmp_path, "tiny", encode) for _ in range(2)]
    values = [store.get(prompt) for prompt in ("a red cat", "dog") for store in (*stores, *stores)]
    assert encoded == ["a red cat", "dog"]
    for value in values[:4]:
        assert torch.equal(value.tokens, values[0].tokens)
        assert torch.equal(value.mask, values[0].mask)
    assert not torch.equal(values[0].tokens, values[4].tokens)
    EmbeddingStore(tmp_path, "another encoder", encode).get("dog")
    assert encoded == ["a red cat", "dog", "dog"]


@pytest.mark.parametrize(
    ("prompt", "words", "truncated"),
    [("a red cat", 3, False), ("A  RED cat ", 3, False), ("cat " * 6, 6, False),
     ("cat " * 7, 6, True), ("cat " * 500, 6, True)],
)  # fmt: skip
def test_truncation_is_said(
    tiny_model: Path, tmp_path: Path, prompt: str, words: int, truncated: bool
) -> None:
    """Eight tokens are read, two of them are the encoder's own."""
    section = model_section(tiny_model, tmp_path)
    made = models.load(section).encode(prompt)
    assert made.truncated == truncated
    assert made.mask.tolist() == [1] * (words + 2) + [0] * (6 - words)
    assert (made.tokens.dtype, tuple(made.tokens.shape)) == (torch.float32, (8, 32))


def test_the_generator_says_what_it_cuts(load: Load) -> None:
    generator = load()
    assert generator.truncated("cat " * 9)
    assert not generator.truncated("cat")
    with pytest.raises(InputError, match="is empty"):
        generator.truncated(" ")


@pytest.mark.parametrize("prompt", ["", " ", "\n\t "])
def test_empty_prompts(prompt: str) -> None:
    with pytest.raises(InputError, match="is empty; describe the picture in words"):
        check_prompt(prompt)
    assert check_prompt(" a ") == " a "
