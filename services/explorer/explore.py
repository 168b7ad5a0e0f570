"""Exploring one prompt: N candidates from Triton, scored as they arrive, the K extremes kept.

One function for the gRPC call and the queue loop, so both choose the same seeds.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.explorer.triton_client import Batch, CancelledCall, Policy, TritonClient
from solrl.clients.http import FIRST_WAIT, LONGEST_WAIT, Priority, retrying
from solrl.clients.reward import RewardClient, RewardInfo, Scores
from solrl.errors import InputError, UnavailableError, VersionError
from solrl.metrics import Metrics
from solrl.records import Candidate
from solrl.seeds import check_seed
from solrl.selection import Rank, select_extremes

#: Candidates a request may ask for; Triton's queue takes no more at once.
CANDIDATES_LIMIT = 1024

logger = logging.getLogger("solrl.explorer")


@dataclass(frozen=True)
class Ask:
    """What to explore. Raises InputError for what can never be done.

    `sha256` None takes whichever adapter has the version; else another one is refused.
    """

    prompt: str
    seeds: tuple[int, ...]
    keep: int
    steps: int
    reward: str
    guidance: float = 1.0
    policy: Policy = "current"
    sha256: str | None = None
    request_id: str | None = None

    def __post_init__(self) -> None:
        n, k = len(self.seeds), self.keep
        if not self.prompt.strip():
            raise InputError("the prompt is empty; describe the picture in words")
        if k < 2 or k % 2:
            raise InputError(
                f"keep = {k}: half are kept as best, half as worst; give an even K >= 2"
            )
        if not k <= n <= CANDIDATES_LIMIT:
            raise InputError(
                f"{n} seeds were given: N must be at least keep = {k} and at most "
                f"{CANDIDATES_LIMIT}"
            )
        for seed in self.seeds:
            check_seed(seed)
        if len(set(self.seeds)) < n:
            twice = next(seed for seed in self.seeds if self.seeds.count(seed) > 1)
            raise InputError(f"seed {twice} is given twice; the N seeds must be distinct")


@dataclass(frozen=True)
class Scored:
    """One candidate with its picture uint8 [H,W,3]; `error` says why it has no reward."""

    candidate: int
    seed: int
    proxy_reward: float | None
    error: str | None
    image: NDArray[np.uint8]


@dataclass(frozen=True)
class Outcome:
    """All N candidates in the order of the seeds, those kept marked.

    `kept` = (candidate, rank), best first. Seconds are computing time of this request's share,
    without waiting for others. version None = base.
    """

    candidates: tuple[Candidate, ...]
    kept: tuple[tuple[int, Rank], ...]
    excluded: int
    version: int | None
    sha256: str
    precision: str
    solver: str
    nfe: int
    reward_version: str
    seconds_explore: float
    seconds_score: float
    truncated: bool


def explore(
    ask: Ask,
    *,
    triton: TritonClient,
    reward: RewardClient,
    retry_for: float,
    timeout: float,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Scored | Outcome]:
    """Yield candidates as they are scored, then the outcome. Closing the iterator cancels all.

    Scoring of one micro-batch overlaps the generation of the next, with which its candidates are
    yielded. What may pass is retried for
    `retry_for` seconds without progress; after that, and after `timeout` seconds in all,
    UnavailableError. A refused or unscorable picture is excluded, never given a number.
    Raises CancelledCall once `cancelled()`, InputError, and VersionError when the policy asked for
    is not the one served.
    """
    deadline = time.monotonic() + timeout
    place = {seed: index for index, seed in enumerate(ask.seeds)}
    batches: list[Batch] = []
    scores: list[Scores] = []
    scored: list[Scored] = []

    def check() -> None:
        if cancelled():
            raise CancelledCall("the caller went away")
        if time.monotonic() > deadline:
            raise UnavailableError(f"exploring {ask.prompt!r} took longer than {timeout:.0f} s")

    def waiting(why: str) -> None:
        check()
        logger.warning("trying again: %s", why)

    def take(batch: Batch, result: Scores) -> Iterator[Scored]:
        scores.append(result)
        for seed, value, error, image in zip(
            batch.seeds, result.values, result.errors, batch.images, strict=True
        ):
            one = Scored(place[seed], seed, value, error, image)
            scored.append(one)
            yield one

    info = retrying(lambda: _describe(reward, ask.reward), retry_for=retry_for, on_wait=waiting)

    def score(batch: Batch) -> Scores:
        return retrying(
            lambda: _score(reward, ask, batch, info.version), retry_for=retry_for, on_wait=waiting
        )

    pending: deque[tuple[Batch, Future[Scores]]] = deque()
    scorer = ThreadPoolExecutor(1, "score")
    pictures = _pictures(
        ask,
        triton,
        size=info.input_size,
        retry_for=retry_for,
        deadline=deadline,
        check=check,
        cancelled=cancelled,
    )
    try:
        with closing(pictures):
            for batch in pictures:
                batches.append(batch)
                pending.append((batch, scorer.submit(score, batch)))
                while pending and pending[0][1].done():
                    first, future = pending.popleft()
                    yield from take(first, future.result())
        for last, future in pending:
            yield from take(last, future.result())
    finally:
        scorer.shutdown(wait=False, cancel_futures=True)
    yield _outcome(ask, batches, scores, scored)


def _describe(reward: RewardClient, name: str) -> RewardInfo:
    known = {info.name: info for info in reward.describe()}
    if name not in known:
        raise InputError(
            f"reward {name!r} is not served at {reward.url}; it has {', '.join(sorted(known))}"
        )
    return known[name]


def _pictures(
    ask: Ask,
    triton: TritonClient,
    *,
    size: int,
    retry_for: float,
    deadline: float,
    check: Callable[[], None],
    cancelled: Callable[[], bool],
) -> Generator[Batch, None, None]:
    """Every seed once, from one version, whatever happens to Triton in between."""
    left = list(ask.seeds)
    policy = ask.policy
    sha256 = ask.sha256
    give_up, pause = time.monotonic() + retry_for, FIRST_WAIT
    while left:
        check()
        try:
            for batch in triton.generate(
                ask.prompt,
                left,
                steps=ask.steps,
                guidance=ask.guidance,
                policy=policy,
                size=size,
                timeout=max(0.001, deadline - time.monotonic()),
                cancelled=cancelled,
            ):
                if batch.seeds != tuple(left[: len(batch.seeds)]):
                    raise UnavailableError(f"Triton at {triton.target} answered other seeds")
                if sha256 is not None and batch.sha256 != sha256:
                    raise VersionError(
                        f"policy version {batch.version} at {triton.target} is adapter "
                        f"{batch.sha256[:12] or 'none'}, asked for {sha256[:12] or 'none'}"
                    )
                # What a second attempt must go on with.
                policy = "base" if batch.version is None else batch.version
                sha256 = batch.sha256
                left = left[len(batch.seeds) :]
                yield batch
                give_up, pause = time.monotonic() + retry_for, FIRST_WAIT
        except UnavailableError as error:
            if time.monotonic() + pause > give_up:
                raise
            check()
            logger.warning("trying again: %s", error)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_WAIT)


def _score(reward: RewardClient, ask: Ask, batch: Batch, version: str) -> Scores:
    try:
        scores = reward.score(
            batch.images, [ask.prompt] * len(batch.seeds), ask.reward, request_id=ask.request_id
        )
    except InputError as error:
        return Scores([None] * len(batch.seeds), [str(error)] * len(batch.seeds), version, 0.0)
    if scores.version != version:
        # Numbers of two scorers must not be compared.
        raise UnavailableError(
            f"{ask.reward} at {reward.url} changed from version {version} to {scores.version}"
        )
    return scores


def _outcome(ask: Ask, batches: list[Batch], scores: list[Scores], scored: list[Scored]) -> Outcome:
    in_order = sorted(scored, key=lambda one: one.candidate)
    rewards = [math.nan if one.proxy_reward is None else one.proxy_reward for one in in_order]
    selection = select_extremes(rewards, ask.keep)
    if len(selection.kept) < 2:
        why = next(one.error for one in in_order if one.error is not None)
        raise UnavailableError(
            f"{len(selection.excluded)} of {len(in_order)} candidates of {ask.prompt!r} have no "
            f"reward, so none is better than another; the first says: {why}"
        )
    ranks = dict(selection.kept)
    first = batches[0]
    return Outcome(
        candidates=tuple(
            Candidate(
                candidate=one.candidate,
                seed=one.seed,
                proxy_reward=one.proxy_reward,
                selected_as=ranks.get(one.candidate),
            )
            for one in in_order
        ),
        kept=selection.kept,
        excluded=len(selection.excluded),
        version=first.version,
        sha256=first.sha256,
        precision=first.precision,
        solver=first.solver,
        nfe=sum(batch.nfe for batch in batches),
        reward_version=scores[0].version,
        seconds_explore=sum(batch.seconds for batch in batches),
        seconds_score=sum(one.seconds for one in scores),
        truncated=first.truncated,
    )


def count(metrics: Metrics, lane: Priority, outcome: Outcome) -> None:
    """Count one exploration that came to its end."""
    candidates, precision = len(outcome.candidates), outcome.precision
    metrics.counter("solrl_explorations_total", lane=lane).inc()
    metrics.counter("solrl_candidates_total", lane=lane, precision=precision).inc(candidates)
    metrics.counter("solrl_excluded_candidates_total").inc(outcome.excluded)
    metrics.counter("solrl_images_total", precision=precision).inc(candidates)
    metrics.counter("solrl_nfe_total", precision=precision).inc(outcome.nfe)
    metrics.counter("solrl_busy_seconds_total").inc(outcome.seconds_explore)
    metrics.histogram("solrl_phase_seconds", phase="explore").observe(outcome.seconds_explore)
    metrics.histogram("solrl_phase_seconds", phase="score").observe(outcome.seconds_score)
