"""Starts of a job's ranks, from which checkpoint each went on, and where the wall time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from haiprof.base.intervals import Intervals, Ints, covered_lengths, intersection, total, union
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.process_ends import ProcessEnd
from haiprof.run_analysis.ranks import compile_intervals, evaluations, rank_positions
from haiprof.run_analysis.reactions import lines_in_snapshots, reactions
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, mapping, text
from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_analysis.steps import COLLECTIVE_PHASE, PHASES, trained_ns
from haiprof.run_format import schema
from haiprof.run_format.folded import MET

ACCOUNTS = (
    "productive_steps", "input", "evaluation", "checkpoint", "compile", "init",
    "waiting_for_ranks", "hang", "lost_steps", "uncertain_steps", "drain", "queue", "unknown",
)  # fmt: skip
"""Accounts of a job's wall time, from its first start to its last end; each moment is in one."""
(
    PRODUCTIVE, INPUT, EVALUATION, CHECKPOINT, COMPILE, INIT, WAITING, HANG, LOST, UNCERTAIN,
    DRAIN, QUEUE, UNKNOWN,
) = range(len(ACCOUNTS))  # fmt: skip
_OWN_POSITIONS = {"input": INPUT, "evaluation": EVALUATION, "checkpoint": CHECKPOINT,
                  "compile": COMPILE}  # fmt: skip
_OF_POSITION = np.array([_OWN_POSITIONS.get(name, PRODUCTIVE) for name in POSITIONS])
_FILE_CLOCK_NS = 20_000_000
"""A file's time is that of the kernel's last tick: up to 10 ms before the write (CONFIG_HZ=100)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCall:
    """A checkpoint that a start wrote, or read before it trained; Unix times in ns."""

    start_ns: int
    end_ns: int
    file: str | None  # None where it went to no file by name
    written_ns: int | None = None  # when the file that was read had been written


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where a rank was from its first step's begin to its last one's end, Unix time in ns."""

    start_ns: Ints  # begin of each interval, ascending
    end_ns: int
    position: Ints  # index into POSITIONS
    step: Ints  # in whose period it lies
    trained_ns: Ints  # by step: the end of its last optimizer step


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """One start of a job's ranks, as the rank with most steps saw it."""

    run: str  # the run directory's name
    generation: int
    process_ns: int | None  # Unix time at which its process began
    died_ns: int | None  # of its death; None where it did not die, or that is not known
    ended_ns: int | None  # of the last sign of it
    why: str | None  # how it ended, where it died
    stood_still: bool = False  # whether it died of ranks that waited for each other
    is_unfinished: bool = False  # whether a step was under way after the last whole one
    ended_well: bool = False
    """Whether its run is known to have ended with status 0: its work is done, whatever follows."""
    times: StepTimes | None = None  # None where it ended no step
    saves: tuple[CheckpointCall, ...] = ()  # of all its ranks, in order of time
    loads: tuple[CheckpointCall, ...] = ()
    apart: Mapping[int, Intervals] = field(default_factory=dict)
    """By account: when that was, outside of steps, too."""

    @property
    def step_count(self) -> int:
        """Whole steps."""
        return 0 if self.times is None else len(self.times.trained_ns)

    @property
    def saved_count(self) -> int:
        """Steps that a checkpoint of it holds; all of them where it did not die."""
        if self.died_ns is None:
            return self.step_count
        return self.trained_by(max((save.start_ns for save in self.saves), default=-1))

    def trained_by(self, time_ns: int) -> int:
        """Steps whose optimizer had stepped by then."""
        return 0 if self.times is None else int((self.times.trained_ns <= time_ns).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the ranks: the first one, or a restart."""

    run: str
    generation: int
    began_ns: int | None  # Unix time of its process, as far as that is known
    ended_ns: int | None  # Unix time of its death; None where it did not die, or that is not known
    why: str | None  # how it ended
    step_count: int  # steps of the rank that has most
    kept_steps: int
    """Of them those whose work is known to have counted: it was in the checkpoint from which a
    later start went on, its run ended with status 0, or no start came after it."""
    uncertain_steps: int  # those after them that may have counted
    went_on: str  # `first`, `checkpoint`, `not known`, or `never trained`
    from_start: int | None  # place of the start whose checkpoint it read
    from_step: int | None  # steps of that start that the checkpoint held; at least, where not exact
    file: str | None  # the checkpoint; None where none was seen
    first_step: int | None  # number of its first step in the whole job, from 0; None: not known
    has_saved: bool  # whether a checkpoint was seen to be written

    @property
    def lost_steps(self) -> int:
        """Steps whose work no later start had."""
        return self.step_count - self.kept_steps - self.uncertain_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run of a job."""

    name: str
    start_ns: int
    end_ns: int
    has_ended: bool  # whether its end is known; else it is the last sign of it
    starts: tuple[StartRecord, ...]
    hangs: tuple[tuple[int, int], ...] = ()  # (since, noticed): when nothing moved, Unix time


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The wall time of a job from its first start to its last end, by account."""

    accounts: Mapping[str, int]  # ns by account, those not 0; they add up to the wall time exactly
    wall_ns: int
    has_ended: bool
    starts: tuple[Start, ...]

    @property
    def residual_ns(self) -> int:
        """What the accounts miss of the wall time: 0."""
        return self.wall_ns - sum(self.accounts.values())

    @property
    def ratio(self) -> float | None:
        """The share of steps that counted, for certain; None without a step."""
        has_steps = any(start.step_count for start in self.starts)
        return self._share("productive_steps") if has_steps and self.wall_ns else None

    @property
    def ratio_high(self) -> float | None:
        """The same with the steps that may have counted."""
        return None if self.ratio is None else self.ratio + self._share("uncertain_steps")

    @property
    def lost_steps(self) -> tuple[int, int]:
        """Steps that were trained in vain: at least, at most."""
        lost = sum(start.lost_steps for start in self.starts)
        return lost, lost + sum(start.uncertain_steps for start in self.starts)

    def summary(self) -> dict[str, object]:
        """Its numbers in short, for JSON."""
        return {"ratio": self.ratio, "ratio_high": self.ratio_high, "wall_ns": self.wall_ns,
                "lost_steps": list(self.lost_steps)}  # fmt: skip

    def _share(self, name: str) -> float:
        return self.accounts.get(name, 0) / self.wall_ns


def goodput(runs: Sequence[RunRecord]) -> Goodput:
    """The wall time of the runs of one job, which follow each other."""
    records = [start for run in runs for start in run.starts]
    starts = find_starts(records)
    line, kept = _Line(runs[0].start_ns), iter(starts)
    for run in runs:
        line.spend(QUEUE, run.start_ns)
        for place, record in enumerate(run.starts):
            if record.process_ns is not None:
                line.spend(DRAIN if place else INIT, record.process_ns)
            _spend_start(line, record, next(kept))
        line.spend(DRAIN if line.at_ns > run.start_ns else UNKNOWN, run.end_ns)
    apart = {
        account: _join([record.apart[account] for record in records if account in record.apart])
        for account in (CHECKPOINT, EVALUATION, WAITING, COMPILE)
    }
    hangs = [_stretch(records, *hang) for run in runs for hang in run.hangs]
    sums = line.sums({**apart, HANG: _join(hangs)})
    return Goodput(
        accounts={ACCOUNTS[place]: ns for place, ns in enumerate(sums) if ns},
        wall_ns=line.at_ns - runs[0].start_ns, has_ended=runs[-1].has_ended, starts=starts,
    )  # fmt: skip


def find_starts(records: Sequence[StartRecord]) -> tuple[Start, ...]:
    """The starts in order, with what of each one counted."""
    # The last start that trained has its steps; what it went on from has those that its checkpoint
    # holds, and so on back to the first one. Steps of starts beside that line are lost. Where a
    # start read nothing that is known as a checkpoint of the job, all before it may have counted;
    # so may those that the last start trained after its last save, where it died.
    origins = [_find_origin(records, place) for place in range(len(records))]
    trained = [place for place, record in enumerate(records) if record.step_count]
    first = trained[0] if trained else len(records)
    kept = [(0, 0)] * len(records)
    at = max((p for p, o in enumerate(origins) if p in trained or o is not None), default=0)
    kept[at:] = [(record.saved_count, record.step_count) for record in records[at:]]
    while (origin := origins[at] if records else None) is not None:
        at = origin.start
        kept[at] = (origin.low, origin.high)
    if at > first:
        kept[:at] = [(r.step_count * r.ended_well, r.step_count) for r in records[:at]]
    numbers = {first: 0}
    for place, origin in enumerate(origins):
        if origin is not None and origin.low == origin.high and origin.start in numbers:
            numbers[place] = numbers[origin.start] + origin.low
    return tuple(
        Start(
            run=record.run, generation=record.generation, began_ns=record.process_ns,
            ended_ns=record.died_ns, why=record.why, step_count=record.step_count, kept_steps=low,
            uncertain_steps=high - low,
            went_on="never trained" if not record.step_count and origin is None
            else "first" if place == first
            else "not known" if origin is None else "checkpoint",
            from_start=origin and origin.start, from_step=origin and origin.low,
            file=origin and origin.file, first_step=numbers.get(place),
            has_saved=bool(record.saves),
        )
        for place, (record, (low, high), origin) in enumerate(
            zip(records, kept, origins, strict=True)
        )
    )  # fmt: skip


class _Origin(NamedTuple):
    """The steps of an earlier start that a checkpoint holds: between `low` and `high` of them."""

    start: int
    low: int
    high: int
    file: str | None


def _find_origin(records: Sequence[StartRecord], place: int) -> _Origin | None:
    """The checkpoint of an earlier start that one has read; None where it is not known."""
    # A file tells by its time which save wrote it, also once it has another name. A file that was
    # written before the job trained (weights to begin with, a data set) is no checkpoint of it.
    earlier = list(enumerate(records[:place]))
    known = [(load.written_ns, load.file) for load in records[place].loads if load.written_ns]
    for written_ns, file in sorted(known, key=lambda load: -load[0]):
        saves = [(save.start_ns, start, save) for start, record in earlier for save in record.saves
                 if save.start_ns <= written_ns + _FILE_CLOCK_NS]  # fmt: skip
        if saves:
            save_ns, start, save = max(saves, key=lambda found: found[0])
            low = high = records[start].trained_by(save_ns)
            is_sure = save.file == file and file is not None
            if not is_sure and written_ns > save.end_ns + _FILE_CLOCK_NS:
                high = max(low, records[start].trained_by(written_ns))
        else:  # by a way that haiprof does not see
            trained = [(at, n) for at, record in earlier if (n := record.trained_by(written_ns))]
            (start, high), low = trained[-1] if trained else (-1, 0), 0
        if high:
            return _Origin(start, low, high, file)
    return None


def _spend_start(line: _Line, record: StartRecord, start: Start) -> None:
    times, end_ns = record.times, record.died_ns or record.ended_ns
    if times is not None:
        line.spend(INIT, int(times.start_ns[0]))
        kept = np.append(  # by step
            np.full(start.kept_steps, PRODUCTIVE), np.full(start.uncertain_steps, UNCERTAIN)
        )
        fate = np.append(kept, np.full(record.step_count - len(kept), LOST))[times.step]
        account = _OF_POSITION[times.position]
        in_step = (account == PRODUCTIVE) | ((account == INPUT) & (fate != PRODUCTIVE))
        line.extend(times.start_ns, np.where(in_step, fate, account), times.end_ns)
    if end_ns is not None:
        cut_off = record.is_unfinished and record.died_ns is not None
        rest = INIT if times is None else LOST if cut_off else DRAIN
        line.spend(HANG if record.stood_still else rest, end_ns)


def _stretch(records: Sequence[StartRecord], since_ns: int, noticed_ns: int) -> Intervals:
    """A hang: from the last sign of life to the next one, a step's begin or an end."""
    signs = [np.array([noticed_ns])]
    for record in records:
        ends = (record.process_ns, record.died_ns or record.ended_ns)
        signs.append(np.array([time for time in ends if time is not None], dtype=np.int64))
        if record.times is not None:
            begins = np.flatnonzero(np.diff(record.times.step, prepend=-1))
            signs += [record.times.start_ns[begins], np.array([record.times.end_ns])]
    later = np.concatenate(signs)
    later = later[later > noticed_ns]
    end_ns = int(later.min()) if len(later) else noticed_ns
    return Intervals(np.array([since_ns]), np.array([end_ns]))


def _join(parts: Sequence[Intervals]) -> Intervals:
    none = (np.zeros(0, dtype=np.int64),) * 2
    return union(*map(np.concatenate, zip(none, *parts, strict=True)))


class _Line:
    """Accounts over time, written from begin to end."""

    def __init__(self, start_ns: int) -> None:
        self.at_ns = start_ns
        self._parts: list[tuple[Ints, Ints]] = []

    def spend(self, account: int, until_ns: int) -> None:
        """All time up to a moment; none where that lies behind, as clocks of nodes may have it."""
        self.extend(np.array([self.at_ns]), np.array([account]), until_ns)

    def extend(self, start_ns: Ints, account: Ints, end_ns: int) -> None:
        """Intervals; what lies before the moment that was reached is left out."""
        if end_ns <= self.at_ns:
            return
        start_ns = np.maximum(start_ns, self.at_ns)
        longer = np.append(start_ns[1:], end_ns) > start_ns
        self._parts.append((start_ns[longer], account[longer]))
        self.at_ns = end_ns

    def sums(self, apart: Mapping[int, Intervals]) -> list[int]:
        """Time in ns by account; what those apart cover is theirs, a later one's first; exact."""
        none = (np.zeros(0, dtype=np.int64),) * 2
        start_ns, account = map(np.concatenate, zip(none, *self._parts, strict=True))
        end_ns = np.append(start_ns[1:], self.at_ns)[: len(start_ns)]
        whole, covered = Intervals(start_ns[:1], end_ns[-1:]), Intervals(*none)
        sums = [0] * len(ACCOUNTS)
        for number, when in reversed(list(apart.items())):
            own = intersection(when, whole)
            sums[number] = total(own) - total(intersection(own, covered))
            covered = _join([covered, own])
        left = end_ns - start_ns - covered_lengths(covered, start_ns, end_ns)
        for number in np.unique(account).tolist():
            sums[number] += int(left[account == number].sum())
        return sums


_STOOD_STILL = ("hang", "mismatch")  # deaths of ranks that waited for each other until the end
_TICK_NS = 10_000_000  # of /proc/PID/stat's start time: USER_HZ is 100 on Linux


def run_record(
    files: RunFiles, segments: Sequence[RankSegments], ends: Sequence[ProcessEnd],
    deaths: Sequence[Death],
) -> RunRecord:  # fmt: skip
    """The record of one run; `segments` are the starts of the rank whose time it is, in order."""
    own = {_generation(rank.files): rank for rank in segments}
    by_generation = {death.generation: death for death in deaths}
    starts = [
        _start(files, number, own.get(number), ends, by_generation.get(number))
        for number in sorted({*own, *by_generation})
    ]
    if files.about.exit_status == 0 and starts and starts[-1].why is None:
        starts[-1] = replace(starts[-1], ended_well=True)
    end_ns, begins = files.about.end_wall_ns, (s.process_ns for s in starts if s.process_ns)
    start_ns = files.about.start_wall_ns or min(begins, default=0)
    signs = [start_ns, *(start.times.end_ns for start in starts if start.times is not None)]
    signs += filter(None, [*(s.ended_ns for s in starts), *(end.wall_ns for end in ends)])
    return RunRecord(
        name=files.paths.root.name, start_ns=start_ns,
        end_ns=max(signs) if end_ns is None else end_ns, has_ended=end_ns is not None,
        starts=tuple(starts),
        hangs=tuple((seen.since_wall_ns, seen.wall_ns) for seen in reactions(files)
                    if seen.trigger == "hang" and not seen.moves and not seen.saving),
    )  # fmt: skip


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
    found = StartRecord(
        run=files.paths.root.name, generation=generation, process_ns=None,
        died_ns=None if death is None else death.died_ns, ended_ns=max(ended, default=None),
        why=None if death is None else death.own_end or death.headline,
        stood_still=death is not None and death.cause in _STOOD_STILL,
        saves=tuple(call for each in ranks for call in _checkpoint_calls(each, "save")),
        loads=tuple(call for each in ranks for call in _checkpoint_calls(each, "load")),
    )  # fmt: skip
    if rank is None:
        return found
    # Is there work after the last whole step?
    last_ns = np.append(np.iinfo(np.int64).max, rank.found.steps.end_ns)[-1]
    after = rank.found.nested.spans.start_ns >= last_ns
    return replace(
        found, process_ns=_process_start(rank.files, rank.wall_offset_ns),
        is_unfinished=bool((after & (rank.found.phase < len(PHASES))).any()),
        times=_step_times(rank) if rank.step_count else None, apart=_apart(rank),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStart:
    """Ranks that others waited for in init_process_group."""

    late: tuple[int, ...]
    waited: tuple[int, ...]
    wait_ns: int  # the longest wait
    process_late_ns: int | None  # by how much the last one's process began after those that waited
    at: str | None  # where the last one was in the meantime, by a snapshot


def find_late_start(files: RunFiles, least_ns: float) -> LateStart | None:
    """Who came last in the last start; None where nobody waited so long for it."""
    generation = max(map(_generation, files.ranks), default=0)
    own = {each.rank: each for each in files.ranks if _generation(each) == generation}
    met = {rank: _read_times(each, each.of_type("process_group")) for rank, each in own.items()}
    known = {rank: (int(m.starts[0]), int(m.ends[0])) for rank, m in met.items() if len(m.starts)}
    last = max(known, key=lambda rank: known[rank][0], default=None)
    if last is None:
        return None
    last_ns = known[last][0]
    waits = {rank: min(end, last_ns) - begin for rank, (begin, end) in known.items()}
    waited = tuple(sorted(rank for rank, ns in waits.items() if rank != last and ns >= least_ns))
    if not waited:
        return None
    began = {rank: _process_start(own[rank], own[rank].clock_offset_ns or 0) for rank in known}
    others = [ns for rank in waited if (ns := began[rank]) is not None]
    own_ns, begin_ns = began[last], min(known[rank][0] for rank in waited)
    seen = [each.at.get(last) for each in lines_in_snapshots(files)
            if begin_ns <= each.wall_ns < last_ns]  # fmt: skip
    return LateStart(
        late=tuple(sorted(known.keys() - waited)), waited=waited, wait_ns=max(waits.values()),
        process_late_ns=None if own_ns is None or not others else own_ns - max(others),
        at=next(filter(None, reversed(seen)), None),
    )  # fmt: skip


def _checkpoint_calls(files: RankFiles, action: str) -> list[CheckpointCall]:
    lines = [line for line in files.of_type("checkpoint") if line.get("action") == action]
    return [
        CheckpointCall(start_ns=int(begin), end_ns=int(end), file=text(line.get("file")),
                       written_ns=integer(line.get("written_ns")))
        for line in lines for begin, end in zip(*_read_times(files, [line]), strict=True)
    ]  # fmt: skip


def _read_times(files: RankFiles, lines: Sequence[Mapping[str, object]]) -> Intervals:
    """Unix times of begin and end that lines tell."""
    times = [(integer(line.get("start_ns")), integer(line.get("end_ns"))) for line in lines]
    known = [(b, e) for b, e in times if b is not None and e is not None and b <= e]
    offset_ns = files.clock_offset_ns
    table = np.array(known if offset_ns else [], dtype=np.int64).reshape(-1, 2) + (offset_ns or 0)
    return Intervals(*table.T)


def _line_times(files: RankFiles, offset_ns: int, name: str) -> list[int]:
    times = [integer(line.get("time_ns")) for line in files.of_type(name)]
    return [time + offset_ns for time in times if time is not None]


def _process_start(files: RankFiles, offset_ns: int) -> int | None:
    """Unix time at which its process began; where that is not known, its recording."""
    # Ticks count from the machine's start, and the monotonic clock too but for times of suspension.
    ticks = integer(files.report.get("start_ticks"))
    began = _line_times(files, offset_ns, "record_start")
    reported = integer(mapping(files.report.get("clock")).get("wall_ns"))
    known = min([*began, *([] if reported is None else [reported])], default=None)
    return known if ticks is None or known is None else min(ticks * _TICK_NS + offset_ns, known)


def _step_times(rank: RankSegments) -> StepTimes:
    folded, offset_ns, positions = rank.folded, rank.wall_offset_ns, rank_positions(rank)
    whole = positions.start_ns, positions.position, positions.period + folded.step_count
    start, position, step = map(np.append, folded.timeline(), whole)
    return StepTimes(
        start_ns=start + offset_ns, end_ns=(positions.end_ns or folded.until_ns) + offset_ns,
        position=position, step=step,
        trained_ns=np.append(folded.trained_ns(), trained_ns(rank.found)) + offset_ns,
    )  # fmt: skip


def _apart(rank: RankSegments) -> dict[int, Intervals]:
    """When it saved, loaded, evaluated, compiled, and waited for ranks before its first step."""
    found, files, folded, shift = rank.found, rank.files, rank.folded, rank.wall_offset_ns
    met = found.nested.spans.take(found.phase == COLLECTIVE_PHASE)
    events = rank.events.take(rank.events.kind == schema.SAVE)
    begun = np.append(folded.blocks["start_ns"], found.steps.start_ns)
    first_ns = int(begun[0]) + shift if len(begun) else np.iinfo(np.int64).max
    loaded = [line for line in files.of_type("checkpoint") if line.get("action") == "load"]
    saves = [each.times.shift(shift) for each in (events, folded.saves()[0])]
    told = [each.shift(shift) for each in (met.times, folded.when(MET))]
    waited = _join([*told, _read_times(files, files.of_type("process_group"))])
    return {
        CHECKPOINT: _join([*saves, _read_times(files, loaded)]),
        EVALUATION: union(*evaluations(rank)),
        WAITING: Intervals(*(np.minimum(side, first_ns) for side in waited)),
        COMPILE: compile_intervals(files),
    }
