"""What the reports of runtime calls and of Python functions share."""

from __future__ import annotations

import polars as pl

from haiprof.diagnosis.functions.distance import FUNCTION, differs, with_distance
from haiprof.diagnosis.functions.report import over_ranks
from haiprof.diagnosis.thresholds import ABNORMAL_RATIO

_BETA = "bottleneck_ratio"


def abnormal_host(functions: pl.DataFrame) -> pl.DataFrame:
    """Functions of ranks above 1 % of the window.

    Args:
        functions: Of one kind, on all ranks.

    Returns:
        `rank`, `name`, `bottleneck_ratio`, `share_ratio`, `count`, `median_ns`,
        `others_bottleneck_ratio` (median over the ranks; one that has not got the function, or
        only below what a pattern keeps, counts as 0), `is_far` (off the other ranks' by distance,
        and higher by 1 % of the window); functions with a rank that is far first.
    """
    above = functions.filter(pl.col(_BETA) > ABNORMAL_RATIO).select("type", "name").unique()
    ranks = functions.select("rank").unique()
    grid = above.join(ranks, how="cross")
    own = grid.join(functions, on=["rank", "type", "name"], how="left")
    judged = with_distance(own.with_columns(pl.col(_BETA).fill_null(0.0)), FUNCTION, (_BETA,))
    more = pl.col(_BETA) - pl.col(f"{_BETA}_median") > ABNORMAL_RATIO
    far = (pl.col("is_far") & differs(_BETA, high=True) & more).fill_null(value=False)
    return (
        judged.with_columns(is_far=far)
        .filter(pl.col(_BETA) > ABNORMAL_RATIO)
        .select(
            "rank", "name", _BETA, "share_ratio", "count", "median_ns",
            others_bottleneck_ratio=f"{_BETA}_median", is_far="is_far",
        )
        .with_columns(
            odd=pl.col("is_far").any().over("name"), most=pl.col(_BETA).max().over("name")
        )
        .sort("odd", "most", "name", _BETA, "rank", descending=[True, True, False, True, False])
        .drop("odd", "most")
    )  # fmt: skip


def by_function(functions: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """Functions over all ranks, the one that bounds most first; a rank without it counts as 0."""
    found = functions.group_by("name").agg(
        pl.len().cast(pl.Int64).alias("rank_count"),
        pl.col("count").sum(),
        pl.col("median_ns").median(),
        pl.when(pl.col(_BETA).null_count() == 0).then(over_ranks(_BETA, ranks)),
        over_ranks("share_ratio", ranks),
    )
    return found.sort(-pl.col(_BETA), -pl.col("share_ratio"), "name", nulls_last=True)
