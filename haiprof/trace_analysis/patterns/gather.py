"""The patterns of all ranks in one frame, with the throughput of their collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from haiprof.trace_analysis.arrival_lateness import arrival_lateness, who_is_late
from haiprof.trace_analysis.clocks import clock_offsets, host_offsets, on_one_clock
from haiprof.trace_analysis.matching import match_collectives
from haiprof.trace_analysis.patterns.evidence import Evidence
from haiprof.trace_analysis.patterns.kinds import COMMUNICATION
from haiprof.trace_analysis.patterns.transfer_types import transfer_type
from haiprof.trace_analysis.patterns.worker import RankFunctions, WorkerPattern
from haiprof.trace_analysis.skew import collective_waits, collectives

_RATE, _SPREAD = "bandwidth_bytes_per_s", "bandwidth_std_bytes_per_s"
_KEYS = ("rank", "type", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """What every rank's functions did."""

    functions: pl.DataFrame
    """`rank`, `worker.FUNCTIONS_SCHEMA`, and of communication `wait_ns`, `transfer_ns` and
    `missing`, the reason why these and its bandwidth are null."""
    totals: pl.DataFrame
    """One row per rank: columns of `WorkerPattern.totals`."""
    lateness: pl.DataFrame
    """From `arrival_lateness`: who begins collectives later than the others."""
    who_is_late: str
    """The same in words, or why it is not known."""
    signs: Mapping[int, Evidence]
    """By rank; empty where only the functions were kept."""
    moved_clocks: tuple[int, ...]
    """Ranks whose clock was corrected although the trace names no host: a link that is slow in
    every collective would look the same."""

    left_out: tuple[str, ...] = ()
    """What files of the ranks' functions have left out, in words; empty from traces."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have a trace."""
        return tuple(self.totals["rank"].to_list())


def gather_patterns(workers: Mapping[int, RankFunctions]) -> Patterns:
    """Puts the patterns of all ranks together.

    The functions of all ranks. A communication function's `bandwidth_bytes_per_s` is its bus
    bandwidth as nccl-tests defines it, over the transfer alone: from the arrival of the last
    rank to the rank's own end. Where the same collective is not found on all ranks of its
    group the transfer is not known, and `missing` says why.

    Source: nccl-tests doc/PERFORMANCE.md; `haiprof.trace_analysis.skew` for the transfer.
    """
    kernels = match_collectives(_with_rank({r: w.collectives for r, w in workers.items()}))
    totals = _with_rank({r: w.totals for r, w in workers.items()})
    hosts = totals.select("rank", "host")
    offsets = host_offsets(clock_offsets(kernels), hosts)
    waits = collective_waits(on_one_clock(kernels, offsets))
    lateness = arrival_lateness(waits, offsets)
    functions = _with_rank({r: w.functions for r, w in workers.items()})
    moved = functions.join(_throughput(waits), on=list(_KEYS), how="left", maintain_order="left")
    talks = pl.col("kind") == COMMUNICATION
    alone = pl.lit("no other rank's trace has the same collective")
    lacks = talks & pl.col("own_rate").is_null()
    return Patterns(
        functions=moved.with_columns(
            pl.when(talks).then("own_rate").otherwise(_RATE).alias(_RATE),
            pl.when(talks).then("own_spread").otherwise(_SPREAD).alias(_SPREAD),
            missing=pl.when(lacks).then(pl.coalesce("missing", alone)),
        ).drop("own_rate", "own_spread"),
        totals=totals,
        moved_clocks=()
        if not hosts["host"].null_count()
        else tuple(offsets.filter("corrected")["rank"].to_list()),
        lateness=lateness,
        who_is_late=who_is_late(lateness, waits),
        signs={
            rank: worker.signs
            for rank, worker in workers.items()
            if isinstance(worker, WorkerPattern)
        },
    )


def _with_rank(frames: Mapping[int, pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(
        frame.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
        for rank, frame in frames.items()
    )


def _throughput(waits: pl.DataFrame) -> pl.DataFrame:
    """Per rank and function: `wait_ns`, `transfer_ns`, bus bandwidth and its deviation."""
    bus, whole = pl.col("bus_bandwidth_bytes_per_s"), pl.col("transfer_ns")
    work = collectives(waits).select("collective", work=bus * whole)
    pairs = waits.select("kind", "name").unique()
    types = pairs.with_columns(
        type=pl.Series([transfer_type(*row) for row in pairs.rows()], dtype=pl.String)
    )
    rows = waits.join(work, on="collective", how="left").join(types, on=["kind", "name"])
    time = pl.col("transfer_ns")
    timed = time.is_not_null() & pl.col("work").is_not_null() & (time > 0)
    rate = pl.col("work") / time
    weighted = rows.with_columns(
        rate=pl.when(timed).then(rate),
        weight=pl.when(timed).then(time),
        missing=pl.coalesce(
            "missing", pl.when(pl.col("work").is_null()).then(pl.lit("sizes were not recorded"))
        ),
    )
    weight, value = pl.col("weight"), pl.col("rate")
    mean = (value * weight).sum() / weight.sum()
    square = (value * value * weight).sum() / weight.sum() - mean * mean
    known = weight.sum() > 0
    return weighted.group_by(_KEYS).agg(
        wait_ns=_sum("wait_ns"),
        transfer_ns=_sum("transfer_ns"),
        own_rate=pl.when(known).then(mean),
        own_spread=pl.when(known).then(square.clip(0).sqrt()),
        missing=pl.col("missing").drop_nulls().first(),
    )


def _sum(name: str) -> pl.Expr:
    """The sum; null where nothing is known."""
    return pl.when(pl.col(name).count() > 0).then(pl.col(name).sum())
