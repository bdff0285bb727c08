"""The traces of a job by rank, and how a question is asked of each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.arrivals import arrivals
from haiprof.trace_analysis.collectives import collective_kernels, match_collectives
from haiprof.trace_analysis.device_time import Steps, with_rank
from haiprof.trace_analysis.files import TraceFile, check_frame, load_frame, trace_file
from haiprof.trace_analysis.pool import Pool, Question, Serial, default_pool
from haiprof.trace_format.find import by_rank, is_reduced_to_functions, window_files
from haiprof.trace_format.kineto.rank_trace import Trace

NamedFiles = Mapping[int, Path] | tuple[Path, ...]  # files by rank, or files that state their ranks
_Options = ParamSpec("_Options")


class RankTraces:
    """The traces of a job by rank, and how a question is asked of each of them.

    Args:
        path: As for `TraceQuestions`; with `named`, where these files are.
        pool: As for `TraceQuestions`.
        window: As for `TraceQuestions`.
        named: These files and no others: by rank, or each of the rank that it states.
    """

    def __init__(
        self, path: str | Path, *, pool: Pool | None = None, window: int | None = None,
        named: NamedFiles | None = None,
    ) -> None:  # fmt: skip
        self.path = Path(path)
        self._named = named
        self._window = window
        self._given_pool = pool

    @cached_property
    def _pool(self) -> Pool:
        return self._given_pool or default_pool(self.paths())

    def _arrivals(self, steps: Steps) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
        """Each rank's part in each collective, the ranks' clocks, and the kernels behind both."""
        kernels = match_collectives(self.per_rank(collective_kernels, steps=steps))
        hosts = [(rank, file.host) for rank, file in self.files.items()]
        known = pl.DataFrame(hosts, schema={"rank": pl.Int64, "host": pl.String}, orient="row")
        return *arrivals(kernels, known), kernels

    @cached_property
    def traces(self) -> dict[int, Trace]:
        """The trace of each rank; its tables are read in this process."""
        files = self.files  # asks the pool, which then holds the tables that it has read
        read = self._pool.trace if isinstance(self._pool, Serial) else Trace
        return {rank: read(file.path) for rank, file in files.items()}

    @cached_property
    def files(self) -> dict[int, TraceFile]:
        """What the file of each rank is; several are read at a time, into their caches.

        Raises:
            TraceFormatError: There is none, one cannot be read, or two are of one rank.
        """
        paths = self.paths()
        if is_reduced_to_functions(paths):
            from haiprof.trace_analysis.function_patterns import read_pattern

            return by_rank(read_pattern(path)[1] for path in paths)
        found = self._pool.map(trace_file, paths, {})
        files = [replace(f, path=path) for f, path in zip(found, paths, strict=True)]
        if isinstance(self._named, Mapping):
            files = [replace(f, rank=rank) for rank, f in zip(self._named, files, strict=True)]
        return by_rank(files)

    def paths(self) -> list[Path]:
        """The files, one per rank."""
        if self._named is None:
            return window_files(self.path, self._window)
        return list(self._named.values() if isinstance(self._named, Mapping) else self._named)

    def size_bytes(self) -> int:
        """Total size of the files on disk."""
        return sum(path.stat().st_size for path in self.paths())

    def load_report(self) -> pl.DataFrame:
        """What was read of each file, and what not: `haiprof.trace_analysis.files`.

        Returns:
            One row per rank: `rank`, `file`, `world_size`, `first_step`, `last_step`,
            `text_bytes`, `event_count`, which is the sum of a count per table (`gpu_count`, ...)
            and of `redundant_count`, `not_used_count`, `bad_time_count` and `lost_count`;
            `repaired_count`, `truncated_bytes`, `fault_count`, `faults`.
        """
        return load_frame(self.files)

    def trace_check(self) -> pl.DataFrame:
        """What is odd about the traces: `haiprof.trace_analysis.files`.

        Returns:
            One row per trace and finding: `rank` (null of all ranks together), `file`, `check`,
            `is_fault`, `count`, `text`, `effect`, `answers`; no row where nothing was found.
        """
        if len(self.files) < 2 or is_reduced_to_functions(self.paths()):
            return check_frame(self.files)
        return check_frame(self.files, self._arrivals(None)[1])

    def per_rank(
        self,
        question: Callable[..., pl.DataFrame],
        *,
        ranks: Sequence[int] | None = None,
        **options: Any,  # noqa: ANN401 - whatever the question takes
    ) -> pl.DataFrame:
        """One question's frames of all ranks, with the rank in front.

        Args:
            question: A function of the module level: (trace, **options) to a frame.
            ranks: Only these are asked; None takes all.
            options: Passed on.

        Raises:
            MissingDataError: There is no trace of one of them.
        """
        asked = list(self.files) if ranks is None else list(ranks)
        paths = [self.file_of(rank).path for rank in asked]
        return with_rank(zip(asked, self._pool.map(question, paths, options), strict=True))

    def file_of(self, rank: int) -> TraceFile:
        """The file of a rank.

        Raises:
            MissingDataError: There is no trace of it.
        """
        if rank not in self.files:
            known = ", ".join(map(str, self.files))
            raise MissingDataError(
                f"{self.path}: no trace of rank {rank}", hint=f"it has rank {known}"
            )
        return self.files[rank]


def of_each_rank(
    question: Callable[Concatenate[Trace, _Options], pl.DataFrame],
) -> Callable[Concatenate[RankTraces, _Options], pl.DataFrame]:
    """A method that asks a question of each rank, with its options and documentation.

    Frames have the rank in front of the columns that the question states.
    """
    signature = inspect.signature(question)
    trace, *options = signature.parameters.values()

    def method(self: RankTraces, /, *args: Any, **named: Any) -> pl.DataFrame:  # noqa: ANN401
        given = signature.bind(self, *args, **named).arguments  # refused here, not in a worker
        del given[trace.name]
        return self.per_rank(question, **given)

    own = trace.replace(name="self", annotation=inspect.Parameter.empty)
    update_wrapper(method, question)
    vars(method)["__signature__"] = signature.replace(parameters=[own, *options])
    return method


def asked_of_each_rank(method: Callable[..., object]) -> Question[Any] | None:
    """What a method asks of each rank; None of one that `of_each_rank` has not made."""
    return vars(method).get("__wrapped__")
