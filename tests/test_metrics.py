"""The catalogue of metrics: its rules, what a scrape shows from the start, who is asked for it."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from serving import HTTP, free_port, running

from services.http import create_app
from services.learner.run import Learner
from solrl import queue
from solrl.metrics import CATALOGUE, EVERY, KNOWN, LONG, SHORT, Metric, Metrics, Service
from solrl.queue import Stream
from solrl.records import PromptRecord, ReplicaState

#: Every label a metric may have, and why it has few values.
LABELS = {
    "lane": "a run, people",
    "precision": "those of a process",
    "scorer": "those of the configuration",
    "phase": "of the code",
    "route": "the templates of paths, never the paths asked for",
    "status": "HTTP's",
    "kind": "classes of errors, kinds of services",
    "queue": "the streams of a run",
    "state": "of the code",
    "modules": "bound, expected",
    "candidates": "all, kept",
    "run": "the one of this process",
    "arm": "the one of this process",
    "replica": "the registered ones, dropped when they are gone",
}
NOT_BASE_UNITS = {
    *("ms", "millis", "milliseconds", "us", "microseconds", "ns", "minutes", "hours", "days"),
    *("kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "gigabytes"),
    *("percent", "percentage", "pct"),
}
RUNS = count()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return samples(metrics.exposition().decode())


# --- the catalogue -------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_metric_follows_the_rules(metric: Metric) -> None:
    words = metric.name.split("_")
    assert words[0] == "solrl"
    assert metric.name == metric.name.lower()
    assert (words[-1] == "total") == (metric.kind == "counter")
    assert not {*words} & NOT_BASE_UNITS
    # What is measured in time says so, in its base unit.
    if metric.kind == "histogram":
        assert (metric.buckets in (LONG, SHORT)) == (words[-1] == "seconds")
    if "time" in metric.text.lower().split() or "age" in metric.text.lower().split():
        assert "seconds" in words
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert {*metric.labels} <= {*LABELS}
    assert metric.text[0] != " "
    assert metric.text.endswith(".")
    assert "|" not in metric.text, "it would end a cell of the table in docs/metrics.md"
    assert metric.services
    assert {*metric.services} <= {*EVERY}


# --- what is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize("service", EVERY)
def test_a_service_shows_all_of_its_metrics_from_the_start_and_no_other(service: Service) -> None:
    text = Metrics(service).exposition().decode()
    shown = samples(text)
    declared = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE solrl_")}
    own = [metric for metric in CATALOGUE if service in metric.services]
    assert declared == {metric.name for metric in own}
    for metric in own:
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        series = {labels: value for (found, labels), value in shown.items() if found == name}
        known = all(label in KNOWN for label in metric.labels)
        expected = {
            frozenset(zip(metric.labels, values, strict=True))
            for values in product(*(KNOWN[label] for label in metric.labels))
        } if known else set()  # fmt: skip
        assert series == dict.fromkeys(expected, 0.0), metric.name
    assert not [name for name, _ in shown if name.endswith("_created")]
    assert ("process_cpu_seconds_total", frozenset()) in shown


def test_two_of_one_process_do_not_share_their_values() -> None:
    one, other = Metrics("reward"), Metrics("reward")
    one.counter("solrl_errors_total", kind="InputError").inc(3)
    key = ("solrl_errors_total", frozenset({("kind", "InputError")}))
    assert scraped(one)[key] == 3
    assert key not in scraped(other)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("solrl_nothing", "gauge"),
        ("ready", "gauge"),
        ("solrl_scored_images_total", "counter"),  # the reward service's
        ("solrl_iteration_seconds", "histogram"),  # the learner's
    ],
)
def test_a_metric_that_is_not_ones_own_is_a_key_error(name: str, kind: str) -> None:
    with pytest.raises(KeyError, match=name):
        getattr(Metrics("explorer"), kind)(name)


@pytest.mark.parametrize("labels", [{"lanes": "run"}, {"lane": "run", "seed": "1"}])
def test_labels_that_are_not_its_own_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="label"):
        Metrics("explorer").gauge("solrl_requests_in_flight", **labels)


# --- what is asked for at each scrape ------------------------------------------------------------


def test_everything_that_refreshes_is_called_before_each_scrape() -> None:
    metrics, turns = Metrics("learner"), count(1)
    metrics.refreshed_by(lambda: metrics.gauge("solrl_iterations_done").set(next(turns)))
    metrics.refreshed_by(lambda: metrics.gauge("solrl_iterations_planned").set(7))
    for turn in (1, 2, 3):
        shown = scraped(metrics)
        assert shown["solrl_iterations_done", frozenset()] == turn
        assert shown["solrl_iterations_planned", frozenset()] == 7


@asynccontextmanager
async def nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


def test_a_refresh_that_fails_fails_its_scrape_alone() -> None:
    """Better no answer than old values that look new: Prometheus then says that it is not up."""
    metrics, problems, broken = Metrics("reward"), list[str](), threading.Event()

    def refresh() -> None:
        if broken.is_set():
            raise ZeroDivisionError("the secret of the machine")

    metrics.refreshed_by(refresh)
    app = create_app(
        service="reward",
        description="A stand-in.",
        metrics=metrics,
        problems=lambda: problems,
        lifespan=nothing,
        max_body=1,
        token="",
    )
    with running(app, f"http://127.0.0.1:{free_port()}") as url:

        def shown() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
            answer = HTTP.get(f"{url}/metrics")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain; version=")
            return samples(answer.text)

        assert shown()["solrl_ready", frozenset()] == 1
        problems.append("no model")
        assert shown()["solrl_ready", frozenset()] == 0
        broken.set()
        refused = HTTP.get(f"{url}/metrics")
        assert (refused.status_code, "secret" in refused.text) == (500, False)
        assert HTTP.get(f"{url}/healthz").status_code == 200
        broken.clear()
        after = shown()
        assert after["solrl_errors_total", frozenset({("kind", "InternalError")})] == 1
        failed = frozenset({("route", "/metrics"), ("status", "500")})
        assert after["solrl_http_requests_total", failed] == 1


# --- what the learner asks Redis for -------------------------------------------------------------


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with queue.connect(redis_url) as connected:
        for key in connected.scan_iter("solrl:replica:*"):
            connected.delete(key)
        yield connected


def learner_of(run: str, client: redis.Redis, *, done: int) -> Any:
    """As much of a learner as measures: its run, its Redis and what it has done."""
    return SimpleNamespace(
        _config=SimpleNamespace(run=SimpleNamespace(name=run)),
        _control=SimpleNamespace(metrics=Metrics("learner")),
        _scraped=client,
        done=done,
    )


def replica(kind: str, name: str, run: str, version: int | None) -> ReplicaState:
    values: dict[str, Any] = {
        "kind": kind, "id": name, "run": run, "version": version,
        "address": "http://x:1", "base_sha256": "b" * 64, "precision": "fp32",
    }  # fmt: skip
    return ReplicaState(**values)


def prompt(run: str) -> PromptRecord:
    return PromptRecord(
        run=run, epoch=1, iteration=0, slot=0, request_id="r", trace_id="t" * 32, prompt="a dog",
        prompt_index=0, run_seed=1, candidates=8, keep=2, steps=2, policy_version=0,
        adapter_sha256="a" * 64, reward="emoji_clip",
    )  # fmt: skip


def test_the_learner_shows_its_queues_and_how_far_replicas_are_behind(client: redis.Redis) -> None:
    run = f"metrics-test-{next(RUNS)}"
    learner = learner_of(run, client, done=5)
    metrics: Metrics = learner._control.metrics
    metrics.refreshed_by(lambda: Learner._measure_redis(learner))

    def gauge(name: str, **labels: str) -> float:
        return shown.get((f"solrl_{name}", frozenset(labels.items())), math.nan)

    stream = Stream(client, run=run, name="prompts", record=PromptRecord)
    for _ in range(3):
        stream.put(prompt(run))
    stream.bury(stream.put(prompt(run)), {"json": "{}"}, "a test")
    queue.register(client, replica("explorer", "current", run, 5))
    queue.register(client, replica("explorer", "behind", run, 3))
    queue.register(client, replica("regenerator", "new", run, None))
    queue.register(client, replica("regenerator", "foreign", "another", 9))
    shown = scraped(metrics)
    assert gauge("queue_entries", queue="prompts") == 3
    assert gauge("queue_entries", queue="selected") == 0
    assert gauge("queue_oldest_seconds", queue="selected") == 0
    assert gauge("queue_dead_entries") == 1
    for kind, name, behind in (
        ("explorer", "current", 0),
        ("explorer", "behind", 2),
        ("regenerator", "new", 5),
        # It serves none of this run's versions, not even 0.
        ("regenerator", "foreign", 6),
    ):
        assert gauge("replica_staleness_versions", kind=kind, replica=name) == behind, name
    # A replica that is gone is no longer shown, and not as one that is up to date.
    queue.unregister(client, replica("explorer", "behind", run, 3))
    shown = scraped(metrics)
    gone = gauge("replica_staleness_versions", kind="explorer", replica="behind")
    assert math.isnan(gone)
    assert gauge("replica_staleness_versions", kind="explorer", replica="current") == 0


def test_without_redis_the_learner_shows_what_it_saw_last(client: redis.Redis) -> None:
    run = f"metrics-test-{next(RUNS)}"
    learner = learner_of(run, client, done=1)
    Stream(client, run=run, name="prompts", record=PromptRecord).put(prompt(run))
    queue.register(client, replica("explorer", "one", run, 1))
    Learner._measure_redis(learner)
    metrics: Metrics = learner._control.metrics
    seen = {key: value for key, value in scraped(metrics).items() if "solrl_" in key[0]}
    assert seen["solrl_queue_entries", frozenset({("queue", "prompts")})] == 1
    learner._scraped = redis.Redis.from_url(
        f"redis://127.0.0.1:{free_port()}", socket_timeout=1.0, socket_connect_timeout=1.0
    )
    Learner._measure_redis(learner)
    now = {key: value for key, value in scraped(metrics).items() if "solrl_" in key[0]}
    assert now == seen
    # Nor does a registration that cannot be read break the exposition.
    client.set("solrl:replica:explorer:odd", "{}")
    learner._scraped = client
    Learner._measure_redis(learner)
    client.delete("solrl:replica:explorer:odd")
    now = {key: value for key, value in scraped(metrics).items() if "solrl_" in key[0]}
    assert now == seen
