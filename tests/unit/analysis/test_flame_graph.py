"""Flame graphs: every time against one that is counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.flame_graph import FlameGraph, inclusive_ns
from haiprof.show.flame import run_flames
from tests.unit.analysis.recorded import spans_of, write_rank, write_run
from tests.unit.analysis.sampled import Stack, write_stacks

SITE = "/opt/venv/lib/python3.11/site-packages"
MAIN = ("/home/me/train.py", 88, "main")
LOAD = ("/home/me/data.py", 12, "load_image")
OPEN = (f"{SITE}/PIL/Image.py", 3000, "open")
TINY = ("/home/me/data.py", 99, "seldom")
STEPS = "D F B O " * 60
SPAN_NS, GAP_NS = 100_000, 7_000
STEP_NS = 4 * SPAN_NS + 4 * GAP_NS


def record(folder: Path, stacks: dict[int, Sequence[Stack]]) -> Analyzer:
    """A run whose ranks have these stacks in turn, one a microsecond."""
    run = write_run(folder)
    spans = spans_of(STEPS, span_ns=SPAN_NS, gap_ns=GAP_NS)
    last_us = int(spans.end_ns.max()) // 1000
    for rank, own in stacks.items():
        write_rank(run, spans, rank=rank)
        samples = [(1000 * us, own[us % len(own)]) for us in range(1, last_us)]
        write_stacks(run.rank(rank).stacks, samples, per_line=500)
    return Analyzer(run.root)


def times(graph: FlameGraph, series: int = 0) -> dict[tuple[str, ...], float]:
    """Inclusive ns per step by path of names."""
    whole = inclusive_ns([node.parent for node in graph.nodes], graph.series[series].self_ns)
    found = {}
    for number, ns in enumerate(whole.tolist()):
        path, at = [], number
        while at >= 0:
            path.append(graph.frames[graph.nodes[at].frame].name)
            at = graph.nodes[at].parent
        found[tuple(reversed(path))] = ns
    return found


def test_positions_add_up_to_the_step_and_samples_share_their_time(tmp_path: Path) -> None:
    run = record(tmp_path / "run", {0: [(MAIN, LOAD, OPEN), (MAIN, LOAD, OPEN), (MAIN,)]})
    graph = run_flames(run).graph
    found = times(graph)
    assert sum(found[(name,)] for name in POSITIONS if (name,) in found) == pytest.approx(
        STEP_NS, rel=0.01
    )
    assert found["forward", "main"] == pytest.approx(SPAN_NS)
    assert found["forward", "main", "load_image", "open"] == pytest.approx(
        SPAN_NS * 2 / 3, rel=0.05
    )
    kinds = {frame.name: (frame.kind, frame.place) for frame in graph.frames}
    assert kinds["load_image"] == ("user", "/home/me/data.py:12")
    assert kinds["open"] == ("library", "PIL.Image")


def test_ranks_stand_beside_their_mean(tmp_path: Path) -> None:
    run = record(tmp_path / "run", {0: [(MAIN,)], 1: [(MAIN, LOAD)]})
    graph = run_flames(run).graph
    assert [one.rank for one in graph.series] == [None, 0, 1]
    path = ("backward", "main", "load_image")
    assert [round(times(graph, n).get(path, 0)) for n in range(3)] == [SPAN_NS // 2, 0, SPAN_NS]


def test_two_runs_are_told_apart_by_function(tmp_path: Path) -> None:
    """Lines move when code changes: the same function is one frame."""
    after = record(tmp_path / "after", {0: [(MAIN, LOAD)]})
    moved = ("/home/me/data.py", 40, "load_image")
    before = record(tmp_path / "before", {0: [(MAIN,), (MAIN, moved)]})
    graph = run_flames(after, before).graph
    assert [(one.run, one.rank) for one in graph.series] == [
        ("", None), ("", 0), ("before", None), ("before", 0),
    ]  # fmt: skip
    path = ("forward", "main", "load_image")
    assert times(graph, 0)[path] == pytest.approx(SPAN_NS)
    assert times(graph, 2)[path] == pytest.approx(SPAN_NS / 2, rel=0.02)


def test_small_frames_count_as_their_callers_own_time(tmp_path: Path) -> None:
    stacks = [(MAIN, LOAD)] * 1999 + [(MAIN, TINY)]
    graph = run_flames(record(tmp_path / "run", {0: stacks})).graph
    assert "seldom" not in {frame.name for frame in graph.frames}
    assert times(graph)["forward", "main"] == pytest.approx(SPAN_NS)


def test_table_names_lines_with_what_they_call(tmp_path: Path) -> None:
    run = record(tmp_path / "run", {0: [(MAIN, LOAD, OPEN), (MAIN, LOAD, OPEN), (MAIN, LOAD)]})
    table = run_flames(run).lines
    assert table.head[0] == "line"
    places = {row[:3]: row for row in table.rows}
    row = places["/home/me/data.py:12", "load_image", "forward"]
    assert row[3] == "100 µs"
    assert row[5] == "PIL.Image.open"


def test_run_without_stacks_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of(STEPS, span_ns=SPAN_NS, gap_ns=GAP_NS))
    assert "no stacks were sampled" in run_flames(Analyzer(run.root)).missing


def test_python_draws_and_writes_it(tmp_path: Path) -> None:
    found = record(tmp_path / "run", {0: [(MAIN, LOAD)]}).flame_graph()
    assert "samples in" in repr(found)
    page = found.write(tmp_path / "lines.html").read_text(encoding="utf-8")
    assert "load_image" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert found._repr_html_().startswith('<iframe title="Flame graph"')
