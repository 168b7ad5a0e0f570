"""The parts of `zoo/tiny-sana`: a SANA small enough to train on two CPU cores.

The autoencoder is a stock `AutoencoderDC` whose weights make it the pixel-unshuffle by 4, which is
exactly invertible: 32x32 RGB in [-1, 1] <-> latents [48, 8, 8].
"""

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaTransformer2DModel
from numpy.typing import NDArray
from torch import Tensor, nn

IMAGE_CHANNELS = 3
LATENT_CHANNELS = 48
CAPTION_TOKENS = 16
CAPTION_CHANNELS = 384
# Pictures are their own scale: root mean square .84, standard deviation .56. A unit deviation
# would settle small pictures in the first tenth of an unshifted schedule, one step of ten.
SCALING_FACTOR = 1.0
# The decoder ends in RMSNorm, which would divide by each pixel's own size. Two constant channels of
# this size drown the picture in the mean square, so that the norm divides by a constant instead; as
# powers of two the division and the norm's weight cancel without rounding.
ANCHOR = 2.0**13
MODEL_INDEX = {
    "_class_name": "SanaPipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "BertModel"],
    "tokenizer": ["transformers", "BertTokenizer"],
    "transformer": ["diffusers", "SanaTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderDC"],
}


def _zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)


def _centre(conv: nn.Conv2d, weight: Tensor) -> None:
    """Makes a 3x3 convolution the 1x1 map `weight` [out, in]."""
    _zero(conv)
    conv.weight.data[:, :, 1, 1] = weight


@torch.no_grad()
def invertible_autoencoder() -> AutoencoderDC:
    """An AutoencoderDC with decode(encode(x)) == x.

    Its convolutions are identities or zero, its shortcuts are pixel-(un)shuffles. Pixels pass the
    decoder's last ReLU as the pair (x, -x), since x = relu(x) - relu(-x).
    """
    vae = AutoencoderDC(
        in_channels=IMAGE_CHANNELS,
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=(3, 12, 48),
        decoder_block_out_channels=(8, 32, 128),
        encoder_layers_per_block=(1, 1, 0),
        decoder_layers_per_block=(1, 1, 0),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        decoder_in_shortcut=False,
        scaling_factor=SCALING_FACTOR,
    )
    _zero(vae)
    _centre(vae.encoder.conv_in, torch.eye(3))
    # Pixel-shuffle gathers 16 neighbouring channels into one: 3 x 16 for x, 3 x 16 for -x, 2 x 16
    # for the anchors.
    identity = torch.eye(LATENT_CHANNELS)
    _centre(vae.decoder.conv_in, torch.cat([identity, -identity, torch.zeros(32, LATENT_CHANNELS)]))
    vae.decoder.conv_in.bias[2 * LATENT_CHANNELS :] = ANCHOR
    # Mean square over 8 channels is 2 ANCHOR^2 / 8, its root ANCHOR / 2.
    vae.decoder.norm_out.weight[:6] = ANCHOR / 2
    _centre(
        vae.decoder.conv_out, torch.cat([torch.eye(3), -torch.eye(3), torch.zeros(3, 2)], dim=1)
    )
    return vae.eval()


def transformer() -> SanaTransformer2DModel:
    """The untrained transformer; weights from torch's global generator."""
    return SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=6,
        num_cross_attention_heads=4,
        cross_attention_head_dim=32,
        cross_attention_dim=128,
        caption_channels=CAPTION_CHANNELS,
        mlp_ratio=2.5,
        sample_size=8,
        patch_size=1,
        interpolation_scale=1,
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Rectified flow without time shift."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0)


def to_latents(vae: AutoencoderDC, pictures: NDArray[np.uint8]) -> Tensor:
    """Scaled latents [n, 48, 8, 8] of uint8 RGB [n, 32, 32, 3]."""
    pixels = torch.from_numpy(pictures.astype(np.float32)).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        latents: Tensor = vae.encode(pixels, return_dict=False)[0] * vae.config.scaling_factor
    return latents


def to_pictures(vae: AutoencoderDC, latents: Tensor) -> NDArray[np.uint8]:
    """uint8 RGB [n, 32, 32, 3] of scaled latents [n, 48, 8, 8]."""
    with torch.no_grad():
        pixels = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
    scaled = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    picture: NDArray[np.uint8] = scaled.permute(0, 2, 3, 1).contiguous().numpy()
    return picture


def write_model(model: SanaTransformer2DModel, vae: AutoencoderDC, folder: Path) -> None:
    """Writes the committed part of a pipeline folder, which `zoo.assemble` completes."""
    model.save_pretrained(folder / "transformer")
    vae.save_pretrained(folder / "vae")
    scheduler().save_pretrained(folder / "scheduler")
    text = json.dumps(MODEL_INDEX, indent=2) + "\n"
    (folder / "model_index.json").write_text(text, encoding="utf-8")
