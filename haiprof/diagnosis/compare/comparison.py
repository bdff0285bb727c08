"""The comparison of two runs as a whole: what is claimed, and what stands against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.compare.compared_run import ComparedRun
from haiprof.diagnosis.compare.counters import CounterChange, Load, counter_changes, load_of
from haiprof.diagnosis.compare.environment import Differs, differences, unknown
from haiprof.diagnosis.compare.lines import LineChange, line_changes
from haiprof.diagnosis.compare.step_time import (
    MEAN_STEP,
    Change,
    Part,
    RankChange,
    rank_changes,
    step_change,
    step_parts,
)
from haiprof.diagnosis.thresholds import (
    COMPARE_DRIFT_RATIO,
    COMPARE_LOAD_RATIO,
    COMPARE_SHARED_CORE_RATIO,
    COMPARE_WAIT_RATIO,
)
from haiprof.trace_analysis.diff import TraceDiff
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

TRACE_LIMIT_BYTES = 500_000_000
State = Literal["slower", "faster", "same", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A baseline against a new run."""

    before: ComparedRun
    after: ComparedRun
    change: Change
    parts: tuple[Part, ...]
    lines: tuple[LineChange, ...]
    """Functions of the user's whose time per step changed beyond chance."""
    no_lines: str
    """Why they could not be compared."""
    ranks: tuple[RankChange, ...]
    counters: tuple[CounterChange, ...]
    loads: tuple[Load, Load]
    differs: tuple[Differs, ...]
    kernels: TraceDiff | None
    """Traces against each other, where both runs have some."""
    no_kernels: str
    """Why there are none."""
    unknown: tuple[str, ...]
    """What could not be compared."""

    @property
    def undecided(self) -> str:
        """Why nothing is claimed although something may have changed; empty where that is known."""
        if self.change.unknown:
            return self.change.unknown
        explained_ns = other_load_ns(self.change, self.loads)
        if not explained_ns or least_ns(self.change) > explained_ns:
            return ""
        slower = self.loads[1] if self.change.is_slower else self.loads[0]
        return (
            f"others used {ratio_text(slower.other_ratio)} of the cores in the slower "
            f"run, which may explain {duration_text(explained_ns)} per step"
        )

    @property
    def state(self) -> State:
        """What is claimed; `same` says that no difference was found, not that there is none."""
        if self.undecided:
            return "undecided"
        if self.change.is_slower:
            return "slower"
        return "faster" if self.change.is_faster else "same"


def compare_runs(
    before: ComparedRun, after: ComparedRun, *, read_traces: bool = True
) -> Comparison:
    """Compares two runs.

    Args:
        before: The baseline.
        after: What is judged.
        read_traces: Whether traces are compared, too.

    Raises:
        UsageError: Both are the same run.
    """
    if before.path.samefile(after.path):
        raise UsageError(
            f"{after.path}: compared with itself, a run never differs",
            hint="name an earlier run as the baseline, or --baseline last-good",
        )
    change = step_change(before.step_ns, after.step_ns)
    lines, no_lines = line_changes(before, after, change)
    kernels, why = _kernels(before, after) if read_traces else (None, "left out by --no-traces")
    return Comparison(
        before=before,
        after=after,
        change=change,
        parts=step_parts(before, after, change),
        lines=lines,
        no_lines=no_lines,
        ranks=rank_changes(before, after),
        counters=counter_changes(before, after) if not change.unknown else (),
        loads=(load_of(before), load_of(after)),
        differs=differences(before, after),
        kernels=kernels,
        no_kernels=why,
        unknown=unknown(before, after),
    )


def exceeds(found: Comparison, limit_ratio: float) -> bool | None:
    """Whether the new run is slower than a limit allows.

    Returns:
        True where the median step is longer by more than the limit, and by more than 0 beyond
        chance; null where nobody can say: nothing is claimed for a reason, or the interval reaches
        from 0 to beyond the limit; else False.
    """
    change = found.change
    if found.undecided or change.low_ratio is None or change.high_ratio is None:
        return None
    if change.is_slower:
        return change.ratio - 1 > limit_ratio
    return None if change.high_ratio - 1 > limit_ratio else False


def other_load_change(loads: tuple[Load, Load]) -> float | None:
    """How much more of the cores others used in the new run; None where one is not known."""
    old, new = (load.other_ratio for load in loads)
    return None if old is None or new is None else new - old


def least_ns(change: Change) -> float:
    """The end of the difference's interval that is nearer to 0; 0 where nothing is claimed."""
    if change.is_slower and change.low_ratio is not None:
        return (change.low_ratio - 1) * change.before_ns
    if change.is_faster and change.high_ratio is not None:
        return (1 - change.high_ratio) * change.before_ns
    return 0.0


def other_load_ns(change: Change, loads: tuple[Load, Load]) -> float:
    """How much of a step's difference others on the cores may explain at most; 0 where none.

    What they took in the slower run: a full machine looks alike in both, and is not. Time in which
    the main thread waited for a core, and its work on cores that are shared, in proportion to the
    load (`COMPARE_SHARED_CORE_RATIO`).
    """
    if not change.is_slower and not change.is_faster:
        return 0.0
    load = loads[1] if change.is_slower else loads[0]
    step_ns = max(change.before_ns, change.after_ns)
    other = load.other_ratio or 0.0
    if other <= COMPARE_LOAD_RATIO:
        return 0.0
    busy = 1.0 if load.main_cores is None else min(1.0, load.main_cores)
    return ((load.wait_ratio or 0.0) + COMPARE_SHARED_CORE_RATIO * other * busy) * step_ns


def waited_ns(change: Change, loads: tuple[Load, Load]) -> float | None:
    """How much longer a step's main thread waited for a core; None where not recorded."""
    old, new = (load.wait_ratio for load in loads)
    return None if old is None or new is None else new * change.after_ns - old * change.before_ns


def caveats(found: Comparison) -> Iterator[str]:
    """What a reader must know before trusting the claim."""
    change = found.change
    for word, side, drift in (
        ("baseline", found.before, change.before_drift_ratio),
        ("new run", found.after, change.after_drift_ratio),
    ):
        if drift is not None and abs(drift) >= COMPARE_DRIFT_RATIO:
            moved = "slower" if drift > 0 else "faster"
            yield f"{word}: steps became {ratio_text(abs(drift))} {moved} within the run (drift)"
        if side.manifest is not None and side.manifest.end_wall_ns is None:
            yield f"{word}: it has no end: it still runs, or was killed"
        elif side.manifest is not None and side.manifest.exit_status != 0:
            yield f"{word}: it did not end with exit status 0"
    yield from _of_load(found)
    mean = next((part for part in found.parts if part.name == MEAN_STEP), None)
    if mean is not None and mean.is_significant and found.state == "same":
        yield (
            f"the mean step differs by {duration_text(mean.difference_ns)}, the median does not: "
            "stalls, in few steps"
        )
    if len(found.before.world) != len(found.after.world):
        yield "the runs have different numbers of ranks: a step is not the same work"


def _of_load(found: Comparison) -> Iterator[str]:
    more = other_load_change(found.loads)
    if more is not None and abs(more) > COMPARE_LOAD_RATIO and not found.undecided:
        word = "more" if more > 0 else "less"
        yield f"others used {ratio_text(abs(more))} {word} of the cores in the new run"
    waited = waited_ns(found.change, found.loads)
    claimed = found.change.is_slower or found.change.is_faster
    if claimed and waited and waited / found.change.difference_ns >= COMPARE_WAIT_RATIO:
        yield (
            f"waiting for a core changed by {duration_text(waited)} per step, which is most of the "
            "difference: other load, fewer cores, or more threads"
        )


def _kernels(before: ComparedRun, after: ComparedRun) -> tuple[TraceDiff | None, str]:
    for word, side in (("baseline", before), ("new run", after)):
        if not side.analyzer.run.traces.is_dir():
            return None, f"no traces in the {word}: --trace records some"
    try:
        analyses = [TraceQuestions(side.path) for side in (before, after)]
        size = sum(analysis.size_bytes() for analysis in analyses)
        if size > TRACE_LIMIT_BYTES:
            return None, f"traces of {size >> 20} MiB are left to haiprof trace-diff"
        return analyses[0].diff(analyses[1]), ""
    except HaiprofError as error:
        return None, str(error)
    except OSError as error:
        return None, f"traces: {error.strerror or error}"
