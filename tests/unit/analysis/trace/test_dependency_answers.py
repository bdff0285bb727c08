"""Critical path, what-if and link of all real traces as they were, to the nanosecond."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.trace_analysis.chakra import chakra_graph
from haiprof.trace_analysis.critical_path import CriticalPath
from haiprof.trace_analysis.execution_link import link, pairs
from haiprof.trace_analysis.what_if.scenarios import scenarios
from tests.unit.analysis.trace.shared import FEW_TRACES, REAL_TRACES, REPOSITORY, traces

GOLDEN = REPOSITORY / "tests" / "data" / "dependencies"


def checksum(rows: list[tuple[Any, ...]]) -> str:
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:16]


def path_answer(path: CriticalPath) -> dict[str, Any]:
    rows = path.segments().select("start_ns", "duration_ns", "bound_by", "event").rows()
    found = path.summary().filter(pl.col("duration_ns") > 0)
    return {
        "length_ns": path.length_ns,
        "confidence": path.confidence,
        "dependencies": [path.dependency_count, path.assumed_count],
        "by_cause": dict(found.select("bound_by", "duration_ns").iter_rows()),
        "segments": [len(rows), checksum(rows)],
    }


def what_if_answer(analysed: TraceAnalysis) -> dict[str, Any]:
    found = analysed.what_if(*scenarios(analysed))
    columns = ("change", "predicted_step_ns", "shortened_ns")
    return {
        "step_ns": found.select("measured_step_ns", "reproduced_step_ns").row(0),
        "unexplained_ratio": round(found["unexplained_ratio"][0], 9),
        "collectives": found["collective_count"][0],
        "changes": {change: numbers for change, *numbers in found.select(columns).iter_rows()},
    }


def link_answer(folder: Path, execution: Path) -> dict[str, Any]:
    found = {}
    for pair in pairs(folder, execution)[0]:
        nodes = link(pair).nodes
        edges = chakra_graph(nodes, pair.rank, {}).edges.sort("before", "after", "why")
        waits = nodes.select("node", "thread_dependency", "sync_dependencies").sort("node")
        found[str(pair.rank)] = {
            "edges": dict(edges["why"].value_counts().sort("why").iter_rows()),
            "checksums": [checksum(waits.rows()), checksum(edges.rows())],
        }
    return found


def answers(name: str) -> dict[str, Any]:
    """All answers about a trace, as JSON has them."""
    analysed = TraceAnalysis(traces(name))
    found: dict[str, Any] = {
        "critical_path": {str(r): path_answer(analysed.critical_path(r)) for r in analysed.files},
        "what_if": what_if_answer(analysed),
    }
    execution = traces(name).with_name(f"{name}_et")
    if execution.exists():
        found["link"] = link_answer(traces(name), execution)
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


@pytest.mark.parametrize("name", FEW_TRACES)
def test_answers_are_as_they_were(name: str) -> None:
    assert answers(name) == json.loads((GOLDEN / f"{name}.json").read_text())


if __name__ == "__main__":
    for trace_name in REAL_TRACES:
        text = json.dumps(answers(trace_name), indent=1, sort_keys=True)
        (GOLDEN / f"{trace_name}.json").write_text(text + "\n")
