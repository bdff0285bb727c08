"""What steps take longer while a checkpoint is written beside them: an account of its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from haiprof.base.intervals import Floats, Ints, union
from haiprof.base.ledger import POSITIONS
from haiprof.base.statistics import Excess, excess
from haiprof.base.units import duration_text
from haiprof.diagnosis.job_time import BESIDE, FREE, NEITHER, JobTime
from haiprof.diagnosis.opportunities import CodePlace, Opportunity, opportunity
from haiprof.run_analysis import step_positions
from haiprof.run_analysis.ledger import BESIDE_SAVE, COLLECTION, PEER_WAIT, TimeTable
from haiprof.run_analysis.lines import written_in
from haiprof.run_analysis.run_files import RankFiles, integer, text
from haiprof.run_analysis.run_frames import Cells, RunFrames

SLOWED = "background_save"
_MOST_SPLIT = 0.95
_NOT_OF_STEPS = (step_positions.EVALUATION, step_positions.CHECKPOINT, step_positions.COMPILE,
                 step_positions.BETWEEN_STEPS)  # fmt: skip
"""What is not done in each step says nothing of how fast steps are."""
_PAUSES = len(POSITIONS)
"""Stands for collections, wherever they happen: what a writer makes sets off more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundSave:
    """A checkpoint that is written beside the training thread; Unix times in ns."""

    start_ns: int
    end_ns: int
    begun_at: tuple[str, int, str] | None
    """File, line and function of the job that began it; None where that was not seen."""


def background_saves(files: RankFiles) -> list[BackgroundSave]:
    """Those of one rank's attempt, in the order in which they ended."""
    offset_ns, found = files.clock_offset_ns, []
    for line in files.of_type("checkpoint"):
        start, end = integer(line.get("beside_ns")), integer(line.get("end_ns"))
        if offset_ns is None or start is None or end is None or end <= start:
            continue
        file, function = text(line.get("begun_file")), text(line.get("begun_function"))
        number, at = integer(line.get("begun_line")), None
        if file is not None and number is not None and function is not None:
            at = file, number, function
        found.append(BackgroundSave(start_ns=start + offset_ns, end_ns=end + offset_ns,
                                    begun_at=at))  # fmt: skip
    return found


def steps_beside(saves: Iterable[BackgroundSave], begin_ns: Ints) -> Ints:
    """BESIDE, FREE or NEITHER of each step, given the begin of all in Unix time."""
    starts, ends = np.array(
        [(save.start_ns, save.end_ns) for save in saves], dtype=np.int64
    ).reshape(-1, 2).T  # fmt: skip
    times = union(starts, ends)
    # The step in which a save begins also holds what the training thread does for it: it copies.
    place = np.searchsorted(times.starts, begin_ns, "left")
    next_ns = np.append(begin_ns[1:], np.iinfo(np.int64).max)
    begins = np.append(times.starts, np.iinfo(np.int64).max)[place] < next_ns
    found = np.where(begins, NEITHER, FREE)
    return np.where(step_positions.is_inside(*times, begin_ns), BESIDE, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """The saves of a run that were written beside its training."""

    steps: Mapping[int, Ints]
    """Of each rank and cell: BESIDE, FREE or NEITHER, by the saves of all ranks of its host."""
    own: Mapping[int, Sequence[BackgroundSave]]
    """Those that each rank has begun itself; ranks with any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowedSteps:
    """What they cost the steps that began meanwhile."""

    extra: Excess  # ns by which such a step of the job is longer than the others
    step_count: int  # Such steps
    of_count: int  # Steps that were looked at
    save_count: int


def find_saves(
    analyzer: RunFrames, steps: Mapping[int, Cells], hosts: Mapping[int, str]
) -> Saves | None:
    """The saves beside the judged steps of ranks; None where there are none."""
    last = analyzer.judged_files()
    own = {rank: found for rank in steps if (found := background_saves(last[rank]))}
    if not own:
        return None
    by_host = defaultdict[str | None, list[BackgroundSave]](list)
    for rank, found in own.items():
        by_host[hosts.get(rank)] += found
    marks = {}
    for rank, (first, begin_ns) in analyzer.step_starts(steps).items():
        cells, known = steps[rank], steps_beside(by_host[hosts.get(rank)], begin_ns)
        whole = (cells.step >= first) & (cells.count == 1)
        place = np.where(whole, cells.step - first, -1)
        marks[rank] = np.where(whole, np.append(known, NEITHER)[place], NEITHER)
    return Saves(steps=marks, own=own)


def split_saves(
    table: TimeTable, time: JobTime, saves: Saves
) -> tuple[TimeTable, Opportunity | None, SlowedSteps | None]:
    """What steps take longer beside saves, as one opportunity; None where chance could be it."""
    mark = time.beside[:, time.covered]
    work, by_position = _own_times(time)
    job = work.max(axis=0) if time.waits_for_all else work.mean(axis=0)
    of_job = np.where((mark == NEITHER).any(axis=0), NEITHER, mark.max(axis=0))
    found = _compare(job, of_job)
    if found is None or found.low <= 0:
        return table, None, None
    moved: list[Ints] = []
    for rank in np.unique(table.rank).tolist():
        row = time.ranks.index(rank)
        own = _compare(work[row], mark[row])
        if own is None or own.low <= 0:
            continue
        beside, free = mark[row] == BESIDE, mark[row] == FREE
        longer = {
            position: max(float(ns[row][beside].mean() - ns[row][free].mean()), 0.0)
            for position, ns in by_position.items()
        }
        scale = min(own.mean / max(sum(longer.values()), 1.0), 1.0)
        for position, extra_ns in longer.items():
            take = _take_pauses if position == _PAUSES else _take
            table, rows = take(table, time, row, position, scale * extra_ns)
            moved += rows
    if not moved:
        return table, None, None
    count, whole = int((of_job == BESIDE).sum()), int((of_job != NEITHER).sum())
    slowed = SlowedSteps(
        extra=found, step_count=count, of_count=whole,
        save_count=sum(len(each) for each in saves.own.values()),
    )  # fmt: skip
    more = replace(
        opportunity(table, np.concatenate(moved), _most_begun_at(saves)),
        key=SLOWED,
        spread=(found.low / found.mean, found.high / found.mean),
        when=f"in {count} of {whole} steps, {duration_text(found.mean)}",
    )
    return table, more, slowed


def _own_times(time: JobTime) -> tuple[Floats, dict[int, Floats]]:
    """[rank, covered step] of what is done in each step, without waiting for peers; by position."""
    spent = {position: time.position_ns(row) for row, position in enumerate(time.used)
             if position not in _NOT_OF_STEPS} | {_PAUSES: time.collected_ns}  # fmt: skip
    by_position = {at: time.of_covered(ns).astype(np.float64) for at, ns in spent.items()}
    whole: Floats = np.sum(list(by_position.values()), axis=0)
    return whole, by_position


def _compare(series: Floats, mark: Ints) -> Excess | None:
    known = mark != NEITHER
    return excess(series[known], mark[known] == BESIDE)


def _take(
    table: TimeTable, time: JobTime, row: int, position: int, extra_ns: float
) -> tuple[TimeTable, list[Ints]]:
    """Moves so much of a position's time in each step beside a save to rows of their own."""
    # It is taken from what the thread was sampled doing more than in the other steps.
    own = (table.rank == time.ranks[row]) & (table.cell == position)
    own &= table.activity != COLLECTION
    beside, others = own & (table.kind == BESIDE_SAVE), own & (table.kind != BESIDE_SAVE)
    kinds = time.kind[time.used.index(position), row]
    steps = np.array([(kinds == BESIDE_SAVE).sum(), time.count[kinds != BESIDE_SAVE].sum()])
    whole = time.totals_ns[row, BESIDE_SAVE, position] / max(steps[0], 1)
    usual = time.totals_ns[row, :BESIDE_SAVE, position].sum() / max(steps[1], 1)
    many = int(table.activity.max(initial=0)) + 1
    held = [np.bincount(table.activity[of], table.ns[of], many) for of in (beside, others)]
    now, before = (ns * each / max(float(each.sum()), 1.0)
                   for ns, each in zip((whole, usual), held, strict=True))  # fmt: skip
    more = np.maximum(now - before, 0.0)
    more[PEER_WAIT : PEER_WAIT + 1] = 0.0  # it is no work of its own
    more *= extra_ns / max(float(more.sum()), 1.0)
    found = []
    for activity in np.flatnonzero(more).tolist():
        rows = np.flatnonzero(beside[: len(own)] & (table.activity[: len(own)] == activity))
        table, new = table.split(rows, min(more[activity] / now[activity], _MOST_SPLIT),
                                 needed=False)  # fmt: skip
        found.append(new)
    return table, found


def _take_pauses(
    table: TimeTable, time: JobTime, row: int, _: int, extra_ns: float
) -> tuple[TimeTable, list[Ints]]:
    """The same of collections, which are kept without their steps."""
    rows = np.flatnonzero((table.rank == time.ranks[row]) & (table.activity == COLLECTION))
    whole = float(table.ns[rows].sum())
    if not whole:
        return table, []
    share = extra_ns * float((time.beside[row] == BESIDE).sum()) / whole
    table, new = table.split(rows, min(share, _MOST_SPLIT), needed=False)
    return table, [new]


def _most_begun_at(saves: Saves) -> CodePlace | None:
    """The line that began those that took longest together."""
    spent = Counter[tuple[str, int, str]]()
    for save in (save for found in saves.own.values() for save in found):
        if save.begun_at is not None:
            spent[save.begun_at] += save.end_ns - save.start_ns
    if not spent:
        return None
    file, line, function = max(spent, key=lambda at: (spent[at], at))
    return CodePlace(file=file, line=line, function=written_in(function))
