"""TraceAnalysis: traces of a job, and every question that can be asked of them, HTA's included."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from haiprof.api.trace_pictures import ShownTraces
from haiprof.compat.hta import HTA_NAMES, HtaMethods
from haiprof.trace_analysis.pool import Pool


class TraceAnalysis(ShownTraces):
    """The traces of one window of a job, a file per rank; each is read at the first question.

    Args:
        path: A trace, a folder with one file per rank, or a run directory.
        pool: Where traces are read; None takes local processes where the files are large.
        compat: `"hta"` adds HTA's methods, which return HTA's columns and units
            (`haiprof.compat.hta`; what differs is in docs/hta-differences.md).
        window: Of a run directory with several trace windows: which, by start, from 0; None takes
            the last whole one.

    `show_*` draws figures in a notebook and prints tables in a terminal; `write_page` writes all.
    Frames are polars'; `frame.to_pandas()` makes pandas' of them where pandas and pyarrow are
    installed: haiprof does not need them.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        pool: Pool | None = None,
        compat: Literal["hta"] | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__(path, pool=pool, window=window)
        self._compat = compat

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
