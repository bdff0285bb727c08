"""The critical path of one rank's window, summed up by cause, with its confidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.units import duration_text
from haiprof.trace_analysis.critical.device import causes
from haiprof.trace_analysis.critical.segments import (
    BOUNDS,
    DATA_LOADING,
    TALK,
    UNEXPLAINED,
    segments,
)
from haiprof.trace_analysis.critical.waits import joins_by_thread
from haiprof.trace_analysis.critical.walk import Graph, Stretches, longest_path
from haiprof.trace_analysis.critical.window import Instance, PathWindow, find_window
from haiprof.trace_analysis.dependencies.device_events import (
    DeviceEvents,
    device_events,
    runtime_calls,
)
from haiprof.trace_analysis.dependencies.host_events import HostEvents
from haiprof.trace_format.kineto.rank_trace import Trace

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
        causes_frame = pl.DataFrame({"bound_by": BOUNDS})
        sums = self.rows.group_by("bound_by").agg(
            pl.col("duration_ns").sum(), pl.len().cast(pl.Int64).alias("segment_count")
        )
        joined = causes_frame.join(sums, on="bound_by", how="left", maintain_order="left")
        length = self.length_ns or None
        return joined.select(
            "bound_by",
            pl.col("duration_ns").fill_null(0),
            (pl.col("duration_ns").fill_null(0) / pl.lit(length, pl.Float64)).alias("share_ratio"),
            pl.col("segment_count").fill_null(0),
        )

    def top(self, count: int = 20) -> pl.DataFrame:
        """The names that most of the path consists of.

        `bound_by`, `kind`, `name`, `duration_ns`, `share_ratio`, `segment_count`; the longest
        first. A null name is host time outside of all events but a profiler step's mark:
        Python, mostly.
        """
        sums = self.rows.group_by("bound_by", "kind", "name").agg(
            pl.col("duration_ns").sum(), pl.len().cast(pl.Int64).alias("segment_count")
        )
        length = self.length_ns or None
        share = (pl.col("duration_ns") / pl.lit(length, pl.Float64)).alias("share_ratio")
        ordered = sums.sort("duration_ns", "name", descending=[True, False]).head(count)
        return ordered.select("bound_by", "kind", "name", "duration_ns", share, "segment_count")


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
    calls = runtime_calls(trace)
    gpu = device_events(trace, calls)
    main = host.number_of(window.thread)
    graph = Graph(
        host=host, gpu=gpu, causes=causes(trace, gpu, calls), main=main,
        joins=joins_by_thread(trace, host, gpu, calls, main=main),
    )  # fmt: skip
    end_ns, end_row = _end(gpu, window)
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
        caveats=tuple(_caveats(trace, gpu, window, end_ns, path, rows)),
    )


def _launched_within(gpu: DeviceEvents, window: PathWindow) -> npt.NDArray[np.int64]:
    return np.flatnonzero((gpu.launched >= window.start_ns) & (gpu.launched < window.host_end_ns))


def _end(gpu: DeviceEvents, window: PathWindow) -> tuple[int, int]:
    """When the window ends, and the GPU event that ends it, or -1."""
    own = _launched_within(gpu, window)
    if len(own):
        last = int(own[np.argmax(gpu.ends[own])])
        if gpu.ends[last] > window.host_end_ns:
            return int(gpu.ends[last]), last
    return window.host_end_ns, -1


def _slack_ns(gpu: DeviceEvents, window: PathWindow) -> int | None:
    """How long before the window's end on the host the GPU was idle; None where it was not."""
    own = _launched_within(gpu, window)
    if not len(own):
        return None
    slack = window.host_end_ns - int(gpu.ends[own].max())
    return slack if slack > 0 else None


def _caveats(
    trace: Trace,
    gpu: DeviceEvents,
    window: PathWindow,
    end_ns: int,
    path: Stretches,
    rows: pl.DataFrame,
) -> list[str]:
    found = list(trace.report.notes)
    if not len(gpu.starts):
        return [*found, "no GPU events in the trace: the path is the host's"]
    if not trace.sync.height and path.assumed:
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
    slack = _slack_ns(gpu, window)
    if slack is not None and slack < _NEAR_TIE_RATIO * (end_ns - window.start_ns):
        found.append(
            f"the GPU was done only {duration_text(slack)} before the host: its work is almost as "
            "critical"
        )
    early = _before_window(gpu, window, rows)
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


def _before_window(gpu: DeviceEvents, window: PathWindow, rows: pl.DataFrame) -> int:
    """How much of the path is GPU work launched before the window."""
    events = gpu.frame["event"].to_numpy()[gpu.launched < window.start_ns]
    earlier = pl.col("event").is_in(pl.Series(events).implode()) & pl.col("device").is_not_null()
    return int(rows.filter(earlier)["duration_ns"].sum())
