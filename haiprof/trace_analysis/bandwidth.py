"""Memory bandwidth: bytes per second of each kind of copy, over time and in total."""

from __future__ import annotations

import polars as pl

from haiprof.base.intervals import total
from haiprof.trace_analysis.classify import MEMORY_CATEGORIES
from haiprof.trace_analysis.temporal import Steps, gpu_events, union_of
from haiprof.trace_format.kineto.rank_trace import Trace

_KIND = ("device", "copy_kind")


def _copies(trace: Trace, steps: Steps) -> pl.DataFrame:
    """Copies and sets with `copy_kind` and their own `bandwidth_bytes_per_s`, null if unknown.

    `Memcpy HtoD (Pinned -> Device)` is of the kind `Memcpy HtoD`, as in HTA.
    """
    gpu = gpu_events(trace, steps)
    copies = gpu.filter(pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES))
    own = pl.when(pl.col("dur_ns") > 0).then(pl.col("bytes") / pl.col("dur_ns") * 1e9)
    return copies.select(
        "device",
        "ts_ns",
        "dur_ns",
        "bytes",
        copy_kind=pl.col("name").cast(pl.String).str.split(" (").list.first().str.strip_chars(),
        bandwidth_bytes_per_s=pl.coalesce("bandwidth_bytes_per_s", own),
    )


def memory_bandwidth(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """The bandwidth of each kind of copy over time; copies at the same time add up.

    Source: HTA get_memory_bw_time_series. HTA stretches copies of 0 us to 1 us; its running
    sums of floats leave residues such as 1e-13 where nothing is copied, here that is 0.
    """
    known = pl.col("bandwidth_bytes_per_s").is_not_null() & (pl.col("dur_ns") > 0)
    copies = _copies(trace, steps).filter(known)
    begin, rate = pl.col("ts_ns"), pl.col("bandwidth_bytes_per_s")
    changes = pl.concat(
        [
            copies.select(*_KIND, ts_ns=begin, by=rate, count=pl.lit(1)),
            copies.select(*_KIND, ts_ns=begin + pl.col("dur_ns"), by=-rate, count=pl.lit(-1)),
        ]
    ).sort(*_KIND, "ts_ns", "count")  # a copy no longer runs at its end
    sums = changes.with_columns(pl.col("by", "count").cum_sum().over(_KIND))
    idle = pl.col("count") == 0
    residue = pl.when(idle).then("by").forward_fill().over(_KIND).fill_null(0.0)
    level = pl.when(idle).then(0.0).otherwise(pl.col("by") - residue)
    return sums.select(*_KIND, "ts_ns", bandwidth_bytes_per_s=level)


def memory_bandwidth_summary(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """How much each kind of copy moved, and how fast.

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
    spread = _spread(memory_bandwidth(trace, steps=steps))
    return (
        moved.with_columns(mean_bandwidth_bytes_per_s=mean)
        .join(spread, on=_KIND, how="left")
        .with_columns(pl.col("change_count").fill_null(0))
        .sort(_KIND)
    )


def _spread(series: pl.DataFrame) -> pl.DataFrame:
    rate = pl.col("bandwidth_bytes_per_s")
    return (
        series.filter(rate != 0)
        .group_by(_KIND)
        .agg(
            change_count=pl.len().cast(pl.Int64),
            change_mean=rate.mean(),
            change_std=rate.std(),
            change_min=rate.min(),
            change_q25=rate.quantile(0.25, "linear"),
            change_q50=rate.quantile(0.5, "linear"),
            change_q75=rate.quantile(0.75, "linear"),
            change_max=rate.max(),
        )
    )
