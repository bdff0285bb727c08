"""The traces of a job by rank, and how a question is asked of each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import polars as pl

from haiprof.analysis.trace.clocks import clock_offsets, on_one_clock
from haiprof.analysis.trace.collectives import collective_kernels
from haiprof.analysis.trace.files import TraceFile, load_frame, trace_file
from haiprof.analysis.trace.matching import matched
from haiprof.analysis.trace.pool import Pool, default_pool
from haiprof.analysis.trace.skew import collective_waits
from haiprof.traces.find import by_rank, window_files
from haiprof.traces.trace import Trace

Steps = tuple[int, int] | None


class RankTraces:
    """The traces of a job by rank, and how a question is asked of each of them."""

    def __init__(
        self,
        path: str | Path,
        *,
        pool: Pool | None = None,
        compat: Literal["hta"] | None = None,
        window: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._window = window
        self._given_pool = pool
        self._compat = compat

    def _matched_collectives(self, steps: Steps) -> pl.DataFrame:
        return matched(self.per_rank(collective_kernels, steps=steps))

    def _collective_waits(self, steps: Steps) -> pl.DataFrame:
        kernels = self._matched_collectives(steps)
        return collective_waits(on_one_clock(kernels, clock_offsets(kernels)))

    @cached_property
    def traces(self) -> dict[int, Trace]:
        """The trace of each rank; its tables are read in this process."""
        return {rank: Trace(file.path) for rank, file in self.files.items()}

    @cached_property
    def files(self) -> dict[int, TraceFile]:
        """What the file of each rank is; several are read at a time, into their caches.

        Raises:
            TraceFormatError: There is none, one cannot be read, or two are of one rank.
        """
        paths = window_files(self.path, self._window)
        found = self._pool.map(trace_file, paths, {})
        return by_rank(replace(f, path=path) for f, path in zip(found, paths, strict=True))

    def size_bytes(self) -> int:
        """How large the files are in sum, as they lie there."""
        return sum(path.stat().st_size for path in window_files(self.path, self._window))

    def load_report(self) -> pl.DataFrame:
        """What was read of each file, and what not: `haiprof.analysis.trace.files`.

        Returns:
            One row per rank: `rank`, `file`, `world_size`, `first_step`, `last_step`,
            `text_bytes`, `event_count`, which is the sum of a count per table (`gpu_count`, ...)
            and of `redundant_count`, `not_used_count`, `bad_time_count` and `lost_count`;
            `repaired_count`, `truncated_bytes`.
        """
        return load_frame(self.files)

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
        ranks, paths = list(self.files), [file.path for file in self.files.values()]
        answers = self._pool.map(question, paths, options)
        named = [
            answer.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
            for rank, answer in zip(ranks, answers, strict=True)
        ]
        return pl.concat(named)

    @cached_property
    def _pool(self) -> Pool:
        return self._given_pool or default_pool(window_files(self.path, self._window))
