"""Model families, one file each; see `sana.py` for the interface they share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from solrl import atomic
from solrl.config import ModelSection
from solrl.errors import ConfigError

if TYPE_CHECKING:
    from solrl.models.sana import Sana

#: What `diffusers` calls the pipeline of each family.
PIPELINES = {"sana": "SanaPipeline"}


def check_folder(model: ModelSection) -> Path:
    """The model's folder, or ConfigError saying what is wrong with it, before anything loads."""
    folder = Path(model.base)
    index = folder / "model_index.json"
    if not index.is_file():
        raise ConfigError(
            f"model.base = {model.base!r} is not a diffusers pipeline folder ({index} is missing); "
            "`make setup` assembles the packaged one, or give the path of your own"
        )
    seen = json.loads(index.read_text()).get("_class_name")
    if seen != PIPELINES[model.family]:
        raise ConfigError(
            f"model.base = {model.base!r} holds a {seen}, but model.family = {model.family!r} "
            f"needs a {PIPELINES[model.family]}"
        )
    for part in ("transformer", "vae", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise ConfigError(f"model.base = {model.base!r} lacks its folder {part}/")
    return folder


def load(model: ModelSection) -> Sana:
    """Load the family named in the configuration; only this imports torch."""
    from solrl.models.sana import Sana

    return Sana.load(
        check_folder(model),
        height=model.height,
        width=model.width,
        max_prompt_tokens=model.max_prompt_tokens,
    )


def base_sha256(folder: Path) -> str:
    """Identity of a base model: its transformer's and autoencoder's files."""
    digest = hashlib.sha256()
    for part in ("transformer", "vae"):
        for path in sorted((folder / part).rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(folder)} {atomic.sha256_file(path)}\n".encode())
    return digest.hexdigest()
