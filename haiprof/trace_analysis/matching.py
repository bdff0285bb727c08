"""Matches collectives across ranks: by sequence number, else by order, else by end."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.collectives import SYNCHRONISING

BY_SEQUENCE, BY_ORDER, BY_END = "sequence", "order", "end"
CONFIDENCE = {BY_SEQUENCE: 1.0, BY_ORDER: 0.9, BY_END: 0.7}
SIZES_DIFFER = 0.5
"""Confidence in collectives of one number whose element counts or types contradict each other."""
SAME_END_NS = 100_000
"""Ends this close on one clock may be one collective's; ranks of a ring end within tens of us."""
ORDER_HOLDS_RATIO = 0.9
"""Order is accepted if at least this share of its collectives is possible in time."""
ONE_CLOCK_RATIO = 0.5
"""Clocks agree where at least this share of a group's kernels end together on all its ranks."""

_GROUP = ("kind", "process_group", "group_ranks")


def match_collectives(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels of all ranks with the collective that each is part of.

    - `sequence` (1.0; 0.5 where sizes contradict): process group, its ranks, kind and number
    within the group, which PyTorch records since 2.3.
    - `order` (0.9): the n-th of its kind, group and communication stream in the same profiler
    step, where every rank has as many, and nearly all of them overlap in time, as they
    are or once the hosts' clocks are compared by the collectives' ends.
    - `end` (0.7): ends at the same time, where order fails: windows that differ, or kernels
    missing from a trace. Only where clocks agree.
    """
    roles = _with_role(kernels.filter(pl.col("kind") != "other"))
    numbered = _add_key(roles.filter(_has_sequence()), [*_GROUP, "sequence"], BY_SEQUENCE)
    rest = roles.filter(~_has_sequence())
    ordered = _in_possible_order(_add_key(_same_counts(rest), [*_GROUP, "role", "step"], BY_ORDER))
    left = rest.join(ordered.select("rank", "event"), on=["rank", "event"], how="anti")
    ended = _by_end(left)
    found = pl.concat([numbered, ordered, ended], how="diagonal").select(
        "rank", "event", "key", "matched_by"
    )
    joined = kernels.join(found, on=["rank", "event"], how="left")
    return _with_confidence(_number(joined)).sort("start_ns", "rank")


def _has_sequence() -> pl.Expr:
    return pl.col("sequence").is_not_null() & pl.col("process_group").is_not_null()


def _with_role(kernels: pl.DataFrame) -> pl.DataFrame:
    """Communication streams by their first kernel: numbers differ between ranks, order does not."""
    streams = kernels.group_by("rank", "device", "stream").agg(
        pl.col("start_ns").min().alias("first")
    )
    role = pl.col("first").rank("ordinal").over("rank").alias("role")
    return kernels.join(
        streams.select("rank", "device", "stream", role), on=["rank", "device", "stream"]
    ).sort("rank", "start_ns", "event")


def _add_key(kernels: pl.DataFrame, columns: list[str], matched_by: str) -> pl.DataFrame:
    """Adds a text key: the columns, and the number of the kernel among those with the same key."""
    nth = pl.col("event").cum_count().over("rank", *columns)
    parts = [pl.col(name).cast(pl.String).fill_null("") for name in columns]
    return kernels.with_columns(
        key=pl.concat_str(pl.lit(matched_by), *parts, nth.cast(pl.String), separator="|"),
        matched_by=pl.lit(matched_by),
    )


def _same_counts(kernels: pl.DataFrame) -> pl.DataFrame:
    """Only groups of which every rank has as many in the step."""
    within = [*_GROUP, "role", "step"]
    counts = kernels.group_by("rank", *within).len("count")
    same = counts.group_by(within).agg(pl.col("count").n_unique().alias("different"))
    return kernels.join(
        same.filter(pl.col("different") == 1), on=within, how="semi", nulls_equal=True
    )


def _in_possible_order(kernels: pl.DataFrame) -> pl.DataFrame:
    """Drops groups whose order contradicts time: no rank may end before the last one starts.

    Of the times as they are and those with clocks compared by ends, the better ones count: ranks of
    gloo on one host end a collective ms apart, and what that says of their clocks is wrong.
    """
    # Column by column: polars evaluates a window inside of another one within the outer's groups.
    first = pl.col("end_ns").min()
    timed = kernels.with_columns(start=pl.col("start_ns") - first, end=pl.col("end_ns") - first)
    timed = timed.with_columns(clock=pl.col("end") - pl.col("end").median().over("key"))
    off = pl.when(~pl.col("one_clock")).then(pl.col("clock")).otherwise(0).median()
    timed = timed.join(_one_clock(kernels), on=["rank", "event"]).with_columns(off=off.over("rank"))
    judged = timed.with_columns(plain=_is_possible(pl.lit(0)), moved=_is_possible(pl.col("off")))
    shares = judged.with_columns(
        pl.col(name).mean().over(*_GROUP, "role").alias(f"{name}_share")
        for name in ("plain", "moved")
    )
    as_they_are = pl.col("plain_share") >= pl.col("moved_share")
    possible = pl.when(as_they_are).then("plain").otherwise("moved")
    share = pl.max_horizontal("plain_share", "moved_share")
    return shares.filter((share >= ORDER_HOLDS_RATIO) & possible).select(kernels.columns)


def _is_possible(off: pl.Expr) -> pl.Expr:
    """Whether the last rank starts before the first one ends, with clocks ahead by `off`."""
    last_start = (pl.col("start") - off).max().over("key")
    first_end = (pl.col("end") - off).min().over("key")
    return (last_start <= first_end) | ~pl.col("kind").is_in(SYNCHRONISING)


def _one_clock(kernels: pl.DataFrame) -> pl.DataFrame:
    """Whether clocks agree uncorrected: most kernels of the group end together on all its ranks.

    A clock ahead by a whole period of the job would look like a rank without its first kernel.
    """
    counted = kernels.with_columns(group_rank_count=pl.col("rank").n_unique().over(*_GROUP))
    everyone = pl.col("rank").n_unique().over("key") == pl.col("group_rank_count")
    together = _by_end(counted).filter(everyone).select("rank", "event", together=pl.lit(1))
    joined = counted.join(together, on=["rank", "event"], how="left")
    share = pl.col("together").is_not_null().mean().over(*_GROUP, "role")
    return joined.select("rank", "event", one_clock=share >= ONE_CLOCK_RATIO)


def _by_end(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels of different ranks that end together."""
    synchronising = kernels.filter(pl.col("kind").is_in(SYNCHRONISING))
    apart = (pl.col("end_ns").diff() > SAME_END_NS).fill_null(value=True)
    cluster = apart.cum_sum().over(*_GROUP, order_by="end_ns")
    found = synchronising.sort("end_ns").with_columns(
        key=pl.concat_str(
            pl.lit(BY_END),
            *(pl.col(name).fill_null("") for name in _GROUP),
            cluster.cast(pl.String),
            separator="|",
        ),
        matched_by=pl.lit(BY_END),
    )
    return found.filter(pl.col("rank").is_unique().all().over("key"))


def _number(kernels: pl.DataFrame) -> pl.DataFrame:
    """Numbers in place of keys; null for keys of a single rank."""
    several = pl.col("rank").n_unique().over("key") > 1
    keys = (
        kernels.filter(pl.col("key").is_not_null() & several)
        .group_by("key")
        .agg(pl.col("start_ns").min())
        .sort("start_ns", "key")
        .with_row_index("collective")
        .select("key", pl.col("collective").cast(pl.Int64))
    )
    return kernels.join(keys, on="key", how="left").drop("key")


def _with_confidence(kernels: pl.DataFrame) -> pl.DataFrame:
    """Confidence of the match, null without one."""
    uneven = pl.col("kind") == "all_to_all"  # each rank sends what it has
    differ = pl.any_horizontal(
        pl.col(name).n_unique().over("collective") > 1
        for name in ("dtype", "in_count", "out_count")
    )
    known = pl.col("matched_by").replace_strict(CONFIDENCE, default=None, return_dtype=pl.Float64)
    contradicted = (pl.col("matched_by") == BY_SEQUENCE) & differ & ~uneven
    return kernels.with_columns(
        matched_by=pl.when(pl.col("collective").is_not_null()).then("matched_by"),
        confidence=pl.when(pl.col("collective").is_not_null()).then(
            pl.when(contradicted).then(SIZES_DIFFER).otherwise(known)
        ),
    )
