"""Questions about one rank: time on the device, launches, operators, Python functions, memory."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from haiprof.trace_analysis.attribution import (
    MIN_PATTERN_LENGTH,
    TOP_K,
    host_operators,
    kernel_operators,
    kernel_sequences,
    operator_kernels,
    operator_sequences,
)
from haiprof.trace_analysis.call_tree import call_tree
from haiprof.trace_analysis.device_time import (
    CONSECUTIVE_KERNEL_DELAY_NS,
    across_ranks,
    idle_breakdown,
    kernel_types,
    kernels,
    overlap,
    temporal_breakdown,
    traced_time,
)
from haiprof.trace_analysis.launches import (
    LAUNCH_DELAY_CUTOFF_NS,
    MAX_QUEUE_LENGTH,
    RUNTIME_CUTOFF_NS,
    full_queue,
    launch_statistics,
    launch_summary,
    memory_bandwidth,
    memory_bandwidth_summary,
    queue_length,
    queue_length_summary,
)
from haiprof.trace_analysis.memory_timeline import (
    memory_allocations,
    memory_at_peak,
    memory_at_peak_by_module,
    memory_by_operator,
    memory_timeline,
)
from haiprof.trace_analysis.operator_efficiency import operator_efficiency, step_efficiency
from haiprof.trace_analysis.python_code import (
    folded_stacks,
    module_times,
    python_functions,
    python_stacks,
)
from haiprof.trace_analysis.questions.base import RankTraces, Steps
from haiprof.trace_analysis.step_time import (
    annotation_breakdown,
    annotation_kernels,
    step_time_breakdown,
)
from haiprof.trace_format.kineto.events import OPS


class TimeQuestions(RankTraces):
    """Questions about time on the device: computing, communicating, idle, kernel by kernel."""

    def temporal_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Idle, computing and other time per rank: `haiprof.trace_analysis.device_time`.

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
        """What the streams of each GPU waited for: `haiprof.trace_analysis.device_time`.

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
        """Busy time by the kinds that ran at once: `haiprof.trace_analysis.device_time`.

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
        """Count and time of each kernel: `haiprof.trace_analysis.device_time`.

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
        """A kernel on every rank, the slowest rank named: `haiprof.trace_analysis.device_time`.

        Returns:
            One row per kind and kernel: `kind`, `name`, `rank_count`, `count`, `sum_ns`,
            `mean_ns`, `std_ns`, `slowest_rank`, `slowest_mean_ns`, `fastest_rank`,
            `fastest_mean_ns`, `others_median_ns`, `distance_ratio`, `excess_ns`.
        """
        return across_ranks(self.kernel_breakdown(steps))

    def overlap(self, steps: Steps = None) -> pl.DataFrame:
        """How much communication computation hides: `haiprof.trace_analysis.device_time`.

        Returns:
            One row per rank and device: `rank`, `device`, `compute_ns`, `communication_ns`,
            `overlap_ns`, `overlap_ratio` (null without communication).
        """
        return self.per_rank(overlap, steps=steps)

    def annotation_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Count and time of each named range: `haiprof.trace_analysis.step_time`.

        Returns:
            One row per rank, category (CPU or GPU), device and name: `rank`, `category`,
            `device`, `name`, `count`, `sum_ns`, `min_ns`, `max_ns`, `mean_ns`, `std_ns`,
            `covered_ns`.
        """
        return self.per_rank(annotation_breakdown, steps=steps)

    def annotation_kernels(self, steps: Steps = None) -> pl.DataFrame:
        """The GPU events of each annotation: `haiprof.trace_analysis.step_time`.

        Returns:
            One row per rank, device, annotation and kernel: `rank`, `device`, `annotation` (null
            outside of all), `kind`, `name`, `count`, `sum_ns`, `min_ns`, `max_ns`, `mean_ns`,
            `std_ns`.
        """
        return self.per_rank(annotation_kernels, steps=steps)

    def step_time_breakdown(self, *, gpu_tail: bool = False) -> pl.DataFrame:
        """Where the time of each profiler step went: `haiprof.trace_analysis.step_time`.

        Args:
            gpu_tail: A step lasts until the last GPU event that it launched, as in TensorBoard.

        Returns:
            One row per rank and step: `rank`, `step`, `start_ns`, `wall_ns`, and its parts, which
            add up to it: `kernel_ns`, `memcpy_ns`, `memset_ns`, `communication_ns`, `runtime_ns`,
            `dataloader_ns`, `cpu_exec_ns`, `other_ns`.
        """
        return self.per_rank(step_time_breakdown, gpu_tail=gpu_tail)

    def efficiency(
        self, steps: Steps = None, *, peaks: Mapping[str, float] | None = None
    ) -> pl.DataFrame:
        """What operators achieve of the roofline: `haiprof.trace_analysis.operator_efficiency`.

        Args:
            steps: As in `temporal_breakdown`.
            peaks: FLOP/s by precision and bytes/s as `memory`; None takes the table's.

        Returns:
            One row per rank, operator, shapes and kernel: `rank`, `operator`, `kind`, `shapes`,
            `precision`, `kernel`, `count`, `time_ns`, `flops`, `bytes`, `flops_per_s`,
            `bytes_per_s`, `flops_per_byte`, `bound`, `roofline_ratio`, `recomputed_ratio`.
        """
        return self.per_rank(operator_efficiency, steps=steps, peaks=peaks)

    def step_efficiency(
        self, steps: Steps = None, *, peaks: Mapping[str, float] | None = None
    ) -> pl.DataFrame:
        """MFU and HFU over the steps of each rank: `haiprof.trace_analysis.operator_efficiency`.

        Args:
            steps: As in `temporal_breakdown`.
            peaks: As in `efficiency`.

        Returns:
            One row per rank: `rank`, `device_name`, `step_count`, `wall_ns`, `model_flops`,
            `executed_flops`, `recomputed_flops`, `mfu_ratio`, `hfu_ratio`, `kernel_known_ratio`,
            `matrix_known_ratio`, `is_lower_bound`, `peak`, `reason`.
        """
        return self.per_rank(step_efficiency, steps=steps, peaks=peaks)


class HostQuestions(RankTraces):
    """Questions about the host's side: launches, queues, operators, Python functions, memory."""

    def memory_timeline(self) -> pl.DataFrame:
        """Allocated and reserved memory over time: `haiprof.trace_analysis.memory_timeline`.

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

    def memory_at_peak_by_module(self) -> pl.DataFrame:
        """What was alive when each device held most, by module or annotated range.

        Returns:
            As `memory_at_peak`, with `module` in place of `operator`.
        """
        return self.per_rank(memory_at_peak_by_module)

    def python_stacks(self, steps: Steps = None) -> pl.DataFrame:
        """Python calls by call stack: `haiprof.trace_analysis.python_code`.

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

    def launch_statistics(
        self,
        steps: Steps = None,
        *,
        runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
        launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
        include_memory_events: bool = True,
    ) -> pl.DataFrame:
        """What each launch cost and how long it took to begin: `haiprof.trace_analysis.launches`.

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
        """Launches by call: `haiprof.trace_analysis.launches`.

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
        """The launch queue of each stream over time: `haiprof.trace_analysis.launches`.

        Returns:
            One row per change: `rank`, `device`, `stream`, `ts_ns`, `queue_length` from then on.
        """
        return self.per_rank(queue_length, steps=steps)

    def queue_length_summary(self, steps: Steps = None) -> pl.DataFrame:
        """How long the launch queue of each stream was: `haiprof.trace_analysis.launches`.

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
        """How long the launch queue of each stream was full: `haiprof.trace_analysis.launches`.

        Args:
            steps: As in `temporal_breakdown`.
            max_queue_length: From which on it is full.

        Returns:
            One row per rank and stream: `rank`, `device`, `stream`, `full_ns`, `trace_ns`,
            `full_ratio`.
        """
        return self.per_rank(full_queue, steps=steps, max_queue_length=max_queue_length)

    def memory_bandwidth(self, steps: Steps = None) -> pl.DataFrame:
        """The bandwidth of each kind of copy over time: `haiprof.trace_analysis.launches`.

        Returns:
            One row per change: `rank`, `device`, `copy_kind`, `ts_ns`, `bandwidth_bytes_per_s`
            from then on.
        """
        return self.per_rank(memory_bandwidth, steps=steps)

    def memory_bandwidth_summary(self, steps: Steps = None) -> pl.DataFrame:
        """How much each kind of copy moved, and how fast: `haiprof.trace_analysis.launches`.

        Returns:
            One row per rank, device and kind: `rank`, `device`, `copy_kind`, `copy_count`,
            `unsized_count`, `unrated_count`, `bytes`, `busy_ns`, `mean_bandwidth_bytes_per_s`, and
            HTA's statistics over the changes, in bytes per second: `change_count`, `change_mean`,
            `change_std`, `change_min`, `change_q25`, `change_q50`, `change_q75`, `change_max`.
        """
        return self.per_rank(memory_bandwidth_summary, steps=steps)

    def kernel_operators(self, steps: Steps = None) -> pl.DataFrame:
        """Each GPU event with what launched it: `haiprof.trace_analysis.attribution`.

        Returns:
            One row per rank and GPU event: `rank`, `event`, `name`, `category`, `device`,
            `stream`, `ts_ns`, `dur_ns`, `correlation`, `call`, `launch_delay_ns`, `operator`,
            `operator_event`, `top_operator`, `matched_by`, `module`, `annotation`.
        """
        return self.per_rank(kernel_operators, steps=steps)

    def operator_kernels(self, steps: Steps = None) -> pl.DataFrame:
        """Operators and the GPU time that they launched: `haiprof.trace_analysis.attribution`.

        Returns:
            One row per rank and operator: `rank`, `operator`, `call_count`, `cpu_self_ns`,
            `cpu_total_ns`, `kernel_count`, `gpu_self_ns`, `kernel_total_count`, `gpu_total_ns`,
            `launch_delay_mean_ns`, `launch_delay_max_ns`. A row with `operator` null is of GPU
            events without one.
        """
        return self.per_rank(operator_kernels, steps=steps)

    def host_operators(self, steps: Steps = None) -> pl.DataFrame:
        """Operators by shapes in traces without a GPU: `haiprof.trace_analysis.attribution`.

        Returns:
            One row per rank, operator and shapes: `rank`, `operator`, `shapes`, `call_count`,
            `cpu_self_ns`, `cpu_total_ns`; none of a rank with GPU events.
        """
        return self.per_rank(host_operators, steps=steps)

    def module_times(self, steps: Steps = None) -> pl.DataFrame:
        """Modules with their time on host and GPU: `haiprof.trace_analysis.python_code`.

        Returns:
            One row per rank and module or annotated range: `rank`, `path`, `name`, `kind`,
            `depth`, `call_count`, `host_self_ns`, `host_ns`, `backward_host_ns`, `kernel_count`,
            `device_self_ns`, `device_ns`, `backward_device_self_ns`, `backward_device_ns`,
            `graph_kernel_count`, `graph_device_self_ns` (of CUDA graphs). The row with `path` null
            is of GPU events outside of all.
        """
        return self.per_rank(module_times, steps=steps)

    def traced_time(self, steps: Steps = None) -> pl.DataFrame:
        """How long each rank was traced, from its first step to its last: `rank`, `wall_ns`."""
        return self.per_rank(traced_time, steps=steps)

    def operator_sequences(self, steps: Steps = None) -> pl.DataFrame:
        """What operators launch themselves, and when: `haiprof.trace_analysis.attribution`.

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
        """Frequent sequences of kernels of an operator: `haiprof.trace_analysis.attribution`.

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
        """Operators or Python functions with their callers: `haiprof.trace_analysis.call_tree`.

        Args:
            table: `ops` or `python`.

        Returns:
            One row per rank and span: `rank`, `event`, `name`, `pid`, `tid`, `ts_ns`, `dur_ns`,
            `self_ns`, `parent_event`, `depth`.
        """
        return self.per_rank(call_tree, table=table)
