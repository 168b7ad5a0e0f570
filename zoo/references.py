"""Real pictures of every prompt, `<prompt>.png`: `python -m zoo.references FOLDER`."""

import io
import sys
from pathlib import Path

from PIL import Image

from solrl import atomic
from zoo.data import real_image, seen_captions, unseen_captions


def write_references(folder: Path) -> None:
    """One 32 px picture a prompt, seen or unseen, for the score of real pictures."""
    for caption in seen_captions() + unseen_captions():
        data = io.BytesIO()
        Image.fromarray(real_image(caption)).save(data, "PNG")
        atomic.write_bytes(folder / f"{caption}.png", data.getvalue())


if __name__ == "__main__":
    write_references(Path(sys.argv[1]))
