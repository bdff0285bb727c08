"""Applies a change to one rank's work: shorter kernels, operators, waits for the loader."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import Intervals, covered_lengths, union
from haiprof.trace_analysis.what_if.changes import KERNEL, LAUNCHES, LOADER, OPERATOR, Change
from haiprof.trace_format.kineto.rank_trace import Trace

WORKERS, HOST = "workers", "host"
"""Labels of the work of a loader's workers and of the CPU's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What runs along each edge of a rank's graph; arrays of shape (edges,)."""

    label: Ints
    """Place in `labels`; -1 of waiting and of collectives."""
    labels: tuple[str, ...]
    """Names of kernels, then the loader's workers, and last the CPU's."""
    begin_ns: Ints
    """When the CPU began it; of a kernel, launched it."""
    end_ns: Ints
    """When the CPU ended it; of a kernel, its launch."""
    tid: Ints
    """Thread that worked, or launched the kernel; -1 where none is known."""

    @property
    def by_workers(self) -> npt.NDArray[np.bool_]:
        """Whether a loader's workers make a batch along the edge."""
        found: npt.NDArray[np.bool_] = self.label == len(self.labels) - 2
        return found

    @property
    def on_host(self) -> npt.NDArray[np.bool_]:
        """Whether the CPU works along the edge."""
        found: npt.NDArray[np.bool_] = self.label == len(self.labels) - 1
        return found


def change_lengths(trace: Trace, change: Change, lengths: Ints, work: Work) -> Ints:
    """Lengths of all edges with a change; those that concern several ranks change nothing here."""
    for part in change.parts:
        lengths = change_lengths(trace, part, lengths, work)
    if change.kind == KERNEL:
        names = [bool(re.search(change.name, name)) for name in work.labels[:-2]]
        these = np.append(np.array(names, dtype=bool), [False] * 3)[work.label]
        return np.where(these, _divide(lengths, change.speedup), lengths)
    if change.kind == LOADER and work.by_workers.any():
        return np.where(work.by_workers, _divide(lengths, change.speedup), lengths)
    if change.kind in (OPERATOR, LOADER):
        return _inside(_operators(trace, change.name), change, lengths, work)
    if change.kind == LAUNCHES:
        return _inside(_launching_calls(trace), change, lengths, work)
    return lengths


def _inside(by_thread: dict[int, Intervals], change: Change, lengths: Ints, work: Work) -> Ints:
    """Lengths with the CPU's time inside of spans shorter; of operators also what they launch."""
    found = lengths.copy()
    for tid, spans in by_thread.items():
        here = work.tid == tid
        on_host, on_gpu = here & work.on_host, here & ~work.on_host & (work.label >= 0)
        part = covered_lengths(spans, work.begin_ns[on_host], work.end_ns[on_host])
        found[on_host] -= part - _divide(part, change.speedup)
        if change.kind == OPERATOR:
            launched = covered_lengths(spans, work.begin_ns[on_gpu], work.begin_ns[on_gpu] + 1) > 0
            faster = _divide(lengths[on_gpu], change.speedup)
            found[on_gpu] = np.where(launched, faster, lengths[on_gpu])
    return found


def _operators(trace: Trace, name: str) -> dict[int, Intervals]:
    """When operators or annotations of a name run, by thread."""
    marks = trace.annotations.filter(pl.col("category").cast(pl.String) != "gpu_user_annotation")
    columns = (pl.col("name").cast(pl.String), "tid", "ts_ns", "dur_ns")
    spans = pl.concat([trace.ops.select(*columns), marks.select(*columns)])
    names = [text for text in spans["name"].unique() if re.search(name, text)]
    return _by_thread(spans.filter(pl.col("name").is_in(names)))


def _launching_calls(trace: Trace) -> dict[int, Intervals]:
    """When calls run that put something on a GPU, by thread; one that waits for it is not work."""
    return _by_thread(trace.runtime.join(trace.gpu, on="correlation", how="semi"))


def _by_thread(spans: pl.DataFrame) -> dict[int, Intervals]:
    found = {}
    for (tid,), rows in spans.drop_nulls("tid").group_by("tid"):
        begins = rows["ts_ns"].to_numpy()
        found[int(str(tid))] = union(begins, begins + rows["dur_ns"].to_numpy())
    return found


def _divide(lengths: Ints, speedup: float) -> Ints:
    shorter: Ints = np.rint(lengths / speedup).astype(np.int64)
    return shorter
