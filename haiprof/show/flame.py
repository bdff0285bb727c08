"""The flame graph of a run: which ranks it shows, and its lines of user code as a table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from haiprof.base.ledger import POSITIONS, position_words
from haiprof.base.units import duration_text
from haiprof.diagnosis.compare.compared_run import baseline_named, open_compared_run
from haiprof.diagnosis.opportunities import lacks_line
from haiprof.diagnosis.run_ledger import RunLedger, plain_ledger
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples
from haiprof.run_analysis.flame_graph import FlameGraph, FlameSeries, FlameSource, flame_graph
from haiprof.run_analysis.ledger import waiting_stacks
from haiprof.run_analysis.lines import line_frame
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.frame_table import PageTable
from haiprof.show.run_header import manifest_or_none
from haiprof.show.summary import select_judged_steps
from haiprof.show.text import PHASE_TITLES, count_text, printable, share_text

_LINE_LIMIT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlames:
    """The flame graph of a run, and of another beside it."""

    run: str
    graph: FlameGraph
    lines: PageTable  # The run's own lines by their time
    missing: str  # Why there is none; empty where there is
    notes: tuple[str, ...]  # What was damaged or left out

    @property
    def basis(self) -> str:
        """What the graph rests on: `412 samples in 300 steps of 2 ranks`."""
        own = [one for one in self.graph.series if not one.run]
        samples = count_text(own[0].sample_count, "sample")
        steps, ranks = count_text(own[0].step_count, "step"), count_text(len(own) - 1, "rank")
        return f"{samples} in {steps} of {ranks}, after warm-up and without traced steps"


def run_flames(
    analyzer: RunFrames, other: RunFrames | None = None, ledger: RunLedger | None = None
) -> RunFlames:
    """The stacks that were sampled in the steps that count: warm and not traced."""
    known, name = ledger or plain_ledger(analyzer), analyzer.run.root.name
    if known is None:
        graph = FlameGraph(frames=(), parents=(), places=(), series=())
        return RunFlames(run=name, graph=graph, lines=line_table(graph), notes=(),
                         missing="no training step was recorded")  # fmt: skip
    found = _flame_source(analyzer, known)
    if ledger is not None:
        accounts = zip(known.rows, known.ledger.accounts, strict=True)
        found = replace(found, accounts=[(rows, each.ns_per_step) for rows, each in accounts])
    sources, notes = [found], list(found.samples.notes)
    if len(chosen := np.unique(found.table.rank)) < len(known.time.ranks):
        notes.append(f"{len(chosen)} of {len(known.time.ranks)} ranks are looked at")
    if other is not None:
        theirs = plain_ledger(other)
        beside = theirs and _flame_source(other, theirs, run=other.run.root.name)
        sources += [beside] if beside and len(beside.samples.stack) else []
        notes += [] if len(sources) > 1 else [f"{other.run.root.name}: no stacks were sampled"]
    graph, missing = flame_graph(sources), ""
    if not len(found.samples.stack):
        missing = "no stacks were sampled (`--recorder` left them out, or the run was too short)"
    elif not (found.table.sample >= 0).any():
        missing = "no sample fell into the steps that count"
    own = graph if len(sources) == 1 else flame_graph(sources[:1])
    return RunFlames(run=name, graph=graph, lines=line_table(own), missing=missing,
                     notes=tuple(map(printable, notes)))  # fmt: skip


def other_run(analyzer: RunFrames, baseline: str) -> RunFrames:
    """The run that another is compared with: a directory, or `last-good`."""
    return baseline_named(baseline, open_compared_run(analyzer)).side.analyzer


def _flame_source(analyzer: RunFrames, found: RunLedger, *, run: str = "") -> FlameSource:
    manifest = manifest_or_none(analyzer.run)
    return FlameSource(
        run=run, folder=manifest.cwd if manifest else "", samples=found.samples, table=found.table,
        steps=select_judged_steps(pl.concat(analyzer.steps_by_rank().values())),
        lineless=lacks_line(found.table),
    )  # fmt: skip


LINE_PARTS = (*POSITIONS, *(name for name in CODE_PHASES if name not in POSITIONS))
"""What lines can be asked about: positions, and phases where the ledger has none."""

_WITHOUT_LINE = (
    "without a line, so not in these tables: the model's own time without a CPU core, collections, "
    "and waits for peers, links, loaders and the interpreter (haiprof verdict --all)"
)


def sampled_lines(
    analyzer: RunFrames, rank: int | None, part: str | None
) -> tuple[CodeSamples, pl.DataFrame, tuple[str, ...]]:
    """Samples, their lines (`line_frame`) and notes; of one rank or of one of LINE_PARTS alone."""
    found = plain_ledger(analyzer, () if rank is None else (rank,))
    known = found is not None and (rank is None or rank in found.time.ranks)
    if found is None or not known:
        samples = analyzer.code_samples(None if rank is None else {rank})
        position = np.full(len(samples.stack), -1)
        of_step = np.zeros(len(samples.stack))
        left_out, unplaced = 0, False
    else:
        samples, (position, of_step) = found.samples, found.of_samples()
        unplaced = bool(lacks_line(found.table).any())
        left_out = len(found.time.ranks) - len(np.unique(found.table.rank))
    chosen = np.ones(len(samples.stack), bool) if rank is None else samples.rank == rank
    if part in POSITIONS:
        chosen &= position == POSITIONS.index(part)
    elif part is not None:
        chosen &= samples.phase == CODE_PHASES.index(part)
    others = chosen & (samples.phase == CODE_PHASES.index("other_threads"))
    waiting = others & waiting_stacks(samples.tree)[samples.stack]
    chosen &= ~waiting
    samples = samples.take(chosen)
    notes = [*samples.notes, *([_WITHOUT_LINE] if unplaced else [])]
    if waiting.any():
        notes.append(
            f"other Python threads: {waiting.sum()} of {others.sum()} looks found them where they "
            "wait, which is no line that uses a core"
        )
    if left_out and rank is None:
        notes.append(f"{count_text(left_out, 'rank')} left out: --rank RANK shows one of them")
    return samples, line_frame(samples, (position[chosen], of_step[chosen])), tuple(notes)


def line_table(graph: FlameGraph) -> PageTable:
    """Lines of user code by their time per step: their own and that of libraries they call."""
    if not graph.series:
        return PageTable("", (), ())
    mean = graph.series[0]
    step_ns = sum(ns for node, ns in mean.self_ns.items() if _top(graph, node) in POSITIONS)
    calls = _line_times(graph, mean)
    times = {key: sum(inner.values()) for key, inner in calls.items()}
    order = sorted(times, key=lambda key: (-times[key], key))
    rows = [
        (
            printable(frame.place), printable(frame.name),
            PHASE_TITLES.get(top, position_words(top)), duration_text(times[key]),
            share_text(times[key], step_ns) if top in POSITIONS else "",
            printable(_most(calls[key])),
        )
        for key in order[:_LINE_LIMIT]
        for top, frame in [(key[0], graph.frames[key[1]])]
    ]  # fmt: skip
    several = sum(one.run == mean.run for one in graph.series) > 2  # one of them is their mean
    amount = ("mean of ranks", "of it") if several else ("per step", "of the step")
    head = ("line", "function", "position", *amount, "mostly in")
    return PageTable(
        "", head, rows, left=("line", "function", "position", "mostly in"),
        more=max(0, len(order) - _LINE_LIMIT),
    )  # fmt: skip


def _line_times(graph: FlameGraph, series: FlameSeries) -> dict[tuple[str, int], dict[str, float]]:
    """By (position, frame): ns per step, by the function that it calls; by itself: no name."""
    calls: dict[tuple[str, int], dict[str, float]] = {}
    for node, ns in series.self_ns.items():
        called, at = "", node
        while (frame := graph.frames[graph.places[at]]).kind == "library":
            called, at = f"{frame.place}.{frame.name}", graph.parents[at]
        if frame.kind == "user":
            inner = calls.setdefault((_top(graph, at), graph.places[at]), {})
            inner[called] = inner.get(called, 0.0) + ns
    return calls


def _most(calls: dict[str, float]) -> str:
    """The library function with most of the time, where it has half of it."""
    name = max(calls, key=lambda called: (calls[called], called))
    return name if calls[name] >= sum(calls.values()) / 2 else ""


def _top(graph: FlameGraph, node: int) -> str:
    while graph.parents[node] >= 0:
        node = graph.parents[node]
    return graph.frames[graph.places[node]].name
