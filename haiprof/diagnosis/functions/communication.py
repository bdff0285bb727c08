"""P7, communication by type: how long, how fast, and the rank whose link or arrival differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.units import ranks_text, rate_text, ratio_text
from haiprof.diagnosis.functions.distance import FUNCTION, differs, with_distance
from haiprof.diagnosis.functions.report import (
    ABNORMAL,
    FUNCTIONS,
    RANKS,
    FunctionReport,
    over_ranks,
    too_few_ranks,
)
from haiprof.trace_analysis.kernel_names import COMMUNICATION

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

TITLE = "Communication"
SLOW_LINK, UNSTEADY = "slow link", "unsteady link"
UNKNOWN, NETWORK, ONE_HOST = "unknown", "network", "within one host"
_RATE, _SPREAD = "bandwidth_bytes_per_s", "bandwidth_std_bytes_per_s"
_BETA = "bottleneck_ratio"
_NO_LINK = (
    "NVLink or PCIe: a trace does not name the link of a collective; `nvidia-smi topo -m` does, "
    "and `haiprof overview` shows the bytes of both"
)


def communication_report(patterns: Patterns) -> FunctionReport:
    """Communication by type and kernel.

    Args:
        patterns: Of all ranks.

    Returns:
        `facts`: `link` (`network` between hosts, `within one host`, or `unknown`), `link_why`,
        `slow_links` and `late` (ranks; see `arrival_lateness`). Tables: `functions`, one row per
        type and kernel with the `normal_rank` (the nearest to all others), `different_count` (ranks
        that are far from it), `bottleneck_ratio` as a mean over all ranks, `bandwidth_bytes_per_s`
        and its deviation over those that run it;
        `abnormal`, with `why`: `slow link` (transfers slower than the others'), `unsteady link`
        (slower, and their pace varies more); `ranks`, every rank's row.

        Source: PerfTracker (seed 001), Communication; EROICA for what low throughput with a low or
        a high deviation means. Bandwidth is nccl-tests' bus bandwidth of the transfer alone; its
        share of the link's peak is not known. In a ring all ranks are as slow as the slowest link.
    """
    functions = patterns.functions.filter(pl.col("kind") == COMMUNICATION)
    judged = with_distance(functions, FUNCTION, (_BETA, _RATE, _SPREAD), {_SPREAD: _RATE})
    abnormal = _abnormal(judged)
    link, why = link_of(patterns)
    return FunctionReport(
        kind=COMMUNICATION,
        title=TITLE,
        tables={
            ABNORMAL: abnormal,
            FUNCTIONS: _types(judged, len(patterns.ranks)),
            RANKS: _ranks(functions),
        },
        facts={
            "link": link,
            "link_why": why,
            "slow_links": sorted(set(abnormal["rank"].to_list())),
            "late": sorted(patterns.lateness.filter("is_late")["rank"].to_list()),
        },
        meaning=tuple(_meaning(abnormal, judged, patterns)),
        missing=_missing(patterns, functions, why),
    )


def link_of(patterns: Patterns) -> tuple[str, str | None]:
    """What carries the ranks' communication where that can be known, or why it cannot."""
    hosts = patterns.totals["host"]
    if hosts.null_count() or hosts.is_empty():
        return UNKNOWN, "the traces do not say on which hosts the ranks ran; haiprof's do"
    if hosts.n_unique() == 1:
        return ONE_HOST, _NO_LINK
    if hosts.n_unique() == len(hosts):
        return NETWORK, None
    return UNKNOWN, "several hosts with several ranks each: both the network and links within hosts"


def _abnormal(judged: pl.DataFrame) -> pl.DataFrame:
    slow = differs(_RATE, high=False).fill_null(value=False)
    own, usual = (
        pl.col(_SPREAD) / pl.col(_RATE),
        pl.col(f"{_SPREAD}_median") / pl.col(f"{_RATE}_median"),
    )
    unsteady = (own > 2 * usual).fill_null(value=False)
    why = pl.when(slow & unsteady).then(pl.lit(UNSTEADY)).when(slow).then(pl.lit(SLOW_LINK))
    return (
        judged.filter("is_far")
        .with_columns(why=why)
        .drop_nulls("why")
        .select(
            "rank", "type", "why", _BETA, _RATE, _SPREAD, "wait_ns", "transfer_ns", "name",
            others_bottleneck_ratio=f"{_BETA}_median",
            others_bandwidth_bytes_per_s=f"{_RATE}_median",
        )
        .sort(-pl.col(_BETA), "rank", "type", "name")
    )  # fmt: skip


def _types(judged: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """One row per type and kernel, the one that bounds most first."""
    near = pl.col("distance").arg_min()
    far = pl.when(pl.col("is_far").is_not_null().all()).then(pl.col("is_far").sum())
    found = judged.sort("rank").group_by("type", "name").agg(
        pl.len().cast(pl.Int64).alias("rank_count"),
        pl.col("count").sum(),
        pl.col("rank").get(near).alias("normal_rank"),
        far.cast(pl.Int64).alias("different_count"),
        over_ranks(_BETA, ranks),
        pl.col(_RATE, _SPREAD).mean(),
        pl.col("missing").drop_nulls().first(),
    )  # fmt: skip
    return found.sort(-pl.col(_BETA), "type", "name")


def _ranks(functions: pl.DataFrame) -> pl.DataFrame:
    columns = ("rank", "type", "count", _BETA, "share_ratio", _RATE, _SPREAD, "wait_ns",
               "transfer_ns", "missing", "name")  # fmt: skip
    return functions.select(columns).sort("type", "name", "rank")


def _meaning(abnormal: pl.DataFrame, judged: pl.DataFrame, patterns: Patterns) -> list[str]:
    lines = [_slow_text(row) for row in abnormal.head(3).to_dicts()]
    if not judged.is_empty() and len(patterns.ranks) > 1:
        lines.append(patterns.who_is_late)
    wait, transfer = (int(judged[name].sum() or 0) for name in ("wait_ns", "transfer_ns"))
    if wait + transfer:
        share = ratio_text(wait / (wait + transfer))
        lines.append(f"{share} of the time in collectives is waiting for the last rank")
    return lines


def _slow_text(row: dict[str, Any]) -> str:
    how = "varies and is low" if row["why"] == UNSTEADY else "is low"
    hint = "contention" if row["why"] == UNSTEADY else "a link that came up narrow, or a bad cable"
    return (
        f"rank {row['rank']}: its {row['type']} {how} at {rate_text(row[_RATE])}, elsewhere "
        f"{rate_text(row['others_bandwidth_bytes_per_s'])}: {hint}"
    )


def _missing(patterns: Patterns, functions: pl.DataFrame, why: str | None) -> tuple[str, ...]:
    if functions.is_empty():
        return ("no communication kernel in any trace (collectives on the CPU are among the "
                "operators)",)  # fmt: skip
    moved: tuple[str, ...] = ()
    if patterns.moved_clocks:
        moved = (f"the clock of {ranks_text(list(patterns.moved_clocks))} was taken to be another "
                 "host's: a link that is always slow would look the same",)  # fmt: skip
    lacking = functions["missing"].drop_nulls().unique().sort().to_list()
    reasons = [f"throughput: {reason}" for reason in lacking]
    return (
        *too_few_ranks(patterns.totals.height),
        *reasons,
        *moved,
        *([f"link: {why}"] if why else []),
    )
