"""What rides the queue: versioned JSON records. Seeds, scores and versions only, never pictures."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from solrl.seeds import SEED_LIMIT
from solrl.selection import Rank


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: str
    epoch: int = Field(ge=1, description="Start count of the learner; a lower one is refused.")
    iteration: int = Field(ge=0)
    slot: int = Field(ge=0, description="The prompt's place in the iteration.")
    request_id: str
    trace_id: str

    @property
    def key(self) -> tuple[str, int, int]:
        """Identity of the group: a second copy of the same key is ignored."""
        return (self.run, self.iteration, self.slot)


class PromptRecord(Record):
    """learner -> gateway: explore this prompt with these settings."""

    prompt: str = Field(min_length=1)
    prompt_index: int = Field(ge=0)
    run_seed: int = Field(ge=0, lt=SEED_LIMIT)
    candidates: int = Field(ge=2)
    keep: int = Field(ge=2)
    steps: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    adapter_sha256: str
    reward: str


class Candidate(BaseModel):
    """One of the N: `proxy_reward` is None when it could not be scored; never a made-up number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    candidate: int = Field(ge=0)
    seed: int = Field(ge=0, lt=SEED_LIMIT)
    proxy_reward: float | None = Field(allow_inf_nan=False)
    selected_as: Rank | None = None


class SelectionRecord(Record):
    """gateway -> learner: all N (seed, proxy reward) pairs, those kept marked."""

    prompt: str
    prompt_index: int
    candidates: tuple[Candidate, ...]
    policy_version: int
    adapter_sha256: str
    precision: str = Field(description="What really ran.")
    steps: int
    solver: str
    reward: str
    reward_version: str
    seconds_explore: float = Field(ge=0)
    seconds_score: float = Field(ge=0)
    replica: str

    @property
    def kept(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.selected_as is not None)


class Announcement(BaseModel):
    """learner -> explorer and regenerator replicas: load this version of the behaviour policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    run: str
    epoch: int = Field(ge=1)
    version: int = Field(ge=0)
    sha256: str
    path: str = Field(description="Adapter folder, as seen by the services.")
    base_sha256: str


class ReplicaState(BaseModel):
    """A replica's answer under its stable id: what it serves, or why it refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    kind: Literal["explorer", "regenerator"]
    id: str
    address: str
    base_sha256: str
    precision: str
    fp4_share: float = Field(0.0, description="Share of block multiply-adds in FP4.")
    run: str | None = None
    epoch: int | None = None
    version: int | None = None
    sha256: str | None = None
    modules_bound: int = 0
    modules_expected: int = 0
    seconds: float = Field(0.0, description="Swap time, canary excluded.")
    canary: str = Field("", description="Digest of one velocity evaluation on a fixed seed.")
    error: str | None = None
