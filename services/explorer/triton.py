"""`python -m services.explorer.triton --config F`: runs a Triton server and watches it.

The server is the packaged one, or the one installed in the folder that SOLRL_TRITON_SERVER names,
as in NVIDIA's own container.

Triton never restarts a Python stub that died, and goes on saying that it is ready. So the model
itself is asked every few seconds; when it does not answer, everything is ended and the exit status
is 1, for whoever supervises this process to start it again. The gateway then loads the announced
adapter once more.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import psutil

from services import launch
from services.explorer.triton_client import MODEL, TritonClient
from solrl import atomic, supervise
from solrl.config import Config, to_toml
from solrl.errors import ConfigError, SolrlError, UnavailableError
from solrl.probes import port_is_free, split_address
from solrl.stack import free_ports
from solrl.supervise import STACK_ID, spawn_tethered

REPOSITORY = Path(__file__).parent / "model_repository"
#: Seconds the model may take to load; a cold compilation is part of it.
START_TIMEOUT = 900.0
#: Seconds between two questions to the model.
PROBE_EVERY = 5.0
#: An answer comes between two solver steps; who is merely busy must not be taken for dead.
PROBE_TIMEOUT = 60.0
#: Seconds Triton has to end by itself; its own patience is EXIT_TIMEOUT.
STOP_TIMEOUT = 10.0
EXIT_TIMEOUT = 5

logger = logging.getLogger("solrl.explorer.triton")


@dataclass(frozen=True)
class Server:
    """A Triton to run; `libraries` are folders its loader has to search first."""

    binary: Path
    backends: Path
    libraries: tuple[Path, ...] = ()


def find_server(cache: Path) -> Server:
    """The installed server that SOLRL_TRITON_SERVER names, else the packaged one; ConfigError."""
    if installed := os.environ.get("SOLRL_TRITON_SERVER"):
        server = Server(Path(installed, "bin", "tritonserver"), Path(installed, "backends"))
        for needed in (server.binary, server.backends / "python"):
            if not needed.exists():
                raise ConfigError(
                    f"SOLRL_TRITON_SERVER = {installed!r}: there is no {needed}; name the folder "
                    "Triton is installed in, or leave it out to run the packaged one"
                )
        return server
    try:
        wheel = distribution("nvidia-pytriton")
    except PackageNotFoundError as error:
        raise ConfigError(
            "no Triton is here: install nvidia-pytriton (extra `triton`), or name the folder of "
            "an installed server in SOLRL_TRITON_SERVER"
        ) from error
    # Found without importing the wheel's own wrapper, which takes longer than all the rest here.
    packaged = Path(str(wheel.locate_file("pytriton/tritonserver")))
    return Server(
        packaged / "bin" / "tritonserver",
        _backend_folder(packaged, cache),
        (packaged.parents[1] / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR"))),
    )


def _backend_folder(packaged: Path, cache: Path) -> Path:
    """Triton's backend directory, put together once: its library, its module, this Python's stub.

    The wheel ships the stubs elsewhere and without the right to be executed.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = (cache / f"triton-{version('nvidia-pytriton')}-py{python}").resolve()
    files = [
        packaged / "backends" / "python" / "libtriton_python.so",
        packaged / "backends" / "python" / "triton_python_backend_utils.py",
        packaged / "python_backend_stubs" / python / "triton_python_backend_stub",
    ]
    if absent := [str(file) for file in files if not file.is_file()]:
        raise ConfigError(
            f"the packaged Triton has no backend for Python {python} ({absent[0]} is missing); "
            "use Python 3.11 with nvidia-pytriton 0.7.0"
        )
    if not folder.exists():
        try:
            with atomic.new_directory(folder) as aside:
                (aside / "python").mkdir()
                for file in files:
                    (aside / "python" / file.name).write_bytes(file.read_bytes())
                (aside / "python" / "triton_python_backend_stub").chmod(0o755)
        except OSError:
            # Another server put it there first: a folder cannot be renamed onto a full one.
            if not folder.exists():
                raise
    return folder


def environment(server: Server, config_file: Path, cache: Path) -> dict[str, str]:
    """What server and stub need to find: libraries, this environment's Python, the config."""
    libraries = [*server.libraries, os.environ.get("LD_LIBRARY_PATH")]
    roots = [Path(__file__).resolve().parents[2], os.environ.get("PYTHONPATH")]
    # The file is resolved already; variables must not win over it a second time.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SOLRL__")}
    return {
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str((cache / "inductor").resolve()),
        **kept,
        "LD_LIBRARY_PATH": os.pathsep.join(str(folder) for folder in libraries if folder),
        # The stub takes the packages of the first python3 in PATH.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(str(root) for root in roots if root),
        "SOLRL_CONFIG": str(config_file),
    }


def command(
    server: Server, prefix: str, *, host: str, grpc: int, http: int, metrics: int
) -> list[str]:
    """The server's command line."""
    return [
        str(server.binary),
        f"--model-repository={REPOSITORY}",
        "--model-control-mode=explicit",
        f"--load-model={MODEL}",
        "--disable-auto-complete-config",
        f"--backend-directory={server.backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--backend-config=python,shm-default-byte-size=16777216",
        f"--exit-timeout-secs={EXIT_TIMEOUT}",
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
        *(f"--grpc-address={host}", f"--grpc-port={grpc}"),
        *(f"--http-address={host}", f"--http-port={http}"),
        *(f"--metrics-address={host}", f"--metrics-port={metrics}"),
    ]


def serve(config: Config, stopping: threading.Event) -> None:
    """Run Triton until `stopping`; raise UnavailableError when it dies or does not answer."""
    _, port = split_address(config.services.triton)
    host = os.environ.get("SOLRL_BIND", "127.0.0.1")
    if not port_is_free(host, port):
        raise ConfigError(
            f"services.triton = {config.services.triton!r}: port {port} on {host} is taken by "
            "another program; stop that one, or name another port"
        )
    spare = free_ports(2)
    http = int(os.environ.get("SOLRL_TRITON_HTTP_PORT", spare[0]))
    metrics = int(os.environ.get("SOLRL_TRITON_METRICS_PORT", spare[1]))
    # Named after the port, which is ours now: what a server killed before us left there is waste.
    family = f"{os.environ.get(STACK_ID, 'solrl')}-triton-{port}-"
    _remove_shared_memory(family)
    cache = config.model.cache
    triton = find_server(cache)
    with tempfile.TemporaryDirectory(prefix="solrl-triton-") as folder:
        config_file = Path(folder) / "config.toml"
        config_file.write_text(to_toml(config))
        server = spawn_tethered(
            command(
                triton,
                f"{family}{os.getpid()}-",
                host=host,
                grpc=port,
                http=http,
                metrics=metrics,
            ),
            environment=environment(triton, config_file, cache),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        logger.info("Triton: gRPC %s:%d, HTTP port %d, metrics port %d", host, port, http, metrics)
        try:
            _watch(server, TritonClient(f"{_reachable(host)}:{port}"), stopping)
        finally:
            _end(server)
            _remove_shared_memory(family)


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _watch(
    server: subprocess.Popen[bytes], client: TritonClient, stopping: threading.Event
) -> None:
    started, ready = time.monotonic(), False
    while not stopping.wait(PROBE_EVERY if ready else 0.25):
        if server.poll() is not None:
            raise UnavailableError(
                f"tritonserver ended with status {server.returncode}; the lines above say why"
            )
        try:
            status = client.status(timeout=PROBE_TIMEOUT)
        except SolrlError as error:
            if ready:
                raise UnavailableError(f"the model no longer answers: {error}") from error
            if time.monotonic() - started > START_TIMEOUT:
                raise UnavailableError(
                    f"the model is not ready after {START_TIMEOUT:.0f} s: {error}"
                ) from error
            continue
        if not ready:
            ready = True
            logger.info(
                "ready after %.1f s: %s in %s (%s)",
                time.monotonic() - started,
                status["base_id"],
                status["precision"],
                status["precision_reason"],
            )


def _end(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL past the deadline, to the server and every process it started."""
    stubs = [] if server.poll() is not None else psutil.Process(server.pid).children(recursive=True)
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        logger.warning("Triton did not end within %.0f s of SIGTERM; killing it", STOP_TIMEOUT)
    server.kill()
    server.wait()
    supervise.end(stubs, patience=0)


def _remove_shared_memory(prefix: str) -> None:
    for path in Path("/dev/shm").glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT."""
    stopping = threading.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, lambda *_: stopping.set())
    serve(config, stopping)


if __name__ == "__main__":
    launch.main(run)
