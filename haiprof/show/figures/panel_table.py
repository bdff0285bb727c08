"""Which counters are shown, as one table of rows and panels, and their labels; no plotly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from haiprof.base.units import BYTES_PER_GIB
from haiprof.base.version import read_data
from haiprof.run_analysis.counters import OwnerSeries, SeriesReader, sort_series

_OWNER = ["host", "rank", "gpu", "entity"]
"""Columns of `Analyzer.counters()` that identify a series."""


def frame_reader(counters: pl.DataFrame) -> SeriesReader:
    """The series of a frame of counters."""

    def read(source: str, metric: str) -> list[OwnerSeries]:
        mine = counters.filter(
            (pl.col("source") == source)
            & (pl.col("metric") == metric)
            & pl.col("value").is_finite()
        ).sort("time_ns", maintain_order=True)
        return sort_series(
            OwnerSeries(
                owner=(key[0], key[1], key[2], key[3]),
                time_ns=samples["time_ns"].to_numpy(),
                values=samples["value"].to_numpy(),
            )
            for key, samples in mine.group_by(_OWNER, maintain_order=True)
        )

    return read


def label_series(read: SeriesReader, spec: CounterSpec) -> list[tuple[str, OwnerSeries]]:
    """Each series of a counter that has a value; the rank if known, else GPU or entity, or host."""
    found = read(spec.source, spec.metric)
    many_hosts = len({each.owner[0] for each in found}) > 1
    labels = []
    for host, rank, gpu, entity in (each.owner for each in found):
        name = f"GPU {gpu}" if gpu is not None else entity
        own = str(host) if name is None else f"{host} {name}" if many_hosts else name
        labels.append(own if rank is None else f"rank {rank}")
    return list(zip(labels, found, strict=True))


_UNITS = {
    "cores": (1.0, "cores"), "GiB": (BYTES_PER_GIB, "bytes"), "MiB/s": (1 << 20, "bytes/s"),
    "%": (0.01, "ratio"), "W": (1.0, "watts"), "GHz": (1e9, "hz"), "G/s": (1e9, "count/s"),
    "M/s": (1e6, "count/s"), "ticks/s": (1.0, "count/s"), "packets/s": (1.0, "count/s"),
}  # fmt: skip
"""By unit as a figure shows it: base units per shown unit, and the base unit."""


class CounterSpec(NamedTuple):
    """One counter in a panel."""

    source: str
    metric: str
    word: str = ""
    dash: str = "solid"  # Its line, to distinguish it from another counter of the panel


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One panel of counters."""

    title: str
    unit: str  # As a figure shows it: one of `_UNITS`
    counters: tuple[CounterSpec, ...]
    terminal: str | None = None
    """Its name in the terminal, before the counter's own; None shows it in figures only."""
    top: float | None = None  # Upper end of its axis where it has one, in shown units

    @property
    def scale(self) -> float:
        """Base units per shown unit."""
        return _UNITS[self.unit][0]

    @property
    def base_unit(self) -> str:
        """Of the counters' values."""
        return _UNITS[self.unit][1]


@dataclass(frozen=True, slots=True)
class PanelRow:
    """One row of related panels."""

    title: str
    recorder: str  # The recorder that enables it
    sources: Sequence[str]  # Record files that fill it
    panels: tuple[PanelSpec, ...]


_DATA = read_data("show/figures/panels.json")


def _read_panels(panels: Iterable[Mapping[str, Any]]) -> tuple[PanelSpec, ...]:
    """Panels as the data file has them."""
    return tuple(
        PanelSpec(**{**each, "counters": tuple(CounterSpec(*one) for one in each["counters"])})
        for each in panels
    )


PANEL_ROWS = tuple(
    PanelRow(**{**row, "panels": _read_panels(row["panels"])}) for row in _DATA["rows"]
)
MEMORY_PANELS = _read_panels(_DATA["memory"])
"""Those of the page's section on memory; of ranks first."""

PANELS = tuple(each for row in PANEL_ROWS for each in row.panels)


def panel_metrics(panels: Iterable[PanelSpec] = PANELS) -> set[tuple[str, str]]:
    """Source and metric of all that some panels show."""
    return {(spec.source, spec.metric) for each in panels for spec in each.counters}
