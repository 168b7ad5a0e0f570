"""Seeds: pure functions of where a candidate stands. No other randomness exists in a run."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

from solrl.errors import InputError

Domain = Literal["explore", "audit", "eval", "canary", "train_noise", "prompts"]

#: Exact in JSON numbers and in browsers.
SEED_LIMIT = 2**53


def candidate_seed(run_seed: int, domain: Domain, iteration: int, slot: int, candidate: int) -> int:
    """Seed of one candidate: 0 <= seed < 2**53, the same in every process and release.

    `slot` is the prompt's place in the iteration, so the same prompt twice is two groups with
    different seeds.
    """
    if domain not in get_args(Domain):
        raise InputError(f"seed domain {domain!r} is not one of {', '.join(get_args(Domain))}")
    fields = f"solrl-seed-1|{run_seed}|{domain}|{iteration}|{slot}|{candidate}"
    digest = hashlib.blake2b(fields.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEED_LIMIT


def check_seed(seed: int) -> int:
    """Return `seed`, or raise InputError naming the range."""
    if not 0 <= seed < SEED_LIMIT:
        raise InputError(f"seed {seed} is out of range: 0 <= seed < 2**53 ({SEED_LIMIT})")
    return seed


def prompt_order(run_seed: int, prompts: int, first: int, count: int) -> list[int]:
    """Indices of `count` draws beginning with draw number `first`.

    A permutation an epoch without replacement, so every prompt comes up once before any comes
    up twice; a pure function of the draw number, so resuming needs no state.
    """
    order: list[int] = []
    while len(order) < count:
        epoch, place = divmod(first + len(order), prompts)
        # Sorted by hash: unlike random.shuffle, the same in every release of Python.
        seeds = [candidate_seed(run_seed, "prompts", epoch, 0, i) for i in range(prompts)]
        permutation = sorted(range(prompts), key=seeds.__getitem__)
        order += permutation[place : place + count - len(order)]
    return order
