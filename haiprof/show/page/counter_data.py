"""Counters for the page: every panel's lines, each rank's own, and the spread of many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.arrays import Floats
from haiprof.base.units import NS_PER_S
from haiprof.show.figures.labels import OWNER, entity_label
from haiprof.show.figures.panel_table import PANEL_ROWS, CounterSpec, PanelRow, PanelSpec
from haiprof.show.figures.panels import HOST_COLOR_INDEX
from haiprof.show.figures.style import BLUE, GREY, VERMILLION, series_color
from haiprof.show.figures.thinning import gap_starts, thin_points, with_gaps
from haiprof.show.page.packed_numbers import half_floats, on_axis
from haiprof.show.text import printable

LINE_LIMIT = 8
"""More owners of one counter than this are drawn as their spread."""
_POINT_LIMIT = 240_000
_LEAST_POINTS, _MOST_POINTS = 24, 2000
_SPREAD_COLUMNS = 240
_SPREAD = (("lowest", GREY), ("median", BLUE), ("highest", VERMILLION))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line of one panel."""

    about: dict[str, Any]
    seconds: Floats
    values: Floats


def counter_data(
    counters: pl.DataFrame,
    start_ns: int,
    *,
    rows: Sequence[PanelRow] = PANEL_ROWS,
    each: bool = True,
) -> dict[str, Any]:
    """The panels that have something to show.

    `panels` (`row`, `title`, `unit`, `top`); `lines`, each with the number of its `panel`, its
    `name`, whose it is (`rank`, `host`), its `color` and `dash`, whether it is drawn with `all`
    or alone (`own`), and its `count` of points; and for all lines `time` (s) and `value`.
    """
    panels: list[dict[str, Any]] = []
    lines: list[_Line] = []
    for row in rows:
        for panel in row.panels:
            found = [
                line
                for spec in panel.counters
                for line in _lines(counters, panel, spec, len(panels), start_ns)
                if each or line.about["all"]
            ]
            if found:
                shown = {"title": panel.title, "unit": panel.unit, "top": panel.top}
                panels.append({"row": row.title, **shown})
                lines += found
    return _pack(panels, lines)


def _pack(panels: list[dict[str, Any]], lines: list[_Line]) -> dict[str, Any]:
    limit = max(_LEAST_POINTS, min(_MOST_POINTS, _POINT_LIMIT // max(1, len(lines))))
    drawn = [_thin(line, limit) for line in lines]
    seconds = np.concatenate([np.empty(0), *(x for x, _ in drawn)])
    values = np.concatenate([np.empty(0), *(y for _, y in drawn)])
    axis = {"low": float(seconds.min()), "high": float(seconds.max())} if seconds.size else {}
    return {
        "panels": panels,
        "lines": [
            {**line.about, "count": len(x)} for line, (x, _) in zip(lines, drawn, strict=True)
        ],
        "time": on_axis(seconds, **axis) if axis else on_axis(seconds, low=0.0, high=1.0),
        "value": _by_panel(lines, [y for _, y in drawn], values),
    }


def _by_panel(lines: list[_Line], drawn: list[Floats], values: Floats) -> dict[str, Any]:
    """One scale per line: panels differ by their units, lines by their size."""
    scales = []
    for y in drawn:
        finite = np.abs(y[np.isfinite(y)])
        scales.append(float(finite.max()) if finite.size and finite.max() > 0 else 1.0)
    each = np.repeat(np.array(scales), [len(y) for y in drawn]) if drawn else values
    return {**half_floats(values / each), "scales": scales}


def _thin(line: _Line, limit: int) -> tuple[Floats, Floats]:
    kept = thin_points(line.values, limit=limit)
    x, y = with_gaps(kept, gap_starts(line.seconds), [line.seconds, line.values], line.seconds)
    return x, y


def _lines(
    counters: pl.DataFrame, panel: PanelSpec, spec: CounterSpec, number: int, start_ns: int
) -> Iterator[_Line]:
    """The line of each series; of many also their spread, and then single ones only on request."""
    mine = (
        counters.filter(
            (pl.col("source") == spec.source)
            & (pl.col("metric") == spec.metric)
            & pl.col("value").is_finite()
        )
        .select(
            *OWNER,
            (pl.col("time_ns") - start_ns).cast(pl.Float64).alias("seconds") / NS_PER_S,
            pl.col("value") / panel.scale,
        )
        .sort("rank", "gpu", "host", "entity", "seconds")
    )
    many_hosts = mine["host"].n_unique() > 1
    owners = mine.partition_by(OWNER, maintain_order=True, as_dict=True)
    few = len(owners) <= LINE_LIMIT
    for place, (key, own) in enumerate(owners.items()):
        host, rank, gpu, _ = key
        name = printable(entity_label(*key, many_hosts=many_hosts))
        color = series_color(rank if isinstance(rank, int) else HOST_COLOR_INDEX + place)
        nobodys = rank is None and gpu is None and spec.source != "process"
        about = {
            "panel": number, "name": f"{name} {spec.word}".rstrip(), "rank": rank,
            "host": host if nobodys else None, "color": color, "dash": spec.dash,
            "all": few, "own": rank is not None or nobodys,
        }  # fmt: skip
        yield _Line(about=about, seconds=own["seconds"].to_numpy(), values=own["value"].to_numpy())
    if not few:
        yield from _spread(mine, spec, number, len(owners))


def _spread(mine: pl.DataFrame, spec: CounterSpec, number: int, count: int) -> Iterator[_Line]:
    """Lowest, median and highest of the samples in each stretch of time."""
    low, high = float(mine["seconds"].to_numpy().min()), float(mine["seconds"].to_numpy().max())
    width = (high - low) / _SPREAD_COLUMNS or 1.0
    place = ((pl.col("seconds") - low) / width).floor().alias("place")
    value = pl.col("value")
    rows = mine.group_by(place).agg(
        pl.col("seconds").mean(), lowest=value.min(), median=value.median(), highest=value.max()
    ).sort("place")  # fmt: skip
    for name, color in _SPREAD:
        of = f"{name} of {count} {spec.word}".rstrip()
        about = {"panel": number, "name": of, "rank": None, "host": None, "color": color,
                 "dash": spec.dash, "all": True, "own": False}  # fmt: skip
        yield _Line(about=about, seconds=rows["seconds"].to_numpy(), values=rows[name].to_numpy())
