"""TraceAnalysis: traces of a job, and every question that can be asked of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from haiprof.analysis.trace.annotations import annotation_breakdown, annotation_kernels
from haiprof.analysis.trace.attribution import kernel_operators, operator_kernels
from haiprof.analysis.trace.bandwidth import memory_bandwidth, memory_bandwidth_summary
from haiprof.analysis.trace.call_tree import call_tree
from haiprof.analysis.trace.clocks import clock_offsets, on_one_clock
from haiprof.analysis.trace.collectives import collective_kernels
from haiprof.analysis.trace.counter_trace import write_counter_trace
from haiprof.analysis.trace.critical.overlay import write_overlay
from haiprof.analysis.trace.critical.path import CriticalPath, critical_path
from haiprof.analysis.trace.critical.segments import DATA_LOADING
from haiprof.analysis.trace.diff import TraceDiff, compare_traces
from haiprof.analysis.trace.diff_steps import KERNEL, OPERATOR, step_samples
from haiprof.analysis.trace.files import TraceFile, load_frame, trace_file
from haiprof.analysis.trace.idle import CONSECUTIVE_KERNEL_DELAY_NS, idle_breakdown
from haiprof.analysis.trace.kernel_names import FULL
from haiprof.analysis.trace.kernels import across_ranks, kernels
from haiprof.analysis.trace.launches import (
    LAUNCH_DELAY_CUTOFF_NS,
    RUNTIME_CUTOFF_NS,
    launch_statistics,
    launch_summary,
)
from haiprof.analysis.trace.matching import matched
from haiprof.analysis.trace.memory_timeline import (
    memory_allocations,
    memory_at_peak,
    memory_by_operator,
    memory_timeline,
)
from haiprof.analysis.trace.overlap import kernel_types, overlap
from haiprof.analysis.trace.pool import Pool, default_pool
from haiprof.analysis.trace.python_functions import (
    folded_stacks,
    python_functions,
    python_stacks,
)
from haiprof.analysis.trace.queue import (
    MAX_QUEUE_LENGTH,
    full_queue,
    queue_length,
    queue_length_summary,
)
from haiprof.analysis.trace.sequences import (
    MIN_PATTERN_LENGTH,
    TOP_K,
    kernel_sequences,
    operator_sequences,
)
from haiprof.analysis.trace.skew import collective_waits, collectives, process_groups
from haiprof.analysis.trace.step_time import step_time_breakdown
from haiprof.analysis.trace.stragglers import stragglers
from haiprof.analysis.trace.temporal import temporal_breakdown
from haiprof.analysis.whatif.changes import Change
from haiprof.analysis.whatif.predict import predictions
from haiprof.analysis.whatif.replay import rank_graph
from haiprof.errors import MissingDataError
from haiprof.traces.find import by_rank, trace_files
from haiprof.traces.tables import OPS
from haiprof.traces.trace import Trace

Steps = tuple[int, int] | None


class TraceAnalysis:
    """The traces of one window of a job, a file per rank; each is read at the first question.

    Args:
        path: A trace, a folder with one file per rank, or a run directory.
        pool: Where ranks are worked on; None takes local processes where the files are large.
        compat: `"hta"` adds HTA's methods, which return HTA's columns and units
            (`haiprof.analysis.trace.hta`; what differs is in docs/hta-differences.md).

    Frames are polars'; `frame.to_pandas()` makes pandas' of them where pandas and pyarrow are
    installed: haiprof does not need them.
    """

    def __init__(
        self, path: str | Path, *, pool: Pool | None = None, compat: Literal["hta"] | None = None
    ) -> None:
        self.path = Path(path)
        self._given_pool = pool
        self._compat = compat

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

    def temporal_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Idle, computing and other time per rank: `haiprof.analysis.trace.temporal`.

        Args:
            steps: First profiler step and the one after the last; None takes all GPU events.

        Returns:
            One row per rank and device: `rank`, `device`, `span_ns`, `idle_ns`, `compute_ns`,
            `non_compute_ns`, `idle_ratio`, `compute_ratio`, `non_compute_ratio`. A rank without
            GPU events has one row of nulls.
        """
        found, span = self.per_rank(temporal_breakdown, steps=steps), pl.col("span_ns")
        parts = ("idle", "compute", "non_compute")
        return found.with_columns(
            pl.when(span > 0).then(pl.col(f"{part}_ns") / span).alias(f"{part}_ratio")
            for part in parts
        )

    def idle_time_breakdown(
        self,
        steps: Steps = None,
        *,
        streams: list[int] | None = None,
        consecutive_kernel_delay_ns: int = CONSECUTIVE_KERNEL_DELAY_NS,
    ) -> pl.DataFrame:
        """What the streams of each GPU waited for: `haiprof.analysis.trace.idle`.

        Args:
            steps: As in `temporal_breakdown`.
            streams: Only these.
            consecutive_kernel_delay_ns: A gap below it is what a GPU needs between two kernels.

        Returns:
            One row per rank, device, stream and category: `rank`, `device`, `stream`,
            `idle_category` (host_wait, kernel_wait, other, unknown), `idle_ns`, `idle_ratio`,
            `before_launch_ns`, and of the intervals `count`, `mean_ns`, `std_ns`, `min_ns`,
            `q25_ns`, `median_ns`, `q75_ns`, `max_ns`.
        """
        return self.per_rank(
            idle_breakdown,
            steps=steps,
            streams=streams,
            consecutive_kernel_delay_ns=consecutive_kernel_delay_ns,
        )

    def kernel_type_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Busy time by the kinds that ran at once: `haiprof.analysis.trace.overlap`.

        Returns:
            Seven rows per rank and device: `rank`, `device`, `kernel_type`, `time_ns`,
            `time_ratio`.
        """
        return self.per_rank(kernel_types, steps=steps)

    def kernel_breakdown(
        self,
        steps: Steps = None,
        *,
        num_kernels: int | None = None,
        duration_ratio: float | None = None,
        include_memory: bool = True,
    ) -> pl.DataFrame:
        """Count and time of each kernel: `haiprof.analysis.trace.kernels`.

        Args:
            steps: As in `temporal_breakdown`.
            num_kernels: At most so many per rank and kind; the rest is one row `others`.
            duration_ratio: The longest that make this share of a kind's time; the rest likewise.
            include_memory: Copies and sets too.

        Returns:
            One row per rank, device, kind and kernel: `rank`, `device`, `kind`, `name`, `count`,
            `sum_ns`, `min_ns`, `max_ns`, `mean_ns`, `std_ns`, `kind_ratio`, `name_count`.
        """
        return self.per_rank(
            kernels,
            steps=steps,
            num_kernels=num_kernels,
            duration_ratio=duration_ratio,
            include_memory=include_memory,
        )

    def kernels_across_ranks(self, steps: Steps = None) -> pl.DataFrame:
        """The same kernel on every rank, the slowest rank named: `haiprof.analysis.trace.kernels`.

        Returns:
            One row per kind and kernel: `kind`, `name`, `rank_count`, `count`, `sum_ns`,
            `mean_ns`, `std_ns`, `slowest_rank`, `slowest_mean_ns`, `fastest_rank`,
            `fastest_mean_ns`, `others_median_ns`, `distance_ratio`, `excess_ns`.
        """
        return across_ranks(self.kernel_breakdown(steps))

    def overlap(self, steps: Steps = None) -> pl.DataFrame:
        """How much communication computation hides: `haiprof.analysis.trace.overlap`.

        Returns:
            One row per rank and device: `rank`, `device`, `compute_ns`, `communication_ns`,
            `overlap_ns`, `overlap_ratio` (null without communication).
        """
        return self.per_rank(overlap, steps=steps)

    def annotation_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Count and time of each named range: `haiprof.analysis.trace.annotations`.

        Returns:
            One row per rank, category (CPU or GPU), device and name: `rank`, `category`,
            `device`, `name`, `count`, `sum_ns`, `min_ns`, `max_ns`, `mean_ns`, `std_ns`,
            `covered_ns`.
        """
        return self.per_rank(annotation_breakdown, steps=steps)

    def annotation_kernels(self, steps: Steps = None) -> pl.DataFrame:
        """The GPU events of each annotation: `haiprof.analysis.trace.annotations`.

        Returns:
            One row per rank, device, annotation and kernel: `rank`, `device`, `annotation` (null
            outside of all), `kind`, `name`, `count`, `sum_ns`, `min_ns`, `max_ns`, `mean_ns`,
            `std_ns`.
        """
        return self.per_rank(annotation_kernels, steps=steps)

    def step_time_breakdown(self, *, gpu_tail: bool = False) -> pl.DataFrame:
        """Where the time of each profiler step went: `haiprof.analysis.trace.step_time`.

        Args:
            gpu_tail: A step lasts until the last GPU event that it launched, as in TensorBoard.

        Returns:
            One row per rank and step: `rank`, `step`, `start_ns`, `wall_ns`, and its parts, which
            add up to it: `kernel_ns`, `memcpy_ns`, `memset_ns`, `communication_ns`, `runtime_ns`,
            `dataloader_ns`, `cpu_exec_ns`, `other_ns`.
        """
        return self.per_rank(step_time_breakdown, gpu_tail=gpu_tail)

    def collectives(self, steps: Steps = None) -> pl.DataFrame:
        """Skew, transfer time and bandwidth of each collective: `haiprof.analysis.trace.skew`.

        Args:
            steps: First profiler step and the one after the last; None takes all.

        Returns:
            One row per collective that is found on several ranks: `collective`, `step`, `kind`,
            `process_group`, `sequence`, `dtype`, `group_size`, `rank_count`, `matched_by`,
            `confidence`, `start_ns`, `start_skew_ns`, `last_rank`, `behind_second_ns`,
            `transfer_ns`, `bytes`, `algorithm_bandwidth_bytes_per_s`, `bus_bandwidth_bytes_per_s`,
            `missing` (why times are null). Clocks are compared by `clock_offsets`.
        """
        return collectives(self._collective_waits(steps))

    def collective_waits(self, steps: Steps = None) -> pl.DataFrame:
        """Each rank's part in each collective, by `collective` and `rank`.

        Returns:
            The columns of `collective_kernels` and `matched`, and `late_ns`, `wait_ns` until the
            last rank arrives, `transfer_ns` from then on, `arrived_last`, `missing`.
        """
        return self._collective_waits(steps)

    def process_groups(self, steps: Steps = None) -> pl.DataFrame:
        """Bandwidth per process group and kind of collective.

        Returns:
            `process_group`, `kind`, `group_size`, `collective_count`, `timed_count`, `bytes`,
            `transfer_ns`, `algorithm_bandwidth_bytes_per_s`, `bus_bandwidth_bytes_per_s`.
        """
        return process_groups(self.collectives(steps))

    def stragglers(self, steps: Steps = None, *, by_step: bool = False) -> pl.DataFrame:
        """Which rank arrives last at collectives: `haiprof.analysis.trace.stragglers`.

        Args:
            steps: First profiler step and the one after the last; None takes all.
            by_step: One row per rank and step.

        Returns:
            `rank`, the one that holds up most first; `collective_count`, `last_count`,
            `last_ratio`, `held_up_ns`, `waited_ns`, `collective_ns`, `step_count`,
            `held_up_ns_per_step`, `waited_ns_per_step`.
        """
        return stragglers(self._collective_waits(steps), by_step=by_step)

    def clock_offsets(self, steps: Steps = None) -> pl.DataFrame:
        """How far the ranks' clocks seem apart, from the ends of collectives.

        Returns:
            `rank`, `collective_count`, `offset_ns`, `residual_ns` (below it nothing is known),
            `corrected`. Without collectives in common offsets are null: unknown.
        """
        return clock_offsets(self._matched_collectives(steps))

    def memory_timeline(self) -> pl.DataFrame:
        """Allocated and reserved memory over time: `haiprof.analysis.trace.memory_timeline`.

        Returns:
            `rank`, `device_type`, `device`, `ts_ns`, `change_bytes`, `since_start_bytes`,
            `allocated_bytes`, `reserved_bytes`; the last two are null in traces of 2021.
        """
        return self.per_rank(memory_timeline)

    def memory_allocations(self) -> pl.DataFrame:
        """Blocks of memory from allocation to free, with the operators that did it.

        Returns:
            `rank`, `device_type`, `device`, `address`, `size_bytes`, `allocated_ns`, `freed_ns`,
            `lifetime_ns`, `operator`, `freed_by`; null is what did not happen in the window.
        """
        return self.per_rank(memory_allocations)

    def memory_by_operator(self) -> pl.DataFrame:
        """What each operator allocated, freed and left behind.

        Returns:
            `rank`, `device_type`, `device`, `operator`, `allocation_count`, `allocated_bytes`,
            `free_count`, `freed_bytes`, `self_increase_bytes`, `increase_bytes`, `kept_count`,
            `kept_bytes`.
        """
        return self.per_rank(memory_by_operator)

    def memory_at_peak(self) -> pl.DataFrame:
        """What was alive when each device held most; sizes add up to the peak.

        Returns:
            `rank`, `device_type`, `device`, `ts_ns`, `peak_bytes`, `origin`, `operator`,
            `block_count`, `size_bytes`, `ratio`.
        """
        return self.per_rank(memory_at_peak)

    def python_stacks(self, steps: Steps = None) -> pl.DataFrame:
        """Python calls by call stack: `haiprof.analysis.trace.python_functions`.

        Returns:
            `rank`, `pid`, `tid`, `stack` (`root;...;leaf`), `name`, `depth`, `calls`, `total_ns`,
            `self_ns`, and of both the time and share in which no GPU work ran:
            `non_overlapped_ns`, `self_non_overlapped_ns`, `non_overlapped_ratio`,
            `self_non_overlapped_ratio`.
        """
        return self.per_rank(python_stacks, steps=steps)

    def python_functions(self, steps: Steps = None) -> pl.DataFrame:
        """Python calls by function, whoever called them; recursion counts once.

        Returns:
            As `python_stacks`, without `stack` and `depth`.
        """
        return self.per_rank(python_functions, steps=steps)

    def folded_stacks(self, steps: Steps = None, *, value: str = "self_ns") -> str:
        """Python stacks as text for flame graph tools, a line each: `root;...;leaf 123`.

        Args:
            steps: First profiler step and the one after the last; None takes all calls.
            value: `self_ns`, or `self_non_overlapped_ns` for the time in which no GPU worked.
        """
        return folded_stacks(self.python_stacks(steps), value=value)

    def diff(
        self,
        other: TraceAnalysis,
        *,
        of: tuple[str, ...] = (KERNEL, OPERATOR),
        names: str = FULL,
        steps: Steps = None,
        other_steps: Steps = None,
        by_step: bool = True,
    ) -> TraceDiff:
        """These traces as the control, others as the test: `haiprof.analysis.trace.diff`.

        Args:
            other: What is judged.
            of: `kernel`, `operator`, `runtime`, `annotation`.
            names: `full`; `short` without template arguments; `generic` also without what differs
                between GPU generations.
            steps: First profiler step of these and the one after the last; None takes all.
            other_steps: The same of the others.
            by_step: False compares whole traces, however long each is.

        Returns:
            `names` (a row per name with times per step, spread, significance and what it explains
            of the step's difference), `steps`, `step_time`, `notes`. `diff.verdict` says in words
            whether the test is slower.
        """
        asked: dict[str, Any] = {"of": of, "names": names, "by_step": by_step}
        control = self.per_rank(step_samples, steps=steps, **asked)
        return compare_traces(control, other.per_rank(step_samples, steps=other_steps, **asked))

    def what_if(self, *changes: Change, steps: Steps = None) -> pl.DataFrame:
        """Step time if something were faster: `haiprof.analysis.whatif`.

        Args:
            changes: From `haiprof.analysis.whatif.changes`: `faster_kernel`, `faster_operator`,
                `faster_loader`, `faster_network`, `rank_as_others`.
            steps: First profiler step and the one after the last; None takes all.

        Returns:
            One row per change: `change`, `measured_step_ns`, `reproduced_step_ns`, `error_ratio`,
            `unexplained_ratio`, `predicted_step_ns`, `saved_ratio`, `shortened_ns`,
            `collective_count`, `unmatched_count`, `apart_count`.
        """
        paths = [file.path for file in self.files.values()]
        graphs = self._pool.map(rank_graph, paths, {"steps": steps, "changes": changes})
        kernels = self._matched_collectives(None)
        clocks = clock_offsets(kernels)
        ahead = dict(clocks.filter("corrected").select("rank", "offset_ns").rows())
        waits = collective_waits(on_one_clock(kernels, clocks))
        return predictions(dict(zip(self.files, graphs, strict=True)), waits, changes, ahead)

    def _matched_collectives(self, steps: Steps) -> pl.DataFrame:
        return matched(self.per_rank(collective_kernels, steps=steps))

    def _collective_waits(self, steps: Steps) -> pl.DataFrame:
        kernels = self._matched_collectives(steps)
        return collective_waits(on_one_clock(kernels, clock_offsets(kernels)))

    def launch_statistics(
        self,
        steps: Steps = None,
        *,
        runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
        launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
        include_memory_events: bool = True,
    ) -> pl.DataFrame:
        """What each launch cost and how long it took to begin: `haiprof.analysis.trace.launches`.

        Args:
            steps: As in `temporal_breakdown`.
            runtime_cutoff_ns: A call longer than this is an outlier.
            launch_delay_cutoff_ns: A delay longer than this is an outlier.
            include_memory_events: Whether copies and sets count.

        Returns:
            One row per rank and launch: `rank`, `correlation`, `call`, `kernel`, `kernel_count`,
            `device`, `stream`, `ts_ns`, `cpu_duration_ns`, `gpu_duration_ns`, `launch_delay_ns`,
            `is_short`, `is_runtime_outlier`, `is_launch_delay_outlier`.
        """
        return self.per_rank(
            launch_statistics,
            steps=steps,
            runtime_cutoff_ns=runtime_cutoff_ns,
            launch_delay_cutoff_ns=launch_delay_cutoff_ns,
            include_memory_events=include_memory_events,
        )

    def launch_summary(
        self,
        steps: Steps = None,
        *,
        runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
        launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
        include_memory_events: bool = True,
    ) -> pl.DataFrame:
        """Launches by call: `haiprof.analysis.trace.launches`.

        Args:
            steps: As in `temporal_breakdown`.
            runtime_cutoff_ns: As in `launch_statistics`.
            launch_delay_cutoff_ns: As in `launch_statistics`.
            include_memory_events: As in `launch_statistics`.

        Returns:
            One row per rank and call: `rank`, `call`, `launch_count`, `kernel_count`,
            `gpu_duration_ns`, `cpu_duration_ns`, `cpu_duration_median_ns`, `cpu_duration_max_ns`,
            `launch_delay_ns`, `launch_delay_median_ns`, `launch_delay_max_ns`, `short_count`,
            `runtime_outlier_count`, `launch_delay_outlier_count`. A row with `call` null is of GPU
            events whose launch is not in the trace.
        """
        return self.per_rank(
            launch_summary,
            steps=steps,
            runtime_cutoff_ns=runtime_cutoff_ns,
            launch_delay_cutoff_ns=launch_delay_cutoff_ns,
            include_memory_events=include_memory_events,
        )

    def queue_length(self, steps: Steps = None) -> pl.DataFrame:
        """The launch queue of each stream over time: `haiprof.analysis.trace.queue`.

        Args:
            steps: As in `temporal_breakdown`.

        Returns:
            One row per change: `rank`, `device`, `stream`, `ts_ns`, `queue_length` from then on.
        """
        return self.per_rank(queue_length, steps=steps)

    def queue_length_summary(self, steps: Steps = None) -> pl.DataFrame:
        """How long the launch queue of each stream was: `haiprof.analysis.trace.queue`.

        Args:
            steps: As in `temporal_breakdown`.

        Returns:
            One row per rank and stream: `rank`, `device`, `stream`, `launch_count`, `span_ns`,
            `empty_ns`, `mean_length` over time, `max_length`, and HTA's statistics over the
            changes: `change_count`, `change_mean`, `change_std`, `change_min`, `change_q25`,
            `change_q50`, `change_q75`, `change_max`.
        """
        return self.per_rank(queue_length_summary, steps=steps)

    def full_queue(
        self, steps: Steps = None, *, max_queue_length: int = MAX_QUEUE_LENGTH
    ) -> pl.DataFrame:
        """How long the launch queue of each stream was full: `haiprof.analysis.trace.queue`.

        Args:
            steps: As in `temporal_breakdown`.
            max_queue_length: From which on it is full.

        Returns:
            One row per rank and stream: `rank`, `device`, `stream`, `full_ns`, `trace_ns`,
            `full_ratio`.
        """
        return self.per_rank(full_queue, steps=steps, max_queue_length=max_queue_length)

    def memory_bandwidth(self, steps: Steps = None) -> pl.DataFrame:
        """The bandwidth of each kind of copy over time: `haiprof.analysis.trace.bandwidth`.

        Args:
            steps: As in `temporal_breakdown`.

        Returns:
            One row per change: `rank`, `device`, `copy_kind`, `ts_ns`, `bandwidth_bytes_per_s`
            from then on.
        """
        return self.per_rank(memory_bandwidth, steps=steps)

    def memory_bandwidth_summary(self, steps: Steps = None) -> pl.DataFrame:
        """How much each kind of copy moved, and how fast: `haiprof.analysis.trace.bandwidth`.

        Args:
            steps: As in `temporal_breakdown`.

        Returns:
            One row per rank, device and kind: `rank`, `device`, `copy_kind`, `copy_count`,
            `unsized_count`, `unrated_count`, `bytes`, `busy_ns`, `mean_bandwidth_bytes_per_s`, and
            HTA's statistics over the changes, in bytes per second: `change_count`, `change_mean`,
            `change_std`, `change_min`, `change_q25`, `change_q50`, `change_q75`, `change_max`.
        """
        return self.per_rank(memory_bandwidth_summary, steps=steps)

    def kernel_operators(self, steps: Steps = None) -> pl.DataFrame:
        """Each GPU event with what launched it: `haiprof.analysis.trace.attribution`.

        Args:
            steps: As in `temporal_breakdown`.

        Returns:
            One row per rank and GPU event: `rank`, `event`, `name`, `category`, `device`,
            `stream`, `ts_ns`, `dur_ns`, `correlation`, `call`, `launch_delay_ns`, `operator`,
            `operator_event`, `top_operator`, `matched_by`, `module`, `annotation`.
        """
        return self.per_rank(kernel_operators, steps=steps)

    def operator_kernels(self, steps: Steps = None) -> pl.DataFrame:
        """Operators and the GPU time that they launched: `haiprof.analysis.trace.attribution`.

        Args:
            steps: As in `temporal_breakdown`.

        Returns:
            One row per rank and operator: `rank`, `operator`, `call_count`, `cpu_self_ns`,
            `cpu_total_ns`, `kernel_count`, `gpu_self_ns`, `kernel_total_count`, `gpu_total_ns`,
            `launch_delay_mean_ns`, `launch_delay_max_ns`. A row with `operator` null is of GPU
            events without one.
        """
        return self.per_rank(operator_kernels, steps=steps)

    def operator_sequences(self, steps: Steps = None) -> pl.DataFrame:
        """What operators launch themselves, and when: `haiprof.analysis.trace.sequences`.

        Args:
            steps: As in `temporal_breakdown`.

        Returns:
            One row per rank, operator and sequence: `rank`, `operator`, `kernel_sequence`,
            `count`, `operator_delay_mean_ns`, `runtime_delay_mean_ns`.
        """
        return self.per_rank(operator_sequences, steps=steps)

    def kernel_sequences(
        self,
        operator: str,
        steps: Steps = None,
        *,
        min_pattern_length: int = MIN_PATTERN_LENGTH,
        top_k: int = TOP_K,
    ) -> pl.DataFrame:
        """Frequent sequences of kernels of an operator: `haiprof.analysis.trace.sequences`.

        Args:
            operator: Part of its name.
            steps: As in `temporal_breakdown`.
            min_pattern_length: Calls with fewer kernels are left out.
            top_k: How many sequences of each rank are wanted.

        Returns:
            One row per rank and sequence: `rank`, `pattern`, `count`, `kernel_count`,
            `gpu_duration_ns`, `cpu_duration_ns`.
        """
        return self.per_rank(
            kernel_sequences,
            operator=operator,
            steps=steps,
            min_pattern_length=min_pattern_length,
            top_k=top_k,
        )

    def call_tree(self, table: str = OPS) -> pl.DataFrame:
        """Operators or Python functions with their callers: `haiprof.analysis.trace.call_tree`.

        Args:
            table: `ops` or `python`.

        Returns:
            One row per rank and span: `rank`, `event`, `name`, `pid`, `tid`, `ts_ns`, `dur_ns`,
            `self_ns`, `parent_event`, `depth`.
        """
        return self.per_rank(call_tree, table=table)

    def write_counter_traces(self, folder: str | Path | None = None) -> pl.DataFrame:
        """Writes each trace anew with counter tracks: `haiprof.analysis.trace.counter_trace`.

        Args:
            folder: Where; None is beside each trace.

        Returns:
            One row per rank: `rank`, `path`, `counter_event_count`.
        """
        return self.per_rank(write_counter_trace, folder=folder and Path(folder))

    def critical_path(
        self,
        rank: int | None = None,
        *,
        steps: Steps = None,
        annotation: str | None = None,
        instance: int = 0,
        data_loading: str = DATA_LOADING,
    ) -> CriticalPath:
        """The chain of events that a window consists of: `haiprof.analysis.trace.critical.path`.

        Args:
            rank: Whose; None is the lowest.
            steps: First profiler step and the one after the last.
            annotation: Part of the name of a record_function range.
            instance: Which of those ranges, from 0. With neither, the whole trace.
            data_loading: Regular expression of the ranges in which the host loads data.

        Returns:
            Frames by `summary()`, `top()` and `segments()`, and what they rest on: `confidence`,
            `caveats`.
        """
        return critical_path(
            self._trace_of(rank),
            steps=steps,
            annotation=annotation,
            instance=instance,
            data_loading=data_loading,
        )

    def overlay_critical_path(
        self, path: CriticalPath, rank: int | None = None, *, folder: str | Path | None = None
    ) -> Path:
        """Writes the trace anew with its path drawn in: `haiprof.analysis.trace.critical.overlay`.

        Args:
            path: From `critical_path()` of the same rank.
            rank: Whose; None is the lowest.
            folder: Where; None is beside the trace.

        Returns:
            The new file.
        """
        return write_overlay(self._trace_of(rank), path, folder=Path(folder) if folder else None)

    def _trace_of(self, rank: int | None) -> Trace:
        chosen = min(self.traces) if rank is None else rank
        if chosen not in self.traces:
            known = ", ".join(map(str, self.traces))
            raise MissingDataError(f"{self.path}: no trace of rank {chosen}; there are: {known}")
        return self.traces[chosen]

    @cached_property
    def traces(self) -> dict[int, Trace]:
        """The trace of each rank; its tables are read in this process."""
        return {rank: Trace(file.path) for rank, file in self.files.items()}

    @cached_property
    def files(self) -> dict[int, TraceFile]:
        """What the file of each rank is; several are read at a time, into their caches.

        Raises:
            TraceFormatError: There is none, one cannot be read, or two are of one rank.
        """
        paths = trace_files(self.path)
        found = self._pool.map(trace_file, paths, {})
        return by_rank(replace(f, path=path) for f, path in zip(found, paths, strict=True))

    def load_report(self) -> pl.DataFrame:
        """What was read of each file, and what not: `haiprof.analysis.trace.files`.

        Returns:
            One row per rank: `rank`, `file`, `world_size`, `first_step`, `last_step`,
            `text_bytes`, `event_count`, which is the sum of a count per table (`gpu_count`, ...)
            and of `redundant_count`, `not_used_count`, `bad_time_count` and `lost_count`;
            `repaired_count`, `truncated_bytes`.
        """
        return load_frame(self.files)

    def per_rank(
        self,
        question: Callable[..., pl.DataFrame],
        **options: Any,  # noqa: ANN401 - whatever the question takes
    ) -> pl.DataFrame:
        """One question's frames of all ranks, with the rank in front.

        Args:
            question: A function of the module level: (trace, **options) to a frame.
            options: Passed on.
        """
        ranks, paths = list(self.files), [file.path for file in self.files.values()]
        answers = self._pool.map(question, paths, options)
        named = [
            answer.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
            for rank, answer in zip(ranks, answers, strict=True)
        ]
        return pl.concat(named)

    @cached_property
    def _pool(self) -> Pool:
        return self._given_pool or default_pool(trace_files(self.path))
