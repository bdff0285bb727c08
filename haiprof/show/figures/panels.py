"""Lines of a panel: one per series, thinned, with gaps where a series pauses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import polars as pl

from haiprof.base.arrays import Floats
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.show.figures.labels import OWNER, entity_label
from haiprof.show.figures.panel_table import PanelSpec
from haiprof.show.figures.style import series_color
from haiprof.show.figures.thinning import gap_starts, points_per_series, thin_points, with_gaps

HOST_COLOR_INDEX = 6  # hosts begin at another colour than ranks


def counter_traces(panel: PanelSpec, counters: pl.DataFrame, start_ns: int) -> list[go.Scatter]:
    """The lines of one panel; empty where nothing of it was measured."""
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
            found.append(line.draw(seconds, frame["value"].to_numpy() / panel.scale))
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
        kept = thin_points(values, limit=self.limit)
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
    """(name, colour index, rows) per rank, else per GPU, else per entity of a host."""
    many_hosts = frame["host"].n_unique() > 1
    ordered = frame.sort("rank", "gpu", "host", "entity", "time_ns")
    groups = ordered.group_by(OWNER, maintain_order=True)
    return [(*_label(key, place, many_hosts), rows) for place, (key, rows) in enumerate(groups)]


def _label(key: Sequence[object], place: int, many_hosts: bool) -> tuple[str, int]:
    rank = key[1]
    name = entity_label(*key, many_hosts=many_hosts)
    return name, rank if isinstance(rank, int) else HOST_COLOR_INDEX + place
