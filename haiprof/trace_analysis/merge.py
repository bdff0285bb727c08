"""`haiprof merge`: all ranks' traces in one timeline on one clock, with the run's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, TraceFormatError
from haiprof.run_analysis.run_files import RunFiles, open_run
from haiprof.run_format.layout import RunPaths
from haiprof.trace_analysis.alignment import RULE, RankClock, clock_notes, rank_clocks
from haiprof.trace_analysis.files import TraceFile, trace_file
from haiprof.trace_analysis.pool import Pool, default_pool
from haiprof.trace_analysis.pool import Progress as ReadProgress
from haiprof.trace_analysis.run_tracks import RunTracks
from haiprof.trace_analysis.temporal import gpu_events, step_window
from haiprof.trace_analysis.trace_check import check_frame, fault_lines
from haiprof.trace_format.checks.finding import OF_EACH_RANK
from haiprof.trace_format.find import MERGED_NAME
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.merge.inputs import TraceInput, merge_files, merge_inputs
from haiprof.trace_format.merge.overlaps import StreamLanes, overlapping_events, stream_lanes
from haiprof.trace_format.merge.packed_file import check_target
from haiprof.trace_format.merge.rewrite import Range
from haiprof.trace_format.merge.write import MergedTrace, Progress, RankPlan, write_merged

_HOUR_NS = 3_600_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Options of a merged trace."""

    ranks: frozenset[int] | None = None
    """Only these; None takes all."""
    steps: tuple[int, int] | None = None
    """First profiler step and the one after the last; None takes everything."""
    window: int | None = None
    """Which window of the run, by start, from 0; None takes the last whole one."""
    by_collectives: bool = True
    """Whether clocks are compared by collectives; else wall clocks are taken as they are."""
    counters: bool = True
    """Of a run directory."""
    phases: bool = True
    """Of a run directory."""
    force: bool = False
    """Whether a file that is there is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """The result of a merge, with how far its clocks can be trusted."""

    path: Path
    merged: MergedTrace
    clocks: tuple[RankClock, ...]
    base_ns: int
    """Unix time that the output's times count from; 0 where they are Unix time themselves."""
    run: Path | None
    """The run directory whose counters and phases are in it."""
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    """What is wrong with the recordings, a line per kind. They are merged as they were recorded.
    Not looked for where no trace is read for its collectives or steps."""

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        rows = [
            {
                "rank": rank.rank,
                "file": str(rank.path),
                "text_bytes": rank.text_bytes,
                "event_count": rank.event_count,
                "merged_count": rank.passed_count,
                "lost_count": rank.lost_count,
                "added_count": rank.added_count,
                "start_ns": rank.range_ns[0] if rank.range_ns else None,
                **{key: value for key, value in asdict(clock).items() if key != "rank"},
            }
            for rank, clock in zip(self.merged.ranks, self.clocks, strict=True)
        ]
        return {
            "output": str(self.path),
            "event_count": self.merged.event_count,
            "track_event_count": self.merged.track_event_count,
            "text_bytes": self.merged.text_bytes,
            "base_ns": self.base_ns,
            "run": None if self.run is None else str(self.run),
            "clock_rule": RULE,
            "ranks": rows,
            "notes": list(self.notes),
            "faults": list(self.faults),
        }


def merge_traces(
    sources: Sequence[Path],
    output: Path,
    options: MergeOptions,
    *,
    pool: Pool | None = None,
    reading: ReadProgress | None = None,
    writing: Progress | None = None,
) -> MergeReport:
    """Writes one trace of all ranks."""
    paths, left_out = merge_files(sources, options.window)
    inputs = merge_inputs(paths, ranks=options.ranks)
    check_target(output, [each.path for each in inputs.values()], force=options.force)
    between = _step_ranges(inputs, options.steps, pool, reading)
    clocks = rank_clocks(inputs, by_collectives=options.by_collectives, pool=pool, progress=reading)
    by_rank = {clock.rank: clock for clock in clocks}
    recorded = _recordings(inputs, pool) if options.by_collectives or options.steps else {}
    base_ns = _base_ns(inputs)
    run, notes = _run_of(sources[0]) if options.counters or options.phases else (None, [])
    tracks = _tracks(run, inputs, by_rank, options) if run else None
    drawn = {files.rank for files in run.ranks} if run and options.phases else set()
    plans = [
        RankPlan(
            source=each,
            rank=rank,
            shift_ns=each.base_ns - base_ns - by_rank[rank].moved_ns,
            between=between.get(rank),
            streams=recorded[rank].streams if rank in recorded else StreamLanes(),
            clock={key: value for key, value in asdict(by_rank[rank]).items() if key != "rank"},
            without_phases=rank in drawn,
        )
        for rank, each in inputs.items()
    ]
    if left_out:
        notes.append(f"{left_out} traces of the run's other windows are not in it: --window N")
    merged = write_merged(
        output,
        plans,
        base_ns=base_ns,
        about={"clock_rule": RULE},
        tracks=tracks,
        progress=writing,
    )
    return MergeReport(
        path=output,
        merged=merged,
        clocks=tuple(clocks),
        base_ns=base_ns,
        run=run.paths.root if run else None,
        notes=(*notes, *_notes(merged), *clock_notes(inputs, clocks)),
        faults=tuple(_fault_lines(recorded)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    """What is known of a rank's file once it was read."""

    file: TraceFile
    streams: StreamLanes


def _recordings(inputs: Mapping[int, TraceInput], pool: Pool | None) -> dict[int, _Recording]:
    """What is known of each file; nothing where one of them can only be passed through."""
    paths = [each.path for each in inputs.values()]
    try:
        found = (pool or default_pool(paths)).map(_recording, paths, {})
    except TraceFormatError:
        return {}
    return dict(zip(inputs, found, strict=True))


def _recording(trace: Trace) -> _Recording:
    """A question for a pool."""
    return _Recording(file=trace_file(trace), streams=stream_lanes(overlapping_events(trace)))


def _fault_lines(recorded: Mapping[int, _Recording]) -> list[str]:
    """What is wrong with the recordings."""
    checks = check_frame({rank: each.file for rank, each in recorded.items()})
    return fault_lines(checks, OF_EACH_RANK, effect="merged as recorded")


def _base_ns(inputs: Mapping[int, TraceInput]) -> int:
    """What the merged trace's times count from: a full hour, one to two hours before the first.

    Kineto's own base is up to three months back, and viewers hold times as floats, which that far
    from zero barely resolve 1 ns: Perfetto then drops events that seem to overlap.
    """
    first_ns = [
        each.base_ns + each.first_ns
        for each in inputs.values()
        if each.has_wall_clock and each.first_ns is not None
    ]
    return max(0, min(first_ns) // _HOUR_NS - 1) * _HOUR_NS if first_ns else 0


def step_range(trace: Trace, *, steps: tuple[int, int]) -> Range:
    """When some steps began, and when they and what they launched ended; a question for a pool."""
    start_ns, end_ns = step_window(trace, steps)
    launched = gpu_events(trace, steps)
    ends = (launched["ts_ns"] + launched["dur_ns"]).to_list()
    return start_ns, max([end_ns, *ends])


def _step_ranges(
    inputs: Mapping[int, TraceInput],
    steps: tuple[int, int] | None,
    pool: Pool | None,
    progress: ReadProgress | None,
) -> dict[int, Range]:
    if steps is None:
        return {}
    paths = [each.path for each in inputs.values()]
    found = (pool or default_pool(paths)).map(step_range, paths, {"steps": steps}, progress)
    return dict(zip(inputs, found, strict=True))


def default_output(sources: Sequence[Path]) -> Path:
    """The default path of the merged trace: in the run directory, else in the current one."""
    folder = _run_folder(sources[0])
    return (folder or Path()) / f"{MERGED_NAME}.json.gz"


def _run_of(source: Path) -> tuple[RunFiles | None, list[str]]:
    """The run that traces are from, or why its records cannot be drawn."""
    folder = _run_folder(source)
    try:
        return (open_run(folder), []) if folder else (None, [])
    except HaiprofError as error:
        return None, [f"no counters and phases: {error}"]


def _run_folder(source: Path) -> Path | None:
    """The run directory that a source is, or whose `traces` it is or lies in."""
    place = source.absolute()
    parents = [each.parent for each in (place, place.parent) if each.name == "traces"]
    for folder in (place, *parents):
        if RunPaths(folder).manifest.is_file() or RunPaths(folder).ranks.is_dir():
            return folder
    return None


def _tracks(
    run: RunFiles,
    inputs: Mapping[int, TraceInput],
    clocks: Mapping[int, RankClock],
    options: MergeOptions,
) -> RunTracks:
    return RunTracks(
        run=run,
        inputs=inputs,
        clocks=clocks,
        with_counters=options.counters,
        with_phases=options.phases,
    )


def _notes(merged: MergedTrace) -> list[str]:
    """Notes on what was read, for people."""
    found = [note for rank in merged.ranks for note in rank.notes]
    timed = {rank.rank: rank.range_ns for rank in merged.ranks if rank.range_ns is not None}
    for rank, own in timed.items():
        others = [other for name, other in timed.items() if name != rank]
        if others and all(own[1] < other[0] or other[1] < own[0] for other in others):
            found.append(f"rank {rank}: its trace covers no time that another rank's covers")
    return found
