"""Memory as the page shows it: over time, where it was highest, and what it held there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.units import BYTES_PER_GIB, MISSING, NS_PER_S, bytes_text
from haiprof.run_analysis import gpu_memory
from haiprof.run_analysis.counter_summaries import CounterDigest
from haiprof.run_analysis.counters import OwnerSeries, SeriesReader, sort_series
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.figures.panel_table import MEMORY_PANELS, panel_metrics
from haiprof.show.figures.style import PHASES, series_color
from haiprof.show.frame_table import HEADINGS, Fields, PageTable, page_records
from haiprof.show.page.counter_data import LINE_LIMIT, counter_data
from haiprof.show.text import printable

_RANK_LIMIT = 16
_SETTLED = 2
"""The first readings are of steps that still allocate what stays: the optimizer's state."""
_ALLOCATOR = "allocator"
_RSS = ("process", "memory_rss_bytes")
_OF_USE = {("host", "memory_available_bytes"), ("host", "memory_total_bytes")}
_NO_TRACE = "no traced window with allocations: `--trace --trace-memory` records one"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """Memory of a run."""

    peaks: PageTable  # Host memory of each rank: where it was highest
    gpu: PageTable  # GPU memory of each rank, by what is kept and what a step adds
    held: PageTable  # What GPU memory held where an allocation failed
    missing: tuple[tuple[str, str], ...]
    data: Mapping[str, Any]  # The panels, as `counter_data` packs them


def memory_part(
    analyzer: RunFrames, digest: CounterDigest, *, missing: Mapping[str, str], traced: bool,
    start_ns: int,
) -> MemoryPart:  # fmt: skip
    """Reads what a run recorded of memory."""
    levels = gpu_memory.gpu_memory_series(analyzer.files)
    peaks = _peaks(analyzer, digest.count_series(analyzer.read_series({_RSS})), start_ns)
    failed = [each for _, _, each in gpu_memory.failed_allocations(analyzer.run)]
    data = counter_data(
        _derived_reader(analyzer, levels, digest), start_ns, panels=MEMORY_PANELS, each=False
    )
    return MemoryPart(
        peaks=page_records(
            "Highest memory of each rank", peaks, _PEAKS, left=("phase",),
            note=HEADINGS["page_notes"]["memory_peaks"],
        ),
        gpu=_gpu_table(levels),
        held=page_records(
            "Held where an allocation failed", failed[:_RANK_LIMIT], _HELD, left=("in",),
            more=max(0, len(failed) - _RANK_LIMIT),
        ),
        missing=tuple(_missing(analyzer, missing, levels, failed=failed, traced=traced)),
        data=_with_marks(data, peaks),
    )  # fmt: skip


def _derived_reader(
    analyzer: RunFrames, levels: Mapping[int, gpu_memory.GpuMemorySeries], digest: CounterDigest
) -> SeriesReader:
    """The counters, with the used memory of nodes and what the allocators counted."""
    metrics = panel_metrics(MEMORY_PANELS) | _OF_USE
    recorded = analyzer.read_series(metrics.intersection(digest.present))

    def read(source: str, metric: str) -> Sequence[OwnerSeries]:
        if source == _ALLOCATOR:
            return sort_series(_of_allocators(analyzer, levels, metric))
        if (source, metric) == ("host", "memory_used_bytes"):
            return sort_series(_in_use(recorded))
        found = recorded(source, metric)
        if source != "cgroup":
            return found
        return sort_series(replace(each, owner=(*each.owner[:3], None)) for each in found)

    return read


def _in_use(recorded: SeriesReader) -> Iterator[OwnerSeries]:
    """Memory of nodes in use: the total without what is available."""
    available = {each.owner: each for each in recorded("host", "memory_available_bytes")}
    for total in recorded("host", "memory_total_bytes"):
        free = available.get(total.owner)
        if free is not None:
            time_ns, at, of = np.intersect1d(total.time_ns, free.time_ns, return_indices=True)
            yield replace(total, time_ns=time_ns, values=total.values[at] - free.values[of])


def _of_allocators(
    analyzer: RunFrames, levels: Mapping[int, gpu_memory.GpuMemorySeries], metric: str
) -> Iterator[OwnerSeries]:
    last = analyzer.files.last_attempts()
    for rank, series in levels.items():
        if (offset_ns := last[rank].clock_offset_ns) is not None:
            values = getattr(series, metric).astype(np.float64)
            yield OwnerSeries(owner=(None, rank, None, None), time_ns=series.time_ns + offset_ns,
                              values=values)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """Where one rank's host memory was highest."""

    rank: int
    seconds: float  # On the time axis of the figures
    highest_bytes: float
    first_bytes: float
    last_bytes: float
    step: int | None
    phase: str | None


_PEAKS: Fields = (
    ("rank", "rank"), ("first_bytes", "first"), ("highest_bytes", "highest"),
    ("last_bytes", "last"), (lambda peak: f"{peak.seconds:.1f} s", "highest at"), ("step", "step"),
    ("phase", "phase"),
)  # fmt: skip


def _peaks(analyzer: RunFrames, judged: SeriesReader, start_ns: int) -> list[_Peak]:
    """Of the ranks with the highest ones, in order of ranks."""
    own = sort_series(
        replace(each, owner=(None, each.owner[1], None, None)) for each in judged(*_RSS)
    )
    tops = {rank: each for each in own if (rank := each.owner[1]) is not None}
    ranks = sorted(sorted(tops, key=lambda rank: -tops[rank].values.max())[:_RANK_LIMIT])
    if not ranks:
        return []
    steps, spans = analyzer.steps(), analyzer.phases(ranks)
    found, start = [], pl.col("start_ns")
    for rank in ranks:
        values = tops[rank].values
        time_ns = int(tops[rank].time_ns[place := int(values.argmax())])
        begun = (pl.col("rank") == rank) & (start <= time_ns)
        step = steps.filter(begun, time_ns < start + pl.col("step_ns"))["step"]
        phase = spans.filter(
            begun, time_ns < start + pl.col("duration_ns"), pl.col("phase").is_in(PHASES)
        ).sort("duration_ns")["phase"]
        found.append(_Peak(
            rank=rank, seconds=(time_ns - start_ns) / NS_PER_S, highest_bytes=float(values[place]),
            first_bytes=float(values[0]), last_bytes=float(values[-1]),
            step=int(step[0]) if len(step) else None, phase=str(phase[0]) if len(phase) else None,
        ))  # fmt: skip
    return found


def _with_marks(data: dict[str, Any], peaks: Sequence[_Peak]) -> dict[str, Any]:
    """Marks the peaks of ranks that have a line of their own."""
    panels = [dict(panel) for panel in data["panels"]]
    if panels and panels[0]["title"] == MEMORY_PANELS[0].title and len(peaks) <= LINE_LIMIT:
        panels[0]["marks"] = marks = []
        for peak in peaks:
            where = "no step" if peak.step is None else f"step {peak.step}"
            where += f", {peak.phase}" if peak.phase else ""
            text = f"rank {peak.rank} {bytes_text(peak.highest_bytes)} in {where}"
            marks.append({
                "seconds": peak.seconds, "value": peak.highest_bytes / BYTES_PER_GIB,
                "color": series_color(peak.rank), "text": text,
            })  # fmt: skip
    return {**data, "panels": panels}


def _gpu_table(levels: Mapping[int, gpu_memory.GpuMemorySeries]) -> PageTable:
    head = ("rank", "kept between steps", "added within a step", "highest", "before step",
            "reserved", "limit")  # fmt: skip
    order = sorted(levels, key=lambda rank: (-int(levels[rank].peak_bytes.max()), rank))
    rows = []
    for rank in order[:_RANK_LIMIT]:
        series = levels[rank]
        settled, highest = series.allocated_bytes[_SETTLED:], int(series.peak_bytes.max())
        kept = float(np.median(settled)) if len(settled) else None
        added = None if kept is None else max(highest - kept, 0.0)
        reached = int(series.step[int(series.peak_bytes.argmax())])
        rows.append((
            str(rank), bytes_text(kept), bytes_text(added), bytes_text(highest), str(reached),
            bytes_text(int(series.reserved_bytes.max())), bytes_text(series.limit_bytes or None),
        ))  # fmt: skip
    more = max(0, len(order) - _RANK_LIMIT)
    title = "GPU memory of each rank, and what it held"
    return PageTable(title, head, rows, more=more, note=HEADINGS["page_notes"]["gpu_memory"])


_HELD: Fields = (
    (lambda each: MISSING if each.device is None else f"GPU {each.device}", "GPU"),
    ("requested_bytes", "wanted"),
    *((lambda each, of=name: bytes_text(each.held.get(of)), name.replace("_", " "))
      for name in ("parameters", "gradients", "buffers", "optimizer_state")),
    ("other_bytes", "activations and others"),
    (lambda each: bytes_text(each.limit_bytes or each.device_total_bytes), "limit"),
    (lambda each: printable(", ".join(filter(None, (each.phase, each.module)))) or MISSING, "in"),
    ("step", "step"),
)  # fmt: skip


def _missing(
    analyzer: RunFrames, missing: Mapping[str, str],
    levels: Mapping[int, gpu_memory.GpuMemorySeries], *,
    failed: Sequence[gpu_memory.GpuOutOfMemory], traced: bool,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """What of it is not known, and why."""
    for title, name in (("processes", "memory of ranks"), ("node", "memory of nodes")):
        if title in missing:
            yield name, missing[title]
    on_gpu = any("cuda" in device for device in analyzer.ranks()["device"].drop_nulls())
    if not levels:
        why = "no step was read of its allocator" if on_gpu else "no rank trained on a GPU"
        yield "GPU memory", why
    if on_gpu and not failed:
        why = "they are told apart where an allocation fails, and none did"
        yield "parameters, gradients and optimizer state", why
    if not traced:
        yield "by operator and module", _NO_TRACE
