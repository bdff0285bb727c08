"""Counters and steps for the page: lines of every panel, packed as compact numbers."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.intervals import Floats
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.run_analysis.counters import SeriesReader
from haiprof.run_analysis.ranks import RankGrid
from haiprof.show.figures.panel_table import PANELS, CounterSpec, PanelSpec, label_series
from haiprof.show.figures.style import BLUE, GREY, PHASES, VERMILLION, series_color
from haiprof.show.series import TimeRange, points_per_series, thin_points
from haiprof.show.text import printable

_HALF_TOP = 32768.0
_PLACES = 65535
_MARKUP = str.maketrans(
    {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def half_floats(values: Floats) -> dict[str, Any]:
    """Values with three digits, whatever their size: scaled so that the largest fits.

    Half floats keep 11 bits, 0.05 %, over a range of 10^8 below the largest value. A picture shows
    less; what is stated as a number elsewhere on the page is exact.

    `scale` and `f2`, base64 of little-endian half floats; NaN is what is missing.
    """
    finite = np.abs(values[np.isfinite(values)])
    top = float(finite.max()) if finite.size else 0.0
    scale = top / _HALF_TOP if top else 1.0
    return {"scale": scale, "f2": _base64((values / scale).astype("<f2"))}


def single_floats(values: Floats) -> dict[str, Any]:
    """Values with seven digits: `f4`, base64 of little-endian floats."""
    return {"f4": _base64(values.astype("<f4"))}


def on_axis(values: Floats, *, low: float, high: float) -> dict[str, Any]:
    """Positions on an axis to 1/65535 of its length, which no screen resolves."""
    step = (high - low) / _PLACES or 1.0
    codes = np.clip(np.round((values - low) / step), 0, _PLACES)
    return {"low": low, "step": step, "u2": _base64(codes.astype("<u2"))}


def json_for_script(content: object) -> str:
    """JSON that can stand inside a script element: no text in it can end that element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(_MARKUP)


def squeeze(text: str) -> str:
    """Text as base64 of gzip; the same text gives the same result."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


_GAP_INTERVALS = 5.0


def gap_starts(starts: Floats, ends: Floats | None = None) -> npt.NDArray[np.intp]:
    """Where a line must break: indices before a pause much longer than the usual interval.

    Samples that come more slowly from some time on, as on a node without a free core, are no
    pauses: a pause is much longer than those beside it, too.
    """
    none = np.array([], dtype=np.intp)
    if len(starts) < 3:
        return none
    pauses = starts[1:] - (starts if ends is None else ends)[:-1]
    if ends is None and pauses.max() <= _GAP_INTERVALS * pauses.min():
        return none  # as nearly always; of a thousand ranks the rest takes seconds
    usual: Floats = np.full(len(starts) - 1, np.median(np.diff(starts)))
    if ends is None:
        beside = np.maximum(np.append(pauses[:1], pauses[:-1]), np.append(pauses[1:], pauses[-1:]))
        beside[[0, -1]] = usual[[0, -1]]
        usual = np.maximum(usual, beside)
    return np.flatnonzero(pauses > _GAP_INTERVALS * usual)


def with_gaps(
    kept: npt.NDArray[np.intp], breaks: npt.NDArray[np.intp], columns: list[Floats], ends: Floats
) -> list[Floats]:
    """The chosen points of each column, and at each break a point without values."""
    if not len(breaks):
        return [columns[0][kept], *(c[kept].astype(np.float64) for c in columns[1:])]
    after = np.searchsorted(kept, breaks, side="right")
    inner = (after > 0) & (after < len(kept))
    places, first = np.unique(after[inner], return_index=True)
    times = np.insert(columns[0][kept], places, ends[breaks[inner][first]])
    values = [np.insert(c[kept].astype(np.float64), places, np.nan) for c in columns[1:]]
    return [times, *values]


_HOST_COLOR_INDEX = 6  # hosts begin at another colour than ranks
LINE_LIMIT = 8  # More owners of one counter than this are drawn as their spread
_LINE_POINTS, _STEP_POINTS = (240_000, 24, 2000), (128_000, 100, 4000)
"""Points of all lines together; and of each at least, and at most."""
_SPREAD_COLUMNS = 240
_SPREAD = (("lowest", GREY), ("median", BLUE), ("highest", VERMILLION))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One line of one panel."""

    about: dict[str, Any]
    seconds: Floats
    values: Floats


def counter_data(
    read: SeriesReader, start_ns: int, *, panels: Iterable[PanelSpec] = PANELS, each: bool = True
) -> dict[str, Any]:
    """The panels that have something to show, and the lines in them, one after the other."""
    shown: list[dict[str, Any]] = []
    lines: list[_Line] = []
    for panel in panels:
        found = [
            line
            for spec in panel.counters
            for line in _lines(read, panel, spec, len(shown), start_ns)
            if each or line.about["all"]
        ]
        if found:
            shown.append({"title": panel.title, "unit": panel.unit, "top": panel.top})
            lines += found
    return _pack(shown, lines)


def _pack(panels: list[dict[str, Any]], lines: list[_Line]) -> dict[str, Any]:
    limit = points_per_series(len(lines), *_LINE_POINTS)
    drawn = [
        with_gaps(thin_points(line.values, limit=limit), gap_starts(line.seconds),
                  [line.seconds, line.values], line.seconds)
        for line in lines
    ]  # fmt: skip
    seconds = np.concatenate([np.empty(0), *(x for x, _ in drawn)])
    values = np.concatenate([np.empty(0), *(y for _, y in drawn)])
    low, high = (float(seconds.min()), float(seconds.max())) if seconds.size else (0.0, 1.0)
    # One scale per line: panels differ by their units, lines by their size.
    scales = [float(np.nan_to_num(np.abs(y), posinf=0.0).max(initial=0.0)) or 1.0 for _, y in drawn]
    each = np.repeat(np.array(scales), [len(y) for _, y in drawn]) if drawn else values
    return {
        "panels": panels,
        "lines": [
            {**line.about, "count": len(x)} for line, (x, _) in zip(lines, drawn, strict=True)
        ],
        "time": on_axis(seconds, low=low, high=high),
        "value": {**half_floats(values / each), "scales": scales},
    }


def _lines(
    read: SeriesReader, panel: PanelSpec, spec: CounterSpec, number: int, start_ns: int
) -> Iterator[_Line]:
    """The line of each series; of many also their spread, and then single ones only on request."""
    series = label_series(read, spec)
    few = len(series) <= LINE_LIMIT
    lines = []
    for place, (label, own) in enumerate(series):
        host, rank, gpu, _ = own.owner
        nobodys = rank is None and gpu is None and spec.source != "process"
        color = series_color(_HOST_COLOR_INDEX + place if rank is None else rank)
        about = {
            "panel": number, "name": f"{printable(label)} {spec.word}".rstrip(), "rank": rank,
            "host": host if nobodys else None, "color": color,
            "dash": spec.dash, "all": few, "own": rank is not None or nobodys,
        }  # fmt: skip
        seconds = (own.time_ns - start_ns) / NS_PER_S
        lines.append(_Line(about=about, seconds=seconds, values=own.values / panel.scale))
    yield from lines
    if not few:
        yield from _spread(lines, spec, number)


def _spread(lines: Sequence[_Line], spec: CounterSpec, number: int) -> Iterator[_Line]:
    """Lowest, median and highest of the samples in each stretch of time."""
    seconds = np.concatenate([line.seconds for line in lines])
    values = np.concatenate([line.values for line in lines])
    mine = pl.DataFrame({"seconds": seconds, "value": values})
    low = float(seconds.min())
    width = (float(seconds.max()) - low) / _SPREAD_COLUMNS or 1.0
    place = ((pl.col("seconds") - low) / width).floor().alias("place")
    value = pl.col("value")
    rows = mine.group_by(place).agg(
        pl.col("seconds").mean(), lowest=value.min(), median=value.median(), highest=value.max()
    ).sort("place")  # fmt: skip
    for name, color in _SPREAD:
        of = f"{name} of {len(lines)} {spec.word}".rstrip()
        about = {"panel": number, "name": of, "rank": None, "host": None, "color": color,
                 "dash": spec.dash, "all": True, "own": False}  # fmt: skip
        yield _Line(about=about, seconds=rows["seconds"].to_numpy(), values=rows[name].to_numpy())


def map_data(grid: RankGrid, start_ns: int) -> dict[str, Any]:
    """The grid in ms: `phases` by name, each [rank, stretch]; a step is their sum."""
    return {
        "ranks": list(grid.ranks), "columns": grid.column_count,
        "start_s": (grid.start_ns - start_ns) / NS_PER_S,
        "end_s": (grid.end_ns - start_ns) / NS_PER_S,
        "typical_ms": {name: ns and ns / NS_PER_MS for name, ns in grid.typical_ns.items()},
        "phases": {phase: half_floats(grid.phase_ns[phase] / NS_PER_MS) for phase in PHASES},
    }  # fmt: skip


def traced_times(steps: pl.DataFrame) -> list[TimeRange]:
    """When steps were traced, on any rank: stretches that do not touch."""
    traced = steps.filter(pl.col("traced")).sort("start_ns")
    found: list[TimeRange] = []
    for start, length in traced.select("start_ns", "step_ns").iter_rows():
        if found and start <= found[-1].end_ns + length:
            end = max(found[-1].end_ns, start + length)
            found[-1] = TimeRange(start_ns=found[-1].start_ns, end_ns=end)
        else:
            found.append(TimeRange(start_ns=start, end_ns=start + length))
    return found


def step_data(steps: pl.DataFrame, start_ns: int) -> dict[str, Any]:
    """Real steps of each rank, the slowest and fastest of each stretch where they are many."""
    columns = ["start_ns", "step_ns", "step", *(f"{phase}_host_ns" for phase in PHASES)]
    ordered = steps.select("rank", *columns).sort("rank", "start_ns")
    ranks, firsts = np.unique(ordered["rank"].to_numpy(), return_index=True)
    limit = points_per_series(len(ranks), *_STEP_POINTS)
    values = ordered.select(pl.col(columns).cast(pl.Float64).fill_null(np.nan)).to_numpy()
    tables = []
    for own in np.split(values, firsts[1:]) if len(values) else ():
        seconds, step_ns = (own[:, 0] - start_ns) / NS_PER_S, own[:, 1]
        ends = seconds + step_ns / NS_PER_S
        kept = thin_points(step_ns, limit=limit)
        lines = [own[:, 2], *(own[:, 3 + place] / NS_PER_MS for place in range(len(PHASES)))]
        tables.append(np.array(with_gaps(kept, gap_starts(seconds, ends), [seconds, *lines], ends)))
    whole = np.concatenate(tables, axis=1) if tables else np.empty((2 + len(PHASES), 0))
    return {
        "ranks": ranks.tolist(), "counts": [table.shape[1] for table in tables],
        "time": single_floats(whole[0]), "step": single_floats(whole[1]),
        "phases": {phase: half_floats(whole[2 + place]) for place, phase in enumerate(PHASES)},
    }  # fmt: skip
