"""`solrl`: the command line. Heavy libraries are imported by the command that needs them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from solrl.config import Config, load_config, to_toml
from solrl.errors import BusyError, ConfigError, InputError, SolrlError, UnavailableError
from solrl.quiet import quiet_libraries
from solrl.seeds import candidate_seed, check_seed

if TYPE_CHECKING:
    from solrl.board import Board
    from solrl.stack import Stack

OVERRIDE = re.compile(r"--(?P<key>[a-z_]+\.[a-z_0-9]+)(?:=(?P<value>.*))?", re.DOTALL)

app = typer.Typer(
    name="solrl",
    help="Sol-RL as a running system: explore with FP4, train in high precision.",
    epilog="Every command takes any setting as `--section.key value`; see docs/configuration.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Overrides = dict[str, str]
Context = typer.Context
Run = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML of the run.")]
Prompt = Annotated[str, typer.Argument(help="What the picture shows.")]
Policy = Annotated[str, typer.Option(help="current, base, or a version number.")]
Seed = Annotated[int, typer.Option(help="Seed the pictures' own seeds are made from.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a known error is one message on stderr and exit code 2, never a traceback."""
    quiet_libraries()
    try:
        rest, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
        app(args=rest, obj=overrides, prog_name="solrl")
    except SolrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        place, why = error.filename, error.strerror
        print(f"error: {place}: {why}; choose a place that can be written", file=sys.stderr)
        sys.exit(2)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], Overrides]:
    """(other arguments, {"section.key": value}) of a command line."""
    rest: list[str] = []
    overrides: Overrides = {}
    words = iter(arguments)
    for word in words:
        found = OVERRIDE.fullmatch(word)
        if found is None:
            rest.append(word)
            continue
        value = found["value"] if found["value"] is not None else next(words, None)
        if value is None:
            raise ConfigError(f"{word} needs a value: {word} VALUE")
        overrides[found["key"]] = value
    return rest, overrides


# --- running ---------------------------------------------------------------------------------


@app.command()
def run(
    context: Context,
    config: Run,
    *,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option(help="Print the resolved configuration, no more.")
    ] = False,
) -> None:
    """Post-train a model: uses the running stack, or starts one for the run."""
    from solrl import stack

    settings = load_config(config, context.obj)
    if dry_run:
        print(to_toml(settings), end="")
        return
    _preflight(settings, resume=resume)
    state = stack.state_folder()
    running = stack.read_stack(state)
    try:
        if running is None:
            with _own_stack(settings) as own:
                code = _learn(own.stack.config, state, resume, own.seen, own)
        else:
            with stack.stop_signals() as seen:
                code = _learn(_on(running, settings), state, resume, seen, None)
    except stack.Stopped as stopped:
        code = 128 + stopped.signum
    raise typer.Exit(code)


@app.command()
def up(
    context: Context,
    config: Annotated[Path | None, typer.Argument(help="TOML of a run.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready; `solrl down` stops it.")
    ] = False,
) -> None:
    """Start every service on this machine and keep them running until Ctrl-C."""
    from solrl import stack

    settings = load_config(config, context.obj)
    _check_model(settings)
    if stack.read_stack(stack.state_folder()) is not None:
        raise BusyError(stack.describe(stack.state_folder()))
    if detach:
        _detached(config, context.obj)
        return
    try:
        with _own_stack(settings) as own:
            print("the stack is ready; Ctrl-C stops it", flush=True)
            while not own.seen:
                own.stack.watch(own.board)
                time.sleep(0.3)
            print("stopping", flush=True)
    except stack.Stopped as stopped:
        raise typer.Exit(128 + stopped.signum) from None
    print("stopped; nothing is left running", flush=True)


@app.command()
def down() -> None:
    """Stop the running stack and wait until it is gone."""
    from solrl import stack

    stopped = stack.stop_stack(stack.state_folder())
    print("stopped" if stopped else f"no stack is running from {stack.state_folder()}")


@dataclass(frozen=True)
class _Own:
    stack: Stack
    board: Board
    seen: list[int]


@contextmanager
def _own_stack(settings: Config) -> Iterator[_Own]:
    """A stack of this process. Signals are collected, so that it is always stopped in order."""
    from rich.console import Console

    from solrl import stack
    from solrl.board import Board
    from solrl.compiler import compiler_problem

    board = Board(Console())
    with stack.stop_signals() as seen, ExitStack() as cleanup:
        if problem := compiler_problem():
            board("compiler", f"models run uncompiled, and so more slowly: {problem}")
        with board:
            own = cleanup.enter_context(
                stack.local_stack(
                    settings,
                    stack.state_folder(),
                    report=board,
                    stopping=lambda: stack.raise_if(seen),
                )
            )
        yield _Own(own, board, seen)


def _detached(config: Path | None, overrides: Overrides) -> None:
    """Start `solrl up` as a process of its own and return when it is ready."""
    from solrl import stack

    state = stack.state_folder()
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "solrl.cli", "up", *([str(config)] if config else [])]
    command += [f"--{key}={value}" for key, value in overrides.items()]
    log = state / "up.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    shown = 0
    while child.poll() is None:
        shown = _print_from(log, shown)
        running = stack.read_stack(state)
        if running is not None and running.ready and running.owner_pid == child.pid:
            print("the stack is ready; `solrl down` stops it")
            return
        time.sleep(0.2)
    _print_from(log, shown)
    raise UnavailableError(f"the stack did not start; see above, or {log}")


def _print_from(path: Path, place: int) -> int:
    with path.open("rb") as file:
        file.seek(place)
        text = file.read()
    print(text.decode(errors="replace"), end="", flush=True)
    return place + len(text)


def _preflight(settings: Config, *, resume: bool) -> None:
    """What can be refused before anything is started."""
    folder = settings.run.directory / settings.run.name
    if not resume and folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"run directory {folder} is used already; go on with it by --resume, or choose "
            "another --run.name"
        )
    if resume and not (folder / "config.toml").is_file():
        raise ConfigError(f"--resume: there is no run in {folder}; leave --resume out to begin one")
    for key, path in (("train", settings.prompts.train), ("unseen", settings.prompts.unseen)):
        if not path.is_file():
            raise ConfigError(f"prompts.{key} = {str(path)!r} does not exist")
    _check_model(settings)


def _check_model(settings: Config) -> None:
    from solrl.models import check_folder

    check_folder(settings.model)


def _on(running: object, settings: Config) -> Config:
    """`settings` with the addresses of the running stack, which must serve the same things."""
    from solrl import stack

    assert isinstance(running, stack.StackFile)
    if not running.ready:
        raise BusyError(stack.describe(stack.state_folder()))
    served = load_config(Path(running.config), environment={})
    if differing := stack.same_services(served, settings):
        raise ConfigError(
            f"the running stack was started with other values of {', '.join(differing)}; stop it "
            "with `solrl down`, or set SOLRL_STATE to another folder for a second one"
        )
    services = settings.services.model_copy(update=running.endpoints)
    return settings.model_copy(update={"services": services})


def _learn(settings: Config, state: Path, resume: bool, seen: list[int], own: _Own | None) -> int:
    """Run the learner to its end and return its exit code.

    It is in a process group of its own: the terminal's Ctrl-C comes to us, and is passed on once,
    so that it ends in order; a second one kills it. Its checkpoints survive both.
    """
    from solrl import atomic, stack, supervise

    resolved = state / f"learner-{settings.run.name}.toml"
    atomic.write_text(resolved, to_toml(settings))
    learner = supervise.spawn_tethered(
        [
            *(sys.executable, "-m", "services.learner", "--config", str(resolved)),
            *(["--resume"] if resume else []),
        ],
        environment=stack.child_environment(settings),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    passed_on = 0
    try:
        while learner.poll() is None:
            if len(seen) > passed_on:
                learner.send_signal(seen[0] if passed_on == 0 else signal.SIGKILL)
                if passed_on == 0:
                    print("stopping the learner; once more kills it", file=sys.stderr)
                passed_on += 1
            if own is not None and not seen:
                own.stack.watch(own.board)
            time.sleep(0.1)
    finally:
        if learner.poll() is None:
            learner.terminate()
            try:
                learner.wait(timeout=60)
            except subprocess.TimeoutExpired:
                learner.kill()
                learner.wait()
    if learner.returncode >= 0:
        return learner.returncode
    if not passed_on:
        print(
            f"error: the learner was ended by {signal.Signals(-learner.returncode).name} (out of "
            "memory?); give the same command with --resume to go on from its last checkpoint",
            file=sys.stderr,
        )
    return 128 - learner.returncode


# --- asking the services ---------------------------------------------------------------------


#: Frames of the chosen in the picture of a group.
FRAMES = {"best": "#2e9e44", "worst": "#d0342c"}


@app.command()
def explore(
    context: Context,
    prompt: Prompt,
    *,
    out: Annotated[Path, typer.Option(help="PNG to write.")] = Path("explore.png"),
    policy: Policy = "current",
    seed: Seed = 0,
) -> None:
    """Explore a prompt as a run does: N candidates, scored, the K chosen marked in a picture."""
    from solrl import pictures
    from solrl.clients.explorer import CandidateEvent, ExplorerClient, SelectionEvent

    settings = _services(context)
    count, keep = settings.explore.candidates, settings.explore.keep
    seeds = [candidate_seed(check_seed(seed), "explore", 0, 0, place) for place in range(count)]
    candidates: list[CandidateEvent] = []
    selection: SelectionEvent | None = None
    at = settings.services
    with ExplorerClient(at.explorer, timeout=at.call_timeout) as client:
        for event in client.explore(
            _visible(prompt),
            seeds,
            keep=keep,
            steps=settings.explore.steps,
            policy=_policy(policy),
            thumbnails=True,
        ):
            if isinstance(event, SelectionEvent):
                selection = event
            else:
                candidates.append(event)
    if selection is None:
        raise UnavailableError(f"the explorer at {at.explorer} ended without a selection")
    if selection.prompt_truncated:
        _warn_truncated(prompt)
    candidates.sort(key=lambda c: -inf if c.proxy_reward is None else c.proxy_reward, reverse=True)
    rank = {kept.candidate: kept.rank for kept in selection.kept}
    version = selection.policy_version
    served = "base" if version is None else f"policy version {version}"
    pictures.write_png(
        out,
        pictures.sheet(
            [pictures.decode_png(c.thumbnail_png or b"") for c in candidates],
            ["excluded" if c.proxy_reward is None else f"{c.proxy_reward:.3f}" for c in candidates],
            [FRAMES[rank[c.candidate]] if c.candidate in rank else None for c in candidates],
            title=f"{prompt}: {len(rank)} of {count} chosen by {selection.reward}, best (green) "
            f"and worst (red); {selection.precision}, {selection.steps} steps, {served}",
        ),
    )
    for name in ("best", "worst"):
        values = [kept.proxy_reward for kept in selection.kept if kept.rank == name]
        print(f"{name:<6} {len(values)} candidates, mean {selection.reward} {fmean(values):.4f}")
    print(
        f"{out}: {count} candidates, {selection.excluded} excluded; {served}, "
        f"{selection.precision}; explored in {selection.seconds_explore:.1f} s, scored in "
        f"{selection.seconds_score:.1f} s"
    )


@app.command()
def generate(
    context: Context,
    prompt: Prompt,
    *,
    n: Annotated[int, typer.Option("--n", min=1, help="How many pictures.")] = 1,
    policy: Policy = "current",
    out: Annotated[
        Path, typer.Option(help="PNG to write; several are numbered: out-1.png, out-2.png ...")
    ] = Path("picture.png"),
    seed: Seed = 0,
    guidance: Annotated[float, typer.Option(min=1, help="CFG scale; 1 is none.")] = 1.0,
) -> None:
    """Make pictures of a prompt with the regenerator, in high precision."""
    from solrl import pictures
    from solrl.clients.regenerator import RegeneratorClient

    settings = _services(context)
    seeds = [candidate_seed(check_seed(seed), "eval", 0, 0, place) for place in range(n)]
    at = settings.services
    with RegeneratorClient(at.regenerator, timeout=at.call_timeout, priority="people") as client:
        made = client.regenerate(
            _visible(prompt),
            seeds,
            steps=settings.regenerate.steps,
            guidance=guidance,
            policy=_policy(policy),
        )
    if made.truncated:
        _warn_truncated(prompt)
    version = "base" if made.version is None else f"policy version {made.version}"
    for place, (picture, own_seed) in enumerate(zip(made.images, seeds, strict=True)):
        path = out if n == 1 else out.with_stem(f"{out.stem}-{place + 1}")
        pictures.write_png(path, picture)
        print(f"{path}  seed {own_seed}  {version}  {made.precision}")


@app.command()
def score(
    context: Context,
    image: Annotated[Path, typer.Argument(help="A picture: PNG, JPEG, WebP ...")],
    *,
    prompt: Annotated[str, typer.Option(help="What it should show.")],
    reward: Annotated[str | None, typer.Option(help="One reward; all of them if left out.")] = None,
) -> None:
    """Score a picture against a prompt with the reward service."""
    from rich.console import Console
    from rich.table import Table

    from solrl import pictures
    from solrl.clients.reward import RewardClient

    _visible(prompt)
    pixels = pictures.read(image)
    at = _services(context).services
    table = Table("reward", "score", "version")
    scored = 0
    with RewardClient(at.reward, timeout=at.call_timeout, priority="people") as client:
        for name in [reward] if reward else [info.name for info in client.describe()]:
            scores = client.score(pixels[None], [prompt], name)
            value, error = scores.values[0], scores.errors[0]
            table.add_row(name, f"{value:.4f}" if value is not None else error, scores.version)
            scored += value is not None
    Console().print(table)
    raise typer.Exit(0 if scored else 1)


# --- looking ---------------------------------------------------------------------------------


@app.command()
def doctor(
    context: Context,
    config: Annotated[Path | None, typer.Option(help="TOML of a run.")] = None,
) -> None:
    """Check that everything a run needs is here; exit 1 when something is not."""
    from rich.console import Console
    from rich.markup import escape

    from solrl.doctor import diagnose

    console = Console(soft_wrap=True, highlight=False)
    problems = 0
    for check in diagnose(load_config(config, context.obj)):
        mark = "[green]ok     [/]" if check.ok else "[red]problem[/]"
        console.print(f"{mark} {check.name:<22}{escape(check.seen)}")
        if check.cure is not None:
            problems += 1
            console.print(f"{'':<30}-> {escape(check.cure)}")
    raise typer.Exit(1 if problems else 0)


@app.command()
def status(
    service: Annotated[
        str | None, typer.Argument(help="Print the address of this one alone, for scripts.")
    ] = None,
) -> None:
    """Say where the services of the running stack are; exit 1 when none is running."""
    from solrl import stack

    running = stack.read_stack(stack.state_folder())
    if running is None:
        print(f"no stack is running from {stack.state_folder()}; start one with `solrl up`")
        raise typer.Exit(1)
    if service is None:
        print(f"{'ready' if running.ready else 'starting'}, owner process {running.owner_pid}")
        for name, address in running.endpoints.items():
            print(f"{name:<12} {address}")
    elif service in running.endpoints:
        print(running.endpoints[service])
    else:
        raise InputError(f"no service {service!r}; there are {', '.join(running.endpoints)}")


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUNDIR", help="For example runs/demo.")],
) -> None:
    """Make report.html and report.json of a finished run again, and print its tables."""
    from rich.console import Console

    from solrl import report

    report.rebuild(run_folder)
    report.show(run_folder, Console())


@app.command()
def export(
    run_folder: Annotated[Path, typer.Argument(metavar="RUNDIR", help="For example runs/demo.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")],
) -> None:
    """Copy the tuned (EMA) LoRA of a run, for diffusers' load_lora_weights."""
    from solrl import adapters

    newest = max(
        (folder for folder in (run_folder / "ema").glob("[0-9]*") if folder.name.isdecimal()),
        key=lambda folder: int(folder.name),
        default=None,
    )
    if newest is None:
        raise InputError(f"{run_folder} holds no tuned adapter: there is no {run_folder}/ema/<n>")
    manifest = adapters.read_manifest(newest)
    try:
        adapters.publish(out, (newest / adapters.WEIGHTS).read_bytes(), manifest)
    except FileExistsError as error:
        raise InputError(f"{out} exists; name a folder that does not") from error
    print(f"{out}: version {manifest.version}, r {manifest.rank}, alpha {manifest.alpha:g}")


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL_ID", help="OWNER/NAME on the Hub.")],
    revision: Annotated[
        str, typer.Option(help="Commit, tag or branch; a full commit hash never changes.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to put it in.")],
) -> None:
    """Download a diffusers checkpoint once, for `model.base`; again, it needs no network."""
    from rich.filesize import decimal

    from solrl import fetch as hub

    held = hub.fetch(model, revision, out)
    size = decimal(sum(held.files.values()))
    print(f"{out}: {held.model} at {held.commit}, {len(held.files)} files, {size}")


@app.command()
def version() -> None:
    """Print the version."""
    import solrl

    print(f"solrl {solrl.__version__}")


def _services(context: Context) -> Config:
    """Configuration of the running stack, else the default one; with the caller's overrides."""
    from solrl import stack

    running = stack.read_stack(stack.state_folder())
    return load_config(Path(running.config) if running else None, context.obj)


def _policy(text: str) -> int | Literal["base", "current"]:
    match text:
        case "base":
            return "base"
        case "current":
            return "current"
        case _ if text.isdecimal():
            return int(text)
    raise InputError(f"policy {text!r} is not current, base or a version number")


def _visible(prompt: str) -> str:
    if not prompt.strip():
        raise InputError(f"the prompt {prompt!r} is empty; describe the picture in words")
    return prompt


def _warn_truncated(prompt: str) -> None:
    print(f"note: the text encoder reads only the beginning of {prompt!r}", file=sys.stderr)


if __name__ == "__main__":
    main()
