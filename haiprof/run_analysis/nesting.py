"""Containment of spans: who holds whom, and the time that is a span's own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Bools, Intervals, Ints
from haiprof.run_format import schema

Codes = npt.NDArray[np.int8]

KIND_COUNT = 1 << schema.TAG_BITS
MODULE_KINDS = (schema.FORWARD, schema.FORWARD_EVAL, schema.EVAL, schema.NOGRAD)
LOADER_KINDS = (schema.DATA, schema.DATA_END, schema.DATA_ITER)
MAX_DEPTH = 16  # closures nest four deep; more is damage, and a pass per level would be slow
_CLEAN_PASSES = 3
T = TypeVar("T")


def take_rows(table: T, rows: Ints | Bools | slice) -> T:
    """The chosen rows of a record whose arrays are columns; rows are on their last axis."""
    record: Any = table
    chosen = {}
    for name in (field.name for field in fields(record)):
        if isinstance(own := getattr(record, name), np.ndarray):
            chosen[name] = own[rows] if own.ndim == 1 else own[..., rows]  # `...` is slow
    found: T = replace(record, **chosen)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans of one thread as columns, in any order."""

    kind: Codes
    tag: Codes
    start_ns: Ints
    end_ns: Ints

    @property
    def times(self) -> Intervals:
        """From start to end of each."""
        return Intervals(self.start_ns, self.end_ns)

    def take(self, rows: Ints | Bools) -> Spans:
        """The chosen rows."""
        return take_rows(self, rows)


def unpack(start: np.ndarray, end: np.ndarray) -> Spans:
    """Spans from the two packed words of their records."""
    return Spans(
        kind=(start & schema.TAG_MASK).astype(np.int8), tag=(end & schema.TAG_MASK).astype(np.int8),
        start_ns=start >> schema.TAG_BITS, end_ns=end >> schema.TAG_BITS,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """Spans by start time; what belongs to an outer span's own work is left out."""

    spans: Spans
    parent: Ints  # row of the span directly around, -1 at the top
    top: Ints  # row of the outermost span around, its own at the top
    self_ns: Ints  # duration without the spans directly inside
    overlapping_count: int  # spans left out as they cross another's edge: one thread cannot do that


def kind_table(*kinds: int) -> Bools:
    """Membership of each kind in a set, to be indexed with a column of kinds."""
    table = np.zeros(KIND_COUNT, dtype=np.bool_)
    table[list(kinds)] = True
    return table


_SWALLOWS = np.zeros((KIND_COUNT, KIND_COUNT), dtype=np.bool_)
"""[outer, inner]: whether the inner span is part of the outer one's own work."""
# Ahead-of-time tracing of a compiled backward, forces by autograd; recomputed checkpoints.
_SWALLOWS[np.ix_([schema.BACKWARD, *MODULE_KINDS], [schema.BACKWARD, *MODULE_KINDS])] = True
_SWALLOWS[list(LOADER_KINDS), :] = True  # a dataset that runs a model, a loader around a loader
MODULES, LOADER = kind_table(*MODULE_KINDS), kind_table(*LOADER_KINDS)
FETCH = kind_table(schema.DATA, schema.DATA_ITER)
CLOSING = kind_table(schema.OPTIMIZER, schema.SCALER)
_EVENTS = kind_table(schema.GC, schema.SAVE)


def nest(spans: Spans) -> Nested:
    """Sorts spans and resolves who is inside whom; collector pauses and saves take no part."""
    line = spans.take(~_EVENTS[spans.kind])
    line = line.take(_by_start(line.start_ns, line.end_ns))
    total = len(line.kind)
    line, depth, parent = _without_overlaps(line)
    overlapping = total - len(line.kind)
    opened = _without_train_steps(line, parent)
    if opened is not line:
        line, depth, parent = _without_overlaps(opened)
    top, swallowed = _inherit(line.kind, depth, parent)
    if swallowed.any():
        keep = ~swallowed
        row = np.cumsum(keep) - 1
        line, top, parent = line.take(keep), row[top[keep]], parent[keep]
        parent = np.where(parent < 0, -1, row[parent])
    own = line.end_ns - line.start_ns
    inner = np.flatnonzero(parent >= 0)
    np.subtract.at(own, parent[inner], own[inner])
    return Nested(spans=line, parent=parent, top=top, self_ns=own, overlapping_count=overlapping)


def _by_start(start: Ints, end: Ints) -> Ints:
    """Order by start, the longer one first; files come in order of end, which is nearly that."""
    count = len(start)
    if (start[1:] > start[:-1]).all():
        return np.arange(count)
    if (end[1:] >= end[:-1]).all():  # reversed, so that equal starts come longest first
        order: Ints = count - 1 - np.argsort(start[::-1], kind="stable")
        return order
    return np.lexsort((-end, start))


def _without_overlaps(line: Spans) -> tuple[Spans, Ints, Ints]:
    """Spans that nest properly, with their depth and parent."""
    for _ in range(_CLEAN_PASSES):
        end = _open_end(line)
        depth = _depth(line.start_ns, end)
        bad = depth > MAX_DEPTH
        parent = _parents(np.where(bad, MAX_DEPTH + 1, depth))
        bad |= (parent >= 0) & (end > end[parent])
        if not bad.any():
            return line, depth, parent
        line = line.take(~bad)
    reached = np.maximum.accumulate(_open_end(line))
    apart = np.ones(len(reached), dtype=np.bool_)
    apart[1:] = line.start_ns[1:] >= reached[:-1]
    line = line.take(apart)
    flat = np.zeros(len(line.kind), dtype=np.int64)
    return line, flat, flat - 1


def _without_train_steps(line: Spans, parent: Ints) -> Spans:
    """Modules whose call is a whole training step: as forward, they end where backward begins."""
    # Such a call holds an optimizer step (Lightning's manual optimization under DDP, a train-step
    # module); what follows its first inner span is no forward pass.
    holds = np.zeros(len(line.kind), dtype=np.bool_)
    outer = parent[CLOSING[line.kind]]
    while len(outer := outer[outer >= 0]):
        holds[outer] = True
        outer = parent[outer]
    found = np.flatnonzero(holds & MODULES[line.kind])
    if not len(found):
        return line
    end = line.end_ns.copy()
    end[found] = line.start_ns[found + 1]  # sorted by start: the first inner span comes next
    return replace(line, end_ns=end)


def _open_end(line: Spans) -> Ints:
    """End of each span, at least 1 ns after its start so that empty spans nest too."""
    ends: Ints = np.maximum(line.end_ns, line.start_ns + 1)
    return ends


def _depth(start: Ints, end: Ints) -> Ints:
    """Spans that began before each span and have not ended at its start."""
    if (start[1:] >= end[:-1]).all():
        return np.zeros(len(start), dtype=np.int64)
    return np.arange(len(start)) - np.searchsorted(np.sort(end), start, side="right")


def _parents(depth: Ints) -> Ints:
    """Row of the last span one level higher, -1 at the top."""
    parent = np.full(len(depth), -1, dtype=np.int64)
    for level in range(1, min(int(depth.max(initial=0)), MAX_DEPTH) + 1):
        inner = np.flatnonzero(depth == level)
        outer = np.flatnonzero(depth == level - 1)
        parent[inner] = outer[np.searchsorted(outer, inner) - 1]
    return parent


def _inherit(kind: Codes, depth: Ints, parent: Ints) -> tuple[Ints, Bools]:
    """Outermost span around each, and whether it belongs to the work of a span around it."""
    top = np.arange(len(kind))
    swallowed = np.zeros(len(kind), dtype=np.bool_)
    for level in range(1, int(depth.max(initial=0)) + 1):
        inner = np.flatnonzero(depth == level)
        outer = parent[inner]
        top[inner] = top[outer]
        swallowed[inner] = swallowed[outer] | _SWALLOWS[kind[outer], kind[inner]]
    return top, swallowed
