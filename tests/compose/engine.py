"""A Docker engine for the test of the compose project: the one that answers, else one of our own.

Our own needs root, on Debian. It is made of Debian's packages, keeps everything in one folder, and
leaves nothing behind: neither processes, interfaces, firewall rules nor packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from solrl.supervise import spawn_tethered

HERE = Path(__file__).resolve().parent
PACKAGES = ("docker.io", "iproute2", "iptables", "mmdebstrap")
#: Debian's own Docker has no Compose; this release has it, and nothing else is taken from there.
NEWER = "trixie"
PLUGINS = ("docker-compose", "docker-buildx")
IN_IMAGES = "ca-certificates,curl,prometheus,python3,python3-dev,python3-venv,redis-server,wget"
#: Where packet rules are written by an engine.
TABLES = {"filter": "INPUT FORWARD OUTPUT", "nat": "PREROUTING INPUT OUTPUT POSTROUTING"}
FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


class EngineError(Exception):
    """No engine could be had. The tests of the compose project fail then; they never skip."""


def call(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: str | None = None,
    timeout: float = 600,
) -> str:
    """Run to the end; its stdout. EngineError with all it said when it failed."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        words = " ".join(map(str, command))
        raise EngineError(f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def answers(environment: Mapping[str, str]) -> str | None:
    """The version of an engine with Compose that answers; None without one."""
    try:
        call(["docker", "compose", "version"], environment=environment, timeout=30)
        ask = ["docker", "version", "--format", "{{.Server.Version}}"]
        return call(ask, environment=environment, timeout=30).strip()
    except EngineError:
        return None


@contextmanager
def engine(folder: Path, images: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Variables with which `docker` reaches an engine that has, or can pull, the `images`.

    `images` maps a target of standins/Dockerfile to the name it stands in for; an engine that is
    there already pulls them itself.
    """
    if answers({}):
        yield {}
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EngineError(
            "no Docker engine with Compose answers; starting one needs root on Debian"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(installed(PACKAGES))
        stack.enter_context(network_put_back())
        environment = {"DOCKER_CONFIG": str(folder / "config")}
        plugins(folder / "config" / "cli-plugins", folder / "apt")
        environment["DOCKER_HOST"] = stack.enter_context(daemon(folder, environment))
        if not pullable(images["redis"], environment):
            standins(folder / "standins", images, environment)
        yield environment


@contextmanager
def installed(packages: Sequence[str]) -> Iterator[None]:
    """Debian's packages; those that were not there before are removed again."""

    def there() -> set[str]:
        listed = call(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}${Package}\n"])
        return {line[3:].strip() for line in listed.splitlines() if line.startswith("ii")}

    before = there()
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        if not before.issuperset(packages):
            call(["apt-get", "update", "-q"], environment=quiet)
            install = ["apt-get", "install", "-qy", "--no-install-recommends", *packages]
            call(install, environment=quiet)
        yield
    finally:
        if added := there() - before:
            call(["apt-get", "purge", "-qy", *sorted(added)], environment=quiet)


def plugins(target: Path, work: Path) -> None:
    """Compose and buildx of a newer Debian, from the mirror this machine uses, beside its own."""
    wanted = "$(CREATED_BY) $(ORIGIN) $(LABEL) $(REPO_URI)"
    listed = call(["apt-get", "indextargets", "--format", wanted]).splitlines()
    mirrors = [line.split()[3] for line in listed if line.startswith("Packages Debian Debian ")]
    if not mirrors:
        raise EngineError("no mirror of Debian is configured for apt on this machine")
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    for name in ("lists/partial", "archives/partial", "unpacked"):
        (work / name).mkdir(parents=True)
    (work / "sources.list").write_text(f"deb [signed-by={keys}] {mirrors[0]} {NEWER} main\n")
    private = [
        *("-o", f"Dir::Etc::SourceList={work / 'sources.list'}", "-o", "Dir::Etc::SourceParts=-"),
        *("-o", f"Dir::State::Lists={work / 'lists'}", "-o", f"Dir::Cache={work}"),
    ]
    call(["apt-get", *private, "update", "-q"])
    call(["apt-get", *private, "-q", "download", *PLUGINS], folder=work)
    for package in work.glob("*.deb"):
        call(["dpkg-deb", "-x", package, work / "unpacked"])
    shutil.copytree(work / "unpacked/usr/libexec/docker/cli-plugins", target)


@contextmanager
def network_put_back() -> Iterator[None]:
    """An engine leaves forwarding, packet rules and a bridge behind; they are put back."""
    rules = call(["iptables-save"])
    for table, chains in TABLES.items():
        if f"*{table}\n" not in rules:
            lines = [f":{chain} ACCEPT [0:0]" for chain in chains.split()]
            rules += "\n".join([f"*{table}", *lines, "COMMIT", ""])
    forwarding = FORWARDING.read_text()
    links = interfaces()
    try:
        yield
    finally:
        for link in interfaces() - links:
            call(["ip", "link", "delete", link])
        call(["iptables-restore"], stdin=rules)
        FORWARDING.write_text(forwarding)


def interfaces() -> set[str]:
    return {link["ifname"] for link in json.loads(call(["ip", "-json", "link", "show"]))}


@contextmanager
def daemon(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """dockerd with its data in `folder`; its address."""
    with (
        tempfile.TemporaryDirectory(prefix="solrl-docker-") as short,
        (folder / "dockerd.log").open("wb") as log,
    ):
        address = f"unix://{short}/docker.sock"
        process = spawn_tethered(
            [
                "dockerd",
                f"--host={address}",
                f"--data-root={folder / 'data'}",
                f"--exec-root={short}/exec",
                f"--pidfile={short}/docker.pid",
            ],
            environment=dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            reached = {**environment, "DOCKER_HOST": address}
            deadline = time.monotonic() + 60
            while answers(reached) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = (folder / "dockerd.log").read_text()[-4000:]
                    raise EngineError(f"dockerd did not start:\n{said}")
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=120)


def pullable(image: str, environment: Mapping[str, str]) -> bool:
    try:
        call(["docker", "pull", "--quiet", image], environment=environment, timeout=120)
    except EngineError:
        return False
    return True


def standins(work: Path, images: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Make and tag a local image for each of `images`."""
    work.mkdir()
    release = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.M)
    assert release
    root = work / "root.tar"
    call(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={IN_IMAGES}", release[1], root])
    call(["docker", "import", root, "base"], environment=environment)
    root.unlink()
    bundle = os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt"
    shutil.copy(bundle, work / "ca.pem")
    for target, name in images.items():
        build = ["docker", "build", "--quiet", "--target", target, "--tag", name]
        call([*build, "--file", HERE / "standins/Dockerfile", work], environment=environment)
