"""The optimizer takes longer than forward and backward together."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import (
    RuleInputs,
    own_wait_ratio,
    typical_rank,
    usual_phases,
)
from haiprof.diagnosis.thresholds import (
    HELD_STEP_RATIO,
    MIN_STEPS,
    OPTIMIZER_MODEL_RATIO,
    OPTIMIZER_STEP_RATIO,
    OWN_STEP_RATIO,
    SEEN_SURE,
    USUAL_OPTIMIZER_RATIO,
)

RULE = "optimizer_bound"
_SEARCHES = ("LBFGS",)
_FEW_KERNELS = "let it run as few kernels: fused=True or foreach=True"
_ONE_PASS = "fused=True reads the parameters once, where the optimizer has that for CPUs"


def optimizer_bound(inputs: RuleInputs) -> Judgement:
    """Fires where the optimizer takes more than the model, and a good part of the step.

    An optimizer that calls the model itself is a search, and its own algebra is the method (torch's
    L-BFGS: two products with each of a hundred kept vectors, Nocedal 1980): only Python that holds
    the interpreter counts there.
    """
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    medians = usual_phases(inputs, "forward", "backward", "optimizer")
    if medians is None:
        return Abstention(rule=RULE, why="forward, backward or optimizer is not measured")
    clock, (forward, backward, optimizer, whole) = medians
    model = forward + backward
    ratio, share = optimizer / max(model, 1.0), optimizer / whole
    code = None if inputs.uses_gpu else inputs.python_time("optimizer")
    held = code.held_ratio * share if code else 0.0
    waits = own_wait_ratio(inputs, code, share) if code else 0.0
    bound = ratio >= OPTIMIZER_MODEL_RATIO and share >= OPTIMIZER_STEP_RATIO
    bound = bound and not _searches(inputs)
    if not bound and held < HELD_STEP_RATIO and waits < OWN_STEP_RATIO:
        return None
    return Finding(
        rule=RULE,
        title=f"optimizer-bound: the optimizer takes {ratio_text(share)} of the step, "
        f"{ratio:.1f}x forward and backward",
        evidence=(
            Evidence(name=f"optimizer ({clock} time)", value=optimizer, unit="ns"),
            Evidence(name=f"forward and backward ({clock} time)", value=model, unit="ns"),
            Evidence(name="optimizer / both", value=ratio, unit=""),
            Evidence(name="optimizer, share of the step", value=share, unit="ratio"),
        ),
        remedy=f"{_FEW_KERNELS if inputs.uses_gpu else _ONE_PASS}; no Python loop over the "
        "parameters in an optimizer of your own or in step hooks; a larger batch or gradient "
        "accumulation makes updates rarer",
        confidence=SEEN_SURE
        if max(held, waits) >= HELD_STEP_RATIO
        else 0.75
        if ratio >= 2 * OPTIMIZER_MODEL_RATIO
        else 0.6,
        lost_ratio=max(share - USUAL_OPTIMIZER_RATIO * model / whole, held, waits),
        missing=("which part of it is slow: a trace with --trace-stacks would say",),
        explains=("backward_bound/gradients",),  # parameters so large that all of them is dear
    )  # fmt: skip


def _searches(inputs: RuleInputs) -> bool:
    """Whether an optimizer of the typical rank is one that evaluates the loss by itself."""
    settings = inputs.settings.get(typical_rank(inputs))
    return settings is not None and any(each.name in _SEARCHES for each in settings.optimizers)
