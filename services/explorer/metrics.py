"""What the gateway counts; scraped at its metrics port."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from services.explorer.explore import Outcome

Source = Literal["call", "queue"]


class Metrics:
    """Counters of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.explorations = Counter(
            "solrl_explorer_explorations_total",
            "Prompts explored to the end, by where they came from.",
            ["source"],
            registry=self.registry,
        )
        self.candidates = Counter(
            "solrl_explorer_candidates_total", "Candidates scored.", registry=self.registry
        )
        self.excluded = Counter(
            "solrl_explorer_excluded_total",
            "Candidates without a finite reward.",
            registry=self.registry,
        )
        self.errors = Counter(
            "solrl_explorer_errors_total",
            "Explorations that failed, by the kind of error.",
            ["source", "kind"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "solrl_explorer_phase_seconds",
            "Computing time of one prompt's candidates.",
            ["phase"],
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=self.registry,
        )
        self.version = Gauge(
            "solrl_explorer_policy_version",
            "Policy version of the latest exploration; -1 is the base model.",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "solrl_explorer_in_flight",
            "Explorations running now.",
            ["source"],
            registry=self.registry,
        )
        self.ready = Gauge(
            "solrl_explorer_ready",
            "1 when Triton and the reward service answer.",
            registry=self.registry,
        )

    def explored(self, source: Source, outcome: Outcome) -> None:
        """Count one exploration."""
        self.explorations.labels(source).inc()
        self.candidates.inc(len(outcome.candidates) - outcome.excluded)
        self.excluded.inc(outcome.excluded)
        self.seconds.labels("explore").observe(outcome.seconds_explore)
        self.seconds.labels("score").observe(outcome.seconds_score)
        self.version.set(-1 if outcome.version is None else outcome.version)
