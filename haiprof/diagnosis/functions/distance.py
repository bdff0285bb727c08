"""Which rank differs: the distance to all others, judged by median and MAD."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import polars as pl

from haiprof.diagnosis.thresholds import (
    FAR_MAD_FACTOR,
    FAR_MIN_DIFFERENCE_RATIO,
    FAR_MIN_RANKS,
)

_FEW_RANKS = 8
FUNCTION = ("type", "name")
"""What makes rows of `Patterns.functions` of one kind the same function."""


def with_distance(
    rows: pl.DataFrame,
    keys: Sequence[str],
    features: Sequence[str],
    scales: Mapping[str, str] = MappingProxyType({}),
) -> pl.DataFrame:
    """How far each rank is from the others that ran the same function.

    Args:
        rows: One row per function and rank.
        keys: What a function is.
        features: Columns that are compared; null on some ranks counts as the median there.
        scales: Of a feature the column whose largest value is its measure, where that is not its
            own: a deviation is small or large against the mean, not against other deviations.

    Returns:
        The same with `rank_count`; `<feature>_median` and `<feature>_mad` over the ranks;
        `distance`, the mean Manhattan distance to the other ranks, each feature by its largest
        value; `limit`, the median of the distances plus k MADs, or the least difference that is
        worth a word; and `is_far`, null where too few ranks ran it to say.

        Source: EROICA (arXiv 2506.08528), which compares with 100 ranks by chance; here with all,
        so that the same traces give the same answer.
    """
    over = list(keys)
    counted = rows.with_columns(
        rank_count=pl.len().over(over).cast(pl.Int64),
        **{f"{name}_median": pl.col(name).median().over(over) for name in features},
    ).with_columns(_mad(name, over).alias(f"{name}_mad") for name in features)
    parts = counted.with_columns(
        _own_distance(name, scales.get(name, name), over).alias(f"_{name}") for name in features
    )
    far = parts.with_columns(distance=pl.sum_horizontal(f"_{name}" for name in features))
    middle = pl.col("distance").median().over(over)
    mad = (pl.col("distance") - middle).abs().median().over(over)
    limited = far.with_columns(
        limit=pl.max_horizontal(middle + FAR_MAD_FACTOR * mad, pl.lit(FAR_MIN_DIFFERENCE_RATIO))
    )
    enough = pl.col("rank_count") >= FAR_MIN_RANKS
    return limited.with_columns(
        is_far=pl.when(enough).then(pl.col("distance") > pl.col("limit"))
    ).drop(f"_{name}" for name in features)


def _own_distance(name: str, scale: str, over: list[str]) -> pl.Expr:
    """Mean distance in one feature, in O(n log n): sums on both sides of the sorted value."""
    known = pl.col(name).cast(pl.Float64).fill_null(pl.col(f"{name}_median")).fill_null(0.0)
    largest = pl.col(scale).cast(pl.Float64).abs().max().over(over).fill_null(0.0)
    value = pl.when(largest > 0).then(known / largest).otherwise(0.0)
    place = pl.int_range(pl.len()).over(over, order_by=value)
    below = value.cum_sum().over(over, order_by=value)
    count = pl.len().over(over).cast(pl.Int64)
    apart = value * (2 * place + 2 - count) + value.sum().over(over) - 2 * below
    return pl.when(count > 1).then(apart.clip(0) / (count - 1)).otherwise(0.0)


def _mad(name: str, over: list[str]) -> pl.Expr:
    return (pl.col(name) - pl.col(f"{name}_median")).abs().median().over(over)


def differs(name: str, *, high: bool) -> pl.Expr:
    """Whether a feature is off the ranks' median to one side: by a tenth of it, and by many MADs.

    The largest of n values by chance grows as the square root of log n (extreme values of the
    normal distribution): so do the MADs, from 5 at 8 ranks to 9 at 1,000.
    """
    middle = pl.col(f"{name}_median")
    above = pl.col(name) - middle
    many = (pl.col("rank_count").log() / math.log(_FEW_RANKS)).clip(1.0).sqrt()
    least = pl.max_horizontal(
        FAR_MIN_DIFFERENCE_RATIO * middle.abs(), FAR_MAD_FACTOR * many * pl.col(f"{name}_mad")
    )
    return (above if high else -above) > least
