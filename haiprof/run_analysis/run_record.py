"""A run as a part of its job: its starts with their steps, checkpoints and ends, on one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from haiprof.base.intervals import Intervals, union
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.nesting import Spans
from haiprof.run_analysis.process_ends import ProcessEnd
from haiprof.run_analysis.ranks import compile_intervals, rank_positions
from haiprof.run_analysis.reactions import reactions
from haiprof.run_analysis.restarts import (
    CHECKPOINT,
    COMPILE,
    EVALUATION,
    WAITING,
    CheckpointCall,
    RunRecord,
    StartRecord,
    StepTimes,
)
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, mapping, text
from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_analysis.steps import COLLECTIVE_PHASE, PHASES
from haiprof.run_format import schema

_STOOD_STILL = ("hang", "mismatch")
"""Causes of deaths of ranks that waited for each other until something ended them."""
_TICK_NS = 10_000_000
"""Of /proc/PID/stat's start time: USER_HZ is 100 on Linux."""


def run_record(
    files: RunFiles,
    segments: Sequence[RankSegments],
    ends: Sequence[ProcessEnd],
    deaths: Sequence[Death],
) -> RunRecord:
    """The record of one run.

    Args:
        files: The run.
        segments: One rank, whose time it is: its starts in order.
        ends: How all processes of the run ended.
        deaths: Those of its starts that died.
    """
    own = {_generation(rank.files): rank for rank in segments}
    by_generation = {death.generation: death for death in deaths}
    starts = [
        _start(files, number, own.get(number), ends, by_generation.get(number))
        for number in sorted({*own, *by_generation})
    ]
    manifest = files.manifest
    start_ns, end_ns = (manifest.start_wall_ns, manifest.end_wall_ns) if manifest else (0, None)
    known = [start.times.end_ns for start in starts if start.times is not None]
    known += [start.ended_ns for start in starts if start.ended_ns is not None]
    known += [end.wall_ns for end in ends if end.wall_ns is not None]
    if not start_ns:
        start_ns = min((s.process_ns for s in starts if s.process_ns), default=0)
    hangs = [
        (seen.since_wall_ns, seen.wall_ns)
        for seen in reactions(files)
        if seen.trigger == "hang" and not seen.moves and not seen.saving
    ]
    return RunRecord(
        name=files.paths.root.name,
        start_ns=start_ns,
        end_ns=max([start_ns, *known]) if end_ns is None else end_ns,
        has_ended=end_ns is not None,
        starts=tuple(starts),
        hangs=tuple(hangs),
    )


def _generation(files: RankFiles) -> int:
    """As `process_ends` counts starts."""
    return integer(files.report.get("restart")) or files.attempt


def _start(
    files: RunFiles, generation: int, rank: RankSegments | None, ends: Sequence[ProcessEnd],
    death: Death | None,
) -> StartRecord:  # fmt: skip
    ranks = [each for each in files.ranks if _generation(each) == generation]
    last = [end.failed_ns for end in ends if end.generation == generation and end.rank is not None]
    ended = [time for time in last if time is not None]
    ended += [] if rank is None else _line_times(rank.files, rank.wall_offset_ns, "record_end")
    has_steps = rank is not None and len(rank.found.steps.start_ns)
    return StartRecord(
        run=files.paths.root.name,
        generation=generation,
        process_ns=None if rank is None else _process_start(rank),
        died_ns=None if death is None else death.died_ns,
        ended_ns=max(ended, default=None),
        why=None if death is None else death.own_end or death.headline,
        stood_still=death is not None and death.cause in _STOOD_STILL,
        is_unfinished=rank is not None and _is_unfinished(rank),
        times=_step_times(rank) if rank is not None and has_steps else None,
        saves=tuple(call for each in ranks for call in _checkpoint_calls(each, "save")),
        loads=tuple(call for each in ranks for call in _checkpoint_calls(each, "load")),
        apart={} if rank is None else _apart(rank),
    )


def _checkpoint_calls(files: RankFiles, action: str) -> list[CheckpointCall]:
    lines = [line for line in files.of_type("checkpoint") if line.get("action") == action]
    return [
        CheckpointCall(start_ns=begin, end_ns=end, file=text(line.get("file")),
                       written_ns=integer(line.get("written_ns")))
        for line in lines for begin, end in _pairs(files, [line])
    ]  # fmt: skip


def _pairs(files: RankFiles, lines: Sequence[Mapping[str, object]]) -> list[tuple[int, int]]:
    """Unix times of begin and end that lines tell."""
    offset_ns = files.clock_offset_ns or 0
    times = ((integer(line.get("start_ns")), integer(line.get("end_ns"))) for line in lines)
    return [
        (begin + offset_ns, end + offset_ns)
        for begin, end in times
        if begin is not None and end is not None and begin <= end and offset_ns
    ]


def _line_times(files: RankFiles, offset_ns: int, name: str) -> list[int]:
    times = [integer(line.get("time_ns")) for line in files.of_type(name)]
    return [time + offset_ns for time in times if time is not None]


def _process_start(rank: RankSegments) -> int | None:
    """Unix time at which its process began; where that is not known, its recording.

    Ticks count from the machine's start, and the monotonic clock too but for times of suspension.
    """
    report, offset_ns = rank.files.report, rank.wall_offset_ns
    ticks = integer(report.get("start_ticks"))
    began = _line_times(rank.files, offset_ns, "record_start")
    reported = integer(mapping(report.get("clock")).get("wall_ns"))
    known = min([*began, *([] if reported is None else [reported])], default=None)
    if ticks is None or known is None:
        return known
    at = ticks * _TICK_NS + offset_ns
    return at if at <= known else known


def _step_times(rank: RankSegments) -> StepTimes:
    found, offset_ns = rank.found, rank.wall_offset_ns
    positions, spans = rank_positions(rank), found.nested.spans
    trained = found.steps.start_ns.copy()
    stepped = (found.step >= 0) & (spans.kind == schema.OPTIMIZER)
    np.maximum.at(trained, found.step[stepped], spans.end_ns[stepped])
    trained = np.where(trained > found.steps.start_ns, trained, found.steps.end_ns)
    return StepTimes(
        start_ns=positions.start_ns + offset_ns,
        end_ns=positions.end_ns + offset_ns,
        position=positions.position,
        step=positions.period,
        trained_ns=trained + offset_ns,
    )


def _is_unfinished(rank: RankSegments) -> bool:
    """Whether work of a training step was under way after the last whole one."""
    found = rank.found
    ends = found.steps.end_ns
    after = found.nested.spans.start_ns >= (ends[-1] if len(ends) else 0)
    return bool((after & (found.phase < len(PHASES))).any()) and len(ends) > 0


def _apart(rank: RankSegments) -> dict[int, Intervals]:
    """When it saved, loaded, evaluated, compiled, and waited for ranks before its first step."""
    found, files = rank.found, rank.files
    spans, saved = found.nested.spans, rank.events.kind == schema.SAVE
    shift = rank.wall_offset_ns
    begun = found.steps.start_ns
    first_ns = int(begun[0]) + shift if len(begun) else np.iinfo(np.int64).max
    met = spans.take(found.phase == COLLECTIVE_PHASE)
    reads = [(call.start_ns, call.end_ns) for call in _checkpoint_calls(files, "load")]
    waits = _pairs(files, files.of_type("process_group"))
    apart = {
        CHECKPOINT: _union(rank.events.take(saved), shift, reads),
        EVALUATION: union(found.evaluation_start_ns + shift, found.evaluation_end_ns + shift),
        WAITING: _union(met, shift, waits),
    }
    apart[WAITING] = Intervals(*(np.minimum(side, first_ns) for side in apart[WAITING]))
    compiled = compile_intervals(files)
    return apart if compiled is None else {**apart, COMPILE: compiled}


def _union(spans: Spans, shift: int, pairs: Sequence[tuple[int, int]]) -> Intervals:
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    starts = np.concatenate([spans.start_ns + shift, table[:, 0]])
    return union(starts, np.concatenate([spans.end_ns + shift, table[:, 1]]))
