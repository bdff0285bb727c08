"""Questions about the host's side: launches, queues, operators, Python functions, memory."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.attribution import host_operators, kernel_operators, operator_kernels
from haiprof.trace_analysis.bandwidth import memory_bandwidth, memory_bandwidth_summary
from haiprof.trace_analysis.call_tree import call_tree
from haiprof.trace_analysis.launches import (
    LAUNCH_DELAY_CUTOFF_NS,
    RUNTIME_CUTOFF_NS,
    launch_statistics,
    launch_summary,
)
from haiprof.trace_analysis.memory_timeline import (
    memory_allocations,
    memory_at_peak,
    memory_at_peak_by_module,
    memory_by_operator,
    memory_timeline,
)
from haiprof.trace_analysis.modules import module_times
from haiprof.trace_analysis.python_functions import folded_stacks, python_functions, python_stacks
from haiprof.trace_analysis.questions.base import RankTraces, Steps
from haiprof.trace_analysis.queue import (
    MAX_QUEUE_LENGTH,
    full_queue,
    queue_length,
    queue_length_summary,
)
from haiprof.trace_analysis.sequences import (
    MIN_PATTERN_LENGTH,
    TOP_K,
    kernel_sequences,
    operator_sequences,
)
from haiprof.trace_analysis.temporal import traced_time
from haiprof.trace_format.kineto.tables import OPS


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
        """Python calls by call stack: `haiprof.trace_analysis.python_functions`.

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
        """The launch queue of each stream over time: `haiprof.trace_analysis.queue`.

        Returns:
            One row per change: `rank`, `device`, `stream`, `ts_ns`, `queue_length` from then on.
        """
        return self.per_rank(queue_length, steps=steps)

    def queue_length_summary(self, steps: Steps = None) -> pl.DataFrame:
        """How long the launch queue of each stream was: `haiprof.trace_analysis.queue`.

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
        """How long the launch queue of each stream was full: `haiprof.trace_analysis.queue`.

        Args:
            steps: As in `temporal_breakdown`.
            max_queue_length: From which on it is full.

        Returns:
            One row per rank and stream: `rank`, `device`, `stream`, `full_ns`, `trace_ns`,
            `full_ratio`.
        """
        return self.per_rank(full_queue, steps=steps, max_queue_length=max_queue_length)

    def memory_bandwidth(self, steps: Steps = None) -> pl.DataFrame:
        """The bandwidth of each kind of copy over time: `haiprof.trace_analysis.bandwidth`.

        Returns:
            One row per change: `rank`, `device`, `copy_kind`, `ts_ns`, `bandwidth_bytes_per_s`
            from then on.
        """
        return self.per_rank(memory_bandwidth, steps=steps)

    def memory_bandwidth_summary(self, steps: Steps = None) -> pl.DataFrame:
        """How much each kind of copy moved, and how fast: `haiprof.trace_analysis.bandwidth`.

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
        """Modules with their time on host and GPU: `haiprof.trace_analysis.modules`.

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
        """What operators launch themselves, and when: `haiprof.trace_analysis.sequences`.

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
        """Frequent sequences of kernels of an operator: `haiprof.trace_analysis.sequences`.

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
