"""Compose files, images, .env.example and Prometheus' targets agree, and keep to this machine."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from solrl.config import Config, load_config

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ("docker-compose.yml", "docker-compose.gpu.yml")
DOCKERFILES = sorted(ROOT.glob("services/*/Dockerfile"))
DEMO = ROOT / "configs" / "demo.toml"
# Services that end by themselves, or are started by hand.
SHORT = {"models", "cli"}
# Variables of .env that compose hands on unread (env_file).
HANDED_ON = {"SOLRL_TOKEN"}
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<operator>:?[-?])?(?P<text>[^}]*)\}")
PINNED = re.compile(r"[^\s:]+(?::\d+/\S+)?:v?\d+\.\d+[\w.-]*")


def text_of(path: Path) -> str:
    """Without the lines that are comments."""
    return re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)


def resolved(text: str) -> str:
    """With every variable at its default."""
    return VARIABLE.sub(
        lambda found: found["text"] if found["operator"] in ("-", ":-") else "set-by-hand", text
    )


def merged(base: Any, over: Any) -> Any:
    """As compose does, as far as it matters here: tables are merged, the rest is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


@dataclass(frozen=True)
class Stage:
    """A stage of a Dockerfile."""

    source: str
    instructions: tuple[tuple[str, str], ...]

    def texts(self, word: str) -> list[str]:
        return [text for seen, text in self.instructions if seen == word]


@cache
def stages(path: Path) -> dict[str, Stage]:
    """By name; the last one also as the empty name. FROM has the defaults of its arguments."""
    arguments: dict[str, str] = {}
    read: list[tuple[str, str, list[tuple[str, str]]]] = []
    for line in text_of(path).replace("\\\n", " ").splitlines():
        word, _, text = line.strip().partition(" ")
        if word == "FROM":
            source, _, name = text.partition(" AS ")
            read.append((name, re.sub(r"\$\{(\w+)\}", lambda m: arguments[m[1]], source), []))
        elif read and word:
            read[-1][2].append((word, text.strip()))
        elif word == "ARG":
            name, _, arguments[name] = text.partition("=")
    found = {name: Stage(source, tuple(lines)) for name, source, lines in read}
    return found | {"": [*found.values()][-1]}


@dataclass(frozen=True)
class Service:
    """A service of the compose project, of the demo (cpu) or with the GPU file on top."""

    kind: str
    name: str
    keys: dict[str, Any]

    @property
    def stage(self) -> Stage | None:
        """What its image is built from; None for an image that is not ours."""
        build = self.keys.get("build")
        return build and stages(ROOT / build["dockerfile"])[build.get("target", "")]

    @property
    def environment(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.keys.get("environment", {}).items()}

    @property
    def config(self) -> Config:
        """What it runs with; ConfigError for a setting that does not exist."""
        return load_config(DEMO, environment=self.environment)


def services_of(kind: str) -> list[Service]:
    tree: Any = {}
    for name in COMPOSE if kind == "gpu" else COMPOSE[:1]:
        tree = merged(tree, yaml.safe_load(resolved((ROOT / name).read_text())))
    return [Service(kind, name, keys) for name, keys in tree["services"].items()]


SERVICES = services_of("cpu") + services_of("gpu")
OURS = [service for service in SERVICES if service.stage]
CPU = {service.name: service for service in SERVICES if service.kind == "cpu"}


def id_of(service: Service) -> str:
    return f"{service.kind}-{service.name}"


def env_example() -> list[tuple[str, str]]:
    return re.findall(
        r"^#?([A-Z]\w*)=(.*)$", (ROOT / ".env.example").read_text(), flags=re.MULTILINE
    )


def code() -> str:
    return "".join(
        path.read_text()
        for folder in ("solrl", "services")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


def setting(config: Config, variable: str) -> str:
    """The value of SOLRL__SECTION__KEY."""
    _, section, key = variable.lower().split("__")
    return str(getattr(getattr(config, section), key))


def sent_to_builder(path: str) -> bool:
    """.dockerignore: the last pattern that a path or a folder above it matches decides."""
    sent = True
    above = ["/".join(path.split("/")[:n]) for n in range(1, path.count("/") + 2)]
    for line in text_of(ROOT / ".dockerignore").split():
        pattern = line.removeprefix("!").removeprefix("**/")
        names = [one.split("/")[-1] for one in above] if "**/" in line else above
        # fnmatch lets * go across folders; here it is only used for one level.
        if any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for name in names):
            sent = line.startswith("!")
    return sent


def copied(path: Path) -> set[str]:
    """What the builder needs of this repository."""
    found: set[str] = set()
    for stage in stages(path).values():
        for text in stage.texts("COPY") + stage.texts("ADD"):
            if not text.startswith("--from="):
                found.update(text.split()[:-1])
        for text in stage.texts("RUN"):
            found.update(re.findall(r"--mount=type=bind,source=([^,\s]+)", text))
    return found


@pytest.mark.parametrize("service", SERVICES, ids=id_of)
def test_image_is_built_here_or_has_a_version(service: Service) -> None:
    image = service.keys["image"]
    assert image.startswith("solrl/") if service.stage else PINNED.fullmatch(image), image


def test_one_image_name_is_one_build() -> None:
    builds = defaultdict(list)
    for service in OURS:
        builds[service.keys["image"]].append(service.stage)
    assert all(len({*found}) == 1 for found in builds.values())


@pytest.mark.parametrize("service", SERVICES, ids=id_of)
def test_ports_are_published_to_this_machine_only(service: Service) -> None:
    for port in service.keys.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port
    assert service.keys.get("network_mode") != "host"
    # On the default bridge, outside the project's network, it is for downloads alone.
    assert service.keys.get("network_mode") != "bridge" or id_of(service) == "gpu-models"


@pytest.mark.parametrize("service", SERVICES, ids=id_of)
def test_service_restarts_has_limits_and_says_whether_it_is_healthy(service: Service) -> None:
    assert re.fullmatch(r"\d+[mg]", service.keys["mem_limit"])
    assert service.keys["pids_limit"] > 0
    health = service.keys.get("healthcheck", {})
    if service.name in SHORT:
        assert service.keys["restart"] == "no"
        # The image's own check asks a server that a short one does not run.
        assert health == {"disable": True}
        return
    assert service.keys["restart"] == "unless-stopped"
    assert health.get("test") or (service.stage and service.stage.texts("HEALTHCHECK"))
    assert not health.get("disable")


@pytest.mark.parametrize("service", SERVICES, ids=id_of)
def test_service_cannot_gain_rights(service: Service) -> None:
    assert "no-new-privileges:true" in service.keys["security_opt"]
    assert "privileged" not in service.keys
    assert "cap_add" not in service.keys
    if service.stage:
        assert service.keys["cap_drop"] == ["ALL"]
        assert service.keys["read_only"] is True
        assert service.keys["tmpfs"] == ["/tmp"]


@pytest.mark.parametrize("service", SERVICES, ids=id_of)
def test_what_is_mounted_is_there(service: Service) -> None:
    declared = yaml.safe_load((ROOT / COMPOSE[0]).read_text())["volumes"]
    for mount in service.keys.get("volumes", []):
        source = mount["source"] if isinstance(mount, dict) else mount.partition(":")[0]
        found = (ROOT / source).exists() if source.startswith(".") else source in declared
        assert found, source


@pytest.mark.parametrize("service", OURS, ids=id_of)
def test_environment_holds_real_settings_and_variables_that_are_read(service: Service) -> None:
    source = code()
    for name, value in service.environment.items():
        if name.startswith("SOLRL__"):
            assert setting(service.config, name) == value, name
        elif name.startswith("SOLRL_"):
            assert f'"{name}"' in source, name


@pytest.mark.parametrize("service", OURS, ids=id_of)
def test_services_look_for_each_other_where_they_listen(service: Service) -> None:
    for name, value in service.environment.items():
        if ":" in value:
            address = urlsplit(value if "//" in value else f"//{value}")
            neighbour = CPU[str(address.hostname)]
            ports = neighbour.stage.texts("EXPOSE") if neighbour.stage else ["6379"]
            assert str(address.port) in " ".join(ports).split(), name


def test_published_ports_are_the_images_own() -> None:
    for service in OURS:
        assert service.stage
        exposed = " ".join(service.stage.texts("EXPOSE")).split()
        for port in service.keys.get("ports", []):
            assert port.rpartition(":")[2] in exposed, f"{id_of(service)}: {port}"


def test_env_example_has_every_variable_of_compose_with_its_default() -> None:
    """A variable that has another default with GPUs is there twice."""
    asked = defaultdict(set)
    for name in COMPOSE:
        for found in VARIABLE.finditer(text_of(ROOT / name)):
            assert found["operator"], f"{name}: {found[0]} has no default"
            asked[found["name"]].add("" if "?" in found["operator"] else found["text"])
    example = defaultdict(set)
    for name, value in env_example():
        if not name.startswith("SOLRL__"):
            example[name].add(value)
    assert {*example} - {*asked} == HANDED_ON
    assert {name: example[name] for name in asked} == asked
    assert all(f'"{name}"' in code() for name in HANDED_ON)


def test_env_example_names_settings_with_the_value_they_have() -> None:
    named = [(name, value) for name, value in env_example() if name.startswith("SOLRL__")]
    assert named
    for name, value in named:
        assert setting(load_config(DEMO, environment={name: value}), name) == value
        has = {setting(config, name) for config in (Config(), load_config(DEMO, environment={}))}
        assert value in has, name


def test_env_example_sets_nothing() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)


def test_prometheus_scrapes_the_port_where_each_service_has_its_metrics() -> None:
    settings = CPU["learner"].config.services
    expected = {
        # The gateway's are beside its gRPC.
        "explorer": int(settings.explorer.rpartition(":")[2]) + 1,
        "triton": int(CPU["triton"].environment["SOLRL_TRITON_METRICS_PORT"]),
        "regenerator": urlsplit(settings.regenerator).port,
        "reward": urlsplit(settings.reward).port,
        "learner": settings.learner_port,
    }
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job.pop("job_name"): job for job in prometheus["scrape_configs"]}
    assert jobs.pop("prometheus")["static_configs"] == [{"targets": ["localhost:9090"]}]
    assert {*jobs} == {*expected}
    for name, job in jobs.items():
        [found] = job["dns_sd_configs"]
        assert found["names"] == [name]
        assert found["port"] == expected[name]
        stage = CPU[name].stage
        assert stage
        assert str(found["port"]) in " ".join(stage.texts("EXPOSE")).split()


def test_grafana_and_prometheus_find_their_files_where_compose_mounts_them() -> None:
    def mounts(name: str) -> dict[str, str]:
        parts = [volume.split(":") for volume in CPU[name].keys["volumes"]]
        return {there: here for here, there, *_ in parts}

    grafana = mounts("grafana")
    [provider] = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/dashboards/solrl.yml").read_text()
    )["providers"]
    home = CPU["grafana"].environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder, _, name = home.rpartition("/")
    assert folder == provider["options"]["path"]
    assert (ROOT / grafana[folder] / name).is_file()
    assert (ROOT / grafana["/etc/grafana/provisioning"] / "datasources").is_dir()
    [source] = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    assert source["url"] == "http://prometheus:9090"
    [rules] = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["rule_files"]
    assert [*(ROOT / mounts("prometheus")[rules.rpartition("/")[0]]).glob("*.yml")]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_dockerfile_starts_from_versions_and_needs_no_frontend(path: Path) -> None:
    # A `# syntax=` line is fetched from a registry before anything is built.
    assert not re.search(r"^#\s*syntax\s*=", path.read_text(), re.MULTILINE)
    known = stages(path)
    for stage in known.values():
        assert stage.source in ("scratch", *known) or PINNED.fullmatch(stage.source), stage.source


def test_dockerfiles_start_from_the_same_python() -> None:
    sources = {stage.source for path in DOCKERFILES for stage in stages(path).values()}
    assert len({source for source in sources if source.startswith("python:")}) == 1


def test_every_dockerfile_is_a_service() -> None:
    built = {ROOT / service.keys["build"]["dockerfile"] for service in OURS}
    assert built == {*DOCKERFILES}


@pytest.mark.parametrize("service", OURS, ids=id_of)
def test_image_has_a_user_a_health_check_and_labels(service: Service) -> None:
    assert service.stage
    [user] = service.stage.texts("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert f"useradd --uid {user.partition(':')[0]} " in " ".join(service.stage.texts("RUN"))
    [check] = service.stage.texts("HEALTHCHECK")
    assert "solrl.probes" in check
    [label] = service.stage.texts("LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', label))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*labels} >= {"title", "description", "licenses"}
    assert labels["licenses"] == project["license"]


@pytest.mark.parametrize("service", OURS, ids=id_of)
def test_arguments_of_a_build_are_given_and_in_env_example(service: Service) -> None:
    build = service.keys["build"]
    known = stages(ROOT / build["dockerfile"])
    defaults = {text for stage in known.values() for text in stage.texts("ARG")}
    assert {f"{name}={value}" for name, value in build["args"].items()} == defaults
    assert defaults <= {f"{name}={value}" for name, value in env_example()}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.parent.name)
def test_what_an_image_takes_is_there_and_sent_to_the_builder(path: Path) -> None:
    assert copied(path)
    for source in copied(path):
        assert (ROOT / source).exists(), source
        assert sent_to_builder(source), source


def test_the_builder_is_sent_nothing_private_and_nothing_in_vain() -> None:
    for name in (".env", ".git", "runs", "build", "tests", "solrl/__pycache__", "a.pyc"):
        assert not sent_to_builder(name), name
    assert sent_to_builder("solrl/clients/http.py")
    named = {line[1:] for line in text_of(ROOT / ".dockerignore").split() if line[0] == "!"}
    taken = {source for path in DOCKERFILES for source in copied(path)}
    assert all(any(source.startswith(name) for source in taken) for name in named)
