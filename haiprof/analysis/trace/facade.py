"""TraceAnalysis: traces of a job, and every question that can be asked of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.analysis.trace.pool import SMALL_BYTES, LocalProcesses, Pool, Serial
from haiprof.analysis.trace.temporal import temporal_breakdown
from haiprof.traces.find import by_rank, trace_files
from haiprof.traces.trace import Trace

Steps = tuple[int, int] | None


class TraceAnalysis:
    """The traces of one window of a job, a file per rank; each is read at the first question.

    Args:
        path: A trace, a folder with one file per rank, or a run directory.
        pool: Where ranks are worked on; None takes local processes where the files are large.
    """

    def __init__(self, path: str | Path, *, pool: Pool | None = None) -> None:
        self.path = Path(path)
        self._given_pool = pool

    def temporal_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Idle, computing and other time per rank: `haiprof.analysis.trace.temporal`.

        Args:
            steps: First profiler step and the one after the last; None takes all GPU events.

        Returns:
            One row per rank and device: `rank`, `device`, `span_ns`, `idle_ns`, `compute_ns`,
            `non_compute_ns`, `idle_ratio`, `compute_ratio`, `non_compute_ratio`.
        """
        found = self.per_rank(temporal_breakdown, steps=steps)
        parts = ("idle", "compute", "non_compute")
        return found.with_columns(
            (pl.col(f"{part}_ns") / pl.col("span_ns")).alias(f"{part}_ratio") for part in parts
        )

    @cached_property
    def traces(self) -> dict[int, Trace]:
        """The trace of each rank.

        Raises:
            TraceFormatError: There is none, one cannot be read, or two are of one rank.
        """
        files = trace_files(self.path)
        self._pool.map(_open, files, {})  # builds missing caches, several at a time
        return by_rank(Trace(path) for path in files)

    def per_rank(
        self,
        question: Callable[..., pl.DataFrame],
        **options: Any,  # noqa: ANN401 - whatever the question takes
    ) -> pl.DataFrame:
        """One question's frames of all ranks, with the rank in front.

        Args:
            question: A function of the module level: (trace, **options) to a frame.
            options: Passed on.
        """
        ranks, paths = list(self.traces), [trace.path for trace in self.traces.values()]
        answers = self._pool.map(question, paths, options)
        named = [
            answer.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
            for rank, answer in zip(ranks, answers, strict=True)
        ]
        return pl.concat(named)

    @cached_property
    def _pool(self) -> Pool:
        if self._given_pool is not None:
            return self._given_pool
        sizes = [path.stat().st_size for path in trace_files(self.path)]
        large = len(sizes) > 1 and sum(sizes) > SMALL_BYTES
        return LocalProcesses() if large else Serial()


def _open(trace: Trace) -> int:
    return trace.report.event_count
