"""Traces over time: launch queues, bandwidth of copies and memory, as lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl

from haiprof.base.units import BYTES_PER_GIB
from haiprof.show.figures.style import AXIS, figure_layout, series_color, time_unit
from haiprof.show.figures.thinning import points_per_series, thin_points

SERIES_LIMIT = 12
"""More lines cannot be told apart: those with the highest values are drawn."""
_HEIGHT_PX = 380


def queue_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """The length of each stream's launch queue over time."""
    return _over_time(
        found.with_columns(value=pl.col("queue_length").cast(pl.Float64)),
        ("rank", "device", "stream"),
        lambda key: f"rank {key[0]}, stream {key[2]}",
        unit="",
        title=title or "<b>Launch queues over time</b>",
    )


def bandwidth_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """The bandwidth of each kind of copy over time."""
    return _over_time(
        found.with_columns(value=pl.col("bandwidth_bytes_per_s") / BYTES_PER_GIB),
        ("rank", "device", "copy_kind"),
        lambda key: f"rank {key[0]}, {key[2]}",
        unit="GiB/s",
        title=title or "<b>Bandwidth of copies over time</b>",
    )


def memory_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """Memory in tensors over time, and what the caching allocator holds."""
    names = {"allocated_bytes": "in tensors", "reserved_bytes": "reserved"}
    if found["allocated_bytes"].is_null().all():
        names = {"since_start_bytes": "since the trace began"}
    kept = found.filter(pl.col("device_type") != "cpu")
    long = (
        (kept if kept.height else found)
        .unpivot(
            list(names), index=["rank", "device_type", "device", "ts_ns"], variable_name="what"
        )
        .drop_nulls("value")
    )
    small = max(long["value"].to_list(), default=0) < BYTES_PER_GIB
    unit, size = ("MiB", BYTES_PER_GIB / 1024) if small else ("GiB", BYTES_PER_GIB)
    return _over_time(
        long.with_columns(value=pl.col("value") / size),
        ("rank", "device_type", "device", "what"),
        lambda key: f"rank {key[0]}, {names[str(key[3])]}",
        unit=unit,
        title=title or "<b>Memory over time</b>",
    )


def _over_time(
    found: pl.DataFrame,
    keys: Sequence[str],
    name: Callable[[tuple[object, ...]], str],
    *,
    unit: str,
    title: str,
) -> go.Figure:
    """A stepped line per series: `ts_ns`, and `value` from then on."""
    figure = go.Figure()
    highest = found.group_by(keys).agg(pl.col("value").max().alias("most"))
    ordered = highest.filter(pl.col("most") > 0).sort(
        "most", *keys, descending=[True] + [False] * len(keys)
    )
    shown = ordered.head(SERIES_LIMIT).sort(keys).select(keys)
    start_ns, end_ns = (
        int(ns) for ns in found.select(first=pl.min("ts_ns"), last=pl.max("ts_ns")).row(0)
    )
    second, second_ns = time_unit(end_ns - start_ns)
    limit = points_per_series(shown.height)
    for index, key in enumerate(shown.iter_rows()):
        same = [
            pl.col(column).eq_missing(pl.lit(part)) for column, part in zip(keys, key, strict=True)
        ]
        own = found.filter(*same).sort("ts_ns", maintain_order=True)
        values = own["value"].to_numpy()
        kept = thin_points(values, limit=limit)
        times = ((own["ts_ns"] - start_ns) / second_ns).to_numpy()
        figure.add_trace(
            go.Scatter(
                x=times[kept].astype(np.float32), y=values[kept].astype(np.float32),
                name=name(key), mode="lines",
                line={"color": series_color(index), "width": 1.5, "shape": "hv"},
                hovertemplate=f"{name(key)}, %{{x:.4g}} {second}: %{{y:.4g}} {unit}<extra></extra>",
            )
        )  # fmt: skip
    left_out = ordered.height - shown.height
    more = f"<br><span style='font-size:12px'>{left_out} lower lines are left out</span>"
    figure.update_layout(**figure_layout(title + (more if left_out else ""), height=_HEIGHT_PX))
    figure.update_xaxes(ticksuffix=f" {second}", **AXIS)
    figure.update_yaxes(rangemode="tozero", ticksuffix=f" {unit}".rstrip(), **AXIS)
    return figure
