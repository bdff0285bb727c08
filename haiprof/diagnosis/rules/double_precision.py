"""The model is trained in float64."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.setting_prices import (
    PRICES,
    STEP,
    lost_ratio,
    price_evidence,
    touched_ratio,
)
from haiprof.diagnosis.thresholds import FLOAT64_RATIO, MIN_STEPS
from haiprof.run_analysis.settings import RankSettings

RULE = "double_precision"
_GPU_RATIO = 0.5
"""No GPU does more than half as many float64 operations as float32 ones, and most do 1/32 or 1/64
(CUDA C++ Programming Guide, throughput of native arithmetic instructions); both move twice the
bytes."""


def double_precision(inputs: RuleInputs) -> Judgement:
    """Fires where half of the parameters of what is trained are float64.

    A note where only batches are: whatever they meet is computed in float64 until it is cast, and
    how much that is was not measured.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    shares = {rank: _double_ratio(each) for rank, each in inputs.settings.items()}
    share = max(shares.values())
    if share < FLOAT64_RATIO:
        doubles = [r for r, each in inputs.settings.items() if "float64" in each.input_dtypes]
        return _of_batches(len(doubles)) if doubles else None
    price, busy = PRICES["float64"], max(inputs.gpu_use.values(), default=None)
    if not inputs.uses_gpu:
        lost: float | None = lost_ratio(inputs, price)
    else:
        lost = None if busy is None else touched_ratio(inputs, STEP) * busy * _GPU_RATIO
    return Finding(
        rule=RULE,
        title=f"float64: {ratio_text(share)} of the parameters have twice the bytes of float32",
        evidence=(
            Evidence(name="float64, of what is trained", value=share, unit="ratio"),
            *(() if inputs.uses_gpu else price_evidence(inputs, price)),
        ),
        remedy="train in float32: model.float(), and no torch.set_default_dtype(torch.float64); "
        "arrays of numpy are float64, so that batches made from them need .float()",
        confidence=0.8,
        severity="info",
        lost_ratio=lost,
        phases=price.phases,
        missing=("how busy the GPU is",) if lost is None else (),
    )


def _of_batches(rank_count: int) -> Finding:
    return Finding(
        rule=RULE,
        cause="batches",
        title="float64: the model is called with batches that have twice the bytes of float32",
        evidence=(Evidence(name="ranks with such batches", value=float(rank_count), unit="count"),),
        remedy="make batches float32 where they are made (arrays of numpy are float64): .float(), "
        "np.float32; copies and transfers take half the time then",
        confidence=0.6,
        severity="info",
        missing=("how much is computed in float64 before it is cast",),
    )


def _double_ratio(settings: RankSettings) -> float:
    """Of the parameters of all models that have any to train."""
    trained = [model.dtypes for model in settings.models if model.trainable_ratio]
    whole = sum(sum(dtypes.values()) for dtypes in trained)
    return sum(dtypes.get("float64", 0) for dtypes in trained) / whole if whole else 0.0
