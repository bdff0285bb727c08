"""Collectives matched across ranks, and one clock for the ranks' traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from haiprof.base.medians import MAD_TO_SIGMA
from haiprof.base.units import duration_text
from haiprof.trace_analysis.collectives import (
    KERNELS_SCHEMA,
    ON_CPU,
    SYNCHRONISING,
    collective_kernels,
)
from haiprof.trace_analysis.device_time import with_rank
from haiprof.trace_analysis.pool import Pool, Progress, default_pool
from haiprof.trace_format.clock_offsets import estimate_offsets

if TYPE_CHECKING:  # it is what merging traces needs
    from haiprof.trace_format.merge_inputs import TraceInput

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
    # Communication streams by their first kernel: numbers differ between ranks, order does not.
    place = ["rank", "device", "stream"]
    known = kernels.filter(pl.col("kind") != "other")
    streams = known.group_by(place).agg(pl.col("start_ns").min().alias("first"))
    role = pl.col("first").rank("ordinal").over("rank").alias("role")
    roles = known.join(streams.select(*place, role), on=place).sort("rank", "start_ns", "event")
    is_numbered = pl.col("sequence").is_not_null() & pl.col("process_group").is_not_null()
    numbered = _add_key(roles.filter(is_numbered), [*_GROUP, "sequence"], BY_SEQUENCE)
    rest = roles.filter(~is_numbered)
    # In order where every rank has as many of the group in the step.
    within = [*_GROUP, "role", "step"]
    counts = rest.group_by("rank", *within).len("count").group_by(within)
    same = counts.agg(pl.col("count").n_unique().alias("different")).filter(different=1)
    even = rest.join(same, on=within, how="semi", nulls_equal=True)
    ordered = _in_possible_order(_add_key(even, within, BY_ORDER))
    left = rest.join(ordered.select("rank", "event"), on=["rank", "event"], how="anti")
    ended = _by_end(left)
    found = pl.concat([numbered, ordered, ended], how="diagonal").select(
        "rank", "event", "key", "matched_by"
    )
    joined = kernels.join(found, on=["rank", "event"], how="left")
    # Numbers in place of keys; null for keys of a single rank.
    several = pl.col("rank").n_unique().over("key") > 1
    keys = (
        joined.filter(pl.col("key").is_not_null() & several)
        .group_by("key")
        .agg(pl.col("start_ns").min())
        .sort("start_ns", "key")
        .with_row_index("collective")
        .select("key", pl.col("collective").cast(pl.Int64))
    )
    return _with_confidence(joined.join(keys, on="key", how="left").drop("key")).sort(
        "start_ns", "rank"
    )


def _add_key(kernels: pl.DataFrame, columns: list[str], matched_by: str) -> pl.DataFrame:
    """Adds a text key: the columns, and the number of the kernel among those with the same key."""
    nth = pl.col("event").cum_count().over("rank", *columns)
    parts = [pl.col(name).cast(pl.String).fill_null("") for name in columns]
    return kernels.with_columns(
        key=pl.concat_str(pl.lit(matched_by), *parts, nth.cast(pl.String), separator="|"),
        matched_by=pl.lit(matched_by),
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
    together = _by_end(counted).filter(everyone).select("rank", "event", together=True)
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


CLOCKS_AGREE_NS = 100_000
"""A smaller offset is not corrected: the ranks of a ring end tens of us apart on one clock."""
SURE_FACTOR = 5
"""An offset is corrected only where it is this many times its own spread."""
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


MOVED = "moved by collectives"
CONFIRMED = "wall clock, confirmed by collectives"
UNCHECKED = "wall clock"
UNKNOWN = "no wall clock: placed at the first start of the others"
ASSUMED = "no wall clock in any trace: times as recorded"
_WITHOUT = (UNKNOWN, ASSUMED)

RULE = (
    f"a host's clock is moved where the ends of collectives show it off by more than "
    f"{CLOCKS_AGREE_NS // 1000} µs and {SURE_FACTOR} times the spread; ranks of one host are moved "
    "together, unless one of them differs from its host by as much"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClock:
    """By how much one rank's clock is corrected, and on which evidence."""

    rank: int
    method: str
    """`MOVED`, `CONFIRMED`, `UNCHECKED`, `UNKNOWN` or `ASSUMED`."""
    moved_ns: int
    """Subtracted from its times."""
    offset_ns: int | None
    """How far it is ahead by the ends of collectives; None without matched collectives."""
    residual_ns: int | None
    """The spread of that over the collectives (1.48 MAD): a smaller offset is noise."""
    collective_count: int
    """Matched collectives that it takes part in."""


def rank_clocks(
    inputs: Mapping[int, TraceInput],
    *,
    by_collectives: bool = True,
    pool: Pool | None = None,
    progress: Progress | None = None,
) -> list[RankClock]:
    """Chooses the clock correction of each rank."""
    timed = {rank: each for rank, each in inputs.items() if each.has_wall_clock}
    comparable = timed or inputs
    offsets = {}
    if by_collectives and len(comparable) > 1:
        paths: Sequence[Path] = [each.path for each in comparable.values()]
        found = (pool or default_pool(paths)).map(collective_kernels, paths, {}, progress)
        empty = [(0, pl.DataFrame(schema=KERNELS_SCHEMA))]
        kernels = with_rank([*empty, *zip(comparable, found, strict=True)])
        on_gpus = kernels.filter(pl.col("device").ne_missing(ON_CPU))  # gloo's end them ms apart
        rows = clock_offsets(match_collectives(on_gpus)).iter_rows(named=True)
        offsets = {row["rank"]: row for row in rows}
    moved = _corrections(offsets, {rank: each.host for rank, each in comparable.items()})
    start_ns = min((each.base_ns + (each.first_ns or 0) for each in timed.values()), default=0)
    clocks = []
    for rank, each in inputs.items():
        row = offsets.get(rank, {})
        count = row.get("collective_count", 0)
        method = MOVED if moved.get(rank) else CONFIRMED if count else UNCHECKED
        shift = moved.get(rank, 0)
        if rank not in comparable:
            method, shift = UNKNOWN, each.base_ns + (each.first_ns or 0) - start_ns
        elif not timed and method == UNCHECKED:
            method = ASSUMED
        clocks.append(RankClock(
            rank=rank, method=method, moved_ns=shift, offset_ns=row.get("offset_ns"),
            residual_ns=row.get("residual_ns"), collective_count=count,
        ))  # fmt: skip
    return clocks


def clock_notes(inputs: Mapping[int, TraceInput], clocks: Sequence[RankClock]) -> list[str]:
    """Notes on the clocks, for people."""
    found = [f"rank {each.rank}: {each.method}" for each in clocks if each.method in _WITHOUT]
    found += [
        f"rank {each.rank}: its clock was ahead by {duration_text(each.moved_ns)}, by "
        f"{each.collective_count} collectives; its times are moved back"
        for each in clocks
        if each.method == MOVED
    ]
    if len(clocks) > 1 and any(each.method == UNCHECKED for each in clocks):
        hosts = {each.host for each in inputs.values()}
        shared = len(hosts) == 1 and None not in hosts
        where = "of one host, which its ranks share" if shared else "as the hosts have them"
        unchecked = [str(each.rank) for each in clocks if each.method == UNCHECKED]
        ranks = "all ranks" if len(unchecked) == len(clocks) else f"ranks {', '.join(unchecked)}"
        found.append(f"{ranks}: not compared by collectives; wall clocks {where}")
    return found


def _corrections(
    offsets: Mapping[int, Mapping[str, int]], hosts: Mapping[int, str | None]
) -> dict[int, int]:
    """What is subtracted from each rank's times, by `RULE`."""
    known = [rank for rank, row in offsets.items() if row["offset_ns"] is not None]
    groups: dict[str | int, list[int]] = {}
    for rank in known:
        groups.setdefault(hosts.get(rank) or rank, []).append(rank)
    together: dict[int, int] = {}
    for ranks in groups.values():
        found = round(median(offsets[rank]["offset_ns"] for rank in ranks))
        spread = max(offsets[rank]["residual_ns"] for rank in ranks)
        several = min(offsets[rank]["collective_count"] for rank in ranks) > 1
        together |= dict.fromkeys(ranks, found if several and is_sure(found, spread) else 0)
    moved = {}
    for rank in known:
        apart = offsets[rank]["offset_ns"] - together[rank]
        several = offsets[rank]["collective_count"] > 1
        own = several and is_sure(apart, offsets[rank]["residual_ns"])
        moved[rank] = offsets[rank]["offset_ns"] if own else together[rank]
    return moved
