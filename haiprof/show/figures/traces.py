"""Figures of traces: shares of time, kernels, launches, values over time, and causes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.base.intervals import Floats
from haiprof.base.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_US, duration_text, shorten
from haiprof.show.figures import style
from haiprof.show.figures.job import rank_bars, stepped_line
from haiprof.show.series import points_per_series, thin_points
from haiprof.show.views.functions import kernel_label as short_label
from haiprof.trace_analysis.device_time import OTHERS
from haiprof.trace_analysis.launches import LAUNCH_DELAY_CUTOFF_NS, RUNTIME_CUTOFF_NS

_ROW_PX, _FRAME_PX, _LEAST_PX, _MOST_PX = 24, 170, 260, 1600

Part = tuple[str, str, str]  # Column of the frame, the name that people read, and its colour


@dataclass(frozen=True, slots=True)
class PartBars:
    """A figure of a bar per row, in stacked parts; parts that nowhere happened are left out."""

    title: str
    keys: tuple[str, ...]  # Columns that name a row
    parts: tuple[Part, ...]
    prepare: Callable[[pl.DataFrame], pl.DataFrame] = lambda found: found
    """Makes a column for each part of what was found."""

    def __call__(self, found: pl.DataFrame, *, share: bool = False) -> go.Figure:
        """Draws it; with `share`, each part is a share of its bar."""
        rows = self.prepare(found)
        names = row_names(rows, self.keys)
        known = [part for part in self.parts if part[0] in rows.columns]
        seen = [part for part in known if (rows[part[0]].sum() or 0) > 0]
        whole = rows.select(pl.sum_horizontal(pl.lit(0), *(name for name, *_ in seen))).to_series()
        unit, size = ("%", 0.01) if share else style.time_unit(whole.max() if seen else None)  # type: ignore[arg-type]
        figure = go.Figure()
        for column, name, color in seen:
            values = rows[column] / whole if share else rows[column]
            shown = values.cast(pl.Float64) / size
            figure.add_trace(_bars(names, shown, name, color, f"{unit} {name}"))
        layout_rows(figure, names, title=self.title)
        figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **style.AXIS)
        if share:
            figure.update_xaxes(range=[0, 100])
        return figure


temporal_figure = PartBars(
    "<b>GPU time by rank</b>", ("rank", "device"),
    (("compute_ns", "computes", style.GREEN),
     ("non_compute_ns", "communicates or copies", style.ORANGE), ("idle_ns", "idle", style.GREY)),
)  # fmt: skip
idle_figure = PartBars(
    "<b>Idle time of streams, by cause</b>", ("rank", "device", "stream"),
    (("host_wait", "waits for the host", style.VERMILLION),
     ("kernel_wait", "between two kernels", style.SKY),
     ("other", "waits for another stream", style.PURPLE),
     ("unknown", "not known: no launch in the trace", style.GREY)),
    lambda found: _by_category(found, "idle_category", "idle_ns", ["rank", "device", "stream"]),
)  # fmt: skip
kernel_type_figure = PartBars(
    "<b>Busy GPU time by kind of kernel</b>", ("rank", "device"),
    (("computation", "computing", style.GREEN), ("communication", "communication", style.ORANGE),
     ("memory", "copies and sets", style.PURPLE),
     ("computation overlapping communication", "computing and communication", style.BLUE),
     ("computation overlapping memory", "computing and copies", style.SKY),
     ("communication overlapping memory", "communication and copies", style.YELLOW),
     ("computation overlapping communication overlapping memory", "all three", style.DARK_GREY)),
    lambda found: _by_category(found, "kernel_type", "time_ns", ["rank", "device"]),
)  # fmt: skip
overlap_figure = PartBars(
    "<b>Communication: hidden and exposed</b>", ("rank", "device"),
    (("overlap_ns", "hidden behind computing", style.GREEN),
     ("exposed_ns", "exposed", style.VERMILLION)),
    lambda found: found.with_columns(
        exposed_ns=pl.col("communication_ns") - pl.col("overlap_ns")
    ),
)  # fmt: skip


def _sum_collectives(found: pl.DataFrame) -> pl.DataFrame:
    known = pl.col("wait_ns").is_not_null() & pl.col("transfer_ns").is_not_null()
    length = pl.col("end_ns") - pl.col("start_ns")
    return found.group_by("rank").agg(
        pl.col("transfer_ns").filter(known).sum(),
        pl.col("wait_ns").filter(known).sum(),
        untold_ns=length.filter(~known).sum(),
    ).sort("rank")  # fmt: skip


collective_figure = PartBars(
    "<b>Time in collectives by rank</b>", ("rank",),
    (("transfer_ns", "transfers", style.GREEN),
     ("wait_ns", "waits for the last rank", style.VERMILLION),
     ("untold_ns", "not told apart", style.GREY)),
    _sum_collectives,
)  # fmt: skip


def layout_rows(figure: go.Figure, names: Sequence[str], *, title: str) -> None:
    """The layout of a figure with a bar per named row, the first on top."""
    height = min(_MOST_PX, max(_LEAST_PX, _ROW_PX * len(names) + _FRAME_PX))
    figure.update_layout(**style.figure_layout(title, height=height))
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=list(names),
                        autorange="reversed", automargin=True, **style.AXIS)  # fmt: skip


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


_HEIGHT_PX = 340
_KIND_COLORS = {
    "computation": ("computes", style.SKY), "communication": ("communicates", style.PURPLE),
    "memory": ("copies", style.ORANGE), "idle": ("idle", style.VERMILLION),
    "operators": ("host: operators", style.BLUE), "python": ("host: Python", style.GREEN),
    "wait": ("host: waits", style.YELLOW), "other": ("host: runtime, allocation", style.BROWN),
    "outside operators": ("host: nothing recorded", style.GRID),
}  # fmt: skip
_BAR_NAME_LENGTH = 28


def timeline_figure(found: pl.DataFrame) -> go.Figure:
    """Bars where they are in time, a row per lane."""
    unit, size = style.time_unit(found["step_ns"][0])
    kind = pl.col("kind").str.replace("^wait: .*", "wait")
    rows = found.with_columns(
        kind=pl.when(kind.is_in(list(_KIND_COLORS))).then(kind).otherwise(pl.lit("other"))
    )
    figure = go.Figure()
    for each, (name, color) in _KIND_COLORS.items():
        part = rows.filter(kind=each)
        if part.is_empty():
            continue
        has_name = each not in ("idle", "wait", "outside operators")
        labels = [kernel_label(label) if label and has_name else "" for label in part["name"]]
        figure.add_trace(go.Bar(
            y=part["lane"].to_list(), x=(part["dur_ns"] / size).to_list(),
            base=(part["start_ns"] / size).to_list(), orientation="h", name=name,
            marker={"color": color, "line": {"width": 0}},
            text=[label[:_BAR_NAME_LENGTH] if one else ""
                  for label, one in zip(labels, part["is_one"], strict=True)],
            textposition="inside", insidetextanchor="middle", textangle=0, textfont={"size": 10},
            customdata=labels,
            hovertemplate=f"%{{base:.4r}} {unit}: {name} for %{{x:.3r}} {unit} %{{customdata}}"
                          "<extra></extra>",
        ))  # fmt: skip
    layout_rows(figure, found["lane"].unique(maintain_order=True).to_list(),
                title="<b>Time line of a step</b>")  # fmt: skip
    figure.update_layout(barmode="overlay", bargap=0.15, uniformtext={"minsize": 9, "mode": "hide"})
    figure.update_xaxes(ticksuffix=f" {unit}", range=[0, found["step_ns"][0] / size], **style.AXIS)
    return figure


def critical_path_figure(found: pl.DataFrame, *, title: str) -> go.Figure:
    """What the critical path consists of, the longest cause on top."""
    ordered = found.filter(pl.col("duration_ns") > 0).sort(-pl.col("duration_ns"), "bound_by")
    names = [name.replace("_", " ") for name in ordered["bound_by"]]
    times, ratios = (ordered[name].to_list() for name in ("duration_ns", "share_ratio"))
    return _time_bars(names, times, ratios, of="the window", title=title)


def what_if_figure(found: pl.DataFrame) -> go.Figure:
    """By how much each change would make the step shorter."""
    now = pl.col("reproduced_step_ns")
    shown = found.with_columns(saved_ns=now - pl.col("predicted_step_ns"))
    step = f" ({duration_text(found['reproduced_step_ns'][0])} as it is)" if found.height else ""
    names = [name if len(name) <= _NAME_LENGTH else f"{name[:34]}…{name[-13:]}"
             for name in found["change"]]  # fmt: skip
    figure = _time_bars(
        names, shown["saved_ns"].to_list(), found["saved_ratio"].to_list(), of="the step",
        title=f"<b>What would make the step shorter, by how much{step}</b>",
    )  # fmt: skip
    _, size = style.time_unit(max(shown["saved_ns"].to_list(), default=None))
    middle, low, high = (
        -found[f"{name}_step_ns"] / size for name in ("predicted", "high", "low")
    )  # a step that is shorter saves more
    return figure.update_traces(error_x=_interval(middle, low, high))


def _time_bars(
    names: Sequence[str], times_ns: Sequence[float], ratios: Sequence[float], *, of: str, title: str
) -> go.Figure:
    """A bar of time per name, the first on top and the unit's measure, with its share."""
    unit, size = style.time_unit(max(times_ns, default=None))
    figure = go.Figure(go.Bar(
        y=names, x=[time / size for time in times_ns], orientation="h",
        marker={"color": style.BLUE}, customdata=[ratio * 100 for ratio in ratios],
        hovertemplate=f"%{{y}}: %{{x:.3r}} {unit}, %{{customdata:.3r}} % of {of}<extra></extra>",
    ))  # fmt: skip
    layout_rows(figure, names, title=title)
    figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **style.AXIS)
    return figure


def arrival_figure(found: pl.DataFrame) -> go.Figure:
    """How late each rank begins its collectives, per step, with its interval where there is one."""
    ordered = found.sort("rank")
    late, low, high = (
        (ordered[name] / NS_PER_MS).cast(pl.Float64) for name in ("late_ns", "low_ns", "high_ns")
    )
    said = str(found["said"][0]) if found.height else ""
    small = f"<br><span style='font-size:12px'>{said.split(';')[0]}</span>" if said else ""
    return rank_bars(
        ordered["rank"], late, ordered["is_late"], "ms", said="late per step",
        title=f"<b>Lateness at collectives, per step</b>{small}", height=_HEIGHT_PX,
        error_y=_interval(late, low, high),
    )  # fmt: skip


def _interval(middle: pl.Series, low: pl.Series, high: pl.Series) -> dict[str, Any]:
    """The error bars of values; none where an end is not known."""
    above, below = (abs(end - middle).fill_null(0).to_list() for end in (high, low))
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below}


_COLORED = 8  # So many kernels have a colour of their own: colours repeat after them
_NAME_LENGTH = 48


def top_kernels_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """The kernels with the most time, stacked for each rank; all others are one part."""
    labels = {name: kernel_label(name) for name in found["name"].unique()}
    found = found.with_columns(pl.col("name").replace_strict(labels))
    named = found.filter(pl.col("name") != OTHERS)
    sums = named.group_by("kind", "name").agg(pl.col("sum_ns").sum())
    top = sums.sort(-pl.col("sum_ns"), "name").head(_COLORED)
    ranks = found.select("rank").unique().sort("rank")
    whole = found.group_by("rank").agg(pl.col("sum_ns").sum())
    unit, size = style.time_unit(whole["sum_ns"].max())  # type: ignore[arg-type]
    names, figure = row_names(ranks, ("rank",)), go.Figure()
    rest = ranks.join(whole, on="rank", how="left")["sum_ns"]
    for index, (kind, name) in enumerate(top.select("kind", "name").iter_rows()):
        own = found.filter(kind=kind, name=name).group_by("rank").agg(pl.col("sum_ns").sum())
        times = ranks.join(own, on="rank", how="left")["sum_ns"].fill_null(0)
        rest = rest - times
        figure.add_trace(
            _bars(names, times / size, name, style.series_color(index), f"{unit}<br>{name}")
        )
    if rest.sum():
        figure.add_trace(
            _bars(names, rest / size, "all others", style.GREY, f"{unit}<br>all others")
        )
    layout_rows(figure, names, title=title or "<b>Kernels with the most time, by rank</b>")
    # Names of kernels are long: a line for each in the legend, below the bars.
    figure.update_layout(
        height=figure.layout.height + 20 * len(figure.data),
        legend={"orientation": "v", "y": -0.12, "yref": "paper", "yanchor": "top"},
    )
    figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **style.AXIS)
    return figure


def one_kernel_figure(found: pl.DataFrame) -> go.Figure:
    """One kernel on every rank: its mean duration, with the shortest and the longest call."""
    ordered = found.sort("rank", "device")
    mean, low, high = (ordered[name] / NS_PER_US for name in ("mean_ns", "min_ns", "max_ns"))
    name = kernel_label(ordered["name"][0]) if ordered.height else "no such kernel"
    figure = rank_bars(
        ordered["rank"], mean, mean == mean.max(), "µs", title=f"<b>{name}</b> by rank",
        said="in the mean of %{customdata[2]} calls, %{customdata[0]:.3r} to %{customdata[1]:.3r} "
        "µs", height=_HEIGHT_PX, customdata=list(zip(low, high, ordered["count"], strict=True)),
        error_y=_interval(mean, low, high) | {"thickness": 1.5},
    )  # fmt: skip
    figure.update_xaxes(dtick=1 if ordered.height < 20 else None)
    figure.update_yaxes(rangemode="tozero")
    return figure


def kernel_label(name: str) -> str:
    """A kernel's name for a legend: without template arguments, and not longer than a line."""
    return shorten(short_label(name), _NAME_LENGTH).replace("&", "&amp;").replace("<", "&lt;")


def _bars(names: list[str], values: pl.Series, name: str, color: str, said: str) -> go.Bar:
    """A part of each bar; `said` is what follows its value on hover."""
    return go.Bar(
        y=names, x=values.to_list(), name=name, orientation="h", marker={"color": color},
        hovertemplate=f"%{{y}}: %{{x:.3r}} {said}<extra></extra>",
    )  # fmt: skip


_BINS_PER_DECADE, _SHORTEST_US = 8, 0.1
_TRACE_LAUNCHES_HEIGHT_PX = 720


def launch_figure(
    found: pl.DataFrame, *, runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
    launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
) -> go.Figure:  # fmt: skip
    """Three distributions over all ranks, on logarithmic axes of time."""
    short = found.filter("is_short")
    panels = (
        (found["cpu_duration_ns"], style.BLUE, runtime_cutoff_ns,
         f"Calls by duration: {found['is_runtime_outlier'].sum()} of {found.height} are longer "
         f"than {runtime_cutoff_ns / NS_PER_US:g} µs"),
        (found["launch_delay_ns"], style.PURPLE, launch_delay_cutoff_ns,
         f"Delay from call to kernel: {found['is_launch_delay_outlier'].sum()} are longer than "
         f"{launch_delay_cutoff_ns / NS_PER_US:g} µs"),
        (short["gpu_duration_ns"], style.GREEN, None,
         f"Kernels shorter than their call: {short.height} of {found.height}, by duration"),
    )  # fmt: skip
    figure = make_subplots(
        rows=3, cols=1, vertical_spacing=0.13, subplot_titles=[text for *_, text in panels]
    )
    for row, (times, color, cutoff_ns, _) in enumerate(panels, start=1):
        known: Floats = times.drop_nulls().to_numpy() / NS_PER_US
        if len(known):
            figure.add_trace(_histogram(known, color), row=row, col=1)
        if cutoff_ns:
            figure.add_vline(x=cutoff_ns / NS_PER_US, row=row, col=1,
                             line={"color": style.GREY, "dash": "dash"})  # fmt: skip
    figure.update_layout(
        **style.figure_layout("<b>Launches</b>", height=_TRACE_LAUNCHES_HEIGHT_PX), showlegend=False
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    figure.update_xaxes(type="log", ticksuffix=" µs", **style.AXIS)
    figure.update_yaxes(rangemode="tozero", **style.AXIS)
    return figure


def _histogram(times_us: Floats, color: str) -> go.Bar:
    """How many are how long; what is shorter than the first bin counts in it."""
    longest = max(float(times_us.max()), _SHORTEST_US * 10)
    count = int(np.log10(longest / _SHORTEST_US) * _BINS_PER_DECADE) + 2
    edges = np.geomspace(_SHORTEST_US, longest * 1.001, count)
    counts = np.histogram(np.maximum(times_us, _SHORTEST_US), edges)[0]
    return go.Bar(
        x=np.sqrt(edges[:-1] * edges[1:]), y=counts, width=np.diff(edges),
        marker={"color": color}, customdata=np.stack([edges[:-1], edges[1:]], axis=1),
        hovertemplate="%{y} of %{customdata[0]:.3r} to %{customdata[1]:.3r} µs<extra></extra>",
    )  # fmt: skip


SERIES_LIMIT = 12  # More lines cannot be told apart: those with the highest values are drawn
_TRACE_LINES_HEIGHT_PX = 380


def queue_figure(found: pl.DataFrame) -> go.Figure:
    """The length of each stream's launch queue over time."""
    series = found.with_columns(
        value=pl.col("queue_length").cast(pl.Float64), name=pl.format("stream {}", "stream")
    )
    return _over_time(series, ("rank", "device", "stream"), "", "Launch queues over time")


def bandwidth_figure(found: pl.DataFrame) -> go.Figure:
    """The bandwidth of each kind of copy over time."""
    value = pl.col("bandwidth_bytes_per_s") / BYTES_PER_GIB
    series = found.with_columns(value=value, name="copy_kind")
    keys = ("rank", "device", "copy_kind")
    return _over_time(series, keys, "GiB/s", "Bandwidth of copies over time")


def memory_figure(found: pl.DataFrame) -> go.Figure:
    """Memory in tensors over time, and what the caching allocator holds."""
    names = {"allocated_bytes": "in tensors", "reserved_bytes": "reserved"}
    if found["allocated_bytes"].is_null().all():
        names = {"since_start_bytes": "since the trace began"}
    kept = found.filter(pl.col("device_type") != "cpu")
    rows, index = kept if kept.height else found, ["rank", "device_type", "device", "ts_ns"]
    long = rows.unpivot(list(names), index=index, variable_name="what").drop_nulls("value")
    small = max(long["value"].to_list(), default=0) < BYTES_PER_GIB
    unit, size = ("MiB", BYTES_PER_GIB / 1024) if small else ("GiB", BYTES_PER_GIB)
    series = long.with_columns(pl.col("value") / size, name=pl.col("what").replace(old=names))
    return _over_time(series, ("rank", "device_type", "device", "what"), unit, "Memory over time")


def _over_time(found: pl.DataFrame, keys: Sequence[str], unit: str, title: str) -> go.Figure:
    """A stepped line per rank and `name`: `ts_ns`, and `value` from then on."""
    figure = go.Figure()
    highest = found.group_by(keys).agg(pl.col("value").max().alias("most"))
    ordered = highest.filter(pl.col("most") > 0).sort(-pl.col("most"), *keys)
    shown = ordered.head(SERIES_LIMIT).sort(keys).select(keys)
    start_ns, end_ns = map(int, (found["ts_ns"].min(), found["ts_ns"].max()))  # type: ignore[arg-type]
    second, second_ns = style.time_unit(end_ns - start_ns)
    limit = points_per_series(shown.height)
    for index, key in enumerate(shown.partition_by(keys, maintain_order=True)):
        own = found.join(key, on=keys, how="semi", nulls_equal=True, maintain_order="left")
        own = own.sort("ts_ns", maintain_order=True)
        values, name = own["value"].to_numpy(), f"rank {own['rank'][0]}, {own['name'][0]}"
        kept = thin_points(values, limit=limit)
        times = ((own["ts_ns"] - start_ns) / second_ns).to_numpy()
        figure.add_trace(stepped_line(
            times[kept], values[kept], name, style.series_color(index),
            dash=style.series_dash(index), said=f"{name}, %{{x:.3f}} {second}: %{{y:.3r}} {unit}",
        ))  # fmt: skip
    left_out = ordered.height - shown.height
    more = f"<br><span style='font-size:12px'>{left_out} lower lines are left out</span>"
    title = f"<b>{title}</b>{more if left_out else ''}"
    figure.update_layout(**style.figure_layout(title, height=_TRACE_LINES_HEIGHT_PX))
    figure.update_xaxes(ticksuffix=f" {second}", **style.AXIS)
    figure.update_yaxes(rangemode="tozero", ticksuffix=f" {unit}".rstrip(), **style.AXIS)
    return figure
