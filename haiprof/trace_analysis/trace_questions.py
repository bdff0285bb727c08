"""Traces of a job, and every question that can be asked of them."""

from __future__ import annotations

from haiprof.trace_analysis.questions.all_ranks import RankQuestions
from haiprof.trace_analysis.questions.causes import CauseQuestions
from haiprof.trace_analysis.questions.device import TimeQuestions
from haiprof.trace_analysis.questions.host import HostQuestions


class TraceQuestions(TimeQuestions, RankQuestions, HostQuestions, CauseQuestions):
    """The traces of one window of a job, a file per rank; each is read at the first question.

    `steps` is always the first profiler step and the one after the last; None takes all.

    Frames are polars'; `frame.to_pandas()` makes pandas' of them where pandas and pyarrow are
    installed: haiprof does not need them.
    """
