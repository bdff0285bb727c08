"""When a job trained: what counters are averaged over, in the verdict and in every view."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl


def training_spans(parts: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """From the first step's begin to the last one's end in Unix time; of each that had steps."""
    rows = [
        (
            steps["rank"][0],
            steps["attempt"][0],
            steps["start_ns"].min(),
            (steps["start_ns"] + steps["step_ns"]).max(),
        )
        for steps in parts
        if steps.height
    ]
    return pl.DataFrame(
        rows, schema=dict.fromkeys(("rank", "attempt", "begin", "end"), pl.Int64), orient="row"
    )


def host_windows(spans: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """The same per host: from its ranks' first begin to their last end."""
    hosts = ranks.select("rank", "attempt", "host").drop_nulls()
    known = spans.join(hosts, on=["rank", "attempt"])
    return known.group_by("host").agg(pl.col("begin").min(), pl.col("end").max()).sort("host")


def select_training_samples(counters: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Samples of each host from when its ranks trained; of a host without ranks, any rank."""
    if windows.is_empty():
        return counters.clear()
    of_host = counters.join(windows, on="host", how="left").with_columns(
        pl.col("begin").fill_null(windows["begin"].min()),
        pl.col("end").fill_null(windows["end"].max()),
    )
    inside = of_host.filter(pl.col("time_ns").is_between(pl.col("begin"), pl.col("end")))
    return inside.select(counters.columns)
