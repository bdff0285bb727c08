"""`haiprof export --to merged`: all ranks' traces in one timeline, with the run's counters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from haiprof.base.errors import HaiprofError, RunFormatError, TraceFormatError
from haiprof.run_analysis import step_frame
from haiprof.run_analysis.counters import counter_frame
from haiprof.run_analysis.run_files import RankFiles, RunFiles, clock_offset_ns, open_run
from haiprof.run_format.layout import RunPaths
from haiprof.trace_analysis.collectives import RULE, RankClock, clock_notes, rank_clocks
from haiprof.trace_analysis.device_time import gpu_events, step_window
from haiprof.trace_analysis.files import TraceFile, check_frame, fault_lines, trace_file
from haiprof.trace_analysis.pool import Progress as ReadProgress
from haiprof.trace_analysis.pool import default_pool
from haiprof.trace_format import merge, merge_inputs
from haiprof.trace_format.find import MERGED_NAME
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import OF_EACH_RANK

MARGIN_NS = 2_000_000_000  # before and behind the traces: two samples of a second each
_NODES_PID, _NODES_SORT = 1_900_000_000, 2_000_000_000
_THREADS = ("steps", "phases", "pauses")
_STEPS, _PHASES, _PAUSES = range(3)


def run_tracks(
    run: RunFiles, inputs: Mapping[int, merge_inputs.TraceInput], clocks: Mapping[int, RankClock],
    options: MergeOptions, ranges: Mapping[int, merge.Range],
) -> Iterator[merge.Track]:  # fmt: skip
    """Tracks of a run's own records beside the ranks' traces; none without one that has times."""
    if not ranges:
        return
    of_hosts: dict[str, list[int]] = {}
    for files in (files for files in run.ranks if files.rank in clocks):
        said, recorded = inputs[files.rank].metadata.get("haiprof"), files.clock_offset_ns
        traced = clock_offset_ns(said.get("clock") if isinstance(said, dict) else None)
        set_ns = traced - recorded if traced is not None and recorded is not None else 0
        moved_ns = clocks[files.rank].moved_ns - set_ns  # subtracted from its records' Unix times
        of_hosts.setdefault(str(files.report.get("host")), []).append(moved_ns)
        if options.phases and files.rank in ranges:
            yield from _phases(files, ranges[files.rank], moved_ns)
    if options.counters:
        yield from _counters(run, {host: round(median(n)) for host, n in of_hosts.items()}, ranges)


def _phases(files: RankFiles, covered: merge.Range, moved_ns: int) -> Iterator[merge.Track]:
    """Steps, phases and pauses of one rank that touch the time of its trace."""
    try:
        segments = step_frame.load_segments(files)
    except RunFormatError:
        return  # the run's own reports say so
    # Training steps without the time of an evaluation within them, and spans of phases.
    pause = pl.col("phase").is_in([step_frame.GC_PHASE, step_frame.SAVE_PHASE])
    thread = pl.when(pause).then(_PAUSES).otherwise(_PHASES).cast(pl.Int64)
    parts = (
        step_frame.step_frame(segments).select(
            "start_ns", "step", thread=pl.lit(_STEPS, pl.Int64), name=pl.format("step {}", "step"),
            duration_ns="step_ns", of=pl.lit(None, pl.String), self_ns=pl.lit(None, pl.Int64),
        ),
        step_frame.phase_frame(segments).select(
            "start_ns", "step", thread=thread, name="phase", duration_ns="duration_ns", of="name",
            self_ns="self_ns",
        ),
    )  # fmt: skip
    rows = pl.concat(parts).with_columns(start_ns=pl.col("start_ns") - moved_ns)
    start, end = covered[0] - MARGIN_NS, covered[1] + MARGIN_NS
    rows = rows.filter(
        pl.col("start_ns") < end, pl.col("start_ns") + pl.col("duration_ns") > start
    )  # fmt: skip
    again = f", restart {files.attempt}" if files.attempt else ""
    if rows.height:
        yield merge.Track(
            pid=merge_inputs.rank_pid(files.rank, merge_inputs.PHASES_PLACE), threads=_THREADS,
            spans=rows,
            name=f"rank {files.rank}: haiprof phases{again}",
            sort_index=merge_inputs.sort_index(files.rank, merge_inputs.PHASES_PLACE),
        )  # fmt: skip


def _counters(
    run: RunFiles, moved: Mapping[str, int], ranges: Mapping[int, merge.Range]
) -> Iterator[merge.Track]:
    """Counters of ranks with a trace, and of the nodes they ran on, whose clocks are `moved`."""
    begin = min(start for start, _ in ranges.values()) - MARGIN_NS
    end = max(end for _, end in ranges.values()) + MARGIN_NS
    slack = max(map(abs, moved.values()), default=0)
    offsets = pl.col("host").replace_strict(moved, default=0, return_dtype=pl.Int64)
    rows = counter_frame(run, between=(begin - slack, end + slack)).with_columns(
        time_ns=pl.col("time_ns") - offsets
    )
    rows = rows.filter(pl.col("time_ns").is_between(begin, end))
    for rank in sorted(ranges):
        own = _track_names(rows.filter(pl.col("rank") == rank))
        if own.height:
            yield merge.Track(
                pid=merge_inputs.rank_pid(rank, merge_inputs.COUNTERS_PLACE),
                name=f"rank {rank}: counters", counters=own,
                sort_index=merge_inputs.sort_index(rank, merge_inputs.COUNTERS_PLACE),
            )  # fmt: skip
    nodes = rows.filter(pl.col("rank").is_null())
    hosts = {str(files.report.get("host")) for files in run.ranks if files.rank in ranges}
    for place, host in enumerate(nodes["host"].unique().sort()):
        if host in hosts or len(run.nodes) == 1:
            yield merge.Track(
                pid=_NODES_PID + place, name=f"node {host}: counters",
                sort_index=_NODES_SORT + place,
                counters=_track_names(nodes.filter(pl.col("host") == host)),
            )  # fmt: skip


def _track_names(rows: pl.DataFrame) -> pl.DataFrame:
    """Counters under the name of their track: GPU or other entity, and metric."""
    gpu = pl.when(pl.col("gpu").is_not_null()).then(pl.format("GPU {}", "gpu"))
    part = pl.coalesce(gpu, pl.when(pl.col("rank").is_null()).then("entity"))
    name = pl.concat_str(part, "metric", separator=" ", ignore_nulls=True).alias("name")
    named = rows.select("time_ns", name, "unit", "value")
    return named.sort("name", "time_ns", maintain_order=True)


_HOUR_NS = 3_600_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """Options of a merged trace."""

    ranks: frozenset[int] | None = None  # Only these; None takes all
    steps: tuple[int, int] | None = None
    """First profiler step and the one after the last; None takes everything."""
    window: int | None = None
    """Which window of the run, by start, from 0; None takes the last whole one."""
    by_collectives: bool = True
    """Whether clocks are compared by collectives; else wall clocks are taken as they are."""
    counters: bool = True  # Of a run directory
    phases: bool = True  # Of a run directory
    force: bool = False  # Whether a file that is there is replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """The result of a merge, with how far its clocks can be trusted."""

    path: Path
    merged: merge.MergedTrace
    clocks: tuple[RankClock, ...]
    base_ns: int
    """Unix time that the output's times count from; 0 where they are Unix time themselves."""
    run: Path | None  # the run directory whose counters and phases are in it
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    """What is wrong with the recordings, a line per kind. They are merged as they were recorded.
    Not looked for where no trace is read for its collectives or steps."""

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        merged = self.merged
        rows = [
            {"rank": rank.plan.rank, "file": str(rank.text.path),
             "text_bytes": rank.text.size_bytes, "event_count": rank.event_count,
             "merged_count": rank.passed_count, "lost_count": rank.damage.lost_count,
             "added_count": rank.added_count,
             "start_ns": rank.range_ns[0] if rank.range_ns else None, **_without_rank(clock)}
            for rank, clock in zip(merged.ranks, self.clocks, strict=True)
        ]  # fmt: skip
        return {
            "output": str(self.path), "event_count": merged.event_count,
            "track_event_count": merged.track_event_count, "text_bytes": merged.text_bytes,
            "base_ns": self.base_ns, "run": None if self.run is None else str(self.run),
            "clock_rule": RULE, "ranks": rows, "notes": list(self.notes),
            "faults": list(self.faults),
        }  # fmt: skip


def _without_rank(clock: RankClock) -> dict[str, Any]:
    return {key: value for key, value in asdict(clock).items() if key != "rank"}


def merge_traces(
    sources: Sequence[Path], output: Path, options: MergeOptions, *,
    reading: ReadProgress | None = None, writing: merge.Progress | None = None,
) -> MergeReport:  # fmt: skip
    """Writes one trace of all ranks."""
    paths, left_out = merge_inputs.merge_files(sources, options.window)
    inputs = merge_inputs.merge_inputs(paths, ranks=options.ranks)
    files = [each.path for each in inputs.values()]
    merge.check_target(output, files, force=options.force)
    asked, between, recorded = default_pool(files), {}, {}
    if options.steps is not None:
        found = asked.map(step_range, files, {"steps": options.steps}, reading)
        between = dict(zip(inputs, found, strict=True))
    clocks = rank_clocks(inputs, by_collectives=options.by_collectives, progress=reading)
    by_rank = {clock.rank: clock for clock in clocks}
    if options.by_collectives or options.steps:
        with contextlib.suppress(TraceFormatError):  # one of them can only be passed through
            recorded = dict(zip(inputs, asked.map(_recording, files, {}), strict=True))
    # Times count from a full hour, one to two hours before the first. Kineto's own base is up to
    # three months back, and viewers hold times as floats, which that far from zero barely resolve
    # 1 ns: Perfetto then drops events that seem to overlap.
    first_ns = min((each.base_ns + each.first_ns for each in inputs.values()
                    if each.has_wall_clock and each.first_ns is not None), default=0)  # fmt: skip
    base_ns = max(0, first_ns // _HOUR_NS - 1) * _HOUR_NS
    run, notes = _run_of(sources[0]) if options.counters or options.phases else (None, [])
    tracks = None if run is None else partial(run_tracks, run, inputs, by_rank, options)
    drawn = {files.rank for files in run.ranks} if run and options.phases else set()
    plans = [
        merge.RankPlan(
            source=each, rank=rank, shift_ns=each.base_ns - base_ns - by_rank[rank].moved_ns,
            between=between.get(rank), clock=_without_rank(by_rank[rank]),
            streams=recorded[rank][1] if rank in recorded else merge_inputs.StreamLanes(),
            without_phases=rank in drawn,
        )
        for rank, each in inputs.items()
    ]  # fmt: skip
    if left_out:
        notes.append(f"{left_out} traces of the run's other windows are not in it: --window N")
    merged = merge.write_merged(
        output, plans, base_ns=base_ns, about={"clock_rule": RULE}, tracks=tracks, progress=writing
    )
    checks = check_frame({rank: file for rank, (file, _) in recorded.items()})
    return MergeReport(
        path=output, merged=merged, clocks=tuple(clocks), base_ns=base_ns,
        run=run.paths.root if run else None,
        notes=(*notes, *_notes(merged), *clock_notes(inputs, clocks)),
        faults=tuple(fault_lines(checks, OF_EACH_RANK, effect="merged as recorded")),
    )  # fmt: skip


def _recording(trace: Trace) -> tuple[TraceFile, merge_inputs.StreamLanes]:
    """What is known of a rank's file once it was read; a question for a pool."""
    return trace_file(trace), merge_inputs.stream_lanes(merge_inputs.overlapping_events(trace))


def step_range(trace: Trace, *, steps: tuple[int, int]) -> merge.Range:
    """When some steps began, and when they and what they launched ended; a question for a pool."""
    start_ns, end_ns = step_window(trace, steps)
    launched = gpu_events(trace, steps)
    ends = (launched["ts_ns"] + launched["dur_ns"]).to_list()
    return start_ns, max([end_ns, *ends])


def default_output(sources: Sequence[Path]) -> Path:
    """The default path of the merged trace: in the run directory, else in the current one."""
    return (_run_folder(sources[0]) or Path()) / f"{MERGED_NAME}.json.gz"


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


def _notes(merged: merge.MergedTrace) -> list[str]:
    """Notes on what was read, for people."""
    found = [note for rank in merged.ranks for note in rank.notes]
    timed = {each.plan.rank: each.range_ns for each in merged.ranks if each.range_ns is not None}
    for rank, own in timed.items():
        others = [other for name, other in timed.items() if name != rank]
        if others and all(own[1] < other[0] or other[1] < own[0] for other in others):
            found.append(f"rank {rank}: its trace covers no time that another rank's covers")
    return found
