"""Panels of a figure: one picture over the run's time axis each, thinned and with its unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import polars as pl

from haiprof.plots.style import series_color
from haiprof.plots.thin import Floats, gap_starts, kept_points, points_per_series, with_gaps
from haiprof.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_S

BYTES_PER_MIB = 1 << 20
HOST_COLOR_INDEX = 6  # hosts begin at another colour than ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSpec:
    """One counter in a panel."""

    source: str
    metric: str
    scale: float = 1.0
    """What a shown unit is worth in base units."""
    word: str = ""
    """Told apart from another counter of the panel."""
    dash: str = "solid"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelSpec:
    """One panel of counters."""

    title: str
    unit: str
    counters: tuple[CounterSpec, ...]
    missing: str
    """Which missing source explains an empty panel."""
    top: float | None = None
    """Upper end of its axis where it has one."""


PANELS = (
    PanelSpec(
        title="CPU of ranks",
        unit="cores",
        counters=(CounterSpec(source="process", metric="cpu_cores"),),
        missing="processes",
    ),
    PanelSpec(
        title="CPU of nodes",
        unit="%",
        counters=(CounterSpec(source="host", metric="cpu_utilization_ratio", scale=0.01),),
        missing="node",
        top=105,
    ),
    PanelSpec(
        title="GPU utilization",
        unit="%",
        counters=(CounterSpec(source="gpu", metric="utilization_ratio", scale=0.01),),
        missing="GPU",
        top=105,
    ),
    PanelSpec(
        title="GPU memory",
        unit="GiB",
        counters=(CounterSpec(source="gpu", metric="memory_used_bytes", scale=BYTES_PER_GIB),),
        missing="GPU",
    ),
    PanelSpec(
        title="GPU power",
        unit="W",
        counters=(CounterSpec(source="gpu", metric="power_watts"),),
        missing="GPU",
    ),
    PanelSpec(
        title="Memory of ranks",
        unit="GiB",
        counters=(CounterSpec(source="process", metric="memory_rss_bytes", scale=BYTES_PER_GIB),),
        missing="processes",
    ),
    PanelSpec(
        title="Read and write of ranks",
        unit="MiB/s",
        counters=(
            CounterSpec(
                source="process", metric="read_bytes_per_s", scale=BYTES_PER_MIB, word="read"
            ),
            CounterSpec(
                source="process",
                metric="write_bytes_per_s",
                scale=BYTES_PER_MIB,
                word="write",
                dash="dot",
            ),
        ),
        missing="processes",
    ),
    PanelSpec(
        title="Network of nodes",
        unit="MiB/s",
        counters=(
            CounterSpec(
                source="host",
                metric="network_receive_bytes_per_s",
                scale=BYTES_PER_MIB,
                word="receive",
            ),
            CounterSpec(
                source="host",
                metric="network_transmit_bytes_per_s",
                scale=BYTES_PER_MIB,
                word="transmit",
                dash="dot",
            ),
        ),
        missing="node",
    ),
)  # fmt: skip


def counter_traces(panel: PanelSpec, counters: pl.DataFrame, start_ns: int) -> list[go.Scatter]:
    """The lines of one panel; empty where nothing of it was measured.

    Args:
        panel: What it shows.
        counters: `Analyzer.counters()`.
        start_ns: Unix time at which the time axis begins.
    """
    found = []
    for spec in panel.counters:
        mine = counters.filter(
            (pl.col("source") == spec.source)
            & (pl.col("metric") == spec.metric)
            & pl.col("value").is_finite()
        )
        groups = _by_owner(mine)
        for name, index, frame in groups:
            line = _Line(
                name=f"{name} {spec.word}".rstrip(),
                group=name,
                color=series_color(index),
                dash=spec.dash,
                unit=panel.unit,
                limit=points_per_series(len(groups)),
            )
            seconds = (frame["time_ns"].to_numpy() - start_ns) / NS_PER_S
            found.append(line.draw(seconds, frame["value"].to_numpy() / spec.scale))
    return found


def step_traces(steps: pl.DataFrame, start_ns: int) -> list[go.Scatter]:
    """Step time in ms over time, one line per rank."""
    frames = steps.sort("rank", "start_ns").partition_by("rank", maintain_order=True)
    found = []
    for own in frames:
        rank = own["rank"][0]
        line = _Line(
            name=f"rank {rank}",
            group=f"rank {rank}",
            color=series_color(rank),
            unit="ms",
            limit=points_per_series(len(frames)),
        )
        seconds = (own["start_ns"].to_numpy() - start_ns) / NS_PER_S
        times_ns = own["step_ns"].to_numpy()
        found.append(line.draw(seconds, times_ns / NS_PER_MS, seconds + times_ns / NS_PER_S))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """How one series is drawn."""

    name: str
    group: str
    color: str
    unit: str
    limit: int
    dash: str = "solid"

    def draw(self, seconds: Floats, values: Floats, ends: Floats | None = None) -> go.Scatter:
        kept = kept_points(values, limit=self.limit)
        lasting = seconds if ends is None else ends
        x, y = with_gaps(kept, gap_starts(seconds, ends), [seconds, values], lasting)
        return go.Scatter(
            x=x,
            y=y,
            name=self.name,
            legendgroup=self.group,
            mode="lines" if len(kept) > 1 else "markers",
            line={
                "color": self.color,
                "width": 1.5,
                "dash": self.dash,
                "shape": "linear" if ends is None else "hv",
            },
            marker={"color": self.color},
            hovertemplate=f"{self.name}: %{{y:.4g}} {self.unit}<extra></extra>",
        )


def _by_owner(frame: pl.DataFrame) -> list[tuple[str, int, pl.DataFrame]]:
    """(name, colour index, rows) by rank, else GPU, else host."""
    ordered = frame.sort("rank", "gpu", "host", "time_ns")
    groups = ordered.group_by(["host", "rank", "gpu"], maintain_order=True)
    return [(*_owner(key, place), rows) for place, (key, rows) in enumerate(groups)]


def _owner(key: Sequence[object], place: int) -> tuple[str, int]:
    host, rank, gpu = key
    if isinstance(rank, int):
        return f"rank {rank}", rank
    return (f"GPU {gpu}", place) if gpu is not None else (str(host), HOST_COLOR_INDEX + place)


def measured_panels(
    counters: pl.DataFrame, missing: Mapping[str, str], start_ns: int
) -> Iterator[tuple[PanelSpec, list[go.Scatter], str]]:
    """Each panel with its lines, or with the reason why it has none.

    A source that is missing as a whole gets one empty panel, not one per counter.
    """
    explained: set[str] = set()
    for panel in PANELS:
        traces = counter_traces(panel, counters, start_ns)
        if traces:
            yield panel, traces, ""
        elif panel.missing in missing and panel.missing not in explained:
            explained.add(panel.missing)
            yield panel, [], f"{panel.missing}: not measured: {missing[panel.missing]}"
