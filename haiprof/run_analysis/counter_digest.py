"""All counters of a run in short: what there is of them, when, and their means while it trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.intervals import Floats
from haiprof.run_analysis.counters import (
    OwnerSeries,
    SeriesReader,
    SourceMetrics,
    record_files,
    sort_series,
    source_metrics,
)
from haiprof.run_analysis.run_files import RunFiles

MetricOwner = tuple[str, str | None, int | None, int | None]
"""Source, host, rank and GPU."""
_SOURCES = frozenset({"process", "host", "gpu"})
"""Of which the means are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricStat:
    """One metric of one owner."""

    mean: float
    min: float
    max: float


Metrics = Mapping[MetricOwner, Mapping[str, MetricStat]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterDigest:
    """Counters in short; of a thousand ranks the rows themselves do not fit in memory."""

    span: tuple[int, int] | None
    """Unix times of the first and the last sample."""
    present: Collection[tuple[str, str]]
    """Source and metric of all that has a sample."""
    stats: Metrics
    """Of the samples inside the windows; of all samples where none is inside."""
    windows: Mapping[str, tuple[int, int]] | None
    """Begin and end by host of what counts; None where all samples do."""

    def count_series(self, read: SeriesReader) -> SeriesReader:
        """The series of the samples that count: a host without ranks counts while any trains."""
        windows = self.windows
        if windows is None:
            return read
        others = _whole(windows)

        def read_counted(source: str, metric: str) -> list[OwnerSeries]:
            found = read(source, metric)
            return sort_series(
                each.cut(*windows.get(each.owner[0] or "", others)) for each in found
            )

        return read_counted


def read_digest(
    run: RunFiles, windows: pl.DataFrame, *, between: tuple[int, int] | None = None
) -> CounterDigest:
    """Reads one file after another.

    Args:
        run: The run directory.
        windows: `host`, `begin`, `end` (Unix time in ns): when each host's ranks trained.
        between: Only samples of this time.
    """
    by_host = {host: (begin, end) for host, begin, end in windows.iter_rows()}
    present: set[tuple[str, str]] = set()
    ends: list[int] = []
    inside, whole = _Values(), _Values()
    is_any_inside = False
    for node, records in record_files(run):
        if isinstance(records, str):
            continue
        found = source_metrics(run, node, records)
        first, last = between or (-(1 << 62), 1 << 62)
        wanted = (found.time_ns >= first) & (found.time_ns <= last)
        shown = {metric.name: metric.shown & wanted for metric in found.metrics}
        present |= {(found.source, name) for name, here in shown.items() if here.any()}
        sampled = found.time_ns[np.any([wanted & False, *shown.values()], axis=0)]
        if not len(sampled):
            continue
        ends += [int(sampled.min()), int(sampled.max())]
        if by_host:
            begin, end = by_host.get(node.host, _whole(by_host))
            is_any_inside = is_any_inside or bool(((sampled >= begin) & (sampled <= end)).any())
            inside.add(node.host, found, wanted & (found.time_ns >= begin) & (found.time_ns <= end))
        if not is_any_inside:
            whole.add(node.host, found, wanted)
    return CounterDigest(
        span=(min(ends), max(ends)) if ends else None,
        present=present,
        stats=(inside if is_any_inside else whole).stats,
        windows=by_host if is_any_inside else None,
    )


def _whole(windows: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return min(begin for begin, _ in windows.values()), max(end for _, end in windows.values())


class _Values:
    """Means, lowest and highest values of each metric by owner."""

    def __init__(self) -> None:
        self.stats: dict[MetricOwner, dict[str, MetricStat]] = {}

    def add(self, host: str, found: SourceMetrics, chosen: npt.NDArray[np.bool_]) -> None:
        """Adds a file, whose owners are in no other one."""
        if found.source not in _SOURCES:
            return
        owners: dict[MetricOwner, list[int]] = {}
        for place, (rank, gpu) in enumerate(zip(found.ranks, found.gpus, strict=True)):
            owners.setdefault((found.source, host, rank, gpu), []).append(place)
        for metric in found.metrics:
            at = np.flatnonzero(chosen & np.isfinite(metric.values))
            ends = np.searchsorted(found.owner[at], np.arange(len(found.ranks)), "right")
            parts = np.split(metric.values[at], ends)
            for owner, places in owners.items():
                values: Floats = np.concatenate([parts[place] for place in places])
                if len(values):
                    self.stats.setdefault(owner, {})[metric.name] = MetricStat(
                        mean=float(values.mean()), min=float(values.min()), max=float(values.max())
                    )
