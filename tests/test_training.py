"""The learner's step: a pure function of its inputs, three policies on one untouched base."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import SanaTransformer2DModel
from torch import Tensor
from training_setup import LATENTS, ROLLOUT_STEPS, make_samples, make_trainer, train

from solrl import lora
from solrl.advantages import optimality
from solrl.lora import Lora, Merger
from solrl.training import Sample, Trainer, training_pairs

POLICIES = ("trained", "old", "ema")


def state(trainer: Trainer) -> dict[str, Any]:
    """Everything a step may change."""
    return {name: lora.to_bytes(trainer.get(name)) for name in POLICIES} | {
        key: value.numpy().tobytes() for key, value in trainer.optimizer_tensors().items()
    }


def base_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in trainer._model.transformer.state_dict().items()
        if ".lora_" not in name
    }


# --- pairs ---------------------------------------------------------------------------------------


def pairs_of(samples: list[Sample], **changes: int) -> list[Any]:
    values = {"run_seed": 1, "iteration": 2, "rollout_steps": 10, "timesteps": 9}
    return training_pairs(samples, **(values | changes))


def test_every_sample_gets_times_of_its_rollout_none_twice() -> None:
    pairs = pairs_of(make_samples(4))
    assert len(pairs) == 4 * 9
    orders = []
    for i in range(4):
        times = [round(10 * p.time, 9) for p in pairs[9 * i : 9 * i + 9]]
        assert len(set(times)) == 9
        assert set(times) <= set(range(1, 11))
        orders.append(tuple(times))
    assert len(set(orders)) == 4
    assert all(p.noise.dtype == torch.float32 and p.noise.shape == LATENTS for p in pairs)
    assert len({p.noise.numpy().tobytes() for p in pairs}) == len(pairs)


def test_over_many_samples_every_time_is_trained_equally_often() -> None:
    tiny = torch.zeros(1, 1, 1)
    samples = [replace(make_samples(1)[0], candidate=i, clean=tiny) for i in range(2000)]
    times = np.array([p.time for p in pairs_of(samples, timesteps=3)])
    counts = np.histogram(times, bins=10, range=(0.05, 1.05))[0]
    assert counts.sum() == 6000
    # Three of ten for 2,000 samples: 600 each, standard deviation 20.
    assert abs(counts - 600).max() < 100


def test_times_and_noise_of_a_sample_do_not_depend_on_the_others() -> None:
    samples = make_samples(4)
    alone = pairs_of([samples[2]])
    among = [p for p in pairs_of(samples[::-1]) if p.sample is samples[2]]
    assert [p.time for p in alone] == [p.time for p in among]
    assert all(torch.equal(a.noise, b.noise) for a, b in zip(alone, among, strict=True))


@pytest.mark.parametrize("change", [{"run_seed": 2}, {"iteration": 3}])
def test_another_run_or_iteration_draws_anew(change: dict[str, int]) -> None:
    samples = make_samples(2)
    assert not torch.equal(pairs_of(samples)[0].noise, pairs_of(samples, **change)[0].noise)


# --- a step --------------------------------------------------------------------------------------


def test_a_step_is_a_pure_function_of_its_inputs(tiny_model: Path) -> None:
    states = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        trainer = make_trainer(tiny_model)
        stats = [train(trainer, iteration) for iteration in range(3)]
        states.append((state(trainer), stats))
    assert states[0] == states[1]
    assert states[0][0]["trained"] != lora.to_bytes(make_trainer(tiny_model).get("trained"))


def test_another_run_seed_gives_another_adapter(tiny_model: Path) -> None:
    one, two = (make_trainer(tiny_model, run_seed=seed) for seed in (1, 2))
    assert state(one) != state(two)


def test_the_order_of_samples_does_not_matter(tiny_model: Path) -> None:
    samples = make_samples(6)
    one, two = make_trainer(tiny_model), make_trainer(tiny_model)
    assert train(one, 0, samples) == train(two, 0, [samples[i] for i in (3, 5, 0, 4, 1, 2)])
    assert state(one) == state(two)


def test_a_fresh_trainer_acts_as_the_base(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    for policy in POLICIES:
        made = trainer.get(policy)
        assert all(not made.delta(name).any() for name in made.pairs)
    assert trainer.get("trained").alpha == 8.0
    stats = train(trainer, 0)
    assert stats.kl == pytest.approx(0.0, abs=1e-12)


def test_the_base_never_changes(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    before = base_weights(trainer)
    for iteration in range(2):
        train(trainer, iteration)
    after = base_weights(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(
        parameter.requires_grad
        for name, parameter in trainer._model.transformer.named_parameters()
        if ".lora_" not in name
    )


@pytest.mark.parametrize("micro_batch", [1, 5, 12, 17])
def test_micro_batches_and_their_padding_do_not_matter(tiny_model: Path, micro_batch: int) -> None:
    """4 samples at 3 times: 12 pairs. Equal up to the order of additions."""
    reference = make_trainer(tiny_model, micro_batch=4)
    other = make_trainer(tiny_model, micro_batch=micro_batch)
    a, b = train(reference, 0), train(other, 0)
    assert (a.loss, a.policy_loss, a.gradient_norm, a.pairs) == pytest.approx(
        (b.loss, b.policy_loss, b.gradient_norm, b.pairs), rel=1e-4
    )
    # Adam's first step is lr * sign(gradient), so moments are compared rather than weights.
    for key, value in reference.optimizer_tensors().items():
        torch.testing.assert_close(
            other.optimizer_tensors()[key], value, rtol=1e-3, atol=1e-4 * float(value.abs().max())
        )


# --- against an evaluation of its own ------------------------------------------------------------


def velocity_of(model: Path, weights: Lora | None, pairs: list[Any]) -> Tensor:
    """Velocities through merged weights in a fresh transformer: no peft, one pair at a time."""
    transformer = SanaTransformer2DModel.from_pretrained(model / "transformer").eval()
    if weights is not None:
        names = list(weights.pairs)
        Merger(transformer, lora.pristine_weights(transformer, names)).merge(weights)
    rows = []
    with torch.no_grad():
        for p in pairs:
            noisy = (1 - p.time) * p.sample.clean + p.time * p.noise
            rows.append(
                transformer(
                    noisy[None],
                    encoder_hidden_states=p.sample.prompt.tokens[None],
                    encoder_attention_mask=p.sample.prompt.mask[None],
                    timestep=torch.tensor([p.time * 1000]),
                    return_dict=False,
                )[0]
            )
    return torch.cat(rows).double()


def test_the_loss_contrasts_trained_old_and_base(tiny_model: Path) -> None:
    """Three different policies, each evaluated through merged weights, in float64."""
    settings = {"learning_rate": 0.02, "old_decay_slope": 0.4, "old_decay_max": 0.8}
    trainer = make_trainer(tiny_model, kl_weight=0.3, nft_beta=0.7, **settings)
    train(trainer, 0)
    train(trainer, 1)
    trained, old = trainer.get("trained"), trainer.get("old")
    samples = make_samples(4, seed=5)
    pairs = pairs_of(samples, iteration=9, timesteps=3)
    v, v_old, v_base = (velocity_of(tiny_model, w, pairs).numpy() for w in (trained, old, None))
    assert min(np.abs(v - v_old).mean(), np.abs(v - v_base).mean()) > 1e-3

    losses, policies, kls = [], [], []
    for i, p in enumerate(pairs):
        x0, t = p.sample.clean.double().numpy(), p.time
        x = (1 - t) * x0 + t * p.noise.double().numpy()
        r, b = optimality(p.sample.advantage, 5.0), 0.7
        d_plus = x - t * (b * v[i] + (1 - b) * v_old[i]) - x0
        d_minus = x - t * ((1 + b) * v_old[i] - b * v[i]) - x0
        policy = r / b * (d_plus**2).mean() / np.abs(d_plus).mean()
        policy += (1 - r) / b * (d_minus**2).mean() / np.abs(d_minus).mean()
        policies.append(policy)
        kls.append(((v[i] - v_base[i]) ** 2).mean())
        losses.append(5.0 * policy + 0.3 * kls[-1])
    stats = train(trainer, 9, samples)
    assert (stats.loss, stats.policy_loss, stats.kl) == pytest.approx(
        (np.mean(losses), np.mean(policies), np.mean(kls)), rel=1e-4
    )


@pytest.mark.parametrize(("advantage", "nearer"), [(5.0, True), (-5.0, False)])
def test_training_moves_towards_good_samples_and_away_from_bad(
    tiny_model: Path, advantage: float, nearer: bool
) -> None:
    trainer = make_trainer(tiny_model, learning_rate=0.01, kl_weight=0.0)
    samples = make_samples(2, advantage=advantage)
    pairs = pairs_of(samples, iteration=0, timesteps=3)
    target = torch.stack([p.noise - p.sample.clean for p in pairs]).double()

    def distance() -> float:
        v = velocity_of(tiny_model, trainer.get("trained"), pairs)
        return float((v - target).square().mean())

    before = distance()
    for _ in range(3):
        train(trainer, 0, samples)
    assert (distance() < before) == nearer


# --- what follows a step -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slope", "ceiling", "ema_decay"),
    [(0.001, 0.5, 0.9), (0.3, 0.5, 0.9), (0.0, 0.0, 0.2), (1.0, 0.7, 0.0)],
)
def test_old_and_ema_follow_by_their_formulas(
    tiny_model: Path, slope: float, ceiling: float, ema_decay: float
) -> None:
    """old := eta old + (1 - eta) trained, eta = min(slope s, max);
    ema := d ema + (1 - d) trained, d = min((1 + s)/(10 + s), ema_decay)."""
    trainer = make_trainer(
        tiny_model, old_decay_slope=slope, old_decay_max=ceiling, ema_decay=ema_decay
    )
    old, ema = (copy.deepcopy(trainer.get(name).pairs) for name in ("old", "ema"))
    for step in (1, 2, 3):
        train(trainer, step)
        trained = trainer.get("trained").pairs
        eta = min(slope * step, ceiling)
        decay = min((1 + step) / (10 + step), ema_decay)
        for name, factors in trained.items():
            old[name] = tuple(
                eta * o + (1 - eta) * t for o, t in zip(old[name], factors, strict=True)
            )
            ema[name] = tuple(
                decay * e + (1 - decay) * t for e, t in zip(ema[name], factors, strict=True)
            )
            for i in range(2):
                torch.testing.assert_close(trainer.get("old").pairs[name][i], old[name][i])
                torch.testing.assert_close(trainer.get("ema").pairs[name][i], ema[name][i])
    assert trainer.step == 3


def test_what_get_returns_is_a_copy(tiny_model: Path) -> None:
    """An evaluation that plays with the EMA or the live factors changes no policy."""
    trainer = make_trainer(tiny_model)
    train(trainer, 0)
    before = state(trainer)
    taken = [trainer.get(name) for name in ("trained", "old")]
    kept = lora.to_bytes(taken[0])
    for made in taken:
        for a, b in made.pairs.values():
            a.add_(1.0)
            b.add_(1.0)
    assert state(trainer) == before
    held = trainer.get("trained")
    train(trainer, 1)
    assert lora.to_bytes(held) == kept


def test_put_copies(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    train(trainer, 0)
    given = trainer.get("trained")
    trainer.put("old", given)
    for a, _ in given.pairs.values():
        a.zero_()
    assert lora.to_bytes(trainer.get("old")) == lora.to_bytes(trainer.get("trained"))


# --- what is not trained on ----------------------------------------------------------------------


def poisoned(how: str) -> list[Sample]:
    samples = make_samples(4)
    bad = samples[1]
    match how:
        case "NaN latent":
            clean = bad.clean.clone()
            clean[0, 0, 0] = float("nan")
            samples[1] = replace(bad, clean=clean)
        case "infinite latents":
            samples[1] = replace(bad, clean=torch.full_like(bad.clean, float("inf")))
        case "huge latents":
            samples[1] = replace(bad, clean=bad.clean * 1e30)
        case "NaN advantage":
            samples[1] = replace(bad, advantage=float("nan"))
        case "NaN prompt":
            prompt = replace(bad.prompt, tokens=bad.prompt.tokens * float("nan"))
            samples[1] = replace(bad, prompt=prompt)
    return samples


@pytest.mark.parametrize(
    "how", ["NaN latent", "infinite latents", "huge latents", "NaN advantage", "NaN prompt"]
)
def test_what_is_not_finite_changes_nothing_and_is_counted(tiny_model: Path, how: str) -> None:
    trainer, untouched = make_trainer(tiny_model), make_trainer(tiny_model)
    for one in (trainer, untouched):
        train(one, 0)
    stats = train(trainer, 1, poisoned(how))
    assert stats.skipped == "loss or gradient not finite"
    assert (trainer.step, trainer.skipped_steps) == (1, 1)
    assert state(trainer) == state(untouched)
    # Nothing of it lingers, in gradients or moments.
    assert train(trainer, 2) == train(untouched, 2)
    assert state(trainer) == state(untouched)
    assert (trainer.step, trainer.skipped_steps) == (2, 1)


def test_nothing_to_train_on_changes_nothing_and_says_why(tiny_model: Path) -> None:
    trainer = make_trainer(tiny_model)
    before = state(trainer)
    stats = train(trainer, 0, [])
    assert stats.skipped == "every group has zero spread"
    assert (stats.pairs, trainer.step, trainer.skipped_steps) == (0, 0, 0)
    assert state(trainer) == before


def test_optimizer_tensors_round_trip(tiny_model: Path) -> None:
    trainer, other = make_trainer(tiny_model), make_trainer(tiny_model)
    assert trainer.optimizer_tensors() == {}
    train(trainer, 0)
    tensors = trainer.optimizer_tensors()
    names = trainer.get("trained").pairs
    assert set(tensors) == {
        f"{name}.{factor}.{key}"
        for name in names
        for factor in "AB"
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    other.load_optimizer_tensors(tensors)
    for value in tensors.values():
        value.zero_()
    assert state(other) != state(make_trainer(tiny_model))
    again = other.optimizer_tensors()
    assert all(torch.equal(v, again[k]) for k, v in trainer.optimizer_tensors().items())
    other.load_optimizer_tensors({})
    assert other.optimizer_tensors() == {}


def test_rollout_steps_bound_the_times() -> None:
    assert {p.time for p in pairs_of(make_samples(8), rollout_steps=2, timesteps=2)} == {0.5, 1.0}
    assert ROLLOUT_STEPS == 10
