"""Clocks of different hosts: how far apart, by the ends of collectives, and how surely."""

from __future__ import annotations

import polars as pl

from haiprof.analysis.trace.collectives import SYNCHRONISING

ROUNDS = 100
CLOCKS_AGREE_NS = 100_000
"""Less than this is not corrected: ends of a ring's ranks differ by tens of us on one clock."""
SURE_FACTOR = 5
"""An offset is corrected only where it is this many times its own spread."""
MAD_TO_SIGMA = 1.4826

OFFSETS_SCHEMA = {
    "rank": pl.Int64,
    "collective_count": pl.Int64,
    "offset_ns": pl.Int64,
    "residual_ns": pl.Int64,
    "corrected": pl.Boolean,
}


def clock_offsets(kernels: pl.DataFrame) -> pl.DataFrame:
    """How far each rank's clock seems ahead of the others.

    Args:
        kernels: From `matching.matched`.

    Returns:
        One row per rank: `rank`; `collective_count`, matched ones that it is in; `offset_ns`, the
        median over them of its end less the middle end of all ranks in it (null where it is in
        none); `residual_ns`, the spread of that (1.48 MAD): below it nothing is known, since ranks
        do not leave a collective at the very same time; `corrected`, whether the offset is large
        and sure enough to be taken for the clocks' (beyond 100 us and five times its spread).

        Traces do not say whether ranks share a host, and nothing but the collectives' ends tells
        how far hosts' clocks are apart. Ranks that share no collective, even through others, have
        offsets that cannot be compared.
    """
    ends = kernels.filter(
        pl.col("collective").is_not_null() & pl.col("kind").is_in(SYNCHRONISING)
    ).select("rank", "collective", end_ns=pl.col("end_ns") - pl.col("end_ns").min())
    offsets = _estimated(ends)
    found = ends.join(offsets, on="rank", how="left").with_columns(error=_behind_middle())
    spread = (pl.col("error") - pl.col("error").median()).abs().median() * MAD_TO_SIGMA
    rows = found.group_by("rank").agg(
        pl.len().alias("collective_count"),
        pl.col("offset_ns").first().round().cast(pl.Int64),
        spread.round().cast(pl.Int64).alias("residual_ns"),
    )
    everyone = kernels.select("rank").unique().join(rows, on="rank", how="left")
    size = pl.col("offset_ns").abs()
    sure = (size > CLOCKS_AGREE_NS) & (size > SURE_FACTOR * pl.col("residual_ns"))
    return everyone.select(
        "rank",
        pl.col("collective_count").fill_null(0).cast(pl.Int64),
        "offset_ns",
        "residual_ns",
        corrected=(sure & (pl.col("collective_count") > 1)).fill_null(value=False),
    ).sort("rank")


def on_one_clock(kernels: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """Kernels with `start_ns` and `end_ns` moved by the corrected offsets.

    Args:
        kernels: From `matching.matched`.
        offsets: From `clock_offsets`.
    """
    moved = pl.when("corrected").then("offset_ns").otherwise(0).fill_null(0)
    joined = kernels.join(offsets.select("rank", moved=moved), on="rank", how="left")
    return joined.with_columns(
        start_ns=pl.col("start_ns") - pl.col("moved"), end_ns=pl.col("end_ns") - pl.col("moved")
    ).drop("moved")


def _estimated(ends: pl.DataFrame) -> pl.DataFrame:
    """Each rank's offset, in rounds: groups that overlap agree step by step."""
    offsets = ends.select("rank").unique().with_columns(offset_ns=pl.lit(0.0))
    for _ in range(ROUNDS):
        errors = ends.join(offsets, on="rank").with_columns(error=_behind_middle())
        change = errors.group_by("rank").agg(pl.col("error").median())
        offsets = offsets.join(change, on="rank").select(
            "rank", offset_ns=pl.col("offset_ns") + pl.col("error")
        )
        if not change.height or float(change["error"].abs().max() or 0) < 1:  # type: ignore[arg-type]
            break
    centre = offsets["offset_ns"].median()
    return offsets.with_columns(offset_ns=pl.col("offset_ns") - pl.lit(centre))


def _behind_middle() -> pl.Expr:
    """End on the common clock less the middle of the collective's ends."""
    end = pl.col("end_ns").cast(pl.Float64) - pl.col("offset_ns")
    return end - end.median().over("collective")
