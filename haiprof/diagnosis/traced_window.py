"""What a run's traces say to the rules: the patterns of one window, or why there are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.errors import HaiprofError
from haiprof.base.medians import lower_median
from haiprof.diagnosis.finding import Abstention
from haiprof.run_format.layout import RunPaths

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

NO_TRACES = "no traces in this run: `--trace` records a window"
NO_GPU = "no GPU event in the traces"
_MANY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWindow:
    """One window of a run, as its traces show it."""

    patterns: Patterns | None
    why: str
    """Why there are no patterns; empty where there are."""

    def of_gpus(self, rule: str) -> Patterns | Abstention:
        """The patterns, where some rank's GPU was traced; else the rule's answer."""
        if self.patterns is None:
            return Abstention(rule=rule, why=self.why)
        if not self.patterns.totals["has_gpu"].any():
            return Abstention(rule=rule, why=NO_GPU)
        return self.patterns


def traced_window(run: RunPaths, *, limit_bytes: int | None = None) -> TracedWindow:
    """The last whole window of a run."""
    if not run.traces.is_dir():
        return TracedWindow(patterns=None, why=NO_TRACES)
    # Most runs have no trace; and all other questions would have to be loaded for nothing.
    from haiprof.trace_analysis.questions.all_ranks import RankQuestions

    analysis = RankQuestions(run.root)
    try:
        size = analysis.size_bytes()
        if limit_bytes is not None and size > limit_bytes:
            why = f"traces of {size >> 20} MiB are not read while a job ends: haiprof verdict DIR"
            return TracedWindow(patterns=None, why=why)
        return TracedWindow(patterns=analysis.patterns(), why="")
    except HaiprofError as error:
        return TracedWindow(patterns=None, why=" ".join(str(error).split()))
    except OSError as error:
        return TracedWindow(patterns=None, why=f"traces: {error.strerror or error}")


def typical(values: pl.Series) -> float | None:
    """The middle rank's value, the lower of two; None where it is not known of all.

    Source: the median over ranks is TraceML's typical rank.
    """
    if values.is_empty() or values.null_count():
        return None
    return float(lower_median(values))


def places(patterns: Patterns, table: str, by: str, where: pl.Expr | None = None) -> list[str]:
    """Where in the code most of it is, over all ranks: `aten::item at train.py(45): step`."""
    found = pl.concat(getattr(signs, table) for signs in patterns.signs.values())
    rows = found if where is None else found.filter(where)
    summed = rows.group_by("operator", "module", "line").agg(pl.col(by).sum())
    order = summed.filter(pl.col(by) > 0).sort(
        -pl.col(by), "operator", "module", "line", nulls_last=True
    )
    texts = (_location(*row) for row in order.select("operator", "module", "line").rows())
    return [text for text in texts if text][:_MANY]


def _location(operator: str | None, module: str | None, line: str | None) -> str:
    what = " in ".join(part for part in (operator, module) if part)
    return " at ".join(part for part in (what, line) if part)


def at_places(found: list[str]) -> str:
    """`: aten::item at train.py(45): step`; nothing where no place is known."""
    return f" ({'; '.join(found)})" if found else ""


NO_LINE = "the lines of code: record with --trace-stacks"


def missing_lines(patterns: Patterns) -> tuple[str, ...]:
    """What would name the line."""
    return () if patterns.totals["has_python"].all() else (NO_LINE,)
