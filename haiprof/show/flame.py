"""The flame graph of a run: which ranks it shows, and its lines of user code as a table."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.units import duration_text
from haiprof.diagnosis.compare.baseline import baseline_named
from haiprof.diagnosis.compare.compared_run import compared_run_of
from haiprof.run_analysis.flame_graph import (
    IN_STEP,
    FlameGraph,
    FlameSeries,
    FlameSource,
    flame_graph,
)
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import last_attempts
from haiprof.show.frame_table import PageTable, text_table
from haiprof.show.summary import select_judged_steps
from haiprof.show.text import count_text, printable, share_text

RANK_LIMIT = 16
"""Of more ranks, the slowest and some of the others are shown: their code is the same."""
_SLOWEST = 4
_LINE_LIMIT = 40
PHASE_TITLES = {
    "other": "outside the model",
    "worker": "DataLoader workers, loading",
    "worker_waiting": "DataLoader workers, waiting",
    "other_threads": "other Python threads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlames:
    """The flame graph of a run, and of another beside it."""

    run: str
    """Its name."""
    graph: FlameGraph
    lines: PageTable
    """The run's own lines by their time."""
    missing: str
    """Why there is none; empty where there is."""
    notes: tuple[str, ...]
    """What was damaged or left out."""

    @property
    def basis(self) -> str:
        """What the graph rests on: `412 samples in 300 steps of 2 ranks`."""
        own = [one for one in self.graph.series if not one.run]
        samples = count_text(own[0].sample_count, "sample")
        steps, ranks = count_text(own[0].step_count, "step"), count_text(len(own) - 1, "rank")
        return f"{samples} in {steps} of {ranks}, after warm-up and without traced steps"


def run_flames(analyzer: RunFrames, other: RunFrames | None = None) -> RunFlames:
    """The stacks that were sampled in the steps that count: warm and not traced."""
    found, left_out = flame_source(analyzer)
    sources, notes = [found], [*found.samples.notes, *left_out]
    if other is not None:
        beside, _ = flame_source(other, run=other.run.root.name)
        sources += [beside] if len(beside.samples.stack) else []
        notes += [] if len(beside.samples.stack) else [f"{beside.run}: no stacks were sampled"]
    graph = flame_graph(sources)
    own = graph if len(sources) == 1 else flame_graph(sources[:1])
    missing = "" if any(not one.run for one in graph.series) else _why_none(found)
    return RunFlames(
        run=analyzer.run.root.name, graph=graph, lines=line_table(own), missing=missing,
        notes=tuple(map(printable, notes)),
    )  # fmt: skip


def other_run(analyzer: RunFrames, baseline: str) -> RunFrames:
    """The run that another is compared with: a directory, or `last-good`."""
    return baseline_named(baseline, compared_run_of(analyzer)).side.analyzer


def flame_source(analyzer: RunFrames, *, run: str = "") -> tuple[FlameSource, list[str]]:
    """The samples of a run in its steps that count, and what was left out of it."""
    steps = select_judged_steps(last_attempts(analyzer.steps()))
    chosen, count = _chosen_ranks(steps)
    try:
        folder = analyzer.manifest().cwd
    except RunFormatError:
        folder = ""
    samples = analyzer.code_samples(chosen)
    left_out = [] if len(chosen) == count else [f"{len(chosen)} of {count} ranks are looked at"]
    return FlameSource(run=run, folder=folder, samples=samples, steps=steps), left_out


def _chosen_ranks(steps: pl.DataFrame) -> tuple[set[int], int]:
    """The slowest ranks and, spread over all, some of the others; and how many there are."""
    medians = steps.group_by("rank").agg(pl.col("step_ns").median()).sort("rank")
    ranks = medians["rank"].to_list()
    if len(ranks) <= RANK_LIMIT:
        return set(ranks), len(ranks)
    slowest = medians.sort("step_ns", "rank", descending=[True, False])["rank"].head(_SLOWEST)
    others = RANK_LIMIT - _SLOWEST
    spread = [ranks[len(ranks) * place // others] for place in range(others)]
    return {*slowest.to_list(), *spread}, len(ranks)


def _why_none(found: FlameSource) -> str:
    if found.steps.is_empty():
        return "no training step was recorded"
    if not len(found.samples.stack):
        return "no stacks were sampled (`--recorder` left them out, or the run was too short)"
    return "no sample fell into the steps that count"


def line_table(graph: FlameGraph, *, limit: int = _LINE_LIMIT) -> PageTable:
    """Lines of user code by their time per step: their own and that of libraries they call."""
    if not graph.series:
        return text_table("", (), ())
    mean = graph.series[0]
    step_ns = sum(ns for node, ns in mean.self_ns.items() if _phase(graph, node) in IN_STEP)
    times, calls = _line_times(graph, mean)
    order = sorted(times, key=lambda key: (-times[key], key))
    rows = [
        (
            printable(frame.place), printable(frame.name), PHASE_TITLES.get(phase, phase),
            duration_text(times[key]),
            share_text(times[key], step_ns) if phase in IN_STEP else "",
            printable(_most(calls[key])),
        )
        for key in order[:limit]
        for phase, frame in [(key[0], graph.frames[key[1]])]
    ]  # fmt: skip
    head = ("line", "function", "phase", "per step", "of the step", "mostly in")
    return text_table(
        "", head, rows, left=("line", "function", "phase", "mostly in"),
        more=max(0, len(order) - limit),
    )  # fmt: skip


def _line_times(
    graph: FlameGraph, series: FlameSeries
) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], dict[str, float]]]:
    """By (phase, frame): ns per step; and of it, the time in each function that it calls."""
    times: dict[tuple[str, int], float] = {}
    calls: dict[tuple[str, int], dict[str, float]] = {}
    for node, ns in series.self_ns.items():
        called, at = "", node
        while graph.frames[graph.nodes[at].frame].kind == "library":
            frame = graph.frames[graph.nodes[at].frame]
            called, at = f"{frame.place}.{frame.name}", graph.nodes[at].parent
        if graph.frames[graph.nodes[at].frame].kind != "user":
            continue
        key = (_phase(graph, at), graph.nodes[at].frame)
        times[key] = times.get(key, 0.0) + ns
        inner = calls.setdefault(key, {})
        inner[called] = inner.get(called, 0.0) + ns
    return times, calls


def _most(calls: dict[str, float]) -> str:
    """The library function with most of the time, where it has half of it."""
    name = max(calls, key=lambda called: (calls[called], called))
    return name if calls[name] >= sum(calls.values()) / 2 else ""


def _phase(graph: FlameGraph, node: int) -> str:
    while graph.nodes[node].parent >= 0:
        node = graph.nodes[node].parent
    return graph.frames[graph.nodes[node].frame].name
