"""Forward takes far longer than backward: work that should be on the GPU is not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.diagnosis.facts import Facts, own_backward_ns, phase_medians
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.thresholds import (
    CPU_BUSY_CORES,
    FORWARD_BACKWARD_RATIO,
    FORWARD_STEP_RATIO,
    GPU_IDLE_RATIO,
    MIN_STEPS,
)
from haiprof.units import ratio_text

RULE = "forward_bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    forward_ns: float
    backward_ns: float
    share: float
    clock: str

    @property
    def ratio(self) -> float:
        return self.forward_ns / max(self.backward_ns, 1.0)


def forward_bound(facts: Facts) -> Judgement:
    """Fires where forward is half again as long as backward, and a good part of the step."""
    if facts.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    measured = _measure(facts)
    if measured is None:
        return Abstention(rule=RULE, why="forward or backward is not measured")
    if measured.ratio < FORWARD_BACKWARD_RATIO or measured.share < FORWARD_STEP_RATIO:
        return None
    gpu = float(np.median(list(facts.gpu_use.values()))) if facts.gpu_use else None
    cores = float(np.median(list(facts.main_cores.values()))) if facts.main_cores else None
    if gpu is not None and gpu < GPU_IDLE_RATIO and (cores or 0.0) >= CPU_BUSY_CORES:
        return _left_on_cpu(measured, gpu, cores)
    return _plain(measured, gpu, cores)


def _measure(facts: Facts) -> _Measured | None:
    medians = phase_medians(facts, "forward", "backward")
    if medians is None:
        return None
    clock, (forward, backward, whole) = medians
    own = own_backward_ns(facts, backward, clock)  # the rest is waiting for other ranks
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
        severity="critical",
        title=f"operators left on the CPU: forward is {measured.ratio:.1f}x backward while the "
        f"GPU is used {ratio_text(gpu)}",
        evidence=_evidence(measured, gpu, cores),
        remedy="move the operators in forward to the GPU: look for .cpu(), .numpy(), .item(), "
        "tensors created without device=, and Python loops over elements",
        confidence=0.9,
    )


def _plain(measured: _Measured, gpu: float | None, cores: float | None) -> Finding:
    missing = []
    if gpu is None:
        missing.append("GPU utilization")
    if cores is None:
        missing.append("CPU use of the rank")
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"forward-bound: forward takes {ratio_text(measured.share)} of the step, "
        f"{measured.ratio:.1f}x backward",
        evidence=_evidence(measured, gpu, cores),
        remedy="look in forward for work that has no gradient: Python loops over elements, "
        "copies between devices, augmentation or tokenizing; frozen layers make it normal",
        confidence=0.6,
        missing=tuple(missing),
    )
