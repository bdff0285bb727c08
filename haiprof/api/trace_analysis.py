"""TraceAnalysis: traces of a job, and every question that can be asked of them, HTA's included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from haiprof.api.trace_pictures import ShownTraces
from haiprof.compat.hta import HTA_NAMES, HtaMethods
from haiprof.compat.hta_source import HtaFiles, hta_source
from haiprof.trace_analysis.pool import Pool


class TraceAnalysis(ShownTraces):
    """The traces of one window of a job, a file per rank; each is read at the first question.

    Args:
        path: A trace, a folder with one file per rank, a run directory, or files by rank.
        pool: Where traces are read; None takes local processes where the files are large.
        compat: `"hta"` adds HTA's methods, which return HTA's columns and units
            (`haiprof.compat.hta`; what differs is in docs/hta-differences.md).
        window: Of a run directory with several trace windows: which, by start, from 0; None takes
            the last whole one.
        trace_dir: HTA's name of the folder. One of HTA's arguments brings HTA's methods.
        trace_files: HTA's files by rank, or as a list; names in `trace_dir` where that is given.
        include_last_profiler_step: HTA's; nothing is left out here, so that only True is possible.

    Raises:
        UsageError: No traces are named, or twice; or the last step is to be left out.

    `show_*` draws figures in a notebook and prints tables in a terminal; `write_page` writes all.
    Frames are polars'; `frame.to_pandas()` makes pandas' of them where pandas and pyarrow are
    installed: haiprof does not need them.
    """

    def __init__(
        self,
        path: str | Path | Mapping[int, str | Path] | None = None,
        *,
        pool: Pool | None = None,
        compat: Literal["hta"] | None = None,
        window: int | None = None,
        trace_dir: str | Path | None = None,
        trace_files: HtaFiles | None = None,
        include_last_profiler_step: bool | None = None,
    ) -> None:
        source = hta_source(path, trace_dir, trace_files, include_last_profiler_step)
        super().__init__(source.path, pool=pool, window=window, named=source.named)
        self._compat = "hta" if source.is_hta else compat

    if not TYPE_CHECKING:  # a type checker knows the methods of HtaMethods(analysis)

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            """HTA's methods, where they are asked for."""
            if name not in HTA_NAMES:
                raise AttributeError(f"TraceAnalysis has no attribute {name!r}")
            if self._compat != "hta":
                raise AttributeError(
                    f"{name} is HTA's: TraceAnalysis(path, compat='hta') has it, in HTA's columns"
                )
            return getattr(HtaMethods(self), name)
