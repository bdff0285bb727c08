"""Questions that need all ranks: collectives, waits, stragglers, clocks, function patterns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.arrival_lateness import arrival_lateness, who_is_late
from haiprof.trace_analysis.clocks import on_one_clock
from haiprof.trace_analysis.collectives import collective_kernels
from haiprof.trace_analysis.communication_parts import communication_parts, waits_by_part
from haiprof.trace_analysis.pool import Progress
from haiprof.trace_analysis.questions.base import RankTraces, Steps
from haiprof.trace_analysis.skew import (
    collective_waits,
    collectives,
    process_groups,
    rank_collectives,
)
from haiprof.trace_analysis.stragglers import stragglers
from haiprof.trace_format.find import is_reduced_to_functions

if TYPE_CHECKING:
    from haiprof.trace_analysis.patterns.gather import Patterns


class RankQuestions(RankTraces):
    """Questions that need all ranks: collectives, waits, stragglers, clocks, function patterns."""

    def collectives(self, steps: Steps = None) -> pl.DataFrame:
        """Skew, transfer time and bandwidth of each collective: `haiprof.trace_analysis.skew`.

        Returns:
            One row per collective that is found on several ranks: `collective`, `step`, `kind`,
            `process_group`, `part`, `sequence`, `dtype`, `group_size`, `rank_count`,
            `matched_by`, `confidence`, `start_ns`, `start_skew_ns`, `last_rank`,
            `behind_second_ns`, `transfer_ns`, `bytes`, `algorithm_bandwidth_bytes_per_s`,
            `bus_bandwidth_bytes_per_s`, `missing` (why times are null).
            Clocks are compared by `clock_offsets`.
        """
        return collectives(self._collective_waits(steps))

    def collective_waits(self, steps: Steps = None) -> pl.DataFrame:
        """Each rank's part in each collective, by `collective` and `rank`.

        Returns:
            The columns of `collective_kernels` and `match_collectives`, and `late_ns`, `wait_ns`
            until the last rank arrives, `transfer_ns` from then on, `elsewhere_ns` in other groups
            before it, `arrived_last`, `missing`.
        """
        return self._collective_waits(steps)

    def process_groups(self, steps: Steps = None) -> pl.DataFrame:
        """Bandwidth per process group and kind of collective.

        Returns:
            `process_group`, `part`, `kind`, `group_size`, `collective_count`, `timed_count`,
            `bytes`, `transfer_ns`, `algorithm_bandwidth_bytes_per_s`, `bus_bandwidth_bytes_per_s`.
        """
        return process_groups(self.collectives(steps))

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
        return waits_by_part(parts, self._collective_waits(steps))

    def patterns(
        self, steps: Steps = None, *, geometry: bool = False, progress: Progress | None = None
    ) -> Patterns:
        """What bounds each rank, function by function: `haiprof.trace_analysis.patterns`.

        Args:
            steps: First profiler step and the one after the last; None takes all.
            geometry: Whether a kernel of the same name with another grid or block is another
                function; reduced files must have been made so.
            progress: Called with how many files are done.

        Returns:
            `functions`, `totals` (a row per rank) and `signs`; `haiprof.diagnosis.workers` makes
            PerfTracker's five reports of them.
        """
        from haiprof.trace_analysis.patterns.cached import cached_patterns
        from haiprof.trace_analysis.patterns.gather import gather_patterns
        from haiprof.trace_analysis.patterns.pattern_file import patterns_of_files
        from haiprof.trace_analysis.patterns.worker import worker_pattern

        paths = [file.path for file in self.files.values()]
        if is_reduced_to_functions(paths):
            return patterns_of_files(paths, steps, geometry=geometry)
        options = {"steps": steps, "geometry": geometry}
        answers = cached_patterns(
            paths, options, lambda left: self._ask(worker_pattern, left, options, progress)
        )
        return gather_patterns(dict(zip(self.files, answers, strict=True)))

    def function_patterns(self, steps: Steps = None) -> pl.DataFrame:
        """Bottleneck ratio, cost and resource of each function on each rank.

        Returns:
            `rank`, `kind` (gpu-compute, communication, memory, runtime, python), `type` of a
            communication, `name`, `count`, `total_ns`, `median_ns`, `covered_ns`, `bottleneck_ns`,
            `share_ratio`, `bottleneck_ratio` (of the window, with nothing of a kind above it),
            `occupancy_ratio`, `occupancy_std`, `bandwidth_bytes_per_s`,
            `bandwidth_std_bytes_per_s`, `median_block_count`, `wait_ns`, `transfer_ns`, `missing`.
        """
        return self.patterns(steps).functions

    def stragglers(self, steps: Steps = None, *, by_step: bool = False) -> pl.DataFrame:
        """Which rank arrives last at collectives: `haiprof.trace_analysis.stragglers`.

        Args:
            steps: First profiler step and the one after the last; None takes all.
            by_step: One row per rank and step.

        Returns:
            `rank`, the one that holds up most first; `collective_count`, `last_count`,
            `last_ratio`, `held_up_ns`, `waited_ns`, `collective_ns`, `step_count`,
            `held_up_ns_per_step`, `waited_ns_per_step`.
        """
        return stragglers(self._collective_waits(steps), by_step=by_step)

    def arrival_lateness(self, steps: Steps = None) -> pl.DataFrame:
        """Who is late, and how sure that is: `haiprof.trace_analysis.arrival_lateness`.

        Args:
            steps: First profiler step and the one after the last; None takes all.

        Returns:
            `rank`, the latest first; `process_group`, `part`, `late_ns` per step, `low_ns`,
            `high_ns`, `clock_ns`, `step_count`, `collective_count`, `is_late`, `said` (the answer
            in words).

        Raises:
            MissingDataError: No arrivals can be compared; it says why.
        """
        kernels = self._matched_collectives(steps)
        clocks = self._clocks(kernels)
        waits = collective_waits(on_one_clock(kernels, clocks))
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
        return self._clocks(self._matched_collectives(steps))
