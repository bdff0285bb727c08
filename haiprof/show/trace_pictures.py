"""Pictures of traces: each question that can be drawn, with its numbers as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import plotly.graph_objects as go
import polars as pl

from haiprof.base.errors import HaiprofError, MissingDataError
from haiprof.show.figures import traces as bars
from haiprof.show.figures import traces as kernels
from haiprof.show.figures import traces as lines
from haiprof.show.figures.traces import (
    arrival_figure,
    critical_path_figure,
    launch_figure,
    what_if_figure,
)
from haiprof.trace_analysis.device_time import CONSECUTIVE_KERNEL_DELAY_NS, TOP_KERNELS, Steps
from haiprof.trace_analysis.launches import LAUNCH_DELAY_CUTOFF_NS, RUNTIME_CUTOFF_NS
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.what_if.replay_parts import Change
from haiprof.trace_analysis.what_if.scenarios import scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePicture:
    """One question about traces, answered."""

    title: str
    frame: pl.DataFrame
    """The answer as numbers."""
    figure: go.Figure
    columns: tuple[str, ...]
    """Those of the frame that a terminal has room for."""


def temporal(traces: TraceQuestions, steps: Steps = None, *, share: bool = False) -> TracePicture:
    """Computing, other work and idle time of each rank's GPU."""
    found = _of_gpu(traces, traces.temporal_breakdown(steps), "span_ns")
    return _picture(
        _of("GPU time by rank", share=share),
        found,
        bars.temporal_figure(found, share=share),
        ("rank", "device", "span_ns", "compute_ratio", "non_compute_ratio", "idle_ratio"),
    )


def idle(
    traces: TraceQuestions,
    steps: Steps = None,
    *,
    share: bool = False,
    streams: list[int] | None = None,
    consecutive_kernel_delay_ns: int = CONSECUTIVE_KERNEL_DELAY_NS,
) -> TracePicture:
    """What each stream waited for; options are those of `idle_time_breakdown`."""
    found = traces.idle_time_breakdown(
        steps, streams=streams, consecutive_kernel_delay_ns=consecutive_kernel_delay_ns
    )
    found = _of_gpu(traces, found, "idle_ns")
    return _picture(
        _of("Idle time of streams", share=share),
        found,
        bars.idle_figure(found, share=share),
        (
            "rank",
            "stream",
            "idle_category",
            "idle_ns",
            "idle_ratio",
            "count",
            "median_ns",
            "max_ns",
        ),
    )


def kernel_types(
    traces: TraceQuestions, steps: Steps = None, *, share: bool = False
) -> TracePicture:
    """Busy GPU time by the kinds of kernel that ran at once."""
    found = _of_gpu(traces, traces.kernel_type_breakdown(steps), "time_ns")
    return _picture(
        "Kernel types",
        found,
        bars.kernel_type_figure(found, share=share),
        ("rank", "kernel_type", "time_ns", "time_ratio"),
    )


def top_kernels(
    traces: TraceQuestions,
    steps: Steps = None,
    *,
    num_kernels: int | None = TOP_KERNELS,
    duration_ratio: float | None = None,
    include_memory: bool = True,
) -> TracePicture:
    """The kernels with the most time on each rank; options are those of `kernel_breakdown`."""
    found = traces.kernel_breakdown(
        steps,
        num_kernels=num_kernels,
        duration_ratio=duration_ratio,
        include_memory=include_memory,
    )
    found = _of_gpu(traces, found, "sum_ns")
    return _picture(
        "Top kernels",
        found,
        kernels.top_kernels_figure(found),
        ("rank", "name", "count", "sum_ns", "mean_ns", "max_ns"),
    )


def one_kernel(
    traces: TraceQuestions, steps: Steps = None, *, kernel: str | None = None
) -> TracePicture:
    """One kernel on every rank, with its shortest and longest call."""
    every = _of_gpu(traces, traces.kernel_breakdown(steps), "sum_ns")
    asked = pl.col("kind") == "computation" if kernel is None else (
        pl.col("name").cast(pl.String).str.contains(kernel, literal=True)
    )  # fmt: skip
    chosen = every.filter(asked).group_by("name").agg(pl.col("sum_ns").sum())
    if chosen.is_empty():
        raise MissingDataError(
            f"{traces.path}: no kernel with {kernel or 'computing'!r} in its name"
        )
    longest = chosen.sort(-pl.col("sum_ns"), "name")["name"][0]
    found = every.filter(pl.col("name") == longest)
    return _picture(
        f"One kernel over ranks: {kernels.kernel_label(longest)}",
        found,
        kernels.one_kernel_figure(found),
        ("rank", "name", "count", "mean_ns", "min_ns", "max_ns"),
    )


def overlap(traces: TraceQuestions, steps: Steps = None, *, share: bool = False) -> TracePicture:
    """Communication of each rank: hidden behind computing, or exposed."""
    found = traces.overlap(steps)
    if not found["communication_ns"].sum():
        raise MissingDataError(f"{traces.path}: no communication on a GPU in it")
    return _picture(
        "Communication overlap",
        found,
        bars.overlap_figure(found, share=share),
        ("rank", "compute_ns", "communication_ns", "overlap_ns", "overlap_ratio"),
    )


def launches(
    traces: TraceQuestions,
    steps: Steps = None,
    *,
    runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
    launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
    include_memory_events: bool = True,
) -> TracePicture:
    """Distributions of launches, with cut-offs; options are those of `launch_statistics`."""
    found = traces.launch_statistics(
        steps,
        runtime_cutoff_ns=runtime_cutoff_ns,
        launch_delay_cutoff_ns=launch_delay_cutoff_ns,
        include_memory_events=include_memory_events,
    )
    if found.is_empty():
        raise MissingDataError(f"{traces.path}: no launch of GPU work in it")
    figure = launch_figure(
        found, runtime_cutoff_ns=runtime_cutoff_ns, launch_delay_cutoff_ns=launch_delay_cutoff_ns
    )
    return _picture(
        "Launches",
        found,
        figure,
        ("rank", "call", "cpu_duration_ns", "launch_delay_ns", "gpu_duration_ns"),
    )


def queue_length(traces: TraceQuestions, steps: Steps = None) -> TracePicture:
    """The launch queue of each stream over time."""
    found = _of_gpu(traces, traces.queue_length(steps), "queue_length")
    return _picture(
        "Launch queues",
        found,
        lines.queue_figure(found),
        ("rank", "stream", "ts_ns", "queue_length"),
    )


def memory_bandwidth(traces: TraceQuestions, steps: Steps = None) -> TracePicture:
    """The bandwidth of each kind of copy over time."""
    found = traces.memory_bandwidth(steps)
    if found.is_empty():
        raise MissingDataError(f"{traces.path}: no copy of known size in it")
    return _picture(
        "Bandwidth of copies",
        found,
        lines.bandwidth_figure(found),
        ("rank", "copy_kind", "ts_ns", "bandwidth_bytes_per_s"),
    )


def collectives(
    traces: TraceQuestions, steps: Steps = None, *, share: bool = False
) -> TracePicture:
    """Time in collectives by rank: transferring, or waiting for the last rank."""
    found = traces.collective_waits(steps)
    if found.is_empty():
        raise MissingDataError(f"{traces.path}: no collective in it")
    return _picture(
        "Collectives",
        found,
        bars.collective_figure(found, share=share),
        ("rank", "kind", "name", "late_ns", "wait_ns", "transfer_ns"),
    )


def lateness(traces: TraceQuestions, steps: Steps = None) -> TracePicture:
    """How late each rank begins its collectives, per step."""
    found = traces.arrival_lateness(steps)
    return _picture(
        "Lateness",
        found,
        arrival_figure(found),
        ("rank", "late_ns", "low_ns", "high_ns", "collective_count"),
    )


def memory(traces: TraceQuestions, steps: Steps = None) -> TracePicture:
    """Memory in tensors and reserved, over the whole trace: allocations have no step."""
    if steps is not None:
        raise MissingDataError("memory over time is of the whole trace, not of some steps")
    found = traces.memory_timeline()
    return _picture(
        "Memory",
        found,
        lines.memory_figure(found),
        ("rank", "device_type", "ts_ns", "allocated_bytes", "reserved_bytes"),
    )


def critical_path(
    traces: TraceQuestions,
    steps: Steps = None,
    *,
    rank: int | None = None,
    annotation: str | None = None,
    instance: int = 0,
) -> TracePicture:
    """The critical path of one rank, by cause; options are those of `TraceAnalysis`."""
    path = traces.critical_path(rank, steps=steps, annotation=annotation, instance=instance)
    found = path.summary()
    of = min(traces.files) if rank is None else rank
    title = f"<b>Critical path of rank {of}, by cause</b>"
    return _picture(
        "Critical path",
        found,
        critical_path_figure(found, title=title),
        ("bound_by", "duration_ns", "share_ratio", "segment_count"),
    )


def what_if(
    traces: TraceQuestions, steps: Steps = None, *, changes: tuple[Change, ...] = ()
) -> TracePicture:
    """The step as each change would make it; without changes, those that may help."""
    chosen = changes or tuple(scenarios(traces, steps))
    found = traces.what_if(*chosen, steps=steps)
    if not changes:
        found = found.sort("saved_ratio", descending=True, maintain_order=True)
    return _picture(
        "What if", found, what_if_figure(found), ("change", "predicted_step_ns", "saved_ratio")
    )


PICTURES: Mapping[str, Callable[..., TracePicture]] = {
    "temporal": temporal,
    "idle": idle,
    "kernel_types": kernel_types,
    "kernels": top_kernels,
    "kernel": one_kernel,
    "overlap": overlap,
    "launches": launches,
    "queue_length": queue_length,
    "memory_bandwidth": memory_bandwidth,
    "collectives": collectives,
    "lateness": lateness,
    "memory": memory,
    "critical_path": critical_path,
    "what_if": what_if,
}
"""By name, in the order of the page."""
_SHARE_FIGURES: Mapping[str, Callable[..., go.Figure]] = {
    "temporal": bars.temporal_figure,
    "idle": bars.idle_figure,
}
"""Those that a page shows as shares, too."""


def all_pictures(
    traces: TraceQuestions, steps: Steps = None
) -> tuple[dict[str, TracePicture], dict[str, str]]:
    """Every picture that the traces can be drawn as, and of the others why not."""
    drawn: dict[str, TracePicture] = {}
    missing: dict[str, str] = {}
    for name, picture in PICTURES.items():
        names = (f"{name}_share", name) if name in _SHARE_FIGURES else (name,)
        made = _picture_or_reason(picture, traces, steps)
        if isinstance(made, str):
            missing.update((each.replace("_", " "), made) for each in names)
            continue
        if name in _SHARE_FIGURES:
            figure = _SHARE_FIGURES[name](made.frame, share=True)
            drawn[names[0]] = replace(made, title=_of(made.title, share=True), figure=figure)
        drawn[name] = made
    return drawn, missing


def _picture_or_reason(
    picture: Callable[..., TracePicture], traces: TraceQuestions, steps: Steps
) -> TracePicture | str:
    try:
        return picture(traces, steps)
    except HaiprofError as error:
        return str(error)


def _of_gpu(traces: TraceQuestions, found: pl.DataFrame, column: str) -> pl.DataFrame:
    if not found[column].count():
        raise MissingDataError(
            f"{traces.path}: no GPU event in it", hint="profile with ProfilerActivity.CUDA"
        )
    return found


def _picture(
    title: str, found: pl.DataFrame, figure: go.Figure, columns: tuple[str, ...]
) -> TracePicture:
    return TracePicture(title=title, frame=found, figure=figure, columns=columns)


def _of(title: str, *, share: bool) -> str:
    return f"{title}, as shares" if share else title
