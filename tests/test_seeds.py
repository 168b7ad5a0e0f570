"""Seeds are pure functions of their indices, the same in every process and release."""

from __future__ import annotations

import subprocess
import sys

import pytest

from solrl.errors import InputError
from solrl.seeds import SEED_LIMIT, candidate_seed, check_seed, prompt_order

# Golden: a change here means that no published run can be repeated.
GOLDEN = [
    ((0, "explore", 0, 0, 0), 5703315388005899),
    ((0, "explore", 0, 0, 95), 2103743203140426),
    ((1, "explore", 17, 3, 42), 5927793222321453),
    ((SEED_LIMIT - 1, "eval", 2**31, 47, 7), 7397584699132018),
    ((1, "audit", 17, 3, 42), 3187427791923269),
    ((1, "train_noise", 17, 3, 42), 6493945504434681),
    ((1, "canary", 0, 0, 0), 4557791830792521),
    ((1, "prompts", 2, 0, 5), 4041049317482382),
]


@pytest.mark.parametrize(("fields", "seed"), GOLDEN)
def test_candidate_seed_is_golden(fields: tuple[int, str, int, int, int], seed: int) -> None:
    assert candidate_seed(*fields) == seed  # type: ignore[arg-type]


def test_candidate_seed_is_the_same_in_another_process() -> None:
    # PYTHONHASHSEED differs between them: nothing may depend on hash().
    code = "from solrl.seeds import *; print(candidate_seed(1, 'explore', 2, 3, 4))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert seen == {f"{candidate_seed(1, 'explore', 2, 3, 4)}\n"}


def test_all_seeds_of_an_iteration_are_distinct_and_in_range() -> None:
    seeds = [
        candidate_seed(7, "explore", iteration, slot, candidate)
        for iteration in range(3)
        for slot in range(48)
        for candidate in range(96)
    ]
    assert len(set(seeds)) == len(seeds)
    # torch's CPU generator starts from the low 32 bits: a group must be distinct there too.
    groups = [seeds[i : i + 96] for i in range(0, len(seeds), 96)]
    assert all(len({seed % 2**32 for seed in group}) == 96 for group in groups)
    assert all(0 <= seed < SEED_LIMIT for seed in seeds)
    # Spread over the whole range: a truncated digest would leave the upper part empty.
    assert max(seeds) > 0.99 * SEED_LIMIT
    assert min(seeds) < 0.01 * SEED_LIMIT


@pytest.mark.parametrize("field", range(5))
def test_every_field_counts(field: int) -> None:
    fields: list[int | str] = [1, "explore", 2, 3, 4]
    before = candidate_seed(*fields)  # type: ignore[arg-type]
    fields[field] = "audit" if field == 1 else int(fields[field]) + 10
    assert candidate_seed(*fields) != before  # type: ignore[arg-type]


def test_digits_cannot_move_between_fields() -> None:
    assert candidate_seed(0, "explore", 1, 11, 1) != candidate_seed(0, "explore", 11, 1, 1)


def test_unknown_domain_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'exlpore' is not one of explore, audit, eval"):
        candidate_seed(0, "exlpore", 0, 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 1, SEED_LIMIT - 1])
def test_seed_in_range(seed: int) -> None:
    assert check_seed(seed) == seed


@pytest.mark.parametrize("seed", [-1, SEED_LIMIT, 2**64])
def test_seed_out_of_range_says_seen_and_allowed(seed: int) -> None:
    with pytest.raises(InputError, match=rf"seed {seed} is out of range: 0 <= seed < 2\*\*53"):
        check_seed(seed)


def test_prompt_order_is_golden() -> None:
    assert prompt_order(1, 10, 0, 20) == [
        0,
        1,
        4,
        2,
        5,
        9,
        6,
        8,
        7,
        3,
        2,
        4,
        5,
        3,
        8,
        9,
        0,
        6,
        7,
        1,
    ]


@pytest.mark.parametrize("prompts", [1, 2, 5, 97])
def test_prompt_order_is_a_permutation_an_epoch(prompts: int) -> None:
    draws = prompt_order(3, prompts, 0, 4 * prompts)
    epochs = [draws[i * prompts : (i + 1) * prompts] for i in range(4)]
    assert all(sorted(epoch) == list(range(prompts)) for epoch in epochs)


def test_epochs_and_runs_are_ordered_differently() -> None:
    first, second = prompt_order(3, 50, 0, 50), prompt_order(3, 50, 50, 50)
    assert first != second
    assert first != prompt_order(4, 50, 0, 50)
    assert first != list(range(50))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 48])
def test_prompt_order_does_not_depend_on_where_it_is_cut(chunk: int) -> None:
    whole = prompt_order(5, 11, 0, 96)
    parts = [prompt_order(5, 11, first, chunk) for first in range(0, 96, chunk)]
    assert [index for part in parts for index in part][:96] == whole


def test_prompt_order_starts_anywhere() -> None:
    assert prompt_order(5, 11, 40, 0) == []
    assert prompt_order(5, 11, 40, 9) == prompt_order(5, 11, 0, 49)[40:]
