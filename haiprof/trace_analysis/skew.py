"""Collectives across ranks: waiting, transfer time and bandwidth of each."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.collectives import SYNCHRONISING
from haiprof.trace_analysis.other_groups import with_time_elsewhere

# Bus bandwidth over algorithm bandwidth, for n ranks. Source: nccl-tests, doc/PERFORMANCE.md.
_BUS_FACTOR = {
    "all_reduce": 2 * (pl.col("group_size") - 1) / pl.col("group_size"),
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"),
        (pl.col("group_size") - 1) / pl.col("group_size"),
    ),
    **dict.fromkeys(("broadcast", "reduce"), pl.lit(1.0)),
}

WAITS = ("wait_ns", "transfer_ns")


def collective_waits(kernels: pl.DataFrame) -> pl.DataFrame:
    """What each rank did in each collective.

    The same, matched ones only, with `group_size` (recorded; else the world's size where all
    ranks take part; else null), `rank_count` of those traced; `late_ns`, start less the first
    start; `wait_ns` until the last rank has started; `transfer_ns` from then to its own end;
    `elsewhere_ns` in collectives of other groups before it (`other_groups`);
    `arrived_last` (nobody where two tie); `missing`, the reason why the last three are null:
    a rank of the group without trace (the last one may be it), a kind that a rank may leave
    before others enter, or times that contradict each other.
    """
    inside = with_time_elsewhere(kernels).filter(pl.col("collective").is_not_null())
    count = pl.col("rank").n_unique().over("collective").cast(pl.Int64)
    world = pl.when(count == pl.col("world_size")).then("world_size")
    known = inside.with_columns(
        rank_count=count,
        group_size=pl.coalesce(pl.col("group_size").max().over("collective"), world),
    )
    last = pl.col("start_ns").max().over("collective")
    lasts = (pl.col("start_ns") == last).sum().over("collective")
    timed = known.with_columns(
        late_ns=pl.col("start_ns") - pl.col("start_ns").min().over("collective"),
        wait_ns=last - pl.col("start_ns"),
        transfer_ns=pl.col("end_ns") - last,
        arrived_last=(pl.col("start_ns") == last) & (lasts == 1),
        missing=_why_not(),
    )
    return timed.with_columns(
        pl.when(pl.col("missing").is_null()).then(pl.col(name)).alias(name)
        for name in (*WAITS, "arrived_last")
    ).sort("collective", "rank")


def _why_not() -> pl.Expr:
    """Why waiting and transfer cannot be separated; null where they can."""
    synchronising = pl.col("kind").is_in(SYNCHRONISING)
    ended = pl.col("end_ns").min().over("collective")
    possible = ended >= pl.col("start_ns").max().over("collective")
    return (
        pl.when(pl.col("group_size").is_null())
        .then(pl.lit("size of the group not recorded"))
        .when(pl.col("rank_count") < pl.col("group_size"))
        .then(pl.format("{} of {} ranks traced", "rank_count", "group_size"))
        .when(~synchronising)
        .then(pl.lit("ranks may leave before others enter"))
        .when(~possible)
        .then(pl.lit("a rank ends before another starts: clocks differ"))
    )


def collectives(waits: pl.DataFrame) -> pl.DataFrame:
    """One row per collective: skew, transfer, bytes and bandwidth.

    Source: nccl-tests doc/PERFORMANCE.md. Bytes: of one rank's buffer (all-reduce, broadcast,
    reduce), of all ranks' parts together (all-gather, reduce-scatter, gather, scatter), of what
    a rank sends (all-to-all; the mean over ranks where they differ, which nccl-tests has not).
    Bus bandwidth is that times 2(n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter,
    all-to-all, gather and scatter, 1 for broadcast and reduce. The time is the transfer's,
    since nccl-tests' ranks start together.
    """
    starts = pl.col("start_ns").sort()
    rows = (
        waits.with_columns(own_bytes=_own_bytes())
        .group_by("collective")
        .agg(
            pl.col("step", "kind", "process_group", "part", "sequence", "dtype").first(),
            pl.col("group_size").first(),
            pl.col("rank_count", "matched_by", "confidence", "missing").first(),
            start_ns=pl.col("start_ns").min(),
            start_skew_ns=pl.col("start_ns").max() - pl.col("start_ns").min(),
            last_rank=pl.col("rank").filter("arrived_last").first(),
            behind_second_ns=starts.last() - starts.slice(-2, 1).first(),
            transfer_ns=pl.col("transfer_ns").max(),
            bytes=pl.col("own_bytes").mean().round().cast(pl.Int64),
        )
    )
    known = pl.col("missing").is_null()
    rate = pl.when(pl.col("transfer_ns") > 0).then(pl.col("bytes") / (pl.col("transfer_ns") / 1e9))
    bus = pl.coalesce(
        pl.when(pl.col("kind") == kind).then(factor) for kind, factor in _BUS_FACTOR.items()
    )
    return (
        rows.with_columns(
            pl.when(known).then("behind_second_ns").alias("behind_second_ns"),
            rate.alias("algorithm_bandwidth_bytes_per_s"),
            (rate * bus).alias("bus_bandwidth_bytes_per_s"),
        )
        .select(pl.exclude("missing"), "missing")
        .sort("collective")
    )


def rank_collectives(kernels: pl.DataFrame) -> pl.DataFrame:
    """What each rank's collectives moved, as its own trace tells it."""
    keys = ("rank", "process_group", "part", "kind", "dtype", "group_size")
    length = pl.col("end_ns") - pl.col("start_ns")
    sized = pl.col("own_bytes").is_not_null()
    grouped = kernels.with_columns(own_bytes=_own_bytes()).group_by(keys).agg(
        collective_count=pl.len().cast(pl.Int64),
        sized_count=sized.sum().cast(pl.Int64),
        time_ns=length.sum(),
        bytes=pl.when(sized.any()).then(pl.col("own_bytes").sum()),
        sized_ns=length.filter(sized).sum(),
    )  # fmt: skip
    rate = pl.when(pl.col("sized_ns") > 0).then(pl.col("bytes") / (pl.col("sized_ns") / 1e9))
    bus = pl.coalesce(
        pl.when(pl.col("kind") == kind).then(factor) for kind, factor in _BUS_FACTOR.items()
    )
    return (
        grouped.with_columns(
            rate.alias("algorithm_bandwidth_bytes_per_s"),
            (rate * bus).alias("bus_bandwidth_bytes_per_s"),
        )
        .drop("sized_ns")
        .sort("rank", -pl.col("time_ns"), "process_group", "kind", nulls_last=True)
    )


def _own_bytes() -> pl.Expr:
    """Bytes of the collective as nccl-tests counts them, from one rank's counts."""
    sent, received = pl.col("in_count"), pl.col("out_count")
    size, ranks = pl.col("element_bytes"), pl.col("group_size")
    everything = {
        "all_reduce": pl.coalesce(sent, received),
        "broadcast": pl.coalesce(sent, received),
        "reduce": pl.coalesce(sent, received),
        "all_to_all": sent,
        "all_gather": pl.coalesce(received, sent * ranks),
        "reduce_scatter": pl.coalesce(sent, received * ranks),
        "gather": sent * ranks,
        "scatter": received * ranks,
    }
    return pl.coalesce(
        pl.when(pl.col("kind") == kind).then(count * size) for kind, count in everything.items()
    )


def process_groups(rows: pl.DataFrame) -> pl.DataFrame:
    """Bandwidth by process group and kind."""
    timed = pl.col("algorithm_bandwidth_bytes_per_s").is_not_null()
    grouped = rows.group_by("process_group", "part", "kind", "group_size").agg(
        pl.len().cast(pl.Int64).alias("collective_count"),
        timed.sum().cast(pl.Int64).alias("timed_count"),
        *(_sum_of(name, timed) for name in ("bytes", "transfer_ns")),
        (pl.col("bus_bandwidth_bytes_per_s") / pl.col("algorithm_bandwidth_bytes_per_s"))
        .drop_nulls()
        .first()
        .alias("factor"),
    )
    rate = pl.col("bytes") / (pl.col("transfer_ns") / 1e9)
    return (
        grouped.with_columns(
            rate.alias("algorithm_bandwidth_bytes_per_s"),
            (rate * pl.col("factor")).alias("bus_bandwidth_bytes_per_s"),
        )
        .drop("factor")
        .sort("process_group", "kind", "group_size")
    )


def _sum_of(name: str, which: pl.Expr) -> pl.Expr:
    """The sum; null where there is no value."""
    found = pl.col(name).filter(which)
    return pl.when(found.len() > 0).then(found.sum()).alias(name)
