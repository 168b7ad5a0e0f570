"""Builds the pictures of the zoo from npm packages: `python -m zoo.build_data`.

Each style becomes `build/zoo/<style>.npz` (images uint8 [n, 32, 32, 3] on white, names, hexcodes).
The icons come from MIT, Apache-2.0 and CC BY 4.0 packages; labels from emojibase-data (CLDR).
"""

import argparse
import io
import json
import os
import subprocess
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from zoo.data import COLUMNS, DATA, SIZE, STYLES, Concept, caption, seen_captions, unseen_captions

DRAWN_SIZE = 128
SPLIT_SEED = 20260
UNSEEN_PER_STYLE = 10
RL_PER_STYLE = 8
BUILD = Path(__file__).resolve().parent.parent / "build" / "zoo"
LABELS = ("emojibase-data", "17.0.0")
# Groups of emojibase that name parts of other emoji rather than things.
COMPONENT_GROUP = 2

# Everyday things with distinct silhouettes: no people, hands, flags, keycaps or clocks.
CONCEPTS = """
gorilla, dog face, wolf, fox, cat face, lion, tiger face, horse face, unicorn, deer, cow face,
pig face, goat, camel, elephant, rhinoceros, mouse face, rabbit face, bat, bear, koala, panda,
rooster, baby chick, penguin, eagle, duck, owl, frog, crocodile, turtle, lizard, snake, dragon
face, spouting whale, dolphin, tropical fish, blowfish, shark, octopus, crab, shrimp, squid,
snail, butterfly, ant, honeybee, lady beetle, spider, scorpion, rose, sunflower, hibiscus,
tulip, cherry blossom, seedling, evergreen tree, palm tree, cactus, four leaf clover, maple
leaf, mushroom, grapes, watermelon, tangerine, lemon, banana, pineapple, red apple, pear, peach,
cherries, strawberry, kiwi fruit, tomato, avocado, eggplant, carrot, ear of corn, hot pepper,
cucumber, bread, croissant, pretzel, cheese wedge, hamburger, french fries, pizza, hot dog,
taco, bacon, popcorn, sushi, doughnut, cookie, birthday cake, shortcake, lollipop, soft ice
cream, hot beverage, wine glass, beer mug, locomotive, bus, fire engine, taxi, automobile,
tractor, motorcycle, bicycle, sailboat, helicopter, rocket, airplane, volcano, castle, house,
tent, crescent moon, sun, star, rainbow, umbrella, snowman, fire, high voltage, Christmas tree,
jack-o-lantern, balloon, wrapped gift, trophy, soccer ball, basketball, crystal ball, video
game, artist palette, sunglasses, t-shirt, crown, top hat, ring, bell, guitar, trumpet, camera,
light bulb, key, hammer, scissors, anchor
"""
CONCEPT_NAMES = [" ".join(name.split()) for name in CONCEPTS.split(",")]


@dataclass(frozen=True)
class Source:
    """One npm package of pictures; `shipped` styles are the ones whose pictures are committed."""

    style: str
    package: str
    version: str
    licence: str
    shipped: bool


SOURCES = (
    Source("flat", "@iconify-json/fluent-emoji-flat", "1.2.6", "MIT", True),
    Source("3d", "@lobehub/fluent-emoji-3d", "1.1.0", "MIT", True),
    Source("noto", "@iconify-json/noto", "1.2.9", "Apache-2.0", True),
    Source("twemoji", "@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", False),
    Source("noto-v1", "@iconify-json/noto-v1", "1.2.5", "Apache-2.0", False),
    Source("fluent-color", "@iconify-json/fluent-emoji", "1.2.7", "MIT", False),
    Source("fxemoji", "@iconify-json/fxemoji", "1.2.2", "Apache-2.0", False),
)
# Packages whose chars.json says which icon draws which code point; their icon names serve the rest.
NAMED_BY_CODE_POINT = (
    "@iconify-json/fluent-emoji-flat",
    "@iconify-json/noto",
    "@iconify-json/twemoji",
)


def fetch(package: str, version: str, folder: Path) -> Path:
    """The package's tarball in `folder`, fetched with npm when it is not there yet."""
    target = folder / f"{package.removeprefix('@').replace('/', '-')}-{version}.tgz"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "pack", "--silent", f"{package}@{version}"], cwd=folder, check=True, timeout=300
        )
    return target


def read_json(tarball: Path, member: str) -> Any:
    with tarfile.open(tarball) as archive:
        stream = archive.extractfile(f"package/{member}")
        assert stream is not None, f"{tarball.name} has no {member}"
        return json.load(stream)


def plain_code(hexcode: str) -> str:
    """A hexcode in lower case without variation selectors, so that packages can be joined."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


def squeezed(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def labels(tarball: Path) -> dict[str, str]:
    """CLDR label by plain hexcode, in emojibase's order, one skin tone only."""
    rows = [row for row in read_json(tarball, "en/data.json") if "group" in row]
    rows.sort(key=lambda row: row["order"])
    return {
        plain_code(row["hexcode"]): row["label"] for row in rows if row["group"] != COMPONENT_GROUP
    }


def icon_codes(
    icons: dict[str, Any], chars: dict[str, str], known: dict[str, str]
) -> dict[str, str]:
    """Icon name by plain hexcode: by the package's own code points, else by the known names."""
    if chars:
        return {plain_code(code): name for code, name in chars.items()}
    return {known[squeezed(name)]: name for name in icons if squeezed(name) in known}


def downscaled(picture: Image.Image) -> NDArray[np.uint8]:
    """[32, 32, 3] on white, area-averaged."""
    canvas = Image.new("RGBA", picture.size, "white")
    canvas.alpha_composite(picture.convert("RGBA"))
    return np.asarray(canvas.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BOX))


def draw_svg(svg: str) -> NDArray[np.uint8]:
    import resvg_py

    drawn = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=DRAWN_SIZE, height=DRAWN_SIZE))
    return downscaled(Image.open(io.BytesIO(drawn)))


def draw_webp(data: bytes) -> NDArray[np.uint8]:
    return downscaled(Image.open(io.BytesIO(data)))


def svg_of(collection: dict[str, Any], name: str) -> str:
    icon = collection["icons"][name]
    box = [
        icon.get(key, collection.get(key, default))
        for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    ]
    view = " ".join(str(number) for number in box)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{view}">{icon["body"]}</svg>'
    )


def known_names(folder: Path) -> dict[str, str]:
    """Plain hexcode by squeezed icon name, from the packages that state their code points."""
    known: dict[str, str] = {}
    for source in SOURCES:
        if source.package in NAMED_BY_CODE_POINT:
            chars = read_json(fetch(source.package, source.version, folder), "chars.json")
            for code, name in chars.items():
                known.setdefault(squeezed(name), plain_code(code))
    return known


def pictures(source: Source, folder: Path) -> dict[str, str | bytes]:
    """SVG text or webp bytes by plain hexcode."""
    tarball = fetch(source.package, source.version, folder)
    if source.style == "3d":
        with tarfile.open(tarball) as archive:
            return {
                plain_code(Path(member.name).stem): stream.read()
                for member in archive.getmembers()
                if member.name.endswith(".webp") and (stream := archive.extractfile(member))
            }
    collection = read_json(tarball, "icons.json")
    codes = icon_codes(collection["icons"], read_json(tarball, "chars.json"), known_names(folder))
    return {
        code: svg_of(collection, name)
        for code, name in codes.items()
        if name in collection["icons"]
    }


def draw(picture: str | bytes) -> NDArray[np.uint8]:
    return draw_svg(picture) if isinstance(picture, str) else draw_webp(picture)


def build_style(source: Source, names: dict[str, str], build: Path) -> Path:
    """Writes the style's npz, rows in CLDR order."""
    found = pictures(source, build / "tarballs")
    codes = [code for code in names if code in found]
    with ProcessPoolExecutor(max_workers=2) as pool:
        images = list(pool.map(draw, [found[code] for code in codes], chunksize=32))
    target = build / f"{source.style}.npz"
    aside = target.with_suffix(".tmp.npz")
    np.savez_compressed(
        aside,
        images=np.stack(images),
        names=np.array([names[code] for code in codes]),
        hexcodes=np.array([code.upper() for code in codes]),
    )
    os.replace(aside, target)
    return target


def write_aside(target: Path, data: bytes) -> None:
    aside = target.with_name(f".{target.name}.tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside.write_bytes(data)
    os.replace(aside, target)


def split_concepts(hexcodes: dict[str, str], rng: np.random.Generator) -> list[Concept]:
    """The concepts with 10 of them held out in each style, all different."""
    order = rng.permutation(len(CONCEPT_NAMES))[: UNSEEN_PER_STYLE * len(STYLES)]
    unseen = {CONCEPT_NAMES[row]: STYLES[place % len(STYLES)] for place, row in enumerate(order)}
    return [Concept(name, hexcodes[name], unseen.get(name)) for name in CONCEPT_NAMES]


def rl_captions(chosen: list[Concept], rng: np.random.Generator) -> list[str]:
    """24 seen pairs, 8 a style, each of another concept.

    They are drawn from the concepts that have an unseen pair: an unseen prompt then shares its
    style with 8 of them and, most often, its object with one, which is what can carry over.
    """
    held_out = [concept for concept in chosen if concept.unseen_style]
    captions = []
    for style in STYLES:
        free = [concept for concept in held_out if concept.unseen_style != style]
        picked = [free[row] for row in rng.permutation(len(free))[:RL_PER_STYLE]]
        captions += [caption(concept, style) for concept in picked]
        held_out = [concept for concept in held_out if concept not in picked]
    return captions


def write_sheet(style: str, build: Path) -> None:
    """The concepts' pictures as one lossless webp of 15 columns."""
    built = np.load(build / f"{style}.npz")
    row_of = {str(name): row for row, name in enumerate(built["names"])}
    tiles = built["images"][[row_of[name] for name in CONCEPT_NAMES]]
    sheet = tiles.reshape(-1, COLUMNS, SIZE, SIZE, 3).swapaxes(1, 2)
    sheet = sheet.reshape(-1, COLUMNS * SIZE, 3)
    stream = io.BytesIO()
    Image.fromarray(sheet).save(stream, format="webp", lossless=True, quality=100, method=6)
    write_aside(DATA / f"{style}.webp", stream.getvalue())


def write_data(names: dict[str, str], build: Path) -> None:
    """Writes concepts.json, the three sheets and the prompt lists."""
    rng = np.random.default_rng(SPLIT_SEED)
    hexcodes = {label: code.upper() for code, label in names.items()}
    chosen = split_concepts(hexcodes, rng)
    rows = ",\n".join(f" {json.dumps(asdict(concept))}" for concept in chosen)
    write_aside(DATA / "concepts.json", f"[\n{rows}\n]\n".encode())
    for style in STYLES:
        write_sheet(style, build)
    lists = {"train": rl_captions(chosen, rng), "unseen": unseen_captions(), "all": seen_captions()}
    for name, captions in lists.items():
        write_aside(DATA / "prompts" / f"{name}.txt", ("\n".join(captions) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--build", type=Path, default=BUILD, help="folder for tarballs and npz files"
    )
    parser.add_argument("styles", nargs="*", help="only these styles")
    options = parser.parse_args()
    names = labels(fetch(*LABELS, options.build / "tarballs"))
    for source in SOURCES:
        if not options.styles or source.style in options.styles:
            path = build_style(source, names, options.build)
            print(f"{source.style}: {len(np.load(path)['names'])} pictures -> {path}")
    write_data(names, options.build)


if __name__ == "__main__":
    main()
