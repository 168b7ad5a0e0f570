"""Every metric of every service in one catalogue; `python -m solrl.metrics` prints its table.

A service makes one `Metrics` and asks it by name. All of its metrics are there from the start, so
that an expression over a thing that has not happened yet answers 0 and not nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

# A second series a counter that says when it was made; nothing here asks for it.
disable_created_metrics()  # type: ignore[no-untyped-call]

Service = Literal["explorer", "regenerator", "reward", "learner"]
Kind = Literal["counter", "gauge", "histogram"]

#: Buckets, seconds: of a phase, and of what ought to be short.
LONG = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
#: Values of labels that are known before anything happened.
LANES = ("run", "people")
STATES = ("starting", "running", "waiting", "paused", "stopping", "evaluating", "finished")
KNOWN = {
    "lane": LANES,
    "state": STATES,
    "queue": ("prompts", "selected"),
    "modules": ("bound", "expected"),
    "candidates": ("all", "kept"),
}

EVERY: tuple[Service, ...] = ("explorer", "regenerator", "reward", "learner")
GENERATING: tuple[Service, ...] = ("explorer", "regenerator")
HTTP: tuple[Service, ...] = ("regenerator", "reward", "learner")
LEARNER: tuple[Service, ...] = ("learner",)
EXPLORER: tuple[Service, ...] = ("explorer",)
REWARD: tuple[Service, ...] = ("reward",)


@dataclass(frozen=True)
class Metric:
    """One line of the catalogue."""

    name: str
    kind: Kind
    services: tuple[Service, ...]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


CATALOGUE = (
    # What was made.
    Metric(
        "solrl_explorations_total",
        "counter",
        EXPLORER,
        "Prompts explored to the end.",
        ("lane",),
    ),
    Metric(
        "solrl_candidates_total",
        "counter",
        EXPLORER,
        "Candidates explored and scored.",
        ("lane", "precision"),
    ),
    Metric(
        "solrl_images_total",
        "counter",
        GENERATING,
        "Pictures made.",
        ("precision",),
    ),
    Metric(
        "solrl_nfe_total",
        "counter",
        GENERATING,
        "Network evaluations of one picture; the padding of a batch is not counted.",
        ("precision",),
    ),
    Metric(
        "solrl_scored_images_total",
        "counter",
        REWARD,
        "Pictures given a value.",
        ("scorer",),
    ),
    # Time.
    Metric(
        "solrl_phase_seconds",
        "histogram",
        ("explorer", "regenerator", "learner"),
        "Explorer: computing time of one prompt's candidates (explore, score). Regenerator: of one "
        "request (regenerate). Learner: wall time of one iteration, by phase.",
        ("phase",),
        LONG,
    ),
    Metric(
        "solrl_iteration_seconds",
        "histogram",
        LEARNER,
        "Wall time of one iteration.",
        (),
        LONG,
    ),
    Metric(
        "solrl_busy_seconds_total",
        "counter",
        EVERY,
        "Time spent computing; one minus its rate is the idle share.",
    ),
    Metric(
        "solrl_score_seconds",
        "histogram",
        REWARD,
        "Computing time of a batch.",
        ("scorer",),
        SHORT,
    ),
    Metric(
        "solrl_score_batch_images",
        "histogram",
        REWARD,
        "Pictures in a batch.",
        ("scorer",),
        (1, 2, 4, 8, 16, 32, 64, 128),
    ),
    Metric(
        "solrl_http_request_seconds",
        "histogram",
        HTTP,
        "From a request to the end of its answer.",
        ("route",),
        LONG,
    ),
    # Queues.
    Metric(
        "solrl_requests_in_flight",
        "gauge",
        ("explorer", "regenerator", "reward"),
        "Requests waiting or running: a run's, and people's.",
        ("lane",),
    ),
    Metric(
        "solrl_queue_entries",
        "gauge",
        LEARNER,
        "Entries of a run's stream that are not done.",
        ("queue",),
    ),
    Metric(
        "solrl_queue_oldest_seconds",
        "gauge",
        LEARNER,
        "Age of the oldest of them; 0 when there is none.",
        ("queue",),
    ),
    Metric(
        "solrl_queue_dead_entries",
        "gauge",
        LEARNER,
        "Entries given up, in the dead-letter stream.",
    ),
    # The run.
    Metric(
        "solrl_run_info",
        "gauge",
        LEARNER,
        "1, with what the run is.",
        ("run", "arm"),
    ),
    Metric(
        "solrl_run_state",
        "gauge",
        LEARNER,
        "1 for the state the run is in.",
        ("state",),
    ),
    Metric("solrl_iterations_total", "counter", LEARNER, "Iterations finished by this process."),
    Metric("solrl_iterations_done", "gauge", LEARNER, "Iterations finished in all."),
    Metric("solrl_iterations_planned", "gauge", LEARNER, "Iterations the run ends after."),
    Metric(
        "solrl_progress_timestamp_seconds",
        "gauge",
        LEARNER,
        "When the run last got on: a prompt regenerated, an iteration finished; Unix time.",
    ),
    Metric(
        "solrl_reward_mean",
        "gauge",
        LEARNER,
        "Of the latest iteration: proxy reward of all candidates, true reward of the kept ones.",
        ("candidates",),
    ),
    Metric(
        "solrl_reward_contrast",
        "gauge",
        LEARNER,
        "True reward of the kept best minus the kept worst, mean over prompts.",
    ),
    Metric(
        "solrl_rank_agreement_tau",
        "gauge",
        LEARNER,
        "Kendall's tau of proxy and true rewards, in the latest audited iteration.",
    ),
    Metric(
        "solrl_rank_agreement_ceiling_tau",
        "gauge",
        LEARNER,
        "The same for full precision at the explorer's steps: what fewer steps alone leave.",
    ),
    Metric("solrl_kl", "gauge", LEARNER, "Mean squared distance to the base velocity."),
    # Policies.
    Metric(
        "solrl_policy_version",
        "gauge",
        ("explorer", "regenerator", "learner"),
        "Policy version served (learner: published); -1 is the base.",
    ),
    Metric(
        "solrl_replica_staleness_versions",
        "gauge",
        LEARNER,
        "Versions a registered replica is behind the published one.",
        ("kind", "replica"),
    ),
    Metric(
        "solrl_reload_seconds",
        "histogram",
        GENERATING,
        "Time of an adapter swap, its canary excluded.",
        (),
        SHORT,
    ),
    Metric(
        "solrl_reload_modules",
        "gauge",
        GENERATING,
        "Modules of the adapter served: bound, and expected.",
        ("modules",),
    ),
    Metric(
        "solrl_reloads_refused_total",
        "counter",
        GENERATING,
        "Adapters that were not loaded; the version before keeps serving.",
    ),
    # What went wrong.
    Metric(
        "solrl_ready",
        "gauge",
        EVERY,
        "1 when it can serve (/readyz says why not).",
    ),
    Metric(
        "solrl_errors_total",
        "counter",
        EVERY,
        "Requests and queue entries that failed, by the kind of error.",
        ("kind",),
    ),
    Metric(
        "solrl_http_requests_total",
        "counter",
        HTTP,
        "Requests answered.",
        ("route", "status"),
    ),
    Metric(
        "solrl_scorer_errors_total",
        "counter",
        REWARD,
        "Pictures without a value: input (excluded), or failed (retried).",
        ("scorer", "kind"),
    ),
    Metric(
        "solrl_excluded_candidates_total",
        "counter",
        ("explorer", "learner"),
        "Candidates without a finite reward (learner: of the kept).",
    ),
    Metric(
        "solrl_non_finite_total",
        "counter",
        ("regenerator", "learner"),
        "Pictures with a non-finite latent; optimizer steps skipped for a non-finite loss.",
    ),
    Metric(
        "solrl_zero_spread_groups_total",
        "counter",
        LEARNER,
        "Prompts whose kept rewards were all equal; not trained on.",
    ),
)


class Metrics:
    """The metrics of one process of `service`. KeyError for a name that is not one of its own."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._refresh: list[Callable[[], None]] = []
        for metric in CATALOGUE:
            if service in metric.services:
                self._made[metric.name] = self._make(metric)

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        made: Counter | Gauge | Histogram
        match metric.kind:
            case "counter":
                made = Counter(metric.name, metric.text, metric.labels, registry=self.registry)
            case "gauge":
                made = Gauge(metric.name, metric.text, metric.labels, registry=self.registry)
            case "histogram":
                made = Histogram(
                    metric.name,
                    metric.text,
                    metric.labels,
                    buckets=metric.buckets,
                    registry=self.registry,
                )
        if metric.labels and all(label in KNOWN for label in metric.labels):
            for values in product(*(KNOWN[label] for label in metric.labels)):
                made.labels(*values)
        return made

    def counter(self, name: str, **labels: str) -> Counter:
        made = self._made[name]
        assert isinstance(made, Counter)
        return made.labels(**labels) if labels else made

    def gauge(self, name: str, **labels: str) -> Gauge:
        made = self._made[name]
        assert isinstance(made, Gauge)
        return made.labels(**labels) if labels else made

    def histogram(self, name: str, **labels: str) -> Histogram:
        made = self._made[name]
        assert isinstance(made, Histogram)
        return made.labels(**labels) if labels else made

    def refreshed_by(self, refresh: Callable[[], None]) -> None:
        """Call it before every scrape, to set gauges that are only known by asking."""
        self._refresh.append(refresh)

    def exposition(self) -> bytes:
        """What a scraper gets, in Prometheus' text format."""
        for refresh in self._refresh:
            refresh()
        return generate_latest(self.registry)


def documentation(catalogue: Sequence[Metric] = CATALOGUE) -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m solrl.metrics`. Every service also has the process metrics of",
        "prometheus-client (`process_cpu_seconds_total`, `process_resident_memory_bytes` ...), and",
        "Triton its own (`nv_inference_request_success`, `nv_inference_pending_request_count`).",
        "",
        "| metric | kind | labels | services | meaning |",
        "|---|---|---|---|---|",
    ]
    for metric in catalogue:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(
            f"| `{metric.name}` | {metric.kind} | {labels} | {', '.join(metric.services)} | "
            f"{metric.text} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(documentation(), end="")
