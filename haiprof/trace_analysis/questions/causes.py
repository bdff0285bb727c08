"""Questions about causes: critical path, what-if, what changed between two traces.

What they need is imported when they are asked: to import all of it takes as long as all else here,
in each process that reads traces for a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.clocks import on_one_clock
from haiprof.trace_analysis.diff_steps import KERNEL, OPERATOR, step_samples
from haiprof.trace_analysis.kernel_names import FULL
from haiprof.trace_analysis.questions.base import RankTraces, Steps
from haiprof.trace_format.kineto.rank_trace import Trace

if TYPE_CHECKING:
    from haiprof.trace_analysis.critical.path import CriticalPath
    from haiprof.trace_analysis.diff import TraceDiff
    from haiprof.trace_analysis.what_if.changes import Change


class CauseQuestions(RankTraces):
    """Questions about causes: critical path, what-if, what changed between two traces."""

    def diff(
        self,
        other: RankTraces,
        *,
        of: tuple[str, ...] = (KERNEL, OPERATOR),
        names: str = FULL,
        geometry: bool = False,
        steps: Steps = None,
        other_steps: Steps = None,
        by_step: bool = True,
    ) -> TraceDiff:
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
        return compare_traces(control, other.per_rank(step_samples, steps=other_steps, **asked))

    def what_if(self, *changes: Change, steps: Steps = None) -> pl.DataFrame:
        """Step time if something were faster: `haiprof.trace_analysis.what_if`.

        Args:
            changes: From `haiprof.trace_analysis.what_if.changes`: `faster_kernel`,
                `faster_operator`, `faster_loader`, `faster_network`, `faster_collective`,
                `rank_as_others`, `together`.
            steps: First profiler step and the one after the last; None takes all.

        Returns:
            One row per change: `change`, `measured_step_ns`, `reproduced_step_ns`, `error_ratio`,
            `unexplained_ratio`, `predicted_step_ns` with its interval (95 %) from `low_step_ns` to
            `high_step_ns`, `saved_ratio`, `shortened_ns`, `changed_count`, `held_count`,
            `collective_count`, `unmatched_count`, `apart_count`, `ahead_count`.
        """
        from haiprof.trace_analysis.skew import collective_waits
        from haiprof.trace_analysis.what_if.predict import predictions
        from haiprof.trace_analysis.what_if.replay import rank_graph

        paths = [file.path for file in self.files.values()]
        graphs = self._ask(rank_graph, paths, {"steps": steps, "changes": changes})
        kernels = self._matched_collectives(None)
        clocks = self._clocks(kernels)
        ahead = dict(clocks.filter("corrected").select("rank", "offset_ns").rows())
        waits = collective_waits(on_one_clock(kernels, clocks))
        by_rank = dict(zip(self.files, graphs, strict=True))
        return predictions(by_rank, waits, changes, ahead, kernels)

    def write_counter_traces(
        self,
        folder: str | Path | None = None,
        *,
        ranks: Sequence[int] | None = None,
        counters: tuple[str, ...] | None = None,
        suffix: str | None = None,
    ) -> pl.DataFrame:
        """Writes each trace anew with counter tracks: `haiprof.trace_analysis.counter_trace`.

        Args:
            folder: Where; None is beside each trace.
            ranks: Only these; None takes all.
            counters: `queue_length` or `memory_bandwidth`; None takes both.
            suffix: What the files' names end in; None is `_with_counters`.

        Returns:
            One row per rank: `rank`, `path`, `counter_event_count`.
        """
        from haiprof.trace_analysis.counter_trace import write_counter_trace

        asked = {"folder": folder and Path(folder), "counters": counters, "suffix": suffix}
        given = {name: value for name, value in asked.items() if value is not None}
        return self.per_rank(write_counter_trace, ranks=ranks, **given)

    def critical_path(
        self,
        rank: int | None = None,
        *,
        steps: Steps = None,
        annotation: str | None = None,
        instance: int | tuple[int, int] = 0,
        data_loading: str | None = None,
    ) -> CriticalPath:
        """The chain of events that a window consists of: `haiprof.trace_analysis.critical.path`.

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
        from haiprof.trace_analysis.critical.path import critical_path
        from haiprof.trace_analysis.critical.segments import DATA_LOADING

        return critical_path(
            self._trace_of(rank),
            steps=steps,
            annotation=annotation,
            instance=instance,
            data_loading=DATA_LOADING if data_loading is None else data_loading,
        )

    def overlay_critical_path(
        self,
        path: CriticalPath,
        rank: int | None = None,
        *,
        folder: str | Path | None = None,
        only_path: bool = False,
    ) -> Path:
        """Writes the trace anew with its path drawn in: `haiprof.trace_analysis.critical.overlay`.

        Args:
            path: From `critical_path()` of the same rank.
            rank: Whose; None is the lowest.
            folder: Where; None is beside the trace.
            only_path: Events that are not on the path are left out.

        Returns:
            The new file.
        """
        from haiprof.trace_analysis.critical.overlay import write_overlay

        target = Path(folder) if folder else None
        return write_overlay(self._trace_of(rank), path, folder=target, only_path=only_path)

    def _trace_of(self, rank: int | None) -> Trace:
        chosen = min(self.traces) if rank is None else rank
        if chosen not in self.traces:
            known = ", ".join(map(str, self.traces))
            raise MissingDataError(f"{self.path}: no trace of rank {chosen}; there are: {known}")
        return self.traces[chosen]
