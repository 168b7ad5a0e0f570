"""SANA: diffusers' SanaPipeline folder, taken apart into what sampling and training need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from solrl.embeddings import Embedding
from solrl.errors import ConfigError

#: Modules that carry LoRA (paper, table 7), self- and cross-attention.
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")

#: Left in high precision: embedders, final layer and self-attention, as in the paper, by name
#: because diffusers' attention linears all have one size. Block linears not listed go to FP4.
SKIP = (
    "patch_embed*",
    "time_embed*",
    "caption_projection*",
    "proj_out",
    "*.attn1.*",
)


@dataclass
class Sana:
    """One loaded model. `transformer` predicts the velocity eps - x0 at time sigma."""

    transformer: nn.Module
    vae: nn.Module
    folder: Path
    max_prompt_tokens: int
    latent_shape: tuple[int, int, int]
    device: torch.device

    @classmethod
    def load(cls, folder: Path, *, height: int, width: int, max_prompt_tokens: int) -> Sana:
        """Read transformer and autoencoder in fp32; the text encoder waits for its first use."""
        from diffusers import AutoencoderDC, SanaTransformer2DModel

        transformer = SanaTransformer2DModel.from_pretrained(folder / "transformer").eval()
        vae = AutoencoderDC.from_pretrained(folder / "vae").eval()
        ratio = 2 ** (len(vae.config.encoder_block_out_channels) - 1)
        if height % ratio or width % ratio:
            raise ConfigError(
                f"model.height x width = {height} x {width} must be multiples of {ratio}"
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(
            transformer=transformer.requires_grad_(False).to(device),
            vae=vae.requires_grad_(False).to(device),
            device=device,
            folder=folder,
            max_prompt_tokens=max_prompt_tokens,
            latent_shape=(transformer.config.in_channels, height // ratio, width // ratio),
        )

    @cached_property
    def _text(self) -> tuple[Any, Any]:
        """Tokenizer and text encoder, loaded at their first use."""
        from transformers import AutoModel, AutoTokenizer

        # As SanaPipeline sets it; Gemma's own default is the left.
        tokenizer = AutoTokenizer.from_pretrained(self.folder / "tokenizer", padding_side="right")
        return tokenizer, AutoModel.from_pretrained(self.folder / "text_encoder").eval()

    def encode(self, prompt: str) -> Embedding:
        """As SanaPipeline.encode_prompt without a human instruction, at `max_prompt_tokens`."""
        tokenizer, encoder = self._text
        text = prompt.lower().strip()
        inputs = tokenizer(
            [text],
            padding="max_length",
            max_length=self.max_prompt_tokens,
            truncation=True,
            return_tensors="pt",
        )
        full_length = len(tokenizer(text)["input_ids"])
        with torch.no_grad():
            tokens = encoder(inputs.input_ids, attention_mask=inputs.attention_mask)[0][0]
        return Embedding(
            tokens.float().contiguous(),
            inputs.attention_mask[0].to(torch.int64),
            full_length > self.max_prompt_tokens,
        )

    def velocity(self, latents: Tensor, sigma: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """v fp32 [n,C,h,w] of latents [n,C,h,w] at sigma [n], tokens [n,L,D], mask [n,L].

        Arguments may be anywhere; the answer is on the model's device.
        """
        dtype = cast(Any, self.transformer).dtype
        predicted: Tensor = self.transformer(
            latents.to(self.device, dtype),
            encoder_hidden_states=tokens.to(self.device, dtype),
            encoder_attention_mask=mask.to(self.device),
            timestep=(sigma * 1000.0).to(self.device),
            return_dict=False,
        )[0]
        return predicted.float()

    def decode(self, latents: Tensor) -> Tensor:
        """uint8 [n,H,W,3] on the CPU of clean latents [n,C,h,w]."""
        vae = cast(Any, self.vae)
        with torch.no_grad():
            pixels = vae.decode(
                (latents / vae.config.scaling_factor).to(self.device, vae.dtype), return_dict=False
            )[0]
        levels: Tensor = ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round()
        return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
