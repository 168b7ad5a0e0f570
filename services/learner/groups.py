"""What the learner does with one selection: regenerate, score, audit. No state of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from solrl.clients.http import retrying
from solrl.clients.regenerator import Regenerated, RegeneratorClient
from solrl.clients.reward import RewardClient, Scores
from solrl.config import Config
from solrl.errors import InputError, UnavailableError, VersionError
from solrl.records import Candidate, SelectionRecord
from solrl.seeds import candidate_seed

T = TypeVar("T")


@dataclass(frozen=True)
class AuditedCandidate:
    """Proxy reward beside the reward at full precision: 10 steps (true) and 6 steps (ceiling)."""

    candidate: int
    proxy: float
    true: float
    ceiling: float


@dataclass
class Group:
    """One prompt of an iteration, regenerated. `kept[i]` has `latents[i]` and `rewards[i]`.

    `excluded` counts kept candidates whose latents or reward were not finite; they are gone
    from the lists.
    """

    selection: SelectionRecord
    kept: list[Candidate]
    latents: NDArray[np.float32]
    rewards: list[float]
    precision: str
    reward_version: str
    images: NDArray[np.uint8]
    excluded: int
    audit: list[AuditedCandidate] = field(default_factory=list)


class Seconds(dict[str, float]):
    """Wall seconds by phase."""

    def timed(self, phase: str, call: Callable[[], T]) -> T:
        begin = time.perf_counter()
        try:
            return call()
        finally:
            self[phase] = self.get(phase, 0.0) + time.perf_counter() - begin


class GroupMaker:
    """Calls the regenerator and the reward service with the run's settings and patience."""

    def __init__(
        self,
        config: Config,
        regenerator: RegeneratorClient,
        reward: RewardClient,
        on_wait: Callable[[str], None],
    ) -> None:
        self._config = config
        self._regenerator = regenerator
        self._reward = reward
        self._on_wait = on_wait

    def make(self, selection: SelectionRecord, *, audit: bool, seconds: Seconds) -> Group:
        """Regenerate the kept seeds at full precision with the version that explored them."""
        kept = list(selection.kept)
        made = seconds.timed("regenerate", lambda: self._regenerate(selection, kept))
        scores = seconds.timed("score", lambda: self.score(made.images, selection.prompt))
        usable = [
            i
            for i, value in enumerate(scores.values)
            if value is not None and np.isfinite(made.latents[i]).all()
        ]
        group = Group(
            selection=selection,
            kept=[kept[i] for i in usable],
            latents=made.latents[usable],
            rewards=[float(scores.values[i] or 0.0) for i in usable],
            precision=made.precision,
            reward_version=scores.version,
            images=made.images[usable],
            excluded=len(kept) - len(usable),
        )
        if audit:
            group.audit = seconds.timed("other", lambda: self._audit(selection))
        return group

    def score(
        self, images: NDArray[np.uint8], prompts: str | Sequence[str], name: str | None = None
    ) -> Scores:
        """Scores of pictures [n,H,W,3]; one prompt for all, or one each."""
        texts = [prompts] * len(images) if isinstance(prompts, str) else list(prompts)
        return self._patiently(
            lambda: self._reward.score(images, texts, name or self._config.reward.name)
        )

    def _regenerate(
        self,
        selection: SelectionRecord,
        candidates: Sequence[Candidate],
        steps: int | None = None,
    ) -> Regenerated:
        made = self._patiently(
            lambda: self._regenerator.regenerate(
                selection.prompt,
                [c.seed for c in candidates],
                steps=steps or self._config.regenerate.steps,
                policy=selection.policy_version,
                request_id=selection.request_id,
            )
        )
        if made.adapter_sha256 != selection.adapter_sha256:
            raise InputError(
                f"the regenerator serves version {selection.policy_version} as adapter "
                f"{made.adapter_sha256}, explored with {selection.adapter_sha256}"
            )
        return made

    def _audit(self, selection: SelectionRecord) -> list[AuditedCandidate]:
        """Seeds drawn from all N, not from the kept extremes, so agreement is not flattered."""
        scored = [c for c in selection.candidates if c.proxy_reward is not None]
        order = sorted(
            scored,
            key=lambda c: candidate_seed(
                self._config.run.seed, "audit", selection.iteration, selection.slot, c.candidate
            ),
        )
        chosen = sorted(order[: self._config.audit.seeds], key=lambda c: c.candidate)
        true, ceiling = (
            self.score(self._regenerate(selection, chosen, steps).images, selection.prompt).values
            for steps in (self._config.regenerate.steps, selection.steps)
        )
        return [
            AuditedCandidate(c.candidate, c.proxy_reward, t, u)
            for c, t, u in zip(chosen, true, ceiling, strict=True)
            if c.proxy_reward is not None and t is not None and u is not None
        ]

    def _patiently(self, call: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return call()
            except VersionError as error:
                # A replica that was restarted loads the announced version again by itself.
                raise UnavailableError(str(error)) from error

        return retrying(attempt, retry_for=self._config.services.retry_for, on_wait=self._on_wait)
