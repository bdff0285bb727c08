"""What a trace records beside work and launches: GPU counters, graph nodes, operating system."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_format.kineto.rank_trace import Trace


def gpu_counters(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Counters of the GPU over the trace, or over some of its steps.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all samples.

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

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.

    Returns:
        One row per device, kind and name, the longest first: `device`, `kind`
        (`graph_host_node`, `graph_event_node`), `name`, `count`, `sum_ns`, `mean_ns`, `max_ns`.

    Source: torch/profiler/_cuspy/trace.py.
    """
    found = _within(trace, trace.graph_nodes, steps)
    return _sum_up(found, "device", pl.col("category").cast(pl.String).alias("kind"))


def os_calls(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Calls of the operating system by name, those of threads that launch work first.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.

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
    own = trace.steps.filter(pl.col("step").is_between(*steps, closed="left"))
    first, last = own["start_ns"].min(), own["end_ns"].max()
    return events.filter(pl.col("ts_ns").is_between(first, last, closed="left"))
