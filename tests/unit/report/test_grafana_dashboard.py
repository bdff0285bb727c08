"""docs/grafana-dashboard.json asks for what haiprof serves, under the names that it serves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from haiprof.run_format.otel_names import Instrument, instruments, label

DASHBOARD = json.loads(
    (Path(__file__).parents[3] / "docs" / "grafana-dashboard.json").read_text(encoding="utf-8")
)
SERVED: dict[str, list[Instrument]] = {}
for each in instruments().values():
    SERVED.setdefault(each.prometheus_sample_name, []).append(each)
IDENTITY = {"run", "host", "rank", "gpu", "entity"}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
# Grafana's unit of a panel -> the unit of what it draws, and whether that is a rate of a counter.
UNITS = {
    "Bps": {("By", True)},
    "bytes": {("By", False)},
    "percentunit": {("1", False), ("s", True)},
    "watt": {("W", False)},
    "hertz": {("Hz", False)},
    "celsius": {("Cel", False)},
    "s": {("s", True), ("{count}", True)},
}


def asked(expression: str) -> list[str]:
    """Metrics of an expression: each has a selector."""
    return re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{", expression)


def labels(name: str) -> set[str]:
    return IDENTITY | {label(attribute) for i in SERVED[name] for attribute in i.attributes}


@pytest.mark.parametrize(("panel", "target"), TARGETS, ids=lambda part: part.get("title", "expr"))
def test_panel_asks_for_what_is_served(panel: dict[str, Any], target: dict[str, Any]) -> None:
    expression = target["expr"]
    names = asked(expression)
    assert names
    assert set(names) <= SERVED.keys()
    allowed = set.union(*map(labels, names))
    grouped = {word for by in re.findall(r"by \(([^)]*)\)", expression) for word in by.split(", ")}
    matched = set(re.findall(r"[{,]([a-z_]+)=", expression))
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert grouped | matched | shown <= allowed
    assert not grouped or shown <= grouped, "a label that the sum has lost"
    for name in names:
        rated = bool(re.search(rf"(rate|increase)\({name}\{{", expression))
        (kind,) = {each.kind for each in SERVED[name]}
        assert rated == (kind == "counter")
        if panel["fieldConfig"]["defaults"]["unit"] != "short":
            unit = SERVED[name][0].unit
            assert (unit, rated) in UNITS[panel["fieldConfig"]["defaults"]["unit"]]


def test_variables_ask_for_what_is_served() -> None:
    queries = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    for query in queries:
        name, wanted = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert wanted in labels(name)


def test_panels_have_numbers_and_places_of_their_own() -> None:
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert len(set(places)) == len(places)
