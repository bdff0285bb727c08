"""Single steps take far longer than those around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.arrays import Floats
from haiprof.base.statistics.binomial import at_least_p_value
from haiprof.base.units import NS_PER_S, duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, usual_split
from haiprof.diagnosis.thresholds import (
    CORE_WAIT_WARNING_RATIO,
    DRIFT_PHASE_RATIO,
    JITTER_WARNING_RATIO,
    LIKE_RATIO,
    MORE_WORK_RATIO,
    MOST_RATIO,
    PHASE_BEYOND_RATIO,
    ROLLOUT_RATIO,
    SPIKE_MIN_COUNT,
    SPIKE_RATIO,
    SPIKE_WINDOW_STEPS,
    TREND_P_VALUE,
)
from haiprof.diagnosis.work_per_step import MOST_POWER
from haiprof.run_analysis.step_frame import STEP_PHASES

RULE = "jitter"
_OUTSIDE = "outside_the_model"
"""What only some steps do between the phases is no part of the usual one. Other phases are left:
a queue of batches that runs empty every so many steps is the loader's, too."""
_COLUMNS = ["step_ns", *(f"{phase}_host_ns" for phase in STEP_PHASES)]
_LOOKED_AT = ["step_ns", "forward_host_ns", "backward_host_ns"]
"""Of all ranks; the others of the one that is judged."""
_NAMES = {"gc": "garbage collections", "save": "checkpoint saves"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spikes:
    """The spikes of one rank."""

    rank: int
    steps: Floats
    """Numbers of the steps that are spikes."""
    usual_ns: float
    excess_ns: float
    """Beyond the usual step, all of them together."""
    whole_ns: float
    by_phase: dict[str, float]
    """Of the excess, by phase."""
    main_phase: dict[str, int]
    """Spikes by the phase that holds most of what each of them takes longer."""

    @property
    def share(self) -> float:
        return self.excess_ns / max(self.whole_ns, 1.0)


def jitter(inputs: RuleInputs) -> Judgement:
    """Fires where spikes in all parts of the run take a tenth of the time beyond usual steps."""
    if min(steps.height for steps in inputs.by_rank.values()) < SPIKE_WINDOW_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {SPIKE_WINDOW_STEPS} steps after warm-up")
    shares = sorted((_spike_share(steps), rank) for rank, steps in inputs.by_rank.items())
    share, rank = shares[(len(shares) - 1) // 2]
    compiled = _compile_ratio(inputs, rank)
    if share - compiled < JITTER_WARNING_RATIO:
        return None
    steps, calls = inputs.of_rank(rank), inputs.calls_without_gradients(rank)
    if _spike_share(steps, calls) - compiled < JITTER_WARNING_RATIO:
        return None
    spikes = _spikes(rank, steps, calls)
    return _finding(inputs, spikes) if _all_over(inputs, spikes) else None


def _compile_ratio(inputs: RuleInputs, rank: int) -> float:
    """What torch.compile took of the time: a new shape is compiled once, and is no jitter."""
    begin, end = inputs.window_ns
    lines = inputs.last_attempts.compilations.filter(
        (pl.col("rank") == rank) & pl.col("time_ns").is_between(begin, end + NS_PER_S)
    )
    spent = lines.sort("time_ns")["spent_ns"].to_list()
    return (spent[-1] - spent[0]) / max(end - begin, 1) if spent else 0.0


def _spike_share(steps: pl.DataFrame, calls: pl.DataFrame | None = None) -> float:
    """What spikes take beyond the steps around them, of the time; the longest one left out.

    One late event is no jitter, however long it took.
    """
    columns = _LOOKED_AT if calls is None else _COLUMNS
    numbers = steps.select(pl.col(columns).fill_null(0).cast(pl.Float64))
    around = _around(steps, numbers, calls)
    beyond = numbers["step_ns"] - around["step_ns"]
    beyond = beyond.filter(_is_spike(steps, numbers, around))
    rest = float(beyond.sum()) - float(beyond.max() or 0.0)  # type: ignore[arg-type]
    return rest / max(float(numbers["step_ns"].sum()), 1.0)


def _around(steps: pl.DataFrame, numbers: pl.DataFrame, calls: pl.DataFrame | None) -> pl.DataFrame:
    """What the steps of the same kind around each one take: their median.

    A step with more calls of models without gradients than usual is of another kind (a rollout
    comes before every so many updates). Of those, what lies between the phases grows with the
    calls: an episode may be longer than another one.

    Args:
        steps: Of one rank.
        numbers: `_COLUMNS` of them; `_LOOKED_AT` are enough without calls.
        calls: As `RuleInputs.calls_without_gradients`; None: all steps are of one kind.
    """
    if calls is None or calls.is_empty():
        return numbers.select(_median_around(pl.all()))
    made = steps.select("step").join(calls, on="step", how="left", maintain_order="left")
    count = made["count"].fill_null(0).cast(pl.Float64)
    part = made["own_ns"].fill_null(0) / numbers["other_host_ns"].clip(1.0)
    kind = (count > count.median()) & (part >= ROLLOUT_RATIO)
    table = numbers.with_columns(count=count, kind=kind)
    found = table.select(_median_around(pl.exclude("kind")).over("kind"))
    longer = (count / found["count"].clip(1.0)).clip(1.0) - 1.0
    more = found["other_host_ns"] * longer * kind.cast(pl.Float64)
    grown = pl.col("step_ns", "other_host_ns") + more
    return found.with_columns(grown).select(_COLUMNS)


def _median_around(columns: pl.Expr) -> pl.Expr:
    return columns.rolling_median(SPIKE_WINDOW_STEPS, min_samples=1, center=True)


def _is_spike(steps: pl.DataFrame, numbers: pl.DataFrame, around: pl.DataFrame) -> pl.Series:
    """Steps that take half again as long as those around them, and are of the same kind.

    Another kind of step has another number of backward passes, or more work: forward and backward
    are both longer by a good part, as with a longer sequence or a larger batch, and most of what
    the step takes longer is theirs.
    """
    whole, usual = numbers["step_ns"], around["step_ns"]
    names = ("forward_host_ns", "backward_host_ns")
    grown = [numbers[name] / around[name].clip(1.0) for name in names]
    less, more = pl.DataFrame(grown).min_horizontal(), pl.DataFrame(grown).max_horizontal()
    alike = (more < less * LIKE_RATIO) | (more < less**MOST_POWER)
    theirs = numbers.select(names).sum_horizontal() - around.select(names).sum_horizontal()
    works = (less > MORE_WORK_RATIO) & alike & (theirs > DRIFT_PHASE_RATIO * (whole - usual))
    passes = steps["micro_step_count"]
    return (whole > SPIKE_RATIO * usual) & ~works & (passes == passes.median())


def _spikes(rank: int, steps: pl.DataFrame, calls: pl.DataFrame) -> _Spikes:
    """Steps that take half again as long as the median of those around them."""
    numbers = steps.select(pl.col(_COLUMNS).fill_null(0).cast(pl.Float64))
    around = _around(steps, numbers, calls)
    whole, usual = numbers["step_ns"].to_numpy(), around["step_ns"].to_numpy()
    spike = np.flatnonzero(_is_spike(steps, numbers, around).to_numpy())
    phases = _COLUMNS[1:]
    excess = (numbers[phases].to_numpy() - around[phases].to_numpy())[spike]
    main = np.bincount(excess.argmax(axis=1), minlength=len(STEP_PHASES))
    return _Spikes(
        rank=rank,
        steps=steps["step"].to_numpy()[spike],
        usual_ns=float(np.median(usual)),
        excess_ns=float((whole - usual)[spike].sum()),
        whole_ns=float(whole.sum()),
        by_phase=dict(zip(STEP_PHASES, excess.sum(axis=0).tolist(), strict=True)),
        main_phase=dict(zip(STEP_PHASES, main.tolist(), strict=True)),
    )


def _all_over(inputs: RuleInputs, spikes: _Spikes) -> bool:
    """Whether there are some in each half of the run: what happens once is no jitter."""
    if len(spikes.steps) < SPIKE_MIN_COUNT:
        return False
    all_steps = inputs.of_rank(spikes.rank)["step"].to_numpy()
    middle = all_steps[len(all_steps) // 2]
    late = spikes.steps >= middle
    return bool(late.any() and not late.all())


def _finding(inputs: RuleInputs, spikes: _Spikes) -> Finding:
    phase = max(spikes.by_phase, key=lambda name: spikes.by_phase[name])
    part = spikes.by_phase[phase] / max(spikes.excess_ns, 1.0)
    usual = usual_split(inputs.of_rank(spikes.rank))[phase] or 0.0
    share = min(PHASE_BEYOND_RATIO * usual / max(spikes.usual_ns, 1.0), MOST_RATIO)
    named = part >= max(DRIFT_PHASE_RATIO, share) and not _by_chance(inputs, spikes, phase, usual)
    pause = _pause(inputs, spikes)
    count = len(spikes.steps)
    mean = spikes.excess_ns / count
    where = _NAMES[pause] if pause else phase if named else "several phases alike"
    cause = pause or (phase if named else "all_phases")
    return Finding(
        rule=RULE,
        title=f"jitter: {count} steps take {duration_text(mean)} longer than those around them, "
        f"{ratio_text(spikes.share)} of the time, mostly in {where}",
        evidence=(
            Evidence(name="time beyond the usual step", value=spikes.share, unit="ratio"),
            Evidence(name="steps half again as long as usual", value=float(count), unit="count"),
            Evidence(name="usual step", value=spikes.usual_ns, unit="ns"),
            Evidence(name="mean excess of such a step", value=mean, unit="ns"),
            Evidence(name=f"of the excess in {phase}", value=spikes.by_phase[phase], unit="ns"),
        ),
        remedy=_remedy(inputs, phase if named else None, pause),
        confidence=0.7 if named or pause else 0.5,
        lost_ratio=spikes.share,
        missing=("what happens in these steps: --keep-slow traces them",),
        cause=cause,
        explains=(_OUTSIDE,) if cause == "other" else (),
    )


def _by_chance(inputs: RuleInputs, spikes: _Spikes, phase: str, usual_ns: float) -> bool:
    """Whether a thread that waits for cores would have as many spikes in that phase.

    Waiting hits each phase by its length: the count is binomial then.
    """
    if inputs.core_waits.get(spikes.rank, 0.0) < CORE_WAIT_WARNING_RATIO:
        return False
    share, count = min(usual_ns / max(spikes.usual_ns, 1.0), 1.0), len(spikes.steps)
    return at_least_p_value(spikes.main_phase[phase], count, share) >= TREND_P_VALUE


def _pause(inputs: RuleInputs, spikes: _Spikes) -> str | None:
    """What interrupted the steps for half of the excess."""
    own = inputs.pauses.filter(
        (pl.col("rank") == spikes.rank) & pl.col("step").is_in(spikes.steps.tolist())
    )
    sums = own.group_by("phase").agg(pl.col("duration_ns").sum()).sort(-pl.col("duration_ns"))
    if sums.is_empty() or sums["duration_ns"][0] < DRIFT_PHASE_RATIO * spikes.excess_ns:
        return None
    return str(sums["phase"][0])


def _remedy(inputs: RuleInputs, phase: str | None, pause: str | None) -> str:
    if pause == "gc":
        return "gc.freeze() after set-up, and gc.collect() at steps of your choice, on all ranks"
    if pause == "save":
        return "save less often, or on another thread"
    look = {
        "dataloader": "single samples that are slow, a queue that runs empty (prefetch_factor)",
        "forward": "inputs whose length varies (sort by length), compilation for new shapes",
        "backward": ("the network, a rank that is late, " if len(inputs.world) > 1 else "")
        + "inputs whose length varies",
        "optimizer": "work that is done every so many steps: averaging, clipping, logging of norms",
        "other": "logging, metrics, uploads every so many steps",
    }.get(phase or "", "other load on the machine, memory pressure")
    return f"look at the slowest steps (haiprof rank): {look}"
