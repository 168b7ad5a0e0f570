"""Rewards -> advantages -> DiffusionNFT, against an independent evaluation in float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from solrl.advantages import advantages, optimality
from solrl.losses import WEIGHT_FLOOR, diffusion_nft, noised

F64 = NDArray[np.float64]

# --- advantages ----------------------------------------------------------------------------------

GROUPS = [[1.0, 2.0, 3.0], [10.0, 10.0, 10.0], [0.0, 4.0]]
# Population standard deviations by hand.
ALL = (1, 2, 3, 10, 10, 10, 0, 4)
GLOBAL_STD = (sum((x - 5) ** 2 for x in ALL) / 8) ** 0.5
SCALED = {
    "none": [[-1, 0, 1], [0, 0, 0], [-2, 2]],
    "group_std": [
        [-1 / ((2 / 3) ** 0.5 + 1e-4), 0, 1 / ((2 / 3) ** 0.5 + 1e-4)],
        [0, 0, 0],
        [-2 / (2 + 1e-4), 2 / (2 + 1e-4)],
    ],
    "global_std": [
        [-1 / (GLOBAL_STD + 1e-4), 0, 1 / (GLOBAL_STD + 1e-4)],
        [0, 0, 0],
        [-2 / (GLOBAL_STD + 1e-4), 2 / (GLOBAL_STD + 1e-4)],
    ],
}


@pytest.mark.parametrize("scale", SCALED)
def test_advantages_by_hand(scale: Any) -> None:
    for seen, expected in zip(advantages(GROUPS, scale=scale), SCALED[scale], strict=True):
        assert seen == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("scale", SCALED)
@pytest.mark.parametrize("value", [0.0, 0.1, -3e30, 1 / 3])
def test_equal_rewards_give_exactly_zero(scale: Any, value: float) -> None:
    assert advantages([[value] * 24, [1.0, 2.0]], scale=scale)[0] == [0.0] * 24
    assert advantages([[value]], scale=scale) == [[0.0]]


def test_equal_rewards_stay_zero_when_centred_on_something_else() -> None:
    assert advantages([[2.0, 2.0]], centres=[1.0]) == [[0.0, 0.0]]


def test_the_same_prompt_twice_is_two_groups() -> None:
    # One merged group of mean 6 would give -5, -3, 3, 5.
    assert advantages([[1.0, 3.0], [9.0, 11.0]], scale="none") == [[-1.0, 1.0], [-1.0, 1.0]]


def test_centres_replace_the_groups_means() -> None:
    assert advantages([[1.0, 3.0], [5.0, 6.0]], scale="none", centres=[0.0, 7.0]) == [
        [1.0, 3.0],
        [-2.0, -1.0],
    ]


@pytest.mark.parametrize("scale", ["global_std", "group_std"])
@pytest.mark.parametrize(("factor", "shift"), [(100.0, 0.0), (1.0, 50.0), (3.0, -2.0)])
def test_scaled_advantages_ignore_unit_and_offset(scale: Any, factor: float, shift: float) -> None:
    groups = [[1.0, 2.0, 4.0], [3.0, 9.0, 5.0]]
    moved = [[factor * r + shift for r in group] for group in groups]
    for a, b in zip(advantages(groups, scale=scale), advantages(moved, scale=scale), strict=True):
        assert a == pytest.approx(b, rel=2e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=f"finite, seen {bad}"):
        advantages([[1.0, 2.0], [3.0, bad]])


@pytest.mark.parametrize(
    ("advantage", "clip", "r"),
    [
        (0.0, 5.0, 0.5),
        (1.0, 5.0, 0.6),
        (-2.5, 5.0, 0.25),
        (5.0, 5.0, 1.0),
        (99.0, 5.0, 1.0),
        (-99.0, 5.0, 0.0),
        (1.0, 2.0, 0.75),
    ],
)
def test_optimality(advantage: float, clip: float, r: float) -> None:
    assert optimality(advantage, clip) == pytest.approx(r, abs=1e-15)


# --- loss ----------------------------------------------------------------------------------------

SHAPE = (3, 4, 5)


def problem(seed: int, n: int = 4) -> dict[str, Any]:
    """Random float64 inputs; the noisy latents follow from clean, noise and times."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.standard_normal((n, *SHAPE))
        for name in ("velocity", "old_velocity", "base_velocity", "clean", "noise")
    }
    times = rng.uniform(0.1, 1.0, n)
    t = times[:, None, None, None]
    noise = arrays.pop("noise")
    return {
        **arrays,
        "noisy": (1 - t) * arrays["clean"] + t * noise,
        "times": times,
        "optimality": rng.uniform(0, 1, n),
        "noise": noise,
    }


def reference(
    p: dict[str, Any], b: float, kl_weight: float, adv_clip: float
) -> tuple[F64, F64, F64, F64]:
    """(total, policy, kl, d total / d velocity), sample by sample in float64 (method, section 4).

    With d = x_t - t v - x0 and w constant: dL+/dv = -2 t b d+ / (w+ M), dL-/dv = +2 t b d- / (w- M)
    for M elements a sample; r/b and (1-r)/b cancel the b.
    """
    totals, policies, kls, gradients = [], [], [], []
    for i in range(len(p["times"])):
        v, old, base = p["velocity"][i], p["old_velocity"][i], p["base_velocity"][i]
        x, x0, t, r = p["noisy"][i], p["clean"][i], p["times"][i], p["optimality"][i]
        m = v.size
        d_plus = x - t * (b * v + (1 - b) * old) - x0
        d_minus = x - t * ((1 + b) * old - b * v) - x0
        w_plus = max(np.abs(d_plus).mean(), 1e-5)
        w_minus = max(np.abs(d_minus).mean(), 1e-5)
        policy = r * (d_plus**2 / w_plus).mean() / b + (1 - r) * (d_minus**2 / w_minus).mean() / b
        kl = ((v - base) ** 2).mean()
        gradient = 2 * t / m * ((1 - r) * d_minus / w_minus - r * d_plus / w_plus)
        totals.append(adv_clip * policy + kl_weight * kl)
        policies.append(policy)
        kls.append(kl)
        gradients.append(adv_clip * gradient + kl_weight * 2 * (v - base) / m)
    return np.array(totals), np.array(policies), np.array(kls), np.array(gradients)


def tensors(p: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    made = {k: torch.tensor(v, dtype=dtype) for k, v in p.items() if k != "noise"}
    made["velocity"].requires_grad_()
    return made


@pytest.mark.parametrize("b", [1.0, 0.5, 0.1, 2.0])
@pytest.mark.parametrize(("kl_weight", "adv_clip"), [(1e-4, 5.0), (0.0, 1.0), (10.0, 0.5)])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_loss_and_gradient_against_float64(
    b: float, kl_weight: float, adv_clip: float, dtype: torch.dtype, rel: float
) -> None:
    p = problem(seed=int(10 * b))
    inputs = tensors(p, dtype)
    loss = diffusion_nft(**inputs, nft_beta=b, kl_weight=kl_weight, adv_clip=adv_clip)
    loss.total.sum().backward()
    total, policy, kl, gradient = reference(p, b, kl_weight, adv_clip)
    for seen, expected in ((loss.total, total), (loss.policy, policy), (loss.kl, kl)):
        np.testing.assert_allclose(seen.detach().numpy(), expected, rtol=rel)
    found = inputs["velocity"].grad
    assert found is not None
    np.testing.assert_allclose(found.numpy(), gradient, rtol=0, atol=rel * np.abs(gradient).max())


def test_the_hand_gradient_agrees_with_central_differences() -> None:
    """Of the loss with w held constant, as stopgrad says: a check of the reference itself."""
    p, b, adv_clip = problem(seed=3, n=1), 0.7, 5.0
    _, _, _, gradient = reference(p, b, 0.1, adv_clip)
    x, x0, t, r = p["noisy"][0], p["clean"][0], p["times"][0], p["optimality"][0]
    old, base = p["old_velocity"][0], p["base_velocity"][0]

    def plus(v: F64) -> F64:
        return np.asarray(x - t * (b * v + (1 - b) * old) - x0)

    def minus(v: F64) -> F64:
        return np.asarray(x - t * ((1 + b) * old - b * v) - x0)

    v0 = p["velocity"][0]
    w_plus, w_minus = np.abs(plus(v0)).mean(), np.abs(minus(v0)).mean()

    def loss(v: F64) -> float:
        policy = r * (plus(v) ** 2).mean() / w_plus + (1 - r) * (minus(v) ** 2).mean() / w_minus
        return float(adv_clip * policy / b + 0.1 * ((v - base) ** 2).mean())

    for place in [(0, 0, 0), (1, 2, 3), (2, 3, 4)]:
        step = np.zeros(SHAPE)
        step[place] = 1e-5
        numeric = (loss(v0 + step) - loss(v0 - step)) / 2e-5
        assert numeric == pytest.approx(gradient[0][place], rel=1e-6)


def test_at_the_old_policy_the_loss_is_symmetric_in_r() -> None:
    """v = v_old: value equal for r and 1 - r, policy gradient opposite; at r = 1/2 it is zero."""
    for r in (0.0, 0.2, 0.5):
        values, gradients = [], []
        for optimal in (r, 1 - r):
            p = problem(seed=4)
            p["old_velocity"] = p["velocity"]
            p["optimality"][:] = optimal
            inputs = tensors(p, torch.float64)
            loss = diffusion_nft(**inputs, nft_beta=1.0, kl_weight=0.0, adv_clip=5.0)
            loss.policy.sum().backward()
            values.append(loss.policy.detach())
            gradients.append(inputs["velocity"].grad)
        torch.testing.assert_close(values[0], values[1], rtol=1e-14, atol=0)
        torch.testing.assert_close(gradients[0], -gradients[1], rtol=1e-12, atol=1e-16)
        assert (gradients[0].abs().max() == 0) == (r == 0.5)


@pytest.mark.parametrize(("r", "sign"), [(1.0, 1), (0.51, 1), (0.49, -1), (0.0, -1)])
@pytest.mark.parametrize("b", [0.3, 1.0])
def test_a_good_sample_pulls_the_velocity_towards_its_own(r: float, sign: int, b: float) -> None:
    """The descent step from v = v_old moves towards eps - x0 when r > 1/2, away when r < 1/2."""
    p = problem(seed=5)
    p["old_velocity"] = p["velocity"]
    p["optimality"][:] = r
    inputs = tensors(p, torch.float64)
    diffusion_nft(**inputs, nft_beta=b, kl_weight=0.0, adv_clip=5.0).policy.sum().backward()
    target = p["noise"] - p["clean"]
    gradient = inputs["velocity"].grad
    assert gradient is not None
    along = (-gradient.numpy() * (target - p["velocity"])).sum(axis=(1, 2, 3))
    assert (np.sign(along) == sign).all()


def test_a_perfect_prediction_meets_the_floor_instead_of_dividing_by_zero() -> None:
    p = problem(seed=6)
    p["velocity"] = p["old_velocity"] = p["noise"] - p["clean"]
    inputs = tensors(p, torch.float32)
    loss = diffusion_nft(**inputs, nft_beta=1.0, kl_weight=0.0, adv_clip=5.0)
    loss.total.sum().backward()
    # Rounding leaves about 1e-7, whose square over the floor is nothing.
    assert float(loss.policy.detach().max()) < 1e-12 / WEIGHT_FLOOR
    assert inputs["velocity"].grad is not None
    assert torch.isfinite(inputs["velocity"].grad).all()


def test_only_the_trained_velocity_carries_gradient() -> None:
    inputs = tensors(problem(seed=7), torch.float64)
    loss = diffusion_nft(**inputs, nft_beta=1.0, kl_weight=1e-4, adv_clip=5.0)
    loss.total.sum().backward()
    assert [k for k, v in inputs.items() if v.grad is not None] == ["velocity"]


def test_samples_do_not_touch_each_other() -> None:
    whole = tensors(problem(seed=8), torch.float64)
    together = diffusion_nft(**whole, nft_beta=1.0, kl_weight=0.1, adv_clip=5.0).total
    for i in range(4):
        part = {k: v[i : i + 1] for k, v in whole.items()}
        alone = diffusion_nft(**part, nft_beta=1.0, kl_weight=0.1, adv_clip=5.0).total
        torch.testing.assert_close(alone[0], together[i], rtol=1e-14, atol=0)


def test_noised_ends_at_the_picture_and_at_the_noise() -> None:
    clean, noise = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE)
    mixed = noised(clean, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert torch.equal(mixed[0], clean[0])
    assert torch.equal(mixed[1], 0.75 * clean[1] + 0.25 * noise[1])
    assert torch.equal(mixed[2], noise[2])
