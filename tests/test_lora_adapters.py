"""LoRA files and adapters: the same bytes for the same weights, alpha never lost, bound whole."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SanaPipeline, SanaTransformer2DModel
from safetensors.torch import load, save
from torch import Tensor, nn

from solrl import adapters, lora
from solrl.adapters import MANIFEST, WEIGHTS, Manifest
from solrl.config import Config, load_config
from solrl.errors import AdapterError
from solrl.generator import Generator, Job
from solrl.lora import Lora, Merger
from solrl.models.sana import LORA_TARGETS
from solrl.noise import noise_batch
from solrl.precision import EmulatedLinear
from zoo import tiny_sana
from zoo.assemble import assemble


def random_lora(names: list[str], *, rank: int = 4, alpha: float = 8.0, seed: int = 0) -> Lora:
    """Factors for 16 x 16 linears."""
    generator = torch.Generator().manual_seed(seed)
    return Lora(
        rank,
        alpha,
        {
            name: (
                torch.randn(rank, 16, generator=generator) * 0.1,
                torch.randn(16, rank, generator=generator) * 0.1,
            )
            for name in names
        },
    )


def equal(a: Lora, b: Lora) -> bool:
    return (
        (a.rank, a.alpha, set(a.pairs)) == (b.rank, b.alpha, set(b.pairs))
        and all(torch.equal(x, b.pairs[n][i]) for n in a.pairs for i, x in enumerate(a.pairs[n]))
    )  # fmt: skip


# --- numbers -------------------------------------------------------------------------------------


def test_delta_is_alpha_over_r_times_ba() -> None:
    b = torch.tensor([[1.0], [2.0]])
    a = torch.tensor([[3.0, 4.0]])
    assert Lora(1, 2.0, {"m": (a, b)}).delta("m").tolist() == [[6.0, 8.0], [12.0, 16.0]]


@pytest.mark.parametrize(("rank", "alpha", "scale"), [(32, 64.0, 2.0), (4, 1.0, 0.25)])
def test_delta_keeps_alpha(rank: int, alpha: float, scale: float) -> None:
    made = random_lora(["m"], rank=rank, alpha=alpha)
    a, b = made.pairs["m"]
    torch.testing.assert_close(made.delta("m"), scale * b @ a)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_lerp_is_factor_by_factor(weight: float) -> None:
    one, other = random_lora(["m"], seed=1), random_lora(["m"], seed=2)
    mixed = one.lerp(other, weight)
    for i in range(2):
        expected = weight * one.pairs["m"][i] + (1 - weight) * other.pairs["m"][i]
        assert torch.equal(mixed.pairs["m"][i], expected)


def test_targets_are_the_attention_linears(tiny_model: Path) -> None:
    transformer = SanaTransformer2DModel.from_pretrained(tiny_model / "transformer")
    names = lora.target_modules(transformer, LORA_TARGETS)
    assert names == sorted(
        f"transformer_blocks.0.attn{i}.{part}"
        for i in (1, 2)
        for part in ("to_q", "to_k", "to_v", "to_out.0")
    )


def test_a_fresh_adapter_acts_as_the_base_and_depends_on_its_seed_only() -> None:
    model = nn.ModuleDict({"to_q": nn.Linear(4096, 16), "to_k": nn.Linear(4096, 16)})
    names = ["to_k", "to_q"]
    first = lora.gaussian(model, names, rank=32, alpha=64.0, seed=3)
    torch.manual_seed(99)
    assert equal(first, lora.gaussian(model, names, rank=32, alpha=64.0, seed=3))
    assert not equal(first, lora.gaussian(model, names, rank=32, alpha=64.0, seed=4))
    assert all(not first.delta(name).any() for name in names)
    a = first.pairs["to_q"][0]
    assert float(a.std()) == pytest.approx(1 / 32, rel=0.02)
    assert not torch.equal(a, first.pairs["to_k"][0])


# --- bytes ---------------------------------------------------------------------------------------

WRITER = """
import hashlib, sys, torch
from solrl.lora import Lora, to_bytes
names = [f"transformer_blocks.{i}.attn1.to_q" for i in range(12)]
if sys.argv[1] == "reversed":
    names.reverse()
pairs = {n: (torch.full((4, 8), float(len(n))), torch.arange(32.0).view(8, 4)) for n in names}
print(hashlib.sha256(to_bytes(Lora(4, 8.0, pairs))).hexdigest())
"""


def test_equal_weights_give_equal_bytes_in_every_process_and_order() -> None:
    seen = {
        subprocess.run(
            [sys.executable, "-c", WRITER, order],
            env={"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for order, hash_seed in (("sorted", "1"), ("reversed", "2"))
    }
    assert len(seen) == 1


@pytest.mark.parametrize("alpha", [64.0, 8.0, 0.5])
def test_round_trip(alpha: float) -> None:
    made = random_lora(["x.to_q", "x.to_out.0", "y.to_q"], alpha=alpha)
    again = lora.from_bytes(lora.to_bytes(made))
    assert equal(made, again)
    assert lora.to_bytes(again) == lora.to_bytes(made)


def test_keys_and_header_are_those_of_diffusers() -> None:
    data = lora.to_bytes(random_lora(["x.to_q"]))
    assert sorted(load(data)) == [
        "transformer.x.to_q.lora_A.weight",
        "transformer.x.to_q.lora_B.weight",
    ]
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])["__metadata__"]
    assert json.loads(header["lora_adapter_metadata"]) == {
        "transformer.r": 4,
        "transformer.lora_alpha": 8.0,
        "transformer.target_modules": ["x.to_q"],
    }


def test_bytes_do_not_alias_the_weights() -> None:
    made = random_lora(["x.to_q"])
    data = lora.to_bytes(made)
    made.pairs["x.to_q"][0].zero_()
    assert lora.from_bytes(data).pairs["x.to_q"][0].any()


A, B = "transformer.x.to_q.lora_A.weight", "transformer.x.to_q.lora_B.weight"
FACTORS = {A: torch.ones(4, 16), B: torch.ones(16, 4)}
HEADER = {"transformer.r": 4, "transformer.lora_alpha": 8.0}


def file(tensors: dict[str, Tensor], header: dict[str, Any] | None) -> bytes:
    metadata = None if header is None else {"lora_adapter_metadata": json.dumps(header)}
    return save(tensors, metadata=metadata)


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "no alpha": (file(FACTORS, None), "v7 has no lora_adapter_metadata .*alpha is unknown"),
    "header of something else": (file(FACTORS, {"r": 4}), "v7 has no .*alpha is unknown"),
    "B missing": (file({A: FACTORS[A]}, HEADER), f"v7 lacks {B}"),
    "A missing": (file({B: FACTORS[B]}, HEADER), f"v7 lacks {A}"),
    "NaN": (
        file(FACTORS | {A: torch.full((4, 16), float("nan"))}, HEADER),
        "v7 holds non-finite values in x.to_q",
    ),
    "Inf": (
        file(FACTORS | {B: torch.full((16, 4), float("inf"))}, HEADER),
        "v7 holds non-finite values in x.to_q",
    ),
    "foreign tensor": (file(FACTORS | {"unet.y": torch.ones(1)}, HEADER), "v7 lacks .*unet.y"),
    "cut short": (file(FACTORS, HEADER)[:-1], "v7 is not a safetensors file"),
    "empty": (b"", "v7 is not a safetensors file"),
    "text": (b"<html>not found</html>", "v7 is not a safetensors file"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_files_are_refused_by_name(name: str) -> None:
    data, message = UNREADABLE[name]
    with pytest.raises(AdapterError, match=message):
        lora.from_bytes(data, source="v7")


# --- merging -------------------------------------------------------------------------------------

NAMES = ["attn.to_k", "attn.to_q"]
Build = Callable[[], nn.Module]


def model_of(kind: str) -> tuple[nn.Module, Merger]:
    generator = torch.Generator().manual_seed(5)
    model = nn.Module()
    model.attn = nn.Module()  # type: ignore[assignment]
    pristine = {}
    for name in ("to_k", "to_q"):
        linear = nn.Linear(16, 16)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(16, 16, generator=generator))
        pristine[f"attn.{name}"] = linear.weight.detach().clone()
        layer: nn.Module = linear
        if kind == "nvfp4-emulated":
            layer = EmulatedLinear.from_linear(linear)
        if kind == "bf16":
            layer = linear.bfloat16()
        setattr(model.attn, name, layer)
    return model, Merger(model, pristine)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [model.get_submodule(name).weight.detach().clone() for name in NAMES]  # type: ignore


@pytest.mark.parametrize("kind", ["fp32", "bf16", "nvfp4-emulated"])
def test_v1_v2_v1_is_bit_equal_after_100_swaps(kind: str) -> None:
    model, merger = model_of(kind)
    base = weights_of(model)
    versions = [random_lora(NAMES, seed=s, alpha=16.0) for s in (1, 2)]
    first = []
    for version in versions:
        merger.merge(version)
        first.append(weights_of(model))
    assert not torch.equal(first[0][0], first[1][0])
    for swap in range(100):
        merger.merge(versions[swap % 2])
        assert all(map(torch.equal, weights_of(model), first[swap % 2]))
    merger.merge(None)
    assert all(map(torch.equal, weights_of(model), base))


def test_merging_writes_in_place() -> None:
    """A compiled model holds the parameter: it must be the same tensor, with new values."""
    model, merger = model_of("fp32")
    weight = model.get_submodule("attn.to_q").weight
    address = weight.data_ptr()  # type: ignore[union-attr, operator]
    merger.merge(random_lora(NAMES))
    after = model.get_submodule("attn.to_q").weight
    assert after is weight
    assert after.data_ptr() == address  # type: ignore[union-attr, operator]


def test_merged_weight_is_base_plus_delta() -> None:
    model, merger = model_of("fp32")
    base = weights_of(model)
    made = random_lora(NAMES, alpha=16.0)
    merger.merge(made)
    for name, before, after in zip(NAMES, base, weights_of(model), strict=True):
        a, b = (x.double() for x in made.pairs[name])
        expected = before.double() + 16.0 / 4 * b @ a
        torch.testing.assert_close(after.double(), expected, rtol=0, atol=1e-6)


MISFITS: dict[str, tuple[Lora, str]] = {
    "module missing": (
        random_lora(["attn.to_q"]),
        "v7 binds 1 of 2 modules; missing: attn.to_k; unknown: none",
    ),
    "nothing bound": (
        random_lora(["base_model.model.attn.to_q"]),
        "v7 binds 0 of 2 modules; missing: attn.to_k, attn.to_q; unknown: base_model.model.attn",
    ),
    "module too many": (
        random_lora([*NAMES, "attn.to_v"]),
        "v7 binds 2 of 2 modules; missing: none; unknown: attn.to_v",
    ),
    "rank is not what the header says": (
        Lora(8, 16.0, random_lora(NAMES).pairs),
        r"v7: attn.to_k has A \(4, 16\) and B \(16, 4\), the base needs \(8, 16\) and \(16, 8\)",
    ),
    "another model's width": (
        Lora(4, 8.0, {name: (torch.ones(4, 32), torch.ones(16, 4)) for name in NAMES}),
        r"v7: attn.to_k has A \(4, 32\) .* needs \(4, 16\)",
    ),
    "overflow": (
        Lora(4, 8.0, {name: (torch.full((4, 16), 1e30),) * 1 + (torch.full((16, 4), 1e30),)
                      for name in NAMES}),
        r"v7: base \+ \(alpha/r\) B A of attn.to_k overflows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_an_adapter_that_does_not_fit_is_refused_naming_modules(name: str) -> None:
    made, message = MISFITS[name]
    _, merger = model_of("fp32")
    with pytest.raises(AdapterError, match=message):
        merger.check(made, source="v7")


def test_an_adapter_that_fits_passes() -> None:
    _, merger = model_of("nvfp4-emulated")
    merger.check(random_lora(NAMES), source="v7")
    assert merger.names == NAMES


# --- adapters on disk ----------------------------------------------------------------------------


def manifest(weights: bytes, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "run": "r",
        "epoch": 2,
        "version": 7,
        "step": 7,
        "base_id": "build/zoo/tiny-sana",
        "base_sha256": "b" * 64,
        "rank": 4,
        "alpha": 8.0,
        "targets": ("x.to_q",),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    return Manifest(**(values | changes))


@pytest.fixture
def weights() -> bytes:
    return lora.to_bytes(random_lora(["x.to_q"]))


def test_publish_and_read(tmp_path: Path, weights: bytes) -> None:
    folder = adapters.publish(tmp_path / "adapters" / "7", weights, manifest(weights))
    assert adapters.read_manifest(folder) == manifest(weights)
    assert (folder / WEIGHTS).read_bytes() == weights
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, WEIGHTS]
    assert [p.name for p in folder.parent.iterdir()] == ["7"]


def test_publishing_the_same_bytes_again_is_success(tmp_path: Path, weights: bytes) -> None:
    folder = adapters.publish(tmp_path / "7", weights, manifest(weights))
    before = (folder / MANIFEST).stat().st_mtime_ns
    assert adapters.publish(folder, weights, manifest(weights, epoch=3)) == folder
    assert (folder / MANIFEST).stat().st_mtime_ns == before


def test_a_version_is_never_reused_for_other_bytes(tmp_path: Path, weights: bytes) -> None:
    folder = adapters.publish(tmp_path / "7", weights, manifest(weights))
    other = lora.to_bytes(random_lora(["x.to_q"], seed=1))
    with pytest.raises(AdapterError, match=r"exists with other contents .* versions are immutable"):
        adapters.publish(folder, other, manifest(other))
    assert (folder / WEIGHTS).read_bytes() == weights


def damage(folder: Path, how: str) -> None:
    match how:
        case "weights cut":
            data = (folder / WEIGHTS).read_bytes()
            (folder / WEIGHTS).write_bytes(data[:-1])
        case "weights changed":
            data = (folder / WEIGHTS).read_bytes()
            (folder / WEIGHTS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "weights gone":
            (folder / WEIGHTS).unlink()
        case "manifest gone":
            (folder / MANIFEST).unlink()
        case "manifest cut":
            (folder / MANIFEST).write_text("{")
        case "manifest of the future":
            text = json.loads((folder / MANIFEST).read_text())
            (folder / MANIFEST).write_text(json.dumps(text | {"scale": 0.5}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("weights cut", "damaged or half written"),
        ("weights changed", "damaged or half written"),
        ("weights gone", "is incomplete"),
        ("manifest gone", "is incomplete"),
        ("manifest cut", "is not valid"),
        ("manifest of the future", "is not valid"),
    ],
)
def test_only_whole_adapters_are_believed(
    tmp_path: Path, weights: bytes, how: str, message: str
) -> None:
    folder = adapters.publish(tmp_path / "7", weights, manifest(weights))
    damage(folder, how)
    with pytest.raises(AdapterError, match=message) as caught:
        adapters.read_manifest(folder)
    assert str(folder) in str(caught.value)


def test_adapter_of_another_base_is_refused() -> None:
    made = manifest(b"")
    adapters.check_base(made, base_sha256="b" * 64)
    message = r"was trained on base .* \(bbbbbbbbbbbb\), this service .* cccccc"
    with pytest.raises(AdapterError, match=message):
        adapters.check_base(made, base_sha256="c" * 64)


# --- the exported file in stock diffusers --------------------------------------------------------

PROMPTS = ["strawberry, flat style", "a very long prompt " * 8, "DOG, noto style ", "cat"]
SEEDS = [0, 1, 2**40, 3]
STEPS = 5
#: Of latents of size 1, for fp32 arithmetic in another order over 5 steps (2.5e-6 was seen).
#: Pictures may differ by one of 255 levels.
LATENT_TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def pipeline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """zoo/tiny-sana's architecture with random weights: plain SanaPipeline parts."""
    source = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    tiny_sana.write_model(tiny_sana.transformer(), tiny_sana.invertible_autoencoder(), source)
    return assemble(source, source.parent / "stock-assembled")


@pytest.fixture(scope="module")
def ours(pipeline_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    cache = tmp_path_factory.mktemp("cache")
    config: Config = load_config(
        None, {"model.base": str(pipeline_folder), "model.cache": str(cache)}, {}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield Generator.load(config, precision="fp32", micro_batch=len(PROMPTS))


@pytest.fixture
def adapter(pipeline_folder: Path, tmp_path: Path) -> tuple[Lora, Path]:
    """A LoRA of the paper's r and alpha that changes pictures a lot, and its published folder."""
    transformer = SanaTransformer2DModel.from_pretrained(pipeline_folder / "transformer")
    names = lora.target_modules(transformer, LORA_TARGETS)
    fresh = lora.gaussian(transformer, names, rank=32, alpha=64.0, seed=1)
    generator = torch.Generator().manual_seed(2)
    made = Lora(
        fresh.rank,
        fresh.alpha,
        {n: (a, torch.randn(b.shape, generator=generator) * 0.2)
         for n, (a, b) in fresh.pairs.items()},
    )  # fmt: skip
    data = lora.to_bytes(made)
    folder = adapters.publish(tmp_path / "1", data, manifest(data, targets=tuple(names)))
    return made, folder


@pytest.fixture
def stock(pipeline_folder: Path) -> SanaPipeline:
    pipe = SanaPipeline.from_pretrained(pipeline_folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def stock_pictures(
    pipe: SanaPipeline, noise: Tensor, guidance: float = 1.0
) -> tuple[Tensor, np.ndarray]:
    latents = pipe(
        prompt=PROMPTS,
        negative_prompt="",
        latents=noise.clone(),
        height=32,
        width=32,
        num_inference_steps=STEPS,
        sigmas=np.linspace(1, 1 / STEPS, STEPS),
        guidance_scale=guidance,
        max_sequence_length=16,
        complex_human_instruction=None,
        use_resolution_binning=False,
        output_type="latent",
    ).images
    decoded = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    return latents, pipe.image_processor.postprocess(decoded, output_type="np")


@torch.no_grad()
def assert_same_pictures(ours: Generator, stock: SanaPipeline, *, guidance: float = 1.0) -> Tensor:
    made = ours.generate(
        [Job(p, s) for p, s in zip(PROMPTS, SEEDS, strict=True)], steps=STEPS, guidance=guidance
    )
    assert made is not None
    latents, pictures = stock_pictures(stock, noise_batch(SEEDS, ours.latent_shape), guidance)
    torch.testing.assert_close(made.latents, latents, rtol=0, atol=LATENT_TOLERANCE)
    levels = np.abs(made.images.numpy().astype(float) - (pictures * 255).round())
    assert levels.max() <= 1
    return made.latents


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_base_gives_the_pictures_of_the_stock_pipeline(
    ours: Generator, stock: SanaPipeline, guidance: float
) -> None:
    ours.set_weights(None)
    assert_same_pictures(ours, stock, guidance=guidance)


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_the_exported_lora_gives_the_same_pictures_in_the_stock_pipeline(
    ours: Generator, stock: SanaPipeline, adapter: tuple[Lora, Path], guidance: float
) -> None:
    ours.set_weights(None)
    base = assert_same_pictures(ours, stock, guidance=guidance)
    made, folder = adapter
    ours.set_weights(made)
    stock.load_lora_weights(folder)
    tuned = assert_same_pictures(ours, stock, guidance=guidance)
    # The LoRA acts: at half strength (alpha lost) the tolerance above would be missed by far.
    assert float((tuned - base).abs().mean()) > 0.2


def test_in_stock_diffusers_the_lora_is_exactly_alpha_over_r_times_ba(
    stock: SanaPipeline, adapter: tuple[Lora, Path]
) -> None:
    made, folder = adapter
    before = {n: stock.transformer.get_submodule(n).weight.clone() for n in made.pairs}
    stock.load_lora_weights(folder)
    layer = stock.transformer.get_submodule(next(iter(made.pairs)))
    assert set(layer.scaling.values()) == {64 / 32}
    stock.fuse_lora()
    stock.unload_lora_weights()
    for name, weight in before.items():
        a, b = (x.double() for x in made.pairs[name])
        expected = weight.double() + 2.0 * b @ a
        after = stock.transformer.get_submodule(name).weight.double()
        torch.testing.assert_close(after, expected, rtol=0, atol=2e-6)
