"""A rank was run with other settings than the others."""

from __future__ import annotations

from haiprof.base.units import ranks_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.run_analysis.settings import Difference, differences

RULE = "settings_differ"


def settings_differ(inputs: RuleInputs) -> Judgement:
    """Fires where most ranks have a setting in common and a few have another one.

    A note: what it costs is said by the rule on that setting, or by the one on the slow rank.
    """
    if len(inputs.settings) < 2:
        return Abstention(rule=RULE, why="settings of fewer than two ranks were recorded")
    found = differences(inputs.settings)
    if not found:
        return None
    ranks = sorted({rank for difference in found for rank in difference.others})
    return Finding(
        rule=RULE,
        title=f"{ranks_text(ranks)} with other settings: " + "; ".join(map(_text, found)),
        evidence=(Evidence(name="settings that differ", value=float(len(found)), unit="count"),),
        remedy="give all ranks the same; what is set under `if rank == 0` may make the others wait",
        confidence=0.9,
        severity="info",
        rank=ranks[0] if len(ranks) == 1 else None,
    )


def _text(difference: Difference) -> str:
    values = sorted({str(value) for value in difference.others.values()})
    return f"{difference.name} {' or '.join(values)} in place of {difference.usual}"
