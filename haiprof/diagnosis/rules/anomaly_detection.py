"""Autograd's anomaly detection is on while the job trains."""

from __future__ import annotations

import numpy as np

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, typical_rank
from haiprof.diagnosis.setting_prices import MODEL, PRICES, UNKNOWN, lost_ratio, touched_ratio
from haiprof.diagnosis.thresholds import MIN_COUNT, MIN_STEPS, SWITCHED_ON_RATIO
from haiprof.run_analysis.code_samples import CODE_PHASES

RULE = "anomaly_detection"
_WRITERS = ("/traceback.py", "/linecache.py")
"""Where Python writes the stack of each operator that autograd is to name in its errors."""


def anomaly_detection(inputs: RuleInputs) -> Judgement:
    """Fires where it was on at a tenth of the looks, one a second.

    Each operator then has its Python stack written down as text, and each gradient is looked
    through for NaN (torch/csrc/autograd/anomaly_mode.h). What the writing takes is seen in sampled
    stacks of this job; without them a CPU job is judged by the least price measured.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    on = {rank: each.on_ratio("anomaly") for rank, each in inputs.settings.items()}
    ranks = [rank for rank, ratio in on.items() if ratio >= SWITCHED_ON_RATIO]
    if not ranks:
        return None
    ratio = max(on.values())
    seen = writing_ratio(inputs)
    known = [] if inputs.uses_gpu else [lost_ratio(inputs, PRICES["anomaly"], on=ratio)]
    known += [] if seen is None else [seen]
    return Finding(
        rule=RULE,
        title="anomaly detection is on"
        + (f": writing stacks down takes {ratio_text(seen)} of the step" if seen else ""),
        evidence=(
            Evidence(name="on, of the looks at it", value=ratio, unit="ratio"),
            Evidence(name="writing stacks, of the step (samples)", value=seen, unit="ratio"),
            Evidence(
                name="forward and backward, share of the step",
                value=touched_ratio(inputs, MODEL),
                unit="ratio",
            ),
        ),
        remedy="remove torch.autograd.set_detect_anomaly(True) or detect_anomaly(), in Lightning "
        "Trainer(detect_anomaly=True): it is for finding a NaN, not for training",
        confidence=0.9,
        severity="info",
        lost_ratio=max(known, default=None),
        phases=MODEL,
        missing=() if known else (UNKNOWN,),
        rank=ranks[0] if len(ranks) == 1 < len(inputs.world) else None,
    )


def writing_ratio(inputs: RuleInputs) -> float | None:
    """Share of the step in which stacks are written, of the typical rank; None: not sampled."""
    samples = inputs.load_samples(typical_rank(inputs))
    phases = [CODE_PHASES.index(phase) for phase in (*MODEL, "optimizer", "dataloader", "other")]
    chosen = np.isin(samples.phase, phases) & (samples.worker < 0)
    if int(chosen.sum()) < MIN_COUNT:
        return None
    tree = samples.tree
    writes = np.array([f.file.endswith(_WRITERS) for f in tree.frames] or [False], dtype=np.bool_)
    inside = np.zeros(len(tree.parent), dtype=np.bool_)
    for stack in range(1, len(tree.parent)):  # callers come before the called
        inside[stack] = inside[tree.parent[stack]] or writes[tree.place[stack]]
    weight = samples.weight_ns[chosen]
    whole = float(weight.sum())
    return float(weight[inside[samples.stack[chosen]]].sum()) / whole if whole else None
