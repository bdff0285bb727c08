"""Floating-point work of a step in words: `3.2 TFLOP a step, 210 TFLOP/s, MFU 21 %`."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.step_work import StepWork

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def work_text(work: StepWork) -> str:
    """The whole, of one rank; MFU only where the device's peak is known."""
    least = "at least " if work.is_lower_bound else ""
    parts = [f"{least}{flops_text(work.model_flops)} a step", f"{flops_text(work.flops_per_s)}/s"]
    if work.mfu_ratio is not None:
        parts.append(f"MFU {ratio_text(work.mfu_ratio)}")
    return ", ".join(parts)


def flops_text(flops: float) -> str:
    """`3.2 TFLOP`; three digits, and 1,000 of a unit is one of the next."""
    size, prefix = next((each for each in _SCALES if flops >= 0.9995 * each[0]), (1.0, ""))
    return f"{flops / size:.3g} {prefix}FLOP"
