"""The noise of a seed: bit-equal in every service, batch, order and precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from solrl.seeds import check_seed


def initial_noise(seed: int, shape: Sequence[int]) -> Tensor:
    """Standard normal fp32 noise of `shape` on the CPU, from one generator of its own.

    Cast and move it afterwards; drawing on a device or in a dtype would tie the picture to it.
    Two limits of torch's CPU generator: it starts from the low 32 bits of the seed only, and
    without AVX2 (another instruction set) its normal numbers differ in the last bits.
    """
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def noise_batch(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """[n, *shape]: row i is `initial_noise(seeds[i], shape)` exactly."""
    return torch.stack([initial_noise(seed, shape) for seed in seeds])
