"""P8, CUDA runtime functions: the host in calls of the runtime while the GPU does nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.units import ranks_text, ratio_text
from haiprof.diagnosis.functions.host import abnormal_host, by_function
from haiprof.diagnosis.functions.report import ABNORMAL, FUNCTIONS, FunctionReport, too_few_ranks
from haiprof.trace_analysis.function_patterns import NO_GPU
from haiprof.trace_analysis.kernel_names import RUNTIME

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

TITLE = "CUDA runtime"
_ADVICE = (
    ("Launch", ": many short kernels; torch.compile, CUDA graphs or fused optimizers launch fewer"),
    ("Free", ": memory is given back in training; raise the memory limit or avoid empty_cache()"),
    ("Malloc", ": memory is taken in training; the caching allocator should have it already"),
    ("Synchronize", ": the host waits for the GPU; find the .item(), .cpu() or print that does"),
    ("Memcpy", ": copies that wait; pinned memory and non_blocking=True do not"),
)


def runtime_report(patterns: Patterns) -> FunctionReport:
    """Calls of the CUDA or HIP runtime and driver.

    Args:
        patterns: Of all ranks.

    Returns:
        Tables: `functions`, with `bottleneck_ratio` (no GPU event runs meanwhile) and
        `share_ratio` (whatever the GPU does) as means over the ranks; `abnormal`, a row per call
        and rank above 1 %, with `is_far` where it is off the other ranks'.

        Source: PerfTracker (seed 001), CUDA Runtime.
    """
    functions = patterns.functions.filter(pl.col("kind") == RUNTIME)
    abnormal = abnormal_host(functions)
    missing: tuple[str, ...] = too_few_ranks(patterns.totals.height)
    if functions.is_empty():
        missing = ("no call of the CUDA runtime in any trace: the jobs used no GPU, or it was "
                   "not profiled (ProfilerActivity.CUDA)",)  # fmt: skip
    elif functions["bottleneck_ratio"].null_count():
        missing = (*missing, NO_GPU)
    return FunctionReport(
        kind=RUNTIME,
        title=TITLE,
        tables={ABNORMAL: abnormal, FUNCTIONS: by_function(functions, len(patterns.ranks))},
        facts={"abnormal": sorted(set(abnormal["rank"].to_list()))},
        meaning=tuple(_meaning(abnormal)),
        missing=missing,
    )


def _meaning(abnormal: pl.DataFrame) -> list[str]:
    lines = []
    for (name, *_), rows in list(abnormal.group_by("name", maintain_order=True))[:4]:
        mean, far = rows["bottleneck_ratio"].mean(), rows.filter("is_far")["rank"].to_list()
        advice = next((text for sign, text in _ADVICE if sign in str(name)), "")
        apart = f"; far from the others: {ranks_text(sorted(far))}" if far else ""
        lines.append(
            f"{name}: {ratio_text(mean if isinstance(mean, float) else None)} of the time on "
            f"{ranks_text(sorted(rows['rank'].to_list()))}, the GPU idle{apart}{advice}"
        )
    return lines
