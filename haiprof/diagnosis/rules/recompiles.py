"""torch.compile compiles again and again while the job trains."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.intervals import covered_lengths
from haiprof.base.units import NS_PER_S, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    COMPILE_MIN_COUNT,
    COMPILE_WARNING_RATIO,
    MIN_STEPS,
)

RULE = "recompiles"


def recompiles(inputs: RuleInputs) -> Judgement:
    """Fires where compiling takes a tenth of the time after the first steps.

    Compilations are counted once a second, so those of the last second before the judged steps may
    be among them: the first count after their begin is where counting starts.
    """
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    lines = inputs.last_attempts.compilations
    if lines.is_empty():
        return Abstention(rule=RULE, why="torch.compile was not used")
    begin, end = inputs.window_ns
    found = [
        _compile_growth(inputs, rows, begin, end)
        for rows in lines.sort("rank", "time_ns").partition_by("rank", maintain_order=True)
    ]
    count, spent, covered, rank = max(found, key=lambda row: (row[1], -row[3]))
    share = spent / max(covered, 1)
    if count < COMPILE_MIN_COUNT or share < COMPILE_WARNING_RATIO:
        return None
    return Finding(
        rule=RULE,
        title=f"recompiles: torch.compile works {ratio_text(share)} of the time, {count} "
        "compilations after the first steps",
        evidence=(
            Evidence(name="compiling, of the time", value=share, unit="ratio"),
            Evidence(name="compilations", value=float(count), unit="count"),
            Evidence(name="mean compilation", value=spent / count, unit="ns"),
        ),
        remedy="TORCH_LOGS=recompiles names the guard that fails. Usually a shape that varies: pad "
        "to a few lengths, mark it with torch._dynamo.mark_dynamic, or compile(dynamic=True); or a "
        "Python number or object that changes each step: make it a tensor",
        confidence=0.9,
        lost_ratio=min(share, 1.0),
        rank=rank if len(inputs.world) > 1 else None,
        explains=("forward_bound", "backward_bound", "jitter", "step_time_drift", "ranks_uneven"),
    )


def _compile_growth(
    inputs: RuleInputs, rows: pl.DataFrame, begin: int, end: int
) -> tuple[int, int, int, int]:
    """(compilations, ns spent, ns covered, rank) from the first count in the window on.

    A second of allowance at the end: the last count comes with the drain after the last step. Where
    the rank tells when it compiled, backward graphs count too, and a time counts once.
    """
    inside = rows.filter(pl.col("time_ns").is_between(begin, end + NS_PER_S))
    rank = int(rows["rank"][0])
    if inside.height < 2:
        return 0, 0, 1, rank
    count, spent = (int(inside[name][-1] - inside[name][0]) for name in ("count", "spent_ns"))
    first = int(inside["time_ns"][0])
    compiling = inputs.last_attempts.compiling.get(rank)
    if compiling is not None and len(compiling.starts):
        spent = int(covered_lengths(compiling, np.array([first]), np.array([end]))[0])
    return count, spent, end - first, rank
