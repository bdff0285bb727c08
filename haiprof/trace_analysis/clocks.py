"""Clock offsets of the ranks of traces, and how sure they are.

`alignment` corrects the clocks of a merged trace by them, `host_offsets` those of function
patterns.
"""

from __future__ import annotations

from typing import TypeVar

import polars as pl

from haiprof.run_analysis.clock_offsets import estimate_offsets
from haiprof.trace_analysis.collectives import SYNCHRONISING

CLOCKS_AGREE_NS = 100_000
"""A smaller offset is not corrected: the ranks of a ring end tens of us apart on one clock."""
SURE_FACTOR = 5
"""An offset is corrected only where it is this many times its own spread."""
MAD_TO_SIGMA = 1.4826
_Ns = TypeVar("_Ns", int, pl.Expr)


def clock_offsets(kernels: pl.DataFrame) -> pl.DataFrame:
    """Estimates how far each rank's clock is ahead of the others.

    Offsets of ranks that share no collective, not even through other ranks, cannot be compared.
    """
    ends = kernels.filter(
        pl.col("collective").is_not_null() & pl.col("kind").is_in(SYNCHRONISING)
    ).select("end_ns", clock="rank", event="collective")
    rows = estimate_offsets(ends).select(
        pl.col("offset_ns").round().cast(pl.Int64),
        rank="clock",
        collective_count="event_count",
        residual_ns=(pl.col("mad_ns") * MAD_TO_SIGMA).round().cast(pl.Int64),
    )
    everyone = kernels.select("rank").unique().join(rows, on="rank", how="left")
    sure = is_sure(pl.col("offset_ns"), pl.col("residual_ns"))
    return everyone.select(
        "rank",
        pl.col("collective_count").fill_null(0),
        "offset_ns",
        "residual_ns",
        corrected=(sure & (pl.col("collective_count") > 1)).fill_null(value=False),
    ).sort("rank")


def is_sure(offset_ns: _Ns, residual_ns: _Ns) -> _Ns:
    """Whether an offset is one of the clocks: beyond 100 us and five times its own spread."""
    size = abs(offset_ns)
    return (size > CLOCKS_AGREE_NS) & (size > SURE_FACTOR * residual_ns)


def host_offsets(offsets: pl.DataFrame, hosts: pl.DataFrame) -> pl.DataFrame:
    """Offsets of clocks where hosts are known: ranks of one host have one clock."""
    if hosts["host"].null_count():
        return offsets
    known = offsets.join(hosts, on="rank", how="left")
    of_host = pl.col("offset_ns").median().over("host")
    apart = (of_host - of_host.median()).round().cast(pl.Int64)
    sure = pl.col("corrected").any().over("host") & (apart.abs() > CLOCKS_AGREE_NS)
    return known.with_columns(offset_ns=apart, corrected=sure.fill_null(value=False)).drop("host")


def on_one_clock(kernels: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """Subtracts the corrected offsets from `start_ns` and `end_ns`."""
    moved = pl.when("corrected").then("offset_ns").otherwise(0).fill_null(0)
    joined = kernels.join(offsets.select("rank", moved=moved), on="rank", how="left")
    return joined.with_columns(
        start_ns=pl.col("start_ns") - pl.col("moved"), end_ns=pl.col("end_ns") - pl.col("moved")
    ).drop("moved")
