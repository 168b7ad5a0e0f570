"""`python -m services.learner --config F [--resume]`: one run, then its evaluation and report."""

from __future__ import annotations

import logging
import signal
import sqlite3
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from types import FrameType

import numpy as np
import uvicorn
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from services.http import listen
from services.launch import config_from
from services.learner.run import Learner, check_prompts
from services.learner.status import Control, create_status_app
from solrl import evaluation, report
from solrl.config import Config
from solrl.errors import ConfigError, InputError, SolrlError
from solrl.generator import Generator
from solrl.prompts import read_prompts
from solrl.quiet import quiet_libraries
from solrl.rundir import RunDirectory

EXIT_PAUSED = 3


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 done, 2 configuration, 3 paused (go on with --resume), 130 interrupted.

    --serve is for a container that may be started again at any time: begin the run or go on with
    it, and when it is finished keep answering until stopped.
    """
    serve = "--serve" in arguments
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    quiet_libraries()
    warnings.filterwarnings("ignore", message="Already found a `peft_config`")
    console = Console()
    try:
        config = config_from([a for a in arguments if a not in ("--resume", "--serve")])
        check_prompts(config)
        begun = (config.run.directory / config.run.name / "config.toml").is_file()
        resume = "--resume" in arguments or (serve and begun)
        directory = RunDirectory.resume(config) if resume else RunDirectory.create(config)
    except (SolrlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    control = Control(config.run.name, config.run.arm, config.run.iterations, console)
    _obey_signals(control)
    try:
        _serve_status(config, control)
        learner = Learner(config, directory, control)
        try:
            evaluated = report.evaluated_at(directory.path)
            if serve and evaluated == learner.done >= config.run.iterations:
                # Asks nothing of the neighbours, who may serve another run by now.
                control.started(learner.done, {})
                control.say(f"run {config.run.name} is finished: {directory.path}/report.html")
            else:
                learner.check_scorers()
                learner.train()
                control.state("evaluating")
                _evaluate(config, learner, control, console)
            control.state("finished")
            if serve:
                threading.Event().wait()  # until a signal comes
        finally:
            learner.close()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SolrlError as error:
        return _paused(config, str(error))
    except (OSError, sqlite3.OperationalError) as error:
        return _paused(config, f"{directory.path} could not be written or read: {error}")
    except KeyboardInterrupt:
        if control.status.state != "finished":
            print(f"interrupted: run {config.run.name} goes on with --resume", file=sys.stderr)
            return 130
    finally:
        directory.close()
    return 0


def _paused(config: Config, why: str) -> int:
    print(
        f"paused: {why}\nNothing is lost: run {config.run.name} goes on from its last checkpoint "
        "with --resume.",
        file=sys.stderr,
    )
    return EXIT_PAUSED


def _obey_signals(control: Control) -> None:
    """First SIGINT or SIGTERM: stop at once, the last checkpoint stands. Same as Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


def _serve_status(config: Config, control: Control) -> None:
    socket = listen(f"http://127.0.0.1:{config.services.learner_port}")
    server = uvicorn.Server(uvicorn.Config(create_status_app(control), log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True).start()
    control.say(
        f"run {config.run.name}: status at http://127.0.0.1:{socket.getsockname()[1]}/v1/run"
    )


def _evaluate(config: Config, learner: Learner, control: Control, console: Console) -> None:
    """Base against EMA on unused seeds, with and without guidance; then the report."""
    begin = time.perf_counter()
    adapter = learner.write_ema()
    generator = Generator.load(
        config,
        precision=config.regenerate.precision,
        micro_batch=config.evaluate.micro_batch,
    )

    def score(images: NDArray[np.uint8], prompts: Sequence[str], name: str) -> list[float]:
        values: list[float] = []
        for first in range(0, len(images), 192):
            part = slice(first, first + 192)
            scores = learner.maker.score(images[part], list(prompts[part]), name)
            if None in scores.values:
                raise InputError(f"{name} could not score an evaluation picture: {scores.errors}")
            values += [v for v in scores.values if v is not None]
        return values

    sets: dict[evaluation.PromptSet, tuple[list[str], int]] = {
        "train_prompts": (read_prompts(config.prompts.train), config.evaluate.train_images),
        "unseen_prompts": (read_prompts(config.prompts.unseen), config.evaluate.unseen_images),
    }
    scorers = {"reward": config.reward.name, "judge": config.reward.judge}
    ema = learner.trainer.get("ema")
    results: dict[str, dict[str, dict[str, evaluation.Cell]]] = {}
    shown: dict[str, report.Sheet] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        total = 2 * sum(
            len(prompts) * (pictures + config.evaluate.guided_images)
            for prompts, pictures in sets.values()
        )
        bar = progress.add_task("evaluating: base and tuned", total=total)

        def advance(pictures: int) -> None:
            control.alive()
            progress.advance(bar, pictures)

        for label, guidance in (("plain", 1.0), ("guided", config.evaluate.guidance)):
            results[label] = {}
            for prompt_set, (prompts, pictures) in sets.items():
                if label == "guided":
                    pictures = config.evaluate.guided_images  # noqa: PLW2901
                base, tuned = (
                    evaluation.generate(
                        generator,
                        policy,
                        prompts,
                        prompt_set=prompt_set,
                        pictures=pictures,
                        guidance=guidance,
                        config=config,
                        progress=advance,
                    )
                    for policy in (None, ema)
                )
                real = evaluation.real_pictures(config.evaluate.references, prompts)
                results[label][prompt_set] = evaluation.compare(
                    base, tuned, real, scorers=scorers, score=score
                )
                if label == "plain":
                    shown[prompt_set] = report.Sheet.first_pictures(base, tuned, real)
    control.add_seconds("evaluate", time.perf_counter() - begin)
    evaluated = report.Evaluated(
        plain=results["plain"],
        guided=results["guided"],
        guidance=config.evaluate.guidance,
        phases=control.phases,
        precision={
            **{f"{s.kind}": s.precision for s in learner.replicas},
            "learner": "fp32",
            "evaluation": generator.precision,
        },
        fp4_share=max(s.fp4_share for s in learner.replicas),
        adapter=str(adapter),
    )
    report.write(learner.directory.path, evaluated, shown)
    report.show(learner.directory.path, console)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
