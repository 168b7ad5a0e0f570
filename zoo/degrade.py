"""Damage of a known strength, for pictures that a reward must like less and less.

Every kind takes fp32 pictures [n, 3, 32, 32] in [0, 1] and strengths [n] in [0, 1]: 0 changes
nothing, 1 leaves hardly anything to recognise.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Damage = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def _column(strength: Tensor) -> Tensor:
    return strength.view(-1, 1, 1, 1)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _signs(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (n,), generator=generator) * 2.0 - 1.0


def _sample(x: Tensor, grid: Tensor) -> Tensor:
    """Bilinear lookup with white outside."""
    return 1 - F.grid_sample(1 - x, grid, align_corners=False)


def _identity(n: int, side: int) -> Tensor:
    return F.affine_grid(torch.eye(2, 3).expand(n, 2, 3), [n, 3, side, side], align_corners=False)


def noise(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """White noise of standard deviation up to .6."""
    return x + _normal(tuple(x.shape), generator) * _column(strength) * 0.6


def blur(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian blur of up to 5 pixels, done in the frequency domain so that each has its own."""
    del generator
    padded = F.pad(x, (16, 16, 16, 16), mode="replicate")
    height, width = padded.shape[2:]
    rows = torch.fft.fftfreq(height).view(-1, 1)
    columns = torch.fft.rfftfreq(width).view(1, -1)
    sigma = _column(strength * 5.0)
    gain = torch.exp(-2 * (math.pi * sigma) ** 2 * (rows**2 + columns**2))
    spectrum = torch.fft.rfft2(padded) * gain
    return torch.fft.irfft2(spectrum, s=(height, width))[:, :, 16:-16, 16:-16]


def move(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Shift up to a third of the picture, turn up to 90 degrees, zoom by up to 2 either way."""
    n = len(x)
    angle = _signs(n, generator) * strength * math.pi / 2
    zoom = (_signs(n, generator) * strength * math.log(2)).exp()
    shift = _normal((n, 2), generator)
    shift = F.normalize(shift, dim=1) * strength.view(-1, 1) * 0.67
    rows = [
        torch.stack([angle.cos() * zoom, -angle.sin() * zoom, shift[:, 0]], 1),
        torch.stack([angle.sin() * zoom, angle.cos() * zoom, shift[:, 1]], 1),
    ]
    return _sample(x, F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False))


def wobble(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Moves the pixels by a smooth random field of up to about 6 pixels."""
    n, _, side, _ = x.shape
    field = F.interpolate(_normal((n, 2, 5, 5), generator), size=side, mode="bicubic")
    offset = field * _column(strength) * 0.25
    return _sample(x, _identity(n, side) + offset.permute(0, 2, 3, 1))


def recolour(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Mixes the channels of the ink at random, and fades or darkens it."""
    n = len(x)
    amount = strength.view(-1, 1, 1)
    mixing = torch.eye(3) * (1 - amount) + amount * _normal((n, 3, 3), generator) * 0.7
    light = 1 + _signs(n, generator) * strength * 0.6
    return 1 - torch.einsum("nij,njhw->nihw", mixing, 1 - x) * _column(light)


def jpeg(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds the cosine coefficients of 8x8 blocks, coarser for the higher ones."""
    del generator
    place = torch.arange(8.0)
    basis = torch.cos(math.pi * (place[None] + 0.5) * place[:, None] / 8) * 0.5
    basis[0] /= math.sqrt(2)
    n, c, side, _ = x.shape
    blocks = x.view(n, c, side // 8, 8, side // 8, 8).transpose(3, 4)
    coefficients = basis @ blocks @ basis.T
    coarse = 1 + place[:, None] + place[None]
    step = (_column(strength) * 0.8).view(n, 1, 1, 1, 1, 1).clamp(min=1e-4) * coarse
    rounded = (coefficients / step).round() * step
    return (basis.T @ rounded @ basis).transpose(3, 4).reshape(x.shape)


def lattice(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Errors of a generator that draws 4x4 pixels at once: a repeated tile and slipped patches."""
    n, c, side, _ = x.shape
    tile = _normal((n, c, 4, 4), generator).repeat(1, 1, side // 4, side // 4)
    tile = tile * F.interpolate(_normal((n, 1, 8, 8), generator), size=side, mode="bilinear").abs()
    slips = _normal((n, 2, side // 4, side // 4), generator) * _column(strength) * 0.25
    slips = slips.repeat_interleave(4, 2).repeat_interleave(4, 3).permute(0, 2, 3, 1)
    return _sample(x, _identity(n, side) + slips) + tile * _column(strength) * 0.35


def stain(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Coloured clouds."""
    n, _, side, _ = x.shape
    cells = int(torch.randint(3, 9, (1,), generator=generator))
    clouds = F.interpolate(_normal((n, 3, cells, cells), generator), size=side, mode="bicubic")
    return x + clouds * _column(strength) * 0.7


def erase(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Replaces boxes by white or another picture's content, up to nearly everything."""
    n, _, side, _ = x.shape
    other = x[torch.randperm(n, generator=generator)]
    white = (torch.rand(n, 1, 1, 1, generator=generator) < 0.5).float()
    filling = torch.maximum(other, white)
    place = torch.arange(side) / side
    for _ in range(2):
        corner = torch.rand(n, 2, generator=generator) * (1 - strength.view(-1, 1) * 0.8)
        inside = (place >= corner[..., None]) & (
            place < (corner + strength.view(-1, 1) * 0.8)[..., None]
        )
        x = torch.where((inside[:, 0, :, None] & inside[:, 1, None, :])[:, None], filling, x)
    return x


def blend(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Fades the picture into another one."""
    other = x[torch.randperm(len(x), generator=generator)]
    return x.lerp(other, _column(strength))


def fade(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Fades the picture into the blurred mean of many, as an untrained generator does."""
    del generator
    ghost = blur(x.mean(0, keepdim=True), torch.tensor([0.3]), torch.Generator())
    return x.lerp(ghost.expand_as(x), _column(strength) * 0.95)


KINDS: tuple[Damage, ...] = (
    noise,
    blur,
    move,
    wobble,
    recolour,
    jpeg,
    lattice,
    stain,
    erase,
    blend,
    fade,
)


def damaged(images: Tensor, strength: Tensor, generator: torch.Generator, kinds: int = 2) -> Tensor:
    """uint8 [n, 32, 32, 3], strengths [n] -> uint8: up to `kinds` kinds of damage to each picture.

    Each picture draws its kinds by itself; with two, each acts at seven tenths of the strength.
    """
    n = len(images)
    x = images.permute(0, 3, 1, 2).float() / 255
    drawn = torch.randint(len(KINDS), (n, kinds), generator=generator)
    count = torch.randint(1, kinds + 1, (n,), generator=generator)
    share = strength * torch.where(count > 1, 0.7, 1.0)
    for turn in range(kinds):
        for number, kind in enumerate(KINDS):
            rows = ((drawn[:, turn] == number) & (turn < count)).nonzero()[:, 0]
            if len(rows):
                x[rows] = kind(x[rows], share[rows], generator).clamp(0, 1)
    return (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
