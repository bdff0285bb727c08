"""PerfTracker's five reports: what bounds the job by function, and the rank that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.errors import RunFormatError, UsageError
from haiprof.base.units import ranks_text, ratio_text
from haiprof.diagnosis import gpu_functions
from haiprof.diagnosis.gpu_functions import BETA, FunctionReport, mean_text, sorted_ranks
from haiprof.diagnosis.thresholds import ABNORMAL_RATIO, FAR_MAD_FACTOR, FAR_MIN_RANKS
from haiprof.run_analysis.counters import COUNTER_SCHEMA
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.function_patterns import COUNTERS_SCHEMA, NO_GPU, function_counters
from haiprof.trace_analysis.kernel_names import COMMUNICATION, GPU_COMPUTE, MEMORY, PYTHON, RUNTIME

if TYPE_CHECKING:
    from haiprof.trace_analysis.function_patterns import Patterns
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

_LINE_LIMIT = 4
_HARDWARE = ("gpu", "gpu_health", "dcgm", "burst", "infiniband", "host", "memory_bandwidth")
_SHORT_KERNEL_NS = 50_000
"""From here on a kernel outlasts the launch of the next one, and fewer launches bring nothing: a
call of the runtime takes about 5 µs, an operator of PyTorch several times that. Own choice."""
_FEWER_LAUNCHES = "; torch.compile, CUDA graphs or fused optimizers launch fewer"
_ADVICE = (
    ("Launch", ": it waits for launches"),
    ("Free", ": memory is freed during training; raise the memory limit or avoid empty_cache()"),
    ("Malloc", ": memory is allocated during training; the caching allocator should have it "
     "already"),
    ("Synchronize", ": the host waits for the GPU; find the .item(), .cpu() or print that does"),
    ("Memcpy", ": synchronous copies; use pinned memory and non_blocking=True"),
)  # fmt: skip
_NO_RUNTIME = (
    "no call of the CUDA runtime in any trace: the jobs used no GPU, or it was not profiled "
    "(ProfilerActivity.CUDA)"
)
_NO_STACKS = "Python functions: operators stand in; record stacks with `--trace-stacks`"
_NO_PYTHON = (
    "neither operators nor Python functions in any trace: profile with ProfilerActivity.CPU"
)


def _runtime_line(
    name: str, rows: pl.DataFrame, far: list[int], *, has_short_kernels: bool = False
) -> str:
    advice = next((text for sign, text in _ADVICE if sign in name), "")
    advice += _FEWER_LAUNCHES if "Launch" in name and has_short_kernels else ""
    apart = f"; far from the others: {ranks_text(far)}" if far else ""
    return (
        f"{name}: {mean_text(rows)} of the time on {ranks_text(sorted_ranks(rows))}, the GPU "
        f"idle{apart}{advice}"
    )


def _python_line(name: str, rows: pl.DataFrame, far: list[int]) -> str:
    leaf = " > ".join(name.split("|")[-2:])
    if not far:
        return f"{leaf}: {mean_text(rows)} of the time on {ranks_text(sorted_ranks(rows))}"
    apart = rows.filter("is_far")
    most, usual = apart.select(pl.col(BETA).max(), pl.col(f"others_{BETA}").first()).row(0)
    return (
        f"{ranks_text(far)}: {leaf} takes {ratio_text(most)} of the time with nothing "
        f"above it, on most ranks {ratio_text(usual)}"
    )


def _host_report(patterns: Patterns, kind: str) -> FunctionReport:
    """Functions of the host while no GPU event runs; a rank without the function counts as 0."""
    # Calls of the CUDA or HIP runtime and driver, or Python functions and operators by call stack
    # (`root|...|leaf`). Source: PerfTracker (seed 001), CUDA Runtime and Python functions, where
    # operators are part of a stack, too.
    functions = patterns.functions.filter(pl.col("kind") == kind)
    abnormal = _abnormal_host(functions)
    missing = list(gpu_functions.too_few_ranks(patterns))
    facts = {"abnormal": sorted_ranks(abnormal)}
    line: Callable[[str, pl.DataFrame, list[int]], str] = _python_line
    title, nothing = "CUDA runtime", _NO_RUNTIME
    if kind == RUNTIME:
        line = partial(_runtime_line, has_short_kernels=_has_short_kernels(patterns))
    else:
        has_python, nothing = patterns.totals["has_python"], _NO_PYTHON
        title = f"{'Python functions' if has_python.any() else 'Operators'} by call stack"
        facts["far"] = sorted_ranks(abnormal.filter("is_far"))
        missing += [] if has_python.all() else [_NO_STACKS]
    missing += [NO_GPU] if functions[BETA].null_count() else []
    table = gpu_functions.by_function(
        functions, pl.col("median_ns").median(),
        pl.when(pl.col(BETA).null_count() == 0).then(gpu_functions.over_ranks(BETA, patterns)),
        gpu_functions.over_ranks("share_ratio", patterns), order=[-pl.col("share_ratio")],
    )  # fmt: skip
    first = list(abnormal.group_by("name", maintain_order=True))[:_LINE_LIMIT]
    said = (
        line(str(name), rows, sorted_ranks(rows.filter("is_far"))) for (name, *_), rows in first
    )
    return FunctionReport(
        kind=kind, title=title, facts=facts,
        tables={gpu_functions.ABNORMAL: abnormal, gpu_functions.FUNCTIONS: table},
        meaning=tuple(said), missing=(nothing,) if functions.is_empty() else tuple(missing),
    )  # fmt: skip


def _has_short_kernels(patterns: Patterns) -> bool:
    """Whether at least half of all kernels are so short that their launches can hold them up."""
    kernels = patterns.functions.filter(kind=GPU_COMPUTE)
    short = kernels.filter(pl.col("median_ns") < _SHORT_KERNEL_NS)
    return not short.is_empty() and 2 * short["count"].sum() >= kernels["count"].sum()


def _abnormal_host(functions: pl.DataFrame) -> pl.DataFrame:
    """Functions of ranks above 1 % of the window; those with a rank that is far come first."""
    # A rank that has not got the function, or only below what a pattern keeps, counts as 0 in
    # `others_bottleneck_ratio`, the ranks' median. `is_far`: off the other ranks' by distance, and
    # higher by 1 % of the window.
    above = functions.filter(pl.col(BETA) > ABNORMAL_RATIO).select("type", "name").unique()
    grid = above.join(functions.select("rank").unique(), how="cross")
    own = grid.join(functions, on=["rank", "type", "name"], how="left")
    judged = gpu_functions.with_distance(own.with_columns(pl.col(BETA).fill_null(0.0)), BETA)
    more = pl.col(BETA) - pl.col(f"{BETA}_median") > ABNORMAL_RATIO
    far = (pl.col("is_far") & gpu_functions.differs(BETA, high=True) & more).fill_null(value=False)
    return (
        judged.with_columns(is_far=far)
        .filter(pl.col(BETA) > ABNORMAL_RATIO)
        .sort(
            pl.col("is_far").any().over("name"), pl.col(BETA).max().over("name"), "name", BETA,
            "rank", descending=[True, True, False, True, False],
        )
        .select("rank", "name", BETA, "share_ratio", "count", "median_ns",
                others_bottleneck_ratio=f"{BETA}_median", is_far="is_far")
    )  # fmt: skip


REPORTS: Mapping[str, Callable[[Patterns], FunctionReport]] = {
    GPU_COMPUTE: gpu_functions.gpu_compute_report, MEMORY: gpu_functions.memory_report,
    COMMUNICATION: gpu_functions.communication_report,
    RUNTIME: partial(_host_report, kind=RUNTIME), PYTHON: partial(_host_report, kind=PYTHON),
}  # fmt: skip
"""By the kind of function that each is about, in PerfTracker's order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReports:
    """What bounds a job, function by function."""

    ranks: tuple[int, ...]
    reports: tuple[FunctionReport, ...]
    functions: pl.DataFrame  # Every function of every rank, the columns of `Patterns.functions`
    notes: tuple[str, ...] = ()  # What files of the ranks' functions have left out
    hardware: pl.DataFrame | None = None
    """From `hardware_by_function`; None where it was not asked for."""

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        first = self.functions.filter(pl.col("rank") == self.ranks[0]).drop("rank")
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
            "example": {"rank": self.ranks[0], "functions": first.to_dicts()},
        }


def function_reports(patterns: Patterns, only: str | None = None) -> FunctionReports:
    """All reports, or the one of a kind."""
    if only is not None and only not in REPORTS:
        raise UsageError(f"no report {only}", hint=f"one of {', '.join(REPORTS)}")
    kinds = tuple(REPORTS) if only is None else (only,)
    return FunctionReports(
        ranks=patterns.ranks, reports=tuple(_report(kind, patterns) for kind in kinds),
        functions=patterns.functions.filter(pl.col("kind").is_in(kinds)), notes=patterns.left_out,
    )  # fmt: skip


def _report(kind: str, patterns: Patterns) -> FunctionReport:
    """With what all functions of the kind take together, over the ranks."""
    found = REPORTS[kind](patterns)
    whole = gpu_functions.spread_of(patterns.totals[f"{kind.replace('-', '_')}_ratio"])
    return replace(found, facts={"bottleneck": whole, **found.facts})


def hardware_by_function(
    traces: TraceQuestions, run: RunFrames, *, steps: Steps = None, geometry: bool = False
) -> pl.DataFrame:
    """What the hardware's counters were while functions ran (P1 beside P5 to P8).

    `rank`, and the columns of `function_counters`. Without `--burst` samples are a second apart, so
    that most functions have none.
    """
    counters = run.counters().filter(pl.col("source").is_in(_HARDWARE))
    samples = pl.concat([pl.DataFrame(schema=COUNTER_SCHEMA), counters, bursts_of(run)])
    found = [pl.DataFrame(schema={"rank": pl.Int64, **COUNTERS_SCHEMA})]
    for rank, trace in traces.traces.items():
        host = traces.files[rank].host
        own = pl.col("rank") == rank
        if host is not None:
            own = own | (pl.col("gpu").is_null() & (pl.col("host") == host))
        rows = function_counters(trace, samples.filter(own), steps=steps, geometry=geometry)
        found.append(rows.select(pl.lit(rank, pl.Int64).alias("rank"), pl.all()))
    return pl.concat(found)


def bursts_of(run: RunFrames) -> pl.DataFrame:
    """A run's bursts; none where an export cannot be read."""
    try:
        return run.bursts()
    except RunFormatError:
        return pl.DataFrame(schema=COUNTER_SCHEMA)
