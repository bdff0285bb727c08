"""The facade of a recorded run: frames of steps, spans, counters and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from time import localtime, strftime
from typing import Any, Protocol, TypeVar

import numpy as np
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Intervals, Ints
from haiprof.base.ledger import POSITIONS
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis import before_death, counter_summaries, counters, run_files
from haiprof.run_analysis.code_samples import CodeSamples, load_code_samples
from haiprof.run_analysis.collectives import (
    Arrivals,
    arrivals,
    collective_frame,
    host_clock_offsets,
    lateness,
    tail_ratio,
)
from haiprof.run_analysis.counter_sources import burst_frame
from haiprof.run_analysis.counters import SeriesReader
from haiprof.run_analysis.deaths import Death, Evidence, LastStep, find_deaths, gather_evidence
from haiprof.run_analysis.lines import line_frame
from haiprof.run_analysis.nccl_witness import NcclReport, nccl_report
from haiprof.run_analysis.ranks import (
    LOADING_SCHEMA,
    RANK_SCHEMA,
    Blocks,
    RankRows,
    rank_positions,
    rank_row,
    rank_rows,
)
from haiprof.run_analysis.reactions import reaction_frame, reactions
from haiprof.run_analysis.restarts import Goodput, RunRecord, goodput, run_record
from haiprof.run_analysis.settings import RankSettings, read_settings
from haiprof.run_analysis.step_frame import (
    PHASE_SCHEMA,
    STEP_SCHEMA,
    BusyTimes,
    RankSegments,
    SharedColumns,
    by_attempt,
    load_segments,
    phase_frame,
    slow_frame,
)
from haiprof.run_analysis.step_positions import StepPositions
from haiprof.run_analysis.steps import PHASES
from haiprof.run_analysis.windows import TraceWindow, all_windows, recorded_windows, window_frame
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest
from haiprof.trace_format.frame_columns import Type

T = TypeVar("T")
Key = tuple[int, int]  # rank and attempt
_KEPT_RECORDS = 300_000  # spans of a run with more are read again when they are asked for: 25 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What was read of the ranks' spans."""

    rows: Mapping[Key, RankRows]
    kept: Mapping[Key, RankSegments] | None  # the spans themselves; None where they are too many
    damaged: list[str]  # why the other ranks have no steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The steps of a rank side by side: blocks of folded ones, and then one by one."""

    step: Ints  # number of the first step of each
    count: Ints  # how many steps it has
    column: Ints  # where it is in `position_times`

    def of_steps(self, steps: Ints) -> Cells:
        """Those that begin with these steps."""
        at = np.searchsorted(self.step, steps)
        return Cells(step=steps, count=self.count[at], column=self.column[at])


def _once(ask: Callable[[RunFrames], T]) -> Callable[[RunFrames], T]:
    """A question whose answer is kept: a run that was read does not change."""
    name = f"_{ask.__name__}"

    @wraps(ask)
    def answer(self: RunFrames) -> T:
        if name not in self.__dict__:
            self.__dict__[name] = ask(self)
        found: T = self.__dict__[name]
        return found

    return answer


class RankPool(Protocol):
    """Where the ranks of a run are read: a pool of `haiprof.trace_analysis.pool`."""

    def map(
        self, question: Callable[..., Any], paths: Sequence[Path], options: Mapping[str, Any]
    ) -> list[Any]:
        """The answer for each folder, in order."""


class _Named(Protocol):
    """What a pool asks questions of: a trace, which reads nothing before it is asked to."""

    path: Path


class RunFrames:
    """A recorded run as polars frames; files are read at the first question that needs them.

    Frames are of one moment, also of a job that still runs: spans that are too many for memory are
    read again for `phases()`, but none that came later.

    Args:
        path: A run directory, or a log directory, of which the newest run is taken.
        between: Only what happened from the first to the second Unix time in ns: steps that lie
            whole in it, under the numbers that they have in the whole run. None takes all.
        pool: Where the spans of ranks are read, such as a cluster whose workers see the run under
            the same path; None: in this process.
    """

    def __init__(
        self, path: str | Path, *, between: tuple[int, int] | None = None,
        pool: RankPool | None = None,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self.between, self.pool = between, pool
        self._phases: pl.DataFrame | None = None
        self._samples: tuple[set[Key], CodeSamples] | None = None

    def last(self, seconds: float) -> RunFrames:
        """The last seconds of what was recorded, up to the end of the last whole step."""
        steps = self.steps()
        end = (steps["start_ns"] + steps["step_ns"]).max()
        until = end if isinstance(end, int) else 0
        between = until - round(seconds * NS_PER_S), until
        return RunFrames(self.run.root, between=between, pool=self.pool)

    @_once
    def steps(self) -> pl.DataFrame:
        """One row per rank and training step; columns in `haiprof.run_analysis.step_frame`.

        Of a long run those that are not folded: `blocks` has sums of the others, `slow_steps` those
        of them that are kept whole. RunNotFoundError without a run; RunFormatError where it is of
        another version, or nothing in it can be read.
        """
        return self._frame(STEP_SCHEMA, (rows.steps for rows in self._rows.values()), "step_ns")

    def steps_by_rank(self) -> dict[int, pl.DataFrame]:
        """The rows of `steps()` of the last attempt that has any of each rank: no copies."""
        judged = ((key[0], self._within(self._rows[key].steps, "step_ns"))
                  for key in self._judged_attempts.items())  # fmt: skip
        return {rank: steps for rank, steps in judged if steps.height}

    def slow_steps(self) -> pl.DataFrame:
        """Folded steps that are kept whole: the first of each rank, and slow ones; as `steps`."""
        folded = {key for key, rows in self._rows.items() if len(rows.blocks.count)}
        return self._frame(STEP_SCHEMA, map(slow_frame, self._segments_of(folded)), "step_ns")

    def blocks(self, attempts: Mapping[int, int]) -> dict[int, Blocks]:
        """Sums of the folded steps of these attempts, by rank; those that have any."""
        keys = [key for key in attempts.items() if key in self._rows]
        found = {key[0]: self._blocks_within(self._rows[key]) for key in keys}
        return {rank: blocks for rank, blocks in found.items() if len(blocks.count)}

    def _blocks_within(self, rows: RankRows) -> Blocks:
        first, last = self.between or counters.ALWAYS
        return rows.blocks.take((rows.blocks.start_ns >= first) & (rows.blocks.end_ns <= last))

    def first_steps(self, attempts: Mapping[int, int]) -> pl.DataFrame:
        """The first steps of these attempts, by rank, also where they were folded."""
        found = [self._rows[key] for key in attempts.items()]
        firsts = [rows.steps if rows.first is None else rows.first for rows in found]
        rows = [steps.row(0) for steps in firsts if steps.height and not steps["step"][0]]
        return self._within(pl.DataFrame(rows, schema=STEP_SCHEMA, orient="row"), "step_ns")

    def most_steps(self) -> int:
        """Steps of the rank that has most, in all its attempts; 0 without steps."""
        counts = Counter[int]()
        for (rank, _), rows in self._rows.items():
            folded = int(self._blocks_within(rows).count.sum())
            counts[rank] += self._within(rows.steps, "step_ns").height + folded
        return max(counts.values(), default=0)

    def phases(self, ranks: Collection[int] | None = None) -> pl.DataFrame:
        """One row per span of these ranks (None: of all); columns in `run_analysis.step_frame`."""
        if ranks is None and self._phases is not None:
            return self._phases
        found = self._frame(PHASE_SCHEMA, map(phase_frame, self._segments_of(self._keys(ranks))))
        self._phases = found if ranks is None else self._phases
        return found

    def pauses(self) -> pl.DataFrame:
        """Collector pauses and checkpoint saves, in the columns of `phases()`."""
        return self._frame(PHASE_SCHEMA, (rows.pauses for rows in self._rows.values()))

    def settings(self) -> dict[int, RankSettings]:
        """What each rank was run with; see `haiprof.run_analysis.settings`."""
        return read_settings(self.files)

    def loading(self) -> pl.DataFrame:
        """What starts of epochs cost each rank; columns in `haiprof.run_analysis.ranks`."""
        rows = [rows.loading for rows in self._rows.values()]
        return pl.DataFrame(rows, schema=LOADING_SCHEMA, orient="row")

    @_once
    def counters(self) -> pl.DataFrame:
        """One row per sample and metric; columns in `haiprof.run_analysis.counters`."""
        return counters.counter_frame(self.files, between=self.between)

    def host_counters(self, hosts: Collection[str] | None) -> pl.DataFrame:
        """The rows of `counters()` of these hosts; None: all."""
        return counters.counter_frame(self.files, between=self.between, hosts=hosts)

    def read_series(self, metrics: Collection[tuple[str, str]]) -> SeriesReader:
        """Reads these metrics (source, name) when asked for; what is kept is of one source."""
        kept: dict[tuple[str, str], list[counters.OwnerSeries]] = {}

        def read(source: str, metric: str) -> Sequence[counters.OwnerSeries]:
            wanted = {one for one in metrics if one[0] == source}
            if (source, metric) in wanted and (source, metric) not in kept:
                kept.clear()
                kept.update(counters.owner_series(self.files, wanted, between=self.between))
            return kept.get((source, metric), ())

        return read

    def counter_digest(self, judged: pl.DataFrame) -> counter_summaries.CounterDigest:
        """The counters in short, of the time of these steps."""
        spans = counter_summaries.training_spans(part for _, part in by_attempt(judged))
        windows = counter_summaries.host_windows(spans, self.ranks())
        return counter_summaries.read_digest(self.files, windows, between=self.between)

    def bursts(self) -> pl.DataFrame:
        """GPU metrics of `--burst`, in the columns of `counters()`; see `counter_sources`."""
        return burst_frame(self.files)

    @_once
    def ranks(self) -> pl.DataFrame:
        """One row per rank and attempt; columns in `haiprof.run_analysis.ranks`."""
        found = ((files, self._rows.get((files.rank, files.attempt))) for files in self.files.ranks)
        rows = [rank_row(f, None) if rows is None else rows.rank for f, rows in found]
        return pl.DataFrame(rows, schema=RANK_SCHEMA, orient="row")

    def collectives(self) -> pl.DataFrame:
        """The last collectives of each rank; columns in `haiprof.run_analysis.collectives`."""
        return self._collectives[0]

    @_once
    def lateness(self) -> pl.DataFrame:
        """How late each rank begins its collectives; see `run_analysis.collectives.lateness`."""
        return lateness(self.arrivals(), self.steps())

    @_once
    def nccl(self) -> NcclReport:
        """What NCCL's own files say of the whole run (of a part nothing); see `nccl_witness`."""
        return nccl_report(self.files if self.between is None else replace(self.files, ranks=()))

    def windows(self) -> pl.DataFrame:
        """One row per rank and trace window; columns in `haiprof.run_analysis.windows`."""
        offsets = {key: rows.wall_offset_ns for key, rows in self._rows.items()}
        counts = {key: rows.step_count for key, rows in self._rows.items()}
        windows = all_windows(self.files, self._recorded_windows, counts)
        return self._within(window_frame(windows, offsets))

    def reactions(self) -> pl.DataFrame:
        """What haiprof did by itself: hangs, slower steps; columns in `run_analysis.reactions`."""
        frame, between = reaction_frame(reactions(self.files)), self.between
        return frame if between is None else frame.filter(frame["noticed_ns"].is_between(*between))

    @_once
    def deaths(self) -> list[Death]:
        """Why the job died, and each earlier start of its ranks; see `run_analysis.deaths`."""
        return [] if self.between is not None else find_deaths(self._evidence)

    def memory_at_end(self) -> tuple[before_death.MemoryAtEnd, ...]:
        """Memory of the ranks that the job's death began with."""
        return before_death.memory_at_end(
            self.files, self._last_death(), self._evidence.ends, self.steps
        )

    def gpu_memory_at_end(self) -> tuple[before_death.GpuMemoryAtEnd, ...]:
        """GPU memory of the same ranks, where it ran out."""
        return before_death.gpu_memory_at_end(self.files, self._last_death(), self._evidence.ends)

    def _last_death(self) -> Death | None:
        return next((death for death in self.deaths() if death.final), None)

    @_once
    def goodput(self) -> Goodput:
        """The run's wall time by account, of the rank with most steps."""
        return goodput([self.run_record()])

    def run_record(self) -> RunRecord:
        """The run as a part of its job: its starts, and when nothing moved."""
        counts = Counter[int]()
        for (rank, _), rows in self._rows.items():
            counts[rank] += rows.step_count
        most = sorted(counts, key=lambda rank: (-counts[rank], rank))[:1]
        segments = list(self._segments_of(self._keys(most))) if most else []
        return run_record(self.files, segments, self._evidence.ends, self.deaths())

    def lines(self) -> pl.DataFrame:
        """Lines of user code by rank, thread and phase; see `haiprof.run_analysis.lines`."""
        return line_frame(self.code_samples())

    def code_samples(self, ranks: Collection[int] | None = None) -> CodeSamples:
        """Sampled stacks of ranks (None: of all) in their phases and steps.

        Of the attempt that is judged, the last that has steps; a note counts the others.
        """
        keys = self._keys(ranks)
        if self._samples is not None and self._samples[0] == keys:
            return self._samples[1]
        judged = {key for key in keys if self._judged_attempts[key[0]] == key[1]}
        samples = load_code_samples(self._segments_of(judged))
        if count := len(keys) - len(judged):
            others = "1 other is" if count == 1 else f"{count} others are"
            note = f"only the last attempt of each rank is looked at: {others} left out"
            samples = replace(samples, notes=(*samples.notes, note))
        if self.between is not None:
            first, last = self.between
            samples = samples.take((samples.time_ns >= first) & (samples.time_ns <= last))
        self._samples = None if ranks is None else (keys, samples)  # few, and often asked for again
        return samples

    def _rows_at(self, rank: int, attempt: int | None) -> RankRows:
        return self._rows[rank, self._judged_attempts[rank] if attempt is None else attempt]

    def cells(self, rank: int, attempt: int | None = None) -> Cells:
        """What the columns of `position_times` stand for."""
        rows = self._rows_at(rank, attempt)
        whole = np.arange(rows.step_count - rows.steps.height, rows.step_count)
        step = np.append(rows.blocks.first_step, whole)
        count = np.append(rows.blocks.count, np.ones_like(whole))
        return Cells(step=step, count=count, column=np.arange(len(count)))

    def position_times(self, rank: int, attempt: int | None = None) -> tuple[Ints, Ints]:
        """[position, cell (step, or block of steps)] in ns: without collections, and in these."""
        rows = self._rows_at(rank, attempt)
        width = rows.steps.height + len(rows.blocks.count)
        times = np.zeros((2, len(POSITIONS), width), dtype=np.int64)
        for place, own in rows.positions.items():
            times[divmod(place, len(POSITIONS))] = own
        return times[0], times[1]

    def used_positions(self) -> list[int]:
        """Indices into POSITIONS of those that any rank was in."""
        places = [place for rows in self._rows.values() for place in rows.positions]
        return sorted({place % len(POSITIONS) for place in places})

    def step_positions(self, rank: int) -> tuple[StepPositions, int, BusyTimes | None]:
        """Where a rank was at each moment, on the clock of its spans; and Unix time minus that.

        Of the steps that are not folded, under their own numbers. And when its device had work
        queued, on the same clock; None where that was not recorded.
        """
        segments = self._judged_segments(rank)
        found = rank_positions(segments)
        found = replace(found, period=found.period + segments.first_step)
        return found, segments.wall_offset_ns, segments.busy

    def step_starts(self, ranks: Iterable[int]) -> dict[int, tuple[int, Ints]]:
        """By rank: number of the first whole step that is judged, and Unix time of each begin."""
        found = {rank: self._rows_at(rank, None) for rank in ranks}
        return {rank: (rows.step_count - rows.steps.height, rows.steps["start_ns"].to_numpy())
                for rank, rows in found.items()}  # fmt: skip

    def judged_files(self) -> dict[int, run_files.RankFiles]:
        """By rank: what it reported in the attempt that is judged."""
        judged = self._judged_attempts
        return {f.rank: f for f in self.files.ranks if judged.get(f.rank) == f.attempt}

    def arrivals(self) -> list[Arrivals]:
        """Collectives that all ranks of their group began, by group."""
        collectives = self.collectives()
        return arrivals(collectives, host_clock_offsets(collectives))

    def backward_tail(self, rank: int) -> float | None:
        """The share of a rank's backward after the last collective that it began there."""
        found = self.exchanges(rank)
        return None if found is None else found[0]

    def exchanges(self, rank: int) -> tuple[float, float] | None:
        """`collectives.tail_ratio` of a rank."""
        segments = self._judged_segments(rank)
        known = self._began.get((rank, segments.files.attempt))
        return None if known is None else tail_ratio(segments, known["created_ns"].to_numpy())

    def phase_spans(self, rank: int, phase: str) -> tuple[Ints, Intervals]:
        """Outermost spans of a phase in Unix time, with tags of their modules or optimizers."""
        segments = self._judged_segments(rank)
        spans = segments.found.nested.spans.take(segments.found.phase == PHASES.index(phase))
        return spans.tag.astype(np.int64), spans.times.shift(segments.wall_offset_ns)

    def _judged_segments(self, rank: int) -> RankSegments:
        return next(iter(self._segments_of({(rank, self._judged_attempts[rank])})))

    @_once
    def notes(self) -> list[str]:
        """Everything that was cut, damaged or missing while reading."""
        part, ranks = [], self.ranks().select("rank", "notes")
        if self.between is not None:
            first, last = (strftime("%H:%M:%S", localtime(t / NS_PER_S)) for t in self.between)
            part = [f"only what was recorded from {first} to {last} was looked at"]
        return [
            *part, *self.files.notes, *self._loaded.damaged,
            *(f"rank {rank}: {note}" for rank, notes in ranks.rows() for note in notes),
            *(f"{node.host}: {note}" for node in self.files.nodes
              for note in run_files.node_notes(node)),
            *counters.counter_notes(self.files), *self._collectives[1], *self.nccl().notes,
        ]  # fmt: skip

    def manifest(self) -> Manifest:
        """What was run, with which options, and how it ended; RunFormatError where damaged."""
        return self.files.manifest or read_manifest(self.files.paths)

    @property
    def run(self) -> RunPaths:
        """The run directory's paths."""
        return self.files.paths

    @cached_property
    def files(self) -> run_files.RunFiles:
        """The run directory as it was found."""
        return run_files.open_run(self.path)

    @cached_property
    def _loaded(self) -> _Loaded:
        """Ranks are read one by one, and their spans let go of where they are many."""
        keys = [(files.rank, files.attempt) for files in self.files.ranks]
        windows, between = self._recorded_windows, self.between
        kept, left = dict[Key, RankSegments](), _KEPT_RECORDS
        if self.pool is not None:
            options, left = {"windows": windows, "between": between}, -1
            read = self.pool.map(read_rows, [f.paths.root for f in self.files.ranks], options)
        else:
            read, shared = [], SharedColumns()
            for key, files in zip(keys, self.files.ranks, strict=True):
                rank = _load(files)
                read.append(_rows_of(rank, windows, between, shared))
                if not isinstance(rank, str):
                    left, kept[key] = left - rank.record_count, rank
                if left < 0:
                    kept.clear()
        return _Loaded(
            rows={k: rows for k, rows in zip(keys, read, strict=True) if not isinstance(rows, str)},
            kept=kept if left >= 0 else None,
            damaged=[why for why in read if isinstance(why, str)],
        )

    @property
    def _rows(self) -> Mapping[Key, RankRows]:
        return self._loaded.rows

    @cached_property
    def _judged_attempts(self) -> dict[int, int]:
        """By rank: its last attempt that has steps, or the last one where none has."""
        found = {key: rows.steps for key, rows in self._rows.items()}
        trained = [key for key, steps in found.items() if self._within(steps, "step_ns").height]
        return {**dict(sorted(found)), **dict(sorted(trained))}

    def _keys(self, ranks: Collection[int] | None) -> set[Key]:
        return {key for key in self._rows if ranks is None or key[0] in ranks}

    def _segments_of(self, keys: Collection[Key]) -> Iterator[RankSegments]:
        """Ranks with their spans, one at a time: the same ones, read again where none are kept."""
        if (kept := self._loaded.kept) is not None:
            yield from (rank for key, rank in kept.items() if key in keys)
            return
        for files in self.files.ranks:
            key = (files.rank, files.attempt)
            rows = self._rows.get(key) if key in keys else None
            rank = _load(files, end=rows.record_end) if rows else ""
            if not isinstance(rank, str):
                yield rank

    def _frame(
        self, schema: Mapping[str, Type], frames: Iterable[pl.DataFrame], length: str | None = None
    ) -> pl.DataFrame:
        return self._within(pl.concat([pl.DataFrame(schema=schema), *frames]), length)

    def _within(self, frame: pl.DataFrame, length: str | None = None) -> pl.DataFrame:
        """Rows that begin in the time asked for, and end in it where `length` names a column."""
        if self.between is None:
            return frame
        first, last = self.between
        end = frame["start_ns"] + frame[length] if length else frame["start_ns"]
        return frame.filter((frame["start_ns"] >= first) & (end <= last))

    @cached_property
    def _recorded_windows(self) -> list[TraceWindow]:
        return recorded_windows(self.files)

    @cached_property
    def _collectives(self) -> tuple[pl.DataFrame, tuple[str, ...]]:
        frame, notes = collective_frame(self.files)
        if self.between is not None:
            frame = frame.filter(frame["created_ns"].is_between(*self.between))
        return frame, notes

    @cached_property
    def _began(self) -> dict[tuple[object, ...], pl.DataFrame]:
        """By rank and attempt: when it began its collectives, in order."""
        known = self.collectives().filter(~pl.col("p2p")).drop_nulls("created_ns")
        return known.sort("created_ns").partition_by("rank", "attempt", as_dict=True)

    @cached_property
    def _evidence(self) -> Evidence:
        parts = {key: self._within(rows.steps, "step_ns") for key, rows in self._rows.items()}
        steps = {
            key: LastStep(
                number=int(part["step"][-1]),
                end_ns=int(part["start_ns"][-1] + part["step_ns"][-1]),
                usual_ns=run_files.number(part["step_ns"].median()) or 0.0,
            )
            for key, part in parts.items()
            if part.height
        }
        return gather_evidence(self.files, self.collectives, steps)


def read_rows(
    folder: _Named, windows: Sequence[TraceWindow], between: tuple[int, int] | None
) -> RankRows | str:
    """What is kept of one rank, or why it has no steps; on whichever machine."""
    return _rows_of(_load(run_files.open_rank(folder.path)), windows, between, SharedColumns())


def _rows_of(
    rank: RankSegments | str, windows: Sequence[TraceWindow], between: tuple[int, int] | None,
    shared: SharedColumns,
) -> RankRows | str:  # fmt: skip
    if isinstance(rank, str):
        return rank
    own = [w for w in windows if (w.rank, w.attempt) == (rank.files.rank, rank.files.attempt)]
    return rank_rows(rank, own, between=between, shared=shared)


def _load(rank: run_files.RankFiles, *, end: int | None = None) -> RankSegments | str:
    """The rank's steps, or why there are none."""
    try:
        return load_segments(rank, end=end)
    except RunFormatError as error:
        return f"rank {rank.rank}: {error}"
