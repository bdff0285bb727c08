"""P9, Python functions by call stack: what the host does while nothing above it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.units import ranks_text, ratio_text
from haiprof.diagnosis.functions.host import abnormal_host, by_function
from haiprof.diagnosis.functions.report import ABNORMAL, FUNCTIONS, FunctionReport, too_few_ranks
from haiprof.trace_analysis.function_patterns import NO_GPU
from haiprof.trace_analysis.kernel_names import PYTHON

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

TITLE = "Python functions by call stack"
_NO_STACKS = "Python functions: operators stand in; record stacks with `--trace-stacks`"
_NOTHING = "neither operators nor Python functions in any trace: profile with ProfilerActivity.CPU"


def python_report(patterns: Patterns) -> FunctionReport:
    """Call stacks of Python functions and operators.

    Args:
        patterns: Of all ranks.

    Returns:
        Tables: `functions`, by stack (`root|...|leaf`), `bottleneck_ratio` and `share_ratio` of a
        stack's own time as means over the ranks; `abnormal`, a row per stack and rank above 1 %,
        with `is_far` where it is off the other ranks'.

        Source: PerfTracker (seed 001), Python functions; operators are part of a stack there too.
    """
    functions = patterns.functions.filter(pl.col("kind") == PYTHON)
    abnormal = abnormal_host(functions)
    far = sorted(set(abnormal.filter("is_far")["rank"].to_list()))
    return FunctionReport(
        kind=PYTHON,
        title=TITLE,
        tables={ABNORMAL: abnormal, FUNCTIONS: by_function(functions, len(patterns.ranks))},
        facts={"abnormal": sorted(set(abnormal["rank"].to_list())), "far": far},
        meaning=tuple(_meaning(abnormal)),
        missing=_missing(patterns, functions),
    )


def _missing(patterns: Patterns, functions: pl.DataFrame) -> tuple[str, ...]:
    if functions.is_empty():
        return (_NOTHING,)
    missing = list(too_few_ranks(patterns.totals.height))
    if not patterns.totals["has_python"].all():
        missing.append(_NO_STACKS)
    if functions["bottleneck_ratio"].null_count():
        missing.append(NO_GPU)
    return tuple(missing)


def _meaning(abnormal: pl.DataFrame) -> list[str]:
    lines = []
    for (stack, *_), rows in list(abnormal.group_by("name", maintain_order=True))[:4]:
        far = sorted(rows.filter("is_far")["rank"].to_list())
        mean = rows["bottleneck_ratio"].mean()
        share = ratio_text(mean if isinstance(mean, float) else None)
        leaf = " > ".join(str(stack).split("|")[-2:])
        if far:
            lines.append(_far_text(leaf, far, rows.filter("is_far")))
        else:
            lines.append(
                f"{leaf}: {share} of the time on {ranks_text(sorted(rows['rank'].to_list()))}"
            )
    return lines


def _far_text(leaf: str, far: list[int], rows: pl.DataFrame) -> str:
    most, usual = rows.select(
        pl.col("bottleneck_ratio").max(), pl.col("others_bottleneck_ratio").first()
    ).row(0)
    return (
        f"{ranks_text(far)}: {leaf} takes {ratio_text(most)} of the time with nothing above it, on "
        f"most ranks {ratio_text(usual)}"
    )
