"""Less noise from libraries, before they are imported."""

from __future__ import annotations

import logging
import os


def quiet_libraries() -> None:
    """Silence what torchao and torch say when imported: nobody can act on it, and it hides ours."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    # Also ends transformers' progress bar of loading a text encoder.
    os.environ.setdefault("TQDM_DISABLE", "1")
