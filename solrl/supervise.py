"""supervisord as a child of ours: starts programs, restarts those that die, stops them all.

It is reached over a unix socket, and tethered: it gets SIGTERM, and stops everything, should this
process be killed outright. `solrl.stack` says which programs there are.
"""

from __future__ import annotations

import http.client
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from solrl import atomic, tether
from solrl.errors import ConfigError, UnavailableError

#: Marks every process of one stack, so that none is overlooked when it ends.
STACK_ID = "SOLRL_STACK_ID"
#: A unix socket's path may have 107 bytes; supervisord makes it under a longer name first.
SOCKET_PATH_LIMIT = 90
TETHER = (sys.executable, "-IS", str(Path(tether.__file__).resolve()))


@dataclass(frozen=True)
class Program:
    """What to run, and how long it may take to stop before it is killed."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stop_seconds: int = 20


@dataclass(frozen=True)
class Process:
    """State as supervisord names it (RUNNING, BACKOFF, FATAL ...); pid 0 when there is none."""

    name: str
    state: str
    pid: int
    log: Path

    @property
    def failed(self) -> bool:
        return self.state in ("BACKOFF", "EXITED", "FATAL", "UNKNOWN")


def spawn_tethered(
    command: Sequence[str], *, environment: Mapping[str, str], **popen: Any
) -> subprocess.Popen[bytes]:
    """Start `command` so that it gets SIGTERM when this process dies."""
    return subprocess.Popen(
        [*TETHER, *command], env={**environment, tether.PARENT: str(os.getpid())}, **popen
    )


def processes_of(stack_id: str) -> list[psutil.Process]:
    """Every living process marked with `stack_id`, whoever its parent is by now."""

    def marked(process: psutil.Process) -> bool:
        try:
            return (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(STACK_ID) == stack_id
            )
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):  # gone, or another user's
            return False

    return [process for process in psutil.process_iter() if marked(process)]


def end(processes: Sequence[psutil.Process], *, patience: float) -> None:
    """Wait `patience` seconds for `processes` to end by themselves, then kill the rest."""
    _, alive = psutil.wait_procs(processes, timeout=patience)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # ended between the two lines
            continue
    psutil.wait_procs(alive, timeout=5)


def tail(path: Path, lines: int = 20) -> str:
    """Last `lines` lines of a log, indented; says so when there are none."""
    if not path.exists():
        return "    (no log was written)"
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64_000))
        text = file.read().decode(errors="replace")
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (log is empty)"


class Supervisor:
    """Context manager: a supervisord that runs `programs`; none is started yet.

    Files go to `folder`: `supervisor.ini`, its socket and log, `logs/<program>.log`. On leaving,
    everything marked with `stack_id` has ended.
    """

    def __init__(
        self,
        folder: Path,
        programs: Sequence[Program],
        *,
        stack_id: str,
        environment: Mapping[str, str],
    ) -> None:
        self._folder = folder.resolve()
        self._programs = programs
        self._stack_id = stack_id
        self._environment = {**environment, STACK_ID: stack_id}
        self._socket = self._folder / "supervisor.sock"
        self._rpc = xmlrpc.client.ServerProxy(
            "http://supervisor", transport=_UnixTransport(self._socket), allow_none=True
        )
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if len(os.fsencode(self._socket)) > SOCKET_PATH_LIMIT:
            raise ConfigError(
                f"the state folder {self._folder} has a path too long for a unix socket; set "
                f"SOLRL_STATE to one of at most {SOCKET_PATH_LIMIT - 16} characters"
            )
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        ini = self._folder / "supervisor.ini"
        atomic.write_text(ini, _ini(self._folder, self._socket, self._programs))
        command = [sys.executable, "-m", "supervisor.supervisord", "-n", "-s", "-c", str(ini)]
        with (self._folder / "logs" / "supervisor-output.log").open("wb") as output:
            # A session of its own: the terminal's Ctrl-C reaches us alone, and we stop it in order.
            self._child = spawn_tethered(
                command,
                environment=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_for_rpc(deadline=time.monotonic() + 30)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_for_rpc(self, deadline: float) -> None:
        assert self._child is not None
        while True:
            try:
                self._rpc.supervisor.getState()
            except (OSError, http.client.HTTPException) as error:
                if self._child.poll() is not None or time.monotonic() > deadline:
                    raise UnavailableError(
                        f"supervisord did not start ({error}); its output:\n"
                        + tail(self._folder / "logs" / "supervisor-output.log")
                    ) from error
                time.sleep(0.05)
            else:
                return

    def log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def start(self, name: str) -> None:
        """Start one program and return at once; `processes` says what became of it."""
        self._rpc.supervisor.startProcess(name, False)

    def processes(self) -> dict[str, Process]:
        """All programs by name. Raises UnavailableError when supervisord itself is gone."""
        try:
            answer: Any = self._rpc.supervisor.getAllProcessInfo()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(
                f"supervisord does not answer at {self._socket} ({error}); its log:\n"
                + tail(self._folder / "logs" / "supervisor.log")
            ) from error
        return {
            info["name"]: Process(
                name=info["name"],
                state=info["statename"],
                pid=info["pid"],
                log=self.log(info["name"]),
            )
            for info in answer
        }

    def stop(self) -> None:
        """SIGTERM to all, SIGKILL to a program past its deadline; then nothing is left alive."""
        if self._child is None:
            return
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(timeout=5 + sum(p.stop_seconds for p in self._programs))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        end(processes_of(self._stack_id), patience=1)
        self._child = None


def _ini(folder: Path, unix_socket: Path, programs: Sequence[Program]) -> str:
    sections = [
        "[unix_http_server]",
        f"file={_escape(unix_socket)}",
        "chmod=0600",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
        "[supervisord]",
        f"logfile={_escape(folder / 'logs' / 'supervisor.log')}",
        f"pidfile={_escape(folder / 'supervisord.pid')}",
    ]
    for place, program in enumerate(programs):
        environment = ",".join(f'{k}="{_escape(v)}"' for k, v in program.environment.items())
        sections += [
            f"[program:{program.name}]",
            f"command={_escape(shlex.join([*TETHER, *program.command]))}",
            f"environment={environment}",
            # Stopped one after another, the last first: whoever uses a program goes before it.
            f"priority={place}",
            "autostart=false",
            "autorestart=true",
            # A death within this time counts as a failed start; after four of those it gives up.
            "startsecs=2",
            "startretries=3",
            f"stopwaitsecs={program.stop_seconds}",
            "stopasgroup=true",
            "killasgroup=true",
            "redirect_stderr=true",
            f"stdout_logfile={_escape(folder / 'logs' / (program.name + '.log'))}",
            "stdout_logfile_maxbytes=20MB",
            "stdout_logfile_backups=1",
        ]
    return "\n".join(sections) + "\n"


def _escape(value: str | Path) -> str:
    return str(value).replace("%", "%%")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("supervisor", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: object) -> http.client.HTTPConnection:
        return _UnixConnection(self._path)
