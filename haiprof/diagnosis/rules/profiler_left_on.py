"""A profiler of the job's own records all the time."""

from __future__ import annotations

from haiprof.base.units import ranks_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.setting_prices import PRICES, UNKNOWN, lost_ratio, price_evidence
from haiprof.diagnosis.thresholds import LEFT_ON_RATIO, MIN_STEPS

RULE = "profiler_left_on"


def profiler_left_on(inputs: RuleInputs) -> Judgement:
    """Fires where torch.profiler was on at half of the looks: one with a schedule is not.

    haiprof's own trace windows do not count.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    on = {rank: each.on_ratio("profiler") for rank, each in inputs.settings.items()}
    ranks = [rank for rank, ratio in on.items() if ratio >= LEFT_ON_RATIO]
    if not ranks:
        return None
    ratio, price = max(on.values()), PRICES["profiler"]
    some = len(ranks) < len(inputs.world)
    return Finding(
        rule=RULE,
        title=f"a profiler of the job's own is on {ratio_text(ratio)} of the time"
        + (f", on {ranks_text(ranks)}" if some else ""),
        evidence=(
            Evidence(name="on, of the looks at it", value=ratio, unit="ratio"),
            *(() if inputs.uses_gpu else price_evidence(inputs, price)),
        ),
        remedy="give it a schedule (torch.profiler.schedule(wait=.., warmup=.., active=..)) or "
        "remove it; haiprof run --trace records a few steps and leaves the others alone",
        confidence=0.8,
        severity="info",
        lost_ratio=None if inputs.uses_gpu else lost_ratio(inputs, price, on=ratio),
        phases=price.phases,
        missing=(UNKNOWN,) if inputs.uses_gpu else (),
        rank=ranks[0] if some and len(ranks) == 1 else None,
    )
