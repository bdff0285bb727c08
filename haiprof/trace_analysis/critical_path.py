"""The critical path of one rank's window: segments, causes, confidence, and a marked trace."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.intervals import Bools
from haiprof.base.units import duration_text
from haiprof.trace_analysis.call_tree import innermost
from haiprof.trace_analysis.critical_walk import (
    DELAY,
    HAND_OVER,
    LAUNCH,
    ON_GPU,
    ON_HOST,
    RETURN,
    STREAM,
    Graph,
    Instance,
    PathWindow,
    Stretches,
    causes,
    find_window,
    joins_by_thread,
    longest_path,
)
from haiprof.trace_analysis.dependencies import (
    USUAL_DELAY_NS,
    DeviceEvents,
    HostEvents,
    device_events,
)
from haiprof.trace_analysis.device_time import COMMUNICATION, COMPUTATION, MEMORY
from haiprof.trace_analysis.host_activity import split
from haiprof.trace_analysis.launches import copy_path, exact_us, in_pieces
from haiprof.trace_format.find import OVERLAY_SUFFIX
from haiprof.trace_format.kineto.decode import add_marks, write_copy
from haiprof.trace_format.kineto.rank_trace import STEP_NAME, Trace
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.launch_checks import DEVICE_SYNC, STREAM_SYNC

CPU, DATA, COMPUTE, TALK, COPIES, KERNEL_GAP, LAUNCHING, SYNC, UNEXPLAINED = (
    "cpu_bound", "data_loading", "gpu_compute_bound", "gpu_communication_bound",
    "gpu_memory_bound", "gpu_kernel_kernel_overhead", "gpu_kernel_launch_overhead",
    "synchronisation", "unexplained",
)  # fmt: skip
BOUNDS = (CPU, DATA, COMPUTE, TALK, COPIES, KERNEL_GAP, LAUNCHING, SYNC, UNEXPLAINED)
DATA_LOADING = r"^enumerate\(DataLoader\)"
"""PyTorch's own mark around a data loader's `__next__`."""

SEGMENTS: dict[str, type[pl.DataType]] = {
    "start_ns": pl.Int64, "duration_ns": pl.Int64, "bound_by": pl.String, "event": pl.Int64,
    "name": pl.String, "kind": pl.String, "pid": pl.Int64, "tid": pl.Int64,
    "device": pl.Int64, "stream": pl.Int64,
}  # fmt: skip
_PIECES = dict.fromkeys(("pid", "tid", "stretch", "ts_ns", "dur_ns"), pl.Int64)
_OF_KIND = {COMPUTATION: COMPUTE, COMMUNICATION: TALK, MEMORY: COPIES}
_DELAY_OF = {LAUNCH: LAUNCHING, STREAM: KERNEL_GAP}


def segments(graph: Graph, path: Stretches, data_loading: str) -> pl.DataFrame:
    """A row per segment of a path, in order; columns in `SEGMENTS`."""
    parts = [_on_host(graph, path, data_loading), _returns(graph, path), _hand_overs(graph, path),
             _on_gpu(graph, path)]  # fmt: skip
    types = [pl.col(name).cast(type_) for name, type_ in SEGMENTS.items()]
    named = [part.select(name for name in part.columns if name in SEGMENTS) for part in parts]
    return pl.concat(named, how="diagonal_relaxed").select(types).sort("start_ns")


def _on_host(graph: Graph, path: Stretches, data_loading: str) -> pl.DataFrame:
    """Cuts host time at every start and end of an event; each piece is its innermost event's."""
    tree, chosen = graph.host.tree, path.kind == ON_HOST
    threads, starts, ends = path.where[chosen], path.starts[chosen], path.ends[chosen]
    pieces = [pl.DataFrame(schema=_PIECES)]
    for thread in np.unique(threads):
        rows, own = graph.host.rows_of(int(thread)), threads == thread
        edges = np.unique(np.concatenate([tree.starts[rows], tree.ends[rows]]))
        cut = split(starts[own], ends[own], edges)
        pid, tid = graph.host.threads[thread]
        pieces.append(pl.DataFrame({
            "pid": [pid] * len(cut.of), "tid": [tid] * len(cut.of), "stretch": cut.of,
            "ts_ns": cut.starts, "dur_ns": cut.ends - cut.starts,
        }, schema=_PIECES))  # fmt: skip
    whole = pl.concat(pieces)
    row = innermost(tree, whole)
    is_loading = np.zeros(len(tree.parent), dtype=np.bool_)
    is_loading[graph.host.rows_named(data_loading)] = True
    whole = whole.with_columns(
        row=pl.Series(row, dtype=pl.Int64), loading=pl.Series(tree.climb(row, is_loading) >= 0)
    )
    # Merges neighbouring pieces of one event.
    run = pl.struct("tid", "stretch", "row", "loading").rle_id()
    merged = whole.group_by(run.alias("run"), maintain_order=True).agg(
        pl.col("pid", "tid", "row", "loading", "ts_ns").first(), pl.col("dur_ns").sum()
    )
    waiting = pl.col("name").str.contains(f"{DEVICE_SYNC}|{STREAM_SYNC}")
    return (
        merged.join(_host_events(graph), on="row", how="left")
        .with_columns(
            bound_by=pl.when(waiting.fill_null(value=False)).then(pl.lit(SYNC))
            .when("loading").then(pl.lit(DATA)).otherwise(pl.lit(CPU)),
        )
        .rename({"ts_ns": "start_ns", "dur_ns": "duration_ns"})
    )  # fmt: skip


def _host_events(graph: Graph) -> pl.DataFrame:
    """`event`, `name` and `kind` of each row of the host's; a step's mark has no name."""
    name, kind = pl.col("name").cast(pl.String), pl.col("category").cast(pl.String)
    is_work = pl.col("row").is_in(graph.host.rows_named(STEP_NAME)).not_()
    return graph.host.frame.with_row_index("row").select(
        pl.col("row").cast(pl.Int64), "event", "pid", "tid", name=pl.when(is_work).then(name),
        kind=pl.when(is_work).then(kind),
    )  # fmt: skip


def _base(path: Stretches, chosen: Bools) -> pl.DataFrame:
    return pl.DataFrame({
        "row": path.where[chosen],
        "what": path.kind[chosen],
        "start_ns": path.starts[chosen],
        "duration_ns": path.ends[chosen] - path.starts[chosen],
    })  # fmt: skip


def _returns(graph: Graph, path: Stretches) -> pl.DataFrame:
    """From the end of what a blocking call waited for to its return: the host's own work."""
    waits = pl.col("name").str.contains(f"{DEVICE_SYNC}|{STREAM_SYNC}")
    return (
        _base(path, path.kind == RETURN)
        .join(_host_events(graph), on="row", how="left")
        .with_columns(
            bound_by=pl.when(waits | (pl.col("duration_ns") <= USUAL_DELAY_NS))
            .then(pl.lit(SYNC)).otherwise(pl.lit(CPU)),
        )
    )  # fmt: skip


def _hand_overs(graph: Graph, path: Stretches) -> pl.DataFrame:
    """From one thread's last event to the first event of the thread that it started or woke."""
    schema = {"pid": pl.Int64, "tid": pl.Int64}
    threads = pl.DataFrame(graph.host.threads, schema=schema, orient="row")
    base = _base(path, path.kind == HAND_OVER).with_columns(bound_by=pl.lit(CPU))
    return pl.concat([base, threads[base["row"].to_numpy()]], how="horizontal")


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


RECORDED, ASSUMED = "recorded", "assumed"
_NEAR_TIE_RATIO = 0.01  # of the window: with a slightly faster host the path would run over the GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of events that determines a window's length, and how certain it is."""

    start_ns: int
    end_ns: int
    host_end_ns: int
    """Where the window ends on the host; before `end_ns` where the GPU was still working."""
    window: str
    """The requested window, in words."""
    confidence: str
    """`recorded`: every dependency on the path is in the trace; `assumed`: some are inferred, or
    part of the path is unexplained."""
    dependency_count: int
    """Changes between threads and streams on the path."""
    assumed_count: int
    """Those of them that were inferred."""
    caveats: tuple[str, ...]
    """Caveats for readers of the numbers."""
    rows: pl.DataFrame

    @property
    def length_ns(self) -> int:
        """Length of the window, which the path covers exactly."""
        return self.end_ns - self.start_ns

    def segments(self) -> pl.DataFrame:
        """The path, a row per segment in order of time, without gaps.

        `start_ns`; `duration_ns`; `bound_by`, one of `segments.BOUNDS`; `event`, its place in
        the file, null for host time that no event covers; `name`; `kind`, the event's
        category, or `delay` before a GPU event; `pid`; `tid`; `device` and `stream` of what
        ran on a GPU. `name` and `kind` are null, too, where only the mark of a profiler step
        covers the host's time.
        """
        return self.rows

    def summary(self) -> pl.DataFrame:
        """The window's length by cause.

        One row per cause, in the order of `segments.BOUNDS`: `bound_by`, `duration_ns`,
        `share_ratio` (of the window; null where it is empty), `segment_count`. The durations
        add up to the window. Causes: the host works (`cpu_bound`) or loads data
        (`data_loading`); a kernel computes, communicates or a copy runs (`gpu_..._bound`); a
        GPU event was launched and not yet running (`gpu_kernel_launch_overhead`) or could run
        as its stream was free (`gpu_kernel_kernel_overhead`); calls that wait for the GPU,
        from the moment at which it was done, and streams that wait for streams
        (`synchronisation`); `unexplained`: something the trace does not hold.
        """
        every = pl.DataFrame({"bound_by": BOUNDS})
        sums = every.join(self._sums("bound_by"), on="bound_by", how="left", maintain_order="left")
        share = pl.lit(0.0 if self.length_ns else None, pl.Float64)
        return sums.with_columns(
            pl.col("duration_ns", "segment_count").fill_null(0),
            pl.col("share_ratio").fill_null(share),
        )

    def top(self, count: int = 20) -> pl.DataFrame:
        """The names that most of the path consists of.

        `bound_by`, `kind`, `name`, `duration_ns`, `share_ratio`, `segment_count`; the longest
        first. A null name is host time outside of all events but a profiler step's mark:
        Python, mostly.
        """
        sums = self._sums("bound_by", "kind", "name")
        return sums.sort("duration_ns", "name", descending=[True, False]).head(count)

    def _sums(self, *keys: str) -> pl.DataFrame:
        """Time of the segments with the same keys, its share of the window, and their number."""
        length = pl.lit(self.length_ns or None, pl.Float64)
        return self.rows.group_by(*keys).agg(
            pl.col("duration_ns").sum(),
            (pl.col("duration_ns").sum() / length).alias("share_ratio"),
            pl.len().cast(pl.Int64).alias("segment_count"),
        )


def critical_path(
    trace: Trace,
    *,
    steps: tuple[int, int] | None = None,
    annotation: str | None = None,
    instance: Instance = 0,
    data_loading: str = DATA_LOADING,
) -> CriticalPath:
    """The critical path of a window of one rank.

    It ends with the window: at its end on the host, or with the last GPU event launched within it
    where that ends later. From there it goes back, from every event to the last thing that it had
    waited for (see `walk`), to the window's start. It covers the window without a gap.
    """
    host = HostEvents(trace)
    window = find_window(trace, host, steps=steps, annotation=annotation, instance=instance)
    gpu, main = device_events(trace), host.number_of(window.thread)
    joins = joins_by_thread(host, gpu, main)
    graph = Graph(host=host, gpu=gpu, causes=causes(gpu), main=main, joins=joins)
    # It ends with the host, or with the GPU event launched within it that ends after that.
    own = np.flatnonzero((gpu.launched >= window.start_ns) & (gpu.launched < window.host_end_ns))
    last = int(own[np.argmax(gpu.ends[own])]) if len(own) else -1
    slack_ns = window.host_end_ns - int(gpu.ends[last]) if len(own) else None
    end_ns, end_row = window.host_end_ns, -1
    if slack_ns is not None and slack_ns <= 0:
        end_ns, end_row = int(gpu.ends[last]), last
    if end_ns <= window.start_ns:
        raise MissingDataError(f"{trace.path}: no time passes in {window.label}")
    path = longest_path(graph, window.start_ns, end_ns, end_row)
    rows = segments(graph, path, data_loading)
    unsure = path.assumed or (rows["bound_by"] == UNEXPLAINED).any()
    return CriticalPath(
        start_ns=window.start_ns,
        end_ns=end_ns,
        host_end_ns=window.host_end_ns,
        window=window.label,
        confidence=ASSUMED if unsure else RECORDED,
        dependency_count=path.jumps,
        assumed_count=path.assumed,
        rows=rows,
        caveats=tuple(_caveats(gpu, window, end_ns, path, rows, slack_ns)),
    )


def _caveats(
    gpu: DeviceEvents, window: PathWindow, end_ns: int, path: Stretches, rows: pl.DataFrame,
    slack_ns: int | None,
) -> list[str]:  # fmt: skip
    """What readers must know; `slack_ns` is how long before the host the GPU was done."""
    found = list(gpu.trace.report.notes)
    if not len(gpu.starts):
        return [*found, "no GPU events in the trace: the path is the host's"]
    if not gpu.trace.sync.height and path.assumed:
        found.append(
            f"{path.assumed} of {path.jumps} dependencies on the path are assumed: the trace has "
            "no sync events (experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True))"
        )
    elif path.assumed:
        found.append(f"{path.assumed} of {path.jumps} dependencies on the path are assumed")
    if end_ns > window.host_end_ns:
        found.append(
            f"the GPU worked {duration_text(end_ns - window.host_end_ns)} longer than the window "
            "on the host"
        )
    if slack_ns and 0 < slack_ns < _NEAR_TIE_RATIO * (end_ns - window.start_ns):
        found.append(
            f"the GPU was done only {duration_text(slack_ns)} before the host: its work is almost "
            "as critical"
        )
    events = gpu.frame["event"].to_numpy()[gpu.launched < window.start_ns]
    earlier = pl.col("event").is_in(pl.Series(events).implode()) & pl.col("device").is_not_null()
    early = int(rows.filter(earlier)["duration_ns"].sum())
    if early:
        found.append(f"{duration_text(early)} are GPU work that was launched before the window")
    skewed = gpu.launched > gpu.starts
    if skewed.any():
        most = int((gpu.launched - gpu.starts).max())
        found.append(
            f"{int(skewed.sum())} GPU events began up to {duration_text(most)} before their "
            "launch: the clocks of host and GPU differ"
        )
    by_cause = dict(rows.group_by("bound_by").agg(pl.col("duration_ns").sum()).iter_rows())
    if by_cause.get(TALK):
        found.append("communication includes waiting for other ranks; one rank's trace cannot tell")
    if by_cause.get(UNEXPLAINED):
        found.append(
            f"{duration_text(by_cause[UNEXPLAINED])} passed before GPU events that were launched "
            "and whose stream was free: they waited for something that is not in the trace"
        )
    return found


CATEGORY = "critical_path"
MARK = "critical"


def write_overlay(
    trace: Trace, path: CriticalPath, *, folder: Path | None = None, only_path: bool = False
) -> Path:
    """Writes `<name>_critical_path.json.gz`, for Perfetto or chrome://tracing.

    The trace's text is passed through piece by piece, whatever its size. Events on the path get
    the argument `critical`; where the path changes its thread or stream stands an arrow (a flow
    event of category `critical_path`) that carries what bounds the next stretch. The file appears
    whole or not at all.
    """
    if trace.report.lost_count:
        raise TraceFormatError(
            f"{trace.path}: {trace.report.lost_count} events are no JSON, so the others cannot be "
            "marked in its text",
            hint="the path itself is in segments()",
        )
    target = copy_path(trace, folder, OVERLAY_SUFFIX)
    text = TraceText(trace.path)
    running = path.rows.filter(pl.col("kind") != "delay")["event"].drop_nulls()
    marked = add_marks(text, np.unique(running.to_numpy()), MARK, only_marked=only_path)
    # Arrows between events on the path that lie on different threads or streams.
    events = path.rows.filter(pl.col("event").is_not_null() & (pl.col("kind") != "delay"))
    here = ("pid", "tid", "start_ns")
    moves = events.with_columns(pl.col(*here).shift(-1).name.prefix("next_"),
                                bound=pl.col("bound_by").shift(-1)).filter(
        (pl.col("pid") != pl.col("next_pid")) | (pl.col("tid") != pl.col("next_tid"))
    ).with_row_index("id")  # fmt: skip
    ends = [_arrow("s", "", moves, "pid", "tid", "start_ns"),
            _arrow("f", ', "bp": "e"', moves, "next_pid", "next_tid", "next_start_ns")]  # fmt: skip
    write_copy(target, text, chain(marked, in_pieces(pl.concat(ends))))
    return target


def _arrow(phase: str, more: str, moves: pl.DataFrame, pid: str, tid: str, time: str) -> pl.Series:
    parts = (
        pl.lit(f'{{"ph": "{phase}", "cat": "{CATEGORY}", "name": "'), pl.col("bound"),
        pl.lit(f'"{more}, "id": "{CATEGORY}'), pl.col("id"), pl.lit('", "pid": '), pl.col(pid),
        pl.lit(', "tid": '), pl.col(tid), pl.lit(', "ts": '), *exact_us(pl.col(time)), pl.lit("}"),
    )  # fmt: skip
    return moves.select(event=pl.concat_str(*parts)).to_series()
