"""A run's scalars for TensorBoard: which are new, and writing them with its own writer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import HaiprofError, MissingExtraError
from haiprof.base.safe_files import list_folder, make_folder, remove_file
from haiprof.base.stop_signal import stop_event
from haiprof.base.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_S
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.show.figures.style import PHASES
from haiprof.show.run_header import RUNNING, manifest_or_none, run_header
from haiprof.show.text import count_text

MAX_STEPS_PER_S = 50

# (source, metric) -> (scalar, base units per shown unit)
COUNTER_SCALARS = {
    ("process", "cpu_cores"): ("cpu_cores", 1.0),
    ("process", "memory_rss_bytes"): ("rss_gib", float(BYTES_PER_GIB)),
    ("gpu", "utilization_ratio"): ("gpu_utilization", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Scalars of one rank at one time."""

    rank: int
    wall_ns: int  # Unix time: a step's start, or when a counter was sampled
    step: int  # Steps of the rank so far, through restarts
    values: Mapping[str, float]  # Value by scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the points of each rank have been taken, so that none is taken twice."""

    step_count: Mapping[int, int] = field(default_factory=dict)  # Steps looked at, by rank
    drawn_ns: Mapping[int, int] = field(default_factory=dict)
    """Start of the last step taken, by rank."""
    sample_ns: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """Time of the last sample taken, by rank and scalar."""


def new_points(
    steps: pl.DataFrame, counters: pl.DataFrame, progress: Progress, *, complete: bool
) -> tuple[list[Point], Progress]:
    """Points new since the last look, in order of time; of a fast job at most 50 a second."""
    points: list[Point] = []
    step_count, drawn_ns = dict(progress.step_count), dict(progress.drawn_ns)
    sample_ns = dict(progress.sample_ns)
    by_rank = {rank: frame for (rank,), frame in steps.partition_by("rank", as_dict=True).items()}
    for rank, frame in sorted(by_rank.items()):
        own = frame.sort("attempt", "step")
        end = own.height if complete else own.height - 1
        first = step_count.get(rank, 0)
        fresh = own.with_row_index("place").slice(first, max(0, end - first))
        kept = _apart(fresh["start_ns"].to_list(), drawn_ns.get(rank))
        times = {"step_ms": "step_ns"} | {f"{phase}_ms": f"{phase}_host_ns" for phase in PHASES}
        taken = [
            Point(
                rank=rank, wall_ns=row["start_ns"], step=row["place"],
                values={name: row[ns] / NS_PER_MS for name, ns in times.items()
                        if row[ns] is not None},
            )
            for row in fresh[kept].iter_rows(named=True)
        ]  # fmt: skip
        points += taken
        step_count[rank] = max(first, end)
        if taken:
            drawn_ns[rank] = taken[-1].wall_ns
    for (rank, scalar), frame in _samples(counters):
        starts = by_rank.get(rank, steps.clear())["start_ns"].sort().to_numpy()
        after_ns = sample_ns.get((rank, scalar), 0)
        new = frame.filter(pl.col("time_ns") > after_ns).select("time_ns", "value")
        places = np.searchsorted(starts, new["time_ns"].to_numpy(), side="right").tolist()
        taken = [
            Point(rank=rank, wall_ns=time_ns, step=max(0, place - 1), values={scalar: value})
            for place, (time_ns, value) in zip(places, new.iter_rows(), strict=True)
        ]
        points += taken
        if taken:
            sample_ns[rank, scalar] = taken[-1].wall_ns
    points.sort(key=lambda point: point.wall_ns)
    return points, Progress(step_count=step_count, drawn_ns=drawn_ns, sample_ns=sample_ns)


def _apart(starts_ns: Sequence[int], drawn_ns: int | None) -> list[int]:
    """Places of the steps that begin long enough after the one taken before them."""
    least_ns = NS_PER_S // MAX_STEPS_PER_S
    kept = []
    for place, start_ns in enumerate(starts_ns):
        if drawn_ns is None or not 0 <= start_ns - drawn_ns < least_ns:
            kept.append(place)
            drawn_ns = start_ns
    return kept


def _samples(counters: pl.DataFrame) -> Iterator[tuple[tuple[int, str], pl.DataFrame]]:
    """Counters that become scalars, by rank and scalar, in shown units."""
    for (source, metric), (scalar, scale) in COUNTER_SCALARS.items():
        known = pl.col("rank").is_not_null() & pl.col("value").is_finite()
        mine = counters.filter(known, source=source, metric=metric)
        scaled = mine.sort("time_ns").with_columns(value=pl.col("value") / scale)
        for rank in sorted(scaled["rank"].unique()):
            yield (rank, scalar), scaled.filter(pl.col("rank") == rank)


FILE_SUFFIX = ".haiprof"
# Reading takes longer as a run grows; it may use a tenth of one CPU.
_REST_PER_READ = 9.0
_QUEUE_EVENTS = 1000
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The number of points in the event files."""

    path: str
    ranks: tuple[int, ...]
    point_count: int  # Points in time, each with one or more scalars

    @property
    def line(self) -> str:
        """For people."""
        ranks = count_text(len(self.ranks), "rank")
        points = count_text(self.point_count, "point")
        return f"{points} of {ranks} for TensorBoard: tensorboard --logdir {self.path}"


class EventFiles:
    """One event file per rank, opened at its first point."""

    def __init__(self, folder: Path, *, below: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError(
                f"scalars need the package tensorboard ({error})",
                hint="pip install 'haiprof[tensorboard]'",
            ) from None
        self.folder, self._below = folder, below
        self.point_count = 0
        self._open = EventFileWriter
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self.writers: dict[int, Any] = {}

    def add(self, point: Point) -> None:
        """Queues one point."""
        writer = self.writers.get(point.rank)
        if writer is None:
            folder = self.folder / f"rank{point.rank}"
            # TensorBoard's writer follows links. An earlier file of haiprof is removed, so that no
            # step appears twice.
            make_folder(folder, below=self._below, own=True)
            for name in list_folder(folder, below=self._below):
                if name.endswith(FILE_SUFFIX):
                    remove_file(folder / name, below=self._below)
            writer = self._open(
                str(folder), max_queue_size=_QUEUE_EVENTS, filename_suffix=FILE_SUFFIX
            )
            self.writers[point.rank] = writer
        values = [self._summary.Value(tag=tag, simple_value=n) for tag, n in point.values.items()]
        summary, wall_s = self._summary(value=values), point.wall_ns / NS_PER_S
        writer.add_event(self._event(wall_time=wall_s, step=point.step, summary=summary))
        self.point_count += 1

    def flush(self) -> None:
        """Puts what is queued into the files."""
        for writer in self.writers.values():
            writer.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        for writer in self.writers.values():
            writer.close()


def write_scalars(
    run: RunPaths, *, follow: bool, every_s: float, folder: Path | None = None,
    stop: threading.Event | None = None,
) -> Written:  # fmt: skip
    """Writes the scalars of a run into its tensorboard folder, one event file per rank."""
    files = EventFiles(
        folder or run.tensorboard, below=run.root if folder in (None, run.tensorboard) else folder
    )
    with contextlib.nullcontext(stop) if stop is not None else stop_event() as end:
        try:
            _look_until_end(run, files, end if follow else None, every_s=every_s)
            files.close()
        except OSError as error:
            raise HaiprofError(
                f"{error.filename or files.folder}: scalars cannot be written: "
                f"{error.strerror or error}",
                hint="the folder must be yours, and nobody else's to write to: chmod -R go-w DIR",
            ) from None
    return Written(
        path=str(files.folder), ranks=tuple(sorted(files.writers)), point_count=files.point_count
    )


def _look_until_end(
    run: RunPaths, files: EventFiles, stop: threading.Event | None, *, every_s: float
) -> None:
    progress = Progress()
    while True:
        ended = not _running(run)
        started_s = time.monotonic()
        # An RunFrames reads once; a run that grew needs a new one.
        analyzer = RunFrames(run.root)
        points, progress = new_points(
            analyzer.steps(), analyzer.counters(), progress, complete=ended
        )
        for point in points:
            files.add(point)
        files.flush()
        if stop is None or ended or stop.is_set():
            return
        _rest(run, stop, max(every_s, (time.monotonic() - started_s) * _REST_PER_READ))


def _rest(run: RunPaths, stop: threading.Event, duration_s: float) -> None:
    """Waits, at most until the end of the job: its launcher waits for the last look."""
    until_s = time.monotonic() + duration_s
    while _running(run) and (left_s := until_s - time.monotonic()) > 0:
        if stop.wait(min(left_s, _POLL_S)):
            return


def _running(run: RunPaths) -> bool:
    return run_header(run, manifest_or_none(run)).state == RUNNING
