"""The segments of a critical path as rows: event, duration, and what bounds it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import union
from haiprof.trace_analysis.call_tree import innermost
from haiprof.trace_analysis.classify import COMMUNICATION, COMPUTATION, MEMORY
from haiprof.trace_analysis.critical.device import LAUNCH, STREAM
from haiprof.trace_analysis.critical.walk import (
    DELAY,
    HAND_OVER,
    ON_GPU,
    ON_HOST,
    RETURN,
    Graph,
    Stretches,
)
from haiprof.trace_analysis.dependencies.device_events import USUAL_DELAY_NS
from haiprof.trace_format.blocking_calls import DEVICE_SYNC, STREAM_SYNC

CPU, DATA, COMPUTE, TALK, COPIES, KERNEL_GAP, LAUNCHING, SYNC, UNEXPLAINED = (
    "cpu_bound", "data_loading", "gpu_compute_bound", "gpu_communication_bound",
    "gpu_memory_bound", "gpu_kernel_kernel_overhead", "gpu_kernel_launch_overhead",
    "synchronisation", "unexplained",
)  # fmt: skip
BOUNDS = (CPU, DATA, COMPUTE, TALK, COPIES, KERNEL_GAP, LAUNCHING, SYNC, UNEXPLAINED)
DATA_LOADING = r"^enumerate\(DataLoader\)"
"""PyTorch's own mark around a data loader's `__next__`."""
_WRAPPER = r"^ProfilerStep#\d+$"
"""Marks of whole steps: they hold a step's work and are no work themselves."""

SEGMENTS: dict[str, type[pl.DataType]] = {
    "start_ns": pl.Int64, "duration_ns": pl.Int64, "bound_by": pl.String, "event": pl.Int64,
    "name": pl.String, "kind": pl.String, "pid": pl.Int64, "tid": pl.Int64,
    "device": pl.Int64, "stream": pl.Int64,
}  # fmt: skip
_OF_KIND = {COMPUTATION: COMPUTE, COMMUNICATION: TALK, MEMORY: COPIES}
_DELAY_OF = {LAUNCH: LAUNCHING, STREAM: KERNEL_GAP}


def segments(graph: Graph, path: Stretches, data_loading: str) -> pl.DataFrame:
    """A row per segment of a path, in order; columns in `SEGMENTS`."""
    parts = [_on_host(graph, path, data_loading), _returns(graph, path), _hand_overs(graph, path),
             _on_gpu(graph, path)]  # fmt: skip
    types = [pl.col(name).cast(type_) for name, type_ in SEGMENTS.items()]
    return pl.concat([part.select(types) for part in parts]).sort("start_ns")


def _on_host(graph: Graph, path: Stretches, data_loading: str) -> pl.DataFrame:
    """Cuts host time at every start and end of an event; each piece is its innermost event's."""
    chosen = path.kind == ON_HOST
    threads, starts, ends = path.where[chosen], path.starts[chosen], path.ends[chosen]
    pieces = [
        _pieces(graph, int(thread), starts[threads == thread], ends[threads == thread])
        for thread in np.unique(threads)
    ]
    if not pieces:
        return pl.DataFrame(schema=SEGMENTS)
    whole = pl.concat(pieces)
    row = innermost(graph.host.tree, whole)
    whole = whole.with_columns(row=pl.Series(row, dtype=pl.Int64))
    loading = _loading(graph, whole, data_loading)
    return _describe(graph, _merge(whole.with_columns(loading=pl.Series(loading))))


def _pieces(graph: Graph, thread: int, starts: Ints, ends: Ints) -> pl.DataFrame:
    tree, rows = graph.host.tree, graph.host.rows_of(thread)
    cuts = np.unique(np.concatenate([tree.starts[rows], tree.ends[rows], starts, ends]))
    begins, stops = cuts[:-1], cuts[1:]
    at = np.searchsorted(starts, begins, side="right") - 1
    inside = (at >= 0) & (stops <= ends[np.maximum(at, 0)])
    pid, tid = graph.host.threads[thread]
    begins, stops, at = begins[inside], stops[inside], at[inside]
    return pl.DataFrame(
        {"ts_ns": begins, "dur_ns": stops - begins, "stretch": at},
        schema={"ts_ns": pl.Int64, "dur_ns": pl.Int64, "stretch": pl.Int64},
    ).select(pl.lit(pid, pl.Int64).alias("pid"), pl.lit(tid, pl.Int64).alias("tid"), pl.all())


def _loading(graph: Graph, pieces: pl.DataFrame, pattern: str) -> npt.NDArray[np.bool_]:
    """Whether each piece is inside a data loading range on its thread."""
    host = graph.host
    rows = host.rows_named(pattern)
    starts = host.frame["ts_ns"].to_numpy()[rows]
    ends = starts + host.frame["dur_ns"].to_numpy()[rows]
    begins, tids = pieces["ts_ns"].to_numpy(), pieces["tid"].to_numpy()
    found = np.zeros(len(begins), dtype=np.bool_)
    for number in np.unique(host.thread_of_row[rows]):
        own = host.thread_of_row[rows] == number
        ranges = union(starts[own], ends[own])
        at = np.searchsorted(ranges.starts, begins, side="right") - 1
        inside = (at >= 0) & (begins < ranges.ends[np.maximum(at, 0)])
        found |= inside & (tids == host.threads[int(number)][1])
    return found


def _merge(pieces: pl.DataFrame) -> pl.DataFrame:
    """Merges neighbouring pieces of one event."""
    run = pl.struct("tid", "stretch", "row", "loading").rle_id()
    return pieces.group_by(run.alias("run"), maintain_order=True).agg(
        pl.col("pid", "tid", "row", "loading", "ts_ns").first(), pl.col("dur_ns").sum()
    )


def _describe(graph: Graph, pieces: pl.DataFrame) -> pl.DataFrame:
    """Pieces of host time with their event and what they are bound by."""
    events = _host_events(graph)
    waiting = pl.col("name").str.contains(f"{DEVICE_SYNC}|{STREAM_SYNC}")
    return (
        pieces.join(events, on="row", how="left")
        .with_columns(
            bound_by=pl.when(waiting.fill_null(value=False)).then(pl.lit(SYNC))
            .when("loading").then(pl.lit(DATA)).otherwise(pl.lit(CPU)),
            device=pl.lit(None), stream=pl.lit(None),
        )
        .rename({"ts_ns": "start_ns", "dur_ns": "duration_ns"})
    )  # fmt: skip


def _host_events(graph: Graph) -> pl.DataFrame:
    """`event`, `name` and category (`kind`) of each row of the host's events.

    A mark of a whole step has neither name nor category: time of its own is time that no other
    event covers.
    """
    name, kind = pl.col("name").cast(pl.String), pl.col("category").cast(pl.String)
    is_work = pl.col("row").is_in(graph.host.rows_named(_WRAPPER)).not_()
    return graph.host.frame.with_row_index("row").select(
        pl.col("row").cast(pl.Int64), "event", name=pl.when(is_work).then(name),
        kind=pl.when(is_work).then(kind),
    )  # fmt: skip


def _base(path: Stretches, chosen: npt.NDArray[np.bool_]) -> pl.DataFrame:
    return pl.DataFrame({
        "row": path.where[chosen],
        "what": path.kind[chosen],
        "start_ns": path.starts[chosen],
        "duration_ns": path.ends[chosen] - path.starts[chosen],
    })  # fmt: skip


def _returns(graph: Graph, path: Stretches) -> pl.DataFrame:
    """From the end of what a blocking call waited for to its return.

    Time that a copy or free takes to return after the GPU is done is the host's own work.
    """
    waits = pl.col("name").str.contains(f"{DEVICE_SYNC}|{STREAM_SYNC}")
    of = graph.host.frame.with_row_index("row").select(pl.col("row").cast(pl.Int64), "pid", "tid")
    return (
        _base(path, path.kind == RETURN)
        .join(_host_events(graph), on="row", how="left")
        .join(of, on="row", how="left")
        .with_columns(
            bound_by=pl.when(waits | (pl.col("duration_ns") <= USUAL_DELAY_NS))
            .then(pl.lit(SYNC)).otherwise(pl.lit(CPU)),
            device=pl.lit(None), stream=pl.lit(None),
        )
    )  # fmt: skip


def _hand_overs(graph: Graph, path: Stretches) -> pl.DataFrame:
    """From one thread's last event to the first event of the thread that it started or woke."""
    threads = pl.DataFrame(
        graph.host.threads, schema={"pid": pl.Int64, "tid": pl.Int64}, orient="row"
    )
    numbered = threads.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    return (
        _base(path, path.kind == HAND_OVER)
        .join(numbered, on="row", how="left")
        .with_columns(
            bound_by=pl.lit(CPU), event=pl.lit(None), name=pl.lit(None), kind=pl.lit(None),
            device=pl.lit(None), stream=pl.lit(None),
        )
    )  # fmt: skip


def _on_gpu(graph: Graph, path: Stretches) -> pl.DataFrame:
    """GPU events, and the delays before them, which carry the event that began late."""
    base = _base(path, (path.kind == ON_GPU) | (path.kind == DELAY))
    why = graph.causes.why[base["row"].to_numpy()]
    events = graph.gpu.frame.with_row_index("row").select(
        pl.col("row").cast(pl.Int64), "event", pl.col("name").cast(pl.String),
        pl.col("category").cast(pl.String), of="kind", pid="pid", tid="tid", device="device",
        stream="stream",
    )  # fmt: skip
    delay = (
        pl.when((pl.col("duration_ns") > USUAL_DELAY_NS) & (pl.col("why") != LAUNCH))
        .then(pl.lit(UNEXPLAINED))
        .otherwise(pl.col("why").replace_strict(_DELAY_OF, default=SYNC, return_dtype=pl.String))
    )
    running = pl.col("what") == ON_GPU
    return (
        base.with_columns(why=pl.Series(why, dtype=pl.Int64))
        .join(events, on="row", how="left")
        .with_columns(
            bound_by=pl.when(running).then(pl.col("of").replace_strict(
                _OF_KIND, default=None, return_dtype=pl.String)).otherwise(delay),
            kind=pl.when(running).then("category").otherwise(pl.lit("delay")),
        )
    )  # fmt: skip
