"""NVFP4 against torchao's quantizer, the emulated layers, and who may run in what."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from solrl.errors import ConfigError, InputError
from solrl.precision import (
    EmulatedConv1x1,
    EmulatedLinear,
    apply,
    count_multiply_adds,
    dequantize,
    fake_quantize,
    fp4_share,
    quantize,
    resolve,
)
from solrl.precision.nvfp4 import TENSOR_SCALE_MIN


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _ties() -> Tensor:
    """Rows whose scales are powers of two, so that the sixteenths land on every tie exactly."""
    grid = torch.arange(-96, 96).reshape(12, 16) / 16.0
    grid[:, 0] = 6.0  # block amax 6: the block scale is exact
    rows = torch.stack([grid.flatten(), grid.flatten() * 2.0**-20, -grid.flatten() * 2.0**30])
    rows[:, 1] = rows[:, 0] * 448  # row amax 6 * 448 units: so is the tensor scale
    return rows


def _wide() -> Tensor:
    return _normal(32, 128) * torch.exp(6 * _normal(32, 128, seed=1))


CASES = {
    "normal": _normal(64, 256),
    "three dimensions": _normal(3, 5, 64),
    "ties": _ties(),
    "eighths": torch.randint(-48, 49, (64, 256), generator=torch.Generator().manual_seed(2)) / 8,
    "wide": _wide(),
    "huge": _normal(8, 64) * 8e37,
    "tiny": _normal(8, 64) * 1e-30,
    "zeros": torch.zeros(4, 32),
    "zero blocks": torch.cat([torch.zeros(4, 32), _normal(4, 32)], dim=1),
    "negative zeros": torch.cat([-torch.zeros(4, 32), _normal(4, 32)], dim=1),
    "subnormal": _normal(8, 64) * 1e-40,
}


@pytest.mark.parametrize("scale", ["row", "tensor"])
@pytest.mark.parametrize("name", CASES)
def test_quantizer_is_torchao_bit_for_bit(name: str, scale: str) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    x = CASES[name]
    packed, block_scale, tensor_scale = quantize(x, tensor_scale=scale)
    amax = x.abs().amax() if scale == "tensor" else x.abs().amax(-1, keepdim=True)
    ours = per_tensor_amax_to_scale(amax).clamp(min=TENSOR_SCALE_MIN)
    assert torch.equal(tensor_scale, ours)

    flat = x.reshape(-1, x.shape[-1])
    theirs = nvfp4_quantize(flat, 16, tensor_scale.reshape(-1, 1) if scale == "row" else ours)
    assert torch.equal(packed.reshape(-1), theirs[1].reshape(-1))
    assert torch.equal(
        block_scale.view(torch.uint8).reshape(-1), theirs[0].view(torch.uint8).reshape(-1)
    )
    values = dequantize((packed, block_scale, tensor_scale))
    assert values.isfinite().all()
    assert torch.equal(values, fake_quantize(x, scale))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0.0), (0.26, 0.5), (0.74, 0.5), (0.75, 1.0), (1.25, 1.0), (1.26, 1.5),
        (1.74, 1.5), (1.75, 2.0), (2.5, 2.0), (2.51, 3.0), (3.49, 3.0), (3.5, 4.0),
        (5.0, 4.0), (5.01, 6.0), (6.0, 6.0),
    ],
)  # fmt: skip
def test_rounding_is_to_nearest_with_ties_to_the_even_code(value: float, rounded: float) -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, value, -value
    x[0, 16] = 6.0 * 448  # makes both scales of the first block exactly 1
    assert fake_quantize(x)[0, :3].tolist() == [6.0, rounded, -rounded]


def test_known_block_has_known_bytes() -> None:
    """White pictures came from swapped nibbles elsewhere: the even index is the low one."""
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x[0, 8:16] = -x[0, :8]
    x[0, 16] = 6.0 * 448
    packed, block_scale, tensor_scale = quantize(x)
    assert packed[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert block_scale.float().tolist() == [[1.0, 448.0]]
    assert tensor_scale.tolist() == [[1.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_quantize_refuses_what_is_not_finite(bad: float) -> None:
    x = _normal(4, 32)
    x[2, 5] = bad
    with pytest.raises(InputError, match="1 of 128 values are not finite"):
        quantize(x)
    # The unchecked form must not turn it into a plausible number.
    assert fake_quantize(x)[2].isnan().all()
    assert fake_quantize(x)[[0, 1, 3]].isfinite().all()


def test_k_must_be_whole_blocks() -> None:
    with pytest.raises(InputError, match="multiple of 16, got K = 20"):
        quantize(_normal(4, 20))
    with pytest.raises(InputError, match="multiple of 16, got K = 20"):
        EmulatedLinear.from_linear(nn.Linear(20, 16))


@pytest.mark.parametrize("scale", ["row", "tensor"])
def test_compiled_quantizer_gives_the_eager_bits(scale: str) -> None:
    compiled = torch.compile(fake_quantize, dynamic=False, fullgraph=True)
    rows = torch.cat([_ties(), _wide().reshape(-1, 128)[:24].reshape(-1, 192)], dim=0)
    for x in (_normal(512, 192), rows[:, :192], torch.zeros(512, 192)):
        assert torch.equal(
            fake_quantize(x, scale).view(torch.int32), compiled(x, scale).view(torch.int32)
        )


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    """With one amax a tensor a picture changes with the pictures beside it; with rows it cannot."""
    alone, loud = _normal(4, 64), 50 * _normal(4, 64, seed=1)
    together = torch.cat([alone, loud])
    assert torch.equal(fake_quantize(together, "row")[:4], fake_quantize(alone, "row"))
    assert not torch.equal(fake_quantize(together, "tensor")[:4], fake_quantize(alone, "tensor"))


def test_linear_is_the_product_of_quantized_operands() -> None:
    linear, x = nn.Linear(64, 24), _normal(2, 7, 64)
    emulated = EmulatedLinear.from_linear(linear)
    expected = functional.linear(
        fake_quantize(x).double(),
        fake_quantize(linear.weight.detach(), "tensor").double(),
        linear.bias.double(),
    )
    torch.testing.assert_close(emulated(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert emulated(x.bfloat16()).dtype == torch.bfloat16


def test_conv_counts_as_a_linear_over_channels() -> None:
    conv, x = nn.Conv2d(32, 16, 1), _normal(2, 32, 4, 6)
    emulated = EmulatedConv1x1.from_conv(conv)
    pixels = fake_quantize(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    weight = fake_quantize(conv.weight.detach().flatten(1), "tensor")[:, :, None, None]
    expected = functional.conv2d(pixels.double(), weight.double(), conv.bias.double())
    assert emulated(x).shape == (2, 16, 4, 6)
    torch.testing.assert_close(emulated(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_set_weight_reaches_a_compiled_layer_without_compiling_again() -> None:
    linear, other, x = nn.Linear(32, 16), nn.Linear(32, 16), _normal(8, 32)
    emulated = EmulatedLinear.from_linear(linear)
    compiled = torch.compile(emulated, dynamic=False, fullgraph=True)
    with torch.no_grad():
        before = compiled(x).clone()
        with torch.compiler.set_stance("fail_on_recompile"):
            emulated.set_weight(other.weight)
            after = compiled(x).clone()
            emulated.set_weight(linear.weight)
            again = compiled(x).clone()
    assert not torch.equal(before, after)
    assert torch.equal(before, again)
    fresh = EmulatedLinear(other.weight, linear.bias)
    torch.testing.assert_close(after, fresh(x))


def test_a_refused_weight_leaves_the_old_one() -> None:
    emulated = EmulatedLinear.from_linear(nn.Linear(32, 16))
    held = emulated.weight.clone()
    for bad in (torch.zeros(32, 16), torch.full((16, 32), float("nan"))):
        with pytest.raises(InputError):
            emulated.set_weight(bad)
    assert torch.equal(emulated.weight, held)
    # The form in which a convolution's merged weight arrives.
    emulated.set_weight(torch.ones(16, 32, 1, 1))
    assert torch.equal(emulated.weight, torch.ones(16, 32))


@pytest.mark.parametrize(
    ("requested", "capability", "amx", "role", "precision"),
    [
        ("auto", None, False, "explore", "nvfp4-emulated"),
        ("auto", None, True, "regenerate", "fp32"),
        ("auto", None, False, "regenerate", "fp32"),
        ("auto", (9, 0), False, "explore", "bf16"),
        ("auto", (8, 0), False, "regenerate", "bf16"),
        ("auto", (7, 5), False, "regenerate", "fp32"),
        ("nvfp4-emulated", None, False, "explore", "nvfp4-emulated"),
        ("nvfp4-emulated", (9, 0), False, "explore", "nvfp4-emulated"),
        ("bf16", None, True, "regenerate", "bf16"),
        ("bf16", (9, 0), False, "regenerate", "bf16"),
        ("fp32", None, False, "explore", "fp32"),
    ],
)
def test_what_runs_and_why(
    requested: str, capability: tuple[int, int] | None, amx: bool, role: str, precision: str
) -> None:
    resolved = resolve(requested, capability=capability, amx=amx, role=role)
    assert resolved.precision == precision
    assert resolved.reason.startswith("auto: " if requested == "auto" else "asked for")


@pytest.mark.parametrize(
    ("requested", "capability", "amx", "says"),
    [
        ("nvfp4", None, True, r'"nvfp4" needs Blackwell .*10.0.* this is a CPU.*"nvfp4-emulated"'),
        ("nvfp4", (9, 0), False, r"needs Blackwell .* capability 9\.0"),
        ("nvfp4", (10, 0), False, r"no native kernels for it yet.*nvfp4-emulated"),
        ("fp8", None, True, r'"fp8" needs Ada.* this is a CPU; set precision = "fp32"'),
        ("fp8", (8, 0), False, r'needs Ada.*"bf16"'),
        ("bf16", None, False, r'neither AMX-BF16 nor AVX512-BF16.*"fp32"'),
        ("bf16", (7, 5), False, r"needs Ampere"),
        ("fp16", None, True, r'"fp16" is not offered.*precision = "fp32" on a CPU'),
        ("int8", None, True, r"'int8' is not one of auto, nvfp4, nvfp4-emulated"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    requested: str, capability: tuple[int, int] | None, amx: bool, says: str
) -> None:
    """Silent BF16 where NVFP4 was asked for, and fp16 dying deep inside, happened elsewhere."""
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(requested, capability=capability, amx=amx)
    assert "\n" not in str(caught.value)


class _Net(nn.Module):
    """One of each kind: eligible or not for FP4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(32, 32)
        self.blocks = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 20), nn.Linear(20, 32)])
        self.depth = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.point = nn.Conv2d(32, 16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.point(self.depth(x.transpose(1, 2).unflatten(2, (4, 4))))


def test_apply_replaces_what_is_eligible_and_says_why_not() -> None:
    net, x = _Net(), _normal(2, 16, 32)
    plain = net(x)
    counts = count_multiply_adds(net, {"x": x})
    assert counts == {
        "embed": 2 * 16 * 32 * 32,
        "blocks.0": 2 * 16 * 32 * 64,
        "blocks.1": 2 * 16 * 64 * 20,
        "blocks.2": 2 * 16 * 20 * 32,
        "depth": 2 * 16 * 32 * 9,
        "point": 2 * 16 * 32 * 16,
    }
    reports = {
        report.name: report
        for report in apply(net, precision="nvfp4-emulated", skip=["emb*"], multiply_adds=counts)
    }
    assert {name: report.precision for name, report in reports.items()} == {
        "embed": "fp32",
        "blocks.0": "nvfp4-emulated",
        "blocks.1": "nvfp4-emulated",
        "blocks.2": "fp32",
        "depth": "fp32",
        "point": "nvfp4-emulated",
    }
    assert reports["embed"].reason == "skipped by 'emb*'"
    assert reports["blocks.2"].reason == "K = 20 is not a multiple of 16"
    assert reports["depth"].reason == "not a plain 1x1 convolution over all channels"
    assert (reports["point"].bytes, reports["point"].resident_bytes) == (
        32 * 16 * 9 // 16 + 4,
        2048,
    )
    assert isinstance(net.point, EmulatedConv1x1)
    assert isinstance(net.blocks[1], EmulatedLinear)

    share = (counts["blocks.0"] + counts["blocks.1"]) / sum(
        counts[f"blocks.{index}"] for index in range(3)
    )
    assert fp4_share(reports.values(), "blocks.") == pytest.approx(share)
    relative = (net(x) - plain).norm() / plain.norm()
    assert 0.01 < relative < 0.5  # four bits show, and no more than that


def test_apply_min_side_spares_small_layers() -> None:
    reports = apply(_Net(), precision="nvfp4-emulated", min_side=32)
    left = {report.name: report.reason for report in reports if report.precision == "fp32"}
    assert left["embed"] == left["point"] == "larger side 32 <= 32"
    assert "blocks.0" not in left


def test_apply_casts_for_bf16_and_refuses_the_unresolved() -> None:
    net = _Net()
    assert {report.precision for report in apply(net, precision="bf16")} == {"bf16"}
    assert net.embed.weight.dtype == torch.bfloat16
    for precision in ("auto", "nvfp4", "fp8"):
        with pytest.raises(ConfigError, match=f'"{precision}"'):
            apply(net, precision=precision)
    with pytest.raises(ConfigError, match="'attn1' matches no module"):
        apply(net, precision="nvfp4-emulated", skip=["attn1"])
    with pytest.raises(ConfigError, match="count_multiply_adds"):
        fp4_share(apply(_Net(), precision="nvfp4-emulated"), "blocks.")


def test_sana_block_counts_shares_and_compiles_whole() -> None:
    """The block that explores: every product counted by hand, no graph break, weights swappable."""
    from diffusers import SanaTransformer2DModel

    torch.manual_seed(0)
    model = SanaTransformer2DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=16,
        num_layers=1, num_cross_attention_heads=2, cross_attention_head_dim=16,
        cross_attention_dim=32, caption_channels=16, mlp_ratio=2.0, sample_size=4, patch_size=1,
    ).eval().requires_grad_(False)  # fmt: skip
    tokens, words, width, hidden = 16, 8, 32, 64
    inputs = {
        "hidden_states": _normal(1, 16, 4, 4),
        "encoder_hidden_states": _normal(1, words, 16),
        "timestep": torch.tensor([500.0]),
    }
    counts = count_multiply_adds(model, inputs)
    block = "transformer_blocks.0."
    square = tokens * width * width
    expected = {
        **{f"{block}attn1.{name}": square for name in ("to_q", "to_k", "to_v", "to_out.0")},
        f"{block}attn1": 2 * tokens * 2 * 16 * 17,  # linear attention: 2 heads, a row of ones
        **{f"{block}attn2.{name}": square for name in ("to_q", "to_out.0")},
        **{f"{block}attn2.{name}": words * width * width for name in ("to_k", "to_v")},
        f"{block}attn2": 2 * tokens * words * width,
        f"{block}ff.conv_inverted": tokens * width * 2 * hidden,
        f"{block}ff.conv_depth": tokens * 9 * 2 * hidden,
        f"{block}ff.conv_point": tokens * hidden * width,
    }
    assert {name: count for name, count in counts.items() if name.startswith(block)} == expected

    skip = ["patch_embed.*", "time_embed.*", "caption_projection.*", "proj_out", "*.attn1.*"]
    emulated = copy.deepcopy(model)
    reports = apply(emulated, precision="nvfp4-emulated", skip=skip, multiply_adds=counts)
    fp4 = sum(
        expected[f"{block}{name}"]
        for name in (
            "attn2.to_q", "attn2.to_k", "attn2.to_v", "attn2.to_out.0",
            "ff.conv_inverted", "ff.conv_point",
        )
    )  # fmt: skip
    assert fp4_share(reports) == pytest.approx(fp4 / sum(expected.values()))

    with torch.no_grad():
        eager = emulated(**inputs).sample
        emulated.transformer_blocks[0].compile(dynamic=False, fullgraph=True)
        compiled = emulated(**inputs).sample
        # GEMM rounding may push a value over a bucket's edge; most stay where they were.
        assert (eager - compiled).norm() < 0.02 * eager.norm()
        with torch.compiler.set_stance("fail_on_recompile"):
            point = emulated.get_submodule(f"{block}ff.conv_point")
            point.set_weight(-model.get_submodule(f"{block}ff.conv_point").weight)
            assert not torch.equal(emulated(**inputs).sample, compiled)


def test_the_emulation_runs_without_torchao() -> None:
    """torchao is an extra: an explorer on a CPU must not need it."""
    program = (
        "import sys; sys.modules['torchao'] = None; import torch; import solrl.precision as p; "
        "p.EmulatedLinear.from_linear(torch.nn.Linear(16, 16))(torch.ones(1, 16)); print('ran')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "ran", done.stderr
