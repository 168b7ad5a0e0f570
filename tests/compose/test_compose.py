"""README's Docker section as it stands, on a real engine, and what a user relies on meanwhile.

One story in its order: build, start, score while it trains, kill, finish, stop and start again.
`make test-compose` runs it; the tests of the default run need no Docker.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import httpx
import pytest
from PIL import Image

from solrl.metrics import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "compose"
PROMETHEUS = "http://127.0.0.1:9090"
LEARNER = "http://127.0.0.1:8030"
OURS = ("triton", "explorer", "regenerator", "reward", "learner")
#: Long enough to look at while it goes on; the evaluation as small as it may be.
SHORT_RUN = """
SOLRL__RUN__ITERATIONS=2
SOLRL__EVALUATE__TRAIN_IMAGES=2
SOLRL__EVALUATE__UNSEEN_IMAGES=2
SOLRL__EVALUATE__GUIDED_IMAGES=2
"""

pytestmark = pytest.mark.timeout(1800)


class Project:
    """A copy of what is tracked, as a user has it, and the engine that runs it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment, "COMPOSE_PROJECT_NAME": "solrl-test"}
        readme = (folder / "README.md").read_text()
        self.unanswered = expressions()
        self.blocks = re.findall(r"<!-- compose -->\n```bash\n(.*?)```", readme, re.DOTALL)

    def shell(self, script: str, *, timeout: float = 900) -> str:
        """Run a block as it would be pasted; its stdout, and AssertionError with all it said."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def block(self, *, holding: str) -> str:
        """README's one block with `holding` in it."""
        (found,) = [block for block in self.blocks if holding in block]
        return str(found)

    def inspect(self, service: str) -> dict[str, Any]:
        name = self.shell(f"docker compose ps --all --quiet {service}").strip()
        (answer,) = json.loads(self.shell(f"docker inspect {name}"))
        return dict(answer)

    def kill(self, service: str) -> None:
        """SIGKILL the service inside its container, as a crash does; `docker kill` is taken for a
        wish of the user, after which nothing is started again."""
        code = "import os;os.kill(int(open('/proc/1/task/1/children').read().split()[0]),9)"
        self.shell(f'docker compose exec -T {service} python3 -c "{code}"')

    def until(self, what: str, check: Callable[[], bool], *, seconds: float = 300) -> None:
        """Ask again and again; AssertionError when it does not come."""
        deadline = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < deadline, f"{what} did not come within {seconds:.0f} s"
            self.unanswered = {one for one in self.unanswered if not query(one)}
            time.sleep(2)


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    compose = (ROOT / "docker-compose.yml").read_text()
    (python,) = set(re.findall(r"ARG PYTHON_IMAGE=(\S+)", dockerfiles()))
    images = {"python": python}
    for image in re.findall(r"image: ((?!solrl/)\S+)", compose):
        images[image.partition(":")[0].replace("/", "-")] = image
    with engine.engine(ROOT / "build" / "engine", images) as environment:
        folder = WORK / "solrl"
        shutil.rmtree(WORK, ignore_errors=True)
        copy_tracked(folder)
        # The CPU's torch, as `make setup` finds it: no index has to be named.
        wheels = folder / "deploy/docker/wheels"
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels]
        engine.call([*download, "-c", ROOT / "constraints.txt", "torch"])
        made = Project(folder, environment)
        try:
            yield made
        finally:
            logs = ROOT / "build" / "compose-logs"
            logs.mkdir(parents=True, exist_ok=True)
            for command in ("logs --no-color", "ps --all"):
                said = made.shell(f"docker compose {command} || true")
                (logs / f"{command.split()[0]}.txt").write_text(said)
            made.shell("docker compose --profile cli down --volumes --timeout 5")
            shutil.rmtree(WORK)


def dockerfiles() -> str:
    return "".join(path.read_text() for path in ROOT.glob("services/*/Dockerfile"))


def copy_tracked(folder: Path) -> None:
    """What git would give: files tracked, or new and not ignored."""
    listed = engine.call(["git", "ls-files", "-z", "-co", "--exclude-standard"], folder=ROOT)
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_status() -> dict[str, Any]:
    """The learner's; empty while it does not answer."""
    try:
        return dict(httpx.get(f"{LEARNER}/v1/run", timeout=10).json())
    except (httpx.HTTPError, ValueError):
        return {}


def query(expression: str) -> list[dict[str, Any]]:
    """Prometheus' answer as a list of series."""
    answer = httpx.get(f"{PROMETHEUS}/api/v1/query", params={"query": expression}, timeout=30)
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    data = answer.json()["data"]
    return list(data["result"]) if data["resultType"] == "vector" else [data]


def expressions() -> set[str]:
    """Of every panel of every dashboard."""
    dashboards = (ROOT / "deploy/grafana/dashboards").glob("*.json")
    panels = [panel for file in dashboards for panel in json.loads(file.read_text())["panels"]]
    return {target["expr"] for panel in panels for target in panel.get("targets", [])}


def test_images_are_built_by_the_readmes_commands(project: Project) -> None:
    project.shell(project.block(holding="cp .env.example"))
    with (project.folder / ".env").open("a") as env:
        env.write(SHORT_RUN)
    project.shell("docker compose build", timeout=1500)
    size = "docker image inspect --format '{{.Size}}' solrl/%s:latest"
    for name in OURS:
        print(f"solrl/{name}: {int(project.shell(size % name)) / 1e6:.0f} MB")


def test_everything_comes_up_healthy(project: Project) -> None:
    project.shell(project.block(holding="docker compose build"))
    for service in (*OURS, "redis", "prometheus", "grafana"):
        assert project.inspect(service)["State"]["Health"]["Status"] == "healthy", service


@pytest.mark.parametrize("service", OURS)
def test_containers_are_locked_down(project: Project, service: str) -> None:
    container = project.inspect(service)
    host = container["HostConfig"]
    user = project.shell(f"docker compose exec -T {service} id -u").strip()
    assert user == container["Config"]["User"].partition(":")[0] == "10001"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Memory"] > 0
    assert host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert "org.opencontainers.image.title" in container["Config"]["Labels"]
    bound = [port["HostIp"] for ports in host["PortBindings"].values() for port in ports]
    assert set(bound) == {"127.0.0.1"}
    refused = "import pathlib; pathlib.Path('/app/x').write_text('x')"
    with pytest.raises(AssertionError, match="Read-only file system"):
        project.shell(f'docker compose exec -T {service} python3 -c "{refused}"')


def test_prompts_are_scored_by_curl_while_it_trains(project: Project) -> None:
    project.until("training", lambda: run_status().get("state") == "running")
    answer = json.loads(project.shell(project.block(holding="/v1/score-prompts")))
    assert run_status()["state"] in ("running", "evaluating")
    assert [row["prompt"] for row in answer["prompts"]] == [
        "strawberry, flat style",
        "penguin, 3d style",
    ]
    for row in answer["prompts"]:
        assert len(row["rewards"]["emoji_clip"]["values"]) == 8
        assert row["rewards"]["emoji_clip"]["spread"] > 0


def test_a_picture_is_made_and_scored(project: Project) -> None:
    shown = project.shell(project.block(holding="cli score"))
    with Image.open(project.folder / "strawberry.png") as picture:
        assert picture.size == (32, 32)
    assert (project.folder / "strawberry.png").stat().st_uid == os.getuid()
    assert "emoji_clip" in shown


def test_killed_containers_come_back_and_the_run_goes_on(project: Project) -> None:
    for service in ("regenerator", "triton", "learner"):
        assert run_status()["state"] == "running", f"too late to kill {service}"
        before = project.inspect(service)["RestartCount"]
        project.kill(service)

        def back(service: str = service, before: int = before) -> bool:
            container = project.inspect(service)
            healthy = container["State"]["Health"]["Status"] == "healthy"
            return bool(container["RestartCount"] > before and healthy)

        project.until(f"{service} again", back)


def test_the_run_finishes_and_replicas_serve_its_last_adapter(project: Project) -> None:
    project.until("the end of the run", lambda: run_status().get("state") == "finished")
    assert run_status()["iterations_done"] == 2
    project.until("the last scrape", lambda: served() == {"explorer": 2, "regenerator": 2})
    assert all(float(series["value"][1]) > 0 for series in query("solrl_reload_seconds_count"))
    bound, expected = (
        query(f'solrl_reload_modules{{job="regenerator", modules="{modules}"}}')[0]["value"][1]
        for modules in ("bound", "expected")
    )
    assert float(bound) == float(expected) > 0


def served() -> dict[str, float]:
    """The policy version each replica serves, by what Prometheus scraped."""
    series = query('solrl_policy_version{job=~"explorer|regenerator"}')
    return {one["metric"]["job"]: float(one["value"][1]) for one in series}


def test_prometheus_holds_every_metric(project: Project) -> None:
    refused = httpx.post("http://127.0.0.1:8020/v1/score", files={"files": b"no picture"})
    assert 400 <= refused.status_code < 500
    down = [series["metric"] for series in query("up") if series["value"][1] != "1"]
    assert down == []
    suffix = {"counter": "", "gauge": "", "histogram": "_bucket"}

    def missing() -> list[str]:
        names = {f"{metric.name}{suffix[metric.kind]}" for metric in CATALOGUE}
        return sorted(name for name in names if not query(f"last_over_time({name}[1h])"))

    project.until("every metric", lambda: not missing(), seconds=30)


def test_every_expression_of_the_dashboard_returned_data_during_the_run(project: Project) -> None:
    assert project.unanswered == set()


def test_prometheus_takes_the_configuration_and_its_alert_rules(project: Project) -> None:
    answer = httpx.get(f"{PROMETHEUS}/api/v1/rules", timeout=30).json()
    rules = [rule for group in answer["data"]["groups"] for rule in group["rules"]]
    assert len(rules) >= 11
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    promtool = (
        "docker compose run --rm --no-deps --entrypoint promtool "
        '--volume "$PWD/deploy/prometheus:/checked:ro" prometheus '
    )
    project.shell(promtool + "check config /etc/prometheus/prometheus.yml")
    project.shell(promtool + "test rules /checked/rules_test.yml")


def test_the_dashboard_is_as_grafanas_types_want_it(project: Project) -> None:
    with engine.installed(() if shutil.which("npm") else ("nodejs", "npm")):
        project.shell(
            "cd tests/compose/grafana && npm ci --silent --ignore-scripts && "
            "node check.mjs ../../../deploy/grafana/dashboards/*.json"
        )


@pytest.mark.parametrize(("learner", "placement"), [("0", "colocated"), ("1", "split")])
def test_gpu_file_gives_each_service_its_device(
    project: Project, learner: str, placement: str
) -> None:
    variables = f"SOLRL_MODEL_ID=a/b SOLRL_MODEL_REVISION={'0' * 40} LEARNER_GPU={learner}"
    files = "-f docker-compose.yml -f docker-compose.gpu.yml"
    config = json.loads(project.shell(f"{variables} docker compose {files} config --format json"))
    devices = {
        name: service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name, service in config["services"].items()
        if service.get("deploy", {}).get("resources", {}).get("reservations")
    }
    first = ["0"]
    split = {"triton": first, "regenerator": first, "reward": first, "learner": [learner]}
    assert devices == split, placement


def test_the_lora_is_taken_home(project: Project) -> None:
    project.shell(project.block(holding="cli export"))
    assert list((project.folder / "my-lora").glob("*.safetensors"))


def test_down_and_up_keeps_the_run(project: Project) -> None:
    before = project.inspect("learner")["Id"]
    project.shell(project.block(holding="compose down"))
    assert project.inspect("learner")["Id"] != before
    project.until("the finished run", lambda: run_status().get("state") == "finished")
    assert run_status()["iterations_done"] == 2
    project.until("a scrape", lambda: bool(query('solrl_iterations_total{job="learner"}')))
    (again,) = query('solrl_iterations_total{job="learner"}')
    assert float(again["value"][1]) == 0, "it trained again"
    made = project.shell('docker compose run --rm cli generate "penguin, 3d style" --out p.png')
    assert "policy version 2" in made
    assert query("max_over_time(solrl_iterations_total[1h]) > 0"), "metrics are gone"
