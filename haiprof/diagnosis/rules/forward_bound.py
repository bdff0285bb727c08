"""Forward takes far longer than backward: work that should be on the GPU is not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import (
    RuleInputs,
    idle_ratio,
    own_backward_ns,
    own_wait_ratio,
    typical_rank,
    usual_phases,
)
from haiprof.diagnosis.thresholds import (
    CPU_BUSY_CORES,
    FORWARD_BACKWARD_RATIO,
    FORWARD_STEP_RATIO,
    FROZEN_RATIO,
    GPU_IDLE_RATIO,
    HELD_STEP_RATIO,
    MIN_STEPS,
    MODEL_OWN_RATIO,
    OWN_STEP_RATIO,
    SEEN_SURE,
    USUAL_FORWARD_RATIO,
)

RULE = "forward_bound"
PYTHON = "python"
"""The cause: Python of the job's own, inside forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    forward_ns: float
    backward_ns: float
    share: float
    clock: str

    @property
    def lost(self) -> float:
        """Of the step: forward beyond the half of backward that is usual."""
        usual = USUAL_FORWARD_RATIO * self.backward_ns / max(self.forward_ns, 1.0)
        return self.share * max(1.0 - usual, 0.0)

    @property
    def ratio(self) -> float:
        return self.forward_ns / max(self.backward_ns, 1.0)


def forward_bound(inputs: RuleInputs) -> Judgement:
    """Fires where forward is half again as long as backward, and a good part of the step.

    Where most parameters are frozen, backward has little to do and says nothing of forward: then
    only what is no operator counts, which is Python that holds the interpreter, and waiting.
    """
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    measured = _measure(inputs)
    if measured is None:
        return Abstention(rule=RULE, why="forward or backward is not measured")
    code = None if inputs.uses_gpu else inputs.python_time("forward")
    if measured.ratio < FORWARD_BACKWARD_RATIO or measured.share < FORWARD_STEP_RATIO:
        held = code.held_ratio * measured.share if code else 0.0
        if held >= HELD_STEP_RATIO:
            return _in_own_code(measured, held, _PYTHON)
        waits = own_wait_ratio(inputs, code, measured.share) if code else 0.0
        return _in_own_code(measured, waits, _WAITING) if waits >= OWN_STEP_RATIO else None
    if code and code.own_ratio * measured.share < MODEL_OWN_RATIO * measured.lost:
        return None  # the model's own operators: frozen layers, a teacher inside, no gradients
    if code and _is_frozen(inputs) and idle_ratio(inputs) < MODEL_OWN_RATIO * measured.lost:
        held = code.held_ratio * measured.share
        return _in_own_code(measured, held, _PYTHON) if held >= HELD_STEP_RATIO else None
    gpu = float(np.median(list(inputs.gpu_use.values()))) if inputs.gpu_use else None
    cores = float(np.median(list(inputs.main_cores.values()))) if inputs.main_cores else None
    if gpu is not None and gpu < GPU_IDLE_RATIO and (cores or 0.0) >= CPU_BUSY_CORES:
        return _left_on_cpu(measured, gpu, cores)
    return _plain(inputs, measured, gpu, cores, is_seen=code is not None)


def _is_frozen(inputs: RuleInputs) -> bool:
    """Whether most parameters of the typical rank's largest model require no gradients."""
    settings = inputs.settings.get(typical_rank(inputs))
    models = settings.models if settings is not None else ()
    largest = max(models, key=lambda model: model.parameter_count or 0, default=None)
    trained = None if largest is None else largest.trainable_ratio
    return trained is not None and trained < 1 - FROZEN_RATIO


def _measure(inputs: RuleInputs) -> _Measured | None:
    medians = usual_phases(inputs, "forward", "backward")
    if medians is None:
        return None
    clock, (forward, backward, whole) = medians
    own = own_backward_ns(inputs, backward, clock)  # the rest is waiting for other ranks
    backward = backward if own is None else own
    return _Measured(forward_ns=forward, backward_ns=backward, share=forward / whole, clock=clock)


def _evidence(measured: _Measured, gpu: float | None, cores: float | None) -> tuple[Evidence, ...]:
    clock = measured.clock
    numbers = [
        Evidence(name=f"forward ({clock} time)", value=measured.forward_ns, unit="ns"),
        Evidence(name=f"backward ({clock} time)", value=measured.backward_ns, unit="ns"),
        Evidence(name="forward / backward (about 0.5 is usual)", value=measured.ratio, unit=""),
        Evidence(name="forward, share of the step", value=measured.share, unit="ratio"),
    ]
    if gpu is not None:
        numbers.append(Evidence(name="GPU utilization", value=gpu, unit="ratio"))
    if cores is not None:
        numbers.append(Evidence(name="CPU cores used by the rank", value=cores, unit="cores"))
    return tuple(numbers)


def _left_on_cpu(measured: _Measured, gpu: float, cores: float | None) -> Finding:
    return Finding(
        rule=RULE,
        title=f"operators left on the CPU: forward is {measured.ratio:.1f}x backward while the "
        f"GPU is used {ratio_text(gpu)}",
        evidence=_evidence(measured, gpu, cores),
        remedy="move the operators in forward to the GPU: look for .cpu(), .numpy(), .item(), "
        "tensors created without device=, and Python loops over elements",
        confidence=0.9,
        lost_ratio=measured.lost,
        supersedes=("gpu_waits_for_host",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnCode:
    """What is said of the job's own code in forward."""

    cause: str
    title: str
    evidence: str
    remedy: str
    confidence: float


_PYTHON = _OwnCode(
    cause=PYTHON,
    title="Python of the job's own takes",
    evidence="Python in forward",
    remedy="see what forward does in Python: loops over elements or samples, hooks, printing, "
    "conversions; do it with tensors, once, or ahead of training",
    confidence=0.75,
)
_WAITING = _OwnCode(
    cause="waits",
    title="the job's own code waits",
    evidence="own code that waits",
    remedy="see what forward waits for: a file, a network, another process, a lock, a sleep; "
    "do it ahead of training, or in another thread",
    confidence=0.7,
)


def _in_own_code(measured: _Measured, share: float, code: _OwnCode) -> Finding:
    return Finding(
        rule=RULE,
        title=f"{code.title} {ratio_text(share)} of the step inside forward",
        evidence=(
            *_evidence(measured, None, None),
            Evidence(name=f"{code.evidence}, share of the step", value=share, unit="ratio"),
        ),
        remedy=code.remedy,
        confidence=code.confidence,
        lost_ratio=share,
        cause=code.cause,
    )


def _plain(
    inputs: RuleInputs,
    measured: _Measured,
    gpu: float | None,
    cores: float | None,
    *,
    is_seen: bool,
) -> Finding:
    missing = []
    if gpu is None:
        missing.append("GPU utilization")
    if cores is None:
        missing.append("CPU use of the rank")
    copies = "copies between devices, " * inputs.uses_gpu
    return Finding(
        rule=RULE,
        title=f"forward-bound: forward takes {ratio_text(measured.share)} of the step, "
        f"{measured.ratio:.1f}x backward",
        evidence=_evidence(measured, gpu, cores),
        remedy="look in forward for work that has no gradient: Python loops over elements, "
        f"{copies}augmentation or tokenizing; frozen layers make it normal",
        confidence=SEEN_SURE if is_seen else 0.6,
        lost_ratio=measured.lost,
        missing=tuple(missing),
    )
