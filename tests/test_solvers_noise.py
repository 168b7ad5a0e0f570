"""Euler against diffusers' own scheduler, cancellation, and the noise of a seed."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from solrl.errors import InputError
from solrl.noise import initial_noise, noise_batch
from solrl.seeds import SEED_LIMIT
from solrl.solvers import euler, uniform_sigmas

SHAPE = (48, 8, 8)

# --- solver --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "sigmas"),
    [
        (1, [1.0, 0.0]),
        (4, [1.0, 0.75, 0.5, 0.25, 0.0]),
        (10, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]),
    ],
)
def test_uniform_sigmas(steps: int, sigmas: list[float]) -> None:
    assert uniform_sigmas(steps).dtype == torch.float64
    assert uniform_sigmas(steps).tolist() == pytest.approx(sigmas, abs=1e-15)


@pytest.mark.parametrize("steps", [1, 6, 10])
def test_euler_is_exact_on_a_constant_field(steps: int) -> None:
    """v = eps - x0 everywhere leads from eps to x0, up to the rounding of the state in fp32."""
    noise, clean = torch.randn(2, *SHAPE), torch.randn(2, *SHAPE)
    end = euler(lambda x, sigma: noise - clean, noise, uniform_sigmas(steps))
    assert end is not None
    assert end.dtype == torch.float32
    torch.testing.assert_close(end, clean, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_stays_fp32(dtype: torch.dtype) -> None:
    """A velocity in bf16 does not pull the state down to bf16."""
    end = euler(lambda x, sigma: (0.1 * x).to(dtype), torch.randn(1, *SHAPE), uniform_sigmas(3))
    assert end is not None
    assert end.dtype == torch.float32
    assert not torch.equal(end, end.bfloat16().float())


def field(x: Tensor, sigma: float) -> Tensor:
    return torch.sin(3 * x + sigma) + sigma * x


@pytest.mark.parametrize("steps", [1, 2, 6, 10, 40])
def test_euler_equals_diffusers_scheduler(steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))
    noise = torch.randn(2, *SHAPE)
    expected = noise
    for timestep in scheduler.timesteps:
        velocity = field(expected, float(timestep) / 1000)
        expected = scheduler.step(velocity, timestep, expected, return_dict=False)[0]
    end = euler(field, noise, uniform_sigmas(steps))
    torch.testing.assert_close(end, expected, rtol=0, atol=1e-5)


def test_euler_by_hand() -> None:
    """dx/ds = x from 1 to 0 in n steps multiplies by (1 - 1/n)^n."""
    end = euler(lambda x, sigma: x, torch.ones(1, 1), uniform_sigmas(6))
    assert end is not None
    assert float(end) == pytest.approx((1 - 1 / 6) ** 6, rel=1e-6)


def test_velocity_is_asked_at_every_sigma_but_the_last() -> None:
    asked: list[float] = []

    def velocity(x: Tensor, sigma: float) -> Tensor:
        asked.append(sigma)
        return x

    euler(velocity, torch.ones(1, 1), uniform_sigmas(4))
    assert asked == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("after", range(4))
def test_cancellation_is_seen_between_steps(after: int) -> None:
    asked: list[float] = []

    def velocity(x: Tensor, sigma: float) -> Tensor:
        asked.append(sigma)
        return x

    end = euler(
        velocity, torch.ones(1, 1), uniform_sigmas(4), cancelled=lambda: len(asked) >= after
    )
    assert end is None
    assert len(asked) == after


# --- noise ---------------------------------------------------------------------------------------

# Golden, of the vectorised Box-Muller every x86 CPU of the last ten years runs; without AVX2 the
# same numbers differ in their last bits, so there only the rounded values below are compared.
DIGESTS = {
    0: "79276078d05527a35911ab0b3358960e17cbeeb691c76f8b8e8cb2f78ef0126e",
    1: "48d3bdaa04da7d0cacd76a7247f1f3576bebbac34e86205e5386f5521335cb01",
    2**32 - 1: "2f0e35cf4df24f6b5d7a34dbe97807e05e48a533abc1cb0d3aa9129f95ba2691",
    SEED_LIMIT - 1: "2f0e35cf4df24f6b5d7a34dbe97807e05e48a533abc1cb0d3aa9129f95ba2691",
}
FIRST_VALUES = {
    0: [-1.12584, -1.15236, -0.250579, -0.433879],
    SEED_LIMIT - 1: [-2.664298, -1.091049, 0.451447, 0.228361],
}


def digest(noise: Tensor) -> str:
    return hashlib.sha256(noise.numpy().tobytes()).hexdigest()


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"),
    reason="this CPU's vector unit rounds the noise differently in its last bit",
)
@pytest.mark.parametrize("seed", DIGESTS)
def test_noise_is_golden(seed: int) -> None:
    assert digest(initial_noise(seed, SHAPE)) == DIGESTS[seed]


@pytest.mark.parametrize("seed", FIRST_VALUES)
def test_noise_is_golden_to_rounding_everywhere(seed: int) -> None:
    seen = initial_noise(seed, SHAPE).flatten()[:4].tolist()
    assert seen == pytest.approx(FIRST_VALUES[seed], abs=2e-6)


def test_noise_is_standard_normal_fp32_on_the_cpu() -> None:
    noise = noise_batch(range(64), SHAPE)
    assert (noise.dtype, noise.device.type) == (torch.float32, "cpu")
    n = noise.numel()
    assert abs(float(noise.mean())) < 5 / math.sqrt(n)
    assert abs(float(noise.var()) - 1) < 5 * math.sqrt(2 / n)


def test_noise_of_a_seed_is_the_same_alone_in_a_batch_and_shuffled() -> None:
    seeds = [5, 2**40 + 3, 0, 7, 5]
    batch = noise_batch(seeds, SHAPE)
    shuffled = noise_batch(seeds[::-1], SHAPE)
    for row, seed in enumerate(seeds):
        alone = initial_noise(seed, SHAPE)
        assert torch.equal(alone, batch[row])
        assert torch.equal(alone, shuffled[len(seeds) - 1 - row])


def test_noise_neither_reads_nor_moves_the_global_generator() -> None:
    torch.manual_seed(1)
    first = initial_noise(9, SHAPE)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(initial_noise(9, SHAPE), first)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_does_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    many = initial_noise(11, (64, 64, 64))
    torch.set_num_threads(1)
    try:
        assert torch.equal(initial_noise(11, (64, 64, 64)), many)
    finally:
        torch.set_num_threads(threads)


def test_neighbouring_seeds_are_unrelated() -> None:
    noise = noise_batch(range(32), SHAPE).flatten(1)
    correlations = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in pairwise(noise)]
    assert max(map(abs, correlations)) < 5 / math.sqrt(noise.shape[1])


@pytest.mark.parametrize("seed", [-1, SEED_LIMIT])
def test_seed_out_of_range(seed: int) -> None:
    with pytest.raises(InputError, match="out of range"):
        initial_noise(seed, SHAPE)
