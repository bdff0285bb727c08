"""One rank's spans cut into steps with their device time, and the frames of steps and phases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Bools, Floats, Intervals, Ints
from haiprof.run_analysis import folded_steps
from haiprof.run_analysis.nesting import Codes, Nested, Spans, kind_table, take_rows, unpack
from haiprof.run_analysis.run_files import RankFiles, read_table, record_columns
from haiprof.run_analysis.step_positions import is_inside, place_in
from haiprof.run_analysis.steps import BOUNDARIES, PHASES, SPAN_PHASES, WORDS, Segmentation, segment
from haiprof.run_format import schema
from haiprof.run_format.folded import read_of_one_folding
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.reader import RecordFile
from haiprof.run_format.schema import ClockAnchor
from haiprof.trace_format.frame_columns import Columns, types_of


def read_spans(path: Path, *, first: int = 0) -> tuple[Spans, ClockAnchor, tuple[str, ...]]:
    """Reads the spans of one rank, the anchor of their clock, and notes on what was left out."""
    records = read_table(path, schema.PHASES, first=first)
    spans, notes = spans_of(records)
    return spans, records.clock, notes


def spans_of(records: RecordFile) -> tuple[Spans, tuple[str, ...]]:
    """The sound spans of a phases.rec, and notes on what was left out."""
    columns = record_columns(records)
    spans = unpack(columns["start"], columns["end"])
    known = np.zeros(1 << schema.TAG_BITS, dtype=np.bool_)
    known[list(schema.KIND_NAMES)] = True
    sound = known[spans.kind] & (spans.start_ns >= 0) & (spans.end_ns >= spans.start_ns)
    notes = records.notes
    if not sound.all():
        notes += (f"{records.path}: {int((~sound).sum())} damaged spans left out",)
        spans = spans.take(sound)
    return spans, notes


_PASSES = kind_table(schema.EVAL, schema.NOGRAD)


def device_ns(records: Mapping[str, npt.NDArray[Any]], found: Segmentation) -> Floats:
    """[phase, other and idle; step]: device time, NaN where unknown.

    A record covers the time since the previous optimizer span; a pass without gradients starts
    it anew. A step has values only where all its records are there and complete and cover the
    step: not after a step that the scaler skipped, not with such a pass inside. The first step
    after an evaluation has no other time, as that of the evaluation's end would be in it. Idle is a
    bound from above, and no part of the sum; recordings before it was recorded have none.
    """
    count = len(found.steps.start_ns)
    spans = found.nested.spans
    if not count:
        return np.empty((len(PHASES) + 2, 0))
    closing = np.flatnonzero((spans.kind == schema.OPTIMIZER) & (found.step >= 0))
    step, end = found.step[closing], np.sort(spans.end_ns[closing])
    keys = np.asarray(records["end_ns"])
    order = np.argsort(keys, kind="stable")
    row = order[np.minimum(np.searchsorted(keys[order], end), len(keys) - 1)]
    columns = [*(f"{phase}_ns" for phase in PHASES), "interval_ns", "idle_ns"]
    none = np.full(len(keys), np.nan)
    values = np.stack([
        np.asarray(records.get(name, none), dtype=np.float64)[row] for name in columns
    ])  # fmt: skip
    values[:, (keys[row] != end) | (np.asarray(records["missing_count"])[row] > 0)] = np.nan
    sums = np.zeros((len(columns), count))
    for place, value in enumerate(values):
        np.add.at(sums[place], step, value)
    # Steps whose records cover them alone, and those with no evaluation just before them.
    closed = np.bincount(step, minlength=count) > 0
    last = np.zeros(count, dtype=np.int64)
    last[step] = end  # ascending: the last one of each step stays
    passes = spans.start_ns[_PASSES[spans.kind]]
    inside = np.searchsorted(passes, last) > np.searchsorted(passes, found.steps.start_ns)
    before = np.append(found.steps.start_ns[:1], last[:-1])
    begun = found.evaluations.starts
    apart = np.searchsorted(begun, last) <= np.searchsorted(begun, before)
    covered = closed & np.append(True, closed[:-1])[:count] & ~inside
    sums[:, ~covered] = np.nan
    sums[-2:, ~apart] = np.nan
    sums[-2] -= sums[:-2].sum(axis=0)
    return np.where(np.isfinite(sums) & (sums >= 0) & (sums < 2.0**62), sums, np.nan)


_EVENTS = kind_table(schema.GC, schema.SAVE)

BusyTimes = tuple[Ints, Ints]
"""Begin and end of times in which a device had work queued for certain, on the clock of spans: from
the end of each optimizer span on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSegments:
    """One rank of the run with its steps."""

    files: RankFiles
    record_count: int  # records that its spans were read from
    record_end: int  # place in the file after the last of them
    folded: folded_steps.FoldedSteps
    """Its old steps, of which sums are left. `found` has the others, and counts them from 0."""
    found: Segmentation
    events: Spans  # garbage collector pauses and checkpoint saves
    wall_offset_ns: int  # Unix time minus the clock of the spans
    device_ns: Floats | None  # [phase, other and idle; step], NaN: unknown; None: no device records
    busy: BusyTimes | None  # None without device records
    seen: Bools  # per phase of PHASES: whether any training step of the rank has it
    notes: tuple[str, ...]  # what was left out of the spans and device records

    @property
    def first_step(self) -> int:
        """The number of the first step of `found`."""
        return self.folded.step_count

    @property
    def step_count(self) -> int:
        """All steps, the folded ones too."""
        return self.first_step + len(self.found.steps.start_ns)


def load_segments(files: RankFiles, *, end: int | None = None) -> RankSegments:
    """Reads and cuts the spans of one rank; all of them, or up to the record at `end`."""
    return read_of_one_folding(files.paths.folded, partial(_load_whole, files, end))


def _load_whole(files: RankFiles, end: int | None) -> RankSegments:
    """The steps that are whole: what comes before them was only kept to tell where they begin."""
    folded, notes = folded_steps.NOTHING_FOLDED, tuple[str, ...]()
    try:
        folded = folded_steps.read_folded_steps(files.paths)
    except RunFormatError as error:
        notes = (f"{error}: the steps before are missing",)
    first = folded.fact("first_record")
    limit = None if end is None else max(end - first, 0)
    records = read_table(files.paths.phases, schema.PHASES, first=first, limit=limit)
    spans, damaged = spans_of(records)
    clock = records.clock
    found = segment(spans, families=files.families())
    notes += damaged
    if crossing := found.nested.overlapping_count:
        notes += (f"{files.paths.phases}: {crossing} spans that cross others left out",)
    first = folded.fact("first_device_record")
    device, busy, damaged = _read_device(files.paths, found, first=first)
    rank = RankSegments(
        files=files, record_count=records.count, record_end=records.first + records.count,
        folded=folded, found=found, events=spans.take(_EVENTS[spans.kind]),
        wall_offset_ns=clock.wall_ns - clock.mono_ns, device_ns=device, busy=busy,
        seen=_phases_seen(found), notes=notes + damaged,
    )  # fmt: skip
    if not folded.step_count:
        return rank
    begun = found.steps.start_ns
    place = int(np.searchsorted(begun, folded.until_ns))
    rank = slice_segments(rank, place, None)
    rank = replace(rank, seen=rank.seen | (folded_steps.phase_sums(folded).sum(axis=1) > 0))
    if place == len(begun) or begun[place] != folded.until_ns:
        why = f"{files.paths.folded}: its end is not where a step begins: some time is missing"
        rank = replace(rank, notes=(*rank.notes, why))
    return rank


def slice_segments(rank: RankSegments, begin: int | None, end: int | None) -> RankSegments:
    """A rank between the begins of two steps, of which it counts them from 0; None: no edge."""
    found, steps, nested = rank.found, rank.found.steps, rank.found.nested
    lowest, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    begins = np.append(steps.start_ns, highest)
    first_ns = lowest if begin is None else begins[begin]
    last_ns = highest if end is None else begins[end]
    rows, evaluated = (
        slice(*np.searchsorted(times, (first_ns, last_ns)).tolist())
        for times in (nested.spans.start_ns, found.evaluations.starts)
    )
    cut = Segmentation(
        nested=Nested(
            spans=take_rows(nested.spans, rows), top=nested.top[rows] - rows.start,
            parent=np.where(nested.parent[rows] < 0, -1, nested.parent[rows] - rows.start),
            self_ns=nested.self_ns[rows], overlapping_count=nested.overlapping_count,
        ),
        phase=found.phase[rows], steps=take_rows(steps, slice(begin, end)),
        step=np.where(found.step[rows] < 0, -1, found.step[rows] - (begin or 0)),
        evaluations=Intervals(*(edges[evaluated] for edges in found.evaluations)),
        unfinished_micro_step_count=found.unfinished_micro_step_count if end is None else 0,
    )  # fmt: skip
    events, busy = rank.events, rank.busy
    if busy is not None:
        inside = (busy[0] >= first_ns) & (busy[0] < last_ns)
        busy = busy[0][inside], busy[1][inside]
    return replace(
        rank, found=cut,
        events=events.take((events.start_ns >= first_ns) & (events.start_ns < last_ns)),
        device_ns=None if rank.device_ns is None else rank.device_ns[:, begin:end], busy=busy,
    )  # fmt: skip


def cut_segments(rank: RankSegments, between: tuple[int, int]) -> RankSegments:
    """The same rank with those steps alone that lie whole in a time, counted from 0 anew."""
    first, last = (time - rank.wall_offset_ns for time in between)
    steps = rank.found.steps
    inside = np.flatnonzero((steps.start_ns >= first) & (steps.end_ns <= last))
    begin, end = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    cut = slice_segments(rank, begin, end)
    return replace(cut, folded=folded_steps.NOTHING_FOLDED, seen=_phases_seen(cut.found))


def read_device_table(path: Path, *, first: int = 0, limit: int | None = None) -> RecordFile:
    """Reads a device.rec; older ones lack two columns."""
    optional = ("idle_ns", "lag_ns")
    return read_table(path, schema.DEVICE, first=first, limit=limit, optional=optional)


def _read_device(
    paths: RankPaths, found: Segmentation, *, first: int
) -> tuple[Floats | None, BusyTimes | None, tuple[str, ...]]:
    if not os.path.lexists(paths.device):
        return None, None, ()
    try:
        records = read_device_table(paths.device, first=first)
    except RunFormatError as error:
        return None, None, (str(error),)
    if not records.count:
        return None, None, records.notes
    columns = record_columns(records)
    with np.errstate(all="ignore"):  # damaged values end as NaN, and those are null
        times = device_ns(columns, found)
    if "lag_ns" not in columns:  # of a version that did not write it down
        return times, None, records.notes
    lag = np.asarray(columns["lag_ns"], dtype=np.float64)
    order = np.argsort(columns["end_ns"], kind="stable")
    order = order[np.isfinite(lag[order]) & (lag[order] < 2.0**62)]
    begin = np.asarray(columns["end_ns"])[order]
    return times, (begin, begin + np.maximum(lag[order], 0).astype(np.int64)), records.notes


def _phases_seen(found: Segmentation) -> Bools:
    counts = np.bincount(found.phase[found.step >= 0], minlength=len(PHASES))
    seen: Bools = counts[: len(PHASES)] > 0
    return seen


STEP_PHASES = (*PHASES, "other")  # what a step's time is split into
STEP_COLUMNS: Columns = {
    "rank": (pl.Int64, "of the process"),
    "attempt": (pl.Int64, "restart of the rank, from 0"),
    "step": (pl.Int64, "from 0 in that attempt"),
    "start_ns": (pl.Int64, "Unix time"),
    "step_ns": (pl.Int64, "duration, evaluation taken out"),
    # adding up to `step_ns`; null: never seen in this rank
    **{f"{phase}_host_ns": (pl.Int64, f"{phase} on the host, exclusive") for phase in STEP_PHASES},
    # null: no device, or times lack
    **{f"{phase}_device_ns": (pl.Int64, f"{phase} on the device") for phase in STEP_PHASES},
    "idle_device_ns": (pl.Int64, "how long at most the device had nothing to do, in all phases"),
    "micro_step_count": (pl.Int64, "backward passes in it"),
    "optimizer_step_count": (pl.Int64, "optimizer steps in it"),
    "skipped": (pl.Boolean, "the gradient scaler let no optimizer step"),
    # or `fetch`, `module`, `collective` without training; `mark`: haiprof.step()
    "boundary": (pl.String, "what the step begins with: dataloader, optimizer or backward"),
    "confidence": (pl.Float64, "that these are the steps, from 0 to 1"),
    # or the stall at one of its ends was
    "traced": (pl.Boolean, "a trace window was in it: it took longer"),
}  # fmt: skip
STEP_SCHEMA = types_of(STEP_COLUMNS)


def by_attempt(steps: pl.DataFrame) -> Iterator[tuple[tuple[int, int], pl.DataFrame]]:
    """Steps of each rank and attempt, which stand together: slices, which copy nothing."""
    rank, attempt = steps["rank"].to_numpy(), steps["attempt"].to_numpy()
    changes = np.flatnonzero((np.diff(rank) != 0) | (np.diff(attempt) != 0)) + 1
    for first, end in pairwise([0, *changes.tolist(), len(rank)] if len(rank) else []):
        yield (int(rank[first]), int(attempt[first])), steps.slice(first, end - first)


class SharedColumns:
    """Columns of many ranks that hold the same: one value throughout, or counts from 0.

    They are made once and cut to length, so that a thousand ranks share their memory.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str | float | None], pl.Series] = {}

    def constant(self, value: str | float | None, count: int, kind: type[pl.DataType]) -> pl.Series:
        """So many times the same value; None is null."""
        key: tuple[str, str | float | None] = (str(kind), value)
        if key not in self._made or len(self._made[key]) < count:
            self._made[key] = pl.Series([value], dtype=kind).new_from_index(0, count)
        return self._made[key].head(count)

    def counting(self, count: int) -> pl.Series:
        """0, 1, 2, ..."""
        key: tuple[str, str | float | None] = ("counting", 0)
        if key not in self._made or len(self._made[key]) < count:
            self._made[key] = pl.Series(np.arange(count), dtype=pl.Int64)
        return self._made[key].head(count)

    def compact(self, values: np.ndarray, dtype: type[pl.DataType]) -> pl.Series:
        """The values, shared where all are the same."""
        if len(values) and (values == values[0]).all():
            return self.constant(values[0].item(), len(values), dtype)
        return pl.Series(values, dtype=dtype)


def step_frame(
    rank: RankSegments, traced: Bools | None = None, *, shared: SharedColumns | None = None
) -> pl.DataFrame:
    """Steps of one rank, in order."""
    shared = shared or SharedColumns()
    steps = rank.found.steps
    count = len(steps.start_ns)
    columns: dict[str, Any] = {
        "rank": pl.Series([rank.files.rank], dtype=pl.Int64).new_from_index(0, count),
        "attempt": shared.constant(rank.files.attempt, count, pl.Int64),
        "step": shared.counting(rank.step_count).tail(count),
        "start_ns": steps.start_ns + rank.wall_offset_ns,
        "step_ns": steps.step_ns,
        "micro_step_count": shared.compact(steps.micro_step_count, pl.Int64),
        "optimizer_step_count": shared.compact(steps.optimizer_step_count, pl.Int64),
        "skipped": shared.compact(steps.skipped, pl.Boolean),
        "boundary": shared.compact(np.array(BOUNDARIES)[steps.boundary], pl.String),
        "confidence": shared.compact(steps.confidence, pl.Float64),
        "traced": shared.compact(
            np.zeros(count, dtype=np.bool_) if traced is None else traced, pl.Boolean
        ),
        "other_host_ns": steps.other_ns,
    }
    missing = shared.constant(None, count, pl.Int64)
    for place, phase in enumerate(PHASES):
        columns[f"{phase}_host_ns"] = steps.host_ns[place] if rank.seen[place] else missing
    seen = [*rank.seen.tolist(), True, True]
    for place, name in enumerate((*STEP_PHASES, "idle")):
        ns = None if rank.device_ns is None or not seen[place] else np.rint(rank.device_ns[place])
        is_known = ns is not None and np.isfinite(ns).any()
        device = pl.Series(ns, nan_to_null=True).cast(pl.Int64) if is_known else missing
        columns[f"{name}_device_ns"] = device
    # Series one by one: of a thousand ranks a frame from a dictionary takes seconds.
    series = ((name, kind, columns[name]) for name, kind in STEP_SCHEMA.items())
    return pl.DataFrame([
        own.alias(name) if isinstance(own, pl.Series) else pl.Series(name, own, dtype=kind)
        for name, kind, own in series
    ])  # fmt: skip


def slow_frame(rank: RankSegments, *, limit: int | None = None) -> pl.DataFrame:
    """Folded steps that are kept whole: the first one, and slow ones.

    As `step_frame`, without device times.
    """
    slow = {name: column[:limit] for name, column in rank.folded.slow.items()}
    if not len(slow["step"]):
        return pl.DataFrame(schema=STEP_SCHEMA)
    host = {f"{phase}_host_ns": slow[f"{phase}_host_ns"] for phase in PHASES}
    same = ("step", "step_ns", "micro_step_count", "optimizer_step_count", "confidence")
    found = pl.DataFrame({
        **{name: slow[name] for name in same},
        **{name: own for seen, (name, own) in zip(rank.seen, host.items(), strict=True) if seen},
        "start_ns": slow["start_ns"] + rank.wall_offset_ns,
        "other_host_ns": slow["step_ns"] - sum(host.values()), "skipped": slow["skipped"] > 0,
        "traced": slow["traced"] > 0,
        "boundary": np.array(BOUNDARIES)[np.clip(slow["boundary"], 0, len(BOUNDARIES) - 1)],
    }).with_columns(rank=pl.lit(rank.files.rank), attempt=pl.lit(rank.files.attempt))  # fmt: skip
    return pl.concat([pl.DataFrame(schema=STEP_SCHEMA), found], how="diagonal_relaxed")


def untrained_boundary(steps: pl.DataFrame) -> str | None:
    """What most steps of a run are marked by, where that is no training; None elsewhere."""
    counts = steps["boundary"].drop_nulls().value_counts().rows()
    boundary, _ = max(counts, key=lambda each: (each[1], each[0]), default=("", 0))
    return boundary if boundary in WORDS else None


GC_PHASE, SAVE_PHASE = "gc", "save"
PHASE_COLUMNS: Columns = {
    "rank": (pl.Int64, "of the process"),
    "attempt": (pl.Int64, "restart of the rank, from 0"),
    "step": (pl.Int64, "null outside training steps"),
    "phase": (
        pl.String, "dataloader, forward, backward, optimizer, nograd_forward, eval, gc, save",
    ),
    "name": (pl.String, "module or optimizer"),
    "start_ns": (pl.Int64, "Unix time"),
    "duration_ns": (pl.Int64, "of the span"),
    "self_ns": (pl.Int64, "without the spans inside"),
}  # fmt: skip
PHASE_SCHEMA = types_of(PHASE_COLUMNS)
_NO_SPANS = pl.DataFrame(schema=PHASE_SCHEMA)
_OPTIMIZER_KINDS = (schema.OPTIMIZER, schema.SCALER)
_NAME_COUNT = schema.TAG_MASK + 1


def phase_frame(rank: RankSegments) -> pl.DataFrame:
    """Spans of one rank, by start."""
    # Spans that belong to an outer span's own work (a recomputed forward inside the backward) are
    # left out: their time is the outer one's.
    nested = rank.found.nested
    spans = nested.spans
    found = _of_rank(rank, {
        "step": np.where(rank.found.step < 0, -1, rank.found.step + rank.first_step),
        "phase": pl.Series(SPAN_PHASES, dtype=pl.String).gather(rank.found.phase),
        "name": _names(rank, spans.kind, spans.tag), "start_ns": spans.start_ns,
        "duration_ns": spans.end_ns - spans.start_ns, "self_ns": nested.self_ns,
    })  # fmt: skip
    return pl.concat([found, pause_frame(rank)]).sort("start_ns", maintain_order=True)


def pause_frame(rank: RankSegments) -> pl.DataFrame:
    """Collector pauses and checkpoint saves alone, in the columns of `phase_frame`."""
    # Of folded steps only the saves: their pauses are sums.
    events, found = rank.events, rank.found
    saves, of_save = rank.folded.saves()
    if not len(events.kind) and not len(of_save):
        return _NO_SPANS
    place = place_in(found.steps.start_ns, found.steps.end_ns, events.start_ns)
    evaluated = is_inside(*found.evaluations, events.start_ns)
    place = np.where((place < 0) | evaluated, -1, place + rank.first_step)
    kind, place = np.append(saves.kind, events.kind), np.append(of_save, place)
    duration = np.append(saves.end_ns - saves.start_ns, events.end_ns - events.start_ns)
    return _of_rank(rank, {
        "step": place, "phase": np.where(kind == schema.GC, GC_PHASE, SAVE_PHASE),
        "name": [None] * len(place), "start_ns": np.append(saves.start_ns, events.start_ns),
        "duration_ns": duration, "self_ns": duration,
    })  # fmt: skip


def _names(rank: RankSegments, kind: Codes, tag: Codes) -> pl.Series:
    """Names from the event lines: modules by root tag, then optimizers, then none."""
    roots, optimizers = rank.files.names("root"), rank.files.names("optimizer")
    names = [roots.get(tag) for tag in range(_NAME_COUNT)]
    names += [optimizers.get(tag) for tag in range(_NAME_COUNT)] + [None]
    stepped = np.isin(kind, _OPTIMIZER_KINDS)
    module = np.isin(kind, (schema.FORWARD, schema.FORWARD_EVAL, schema.EVAL, schema.NOGRAD))
    code = np.where(module, tag, np.where(stepped, tag.astype(np.int64) + _NAME_COUNT, -1))
    code[code < 0] = len(names) - 1
    return pl.Series(names, dtype=pl.String).gather(code)


def _of_rank(rank: RankSegments, columns: Mapping[str, Any]) -> pl.DataFrame:
    """The columns of spans whose times are on the rank's clock, as PHASE_SCHEMA has them."""
    step, start = pl.col("step"), pl.col("start_ns")
    found = pl.DataFrame(columns, schema_overrides=PHASE_SCHEMA).with_columns(
        rank=pl.lit(rank.files.rank), attempt=pl.lit(rank.files.attempt),
        step=pl.when(step >= 0).then(step), start_ns=start + rank.wall_offset_ns,
    )  # fmt: skip
    return found.select(pl.col(name).cast(kind) for name, kind in PHASE_SCHEMA.items())
