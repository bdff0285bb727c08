"""Steps became slower over the run: little by little, or at one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from haiprof.base.statistics.change_point import Rise, rise
from haiprof.base.units import NS_PER_S, duration_text, ratio_text
from haiprof.diagnosis.core_contention import cores_of_others
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.python_time import new_code_ratio
from haiprof.diagnosis.rule_inputs import RuleInputs, typical_rank
from haiprof.diagnosis.slow_rank import KEEP_MEMORY
from haiprof.diagnosis.steal import explain_by_steal
from haiprof.diagnosis.thresholds import (
    COMPARE_SHARED_CORE_RATIO,
    CORE_WAIT_WARNING_RATIO,
    DRIFT_MAIN_RATIO,
    DRIFT_MIN_STEPS,
    DRIFT_P_VALUE,
    DRIFT_PHASE_RATIO,
    DRIFT_RATIO,
    EXPLAINED_RATIO,
    FAULT_NS,
    HARDWARE_DIFFERENCE_RATIO,
    MOST_RATIO,
    NOTE_SURE,
    PHASE_BEYOND_RATIO,
    PLAIN_DRIFT_RATIO,
    STARVING_CORES,
)
from haiprof.diagnosis.work_per_step import MOST_POWER, grew_like_work, work_growth
from haiprof.run_analysis.step_frame import STEP_PHASES

RULE = "step_time_drift"
SINCE_STEP = "slower since step"
"""Name of the evidence that says since when."""
_WORK_UNKNOWN = "whether the work per step changed (sequence length, curriculum)"
_ALL_PHASES = "_all_phases"
_STARVED = "waiting for cores began"
_FAULTED = "page faults began"
_ONCE = {"gc": "a garbage collection came", "save": "a checkpoint was saved"}
"""By the kind of pause: what came once proves nothing of the steps that follow."""


def step_time_drift(inputs: RuleInputs) -> Judgement:
    """Fires where the last third of the steps is a fifth slower than the first, beyond chance.

    Steps that have more to do are no drift: what larger inputs or more passes may explain is taken
    off first (`work_per_step`). Where sizes are not known (inputs of a class of their own), steps
    whose forward and backward alone grew, and by the same factor, are left alone.
    """
    columns = [f"{phase}_host_ns" for phase in STEP_PHASES]
    series = inputs.steps.group_by("step").agg(pl.col("step_ns", *columns).mean()).sort("step")
    if series.height < DRIFT_MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {DRIFT_MIN_STEPS} steps after warm-up")
    found = rise(series["step_ns"].to_numpy())
    if found.growth < DRIFT_RATIO or found.p_value >= DRIFT_P_VALUE:
        return None
    since = int(series["step"][found.since])
    of_step = inputs.steps.filter(pl.col("step") == since)
    began_ns: int = of_step.select(pl.col("start_ns").min()).item()
    lost = _steal_growth(inputs, began_ns)
    if found.growth - lost < DRIFT_RATIO:
        return Abstention(rule=RULE, why=explain_by_steal(ratio_text(found.growth), lost))
    work = work_growth(inputs)
    expected = max(work or 1.0, 1.0) ** MOST_POWER
    if (1.0 + found.growth) / expected < 1.0 + DRIFT_RATIO:
        return Abstention(rule=RULE, why=_more_work(found.growth, work))
    if work is None and grew_like_work(series):
        return Abstention(rule=RULE, why=_alike_work(found.growth))
    third = series.height // 3
    grown = {phase: _growth(series[f"{phase}_host_ns"], third) for phase in STEP_PHASES}
    phase = max(grown, key=lambda name: grown[name])
    part = grown[phase] / max(found.after - found.before, 1.0)
    before = float(np.median(series[f"{phase}_host_ns"].fill_null(0.0).to_numpy()[:third]))
    share = min(PHASE_BEYOND_RATIO * before / max(found.before, 1.0), MOST_RATIO)
    named = part >= max(DRIFT_PHASE_RATIO, share)
    changed = tuple(_changes(inputs, since, began_ns)) if found.is_sudden else ()
    changed = (*_fault_growth(inputs, found.growth, began_ns), *changed)
    own = named and _is_new_code(inputs, phase, since)
    if not own:  # which itself waits for a core, and so is no sign of what others do
        changed = (*_core_wait_growth(inputs, found.growth, began_ns), *changed)
    finding = _finding(series, found, phase if named else None, grown[phase], changed)
    if named and not own and _is_hardly_seen(inputs, series, found, changed):
        finding = replace(finding, confidence=NOTE_SURE)
    finding = _per_work(finding, series, found, work=work, expected=expected)
    if not named:
        finding = _beside_others(finding, inputs, found.growth)
    elif not own and _is_crowded(inputs):
        finding = replace(
            finding, cause=f"{str(finding.cause).removesuffix(_ALL_PHASES)}{_ALL_PHASES}"
        )
    if named and phase == "backward" and len(inputs.world) > 1:
        return _as_wait(finding)
    return replace(finding, is_own_work=own)


def _is_crowded(inputs: RuleInputs) -> bool:
    """Whether a rank waits for cores that others use: then a phase may grow by that alone.

    Which one is chance: a few long waits fall into the phase that runs then, mostly the longest.
    """
    used = cores_of_others(inputs)
    waits = [inputs.core_waits.get(r, 0.0) for r in used if used[r] >= STARVING_CORES]
    return max(waits, default=0.0) >= CORE_WAIT_WARNING_RATIO


def _is_new_code(inputs: RuleInputs, phase: str, since: int) -> bool:
    samples = inputs.load_samples(typical_rank(inputs))
    return new_code_ratio(samples, phase, since) >= DRIFT_PHASE_RATIO


def _is_hardly_seen(
    inputs: RuleInputs, series: pl.DataFrame, found: Rise, changed: Sequence[tuple[str, Evidence]]
) -> bool:
    """Whether few steps lie on one side of a small rise, or all that came with it came once.

    Where fewer than half of the first third lie before it, that third was not faster because of
    it: steps became longer from the first one on, as where a job fills what it keeps by design (an
    optimizer's history, caches). And what came once proves nothing of the steps that follow.
    """
    if not found.is_sudden or found.growth >= PLAIN_DRIFT_RATIO:
        return False
    phases = [phase for phase, what in _ONCE.items() if what in [name for name, _ in changed]]
    pauses = inputs.pauses.filter(pl.col("phase").is_in(phases))
    count = pauses.group_by("rank").len()["len"].max() or 0  # of each rank, which all have theirs
    once = bool(changed) and len(phases) == len(changed) == count
    return once or min(found.since, series.height - found.since) < series.height // 3 / 2


def _finding(
    series: pl.DataFrame,
    found: Rise,
    phase: str | None,
    grown: float,
    changed: tuple[tuple[str, Evidence], ...],
) -> Finding:
    where = f"most of it in {phase}" if phase else "in several phases alike"
    lasting = [what for what, _ in changed if what not in _ONCE.values()]
    is_plain = bool(lasting) or found.growth >= PLAIN_DRIFT_RATIO
    since = int(series["step"][found.since])
    when = f"at step {since}" if found.is_sudden else f"little by little, since about step {since}"
    return Finding(
        rule=RULE,
        title=f"steps became {ratio_text(found.growth)} slower {when}, {where}"
        + (f"; {changed[0][0]} then too" if changed else ""),
        evidence=(
            Evidence(name="median step, first third", value=found.before, unit="ns"),
            Evidence(name="median step, last third", value=found.after, unit="ns"),
            Evidence(name=f"growth of {phase or 'the phase with most'}", value=grown, unit="ns"),
            Evidence(name=SINCE_STEP, value=float(since), unit="count"),
            Evidence(name="p (Mann-Whitney U), at most", value=DRIFT_P_VALUE, unit=""),
            *(evidence for _, evidence in changed),
        ),
        remedy=_remedy(phase, grown, changed),
        confidence=0.7 if phase else 0.4 if is_plain else NOTE_SURE,
        lost_ratio=_lost_ratio(series, found),
        missing=(_WORK_UNKNOWN,),
        cause=("sudden" if found.is_sudden else "gradual") + _alike(phase, changed),
        explains=(
            *(_BOUND[phase] if phase and _is_main(series, phase, grown) else ()),
            *(_OWN_IN_FORWARD if phase == "forward" else ()),
        ),
    )


def _per_work(
    finding: Finding, series: pl.DataFrame, found: Rise, *, work: float | None, expected: float
) -> Finding:
    """The same with what is known of the work per step: larger inputs cost what they cost."""
    if work is None:
        return finding
    usual = replace(found, before=min(found.before * expected, found.after))
    size = Evidence(name="work of a step (numbers in its inputs), times", value=work, unit="")
    return replace(
        finding,
        evidence=(*finding.evidence, size),
        lost_ratio=_lost_ratio(series, usual),
        missing=tuple(lack for lack in finding.missing if lack != _WORK_UNKNOWN),
    )


def _beside_others(finding: Finding, inputs: RuleInputs, growth: float) -> Finding:
    """A note where others use cores of a rank's node, and all phases grew alike.

    They need not take cores away for that: what runs on the other half of a physical core, or on
    the same caches, makes work up to half again as long (COMPARE_SHARED_CORE_RATIO), and nobody
    counts it.
    """
    most = max(cores_of_others(inputs).values(), default=0.0)
    if most < STARVING_CORES or growth > COMPARE_SHARED_CORE_RATIO:
        return finding
    others = Evidence(name="cores used by others on its node", value=most, unit="cores")
    unsure = min(finding.confidence, NOTE_SURE)
    return replace(finding, evidence=(*finding.evidence, others), confidence=unsure)


def _more_work(growth: float, work: float | None) -> str:
    return f"steps became {ratio_text(growth)} slower as their inputs grew to {work:.2g} times"


def _alike_work(growth: float) -> str:
    return (
        f"steps became {ratio_text(growth)} slower, in forward and backward by the same factor, as "
        "with larger inputs, whose sizes are not known"
    )


def _alike(phase: str | None, changed: Sequence[tuple[str, Evidence]]) -> str:
    """Of the cause: whether what slows down a whole machine may have done it."""
    return "" if phase and not _is_starved(changed) else _ALL_PHASES


def _is_starved(changed: Sequence[tuple[str, Evidence]]) -> bool:
    return any(what == _STARVED for what, _ in changed)


def _as_wait(finding: Finding) -> Finding:
    """The same where ranks wait for each other in backward: whichever phase of any rank grew."""
    return replace(
        finding,
        cause=f"{str(finding.cause).removesuffix(_ALL_PHASES)}{_ALL_PHASES}",
        remedy=f"{finding.remedy}; or a rank that became late, for which the others wait there",
        confidence=min(finding.confidence, 0.5),
    )


def _lost_ratio(series: pl.DataFrame, found: Rise) -> float:
    """Share of the time of all steps that the first third's pace would have saved."""
    whole = float(series["step_ns"].sum())
    return min(max(1.0 - found.before * series.height / max(whole, 1.0), 0.0), 1.0)


def _steal_growth(inputs: RuleInputs, began_ns: int) -> float:
    """By how much steps became longer as the hypervisor took more of the cores.

    Work that took 1 takes 1 / (1 - steal): of the host on which that grew most; 0 where none did.
    """
    after = pl.col("time_ns") >= began_ns
    sides = inputs.counted.stolen.group_by("host").agg(
        pl.col("value").filter(~after).mean().alias("before"),
        pl.col("value").filter(after).mean().alias("after"),
    )
    rows = sides.drop_nulls().select("before", "after").rows()
    return max([(1 - b) / (1 - a) - 1 for b, a in rows if b < a < 1], default=0.0)


_BOUND = {
    "dataloader": ("dataloader_bound",),
    "forward": ("forward_bound",),
    "backward": ("backward_bound",),
    "optimizer": ("optimizer_bound",),
    "other": ("outside_the_model",),
}
"""What a phase's growth brings about."""
_OWN_IN_FORWARD = ("forward_bound/python", "forward_bound/waits")
"""They cost what the job's own code takes, and no more: the growth may be most of that."""


def _is_main(series: pl.DataFrame, phase: str, grown: float) -> bool:
    """Whether the phase is as long as it is because it grew."""
    last = series[f"{phase}_host_ns"].fill_null(0.0).to_numpy()[-(series.height // 3) :]
    return grown >= DRIFT_MAIN_RATIO * float(np.median(last))


_ALIKE = (
    "all phases grew: look at the machine, not the code: other load on its CPUs "
    "(haiprof overview shows them), temperature"
)
_CORES_FIRST = "give the job cores of its own (haiprof overview shows who has them), then "


def _growth(values: pl.Series, third: int) -> float:
    """Of the medians, last third against first; 0 where the phase is not measured."""
    numbers = values.fill_null(0.0).to_numpy()
    return float(np.median(numbers[-third:]) - np.median(numbers[:third]))


def _most_grown(
    inputs: RuleInputs, metric: str, *, before: pl.Expr, after: pl.Expr
) -> tuple[float, float]:
    """A counter before and since something, of the rank on which it grew most; zeros: not known."""
    points = inputs.counted.points.filter(pl.col("metric") == metric)
    sides = points.group_by("rank").agg(before=before, after=after)
    known = sides.drop_nulls().select("before", "after").rows()
    return max(known, key=lambda row: row[1] - row[0], default=(0.0, 0.0))


def _core_wait_growth(
    inputs: RuleInputs, growth: float, began_ns: int
) -> Iterable[tuple[str, Evidence]]:
    """Waiting for cores, where it grew by enough to make most of the growth.

    Work that took 1 takes 1 / (1 - wait): from 60 % to 70 % makes steps a third longer. Each rank
    by itself, as one that waits holds up all.
    """
    later = pl.col("time_ns") >= began_ns
    before, after = _most_grown(
        inputs,
        "run_queue_wait_ratio",
        before=pl.col("value").filter(~later).mean(),
        after=pl.col("value").filter(later).mean(),
    )
    after = min(after, MOST_RATIO)
    longer = (1.0 - before) / (1.0 - after) - 1.0 if before < after else 0.0
    if after - before >= HARDWARE_DIFFERENCE_RATIO or longer >= EXPLAINED_RATIO * growth:
        evidence = Evidence(name="wait for cores from then on", value=after, unit="ratio")
        yield _STARVED, evidence


def _fault_growth(
    inputs: RuleInputs, growth: float, began_ns: int
) -> Iterable[tuple[str, Evidence]]:
    """Page faults, where they became so many that they make most of the growth, on one rank.

    The first points are of the warm-up too, which has many: so the lower quarter counts of them.
    """
    later = pl.col("time_ns") >= began_ns
    before, after = _most_grown(
        inputs,
        "page_fault_count_per_s",
        before=pl.col("value").filter(~later).quantile(0.25),
        after=pl.col("value").filter(later).median(),
    )
    if (after - before) * FAULT_NS / NS_PER_S >= EXPLAINED_RATIO * growth / (1.0 + growth):
        yield (
            _FAULTED,
            Evidence(name="page faults per second from then on", value=after, unit="count"),
        )


def _changes(inputs: RuleInputs, since: int, began_ns: int) -> Iterable[tuple[str, Evidence]]:
    """What else is different after that step: saves, compilations."""
    compiled = inputs.last_attempts.compilations.filter(pl.col("time_ns") >= began_ns)[
        "count"
    ].to_list()
    if len(compiled) > 1:
        count = float(max(compiled) - min(compiled))
        yield "compilations began", Evidence(name="compilations since", value=count, unit="count")
    near = inputs.pauses.filter(pl.col("step").is_between(since - 1, since))
    longest = near.group_by("phase").agg(pl.col("duration_ns").max()).sort("phase")
    for phase, length in longest.rows():
        yield _ONCE[phase], Evidence(name=f"longest {phase} there", value=float(length), unit="ns")


def _remedy(phase: str | None, growth: float, changed: Sequence[tuple[str, Evidence]]) -> str:
    if any(what == _FAULTED for what, _ in changed):
        return KEEP_MEMORY
    if phase is None:
        return _ALIKE
    look = {
        "dataloader": "storage, page cache and worker memory: does the dataset hold on to samples?",
        "forward": "lists or caches that grow, sequence lengths",
        "backward": "graphs that are kept (loss added up without .item()), growing lengths",
        "optimizer": "parameter groups that grow, swapping",
        "other": "logging, metrics and checkpoints between the phases",
    }[phase]
    first = _CORES_FIRST * _is_starved(changed)
    return f"{first}see what grew by {duration_text(growth)} in {phase}: {look}"
