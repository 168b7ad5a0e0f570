"""What a PromQL expression asks of the series in it: their names and labels.

Regular expressions, enough for rules and dashboards; what they cannot read is a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

WORDS = {"and", "or", "unless", "bool", "offset", "atan2", "inf", "nan"}
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
MATCHER = re.compile(r'(?P<label>\w+)\s*(?P<operator>=~|!~|!=|=)\s*"(?P<string>\d+)"\s*(?:,|$)')
SERIES = re.compile(
    r"(?<![\w.:$])(?P<name>[a-zA-Z_:][\w:]*)(?![\w:]|\s*\()\s*(?:\{(?P<matchers>[^{}]*)\})?"
)
GROUPING = re.compile(r"\b(?P<word>by|without)\s*\((?P<labels>[^()]*)\)")
BEHIND = re.compile(rf"\s*{GROUPING.pattern}")
JOIN = re.compile(r"\b(?P<word>on|ignoring|group_left|group_right)\s*\((?P<labels>[^()]*)\)")
AGGREGATION = re.compile(
    r"\b(?:sum|min|max|avg|count|group|stddev|stdvar|quantile|count_values)\s*"
    rf"(?:{GROUPING.pattern}\s*)?\("
)

# Where the labels in a join's parentheses have to be.
SIDES = {
    "on": {"left", "right"},
    "ignoring": set[str](),
    "group_left": {"right"},
    "group_right": {"left"},
}


@dataclass(frozen=True)
class Series:
    name: str
    matchers: tuple[tuple[str, str, str], ...]
    # Labels of the aggregations around it.
    grouped: frozenset[str]
    position: int


@dataclass(frozen=True)
class Aggregation:
    begin: int
    end: int
    word: str | None
    labels: frozenset[str]


@dataclass(frozen=True)
class Join:
    position: int
    word: str
    labels: frozenset[str]


@dataclass(frozen=True)
class Expression:
    series: tuple[Series, ...]
    aggregations: tuple[Aggregation, ...]
    joins: tuple[Join, ...]

    def labels_left(self, labels_of: Mapping[str, Collection[str]]) -> set[str]:
        """Labels of the result: an operator takes its left side's, an aggregation those named."""
        if not self.series:
            return set()
        first = self.series[0]
        left = set(labels_of.get(first.name, ()))
        for one in self.aggregations:
            if one.begin <= first.position < one.end:
                left = left - one.labels if one.word == "without" else left & one.labels
        return left.union(*(join.labels for join in self.joins if join.word == "group_left"))


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _closing(text: str, opening: int) -> int:
    depth = 0
    for position in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return position
    raise ValueError(f"unbalanced: {text}")


def _aggregations(text: str) -> Iterator[Aggregation]:
    for found in AGGREGATION.finditer(text):
        end = _closing(text, found.end() - 1)
        grouping = found if found["word"] else BEHIND.match(text, end + 1)
        if grouping:
            yield Aggregation(found.end(), end, grouping["word"], _names(grouping["labels"]))
        else:
            yield Aggregation(found.end(), end, None, frozenset())


def _matchers(text: str, strings: list[str]) -> Iterator[tuple[str, str, str]]:
    if MATCHER.sub("", text).strip():
        raise ValueError(f"not label matchers: {{{text}}}")
    for found in MATCHER.finditer(text):
        yield found["label"], found["operator"], strings[int(found["string"])]


def read(expression: str) -> Expression:
    strings = [found[0][1:-1] for found in STRING.finditer(expression)]
    numbers = iter(range(len(strings)))
    # What is in a string or a range may look like anything.
    text = STRING.sub(lambda _: f'"{next(numbers)}"', expression)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    aggregations = tuple(_aggregations(text))
    if len(GROUPING.findall(text)) != sum(one.word is not None for one in aggregations):
        raise ValueError(f"a grouping of no aggregation known here: {expression}")
    joins = tuple(
        Join(found.start(), found["word"], _names(found["labels"])) for found in JOIN.finditer(text)
    )
    for pattern in (GROUPING, JOIN):
        text = pattern.sub(lambda found: " " * len(found[0]), text)
    series = tuple(
        Series(
            found["name"],
            tuple(_matchers(found["matchers"] or "", strings)),
            frozenset().union(
                *(one.labels for one in aggregations if one.begin <= found.start() < one.end)
            ),
            found.start(),
        )
        for found in SERIES.finditer(text)
        if found["name"].lower() not in WORDS
    )
    if "{" in SERIES.sub("", text):
        raise ValueError(f"a selector without a name: {expression}")
    return Expression(series, aggregations, joins)


def faults(
    expression: str, labels_of: Mapping[str, Collection[str]], shown: Collection[str] = ()
) -> list[str]:
    """What `expression`, and the labels `shown` of its result, ask for that nothing has."""
    seen = read(expression)
    found = []
    for series in seen.series:
        if series.name not in labels_of:
            found.append(f"no metric {series.name}")
            continue
        asked = {label for label, _, _ in series.matchers} | series.grouped
        found += [
            f"{series.name} has no label {label}" for label in asked - {*labels_of[series.name]}
        ]
    for join in seen.joins:
        for label in join.labels:
            sides = {
                "left" if series.position < join.position else "right"
                for series in seen.series
                if label in labels_of.get(series.name, ())
            }
            missing = SIDES[join.word] - sides
            found += [f"no label {label} {side} of {join.word}" for side in missing]
    left = seen.labels_left(labels_of)
    found += [f"the result has no label {label}" for label in shown if label not in left]
    return sorted(found)
