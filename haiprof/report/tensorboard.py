"""Writes a run's scalars with TensorBoard's own writer, once or until the job has ended."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from haiprof.analysis.analyzer import Analyzer
from haiprof.errors import HaiprofError, MissingExtraError
from haiprof.report.run_header import RUNNING, manifest_or_none, run_header
from haiprof.report.scalars import Point, Progress, new_points
from haiprof.report.text import count_text
from haiprof.rundir.layout import RunPaths
from haiprof.units import NS_PER_S

FILE_SUFFIX = ".haiprof"
# Reading takes longer as a run grows; it may use a tenth of one CPU.
_REST_PER_READ = 9.0
_QUEUE_EVENTS = 1000
_POLL_S = 0.5
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How much went into the event files."""

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
    """One event file per rank, opened at its first point.

    Args:
        folder: Where `rank0`, `rank1`, ... are created.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise MissingExtraError(
                f"scalars need the package tensorboard ({error})",
                hint="pip install 'haiprof[tensorboard]'",
            ) from None
        self.folder = folder
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

    def written(self) -> Written:
        """How much went in so far."""
        ranks = tuple(sorted(self._writers))
        return Written(path=str(self.folder), ranks=ranks, point_count=self.point_count)

    def _new_writer(self, rank: int) -> Any:  # noqa: ANN401 - tensorboard has no types
        """The rank's file; an earlier one of haiprof goes, or each step would be there twice."""
        folder = self.folder / f"rank{rank}"
        for old in folder.glob(f"*{FILE_SUFFIX}"):
            old.unlink()
        return self._open(str(folder), max_queue_size=_QUEUE_EVENTS, filename_suffix=FILE_SUFFIX)


def write_scalars(
    run: RunPaths,
    *,
    follow: bool,
    every_s: float,
    folder: Path | None = None,
    stop: threading.Event | None = None,
) -> Written:
    """Writes the scalars of a run into its tensorboard folder, one event file per rank.

    Args:
        run: The run.
        follow: Look again every few seconds until the job has ended, or SIGTERM or SIGINT.
        every_s: Seconds between two looks; longer where reading takes long.
        folder: Another folder for them, of a run that cannot be written to.
        stop: Ends it, in place of a signal.

    Returns:
        How much was written. Of more than 50 steps per second some are left out.

    Raises:
        MissingExtraError: TensorBoard is not installed.
        HaiprofError: The run cannot be read, or the files cannot be written.
    """
    files = EventFiles(folder or run.tensorboard)
    with contextlib.nullcontext(stop) if stop is not None else _stop_event() as end:
        try:
            _look_until_end(run, files, end if follow else None, every_s=every_s)
            files.close()
        except OSError as error:
            raise HaiprofError(
                f"{files.folder}: scalars cannot be written: {error.strerror or error}"
            ) from None
    return files.written()


def _look_until_end(
    run: RunPaths, files: EventFiles, stop: threading.Event | None, *, every_s: float
) -> None:
    progress = Progress()
    while True:
        ended = not _running(run)
        started_s = time.monotonic()
        # An Analyzer reads once; a run that grew needs a new one.
        analyzer = Analyzer(run.root)
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
    """Waits, but not past the end of the job: its launcher waits for the last look."""
    until_s = time.monotonic() + duration_s
    while _running(run) and (left_s := until_s - time.monotonic()) > 0:
        if stop.wait(min(left_s, _POLL_S)):
            return


def _running(run: RunPaths) -> bool:
    return run_header(run, manifest_or_none(run)).state == RUNNING


@contextlib.contextmanager
def _stop_event() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; their handlers are as before afterwards."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def set_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, set_stop) for number in _STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
