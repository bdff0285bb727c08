"""Evaluation takes a good part of the job."""

from __future__ import annotations

import polars as pl

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import ALONE_RATIO, EVALUATION_RATIO

RULE = "evaluation_heavy"


def evaluation_heavy(inputs: RuleInputs) -> Judgement:
    """Fires where evaluation takes a fifth of the time, or a tenth while other ranks wait for it.

    What torch.compile worked in the meantime is taken off: a first evaluation compiles.
    """
    evaluated = {
        rank: max(float(ns or 0) - _compile_ns(inputs, rank), 0.0)
        for rank, ns in inputs.ranks.select("rank", "eval_ns").rows()
        if rank in inputs.by_rank
    }
    if not any(evaluated.values()):
        return None
    rank = max(evaluated, key=lambda r: (evaluated[r], -r))
    evaluation = evaluated[rank]
    others = [ns for other, ns in evaluated.items() if other != rank]
    alone = bool(others) and max(others) < ALONE_RATIO * evaluation
    training = inputs.trained_ns.get(rank, 0.0)
    share = evaluation / max(evaluation + training, 1.0)
    if share < (ALONE_RATIO if alone else EVALUATION_RATIO):
        return None
    who = f"rank {rank} evaluates alone while the others wait: " if alone else "evaluation takes "
    return Finding(
        rule=RULE,
        title=f"{who}{ratio_text(share)} of the recorded time",
        evidence=(
            Evidence(name="evaluation, without compiling", value=evaluation, unit="ns"),
            Evidence(name="training steps", value=training, unit="ns"),
            Evidence(name="evaluation's share of both", value=share, unit="ratio"),
        ),
        remedy="let all ranks evaluate a part each, less often or on fewer batches"
        if alone
        else "evaluate less often or on fewer batches; a larger batch needs no gradients' memory",
        confidence=0.9,
        lost_ratio=share,
        rank=rank if alone else None,
        explains=("late_rank", "ranks_uneven", "jitter", "data_imbalance") if alone else (),
    )


def _compile_ns(inputs: RuleInputs, rank: int) -> float:
    """What torch.compile took of a rank's evaluations; all that it took where none tells when."""
    ranks = inputs.ranks.filter(pl.col("rank") == rank).sort("attempt")
    inside = ranks["eval_compile_ns"][-1] if ranks.height else None
    if isinstance(inside, int):
        return float(inside)
    spent = inputs.last_attempts.compilations.filter(pl.col("rank") == rank)["spent_ns"].max()
    return float(spent) if isinstance(spent, int) else 0.0
