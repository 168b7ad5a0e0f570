"""One TOML a run: every setting with its default and a line of explanation.

Precedence: `--section.key value` > environment `SOLRL__SECTION__KEY` > the TOML file > default.
Reads no torch, so that light commands and the gateway stay light.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from solrl.errors import ConfigError
from solrl.seeds import SEED_LIMIT

PrecisionName = Literal["auto", "nvfp4", "nvfp4-emulated", "fp8", "bf16", "fp32"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Name of the run: its directory, its queues, its adapters.",
    )
    seed: int = Field(
        0, ge=0, lt=SEED_LIMIT, description="Every other seed is a function of this one."
    )
    iterations: int = Field(30, ge=1, description="Optimizer steps; one an iteration.")
    directory: Path = Field(
        Path("runs"), description="Where run directories lie; shared by all services."
    )
    adapters: Path | None = Field(
        None,
        description="Where behaviour policies are published, in a folder a run; none takes `adapters` in the run's directory. A folder of its own lets explorer and regenerator see adapters and nothing else.",
    )
    arm: Literal["24-in-96 (NVFP4)"] = Field(
        "24-in-96 (NVFP4)", description="Label of the arm, as in the paper's tables."
    )
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept.")


class ModelSection(Section):
    base: str = Field("build/zoo/tiny-sana", description="A local diffusers pipeline folder.")
    family: Literal["sana"] = Field("sana", description="Model family; one file in solrl/models.")
    height: int = Field(32, ge=8, description="Picture height in pixels.")
    width: int = Field(32, ge=8, description="Picture width in pixels.")
    max_prompt_tokens: int = Field(
        16,
        ge=2,
        description="Tokens of a prompt the text encoder reads; the rest is cut, and said.",
    )
    cache: Path = Field(
        Path("build"), description="Assembled models and prompt embeddings; shared by all services."
    )


class PromptSection(Section):
    train: Path = Field(
        Path("zoo/data/prompts/train.txt"), description="Prompts trained on, one a line."
    )
    unseen: Path = Field(
        Path("zoo/data/prompts/unseen.txt"),
        description="Prompts never trained on, for evaluation only.",
    )
    per_iteration: int = Field(
        4,
        ge=1,
        description="Prompts drawn an iteration (paper: 48), without replacement within an epoch.",
    )


class ExploreSection(Section):
    candidates: int = Field(96, ge=2, description="N: candidates a prompt.")
    keep: int = Field(24, description="K: candidates kept, half best and half worst; even, >= 2.")
    steps: int = Field(6, ge=1, description="Solver steps of a candidate (paper: 6).")
    precision: PrecisionName = Field(
        "nvfp4-emulated", description="Precision of the explorer's model."
    )
    skip: tuple[str, ...] | None = Field(
        None,
        description="Patterns of module names left in high precision; none takes the family's list (solrl/models).",
    )
    activation_scale: Literal["row", "tensor"] = Field(
        "row",
        description="Activation amax a token row, or a tensor (then a picture depends on its batch mates).",
    )
    micro_batch: int = Field(
        32, ge=1, description="Pictures a forward; always padded to this, so shapes never change."
    )


class RegenerateSection(Section):
    steps: int = Field(10, ge=1, description="Solver steps of a regenerated picture (paper: 10).")
    precision: PrecisionName = Field("auto", description="Precision of the regenerator's model.")
    micro_batch: int = Field(24, ge=1, description="Pictures a forward; always padded to this.")


class RewardSection(Section):
    name: str = Field("emoji_clip", description="Reward trained on.")
    judge: str = Field(
        "concept_judge", description="Independent judge, never trained on; evaluation only."
    )
    zoo: Path = Field(Path("zoo"), description="Folder with the scorers' weights.")
    micro_batch: int = Field(96, ge=1, description="Pictures a scorer takes at once.")


class TrainSection(Section):
    rank: int = Field(32, ge=1, description="LoRA rank r.")
    alpha: float = Field(64.0, gt=0, description="LoRA alpha; the adapter acts as (alpha/r) B A.")
    learning_rate: float = Field(3e-4, gt=0, description="AdamW learning rate (paper: 3e-4).")
    adam_betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW moment decays.")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(1e-4, ge=0, description="AdamW weight decay.")
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm.")
    nft_beta: float = Field(
        1.0,
        gt=0,
        description="DiffusionNFT's guidance strength b between the old and the trained velocity.",
    )
    kl_weight: float = Field(
        1e-4, ge=0, description="Weight of the squared distance to the base velocity."
    )
    adv_clip: float = Field(5.0, gt=0, description="Advantages are clipped to +- this.")
    advantage_scale: Literal["global_std", "group_std", "none"] = Field(
        "global_std",
        description="What centred rewards are divided by: std of all kept rewards of the iteration, of the prompt's, or 1.",
    )
    centring: Literal["kept", "all"] = Field(
        "kept",
        description="Centre on the prompt's kept K true rewards (paper), or on its N proxy rewards.",
    )
    timesteps: int = Field(
        6, ge=1, description="Times the loss is taken at a sample, out of its own rollout times."
    )
    micro_batch: int = Field(48, ge=1, description="Sample-time pairs a training forward.")
    old_decay_slope: float = Field(
        0.001,
        ge=0,
        description="eta = min(slope * step, max): how much of the old policy stays in old := eta old + (1 - eta) trained.",
    )
    old_decay_max: float = Field(0.5, ge=0, lt=1, description="Upper bound of eta.")
    ema_decay: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="Largest decay of the evaluation EMA, min((1 + s) / (10 + s), this).",
    )
    max_staleness: Literal[0] = Field(0, description="Policy versions between generation and use.")


class AuditSection(Section):
    seeds: int = Field(
        24,
        ge=8,
        description="Seeds a prompt and iteration, drawn from all N, made again at full precision to measure rank agreement.",
    )
    every: int = Field(5, ge=1, description="Audit every so many iterations, the first included.")


class EvaluateSection(Section):
    steps: int = Field(10, ge=1, description="Solver steps of an evaluation picture.")
    train_images: int = Field(10, ge=2, description="Pictures a train prompt.")
    unseen_images: int = Field(20, ge=2, description="Pictures an unseen prompt.")
    guided_images: int = Field(
        8, ge=2, description="Pictures a prompt of the rows 'with CFG'; each costs two."
    )
    references: Path | None = Field(
        None,
        description="Folder of real pictures named `<prompt>.png`, for the score of real pictures.",
    )
    guidance: float = Field(
        2.5, ge=1, description="Classifier-free guidance scale of the rows 'with CFG'."
    )
    micro_batch: int = Field(24, ge=1, description="Pictures a forward.")


class ServiceSection(Section):
    redis: str = Field("redis://127.0.0.1:6379/0", description="Redis URL.")
    explorer: str = Field(
        "127.0.0.1:50051", description="host:port of the explorer's gRPC gateway."
    )
    triton: str = Field("127.0.0.1:8001", description="host:port of Triton's gRPC.")
    regenerator: str = Field("http://127.0.0.1:8010", description="URL of the regenerator.")
    reward: str = Field("http://127.0.0.1:8020", description="URL of the reward service.")
    call_timeout: float = Field(
        120.0, gt=0, description="Deadline of one call between services, seconds."
    )
    retry_for: float = Field(
        60.0,
        ge=0,
        description="Seconds a failing neighbour is retried before the run pauses and says why.",
    )
    selection_timeout: float = Field(
        300.0, gt=0, description="Seconds the learner waits for the selections of an iteration."
    )
    reload_timeout: float = Field(
        60.0, gt=0, description="Seconds the learner waits for every replica to load a version."
    )
    learner_port: int = Field(
        0, ge=0, le=65535, description="Port of the learner's status HTTP; 0 takes a free one."
    )
    people_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Largest share of its time the regenerator or the reward service gives to people's requests while a run goes on.",
    )


class Config(Section):
    """Everything a run depends on."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    prompts: PromptSection = PromptSection()
    explore: ExploreSection = ExploreSection()
    regenerate: RegenerateSection = RegenerateSection()
    reward: RewardSection = RewardSection()
    train: TrainSection = TrainSection()
    audit: AuditSection = AuditSection()
    evaluate: EvaluateSection = EvaluateSection()
    services: ServiceSection = ServiceSection()

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        n, k = self.explore.candidates, self.explore.keep
        if k < 2:
            raise ValueError(
                f"explore.keep = {k} is fewer than 2: an advantage compares a picture with its group; keep 2 or more"
            )
        if k % 2:
            raise ValueError(
                f"explore.keep = {k} is odd: half are kept as best and half as worst; use {k - 1} or {k + 1}"
            )
        if k > n:
            raise ValueError(
                f"explore.keep = {k} is more than explore.candidates = {n}: K of N are kept; lower keep or raise candidates"
            )
        if self.train.timesteps > self.regenerate.steps:
            raise ValueError(
                f"train.timesteps = {self.train.timesteps} is more than regenerate.steps = {self.regenerate.steps}: times are drawn from the sample's own rollout"
            )
        if not all(0 <= decay < 1 for decay in self.train.adam_betas):
            raise ValueError(
                f"train.adam_betas = {list(self.train.adam_betas)}: each must be at least 0 and below 1"
            )
        if self.audit.seeds > n:
            raise ValueError(
                f"audit.seeds = {self.audit.seeds} is more than explore.candidates = {n}"
            )
        return self


def _nearest(name: str, known: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(sorted(known))}"


def _explain(error: ErrorDetails) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "configuration"
    if error["type"] == "extra_forbidden":
        fields = Config.model_fields
        if len(error["loc"]) > 1:
            section = fields[str(error["loc"][0])].annotation
            assert section is not None
            fields = section.model_fields
        return f"unknown key {path!r}{_nearest(str(error['loc'][-1]), list(fields))}"
    return (
        f"{path}: {error['msg'].removeprefix('Value error, ')} (seen: {error['input']!r})"
        if error["loc"]
        else error["msg"].removeprefix("Value error, ")
    )


def _scalar(text: str, section: str, key: str) -> Any:
    """A command-line or environment value: TOML when it parses as TOML, else a plain string.

    A key that takes text takes `20261130` as text too.
    """
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    known = Config.model_fields.get(section)
    fields = getattr(known and known.annotation, "model_fields", {})
    kind = fields[key].annotation if key in fields else None
    takes_text = bool({str, Path} & {kind, *get_args(kind)})
    return text if takes_text and not isinstance(value, str) else value


def _put(tree: dict[str, Any], dotted: str, text: str) -> None:
    section, dot, key = dotted.partition(".")
    if not dot or not key:
        raise ConfigError(f"override {dotted!r} is not of the form section.key")
    inner = tree.setdefault(section, {})
    if not isinstance(inner, dict):
        raise ConfigError(f"{section!r} is a section, not a value")
    inner[key] = _scalar(text, section, key)


def load_config(
    path: Path | None,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Read, merge and check. Raises ConfigError with every fault found, one a line."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"configuration {path} is not TOML: {error}") from error
    sources: dict[str, str] = {}
    for name, text in (os.environ if environment is None else environment).items():
        if match := re.fullmatch(r"SOLRL__([A-Z]+)__([A-Z0-9_]+)", name):
            dotted = f"{match[1]}.{match[2]}".lower()
            _put(tree, dotted, text)
            sources[dotted] = f", from the environment variable {name}"
    for dotted, text in (overrides or {}).items():
        _put(tree, dotted, text)
        sources[dotted] = f", from --{dotted}"
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        where = f" in {path}" if path else ""
        faults = "\n".join(
            f"  {_explain(e)}{sources.get('.'.join(map(str, e['loc'][:2])), '')}"
            for e in error.errors()
        )
        raise ConfigError(f"configuration wrong{where}:\n{faults}") from error


def to_toml(config: Config) -> str:
    """The resolved file, every default included; loads back to an equal Config."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        # JSON's strings, numbers, booleans and flat arrays are TOML's too, except that TOML has
        # no null and no surrogate pairs.
        lines += [
            f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in values.items() if v is not None
        ]
        lines.append("")
    return "\n".join(lines)


def _allowed(field: FieldInfo) -> str:
    """Type and bounds of a key, or the words it may be."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(kind))
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in signs.items()
        if hasattr(bound, name)
    ]
    name = kind.__name__ if isinstance(kind, type) else str(kind).replace("pathlib.", "")
    return f"{name.replace(' | ', ' or ')} {', '.join(bounds)}".strip()


def documentation() -> str:
    """Markdown tables of every key, allowed values, default and meaning; docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "Generated by `python -m solrl.config`. Override a key with `--section.key value` or `SOLRL__SECTION__KEY=value`.",
        "",
    ]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert section is not None
        lines += [f"## {name}", "", "| key | allowed | default | meaning |", "|---|---|---|---|"]
        for key, inner in section.model_fields.items():
            default = inner.default.as_posix() if isinstance(inner.default, Path) else inner.default
            lines.append(
                f"| `{key}` | {_allowed(inner)} | `{json.dumps(default)}` | {inner.description} |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(documentation(), end="")
