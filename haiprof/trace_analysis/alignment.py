"""One clock for the traces of all ranks: by their collectives' ends, else by wall clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import polars as pl

from haiprof.base.units import duration_text
from haiprof.trace_analysis.clocks import CLOCKS_AGREE_NS, SURE_FACTOR, clock_offsets, is_sure
from haiprof.trace_analysis.collectives import KERNELS_SCHEMA, ON_CPU, collective_kernels
from haiprof.trace_analysis.matching import match_collectives
from haiprof.trace_analysis.pool import Pool, Progress, default_pool
from haiprof.trace_format.merge.inputs import TraceInput

MOVED = "moved by collectives"
CONFIRMED = "wall clock, confirmed by collectives"
UNCHECKED = "wall clock"
UNKNOWN = "no wall clock: placed at the first start of the others"
ASSUMED = "no wall clock in any trace: times as recorded"
_WITHOUT = (UNKNOWN, ASSUMED)

RULE = (
    f"a host's clock is moved where the ends of collectives show it off by more than "
    f"{CLOCKS_AGREE_NS // 1000} us and {SURE_FACTOR} times the spread; ranks of one host are moved "
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
        found = _offsets(comparable, pool, progress)
        offsets = {row["rank"]: row for row in found.iter_rows(named=True)}
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
        clocks.append(
            RankClock(
                rank=rank,
                method=method,
                moved_ns=shift,
                offset_ns=row.get("offset_ns"),
                residual_ns=row.get("residual_ns"),
                collective_count=count,
            )
        )
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


def _offsets(
    inputs: Mapping[int, TraceInput], pool: Pool | None, progress: Progress | None
) -> pl.DataFrame:
    paths: Sequence[Path] = [each.path for each in inputs.values()]
    found = (pool or default_pool(paths)).map(collective_kernels, paths, {}, progress)
    frames = [
        rows.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
        for rank, rows in zip(inputs, found, strict=True)
    ]
    empty = pl.DataFrame(schema={"rank": pl.Int64, **KERNELS_SCHEMA})
    on_gpus = pl.concat([empty, *frames]).filter(pl.col("device").ne_missing(ON_CPU))
    return clock_offsets(match_collectives(on_gpus))  # gloo's threads end them ms apart


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
