"""The local stack on real processes: nothing is left behind, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import redis

from solrl import probes, stack
from solrl.config import Config, load_config
from solrl.errors import BusyError, ConfigError, UnavailableError
from solrl.stack import Service, StackFile
from solrl.supervise import Program, processes_of

Planned = Callable[[Config, Path, Sequence[str]], list[Service]]

#: Owns a stack of Redis alone until a signal comes, or `forever` names a program never ready.
OWNER = """
import sys, time
from pathlib import Path
from solrl import stack
from solrl.config import Config
from solrl.stack import Service
from solrl.supervise import Program

def planned(config, state, names):
    services = stack.plan(config, state, ["redis"])
    if sys.argv[2:] == ["forever"]:
        services.append(Service(Program("late", ("sleep", "1000")), "nowhere", lambda: "not yet"))
    return services

with stack.stop_signals() as seen:
    try:
        with stack.local_stack(
            Config(), Path(sys.argv[1]), report=lambda name, text: print(name, text, flush=True),
            stopping=lambda: stack.raise_if(seen), planned=planned,
        ) as own:
            print("UP", flush=True)
            while not seen:
                own.watch(lambda name, text: print(name, text, flush=True))
                time.sleep(0.1)
    except stack.Stopped:
        sys.exit(130)
"""


def owner(state: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(state), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """Output up to the line that starts with `wanted`."""
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith(wanted):
            return lines
    pytest.fail(f"ended without a line {wanted!r}: {''.join(lines)}")


def eventually(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)


def held(state: Path) -> StackFile:
    found = stack.read_stack(state)
    assert found is not None
    return found


def shared_memory_of(stack_id: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{stack_id}*"))


def only_redis(config: Config, state: Path, names: Sequence[str]) -> list[Service]:
    return stack.plan(config, state, ["redis"])


def programs(*services: Service) -> Planned:
    return lambda config, state, names: list(services)


def script(
    path: Path,
    code: str,
    *,
    stop_seconds: int = 5,
    ready: Callable[[], bool] = lambda: True,
    needs: tuple[str, ...] = (),
) -> Service:
    """A service of its own code, written to `path` and named after it."""
    path.write_text(code)
    program = Program(path.stem, (sys.executable, str(path)), stop_seconds=stop_seconds)
    return Service(program, "nowhere", lambda: None if ready() else "not yet", needs)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A stack of Redis alone, owned by another process, and its state folder."""
    process = owner(tmp_path)
    lines_until(process, "UP")
    yield process, tmp_path
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=60)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_and_leaves_nothing(tmp_path: Path, signum: int) -> None:
    process = owner(tmp_path)
    lines_until(process, "UP")
    seen = held(tmp_path)
    assert redis.Redis.from_url(seen.endpoints["redis"]).ping()
    assert {p.pid for p in processes_of(seen.stack_id)} >= set(seen.pids.values())
    Path("/dev/shm", f"{seen.stack_id}-test").write_text("what a killed server forgot")
    process.send_signal(signum)
    assert process.wait(timeout=60) == 0
    assert processes_of(seen.stack_id) == []
    assert shared_memory_of(seen.stack_id) == []
    assert not (tmp_path / "stack.json").exists()
    assert not (tmp_path / "supervisor.sock").exists()


def test_a_signal_while_it_is_coming_up_stops_everything(tmp_path: Path) -> None:
    process = owner(tmp_path, "forever")
    lines_until(process, "late ")
    seen = held(tmp_path)
    assert not seen.ready
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert processes_of(seen.stack_id) == []
    assert not (tmp_path / "stack.json").exists()


def test_services_end_when_their_owner_is_killed_outright_and_the_next_replaces_the_file(
    up: tuple[subprocess.Popen[str], Path],
) -> None:
    process, state = up
    old = held(state)
    process.kill()
    process.wait()
    eventually(lambda: processes_of(old.stack_id) == [], "every service has ended")
    assert (state / "stack.json").exists()
    assert stack.read_stack(state) is None
    told: list[str] = []
    with stack.local_stack(
        Config(), state, report=lambda name, text: told.append(text), planned=only_redis
    ):
        assert held(state).stack_id != old.stack_id
    assert any(f"process {old.owner_pid}, is gone" in text for text in told)


def test_services_end_when_supervisord_is_killed_outright(
    up: tuple[subprocess.Popen[str], Path],
) -> None:
    process, state = up
    seen = held(state)
    (supervisord,) = psutil.Process(process.pid).children()
    supervisord.kill()
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "supervisord does not answer" in output
    assert processes_of(seen.stack_id) == []
    assert not (state / "stack.json").exists()


def test_a_second_stack_is_refused_and_told_where_the_first_is(
    up: tuple[subprocess.Popen[str], Path],
) -> None:
    process, state = up
    with (
        pytest.raises(BusyError, match=f"is running already .owner process {process.pid}.*down"),
        stack.local_stack(Config(), state, report=lambda *_: None, planned=only_redis),
    ):
        pytest.fail("came up")
    assert redis.Redis.from_url(held(state).endpoints["redis"]).ping()


def test_a_file_whose_process_id_was_used_again_is_stale(tmp_path: Path) -> None:
    me = psutil.Process()
    for started, alive in ((me.create_time(), True), (me.create_time() - 100, False)):
        text = StackFile(
            stack_id="solrl-test",
            owner_pid=me.pid,
            owner_started=started,
            ready=True,
            endpoints={},
            pids={},
            config_sha256="",
            config="",
        ).model_dump_json()
        (tmp_path / "stack.json").write_text(text)
        assert (stack.read_stack(tmp_path) is not None) is alive


def test_down_stops_the_owner_and_says_whether_there_was_one(
    up: tuple[subprocess.Popen[str], Path],
) -> None:
    process, state = up
    seen = held(state)
    assert stack.stop_stack(state)
    assert process.wait(timeout=1) == 0
    assert processes_of(seen.stack_id) == []
    assert not stack.stop_stack(state)


def test_a_killed_service_is_started_again_with_its_data(tmp_path: Path) -> None:
    told: list[str] = []
    with stack.local_stack(
        Config(), tmp_path, report=lambda *_: None, planned=only_redis
    ) as running:
        client = redis.Redis.from_url(running.config.services.redis)
        client.set("key", "kept")
        client.execute_command("WAITAOF", 1, 0, 5000)
        first = held(tmp_path).pids["redis"]
        os.kill(first, signal.SIGKILL)

        def again() -> bool:
            running.watch(lambda name, text: told.append(f"{name} {text}"))
            return held(tmp_path).pids["redis"] not in (0, first)

        eventually(again, "Redis has another process")
        url = running.config.services.redis
        eventually(lambda: probes.redis_ready(url) is None, "Redis answers")
        assert client.get("key") == b"kept"
    assert told
    assert told[0].startswith("redis died and was started again")


def test_a_service_that_dies_at_its_start_is_named_with_its_log(tmp_path: Path) -> None:
    code = "print('the reason is here')\nraise SystemExit(3)"
    # The session's own server, for other tests, is a child too.
    before = {child.pid for child in psutil.Process().children(True)}
    bad = script(tmp_path / "bad.py", code, ready=lambda: False)
    with (
        pytest.raises(UnavailableError, match=r"bad died (.|\n)*bad.log(.|\n)*the reason"),
        stack.local_stack(
            Config(),
            tmp_path,
            report=lambda *_: None,
            planned=lambda c, s, n: [*only_redis(c, s, n), bad],
        ),
    ):
        pytest.fail("came up")
    assert not (tmp_path / "stack.json").exists()
    left = [child for child in psutil.Process().children(True) if child.pid not in before]
    assert "valkey-server" not in [child.name() for child in left]


def test_a_service_that_dies_again_and_again_ends_the_stack(tmp_path: Path) -> None:
    """It comes up well, then loses a file that it needs."""
    flag = tmp_path / "flag"
    flag.touch()
    code = f"""
import pathlib, time
assert pathlib.Path({str(flag)!r}).exists(), "flag is gone"
time.sleep(99)
"""
    fragile = script(tmp_path / "fragile.py", code)
    with stack.local_stack(
        Config(), tmp_path / "state", report=lambda *_: None, planned=programs(fragile)
    ) as running:
        flag.unlink()
        os.kill(held(tmp_path / "state").pids["fragile"], signal.SIGKILL)

        def watch() -> bool:
            running.watch(lambda *_: None)
            return False

        with pytest.raises(
            UnavailableError, match=r"fragile died again and again(.|\n)*flag is gone"
        ):
            eventually(watch, "it is given up")


def test_what_ignores_sigterm_or_leaves_its_parent_is_killed(tmp_path: Path) -> None:
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"],
    start_new_session=True)
time.sleep(99)
"""
    stubborn = script(tmp_path / "stubborn.py", code, stop_seconds=1)
    with stack.local_stack(Config(), tmp_path, report=lambda *_: None, planned=programs(stubborn)):
        stack_id = held(tmp_path).stack_id
        eventually(lambda: len(processes_of(stack_id)) == 3, "supervisord, program, its child")
    assert processes_of(stack_id) == []


def test_a_service_starts_when_what_it_needs_is_ready(tmp_path: Path) -> None:
    marker = tmp_path / "first-is-ready"
    path = f"pathlib.Path({str(marker)!r})"
    first = script(
        tmp_path / "first.py",
        f"import pathlib, time\ntime.sleep(.5)\n{path}.touch()\ntime.sleep(99)",
        ready=marker.exists,
    )
    second = script(
        tmp_path / "second.py",
        f"import pathlib, time\nassert {path}.exists()\ntime.sleep(99)",
        needs=("first",),
    )
    told: list[tuple[str, str]] = []
    with stack.local_stack(
        Config(),
        tmp_path / "state",
        report=lambda name, text: told.append((name, text.split()[0])),
        planned=programs(second, first),
    ):
        assert told == [
            ("first", "starting"),
            ("first", "ready"),
            ("second", "starting"),
            ("second", "ready"),
        ]


def test_a_state_folder_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    state = tmp_path / ("long" * 25)
    with (
        pytest.raises(ConfigError, match="SOLRL_STATE"),
        stack.local_stack(Config(), state, report=lambda *_: None, planned=only_redis),
    ):
        pytest.fail("came up")
    assert not (state / "stack.json").exists()


# --- addresses -------------------------------------------------------------------------------


def with_services(**addresses: str) -> Config:
    return load_config(None, {f"services.{k}": v for k, v in addresses.items()}, environment={})


def test_addresses_left_out_get_free_ports_of_their_own() -> None:
    resolved, ours = stack.assign(Config())
    assert ours == stack.SERVICES
    ports = [probes.split_address(getattr(resolved.services, name))[1] for name in ours]
    assert len(set(ports)) == len(ports)
    assert all(probes.port_is_free("127.0.0.1", port) for port in ports)
    assert resolved.services.reward.startswith("http://127.0.0.1:")
    assert resolved.services.redis.endswith("/0")


def test_an_address_elsewhere_is_used_and_not_started() -> None:
    resolved, ours = stack.assign(
        with_services(explorer="gateway.example:50051", reward="http://reward.example:8020")
    )
    # Triton is only there for the gateway.
    assert ours == ("redis", "regenerator")
    assert resolved.services.explorer == "gateway.example:50051"


def test_a_port_that_is_given_and_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"services.reward .*port {port} is taken"):
            stack.assign(with_services(reward=f"http://127.0.0.1:{port}"))


def test_a_redis_that_is_given_and_down_is_named_with_its_address() -> None:
    (port,) = stack.free_ports(1)
    with pytest.raises(UnavailableError, match=rf"Redis at redis://127.0.0.1:{port}/3 "):
        stack.assign(with_services(redis=f"redis://127.0.0.1:{port}/3"))


def test_a_redis_that_is_given_is_used(up: tuple[subprocess.Popen[str], Path]) -> None:
    url = held(up[1]).endpoints["redis"].removesuffix("0") + "1"
    resolved, ours = stack.assign(with_services(redis=url))
    assert "redis" not in ours
    assert resolved.services.redis == url


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("http://reward:8020", ("reward", 8020)),
        ("redis://user:secret@redis.example:6379/2", ("redis.example", 6379)),
        ("[::1]:9", ("::1", 9)),
        ("reward", None),
        ("http://reward", None),
        ("127.0.0.1:99999", None),
        ("", None),
    ],
)
def test_split_address(address: str, expected: tuple[str, int] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="address"):
            probes.split_address(address)
    else:
        assert probes.split_address(address) == expected


def test_settings_of_the_environment_are_not_passed_on_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or they would win over the command line, which was merged into the resolved file."""
    monkeypatch.setenv("SOLRL__EXPLORE__KEEP", "8")
    monkeypatch.setenv("SOLRL__SERVICES__REWARD", "http://127.0.0.1:1")
    config = load_config(None, {"explore.keep": "4", "services.reward": "http://127.0.0.1:2"})
    environment = stack.child_environment(config)
    assert "SOLRL__EXPLORE__KEEP" not in environment
    assert environment["SOLRL__SERVICES__REWARD"] == "http://127.0.0.1:2"
    assert load_config(None, environment=environment).services == config.services


def test_what_a_running_service_was_started_with_is_compared() -> None:
    other = load_config(
        None, {"model.height": "64", "explore.steps": "3", "run.name": "b"}, environment={}
    )
    assert stack.same_services(Config(), other) == ["model.height"]


def test_the_stack_file_says_where_the_services_are(
    up: tuple[subprocess.Popen[str], Path],
) -> None:
    process, state = up
    text = json.loads((state / "stack.json").read_text())
    assert text["owner_pid"] == process.pid
    assert set(text["endpoints"]) == set(stack.SERVICES)
    config = load_config(Path(text["config"]), environment={})
    assert config.services.redis == text["endpoints"]["redis"]
    assert (state.stat().st_mode & 0o077) == 0 or state.owner() != "root"
