"""What the traces of a run say: functions and waits of one window, and the work of a step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.errors import HaiprofError, MissingDataError
from haiprof.base.options import ENV_PEAK
from haiprof.base.units import NS_PER_S
from haiprof.run_format.layout import RunPaths

if TYPE_CHECKING:
    from haiprof.trace_analysis.device_verdict import DeviceLedger
    from haiprof.trace_analysis.function_patterns import Patterns
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

NO_TRACES = "no traces in this run: `--trace` records a window"
NO_GPU = "no GPU event in the traces"
# Most runs have no trace: the functions below import the questions on traces where one is there.


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWindow:
    """One window of a run, as its traces show it."""

    patterns: Patterns | None
    why: str  # Why there are no patterns; empty where there are
    lines: pl.DataFrame | None = None
    """Columns of `python_code.operator_lines` by `rank`; None in a window without lines."""

    def of_gpus(self) -> Patterns | str:
        """The patterns, where some rank's GPU was traced; else why there are none."""
        if self.patterns is None:
            return self.why
        return self.patterns if self.patterns.totals["has_gpu"].any() else NO_GPU


def traced_window(run: RunPaths, *, limit_bytes: int | None = None) -> TracedWindow:
    """The last whole window of a run; traces larger than the limit are left alone."""
    if not run.traces.is_dir():
        return TracedWindow(patterns=None, why=NO_TRACES)
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    analysis = TraceQuestions(run.root)
    try:
        size = analysis.size_bytes()
        if limit_bytes is not None and size > limit_bytes:
            why = f"traces of {size >> 20} MiB are not read while a job ends: haiprof verdict DIR"
            return TracedWindow(patterns=None, why=why)
        return TracedWindow(patterns=analysis.patterns(), why="", lines=_lines(analysis))
    except HaiprofError as error:
        return TracedWindow(patterns=None, why=" ".join(str(error).split()))
    except OSError as error:
        return TracedWindow(patterns=None, why=f"traces: {error.strerror or error}")


def traced_device(run: RunPaths, window: TracedWindow) -> DeviceLedger | None:
    """The ledger of the devices' time in that window; None where no GPU was traced."""
    if isinstance(window.of_gpus(), str):
        return None
    from haiprof.trace_analysis.device_verdict import device_ledger
    from haiprof.trace_analysis.operator_efficiency import parse_peak

    try:  # the user may say what the device can do
        return device_ledger(run.root, peaks=parse_peak(os.environ.get(ENV_PEAK)))
    except (HaiprofError, OSError):  # `haiprof verdict TRACES` says which
        return None


def _lines(analysis: TraceQuestions) -> pl.DataFrame | None:
    from haiprof.trace_analysis.python_code import operator_lines

    try:
        return analysis.per_rank(operator_lines)
    except MissingDataError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of one rank in the mean step, the mean over the ranks that were traced."""

    model_flops: float
    """Of matrix products, convolutions and attention in one step, without recomputation."""
    flops_per_s: float  # The same over the mean step's time, which tracing did not make longer
    mfu_ratio: float | None  # Share of the device's dense peak; None where that is not known
    is_lower_bound: bool  # Whether kernels whose work is not known make these numbers too low
    kernel_known_ratio: float | None
    """Share of GPU time whose work is known; None without GPU events."""
    device: str | None  # As the trace names it; None of a CPU
    peak: str | None  # Who states the peak
    reason: str | None  # Why MFU is not known


def step_work(
    run: RunPaths, step_ns: float | None, *, limit_bytes: int | None = None
) -> StepWork | None:
    """The work of a run's mean step; None where no window recorded shapes."""
    # Source: MFU as in PaLM (arXiv 2204.02311, appendix B): model FLOPs of a step over its time and
    # the device's peak. `haiprof.trace_analysis.operator_work` counts them.
    if not step_ns or not run.traces.is_dir():
        return None
    from haiprof.trace_analysis.operator_efficiency import parse_peak, step_efficiency
    from haiprof.trace_analysis.questions.base import RankTraces

    try:
        analysis = RankTraces(run.root)
        if limit_bytes is not None and analysis.size_bytes() > limit_bytes:
            return None
        peaks = parse_peak(os.environ.get(ENV_PEAK))
        found = analysis.per_rank(step_efficiency, peaks=peaks)
    except (HaiprofError, OSError):  # no trace, none with shapes: `trace efficiency` says which
        return None
    ranks = found.drop_nulls("step_count").with_columns(
        flops=pl.col("model_flops") / pl.col("step_count"),
        at_peak_ns=pl.col("mfu_ratio") * pl.col("wall_ns") / pl.col("step_count"),
    )
    if ranks.is_empty() or not ranks["flops"].sum():
        return None
    first = ranks.row(0, named=True)
    mean = ranks.select(
        pl.col("flops", "at_peak_ns", "kernel_known_ratio").mean(), pl.col("is_lower_bound").any()
    ).row(0, named=True)
    known = ranks["at_peak_ns"].null_count() == 0
    return StepWork(
        model_flops=mean["flops"], flops_per_s=mean["flops"] / step_ns * NS_PER_S,
        mfu_ratio=mean["at_peak_ns"] / step_ns if known else None,
        is_lower_bound=mean["is_lower_bound"], kernel_known_ratio=mean["kernel_known_ratio"],
        device=first["device_name"], peak=first["peak"],
        reason=next((why for why in ranks["reason"] if why), None),
    )  # fmt: skip
