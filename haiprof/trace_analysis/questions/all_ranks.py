"""Every question about traces: of each rank, of all ranks together, and about causes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis import (
    attribution,
    device_time,
    launches,
    operator_efficiency,
    python_code,
    step_time,
)
from haiprof.trace_analysis import call_tree as calls
from haiprof.trace_analysis import memory_timeline as memory
from haiprof.trace_analysis.arrivals import (
    arrival_lateness,
    collectives,
    process_groups,
    rank_collectives,
    stragglers,
    who_is_late,
)
from haiprof.trace_analysis.collectives import (
    collective_kernels,
    communication_parts,
    waits_by_part,
)
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.diff import KERNEL, OPERATOR, step_samples
from haiprof.trace_analysis.kernel_names import FULL
from haiprof.trace_analysis.pool import Progress
from haiprof.trace_analysis.questions.base import RankTraces, of_each_rank
from haiprof.trace_format.find import is_reduced_to_functions
from haiprof.trace_format.kineto.rank_trace import Trace

if TYPE_CHECKING:
    from haiprof.trace_analysis.critical_path import CriticalPath
    from haiprof.trace_analysis.diff import TraceDiff
    from haiprof.trace_analysis.function_patterns import Patterns
    from haiprof.trace_analysis.what_if.replay import Change


class TraceQuestions(RankTraces):
    """The traces of one window of a job, a file per rank; each is read at the first question.

    `steps` is always the first profiler step and the one after the last; None takes all.

    Frames are polars'; `frame.to_pandas()` needs `pip install 'haiprof[pandas]'`.
    """

    # Of each rank alone: time on the device, then launches, operators, Python and memory.

    def temporal_breakdown(self, steps: Steps = None) -> pl.DataFrame:
        """Idle, computing and other time per rank: `haiprof.trace_analysis.device_time`.

        Returns:
            One row per rank and device: `rank`, `device`, `span_ns`, `idle_ns`, `compute_ns`,
            `non_compute_ns`, `idle_ratio`, `compute_ratio`, `non_compute_ratio`. A rank without
            GPU events has one row of nulls.
        """
        found, span = self.per_rank(device_time.temporal_breakdown, steps=steps), pl.col("span_ns")
        parts = ("idle", "compute", "non_compute")
        return found.with_columns(
            pl.when(span > 0).then(pl.col(f"{part}_ns") / span).alias(f"{part}_ratio")
            for part in parts
        )

    idle_time_breakdown = of_each_rank(device_time.idle_breakdown)
    kernel_type_breakdown = of_each_rank(device_time.kernel_types)
    kernel_breakdown = of_each_rank(device_time.kernels)

    def kernels_across_ranks(self, steps: Steps = None) -> pl.DataFrame:
        """A kernel on every rank, the slowest rank named: `haiprof.trace_analysis.device_time`.

        Returns:
            One row per kind and kernel: `kind`, `name`, `rank_count`, `count`, `sum_ns`,
            `mean_ns`, `std_ns`, `slowest_rank`, `slowest_mean_ns`, `fastest_rank`,
            `fastest_mean_ns`, `others_median_ns`, `distance_ratio`, `excess_ns`.
        """
        return device_time.across_ranks(self.kernel_breakdown(steps))

    overlap = of_each_rank(device_time.overlap)
    annotation_breakdown = of_each_rank(step_time.annotation_breakdown)
    annotation_kernels = of_each_rank(step_time.annotation_kernels)
    step_time_breakdown = of_each_rank(step_time.step_time_breakdown)
    efficiency = of_each_rank(operator_efficiency.operator_efficiency)
    step_efficiency = of_each_rank(operator_efficiency.step_efficiency)

    memory_timeline = of_each_rank(memory.memory_timeline)
    memory_allocations = of_each_rank(memory.memory_allocations)
    memory_by_operator = of_each_rank(memory.memory_by_operator)
    memory_at_peak = of_each_rank(memory.memory_at_peak)
    memory_at_peak_by_module = of_each_rank(memory.memory_at_peak_by_module)
    python_stacks = of_each_rank(python_code.python_stacks)
    python_functions = of_each_rank(python_code.python_functions)
    launch_statistics = of_each_rank(launches.launch_statistics)
    launch_summary = of_each_rank(launches.launch_summary)
    queue_length = of_each_rank(launches.queue_length)
    queue_length_summary = of_each_rank(launches.queue_length_summary)
    full_queue = of_each_rank(launches.full_queue)
    memory_bandwidth = of_each_rank(launches.memory_bandwidth)
    memory_bandwidth_summary = of_each_rank(launches.memory_bandwidth_summary)
    gpu_counters = of_each_rank(launches.gpu_counters)
    graph_nodes = of_each_rank(launches.graph_nodes)
    os_calls = of_each_rank(launches.os_calls)
    kernel_operators = of_each_rank(attribution.kernel_operators)
    operator_kernels = of_each_rank(attribution.operator_kernels)
    host_operators = of_each_rank(attribution.host_operators)
    module_times = of_each_rank(python_code.module_times)
    traced_time = of_each_rank(device_time.traced_time)
    operator_sequences = of_each_rank(attribution.operator_sequences)
    kernel_sequences = of_each_rank(attribution.kernel_sequences)
    call_tree = of_each_rank(calls.call_tree)

    # Of all ranks together: collectives, waits, stragglers, clocks, function patterns.

    def collectives(self, steps: Steps = None) -> pl.DataFrame:
        """Skew, transfer time and bandwidth of each collective: `haiprof.trace_analysis.arrivals`.

        Returns:
            One row per collective that is found on several ranks: `collective`, `step`, `kind`,
            `process_group`, `part`, `sequence`, `dtype`, `group_size`, `rank_count`,
            `matched_by`, `confidence`, `start_ns`, `start_skew_ns`, `last_rank`,
            `behind_second_ns`, `transfer_ns`, `bytes`, `algorithm_bandwidth_bytes_per_s`,
            `bus_bandwidth_bytes_per_s`, `one_node` (whether its ranks are numbered as the devices
            of one node are), `missing` (why times are null).
            Clocks are compared by `clock_offsets`.
        """
        return collectives(self._arrivals(steps)[0])

    def collective_waits(self, steps: Steps = None) -> pl.DataFrame:
        """Each rank's part in each collective, by `collective` and `rank`.

        Returns:
            The columns of `collective_kernels` and `match_collectives`, and `late_ns`, `wait_ns`
            until the last rank arrives, `transfer_ns` from then on, `elsewhere_ns` in other groups
            before it, `arrived_last`, `missing`.
        """
        return self._arrivals(steps)[0]

    def process_groups(self, steps: Steps = None) -> pl.DataFrame:
        """Bandwidth per process group and kind of collective.

        Returns:
            `process_group`, `part`, `kind`, `group_size`, `collective_count`, `timed_count`,
            `bytes`, `transfer_ns`, `algorithm_bandwidth_bytes_per_s`, `bus_bandwidth_bytes_per_s`;
            inside of a node whose GPUs name their link `link_bytes_per_s`, its peak each way,
            `link_source`, who states that, and `link_ratio`, bus bandwidth's share of it.
        """
        names = {file.device_name for file in self.files.values()}
        return process_groups(self.collectives(steps), names.pop() if len(names) == 1 else None)

    def rank_collectives(self, steps: Steps = None) -> pl.DataFrame:
        """What each rank's own collectives moved; one rank's trace is enough.

        Returns:
            `rank`, `process_group`, `part`, `kind`, `dtype`, `group_size`, `collective_count`,
            `sized_count`, `time_ns`, `bytes`, `algorithm_bandwidth_bytes_per_s` and
            `bus_bandwidth_bytes_per_s`, both lower bounds: the time holds waiting.
        """
        return rank_collectives(self.per_rank(collective_kernels, steps=steps))

    def communication_parts(self, steps: Steps = None) -> pl.DataFrame:
        """Communication by the part of the job that its process group serves.

        Returns:
            `rank`, `device`, `part` (data, tensor, pipeline, expert parallel ..., by the group's
            description), `group_count`, `collective_count`, `time_ns`, `exposed_ns` in which
            nothing computed (of a pipeline: its bubble and transfers that nothing hides),
            `exposed_ratio` of the GPU's span, `wait_ns` for other ranks of the group and
            `waited_count`, the collectives that it is known of.
        """
        parts = self.per_rank(communication_parts, steps=steps)
        return waits_by_part(parts, self._arrivals(steps)[0])

    def patterns(
        self, steps: Steps = None, *, geometry: bool = False, progress: Progress | None = None
    ) -> Patterns:
        """What bounds each rank, function by function: `haiprof.trace_analysis.function_patterns`.

        Args:
            steps: First profiler step and the one after the last; None takes all.
            geometry: Whether a kernel of the same name with another grid or block is another
                function; reduced files must have been made so.
            progress: Called with how many files are done.

        Returns:
            `functions` and `totals` (a row per rank); `haiprof.diagnosis.function_reports` makes
            PerfTracker's five reports of them.
        """
        from haiprof.trace_analysis.function_patterns import (
            cached_patterns,
            gather_patterns,
            patterns_of_files,
            worker_pattern,
        )

        paths = [file.path for file in self.files.values()]
        if is_reduced_to_functions(paths):
            return patterns_of_files(paths, steps, geometry=geometry)
        options = {"steps": steps, "geometry": geometry}
        answers = cached_patterns(
            paths, options, lambda left: self._pool.map(worker_pattern, left, options, progress)
        )
        return gather_patterns(dict(zip(self.files, answers, strict=True)))

    def stragglers(self, steps: Steps = None, *, by_step: bool = False) -> pl.DataFrame:
        """Which rank arrives last at collectives: `haiprof.trace_analysis.arrivals`.

        Args:
            steps: First profiler step and the one after the last; None takes all.
            by_step: One row per rank and step.

        Returns:
            `rank`, the one that holds up most first; `collective_count`, `last_count`,
            `last_ratio`, `held_up_ns`, `waited_ns`, `collective_ns`, `step_count`,
            `held_up_ns_per_step`, `waited_ns_per_step`.
        """
        return stragglers(self._arrivals(steps)[0], by_step=by_step)

    def arrival_lateness(self, steps: Steps = None) -> pl.DataFrame:
        """Who is late, and how sure that is: `haiprof.trace_analysis.arrivals`.

        Returns:
            `rank`, the latest first; `process_group`, `part`, `late_ns` per step, `low_ns`,
            `high_ns`, `clock_ns`, `step_count`, `collective_count`, `is_late`, `said` (the answer
            in words).

        Raises:
            MissingDataError: No arrivals can be compared; it says why.
        """
        waits, clocks, _ = self._arrivals(steps)
        found = arrival_lateness(waits, clocks)
        if found.is_empty():
            raise MissingDataError(who_is_late(found, waits))
        return found

    def clock_offsets(self, steps: Steps = None) -> pl.DataFrame:
        """How far the ranks' clocks seem apart, from the ends of collectives.

        Returns:
            `rank`, `collective_count`, `offset_ns`, `residual_ns` (below it nothing is known),
            `corrected`. Without collectives in common offsets are null: unknown.
        """
        return self._arrivals(steps)[1]

    # Causes: critical path, what-if, what changed between two traces.

    def diff(
        self, other: RankTraces, *, of: tuple[str, ...] = (KERNEL, OPERATOR), names: str = FULL,
        geometry: bool = False, steps: Steps = None, other_steps: Steps = None,
        by_step: bool = True,
    ) -> TraceDiff:  # fmt: skip
        """These traces as the control, others as the test: `haiprof.trace_analysis.diff`.

        Args:
            other: What is judged.
            of: `kernel`, `operator`, `runtime`, `annotation`.
            names: `full`; `short` without template arguments; `generic` also without what differs
                between GPU generations.
            geometry: Whether a kernel with another grid or block is another one.
            steps: First profiler step of these and the one after the last; None takes all.
            other_steps: The same of the others.
            by_step: False compares whole traces, however long each is.

        Returns:
            `names` (a row per name with times per step, spread, significance and what it explains
            of the step's difference), `steps`, `step_time`, `notes`. `diff.verdict` says in words
            whether the test is slower.
        """
        from haiprof.trace_analysis.diff import compare_traces

        asked: dict[str, Any] = {
            "of": of, "names": names, "geometry": geometry, "by_step": by_step,
        }  # fmt: skip
        control = self.per_rank(step_samples, steps=steps, **asked)
        test = other.per_rank(step_samples, steps=other_steps, **asked)
        return compare_traces(control, test, control_name=str(self.path))

    def what_if(self, *changes: Change, steps: Steps = None) -> pl.DataFrame:
        """Step time if something were faster: `haiprof.trace_analysis.what_if`.

        Args:
            changes: From `haiprof.trace_analysis.what_if.replay`: `faster_kernel`,
                `faster_operator`, `faster_loader`, `faster_network`, `faster_collective`,
                `rank_as_others`, `together`.
            steps: First profiler step and the one after the last; None takes all.

        Returns:
            One row per change: `change`, `measured_step_ns`, `reproduced_step_ns`, `error_ratio`,
            `unexplained_ratio`, `predicted_step_ns` with its interval (95 %) from `low_step_ns` to
            `high_step_ns`, `saved_ratio`, `shortened_ns`, `changed_count`, `held_count`,
            `collective_count`, `unmatched_count`, `apart_count`, `ahead_count`.
        """
        from haiprof.trace_analysis.what_if.predict import predictions
        from haiprof.trace_analysis.what_if.replay import rank_graph

        paths = [file.path for file in self.files.values()]
        graphs = self._pool.map(rank_graph, paths, {"steps": steps, "changes": changes})
        waits, clocks, kernels = self._arrivals(None)
        ahead = dict(clocks.filter("corrected").select("rank", "offset_ns").rows())
        by_rank = dict(zip(self.files, graphs, strict=True))
        return predictions(by_rank, waits, changes, ahead, kernels)

    def write_counter_traces(
        self, folder: str | Path | None = None, *, ranks: Sequence[int] | None = None,
        counters: tuple[str, ...] | None = None, suffix: str | None = None,
    ) -> pl.DataFrame:  # fmt: skip
        """Writes each trace anew with counter tracks: `haiprof.trace_analysis.launches`.

        Args:
            folder: Where; None is beside each trace.
            ranks: Only these; None takes all.
            counters: `queue_length` or `memory_bandwidth`; None takes both.
            suffix: What the files' names end in; None is `_with_counters`.

        Returns:
            One row per rank: `rank`, `path`, `counter_event_count`.
        """
        from haiprof.trace_analysis.launches import write_counter_trace

        asked = {"folder": folder and Path(folder), "counters": counters, "suffix": suffix}
        given = {name: value for name, value in asked.items() if value is not None}
        return self.per_rank(write_counter_trace, ranks=ranks, **given)

    def critical_path(
        self, rank: int | None = None, *, steps: Steps = None, annotation: str | None = None,
        instance: int | tuple[int, int] = 0, data_loading: str | None = None,
    ) -> CriticalPath:  # fmt: skip
        """The chain of events that a window consists of: `haiprof.trace_analysis.critical_path`.

        Args:
            rank: Whose; None is the lowest.
            steps: First profiler step and the one after the last.
            annotation: Part of the name of a record_function range.
            instance: Which of those ranges, from 0, or the first and the last of several. With
                neither steps nor annotation, the whole trace.
            data_loading: Regular expression of the ranges in which the host loads data; None takes
                torch's own.

        Returns:
            Frames by `summary()`, `top()` and `segments()`, and what they rest on: `confidence`,
            `caveats`.
        """
        from haiprof.trace_analysis.critical_path import DATA_LOADING, critical_path

        pattern = DATA_LOADING if data_loading is None else data_loading
        return critical_path(self._trace_of(rank), steps=steps, annotation=annotation,
                             instance=instance, data_loading=pattern)  # fmt: skip

    def overlay_critical_path(
        self, path: CriticalPath, rank: int | None = None, *, folder: str | Path | None = None,
        only_path: bool = False,
    ) -> Path:  # fmt: skip
        """Writes the trace anew with its path drawn in: `haiprof.trace_analysis.critical_path`.

        Args:
            path: From `critical_path()` of the same rank.
            rank: Whose; None is the lowest.
            folder: Where; None is beside the trace.
            only_path: Events that are not on the path are left out.

        Returns:
            The new file.
        """
        from haiprof.trace_analysis.critical_path import write_overlay

        target = Path(folder) if folder else None
        return write_overlay(self._trace_of(rank), path, folder=target, only_path=only_path)

    def _trace_of(self, rank: int | None) -> Trace:
        chosen = min(self.files) if rank is None else rank
        self.file_of(chosen)
        return self.traces[chosen]
