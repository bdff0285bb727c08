"""What backward does as the forward's lines have it, from a window with lines of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats, Ints
from haiprof.diagnosis.job_time import JobTime
from haiprof.diagnosis.opportunities import Opportunity, code_place, opportunity
from haiprof.diagnosis.thresholds import MANY_OPERATORS, OPERATOR_CALL_NS
from haiprof.run_analysis.code_samples import CodeTree
from haiprof.run_analysis.ledger import NATIVE, OPERATORS, PYTHON, TimeTable
from haiprof.run_analysis.lines import innermost_stack, written_in
from haiprof.run_analysis.nesting import Bools
from haiprof.run_analysis.run_files import Frame
from haiprof.run_analysis.step_positions import BACKWARD, FORWARD, LOSS

SMALL_OPERATORS = "many_small_operators"
_ENGINE = "/torch/autograd/"
_LEAST_SHARE = 0.002
"""Lines with less of backward stay with the line that called it."""


def give_lines(
    table: TimeTable, needed: Bools, lines: pl.DataFrame, time: JobTime
) -> tuple[TimeTable, Bools]:
    """The same table in which what autograd's engine does has the lines of its forward.

    `lines` are of a window, by rank (`trace_analysis.operator_lines`); `needed` is the model's own
    work, per row.
    """
    rows = np.flatnonzero(needed & (table.position == BACKWARD) & _in_engine(table))
    if not len(rows):
        return table, needed
    left = 1.0
    for (file, line, function), share in _shares(lines, time.mean_of(table, rows)):
        tree, stack = _stack_of(table, Frame(file, line, function))
        if stack:
            table, new = replace(table, tree=tree).split(rows, share / left)
            left -= share
            at = table.stack.copy()
            at[new] = stack
            packages = [*table.packages, *["job"] * (len(tree.frames) - len(table.packages))]
            table = replace(table, stack=at, packages=packages)
            needed = np.append(needed, np.ones(len(new), dtype=np.bool_))
    return table, needed


def small_operators(
    table: TimeTable, needed: Bools, found: Sequence[Opportunity], lines: pl.DataFrame
) -> tuple[TimeTable, Bools, list[Opportunity]]:
    """Lines that call many operators, each too short for its own work: one opportunity a function.

    What can be gained is what the calls take; the numbers that they compute are still needed.
    """
    listed, needed = list(found), needed.copy()
    pooled = lines.drop_nulls("file").group_by("file", "line", "function")
    counted = pooled.agg(
        count=(pl.col("operator_count") / pl.col("step_count")).mean(),
        ns=pl.col("operator_ns").mean(),
    ).filter(pl.col("count") >= MANY_OPERATORS, pl.col("ns") > 0)
    places = {
        (file, line): (function, min(OPERATOR_CALL_NS / ns, 1.0))
        for file, line, function, _, ns in counted.rows()
    }
    tree = table.tree
    inner = innermost_stack(tree)[table.stack]
    by_function: dict[tuple[str, str], list[Ints]] = {}
    for row_stack in np.unique(inner[inner > 0]).tolist():
        frame = tree.frames[tree.place[row_stack]]
        if (frame.file, frame.line) not in places:
            continue
        function, share = places[frame.file, frame.line]
        rows = inner == row_stack
        rows &= np.isin(table.position[: len(inner)], (FORWARD, LOSS, BACKWARD))
        rows &= np.isin(table.work[: len(inner)], (OPERATORS, PYTHON, NATIVE))
        whole = np.flatnonzero(rows)
        if not len(whole):  # sampled in an evaluation alone
            continue
        if share < 1.0:
            table, new = table.split(whole, 1.0 - share)
            needed = np.append(needed, np.ones(len(new), dtype=np.bool_))
        by_function.setdefault((frame.file, written_in(function)), []).append(whole)
    for parts in by_function.values():
        taken = np.concatenate(parts)
        needed[taken] = False
        listed = [replace(o, rows=np.setdiff1d(o.rows, taken)) for o in listed]
        stack = inner[taken]
        most = int(np.bincount(stack, table.ns[taken]).argmax())
        more = opportunity(table, taken, code_place(tree, most))
        listed.append(replace(more, key=SMALL_OPERATORS))
    return table, needed, [each for each in listed if len(each.rows)]


def _in_engine(table: TimeTable) -> Bools:
    """Per row: whether autograd's engine runs in it, and no code of the job below that."""
    tree = table.tree
    engine = np.array([*(_ENGINE in frame.file for frame in tree.frames), False])
    of_row: Bools = tree.calls_libraries(engine & np.append(tree.library, False))[table.stack]
    return of_row


def _shares(lines: pl.DataFrame, plain_ns: float) -> list[tuple[tuple[str, int, str], float]]:
    """Of backward, what each line's operators made; largest first.

    Recording an operator takes time, too, so that small ones seem larger than they are: as much as
    backward was longer in the window, and no more than the engine's time around a node allows.
    """
    per_step = lines.with_columns(pl.col("backward_ns", "event_count") / pl.col("step_count"))
    ranks = max(per_step["rank"].n_unique(), 1)
    traced = float(per_step["backward_ns"].sum()) / ranks
    events = max(float(per_step["event_count"].sum()) / ranks, 1.0)
    most = float(per_step["rest_ns"].mean() or 0.0) / 2  # type: ignore[arg-type]
    cost = min(max((traced - plain_ns) / events, 0.0), most)
    net = per_step.with_columns(ns=(pl.col("backward_ns") - cost * pl.col("event_count")).clip(0))
    whole = float(net["ns"].sum())
    if not whole:
        return []
    found = (
        net.drop_nulls("file")
        .group_by("file", "line", "function")
        .agg(share=pl.col("ns").sum() / whole)
        .filter(pl.col("share") >= _LEAST_SHARE)
        .sort("share", "file", "line", descending=[True, False, False])
    )
    return [((file, line, function), share) for file, line, function, share in found.rows()]


def _stack_of(table: TimeTable, line: Frame) -> tuple[CodeTree, int]:
    """The stack in which that line was sampled most in forward; a new one where it was not.

    0 where not even its function was sampled.
    """
    tree = table.tree
    inner = innermost_stack(tree)[table.stack]
    frames = [tree.frames[place] for place in tree.place[inner].tolist()]
    ahead = np.isin(table.position, (FORWARD, LOSS)) & (inner > 0)

    def most(of: Floats) -> int:
        weight = np.where(ahead, of * table.ns, 0.0)
        return int(np.bincount(inner, weight).argmax()) if weight.any() else 0

    same = most(np.array([(f.file, f.line) == (line.file, line.line) for f in frames], float))
    if same:
        return tree, same
    function = written_in(line.function)
    near = most(np.array([
        f.file == line.file and written_in(f.function) == function for f in frames
    ], float))  # fmt: skip
    if not near:
        return tree, 0
    grown = replace(
        tree,
        frames=[*tree.frames, line],
        library=np.append(tree.library, False),
        parent=np.append(tree.parent, tree.parent[near]),
        place=np.append(tree.place, len(tree.frames)),
    )
    return grown, len(tree.place)
