from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rank(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RANK_UNSPECIFIED: _ClassVar[Rank]
    RANK_BEST: _ClassVar[Rank]
    RANK_WORST: _ClassVar[Rank]
RANK_UNSPECIFIED: Rank
RANK_BEST: Rank
RANK_WORST: Rank

class ExploreRequest(_message.Message):
    __slots__ = ("prompt", "seeds", "keep", "steps", "guidance", "base", "policy_version", "reward", "thumbnails")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    THUMBNAILS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    seeds: _containers.RepeatedScalarFieldContainer[int]
    keep: int
    steps: int
    guidance: float
    base: bool
    policy_version: int
    reward: str
    thumbnails: bool
    def __init__(self, prompt: _Optional[str] = ..., seeds: _Optional[_Iterable[int]] = ..., keep: _Optional[int] = ..., steps: _Optional[int] = ..., guidance: _Optional[float] = ..., base: _Optional[bool] = ..., policy_version: _Optional[int] = ..., reward: _Optional[str] = ..., thumbnails: _Optional[bool] = ...) -> None: ...

class ExploreEvent(_message.Message):
    __slots__ = ("candidate", "selection")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    candidate: CandidateEvent
    selection: Selection
    def __init__(self, candidate: _Optional[_Union[CandidateEvent, _Mapping]] = ..., selection: _Optional[_Union[Selection, _Mapping]] = ...) -> None: ...

class CandidateEvent(_message.Message):
    __slots__ = ("candidate", "seed", "proxy_reward", "error", "thumbnail_png")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROXY_REWARD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    THUMBNAIL_PNG_FIELD_NUMBER: _ClassVar[int]
    candidate: int
    seed: int
    proxy_reward: float
    error: str
    thumbnail_png: bytes
    def __init__(self, candidate: _Optional[int] = ..., seed: _Optional[int] = ..., proxy_reward: _Optional[float] = ..., error: _Optional[str] = ..., thumbnail_png: _Optional[bytes] = ...) -> None: ...

class Kept(_message.Message):
    __slots__ = ("candidate", "seed", "rank", "proxy_reward")
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PROXY_REWARD_FIELD_NUMBER: _ClassVar[int]
    candidate: int
    seed: int
    rank: Rank
    proxy_reward: float
    def __init__(self, candidate: _Optional[int] = ..., seed: _Optional[int] = ..., rank: _Optional[_Union[Rank, str]] = ..., proxy_reward: _Optional[float] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("kept", "excluded", "policy_version", "adapter_sha256", "precision", "solver", "steps", "nfe", "reward", "reward_version", "seconds_explore", "seconds_score", "prompt_truncated")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SHA256_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    SOLVER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NFE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_EXPLORE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SCORE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedCompositeFieldContainer[Kept]
    excluded: int
    policy_version: int
    adapter_sha256: str
    precision: str
    solver: str
    steps: int
    nfe: int
    reward: str
    reward_version: str
    seconds_explore: float
    seconds_score: float
    prompt_truncated: bool
    def __init__(self, kept: _Optional[_Iterable[_Union[Kept, _Mapping]]] = ..., excluded: _Optional[int] = ..., policy_version: _Optional[int] = ..., adapter_sha256: _Optional[str] = ..., precision: _Optional[str] = ..., solver: _Optional[str] = ..., steps: _Optional[int] = ..., nfe: _Optional[int] = ..., reward: _Optional[str] = ..., reward_version: _Optional[str] = ..., seconds_explore: _Optional[float] = ..., seconds_score: _Optional[float] = ..., prompt_truncated: _Optional[bool] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter", "modules_bound", "modules_expected", "seconds", "canary")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    MODULES_BOUND_FIELD_NUMBER: _ClassVar[int]
    MODULES_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    modules_bound: int
    modules_expected: int
    seconds: float
    canary: str
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ..., modules_bound: _Optional[int] = ..., modules_expected: _Optional[int] = ..., seconds: _Optional[float] = ..., canary: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("run", "epoch", "version", "sha256")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    version: int
    sha256: str
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: bool
    def __init__(self, layers: _Optional[bool] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("replica", "base_id", "base_sha256", "precision", "precision_reason", "fp4_share", "solver", "micro_batch", "current", "held_versions", "waiting", "problems", "layers")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    BASE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_SHA256_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PRECISION_REASON_FIELD_NUMBER: _ClassVar[int]
    FP4_SHARE_FIELD_NUMBER: _ClassVar[int]
    SOLVER_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    base_id: str
    base_sha256: str
    precision: str
    precision_reason: str
    fp4_share: float
    solver: str
    micro_batch: int
    current: Adapter
    held_versions: _containers.RepeatedScalarFieldContainer[int]
    waiting: int
    problems: _containers.RepeatedScalarFieldContainer[str]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    def __init__(self, replica: _Optional[str] = ..., base_id: _Optional[str] = ..., base_sha256: _Optional[str] = ..., precision: _Optional[str] = ..., precision_reason: _Optional[str] = ..., fp4_share: _Optional[float] = ..., solver: _Optional[str] = ..., micro_batch: _Optional[int] = ..., current: _Optional[_Union[Adapter, _Mapping]] = ..., held_versions: _Optional[_Iterable[int]] = ..., waiting: _Optional[int] = ..., problems: _Optional[_Iterable[str]] = ..., layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("name", "precision", "reason", "multiply_adds", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MULTIPLY_ADDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    precision: str
    reason: str
    multiply_adds: int
    bytes: int
    def __init__(self, name: _Optional[str] = ..., precision: _Optional[str] = ..., reason: _Optional[str] = ..., multiply_adds: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
