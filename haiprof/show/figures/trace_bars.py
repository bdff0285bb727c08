"""Bars of traces: how each rank's GPU time, idle time and communication divide, and into what."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from haiprof.show.figures.style import (
    AXIS,
    BLUE,
    DARK_GREY,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    figure_layout,
    time_unit,
)

_ROW_PX, _FRAME_PX, _LEAST_PX, _MOST_PX = 24, 170, 260, 1600

Part = tuple[str, str, str]
"""Column of the frame, the name that people read, and its colour."""

TEMPORAL: tuple[Part, ...] = (
    ("compute_ns", "computes", GREEN),
    ("non_compute_ns", "communicates or copies", ORANGE),
    ("idle_ns", "idle", GREY),
)
IDLE: tuple[Part, ...] = (
    ("host_wait", "waits for the host", VERMILLION),
    ("kernel_wait", "between two kernels", SKY),
    ("other", "waits for another stream", PURPLE),
    ("unknown", "not known: no launch in the trace", GREY),
)
OVERLAP: tuple[Part, ...] = (
    ("overlap_ns", "hidden behind computing", GREEN),
    ("exposed_ns", "exposed", VERMILLION),
)
KINDS: tuple[Part, ...] = (
    ("computation", "computing", GREEN),
    ("communication", "communication", ORANGE),
    ("memory", "copies and sets", PURPLE),
    ("computation overlapping communication", "computing and communication", BLUE),
    ("computation overlapping memory", "computing and copies", SKY),
    ("communication overlapping memory", "communication and copies", YELLOW),
    ("computation overlapping communication overlapping memory", "all three", DARK_GREY),
)
COLLECTIVES: tuple[Part, ...] = (
    ("transfer_ns", "transfers", GREEN),
    ("wait_ns", "waits for the last rank", VERMILLION),
    ("untold_ns", "not told apart", GREY),
)


def temporal_figure(found: pl.DataFrame, *, share: bool = False, title: str = "") -> go.Figure:
    """Computing, other work and idle time of each rank's GPU."""
    return part_bars(found, TEMPORAL, ("rank", "device"), share=share,
                     title=title or "<b>GPU time by rank</b>")  # fmt: skip


def idle_figure(found: pl.DataFrame, *, share: bool = False, title: str = "") -> go.Figure:
    """What each stream waited for."""
    wide = _by_category(found, "idle_category", "idle_ns", ["rank", "device", "stream"])
    return part_bars(wide, IDLE, ("rank", "device", "stream"), share=share,
                     title=title or "<b>Idle time of streams, by cause</b>")  # fmt: skip


def kernel_type_figure(found: pl.DataFrame, *, share: bool = False, title: str = "") -> go.Figure:
    """Busy GPU time by the kinds that ran at once."""
    wide = _by_category(found, "kernel_type", "time_ns", ["rank", "device"])
    return part_bars(wide, KINDS, ("rank", "device"), share=share,
                     title=title or "<b>Busy GPU time by kind of kernel</b>")  # fmt: skip


def overlap_figure(found: pl.DataFrame, *, share: bool = False, title: str = "") -> go.Figure:
    """Communication of each rank: hidden behind computing, or exposed."""
    exposed = found.with_columns(exposed_ns=pl.col("communication_ns") - pl.col("overlap_ns"))
    return part_bars(exposed, OVERLAP, ("rank", "device"), share=share,
                     title=title or "<b>Communication: hidden and exposed</b>")  # fmt: skip


def collective_figure(found: pl.DataFrame, *, share: bool = False, title: str = "") -> go.Figure:
    """Time that each rank spends in collectives: transferring, or waiting for the last rank."""
    known = pl.col("wait_ns").is_not_null() & pl.col("transfer_ns").is_not_null()
    length = pl.col("end_ns") - pl.col("start_ns")
    sums = found.group_by("rank").agg(
        pl.col("transfer_ns").filter(known).sum(),
        pl.col("wait_ns").filter(known).sum(),
        untold_ns=length.filter(~known).sum(),
    ).sort("rank")  # fmt: skip
    return part_bars(sums, COLLECTIVES, ("rank",), share=share,
                     title=title or "<b>Time in collectives by rank</b>")  # fmt: skip


def part_bars(
    found: pl.DataFrame, parts: Sequence[Part], keys: Sequence[str], *, share: bool, title: str
) -> go.Figure:
    """A bar per row, in stacked parts; parts that nowhere happened are left out."""
    names = row_names(found, keys)
    seen = [part for part in parts if part[0] in found.columns and (found[part[0]].sum() or 0) > 0]
    whole = found.select(pl.sum_horizontal(*(name for name, _, _ in seen))).to_series() if seen \
        else pl.Series([], dtype=pl.Float64)  # fmt: skip
    unit, size = ("%", 0.01) if share else time_unit(whole.max() if len(whole) else None)  # type: ignore[arg-type]
    figure = go.Figure()
    for column, name, color in seen:
        values = found[column] / whole if share else found[column]
        figure.add_trace(
            go.Bar(
                y=names, x=(values.cast(pl.Float64) / size).to_list(), name=name, orientation="h",
                marker={"color": color},
                hovertemplate=f"%{{y}}: %{{x:.4g}} {unit} {name}<extra></extra>",
            )
        )  # fmt: skip
    layout_rows(figure, names, title=title)
    figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **AXIS)
    if share:
        figure.update_xaxes(range=[0, 100])
    return figure


def layout_rows(figure: go.Figure, names: Sequence[str], *, title: str) -> None:
    """The layout of a figure with a bar per named row, the first on top."""
    height = min(_MOST_PX, max(_LEAST_PX, _ROW_PX * len(names) + _FRAME_PX))
    figure.update_layout(**figure_layout(title, height=height))
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=list(names),
                        autorange="reversed", automargin=True, **AXIS)  # fmt: skip


def row_names(found: pl.DataFrame, keys: Sequence[str]) -> list[str]:
    """A name per row: `rank 3`, `rank 3 · GPU 1 · stream 7`; a GPU only if a rank has several."""
    several = "device" in keys and not (
        found.select("rank", "device").unique()["rank"].is_unique().all()
    )
    words = {"rank": "rank", "device": "GPU", "stream": "stream"}
    shown = [key for key in keys if key != "device" or several]
    return [
        " · ".join(f"{words[key]} {row[key]}" for key in shown if row[key] is not None)
        for row in found.select(shown).iter_rows(named=True)
    ]


def _by_category(found: pl.DataFrame, category: str, value: str, keys: list[str]) -> pl.DataFrame:
    """A row per key with a column for each category."""
    if found.is_empty():
        return found.select(keys)
    return found.pivot(category, index=keys, values=value, aggregate_function="sum").sort(keys)
