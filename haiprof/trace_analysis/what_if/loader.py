"""Batches of a loader with workers: when each was ready, as a resource beside the host's threads.

The main process waits in `__next__` for a batch that workers make. What it does meanwhile does not
decide when the batch comes: with a faster forward pass it waits longer. So the workers are a chain
of their own, from one batch to the next, to which a wait is joined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_format.kineto.rank_trace import Trace

WORKERS_NAME = r"^enumerate\(DataLoader\)#_MultiProcessing"
"""The mark around `__next__` of a loader with workers; it makes no batch itself."""
WORKERS_TID = -2
"""Stands for the workers among the threads of a replay; threads of the system count from 0."""
WAITED_NS = 300_000
"""A batch that lies ready is out of the queue sooner: polling and unpickling take 50 to 200 us."""
WAITED_RATIO = 0.05
"""And a wait is at least this share of a step, and all waits of the window: on a busy machine
polling itself takes milliseconds, and workers that are ahead would be taken for the limit."""
BUSY_BATCHES = 8
"""Between two waits that are further apart the workers may have had nothing to do: their queue
holds prefetch_factor batches of each, by default 2, and a trace does not say of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Batches that the main process took from workers, in order; arrays of one length."""

    asked_ns: Ints
    """When it asked for each."""
    taken_ns: Ints
    """When it went on with it: the first operator inside of `__next__`, or its end."""
    ready_ns: Ints
    """When the workers had made it; of one that lay ready, as their usual pace has it."""
    waited: npt.NDArray[np.bool_]
    """Whether it was not ready when it was asked for."""

    @property
    def bounds(self) -> Ints:
        """When each batch was taken that had been waited for.

        From one to the next the workers were busy all the time. A window that begins or ends
        elsewhere, such as between two batches that came together, holds more or less of their
        work than of the steps'.
        """
        return self.taken_ns[self.waited]

    @property
    def waited_ns(self) -> int:
        """For batches that were not ready."""
        return int((self.taken_ns - self.asked_ns)[self.waited].sum())


def worker_batches(
    trace: Trace, window: tuple[int, int], main_tid: int
) -> tuple[Batches | None, bool]:
    """The batches that a rank's main thread took in a window, and whether workers made any.

    None where the workers' pace does not show: training never waits for two batches near each
    other.
    """
    marks = _fetch_marks(trace, window, main_tid)
    asked, ends = marks["ts_ns"].to_numpy(), marks["end_ns"].to_numpy()
    taken = _first_operator(trace, main_tid, asked, ends)
    step = float(np.median(np.diff(asked))) if len(asked) > 1 else 0.0
    waited = taken - asked > max(WAITED_NS, WAITED_RATIO * step)
    lost_ns = int((taken - asked)[waited].sum())
    ready = _ready(taken, waited)
    if ready is None or lost_ns < WAITED_RATIO * (window[1] - window[0]):
        return None, not marks.is_empty()
    return Batches(asked_ns=asked, taken_ns=taken, ready_ns=ready, waited=waited), True


def _fetch_marks(trace: Trace, window: tuple[int, int], main_tid: int) -> pl.DataFrame:
    """The outermost marks of `__next__`; until 2022 they were operators."""
    end = (pl.col("ts_ns") + pl.col("dur_ns")).alias("end_ns")
    host = trace.annotations.filter(pl.col("category").cast(pl.String) != "gpu_user_annotation")
    parts = [table.select(pl.col("name").cast(pl.String), "tid", "ts_ns", end)
             for table in (host, trace.ops)]  # fmt: skip
    return (
        pl.concat(parts)
        .filter(
            (pl.col("tid") == main_tid)
            & pl.col("name").str.contains(WORKERS_NAME)
            & pl.col("ts_ns").is_between(*window)
            & (pl.col("end_ns") <= window[1])
        )
        .sort("ts_ns")
    )


def _first_operator(trace: Trace, main_tid: int, asked: Ints, ends: Ints) -> Ints:
    """When the first operator inside of each mark began: it makes tensors of what has come."""
    plain = ~pl.col("name").cast(pl.String).str.contains(WORKERS_NAME)
    begins = trace.ops.filter((pl.col("tid") == main_tid) & plain)["ts_ns"].sort().to_numpy()
    at = np.searchsorted(begins, asked, side="left")
    found = np.append(begins, np.iinfo(np.int64).max)[at]
    return np.where(found < ends, found, ends)


def _ready(taken: Ints, waited: npt.NDArray[np.bool_]) -> Ints | None:
    """When each was made: of those waited for as seen, else by the workers' pace; or None."""
    known = np.flatnonzero(waited)
    apart, took = np.diff(known), np.diff(taken[known])
    busy = apart <= BUSY_BATCHES
    if not busy.any():
        return None
    pace = float(np.median(took[busy] / apart[busy]))
    at = np.searchsorted(known, np.arange(len(taken)), side="right") - 1  # the wait before each
    paces = np.append(np.where(busy, took / np.maximum(apart, 1), pace), pace)
    since = np.arange(len(taken)) - known[at]
    ready = taken[known[at]] + since * np.where(at >= 0, paces[at], pace)
    first = np.arange(len(taken)) < known[0]
    ready[first] = taken[known[0]] - pace * (known[0] - np.flatnonzero(first))
    found: Ints = np.minimum(np.rint(ready).astype(np.int64), taken)
    return found
