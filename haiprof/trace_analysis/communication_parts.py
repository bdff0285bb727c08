"""Communication by the part of the job that it serves: how long, what is exposed, who waits."""

from __future__ import annotations

import polars as pl

from haiprof.base.intervals import difference, total, union
from haiprof.trace_analysis.classify import COMPUTATION, with_kind
from haiprof.trace_analysis.collectives import clock_base_ns, collective_kernels
from haiprof.trace_analysis.temporal import Steps, gpu_events, union_of
from haiprof.trace_format.kineto.rank_trace import Trace

PARTS_SCHEMA = {
    "device": pl.Int64,
    "part": pl.String,
    "group_count": pl.Int64,
    "collective_count": pl.Int64,
    "time_ns": pl.Int64,
    "exposed_ns": pl.Int64,
    "exposed_ratio": pl.Float64,
}


def communication_parts(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """How long each part of the job communicates on a rank, and what of it computing hides.

    Exposed time of the pipeline is its bubble together with transfers that nothing hides: a
    stage waits in the kernel that receives, and no trace of one stage tells the two apart.

    Source: pipeline bubble, Narayanan et al., "Efficient Large-Scale Language Model Training
    on GPU Clusters Using Megatron-LM" (SC 2021), section 2.2, where transfers take no time.
    """
    talking = collective_kernels(trace, steps=steps)
    base = clock_base_ns(trace)
    gpu = with_kind(gpu_events(trace, steps))
    rows: list[tuple[object, ...]] = []
    for (device, part), own in talking.group_by("device", "part", maintain_order=True):
        ran = union(own["start_ns"].to_numpy() - base, own["end_ns"].to_numpy() - base)
        on_device = gpu.filter(pl.col("device") == device)
        groups = own["process_group"].drop_nulls().n_unique()
        row = (device, part, groups, own.height, total(ran))
        if on_device.is_empty():
            rows.append((*row, None, None))
            continue
        computing = union_of(on_device.filter(pl.col("kind") == COMPUTATION))
        exposed = total(difference(ran, computing))
        span = _span_ns(on_device)
        rows.append((*row, exposed, exposed / span if span else None))
    found = pl.DataFrame(rows, schema=PARTS_SCHEMA, orient="row")
    return found.sort("device", -pl.col("time_ns"), "part", nulls_last=True)


def waits_by_part(parts: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """With how long each rank waited in the collectives of each part.

    The same with `wait_ns`, the sum over the collectives whose arrivals are known, and
    `waited_count` of those; null and 0 where none is.
    """
    known = waits.filter(pl.col("missing").is_null())
    keys = ["rank", "device", "part"]
    summed = known.group_by(keys).agg(pl.col("wait_ns").sum(), waited_count=pl.len().cast(pl.Int64))
    joined = parts.join(summed, on=keys, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(pl.col("waited_count").fill_null(0))


def _span_ns(events: pl.DataFrame) -> int:
    ends = events["ts_ns"] + events["dur_ns"]
    return int(ends.max() or 0) - int(events["ts_ns"].min() or 0)  # type: ignore[arg-type]
