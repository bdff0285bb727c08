"""One rank's spans, steps and device times, read and cut once for all frames."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Floats
from haiprof.run_analysis.device import device_ns
from haiprof.run_analysis.nesting import Bools, Spans, kind_table
from haiprof.run_analysis.records import read_table, record_columns
from haiprof.run_analysis.run_files import RankFiles
from haiprof.run_analysis.spans import spans_of
from haiprof.run_analysis.steps import PHASES, Segmentation, segment
from haiprof.run_format import schema
from haiprof.run_format.layout import RankPaths

_EVENTS = kind_table(schema.GC, schema.SAVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSegments:
    """One rank of the run with its steps."""

    files: RankFiles
    record_count: int
    """Records that its spans were read from."""
    found: Segmentation
    events: Spans
    """Garbage collector pauses and checkpoint saves."""
    wall_offset_ns: int
    """Unix time minus the clock of the spans."""
    device_ns: Floats | None
    """[phase and other, step], NaN where unknown; None without device records."""
    seen: Bools
    """Per phase of PHASES: whether any training step of the rank has it."""
    notes: tuple[str, ...]
    """What was left out of the spans and device records."""


def load_segments(files: RankFiles, *, limit: int | None = None) -> RankSegments:
    """Reads and cuts the spans of one rank."""
    records = read_table(files.paths.phases, schema.PHASES, limit=limit)
    spans, notes = spans_of(records)
    clock = records.clock
    found = segment(spans, families=files.families())
    crossing = found.nested.overlapping_count
    if crossing:
        notes += (f"{files.paths.phases}: {crossing} spans that cross others left out",)
    device, damaged = _device(files.paths, found)
    return RankSegments(
        files=files,
        record_count=records.count,
        found=found,
        events=spans.take(_EVENTS[spans.kind]),
        wall_offset_ns=clock.wall_ns - clock.mono_ns,
        device_ns=device,
        seen=_phases_seen(found),
        notes=notes + damaged,
    )


def cut_segments(rank: RankSegments, between: tuple[int, int]) -> RankSegments:
    """The same rank with those steps alone that lie whole in a time, counted from 0 anew."""
    first, last = (time - rank.wall_offset_ns for time in between)
    steps = rank.found.steps
    inside = np.flatnonzero((steps.start_ns >= first) & (steps.end_ns <= last))
    begin, end = (steps.start_ns[inside[0]], steps.end_ns[inside[-1]]) if len(inside) else (0, -1)
    spans, events = rank.found.nested.spans, rank.events
    kept = spans.take((spans.start_ns >= begin) & (spans.end_ns <= end))
    found = segment(kept, families=rank.files.families())
    return replace(
        rank,
        found=found,
        events=events.take((events.start_ns >= begin) & (events.end_ns <= end)),
        device_ns=None,
        seen=_phases_seen(found),
    )


def _device(paths: RankPaths, found: Segmentation) -> tuple[Floats | None, tuple[str, ...]]:
    if not os.path.lexists(paths.device):
        return None, ()
    try:
        records = read_table(paths.device, schema.DEVICE)
    except RunFormatError as error:
        return None, (str(error),)
    if not records.count:
        return None, records.notes
    with np.errstate(all="ignore"):  # damaged values end as NaN, and those are null
        return device_ns(record_columns(records), found), records.notes


def _phases_seen(found: Segmentation) -> Bools:
    counts = np.bincount(found.phase[found.step >= 0], minlength=len(PHASES))
    seen: Bools = counts[: len(PHASES)] > 0
    return seen
