"""Adapters on disk: immutable versions, believed only when their hashes match.

`<runs>/<run>/adapters/<version>/` holds `pytorch_lora_weights.safetensors` (diffusers keys,
alpha in the header) and `manifest.json`. No torch is imported here: bytes in, bytes out.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from solrl import atomic
from solrl.errors import AdapterError

WEIGHTS = "pytorch_lora_weights.safetensors"
MANIFEST = "manifest.json"


class Manifest(BaseModel):
    """What an adapter is and what it belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    run: str
    epoch: int = Field(ge=1)
    version: int = Field(ge=0)
    step: int = Field(ge=0, description="Optimizer steps taken.")
    policy: str = Field("behaviour", description="behaviour (served) or ema (taken home)")
    base_id: str
    base_sha256: str
    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    targets: tuple[str, ...] = Field(description="Module names that carry LoRA, sorted.")
    sha256: str = Field(description="Of the weights file.")
    parent: str | None = Field(None, description="sha256 of the version before.")


def publish(folder: Path, weights: bytes, manifest: Manifest) -> Path:
    """Write one version atomically and return its folder.

    Publishing the same bytes again is success (a resume does); other bytes under a used version
    raise AdapterError, because versions are immutable.
    """
    if folder.exists():
        held = read_manifest(folder)
        if held.sha256 != manifest.sha256:
            raise AdapterError(
                f"adapter {folder} exists with other contents (sha256 {held.sha256[:12]}, new "
                f"{manifest.sha256[:12]}); versions are immutable"
            )
        return folder
    with atomic.new_directory(folder) as aside:
        (aside / WEIGHTS).write_bytes(weights)
        (aside / MANIFEST).write_text(manifest.model_dump_json(indent=2))
    return folder


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete adapter whose weights match it. Raises AdapterError otherwise."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
        seen = atomic.sha256_file(folder / WEIGHTS)
    except OSError as error:
        raise AdapterError(f"adapter {folder} is incomplete: {error}") from error
    except ValidationError as error:
        raise AdapterError(f"adapter manifest {path} is not valid: {error}") from error
    if seen != manifest.sha256:
        raise AdapterError(
            f"adapter {folder / WEIGHTS} has sha256 {seen[:12]}, its manifest says "
            f"{manifest.sha256[:12]}: the file is damaged or half written"
        )
    return manifest


def check_base(manifest: Manifest, *, base_sha256: str) -> None:
    """Refuse an adapter of another base model."""
    if manifest.base_sha256 != base_sha256:
        raise AdapterError(
            f"adapter version {manifest.version} was trained on base {manifest.base_id} "
            f"({manifest.base_sha256[:12]}), this service holds {base_sha256[:12]}"
        )
