"""A random pipeline of the real classes, a hundred times smaller than zoo/tiny-sana.

Services load it in a second: for tests of plumbing, where pictures need no meaning.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import SanaTransformer2DModel
from transformers import BertConfig, BertModel, BertTokenizerFast

from solrl import lora
from solrl.adapters import Manifest, publish
from solrl.atomic import sha256_file
from solrl.config import ModelSection
from solrl.models import base_sha256
from solrl.models.sana import LORA_TARGETS
from zoo.tiny_sana import LATENT_CHANNELS, invertible_autoencoder, write_model

WIDTH = 32
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "a", "red", "blue", "green", "dog", "cat", "tree", "house"]


def write_pipeline(folder: Path) -> Path:
    """A SanaPipeline folder for 32 x 32 pictures, the same bytes every time."""
    torch.manual_seed(0)
    transformer = SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=WIDTH,
        caption_channels=WIDTH,
        mlp_ratio=2.0,
        sample_size=8,
        patch_size=1,
        interpolation_scale=1,
    )
    write_model(transformer, invertible_autoencoder(), folder)
    bert = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=WIDTH,
    )
    BertModel(bert).save_pretrained(folder / "text_encoder")
    vocabulary = folder / "words.txt"
    vocabulary.write_text("\n".join(WORDS))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder / "tokenizer")
    vocabulary.unlink()
    return folder


def publish_adapter(
    folder: Path, model: Path, *, version: int, run: str = "test", epoch: int = 1
) -> Manifest:
    """Adapter `version` of a pipeline written above, with random factors that change pictures."""
    transformer = SanaTransformer2DModel.from_pretrained(model / "transformer")
    names = lora.target_modules(transformer, LORA_TARGETS)
    fresh = lora.gaussian(transformer, names, rank=4, alpha=8.0, seed=version)
    generator = torch.Generator().manual_seed(version)
    weights = lora.to_bytes(
        lora.Lora(
            fresh.rank,
            fresh.alpha,
            {
                name: (a, torch.randn(b.shape, generator=generator) * 0.2)
                for name, (a, b) in fresh.pairs.items()
            },
        )
    )
    aside = folder.parent / f".{folder.name}.bytes"
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside.write_bytes(weights)
    manifest = Manifest(
        run=run,
        epoch=epoch,
        version=version,
        step=version,
        base_id=str(model),
        base_sha256=base_sha256(model),
        rank=4,
        alpha=8.0,
        targets=tuple(names),
        sha256=sha256_file(aside),
    )
    aside.unlink()
    publish(folder, weights, manifest)
    return manifest


def model_section(model: Path, cache: Path) -> ModelSection:
    return ModelSection(base=str(model), cache=cache, max_prompt_tokens=8)
