"""Arrival lateness: the rank that begins its collectives later than the others, with its interval.

The one answer to "who is late" from traces: `trace-report`, `functions` and `what-if` all show it.
"""

from __future__ import annotations

import polars as pl

from haiprof.base.statistics.bootstrap import student_quantile
from haiprof.base.units import duration_text, ratio_text
from haiprof.trace_analysis.clocks import MAD_TO_SIGMA
from haiprof.trace_analysis.group_parts import WHOLE_JOB
from haiprof.trace_analysis.other_groups import above_others, with_passed_on

CONFIDENCE = 0.95
MIN_FREEDOM = 3
"""With fewer degrees of freedom, (ranks - 1) (steps - 1), there is no interval: it would be wider
than three standard errors of one value, and the quantile itself is not exact."""
UNEQUAL_START_RATIO = 3
"""Ranks came apart to the window where the first collective's spread is this many others'."""
NEAR_RATIO = 0.25
"""Lateness in two groups that differs by no more is one and the same: a rank that is late a little
at each collective of the smaller is late by their sum in the larger. Own choice."""

_GROUP = ("process_group", "group_ranks")
LATENESS_SCHEMA = {
    "rank": pl.Int64,
    "process_group": pl.String,
    "part": pl.String,
    "late_ns": pl.Int64,
    "low_ns": pl.Int64,
    "high_ns": pl.Int64,
    "clock_ns": pl.Int64,
    "step_count": pl.Int64,
    "collective_count": pl.Int64,
    "is_late": pl.Boolean,
    "said": pl.String,
}


def arrival_lateness(waits: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """How much later than the others each rank begins its collectives, and how sure that is.

    Kernels of one group follow each other on a stream, so no time is counted twice. The
    interval is Student's t over the steps, by the rank's own deviation or that of all ranks of
    its group, whichever is larger, with Bonferroni's correction for the number of ranks,
    widened by what the clocks may be wrong by.

    Source: process arrival patterns of collectives, Faraj, Patarasuk and Yuan, "A study of
    process arrival patterns for MPI collective operations" (ICS 2007), with the median of the
    others in place of the mean of all, which a late rank itself moves.
    """
    steps = _by_step(_without_first(waits))
    if steps.is_empty():
        return pl.DataFrame(schema=LATENESS_SCHEMA)
    groups = steps.group_by("rank", *_GROUP).agg(
        pl.len().cast(pl.Int64).alias("step_count"),
        pl.col("part", "group_size").first(),
        pl.col("late").mean().alias("mean"),
        pl.col("late").var().alias("variance"),
        pl.col("count").sum().cast(pl.Int64).alias("collective_count"),
        pl.col("count").mean().alias("per_step"),
    )
    clock = pl.col("per_step") * pl.col("clock")
    known = _with_half_width(groups).join(_clock_errors(offsets), on="rank", how="left")
    known = known.with_columns(clock=clock, half=pl.col("half") + clock)
    rows = known.with_columns(
        late_ns=_ns("mean"),
        low_ns=_ns(pl.col("mean") - pl.col("half")),
        high_ns=_ns(pl.col("mean") + pl.col("half")),
        clock_ns=_ns("clock"),
    ).with_columns(is_late=(pl.col("low_ns") > 0).fill_null(value=False))
    one = _nearest_groups(rows).sort(
        ["is_late", "mean", "rank"], descending=[True, True, False], maintain_order=True
    )
    said = pl.lit("; ".join([_verdict(one), *_unequal_starts(waits)]))
    return one.with_columns(said=said).select(
        pl.col(name).cast(dtype) for name, dtype in LATENESS_SCHEMA.items()
    )


def who_is_late(lateness: pl.DataFrame, waits: pl.DataFrame) -> str:
    """The answer in words, or why there is none."""
    if not lateness.is_empty():
        return str(lateness["said"][0])
    why = waits["missing"].drop_nulls().mode().sort().to_list()
    first = f" ({why[0]})" if why else ""
    return f"who is late is not known: arrivals at fewer than two collectives compare{first}"


def _nearest_groups(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per rank: of the groups where it is about as late the smallest."""
    most = pl.col("mean").max().over("rank", "is_late")
    near = pl.col("mean") >= most - NEAR_RATIO * most.abs()
    order = ["is_late", "near", "group_size", "mean", "rank", *_GROUP]
    falling = [True, True, False, True, False, False, False]
    ordered = rows.with_columns(near=near).sort(order, descending=falling)
    return ordered.unique("rank", keep="first", maintain_order=True)


def _ns(value: str | pl.Expr) -> pl.Expr:
    found = pl.col(value) if isinstance(value, str) else value
    return found.round().cast(pl.Int64)


def _with_known_arrivals(waits: pl.DataFrame) -> pl.DataFrame:
    """Collectives whose arrivals are known, with whether each is the first of its group."""
    known = waits.filter(pl.col("missing").is_null())
    first = pl.col("collective").min().over(_GROUP)
    return known.with_columns(is_first=pl.col("collective") == first)


def _without_first(waits: pl.DataFrame) -> pl.DataFrame:
    """Without the first of each group, and in steps where there are any."""
    found = _with_known_arrivals(waits).filter(~pl.col("is_first"))
    return found.drop_nulls("step") if found["step"].count() else found


def _by_step(arrivals: pl.DataFrame) -> pl.DataFrame:
    """`late`, arrivals less the median of the others' in sum, and `count`, by rank and step."""
    apart = with_passed_on(above_others(arrivals, "start_ns", "late"))
    passed = pl.min_horizontal(pl.col("late").clip(0), "passed_on")
    return apart.group_by("rank", *_GROUP, "step").agg(
        pl.col("part", "group_size").first(),
        (pl.col("late") - passed).sum().alias("late"),
        pl.len().alias("count"),
    )


def _clock_errors(offsets: pl.DataFrame) -> pl.DataFrame:
    """What each rank's clock may be wrong by: an offset that was not corrected, and its spread."""
    left = pl.when("corrected").then(0).otherwise(pl.col("offset_ns").abs())
    spread = 2 * MAD_TO_SIGMA * pl.col("residual_ns") / pl.col("collective_count").sqrt()
    return offsets.select("rank", clock=(left + spread).fill_nan(None).fill_null(0))


def _with_half_width(groups: pl.DataFrame) -> pl.DataFrame:
    """With `half`, half the width of the interval over steps; null where nothing tells."""
    larger = pl.max_horizontal("variance", pl.col("variance").mean().over(_GROUP))
    sized = groups.with_columns(
        freedom=(pl.len().over(_GROUP).cast(pl.Int64) - 1) * (pl.col("step_count") - 1),
        error=(larger / pl.col("step_count")).sqrt(),
    )
    tail = (1 - CONFIDENCE) / 2 / groups["rank"].n_unique()
    widths = [
        None if freedom < MIN_FREEDOM else student_quantile(1 - tail, freedom) * error
        for freedom, error in sized.select("freedom", "error").iter_rows()
    ]
    return sized.with_columns(half=pl.Series(widths, dtype=pl.Float64))


def _verdict(rows: pl.DataFrame) -> str:
    """Who is late, in words."""
    most = rows.row(0, named=True)
    steps = f"{most['step_count']} step" + ("s" if most["step_count"] != 1 else "")
    rank = f"rank {most['rank']}"
    collectives = f"its {most['part']} collectives" if _is_split(most) else "its collectives"
    much = duration_text(max(most["late_ns"], 0))
    if most["low_ns"] is None:
        if most["late_ns"] <= 0:
            return f"no rank is later than the others in {steps}"
        return (
            f"who is late cannot be told from {steps}: in what was recorded "
            f"{rank} begins {collectives} latest, {much} later than the others"
            f"{_followers(rows)}"
        )
    between = f"{ratio_text(CONFIDENCE)} interval {_sign_text(most['low_ns'])} to "
    between += f"{_sign_text(most['high_ns'])}, {steps}"
    if most["is_late"]:
        late = int(rows["is_late"].sum())
        more = f"; {late - 1} more ranks are late too" if late > 1 else ""
        return (
            f"{rank} begins {collectives} {much} per step later than the others ({between}){more}"
        )
    return f"no rank is late beyond chance: the latest is {rank}, {much} per step ({between})"


def _is_split(row: dict[str, object]) -> bool:
    """Whether the group serves a known part of the job that is not the whole of it."""
    return row["part"] not in (None, WHOLE_JOB)


def _followers(rows: pl.DataFrame) -> str:
    """The ranks that are nearly as late as the first."""
    most = rows["late_ns"][0]
    near = rows[1:].filter(pl.col("late_ns") > most / 2).head(2)
    pairs = near.select("rank", "late_ns").iter_rows()
    found = ", ".join(f"rank {rank} {duration_text(late)}" for rank, late in pairs)
    return f" ({found})" if found else ""


def _sign_text(ns: int) -> str:
    return f"-{duration_text(-ns)}" if ns < 0 else duration_text(ns)


def _unequal_starts(waits: pl.DataFrame) -> list[str]:
    """Why steps of the ranks differ in length where they came to the window at different times."""
    spread = (
        _with_known_arrivals(waits)
        .group_by("collective")
        .agg(
            (pl.col("start_ns").max() - pl.col("start_ns").min()).alias("spread"),
            pl.col("is_first").first(),
            first=pl.col("rank").sort_by("start_ns").first(),
            last=pl.col("rank").sort_by("start_ns").last(),
        )
    )
    begun = spread.filter("is_first").sort(-pl.col("spread")).row(0, named=True)
    usual = spread.filter(~pl.col("is_first"))["spread"].median()
    if usual is None or begun["spread"] <= UNEQUAL_START_RATIO * float(str(usual)):
        return []
    return [
        f"ranks came to the first collective {duration_text(begun['spread'])} apart, rank "
        f"{begun['first']} first and rank {begun['last']} last: that comes from before the traces "
        "and does not count, but the first step of the early ranks is that much longer"
    ]
