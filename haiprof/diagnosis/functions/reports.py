"""The five reports together, in PerfTracker's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.errors import UsageError
from haiprof.diagnosis.functions.communication import communication_report
from haiprof.diagnosis.functions.gpu_compute import gpu_compute_report
from haiprof.diagnosis.functions.memory import memory_report
from haiprof.diagnosis.functions.python import python_report
from haiprof.diagnosis.functions.report import FunctionReport, spread_of
from haiprof.diagnosis.functions.runtime import runtime_report
from haiprof.diagnosis.thresholds import ABNORMAL_RATIO, FAR_MAD_FACTOR, FAR_MIN_RANKS
from haiprof.trace_analysis.kernel_names import (
    COMMUNICATION,
    GPU_COMPUTE,
    MEMORY,
    PYTHON,
    RUNTIME,
)

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

REPORTS: Mapping[str, Callable[[Patterns], FunctionReport]] = {
    GPU_COMPUTE: gpu_compute_report,
    MEMORY: memory_report,
    COMMUNICATION: communication_report,
    RUNTIME: runtime_report,
    PYTHON: python_report,
}
"""By the kind of function that each is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReports:
    """What bounds a job, function by function."""

    ranks: tuple[int, ...]
    reports: tuple[FunctionReport, ...]
    functions: pl.DataFrame
    """Every function of every rank, the columns of `Patterns.functions`."""
    notes: tuple[str, ...] = ()
    """What files of the ranks' functions have left out."""
    hardware: pl.DataFrame | None = None
    """From `hardware_by_function`; None where it was not asked for."""

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "ranks": list(self.ranks),
            "thresholds": {
                "abnormal_ratio": ABNORMAL_RATIO,
                "mad_factor": FAR_MAD_FACTOR,
                "min_ranks": FAR_MIN_RANKS,
            },
            "notes": list(self.notes),
            "reports": {report.kind: report.as_json() for report in self.reports},
            **({} if self.hardware is None else {"hardware": self.hardware.to_dicts()}),
            "example": {"rank": self.ranks[0], "functions": _of_rank(self)},
        }


def _of_rank(found: FunctionReports) -> list[dict[str, Any]]:
    """What the first rank's functions did, for a look at what is known of each."""
    return found.functions.filter(pl.col("rank") == found.ranks[0]).drop("rank").to_dicts()


def function_reports(patterns: Patterns, only: str | None = None) -> FunctionReports:
    """All reports, or one.

    Args:
        patterns: From `TraceAnalysis.patterns()`.
        only: The kind of one report.

    Raises:
        UsageError: There is no such kind.
    """
    if only is not None and only not in REPORTS:
        raise UsageError(f"no report {only}", hint=f"one of {', '.join(REPORTS)}")
    kinds = tuple(REPORTS) if only is None else (only,)
    return FunctionReports(
        ranks=patterns.ranks,
        reports=tuple(_report(kind, patterns) for kind in kinds),
        functions=patterns.functions.filter(pl.col("kind").is_in(kinds)),
        notes=patterns.left_out,
    )


def _report(kind: str, patterns: Patterns) -> FunctionReport:
    """With what all functions of the kind take together, over the ranks."""
    found = REPORTS[kind](patterns)
    whole = spread_of(patterns.totals[f"{kind.replace('-', '_')}_ratio"])
    return replace(found, facts={"bottleneck": whole, **found.facts})
