"""Evaluation takes a good part of the job."""

from __future__ import annotations

from haiprof.diagnosis.facts import Facts
from haiprof.diagnosis.finding import Evidence, Finding, Judgement
from haiprof.diagnosis.thresholds import EVALUATION_RATIO
from haiprof.units import ratio_text

RULE = "evaluation_heavy"


def evaluation_heavy(facts: Facts) -> Judgement:
    """Fires where evaluation takes a third of the time or more, training being the rest."""
    evaluation = facts.ranks["eval_ns"].max()
    if not isinstance(evaluation, int) or not evaluation:
        return None
    training = facts.training_ns
    share = evaluation / max(evaluation + training, 1.0)
    if share < EVALUATION_RATIO:
        return None
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"evaluation takes {ratio_text(share)} of the recorded time",
        evidence=(
            Evidence(name="evaluation", value=float(evaluation), unit="ns"),
            Evidence(name="training steps", value=training, unit="ns"),
            Evidence(name="evaluation's share of both", value=share, unit="ratio"),
        ),
        remedy="evaluate less often or on fewer batches; a larger batch needs no gradients' memory",
        confidence=0.9,
    )
