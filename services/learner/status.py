"""What people see of a run and may ask of it: console lines, HTTP status, metrics."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from rich.console import Console

from services.http import create_app
from solrl.metrics import KNOWN, STATES, Metrics

Wish = Literal["run", "pause", "stop"]


#: Phases in which the learner itself computes; in the others it waits for a neighbour.
COMPUTING = ("train", "evaluate")


class Status(BaseModel):
    """`state` is one of solrl.metrics.STATES."""

    run: str
    state: str
    reason: str = ""
    iterations_done: int = 0
    iterations: int
    policy_version: int | None = None
    eta_seconds: float | None = None
    metrics: dict[str, float | int | str | None] = {}
    seconds: dict[str, float] = {}


class Control:
    """Shared by the run's thread, which reports, and the HTTP server's, which asks."""

    def __init__(self, run: str, arm: str, iterations: int, console: Console) -> None:
        self._lock = threading.Lock()
        self._wish: Wish = "run"
        self._changed = threading.Event()
        self._console = console
        self._begin = time.monotonic()
        self._first = 0
        self._spoken = ("", 0.0)
        self.phases: dict[str, float] = {}
        self.status = Status(run=run, state="starting", iterations=iterations)
        self.metrics = Metrics("learner")
        self.metrics.gauge("solrl_run_info", run=run, arm=arm).set(1)
        self.metrics.gauge("solrl_iterations_planned").set(iterations)
        self.metrics.gauge("solrl_policy_version").set(-1)
        # Not known is not 0.
        for name in ("reward_contrast", "rank_agreement_tau", "rank_agreement_ceiling_tau", "kl"):
            self.metrics.gauge(f"solrl_{name}").set(math.nan)
        for candidates in KNOWN["candidates"]:
            self.metrics.gauge("solrl_reward_mean", candidates=candidates).set(math.nan)
        self.alive()
        self._show_state()

    # --- asked for from outside ----------------------------------------------------------------

    def ask(self, wish: Wish) -> Status:
        with self._lock:
            self._wish = wish
        self._changed.set()
        return self.status

    def may_go_on(self) -> bool:
        """Between iterations: waits while paused; False once asked to stop."""
        while self._wish == "pause":
            self._set(state="paused", reason="asked for; POST /v1/resume goes on")
            self._changed.wait(0.5)
            self._changed.clear()
        self._set(state="stopping" if self._wish == "stop" else "running", reason="")
        return self._wish != "stop"

    # --- reported from the run -----------------------------------------------------------------

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def waiting_for(self, reason: str) -> None:
        """A neighbour fails and is retried; the same reason is said once in ten seconds."""
        self._set(state="waiting", reason=reason)
        if (self._spoken[0], True) != (reason, time.monotonic() - self._spoken[1] < 10):
            self._spoken = (reason, time.monotonic())
            self.say(f"  waiting: {reason}")

    def started(
        self, done: int, seconds: Mapping[str, float], before: Mapping[str, float] | None = None
    ) -> None:
        """`before`: seconds a phase of the iterations done before this resume."""
        self.phases = dict(before or {})
        self._first = done
        self._begin = time.monotonic()
        self._add(seconds)
        self.metrics.gauge("solrl_iterations_done").set(done)
        self.metrics.gauge("solrl_policy_version").set(done)
        self.alive()
        self._set(state="running", iterations_done=done, policy_version=done)

    def alive(self) -> None:
        """The run got on, if only by a little."""
        self.metrics.gauge("solrl_progress_timestamp_seconds").set_to_current_time()

    def progress(self, iteration: int, groups: int) -> None:
        self.alive()
        self._set(state="running", reason=f"iteration {iteration}: {groups} prompts regenerated")

    def finished(
        self, iteration: int, version: int, metrics: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> None:
        """Tell of one iteration: rewards, contrast, rank agreement, seconds a phase, ETA."""
        self._add(seconds)
        done = iteration + 1
        pace = (time.monotonic() - self._begin) / (done - self._first)
        eta = pace * (self.status.iterations - done)
        self._set(
            iterations_done=done,
            policy_version=version,
            eta_seconds=eta,
            metrics=dict(metrics),
            seconds=dict(seconds),
        )
        self._measure(done, version, metrics, seconds)
        tau = metrics["kendall_tau"]
        phases = " ".join(
            f"{name} {seconds.get(name, 0.0):.1f}"
            for name in ("explore", "score", "regenerate", "train", "publish", "other")
        )
        note = f"  SKIPPED: {metrics['skipped']}" if metrics.get("skipped") else ""
        self.say(
            f"iteration {done:>3}/{self.status.iterations}  "
            f"reward all {metrics['reward_all']:.4f} kept {metrics['reward_kept']:.4f}  "
            f"contrast {metrics['contrast']:.4f}  "
            f"tau {'  -  ' if math.isnan(tau) else f'{tau:.3f}'}  "
            f"| s: {phases} |  policy v{version}  ETA {eta // 60:.0f}m{eta % 60:02.0f}s{note}"
        )

    def _measure(
        self, done: int, version: int, metrics: Mapping[str, Any], seconds: Mapping[str, float]
    ) -> None:
        self.alive()
        exported = self.metrics
        exported.counter("solrl_iterations_total").inc()
        exported.gauge("solrl_iterations_done").set(done)
        exported.gauge("solrl_policy_version").set(version)
        exported.histogram("solrl_iteration_seconds").observe(sum(seconds.values()))
        for candidates in ("all", "kept"):
            mean = metrics[f"reward_{candidates}"]
            exported.gauge("solrl_reward_mean", candidates=candidates).set(mean)
        exported.gauge("solrl_reward_contrast").set(metrics["contrast"])
        exported.gauge("solrl_kl").set(metrics["kl"])
        if math.isfinite(metrics["kendall_tau"]):  # not every iteration is audited
            exported.gauge("solrl_rank_agreement_tau").set(metrics["kendall_tau"])
            ceiling = metrics["kendall_tau_ceiling"]
            exported.gauge("solrl_rank_agreement_ceiling_tau").set(ceiling)
        exported.counter("solrl_excluded_candidates_total").inc(metrics["excluded_candidates"])
        exported.counter("solrl_zero_spread_groups_total").inc(metrics["zero_spread_groups"])
        exported.counter("solrl_non_finite_total").inc("not finite" in metrics["skipped"])

    def state(self, state: str) -> None:
        self.alive()
        self._set(state=state)

    def add_seconds(self, phase: str, seconds: float) -> None:
        self._add({phase: seconds})

    def _add(self, seconds: Mapping[str, float]) -> None:
        for phase, value in seconds.items():
            value = max(value, 0.0)  # noqa: PLW2901
            self.phases[phase] = self.phases.get(phase, 0.0) + value
            self.metrics.histogram("solrl_phase_seconds", phase=phase).observe(value)
            if phase in COMPUTING:
                self.metrics.counter("solrl_busy_seconds_total").inc(value)

    def _set(self, **changes: Any) -> None:
        with self._lock:
            self.status = self.status.model_copy(update=changes)
            self._show_state()

    def _show_state(self) -> None:
        for state in STATES:
            self.metrics.gauge("solrl_run_state", state=state).set(state == self.status.state)


def create_status_app(control: Control) -> FastAPI:
    """GET /v1/run; POST /v1/pause, /v1/resume, /v1/stop (after this iteration)."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield

    app = create_app(
        service="learner",
        description="Status and control of one run.",
        metrics=control.metrics,
        problems=lambda: ["starting"] if control.status.state == "starting" else [],
        lifespan=lifespan,
        max_body=1 << 16,
    )

    @app.get("/v1/run")
    async def run() -> Status:
        """Where the run stands, with the time it still needs."""
        return control.status

    @app.post("/v1/pause")
    async def pause() -> Status:
        """Stop feeding after this iteration and wait; every iteration ends in a checkpoint."""
        return control.ask("pause")

    @app.post("/v1/resume")
    async def resume() -> Status:
        return control.ask("run")

    @app.post("/v1/stop")
    async def stop() -> Status:
        """End after this iteration, evaluate what there is, and leave."""
        return control.ask("stop")

    return app
