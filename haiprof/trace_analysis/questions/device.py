"""Questions about time on the device: computing, communicating, idle, kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from haiprof.trace_analysis.annotations import annotation_breakdown, annotation_kernels
from haiprof.trace_analysis.efficiency.operators import operator_efficiency, step_efficiency
from haiprof.trace_analysis.idle import CONSECUTIVE_KERNEL_DELAY_NS, idle_breakdown
from haiprof.trace_analysis.kernels import across_ranks, kernels
from haiprof.trace_analysis.overlap import kernel_types, overlap
from haiprof.trace_analysis.questions.base import RankTraces, Steps
from haiprof.trace_analysis.step_time import step_time_breakdown
from haiprof.trace_analysis.temporal import temporal_breakdown


class TimeQuestions(RankTraces):
    """Questions about time on the device: computing, communicating, idle, kernel by kernel."""

    def temporal_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Idle, computing and other time per rank: `haiprof.trace_analysis.temporal`.

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
        """What the streams of each GPU waited for: `haiprof.trace_analysis.idle`.

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
        """Busy time by the kinds that ran at once: `haiprof.trace_analysis.overlap`.

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
        """Count and time of each kernel: `haiprof.trace_analysis.kernels`.

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
        """The same kernel on every rank, the slowest rank named: `haiprof.trace_analysis.kernels`.

        Returns:
            One row per kind and kernel: `kind`, `name`, `rank_count`, `count`, `sum_ns`,
            `mean_ns`, `std_ns`, `slowest_rank`, `slowest_mean_ns`, `fastest_rank`,
            `fastest_mean_ns`, `others_median_ns`, `distance_ratio`, `excess_ns`.
        """
        return across_ranks(self.kernel_breakdown(steps))

    def overlap(self, steps: Steps = None) -> pl.DataFrame:
        """How much communication computation hides: `haiprof.trace_analysis.overlap`.

        Returns:
            One row per rank and device: `rank`, `device`, `compute_ns`, `communication_ns`,
            `overlap_ns`, `overlap_ratio` (null without communication).
        """
        return self.per_rank(overlap, steps=steps)

    def annotation_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Count and time of each named range: `haiprof.trace_analysis.annotations`.

        Returns:
            One row per rank, category (CPU or GPU), device and name: `rank`, `category`,
            `device`, `name`, `count`, `sum_ns`, `min_ns`, `max_ns`, `mean_ns`, `std_ns`,
            `covered_ns`.
        """
        return self.per_rank(annotation_breakdown, steps=steps)

    def annotation_kernels(self, steps: Steps = None) -> pl.DataFrame:
        """The GPU events of each annotation: `haiprof.trace_analysis.annotations`.

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
        """What operators achieve against the roofline: `haiprof.trace_analysis.efficiency`.

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
        """MFU and HFU over the steps of each rank: `haiprof.trace_analysis.efficiency`.

        Args:
            steps: As in `temporal_breakdown`.
            peaks: As in `efficiency`.

        Returns:
            One row per rank: `rank`, `device_name`, `step_count`, `wall_ns`, `model_flops`,
            `executed_flops`, `recomputed_flops`, `mfu_ratio`, `hfu_ratio`, `kernel_known_ratio`,
            `matrix_known_ratio`, `is_lower_bound`, `peak`, `reason`.
        """
        return self.per_rank(step_efficiency, steps=steps, peaks=peaks)
