"""Prompt embeddings, computed once a prompt and kept by content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, save
from torch import Tensor

from solrl import atomic
from solrl.config import ModelSection
from solrl.errors import InputError

if TYPE_CHECKING:
    from solrl.models.sana import Sana

#: Prompts kept in memory by one process.
IN_MEMORY = 4096


@dataclass(frozen=True)
class Embedding:
    """tokens fp32 [L, D]; mask int64 [L], 1 where a token is real; truncated: it was cut."""

    tokens: Tensor
    mask: Tensor
    truncated: bool


def stack(embeddings: Sequence[Embedding]) -> tuple[Tensor, Tensor]:
    """([n, L, D], [n, L])."""
    return torch.stack([e.tokens for e in embeddings]), torch.stack([e.mask for e in embeddings])


class EmbeddingStore:
    """A folder of `<hash of encoder, length and prompt>.safetensors`, shared by all services.

    `encode` is called on a miss only, with one prompt, so a value never depends on batch mates.
    """

    def __init__(self, folder: Path, identity: str, encode: Callable[[str], Embedding]) -> None:
        self._folder = folder
        self._identity = identity
        self._encode = encode
        self._memory: OrderedDict[str, Embedding] = OrderedDict()

    @classmethod
    def of(cls, config: ModelSection, model: Sana) -> EmbeddingStore:
        """The store of a loaded model, under the configured cache."""
        # Sizes stand for contents: hashing a T5 encoder would take a minute at every start.
        files = [
            (path.relative_to(model.folder).as_posix(), path.stat().st_size)
            for part in ("text_encoder", "tokenizer")
            for path in sorted((model.folder / part).rglob("*"))
        ]
        return cls(config.cache / "embeddings", f"{files}|{config.max_prompt_tokens}", model.encode)

    def get(self, prompt: str) -> Embedding:
        """The empty prompt is allowed here: it is the unconditional one of guidance."""
        if prompt in self._memory:
            self._memory.move_to_end(prompt)
            return self._memory[prompt]
        name = hashlib.sha256(f"{self._identity}\0{prompt}".encode()).hexdigest()
        path = self._folder / f"{name}.safetensors"
        if path.exists():
            tensors = load(path.read_bytes())
            value = Embedding(tensors["tokens"], tensors["mask"], bool(tensors["truncated"]))
        else:
            value = self._encode(prompt)
            tensors = {
                "tokens": value.tokens,
                "mask": value.mask,
                "truncated": torch.tensor(value.truncated),
            }
            atomic.write_bytes(path, save(tensors))
        self._memory[prompt] = value
        if len(self._memory) > IN_MEMORY:
            self._memory.popitem(last=False)
        return value


def check_prompt(prompt: str) -> str:
    """Raise InputError for a prompt without a visible character."""
    if not prompt.strip():
        raise InputError(f"the prompt {prompt!r} is empty; describe the picture in words")
    return prompt
