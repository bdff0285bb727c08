"""How far clocks are apart, from events that several of them saw end."""

from __future__ import annotations

import polars as pl

_ROUNDS = 100


def estimate_offsets(ends: pl.DataFrame) -> pl.DataFrame:
    """Estimates how far each clock is ahead of the others.

    Events overlap but need not be seen by every clock, so none can be the reference for all. In
    each round every clock moves by its median distance to the middle of its events; clocks that
    share events converge to one. For two clocks that is the median of their differences.

    One row per clock that shares an event: `clock`, `event_count` (shared ones), `offset_ns`
    (the median of all is 0), `mad_ns` (median absolute deviation of its ends from the middle,
    once it is moved). Offsets of clocks that share no event, not even through other clocks,
    cannot be compared.
    """
    near = ends.filter(pl.len().over("event") > 1).with_columns(
        end_ns=pl.col("end_ns") - pl.col("end_ns").min()
    )
    offsets = near.select("clock").unique().with_columns(offset_ns=pl.lit(0.0))
    for _ in range(_ROUNDS):
        errors = near.join(offsets, on="clock").with_columns(error=_behind_middle())
        change = errors.group_by("clock").agg(pl.col("error").median())
        offsets = offsets.join(change, on="clock").select(
            "clock", offset_ns=pl.col("offset_ns") + pl.col("error")
        )
        if not change.height or float(change["error"].abs().max() or 0) < 1:  # type: ignore[arg-type]
            break
    centred = offsets.with_columns(offset_ns=pl.col("offset_ns") - pl.col("offset_ns").median())
    found = near.join(centred, on="clock").with_columns(error=_behind_middle())
    spread = (pl.col("error") - pl.col("error").median()).abs().median()
    rows = found.group_by("clock").agg(
        pl.len().cast(pl.Int64).alias("event_count"),
        pl.col("offset_ns").first(),
        spread.alias("mad_ns"),
    )
    return rows.sort("clock")


def _behind_middle() -> pl.Expr:
    """The end on the common clock minus the median of the event's ends."""
    end = pl.col("end_ns").cast(pl.Float64) - pl.col("offset_ns")
    return end - end.median().over("event")
