"""TraceAnalysis: traces of a job, and every question that can be asked of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from haiprof.analysis.trace.questions.across import RankQuestions
from haiprof.analysis.trace.questions.causes import CauseQuestions
from haiprof.analysis.trace.questions.device import TimeQuestions
from haiprof.analysis.trace.questions.host import HostQuestions


class TraceAnalysis(TimeQuestions, RankQuestions, HostQuestions, CauseQuestions):
    """The traces of one window of a job, a file per rank; each is read at the first question.

    Args:
        path: A trace, a folder with one file per rank, or a run directory.
        pool: Where ranks are worked on; None takes local processes where the files are large.
        compat: `"hta"` adds HTA's methods, which return HTA's columns and units
            (`haiprof.analysis.trace.hta`; what differs is in docs/hta-differences.md).
        window: Of a run directory with several trace windows: which, by start, from 0; None takes
            the last whole one.

    Frames are polars'; `frame.to_pandas()` makes pandas' of them where pandas and pyarrow are
    installed: haiprof does not need them.
    """

    if not TYPE_CHECKING:  # a type checker knows the methods of HtaMethods(analysis)

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401
            """HTA's methods, where they are asked for."""
            from haiprof.analysis.trace.hta import HTA_NAMES, HtaMethods

            if name not in HTA_NAMES:
                raise AttributeError(f"TraceAnalysis has no attribute {name!r}")
            if self._compat != "hta":
                raise AttributeError(
                    f"{name} is HTA's: TraceAnalysis(path, compat='hta') has it, in HTA's columns"
                )
            return getattr(HtaMethods(self), name)
