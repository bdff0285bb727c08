"""Stragglers: the rank that arrives last at collectives, how often, and at what cost."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.other_groups import with_passed_on


def stragglers(waits: pl.DataFrame, *, by_step: bool = False) -> pl.DataFrame:
    """Who arrives last.

    The order is that of arrival at each collective, of every kind that all must enter. HTA's
    get_potential_stragglers drops a rank's kernels below 1 % of the step first, which are
    those of the rank that came last, and compares what is left (docs/hta-differences.md).
    """
    known = waits.filter(pl.col("missing").is_null())
    starts = pl.col("start_ns").sort().over("collective", mapping_strategy="join")
    second = starts.list.get(-2, null_on_oob=True)
    behind = pl.when("arrived_last").then(pl.col("start_ns") - second).otherwise(0)
    known = with_passed_on(known.with_columns(behind=behind))
    passed = pl.min_horizontal("behind", pl.col("passed_on").round().cast(pl.Int64))
    own = pl.col("behind") - passed
    keys = ["rank", "step"] if by_step else ["rank"]
    rows = (
        known.with_columns(behind=own)
        .group_by(keys)
        .agg(
            collective_count=pl.len().cast(pl.Int64),
            last_count=pl.col("arrived_last").sum().cast(pl.Int64),
            last_ratio=pl.col("arrived_last").mean(),
            held_up_ns=pl.col("behind").sum(),
            waited_ns=pl.col("wait_ns").sum(),
            collective_ns=(pl.col("end_ns") - pl.col("start_ns")).sum(),
            step_count=pl.col("step").drop_nulls().n_unique().cast(pl.Int64),
        )
    )
    steps = pl.when(pl.col("step_count") > 0).then("step_count")
    return rows.with_columns(
        (pl.col("held_up_ns") / steps).round().cast(pl.Int64).alias("held_up_ns_per_step"),
        (pl.col("waited_ns") / steps).round().cast(pl.Int64).alias("waited_ns_per_step"),
    ).sort(["held_up_ns", "rank"], descending=[True, False])
