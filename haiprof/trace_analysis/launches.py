"""Launches of GPU work and copies over time; counters, graph nodes and system calls of a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import polars as pl

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.base.intervals import total
from haiprof.trace_analysis.device_time import (
    MEMORY_CATEGORIES,
    Steps,
    gpu_events,
    step_window,
    union_of,
)
from haiprof.trace_format.find import COPY_KEY, COUNTER_SUFFIX
from haiprof.trace_format.kineto.decode import event_texts, write_copy
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.text import TraceText

RUNTIME_CUTOFF_NS = 50_000
LAUNCH_DELAY_CUTOFF_NS = 100_000  # HTA's defaults for get_cuda_kernel_launch_stats


def with_call(gpu: pl.DataFrame, runtime: pl.DataFrame) -> pl.DataFrame:
    """Every GPU event with the call that launched it, whatever the call's name; null where unknown.

    Of several calls with one correlation the outermost counts; a correlation of 0 is none.
    """
    calls = runtime.filter(pl.col("correlation") > 0).select(
        *("correlation", "pid", "tid", "external_id"),
        call="name", call_ts_ns="ts_ns", call_dur_ns="dur_ns",
    )  # fmt: skip
    own = gpu.drop("pid", "tid").rename({"external_id": "gpu_external_id"})
    first = calls.unique("correlation", keep="first", maintain_order=True)
    return own.join(first, on="correlation", how="left").sort("ts_ns", "event")


def launched_events(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """GPU events whose launch is in the trace, with the call: columns of `with_call`."""
    found = with_call(gpu_events(trace, steps), trace.runtime).drop_nulls("call")
    known = trace.runtime.filter(pl.col("correlation") > 0)["correlation"].implode()
    if found.is_empty() and len(trace.gpu) and not trace.gpu["correlation"].is_in(known).any():
        raise MissingDataError(
            f"{trace.path}: {len(trace.gpu)} GPU events and no call that launched one of them",
            hint="record both: ProfilerActivity.CPU and ProfilerActivity.CUDA",
        )
    return found


def launch_statistics(
    trace: Trace, steps: Steps = None, *, runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
    launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS, include_memory_events: bool = True,
) -> pl.DataFrame:  # fmt: skip
    """The cost of each launch, and the delay until its work began.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.
        runtime_cutoff_ns: A call longer than this is an outlier.
        launch_delay_cutoff_ns: A delay longer than this is an outlier.
        include_memory_events: Whether copies and sets count.

    Returns:
        One row per launch: `correlation`, `call`, `kernel`, `kernel_count`, `device`, `stream`,
        `ts_ns`, `cpu_duration_ns`, `gpu_duration_ns`, `launch_delay_ns`, `is_short`,
        `is_runtime_outlier`, `is_launch_delay_outlier`.

    Source: HTA get_cuda_kernel_launch_stats. HTA knows four calls; here a launch is whatever
    call a GPU event names as its own: cuLaunchKernel(Ex), cooperative, graph and HIP launches
    as well (D16). HTA counts a graph's kernels as a launch each (D17). The delay holds the
    time in which earlier work kept the stream busy; see `queue_length`.
    """
    found = launched_events(trace, steps)
    found = found.filter(include_memory_events | ~_is_copy())
    first = {"kernel": "name", "device": "device", "stream": "stream", "ts_ns": "call_ts_ns",
             "cpu_duration_ns": "call_dur_ns", "first_ns": "ts_ns"}  # fmt: skip
    launches = found.group_by("correlation", maintain_order=True).agg(  # by their start
        pl.col("call").first(),
        **{name: pl.col(column).first() for name, column in first.items()},
        kernel_count=pl.len().cast(pl.Int64),
        gpu_duration_ns=pl.col("dur_ns").sum(),
    )
    cpu, gpu = pl.col("cpu_duration_ns"), pl.col("gpu_duration_ns")
    delay = (pl.col("first_ns") - (pl.col("ts_ns") + cpu)).clip(0)
    return launches.select(
        "correlation", pl.col("call", "kernel").cast(pl.String), "kernel_count", "device", "stream",
        "ts_ns", "cpu_duration_ns", "gpu_duration_ns", launch_delay_ns=delay,
        is_short=(cpu <= runtime_cutoff_ns) & (gpu < cpu),
        is_runtime_outlier=cpu > runtime_cutoff_ns,
        is_launch_delay_outlier=delay > launch_delay_cutoff_ns,
    ).sort("ts_ns", "correlation")  # fmt: skip


def launch_summary(
    trace: Trace, steps: Steps = None, *, runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
    launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS, include_memory_events: bool = True,
) -> pl.DataFrame:  # fmt: skip
    """Launches by call: how many, how long, and how many are short or outliers.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.
        runtime_cutoff_ns: As in `launch_statistics`.
        launch_delay_cutoff_ns: As in `launch_statistics`.
        include_memory_events: As in `launch_statistics`.

    Returns:
        One row per call: `call`, `launch_count`, `kernel_count`, `gpu_duration_ns`,
        `cpu_duration_ns`, `cpu_duration_median_ns`, `cpu_duration_max_ns`, `launch_delay_ns`,
        `launch_delay_median_ns`, `launch_delay_max_ns`, `short_count`, `runtime_outlier_count`,
        `launch_delay_outlier_count`. A row with `call` null is of GPU events whose launch is not in
        the trace.
    """
    launches = launch_statistics(
        trace, steps=steps, runtime_cutoff_ns=runtime_cutoff_ns,
        launch_delay_cutoff_ns=launch_delay_cutoff_ns, include_memory_events=include_memory_events,
    )  # fmt: skip
    flags = ("short", "runtime_outlier", "launch_delay_outlier")
    times: dict[str, pl.Expr] = {}
    for part in ("cpu_duration", "launch_delay"):
        ns = pl.col(f"{part}_ns")
        times |= {f"{part}_ns": ns.sum(), f"{part}_median_ns": ns.median(),
                  f"{part}_max_ns": ns.max()}  # fmt: skip
    by_call = launches.group_by("call").agg(
        pl.len().cast(pl.Int64).alias("launch_count"),
        pl.col("kernel_count", "gpu_duration_ns").sum(),
        **times,
        **{f"{flag}_count": pl.col(f"is_{flag}").sum().cast(pl.Int64) for flag in flags},
    )
    gpu = gpu_events(trace, steps).filter(include_memory_events | ~_is_copy())
    known = trace.runtime.filter(pl.col("correlation") > 0)
    alone = gpu.join(known, on="correlation", how="anti").select(
        call=pl.lit(None, dtype=pl.String),
        kernel_count=pl.len().cast(pl.Int64),
        gpu_duration_ns=pl.col("dur_ns").sum(),
    ).filter(pl.col("kernel_count") > 0)  # fmt: skip
    found = by_call.sort("launch_count", "call", descending=[True, False])
    return pl.concat([found, alone], how="diagonal")


def _is_copy() -> pl.Expr:
    return pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES)


MAX_QUEUE_LENGTH = 1024
"""Launches that a CUDA stream takes before a launch call blocks; HTA's default."""

_STREAM = ("device", "stream")


def queue_length(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """The launch queue of each stream over time.

    A launch enters the queue when its call begins, and leaves it when the first of what it
    started on that stream begins. A CUDA graph enters once for each stream that it has nodes
    on, not once for each node: so it counts against the launches that a stream takes.

    Never negative: only launches whose call and GPU event are both in the trace count, an
    entry at the time of a leaving comes before it, and a kernel whose recorded start lies
    before its call (the clocks of CPU and GPU are matched to about 1 us) leaves at once.

    Returns:
        One row per change: `device`, `stream`, `ts_ns`, `queue_length` from then on.

    Source: HTA get_queue_length_time_series, which knows twelve names of calls, and no graph
    or cooperative launches (D16, D17).
    """
    entry = launched_events(trace, steps).group_by(*_STREAM, "correlation", maintain_order=True)
    first = entry.agg(enter_ns=pl.col("call_ts_ns").first(), leave_ns=pl.col("ts_ns").min())
    waiting = first.with_columns(leave_ns=pl.max_horizontal("enter_ns", "leave_ns"))
    change = [waiting.select(*_STREAM, ts_ns=when, change=pl.lit(by, dtype=pl.Int64))
              for when, by in (("enter_ns", 1), ("leave_ns", -1))]  # fmt: skip
    changes = pl.concat(change).sort(*_STREAM, "ts_ns", -pl.col("change"))
    return changes.select(*_STREAM, "ts_ns", queue_length=pl.col("change").cum_sum().over(_STREAM))


def queue_length_summary(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """How long the launch queue of each stream was: over time, and over its changes.

    Returns:
        One row per stream: `device`, `stream`, `launch_count`, `span_ns`, `empty_ns`, `mean_length`
        over time, `max_length`, and HTA's statistics over the changes: `change_count`,
        `change_mean`, `change_std`, `change_min`, `change_q25`, `change_q50`, `change_q75`,
        `change_max`.

    Source: the last eight are HTA's get_queue_length_summary. They weigh a length that held
    for 1 us like one that held for a second: `mean_length` does not.
    """
    series = _with_duration(queue_length(trace, steps=steps))
    length, duration = pl.col("queue_length"), pl.col("dur_ns")
    summary = series.group_by(_STREAM, maintain_order=True).agg(
        launch_count=(pl.len() // 2).cast(pl.Int64),
        span_ns=duration.sum(),
        empty_ns=duration.filter(length == 0).sum(),
        mean_length=(length * duration).sum() / duration.sum(),
        max_length=length.max(),
        **_over_changes(length),
    )
    return summary.with_columns(pl.col("mean_length").fill_nan(None)).sort(_STREAM)


def full_queue(
    trace: Trace, steps: Steps = None, *, max_queue_length: int = MAX_QUEUE_LENGTH
) -> pl.DataFrame:
    """How long the launch queue of each stream was full: launch calls block meanwhile.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.
        max_queue_length: From which on it is full.

    Returns:
        One row per stream: `device`, `stream`, `full_ns`, `trace_ns`, `full_ratio`.

    Source: HTA get_time_spent_blocked_on_full_queue, which keeps only the last of a rank's
    streams (D14) and says nothing of streams that were never full.
    """
    series = _with_duration(queue_length(trace, steps=steps))
    begin, end = trace.checked.window or (0, 0)
    full = pl.col("dur_ns").filter(pl.col("queue_length") >= max_queue_length).sum()
    found = series.group_by(_STREAM, maintain_order=True).agg(
        full_ns=full, trace_ns=pl.lit(end - begin, dtype=pl.Int64)
    )
    return found.with_columns(full_ratio=pl.col("full_ns") / pl.col("trace_ns")).sort(_STREAM)


def _with_duration(series: pl.DataFrame) -> pl.DataFrame:
    """How long each value held: `dur_ns`; the last one of a stream, an empty queue, for nothing."""
    until = pl.col("ts_ns").shift(-1).over(_STREAM)
    return series.with_columns(dur_ns=(until - pl.col("ts_ns")).fill_null(0))


_KIND = ("device", "copy_kind")


def _copies(trace: Trace, steps: Steps) -> pl.DataFrame:
    """Copies and sets with `copy_kind`, as in HTA, and their own `bandwidth_bytes_per_s`."""
    own = pl.when(pl.col("dur_ns") > 0).then(pl.col("bytes") / pl.col("dur_ns") * 1e9)
    return gpu_events(trace, steps).filter(_is_copy()).select(
        "device", "ts_ns", "dur_ns", "bytes",
        copy_kind=pl.col("name").cast(pl.String).str.split(" (").list.first().str.strip_chars(),
        bandwidth_bytes_per_s=pl.coalesce("bandwidth_bytes_per_s", own),
    )  # fmt: skip


def memory_bandwidth(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """The bandwidth of each kind of copy over time; copies at the same time add up.

    Returns:
        One row per change: `device`, `copy_kind`, `ts_ns`, `bandwidth_bytes_per_s` from then on.

    Source: HTA get_memory_bw_time_series. HTA stretches copies of 0 us to 1 us; its running
    sums of floats leave residues such as 1e-13 where nothing is copied, here that is 0.
    """
    known = pl.col("bandwidth_bytes_per_s").is_not_null() & (pl.col("dur_ns") > 0)
    copies = _copies(trace, steps).filter(known)
    begin, rate = pl.col("ts_ns"), pl.col("bandwidth_bytes_per_s")
    changes = pl.concat(
        copies.select(*_KIND, ts_ns=when, by=by, count=pl.lit(count))
        for when, by, count in ((begin, rate, 1), (begin + pl.col("dur_ns"), -rate, -1))
    ).sort(*_KIND, "ts_ns", "count")  # a copy no longer runs at its end
    sums = changes.with_columns(pl.col("by", "count").cum_sum().over(_KIND))
    idle = pl.col("count") == 0
    residue = pl.when(idle).then("by").forward_fill().over(_KIND).fill_null(0.0)
    level = pl.when(idle).then(0.0).otherwise(pl.col("by") - residue)
    return sums.select(*_KIND, "ts_ns", bandwidth_bytes_per_s=level)


def memory_bandwidth_summary(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """How much each kind of copy moved, and how fast.

    Returns:
        One row per device and kind: `device`, `copy_kind`, `copy_count`, `unsized_count`,
        `unrated_count`, `bytes`, `busy_ns`, `mean_bandwidth_bytes_per_s`, and HTA's statistics over
        the changes, in bytes per second: `change_count`, `change_mean`, `change_std`, `change_min`,
        `change_q25`, `change_q50`, `change_q75`, `change_max`.

    Source: the last eight are HTA's get_memory_bw_summary (in GB/s there), which weighs a
    short copy like a long one; the mean does not.
    """
    kinds = _copies(trace, steps).group_by(_KIND, maintain_order=True)
    busy = [total(union_of(events)) for _, events in kinds]
    size, rate = pl.col("bytes"), pl.col("bandwidth_bytes_per_s")
    moved = kinds.agg(
        copy_count=pl.len().cast(pl.Int64),
        unsized_count=size.is_null().sum().cast(pl.Int64),
        unrated_count=(rate.is_null() | (pl.col("dur_ns") <= 0)).sum().cast(pl.Int64),
        bytes=pl.when(~size.is_null().any()).then(size.sum()),
    ).with_columns(pl.Series("busy_ns", busy, dtype=pl.Int64))
    mean = pl.when(pl.col("busy_ns") > 0).then(pl.col("bytes") / pl.col("busy_ns") * 1e9)
    changes = memory_bandwidth(trace, steps=steps).filter(rate != 0)
    spread = changes.group_by(_KIND).agg(**_over_changes(rate))
    moved = moved.with_columns(mean_bandwidth_bytes_per_s=mean)
    found = moved.join(spread, on=_KIND, how="left").sort(_KIND)
    return found.with_columns(pl.col("change_count").fill_null(0))


def _over_changes(value: pl.Expr) -> dict[str, pl.Expr]:
    """HTA's statistics of a series: over its changes, however long each value held."""
    return {
        "change_count": pl.len().cast(pl.Int64), "change_mean": value.mean(),
        "change_std": value.std(), "change_min": value.min(),
        **{f"change_q{q}": value.quantile(q / 100, "linear") for q in (25, 50, 75)},
        "change_max": value.max(),
    }  # fmt: skip


QUEUE_LENGTH, MEMORY_BANDWIDTH = "queue_length", "memory_bandwidth"
COUNTERS = (QUEUE_LENGTH, MEMORY_BANDWIDTH)
_ROWS = 20_000


def write_counter_trace(
    trace: Trace, *, folder: Path | None = None, counters: tuple[str, ...] = COUNTERS,
    suffix: str = COUNTER_SUFFIX,
) -> pl.DataFrame:  # fmt: skip
    """Writes `<name>_with_counters.json.gz`, for Perfetto or chrome://tracing.

    The trace's text is streamed, whatever its size: every event as written, without what is not
    JSON, and the file closed where the original is truncated.

    One row: `path`; `counter_event_count`.

    Source: HTA generate_trace_with_counters, which holds the whole trace in memory.
    """
    unknown = set(counters) - set(COUNTERS)
    if unknown:
        raise ValueError(f"no counters {sorted(unknown)}: they are {', '.join(COUNTERS)}")
    if not suffix or "/" in suffix:
        raise UsageError(f"suffix {suffix!r}: expected part of a file's name")
    path = copy_path(trace, folder, suffix)
    events = pl.concat([_events(trace, counter) for counter in counters])
    text = TraceText(trace.path)
    # Where its name does not say so, it says itself that it is a copy, not the trace of a rank.
    mark = "{" if COUNTER_SUFFIX in suffix else f'{{"{COPY_KEY}": 1, '
    written = (b",\n".join(texts) for _, texts in event_texts(text))
    write_copy(path, text, chain(written, in_pieces(events)), mark=mark)
    return pl.DataFrame({"path": [str(path)], "counter_event_count": [len(events)]})


def copy_path(trace: Trace, folder: Path | None, suffix: str) -> Path:
    """A file for a changed copy of a trace, beside it unless a folder is given."""
    stem = trace.path.name.removesuffix(".gz").removesuffix(".json")
    return (folder or trace.path.parent) / f"{stem}{suffix}.json.gz"


def in_pieces(events: pl.Series) -> Iterator[bytes]:
    """Events that are JSON, many at a time as one text."""
    for start in range(0, len(events), _ROWS):
        yield ",\n".join(events[start : start + _ROWS]).encode()


def exact_us(ns: pl.Expr) -> tuple[pl.Expr, ...]:
    """A time in us with all its digits, as parts of a text."""
    sign = pl.when(ns < 0).then(pl.lit("-")).otherwise(pl.lit(""))
    digits = (ns.abs() % 1000).cast(pl.String).str.zfill(3)
    return sign, ns.abs() // 1000, pl.lit("."), digits


def _events(trace: Trace, counter: str) -> pl.Series:
    """Counter events as JSON, one per change, in the tracks of the GPU's process."""
    if counter == QUEUE_LENGTH:
        series, key, value = queue_length(trace), "launches", pl.col("queue_length")
        name = pl.format("Queue length, stream {}", "stream")
    else:
        series, key = memory_bandwidth(trace), "GB/s"
        name, value = (
            pl.format("Bandwidth of {}", "copy_kind"),
            pl.col("bandwidth_bytes_per_s") / 1e9,
        )
    texts = {text: json.dumps(text) for text in series.select(name).to_series().unique()}
    return series.select(event=pl.concat_str(  # Kineto's process of a GPU event is the device
        pl.lit('{"ph": "C", "name": '), name.replace(old=texts), pl.lit(', "pid": '), "device",
        pl.lit(', "ts": '), *exact_us(pl.col("ts_ns")), pl.lit(f', "args": {{"{key}": '), value,
        pl.lit("}}"),
    )).to_series()  # fmt: skip


def gpu_counters(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Counters of the GPU over the trace, or over some of its steps.

    Returns:
        One row per device and counter: `device`, `name` (with its unit), `sample_count`,
        `mean_value`, `min_value`, `max_value`; no row where none were recorded.

    Source: PyTorch's CUPTI collector (`CuspyConfig`) writes them as `GPU N Counters`,
    Nsight Systems as GPU_METRICS.
    """
    value = pl.col("value")
    found = _within(trace, trace.gpu_counters, steps).drop_nulls("value")
    return found.group_by("device", pl.col("name").cast(pl.String)).agg(
        sample_count=pl.len().cast(pl.Int64), mean_value=value.mean(), min_value=value.min(),
        max_value=value.max(),
    ).sort("device", "name")  # fmt: skip


def graph_nodes(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Nodes of CUDA graphs that are no work of the GPU: it waits for what they do on the host.

    Returns:
        One row per device, kind and name, the longest first: `device`, `kind`
        (`graph_host_node`, `graph_event_node`), `name`, `count`, `sum_ns`, `mean_ns`, `max_ns`.

    Source: torch/profiler/_cuspy/trace.py.
    """
    found = _within(trace, trace.graph_nodes, steps)
    return _sum_up(found, "device", pl.col("category").cast(pl.String).alias("kind"))


def os_calls(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Calls of the operating system by name, those of threads that launch work first.

    Returns:
        One row per name: `is_launching` (whether its thread called the CUDA runtime), `name`,
        `count`, `sum_ns`, `mean_ns`, `max_ns`. Threads are summed: a call may take longer than the
        trace.

    Source: Nsight Systems, OSRT_API.
    """
    launching = trace.runtime.select("pid", "tid").unique().with_columns(is_launching=True)
    found = _within(trace, trace.os_calls, steps).join(launching, on=["pid", "tid"], how="left")
    return _sum_up(found, pl.col("is_launching").fill_null(value=False))


def _sum_up(found: pl.DataFrame, *keys: str | pl.Expr) -> pl.DataFrame:
    length, name = pl.col("dur_ns"), pl.col("name").cast(pl.String)
    sums = found.group_by(*keys, name).agg(
        count=pl.len().cast(pl.Int64), sum_ns=length.sum(), mean_ns=length.mean(),
        max_ns=length.max(),
    )  # fmt: skip
    first = sums.columns[0]
    return sums.sort(pl.col(first), "sum_ns", "name", descending=[first != "device", True, False])


def _within(trace: Trace, events: pl.DataFrame, steps: Steps) -> pl.DataFrame:
    if steps is None:
        return events
    return events.filter(pl.col("ts_ns").is_between(*step_window(trace, steps), closed="left"))
