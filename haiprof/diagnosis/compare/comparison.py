"""The comparison of two runs as a whole: what is claimed, and what stands against it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.ledger import PROBLEM_RATIO
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.compare.accounts import AccountChange, Promise, account_changes, promise
from haiprof.diagnosis.compare.compared_run import ComparedRun, compared_run_of
from haiprof.diagnosis.compare.counters import CounterChange, Load, counter_changes, load_of
from haiprof.diagnosis.compare.environment import Differs, differences, unknown
from haiprof.diagnosis.compare.step_change import (
    PositionChange,
    RankChange,
    StepChange,
    position_changes,
    rank_changes,
    step_change,
)
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.trace_analysis.diff import TraceDiff
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

COMPARE_LOAD_RATIO = 0.10
"""Share of the nodes' cores that other processes used in the slower run, from which on it is asked
what that may explain, however much they used in the other one; a change of that share by as much is
said where nothing is asked. TraceML's 10 % of what a step should not hold."""
COMPARE_SHARED_CORE_RATIO = 0.50
"""A busy neighbour on the same physical core makes work on it take up to half again as long: two
hyperthreads do about 1.3 times the work of one (Marr et al., Hyper-Threading Technology
Architecture and Microarchitecture, 2002)."""
_FOREVER_NS = 1 << 62
TRACE_LIMIT_BYTES = 500_000_000
State = Literal["slower", "faster", "same", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A baseline against a new run."""

    before: ComparedRun
    after: ComparedRun
    change: StepChange
    positions: tuple[PositionChange, ...]
    accounts: tuple[AccountChange, ...]
    no_accounts: str
    """Why they could not be compared."""
    promise: Promise | None
    """What the baseline's verdict promised for what is gone, and what came."""
    ranks: tuple[RankChange, ...]
    """Ranks that changed unlike the others."""
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
    def unjudged(self) -> str:
        """Why nothing can be claimed, however large the difference; empty where it can."""
        if self.change.unknown:
            return self.change.unknown
        explained_ns = other_load_ns(self.change, self.loads)
        if not explained_ns or self.change.least_ns > explained_ns:
            return ""
        slower = self.loads[1] if self.change.is_slower else self.loads[0]
        return (
            f"other processes used {ratio_text(slower.other_ratio)} of the cores in the slower "
            f"run, which may explain {duration_text(explained_ns)} per step"
        )

    @property
    def most_ratio(self) -> float:
        """No difference is larger than this: the end of the interval that is farther from 0."""
        low, high = self.change.low_ratio, self.change.high_ratio
        return math.inf if low is None or high is None else max(1 - low, high - 1)

    @property
    def state(self) -> State:
        """What is claimed; `same`: no difference as large as what a verdict calls a problem."""
        if self.unjudged:
            return "undecided"
        if self.change.is_slower or self.change.is_faster:
            return "slower" if self.change.is_slower else "faster"
        return "same" if self.most_ratio <= PROBLEM_RATIO else "undecided"


def compare_runs(
    before: ComparedRun, after: ComparedRun, *, read_traces: bool = True
) -> Comparison:
    """Compares a new run with a baseline; a UsageError where both are the same run."""
    is_one = before.path.samefile(after.path)
    if is_one and before.analyzer.between == after.analyzer.between:
        raise UsageError(
            f"{after.path}: compared with itself, a run never differs",
            hint="name an earlier run as the baseline, or --baseline last-good",
        )
    old, new = before.ledger, after.ledger
    medians = [math.nan if found is None else found.ledger.median_ns for found in (old, new)]
    change = step_change(before.step_ns, after.step_ns, medians)
    known = not change.unknown
    accounts, no_accounts = account_changes(old, new) if known else ((), "steps are not compared")
    kernels, why = _kernels(before, after) if read_traces else (None, "left out by --no-traces")
    return Comparison(
        before=before,
        after=after,
        change=change,
        positions=position_changes(before, after) if known else (),
        accounts=accounts,
        no_accounts=no_accounts,
        promise=promise(accounts, change),
        ranks=rank_changes(old, new) if known and old and new else (),
        counters=counter_changes(before, after) if known else (),
        loads=(load_of(before), load_of(after)),
        differs=differences(before, after),
        kernels=kernels,
        no_kernels=why,
        unknown=unknown(before, after),
    )


def compare_steps(analyzer: RunFrames, step: int) -> Comparison:
    """Compares the steps of one run from a step on with those before it."""
    steps = analyzer.steps()
    later = steps.filter(steps["step"] >= step)["start_ns"].min()
    if not isinstance(later, int):
        raise MissingDataError(f"{analyzer.run.root}: no step {step} was recorded")
    sides = [
        compared_run_of(RunFrames(analyzer.run.root, between=between))
        for between in ((0, later), (later, _FOREVER_NS))
    ]
    return compare_runs(*sides, read_traces=False)


def exceeds(found: Comparison, limit_ratio: float) -> bool | None:
    """Whether the new run's mean step is longer than a limit allows, and not by chance alone.

    None where nobody can say: it cannot be judged, or the interval reaches beyond the limit.
    """
    change = found.change
    if found.unjudged or change.low_ratio is None or change.high_ratio is None:
        return None
    if change.is_slower:
        return change.ratio - 1 > limit_ratio
    return None if change.high_ratio - 1 > limit_ratio else False


def other_load_ns(change: StepChange, loads: tuple[Load, Load]) -> float:
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


def caveats(found: Comparison) -> Iterator[str]:
    """What a reader must know before trusting the claim."""
    for word, side in (("baseline", found.before), ("new run", found.after)):
        if side.manifest is not None and side.manifest.end_wall_ns is None:
            yield f"{word}: it has no end: it still runs, or was killed"
        elif side.manifest is not None and side.manifest.exit_status != 0:
            yield f"{word}: it did not end with exit status 0"
    old, new = (load.other_ratio for load in found.loads)
    if old is not None and new is not None and abs(new - old) > COMPARE_LOAD_RATIO:
        word = "more" if new > old else "less"
        share = ratio_text(abs(new - old))
        yield f"other processes used {share} {word} of the cores in the new run"
    if len(found.before.inputs.world) != len(found.after.inputs.world):
        yield "the runs have different numbers of ranks: a step is not the same work"


def _kernels(before: ComparedRun, after: ComparedRun) -> tuple[TraceDiff | None, str]:
    for word, side in (("baseline", before), ("new run", after)):
        if not side.analyzer.run.traces.is_dir():
            return None, f"no traces in the {word}: --trace records some"
    try:
        analyses = [TraceQuestions(side.path) for side in (before, after)]
        size = sum(analysis.size_bytes() for analysis in analyses)
        if size > TRACE_LIMIT_BYTES:
            return None, f"traces of {size >> 20} MiB are left to haiprof compare --traces"
        return analyses[0].diff(analyses[1]), ""
    except HaiprofError as error:
        return None, str(error)
    except OSError as error:
        return None, f"traces: {error.strerror or error}"
