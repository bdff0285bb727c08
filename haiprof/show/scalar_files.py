"""Writes a run's scalars with TensorBoard's own writer, once or until the job has ended."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, MissingExtraError
from haiprof.base.safe_files import list_folder, make_folder, remove_file
from haiprof.base.stop_signal import stop_event
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.show.run_header import RUNNING, manifest_or_none, run_header
from haiprof.show.scalars import Point, Progress, new_points
from haiprof.show.text import count_text

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
    point_count: int
    """Points in time, each with one or more scalars."""

    @property
    def line(self) -> str:
        """For people."""
        ranks = count_text(len(self.ranks), "rank")
        points = count_text(self.point_count, "point")
        return f"{points} of {ranks} for TensorBoard: tensorboard --logdir {self.path}"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


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
        self._writers: dict[int, Any] = {}

    def add(self, point: Point) -> None:
        """Queues one point."""
        writer = self._writers.get(point.rank)
        if writer is None:
            writer = self._writers[point.rank] = self._new_writer(point.rank)
        values = [
            self._summary.Value(tag=scalar, simple_value=value)
            for scalar, value in point.values.items()
        ]
        summary = self._summary(value=values)
        wall_s = point.wall_ns / NS_PER_S
        writer.add_event(self._event(wall_time=wall_s, step=point.step, summary=summary))
        self.point_count += 1

    def flush(self) -> None:
        """Puts what is queued into the files."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        for writer in self._writers.values():
            writer.close()

    def count_written(self) -> Written:
        """The number of points so far."""
        ranks = tuple(sorted(self._writers))
        return Written(path=str(self.folder), ranks=ranks, point_count=self.point_count)

    def _new_writer(self, rank: int) -> Any:  # noqa: ANN401 - tensorboard has no types
        """The rank's file; an earlier one of haiprof is removed, so that no step appears twice."""
        folder = self.folder / f"rank{rank}"
        make_folder(folder, below=self._below, own=True)  # TensorBoard's writer follows links
        for name in list_folder(folder, below=self._below):
            if name.endswith(FILE_SUFFIX):
                remove_file(folder / name, below=self._below)
        return self._open(str(folder), max_queue_size=_QUEUE_EVENTS, filename_suffix=FILE_SUFFIX)


def write_scalars(
    run: RunPaths,
    *,
    follow: bool,
    every_s: float,
    folder: Path | None = None,
    stop: threading.Event | None = None,
) -> Written:
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
    return files.count_written()


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
