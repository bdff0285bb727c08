"""A run's counters and phases as tracks of its merged trace, on the trace's clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.run_analysis.counters import counter_frame
from haiprof.run_analysis.phases import GC_PHASE, SAVE_PHASE, phase_frame
from haiprof.run_analysis.records import clock_offset_ns
from haiprof.run_analysis.run_files import RankFiles, RunFiles
from haiprof.run_analysis.segments import RankSegments, load_segments
from haiprof.run_analysis.step_frame import step_frame
from haiprof.trace_analysis.alignment import RankClock
from haiprof.trace_format.merge.inputs import TraceInput
from haiprof.trace_format.merge.lanes import COUNTERS_PLACE, PHASES_PLACE, rank_pid, sort_index
from haiprof.trace_format.merge.rewrite import Range
from haiprof.trace_format.merge.tracks import Track

MARGIN_NS = 2_000_000_000
"""Before and behind the traces: two samples of a second each."""
_NODES_PID, _NODES_SORT = 1_900_000_000, 2_000_000_000
_THREADS = ("steps", "phases", "pauses")
_STEPS, _PHASES, _PAUSES = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTracks:
    """Makes tracks of a merged trace from a run's own records.

    Called with the time that each rank's trace covers, it gives the tracks. A time of the run is
    its anchor's Unix time, shifted like the rank's trace, and by any change of the wall clock
    between the run's anchor and the trace's own, where the trace has one (`haiprof.clock`).
    """

    run: RunFiles
    inputs: Mapping[int, TraceInput]
    clocks: Mapping[int, RankClock]
    with_counters: bool = True
    with_phases: bool = True

    def __call__(self, ranges: Mapping[int, Range]) -> Iterator[Track]:
        """The tracks; none without a trace that has times."""
        if not ranges:
            return
        if self.with_phases:
            for files in self.run.ranks:
                if files.rank in ranges:
                    yield from self._phases(files, ranges[files.rank])
        if self.with_counters:
            whole = (min(r[0] for r in ranges.values()), max(r[1] for r in ranges.values()))
            yield from self._counters(whole, ranges)

    def _phases(self, files: RankFiles, covered: Range) -> Iterator[Track]:
        """Steps, phases and pauses of one rank that touch the time of its trace."""
        try:
            segments = load_segments(files)
        except RunFormatError:
            return  # the run's own reports say so
        moved = self._moved_ns(files)
        rows = pl.concat([_steps(segments), _spans(segments)]).with_columns(
            start_ns=pl.col("start_ns") - moved
        )
        start, end = covered[0] - MARGIN_NS, covered[1] + MARGIN_NS
        inside = (pl.col("start_ns") < end) & (pl.col("start_ns") + pl.col("duration_ns") > start)
        again = f", restart {files.attempt}" if files.attempt else ""
        rows = rows.filter(inside)
        if rows.height:
            yield Track(
                pid=rank_pid(files.rank, PHASES_PLACE),
                name=f"rank {files.rank}: haiprof phases{again}",
                sort_index=sort_index(files.rank, PHASES_PLACE),
                threads=_THREADS,
                spans=rows,
            )

    def _counters(self, covered: Range, ranges: Mapping[int, Range]) -> Iterator[Track]:
        """Counters of ranks with a trace, and of the nodes they ran on."""
        moved = self._moved_of_hosts()
        slack = MARGIN_NS + max((abs(ns) for ns in moved.values()), default=0)
        wanted = (covered[0] - slack, covered[1] + slack)
        rows, _ = counter_frame(self.run, between=wanted)
        offsets = pl.col("host").replace_strict(moved, default=0, return_dtype=pl.Int64)
        rows = rows.with_columns(time_ns=pl.col("time_ns") - offsets).filter(
            pl.col("time_ns").is_between(covered[0] - MARGIN_NS, covered[1] + MARGIN_NS)
        )
        for rank in sorted(ranges):
            own = _track_names(rows.filter(pl.col("rank") == rank))
            if own.height:
                yield Track(
                    pid=rank_pid(rank, COUNTERS_PLACE),
                    name=f"rank {rank}: counters",
                    sort_index=sort_index(rank, COUNTERS_PLACE),
                    counters=own,
                )
        nodes = rows.filter(pl.col("rank").is_null())
        hosts = {str(self._host(files)) for files in self.run.ranks if files.rank in ranges}
        for place, host in enumerate(nodes["host"].unique().sort()):
            if host in hosts or len(self.run.nodes) == 1:
                yield Track(
                    pid=_NODES_PID + place,
                    name=f"node {host}: counters",
                    sort_index=_NODES_SORT + place,
                    counters=_track_names(nodes.filter(pl.col("host") == host)),
                )

    def _host(self, files: RankFiles) -> object:
        return files.report.get("host")

    def _moved_of_hosts(self) -> dict[str, int]:
        """What is subtracted from the times of each host's counters."""
        found: dict[str, list[int]] = {}
        for files in self.run.ranks:
            if files.rank in self.clocks:
                found.setdefault(str(self._host(files)), []).append(self._moved_ns(files))
        return {host: round(median(each)) for host, each in found.items()}

    def _moved_ns(self, files: RankFiles) -> int:
        """What is subtracted from the Unix times of one rank's records."""
        said = self.inputs[files.rank].metadata.get("haiprof")
        recorded = files.clock_offset_ns
        traced = clock_offset_ns(said.get("clock") if isinstance(said, dict) else None)
        set_ns = traced - recorded if traced is not None and recorded is not None else 0
        return self.clocks[files.rank].moved_ns - set_ns


def _steps(segments: RankSegments) -> pl.DataFrame:
    """Training steps without the time of an evaluation within them."""
    return step_frame(segments).select(
        pl.lit(_STEPS, dtype=pl.Int64).alias("thread"),
        pl.format("step {}", "step").alias("name"),
        "start_ns",
        pl.col("step_ns").alias("duration_ns"),
        "step",
        pl.lit(None, dtype=pl.String).alias("of"),
        pl.lit(None, dtype=pl.Int64).alias("self_ns"),
    )


def _spans(segments: RankSegments) -> pl.DataFrame:
    pause = pl.col("phase").is_in([GC_PHASE, SAVE_PHASE])
    return phase_frame(segments).select(
        pl.when(pause).then(_PAUSES).otherwise(_PHASES).cast(pl.Int64).alias("thread"),
        pl.col("phase").alias("name"),
        "start_ns",
        "duration_ns",
        "step",
        pl.col("name").alias("of"),
        "self_ns",
    )


def _track_names(rows: pl.DataFrame) -> pl.DataFrame:
    """Counters under the name of their track: GPU or other entity, and metric."""
    gpu = pl.when(pl.col("gpu").is_not_null()).then(pl.format("GPU {}", "gpu"))
    part = pl.coalesce(gpu, pl.when(pl.col("rank").is_null()).then("entity"))
    return rows.select(
        "time_ns",
        pl.concat_str(part, "metric", separator=" ", ignore_nulls=True).alias("name"),
        "unit",
        "value",
    ).sort("name", "time_ns", maintain_order=True)
