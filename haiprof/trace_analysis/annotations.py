"""Annotation breakdown: named ranges on the CPU and on GPUs, and the kernels in them."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.classify import with_kind
from haiprof.trace_analysis.kernels import DURATION_STATISTICS
from haiprof.trace_analysis.temporal import Steps, gpu_events, step_window
from haiprof.trace_format.kineto.rank_trace import Trace

GPU_CATEGORY = "gpu_user_annotation"
_RANGE = ["category", "device", "name"]


def annotation_breakdown(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """Count and time of each named range: `record_function`, optimizer, loader, collectives.

    Source: HTA get_gpu_user_annotation_breakdown, of both categories at once; its statistics
    are wrong where a limit takes effect (D2), and it rounds ns to us (D1).
    """
    ranges = _annotations(trace, steps).sort(*_RANGE, "ts_ns")
    end = pl.col("ts_ns") + pl.col("dur_ns")
    before = end.cum_max().shift(1).over(_RANGE)
    added = (end - pl.max_horizontal("ts_ns", before)).clip(0)
    found = ranges.with_columns(added_ns=added).group_by(_RANGE)
    return (
        found.agg(**DURATION_STATISTICS, covered_ns=pl.col("added_ns").sum())
        .with_columns(pl.col("category", "name").cast(pl.String))
        .sort("category", "device", -pl.col("sum_ns"), "name")
    )


def annotation_kernels(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """The GPU events of each annotation: which kernels a named piece of code ran.

    Source: HTA get_gpu_kernels_with_user_annotations, which takes any overlap for
    containment, and of several ranges the one that it meets last.
    """
    gpu = with_annotation(with_kind(gpu_events(trace, steps)), trace.annotations)
    found = gpu.group_by("device", "annotation", "kind", "name").agg(**DURATION_STATISTICS)
    return found.with_columns(pl.col("annotation", "name").cast(pl.String)).sort(
        "device", -pl.col("sum_ns"), "annotation", "name"
    )


def with_annotation(gpu: pl.DataFrame, annotations: pl.DataFrame) -> pl.DataFrame:
    """GPU events with the innermost annotation around each.

    The same rows, by device and stream, with `annotation`; null outside of all.
    """
    on_gpu = annotations.filter(pl.col("category") == GPU_CATEGORY)
    ranges = on_gpu.with_columns(device="pid", stream="tid")
    by_stream = ranges.partition_by("device", "stream", as_dict=True, maintain_order=True)
    empty = ranges.clear()
    parts = [
        events.with_columns(annotation=_enclosing(events, by_stream.get(key, empty)))
        for key, events in gpu.group_by("device", "stream", maintain_order=True)
    ]
    nothing = gpu.clear().with_columns(annotation=empty["name"])
    return pl.concat([nothing, *parts])


def _enclosing(events: pl.DataFrame, ranges: pl.DataFrame) -> pl.Series:
    starts = ranges["ts_ns"].to_numpy()
    ends = starts + ranges["dur_ns"].to_numpy()
    place = innermost(starts, ends, events["ts_ns"].to_numpy())
    return ranges["name"].gather(pl.Series(place).replace(-1, None)).alias("annotation")


def innermost(starts: Ints, ends: Ints, times: Ints) -> Ints:
    """The innermost range around each time: the one that began last."""
    place: Ints = np.searchsorted(starts, times, side="right") - 1
    outer = _longer_before(ends)
    while True:
        missed = (place >= 0) & (ends[place] <= times if len(ends) else False)
        if not missed.any():
            return place
        place[missed] = outer[place[missed]]


def _longer_before(ends: Ints) -> Ints:
    """For each range the last earlier one that ends later; -1 without any."""
    found: Ints = np.arange(len(ends), dtype=np.int64) - 1
    while True:
        early = (found >= 0) & (ends[found] <= ends)
        if not early.any():
            return found
        found[early] = found[found[early]]


def _annotations(trace: Trace, steps: Steps) -> pl.DataFrame:
    """Annotations with their device, those of some steps only."""
    on_gpu = pl.col("category") == GPU_CATEGORY
    ranges = pl.concat([trace.annotations, trace.phase_ranges])
    every = ranges.with_columns(device=pl.when(on_gpu).then("pid"))
    if steps is None:
        return every
    start_ns, end_ns = step_window(trace, steps)
    origins = every.filter(~on_gpu, pl.col("external_id") > 0).group_by("external_id", "name")
    known = every.join(
        origins.agg(origin_ns=pl.col("ts_ns").min()), on=["external_id", "name"], how="left"
    )
    when = pl.when(on_gpu).then(pl.coalesce("origin_ns", "ts_ns")).otherwise("ts_ns")
    return known.filter(when.is_between(start_ns, end_ns, closed="left"))
