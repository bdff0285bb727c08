"""haiprof finds out why a PyTorch training job is slow, without a changed line of user code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from haiprof.base.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from haiprof.api.analyzer import Analyzer as Analyzer
    from haiprof.api.trace_analysis import TraceAnalysis as TraceAnalysis

__all__ = ["Analyzer", "TraceAnalysis", "__version__", "step"]

_mark_step: Callable[[], None] | None = None  # set by the hook, in a job that runs under haiprof


def step() -> None:
    """Marks the end of a step of this loop: optional, and without haiprof it does nothing.

    A process that calls it has these steps and no others, whatever else it does: call it once at
    the end of each. Under haiprof it costs about a microsecond, else a tenth of one.
    """
    if _mark_step is not None:
        _mark_step()


# Names loaded on first use: the hook imports this package inside the job, where nothing of the
# analysis (polars, plotly) may be loaded or even installed.
_LAZY = {"Analyzer": "haiprof.api.analyzer", "TraceAnalysis": "haiprof.api.trace_analysis"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'haiprof' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
