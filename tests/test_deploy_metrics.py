"""Metrics, dashboards, alerts, runbook and the code that counts speak of the same names."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import promql
import pytest
import yaml

from solrl import errors
from solrl.metrics import CATALOGUE, EVERY, KNOWN, Metric, documentation

ROOT = Path(__file__).resolve().parent.parent
RUNBOOK = ROOT / "docs" / "runbook.md"
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
TARGET_LABELS = {"job", "instance"}  # Prometheus puts them on everything it scrapes

# Series that are not ours, with their labels.
FOREIGN: dict[str, set[str]] = {
    "up": set(),
    "process_cpu_seconds_total": set(),
    "process_resident_memory_bytes": set(),
    "nv_inference_request_success": {"model", "version"},
    "nv_inference_request_failure": {"model", "version", "reason"},
    "nv_inference_pending_request_count": {"model", "version"},
}
# Metrics that no dashboard and no rule shows, and why they are there.
TABLE_ONLY = {
    "solrl_explorations_total": "prompts; the dashboard shows their candidates",
    "solrl_http_request_seconds": "for a question about one route; the dashboard counts requests",
    "solrl_iterations_total": "of one process; the dashboard shows those of the run",
    "solrl_reload_modules": "they never differ while it serves: see SolrlReloadRefused",
    "solrl_run_info": "joins the name of the run to other series",
}


def series_of(metric: Metric) -> dict[str, set[str]]:
    labels = {*metric.labels} | TARGET_LABELS
    if metric.kind == "histogram":
        return {
            f"{metric.name}_bucket": labels | {"le"},
            f"{metric.name}_sum": labels,
            f"{metric.name}_count": labels,
        }
    return {metric.name: labels}


LABELS_OF = {name: labels | TARGET_LABELS for name, labels in FOREIGN.items()}
METRIC_OF: dict[str, Metric] = {}
for _metric in CATALOGUE:
    for _name, _labels in series_of(_metric).items():
        LABELS_OF[_name] = _labels
        METRIC_OF[_name] = _metric


@dataclass(frozen=True)
class Asked:
    """An expression, where it is, and the labels its legend or annotation shows."""

    where: str
    expression: str
    shown: tuple[str, ...] = ()


@cache
def loaded(path: Path) -> Any:
    return (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text())


def rules() -> list[dict[str, Any]]:
    return [
        rule
        for path in sorted((PROMETHEUS / "rules").glob("*.yml"))
        for group in loaded(path)["groups"]
        for rule in group["rules"]
    ]


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
CASES = loaded(PROMETHEUS / "rules_test.yml")["tests"]
SCRAPED = [job["job_name"] for job in loaded(PROMETHEUS / "prometheus.yml")["scrape_configs"]]


def panels(holder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in holder.get("panels", []):
        yield panel
        yield from panels(panel)


def in_dashboard(path: Path) -> Iterator[Asked]:
    dashboard = loaded(path)
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            shown = re.findall(r"{{\s*(\w+)\s*}}", target.get("legendFormat", ""))
            yield Asked(f"{path.name}, {panel['title']}", target["expr"], tuple(shown))
    for variable in dashboard.get("templating", {}).get("list", []):
        if variable["type"] == "query":
            query = variable["query"]
            text = query if isinstance(query, str) else query["query"]
            values = re.fullmatch(r"label_values\((?:(.+),)?\s*(\w+)\)", text)
            assert values, f"{path.name}: variable {variable['name']} asks {text!r}"
            yield Asked(f"{path.name}, ${variable['name']}", values[1] or "up", (values[2],))
    for note in dashboard.get("annotations", {}).get("list", []):
        if "expr" in note:
            yield Asked(f"{path.name}, {note['name']}", note["expr"])


def in_rule(rule: dict[str, Any]) -> Asked:
    text = " ".join(rule.get("annotations", {}).values())
    shown = re.findall(r"\$labels\.(\w+)", text)
    return Asked(rule.get("alert") or rule["record"], rule["expr"], tuple(shown))


ASKED = [asked for path in DASHBOARDS for asked in in_dashboard(path)] + [
    in_rule(rule) for rule in rules()
]
TESTED = [series["series"] for case in CASES for series in case["input_series"]]


@dataclass(frozen=True)
class Counted:
    """A metric's name in the code, and how it is asked for, if it is right there."""

    where: Path
    name: str
    kind: str | None = None
    labels: frozenset[str] = frozenset()

    @property
    def service(self) -> str | None:
        """None for code that several services have."""
        parts = self.where.relative_to(ROOT).parts
        return parts[1] if parts[0] == "services" and len(parts) > 2 else None


@cache
def counted() -> list[Counted]:
    found = []
    for folder in ("solrl", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if '"solrl_' not in text or path == ROOT / "solrl" / "metrics.py":
                continue
            asked_for = set()
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Call(
                        func=ast.Attribute(attr=kind), args=[ast.Constant(value=str(name)) as said]
                    ) if name.startswith("solrl_"):
                        labels = frozenset(word.arg or "**" for word in node.keywords)
                        found.append(Counted(path, name, kind, labels))
                        asked_for.add(said)
                    case ast.Constant(value=str(name)) if re.fullmatch(r"solrl_[a-z0-9_]+", name):
                        if node not in asked_for:
                            found.append(Counted(path, name))
    return found


def allowed_values(series: str, label: str) -> set[str] | None:
    """None where any value may come."""
    metric = METRIC_OF.get(series)
    if label == "job":
        return {*metric.services} if metric else {*SCRAPED}
    if series == "solrl_errors_total" and label == "kind":
        return {name for name in vars(errors) if name.endswith("Error")} | {"InternalError"}
    return {*KNOWN[label]} if metric and label in KNOWN else None


def wrong_values(expression: str) -> list[str]:
    return [
        f'{series.name} has no {label}="{value}"'
        for series in promql.read(expression).series
        for label, operator, text in series.matchers
        if (allowed := allowed_values(series.name, label)) is not None
        for value in (text.split("|") if "~" in operator else [text])
        if value not in allowed and not value.startswith("$")
    ]


LABELS = {
    "a_total": {"job", "instance", "kind"},
    "b": {"job", "instance"},
    "c_bucket": {"job", "instance", "le"},
}


@pytest.mark.parametrize(
    ("expression", "shown", "expected"),
    [
        ("b", "", []),
        ("time() - b > 1e-9 * 5 or vector(0)", "job", []),
        ("rate(a_total[5m]) and b offset 5m", "kind", []),
        ('sum by (kind) (increase(a_total{job!="x, {by (le)}", kind=~"b|c"}[5m:1m]))', "kind", []),
        ("sum(rate(a_total[$__rate_interval])) by (kind) / scalar(sum(b))", "kind", []),
        ("histogram_quantile(0.5, sum by (job, le) (rate(c_bucket[1m])))", "job", []),
        ("a_total * on (instance) group_left (kind) a_total", "kind", []),
        ("b * on (instance) group_left (kind) a_total", "kind", []),
        ("max without (kind) (a_total)", "job", []),
        ("a", "", ["no metric a"]),
        ("rate(a[5m]) / b", "", ["no metric a"]),
        ('b{knid="x"}', "", ["b has no label knid"]),
        ('b{job="x", knid!~"y"}', "", ["b has no label knid"]),
        ("sum by (job, kind) (b)", "", ["b has no label kind"]),
        ("sum by (kind) (a_total) / (sum by (kind) (b) > 0)", "", ["b has no label kind"]),
        ("sum(b) by (kind)", "", ["b has no label kind"]),
        ("max without (kind) (b)", "", ["b has no label kind"]),
        ("a_total > on (kind) b", "", ["no label kind right of on"]),
        ("b > on (kind) a_total", "", ["no label kind left of on"]),
        ("a_total * on (job) group_left (kind) b", "", ["no label kind right of group_left"]),
        ("b > 0 and a_total", "kind", ["the result has no label kind"]),
        ("sum(a_total)", "kind", ["the result has no label kind"]),
        ("sum by (job) (a_total)", "kind", ["the result has no label kind"]),
        ("max without (kind) (a_total)", "kind", ["the result has no label kind"]),
    ],
)
def test_names_and_labels_of_an_expression_are_found(
    expression: str, shown: str, expected: list[str]
) -> None:
    assert promql.faults(expression, LABELS, shown.split()) == expected


@pytest.mark.parametrize("expression", ['{job="x"}', "b{job=x}", "topk by (job) (1, b)", "sum(b"])
def test_an_expression_that_cannot_be_read_is_said(expression: str) -> None:
    with pytest.raises(ValueError, match=r"selector|matchers|grouping|unbalanced"):
        promql.read(expression)


def test_a_value_that_a_label_never_has_is_found() -> None:
    assert not wrong_values('solrl_run_state{job="learner", state=~"running|paused"}')
    assert len(wrong_values('solrl_run_state{job="reward", state=~"running|paws"}')) == 2


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.where)
def test_dashboards_and_rules_ask_for_metrics_and_labels_that_exist(asked: Asked) -> None:
    assert promql.read(asked.expression).series, "asks for nothing"
    assert promql.faults(asked.expression, LABELS_OF, asked.shown) == []
    assert wrong_values(asked.expression) == []


def test_rule_tests_give_each_series_the_labels_it_really_has() -> None:
    for text in TESTED:
        [series] = promql.read(text).series
        assert series.name in LABELS_OF, text
        optional = {"model", "version", "reason"}
        given = {label for label, _, _ in series.matchers}
        assert given - optional == LABELS_OF[series.name] - optional, text
        assert wrong_values(text) == []


def test_code_counts_what_is_in_the_catalogue_and_as_it_says() -> None:
    catalogue = {metric.name: metric for metric in CATALOGUE}
    for one in counted():
        assert one.name in catalogue, f"{one.where} has {one.name}"
        metric = catalogue[one.name]
        assert one.service is None or one.service in metric.services, f"{one.where}: {one.name}"
        if one.kind is not None:
            assert (one.kind, one.labels) == (metric.kind, frozenset(metric.labels)), one


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_every_metric_is_counted_by_each_of_its_services(metric: Metric) -> None:
    places = {one.service for one in counted() if one.name == metric.name}
    missing = [service for service in metric.services if not places & {service, None}]
    assert not missing


def test_names_in_the_catalogue_follow_the_rules() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert not {*metric.labels} & (TARGET_LABELS | {"le"}), metric.name


def test_every_metric_is_shown_or_it_is_said_why_not() -> None:
    used = {series.name for asked in ASKED for series in promql.read(asked.expression).series}
    unused = {metric.name for metric in CATALOGUE if not used & {*series_of(metric)}}
    assert unused == {*TABLE_ONLY}
    assert all(TABLE_ONLY.values())


def test_metrics_page_is_up_to_date() -> None:
    """Write it again with `python -m solrl.metrics > docs/metrics.md`."""
    assert (ROOT / "docs" / "metrics.md").read_text() == documentation()


def test_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    parts = re.split(r"^## (.+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert {*sections} == {*ALERTS}
    assert len(parts) // 2 == len(sections), "a section is there twice"
    assert all(text.strip() for text in sections.values())


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_severity_a_summary_and_a_link_to_its_section(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"]
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == RUNBOOK
    assert anchor == name.lower()
    assert f"\n## {name}\n" in RUNBOOK.read_text()


def test_every_alert_is_shown_to_fire_and_not_to() -> None:
    seen = {
        (checked["alertname"], bool(checked["exp_alerts"]))
        for case in CASES
        for checked in case["alert_rule_test"]
    }
    assert seen == {(name, fires) for name in ALERTS for fires in (True, False)}


def test_names_of_alerts_and_dashboards_are_not_there_twice() -> None:
    assert len(ALERTS) == sum("alert" in rule for rule in rules())
    uids = [loaded(path)["uid"] for path in DASHBOARDS]
    assert len({*uids}) == len(uids)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_an_id_of_their_own_a_title_a_description_and_a_unit(path: Path) -> None:
    dashboard = loaded(path)
    assert re.fullmatch(r"solrl-[a-z-]+", dashboard["uid"])
    ids = [panel["id"] for panel in panels(dashboard)]
    assert len({*ids}) == len(ids)
    for panel in panels(dashboard):
        assert panel["title"], panel["id"]
        if panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["targets"], panel["title"]
        if panel["type"] not in ("row", "table", "text"):
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def data_sources(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        if "datasource" in node:
            yield node["datasource"]
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from data_sources(inner)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_read_from_the_data_source_that_is_provisioned(path: Path) -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning" / "datasources"
    provisioned = [one for file in folder.glob("*.yml") for one in loaded(file)["datasources"]]
    expected = [{"type": one["type"], "uid": one["uid"]} for one in provisioned]
    sources = [*data_sources(loaded(path))]
    assert all(source in expected for source in sources), sources
    for panel in panels(loaded(path)):
        for part in (panel, *panel.get("targets", [])):
            assert panel["type"] == "row" or "datasource" in part, panel["title"]


def test_every_service_is_scraped_and_missed_when_it_is_gone() -> None:
    services = {*EVERY, "triton"}
    assert sorted(SCRAPED) == sorted(services | {"prometheus"})
    named = [
        value
        for series in promql.read(ALERTS["SolrlServiceDown"]["expr"]).series
        for label, _, values in series.matchers
        if label == "job"
        for value in values.split("|")
    ]
    # Once in the comparison with 0 and once in an absent().
    assert sorted(named) == sorted([*services, *services])
