"""What settings cost, measured, and what of the mean step each of them touches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from haiprof.diagnosis.finding import Evidence
from haiprof.diagnosis.rule_inputs import RuleInputs, usual_share

MODEL = ("forward", "backward")
STEP = (*MODEL, "optimizer")
MEASURED = "benchmarks/results/settings_price.md"
UNKNOWN = "what it costs here: its price is not measured on this kind of device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Time with a setting over time without it, of some phases, on CPUs."""

    least: float
    """Of the jobs that it was measured on the one that it slowed least: judged is by this."""
    most: float
    phases: tuple[str, ...]


def touched_ratio(inputs: RuleInputs, phases: tuple[str, ...]) -> float:
    """Share of the mean step in some phases."""
    return min(sum(usual_share(inputs, phase) or 0.0 for phase in phases), 1.0)


def lost_ratio(inputs: RuleInputs, price: Price, *, on: float = 1.0) -> float:
    """Of the mean step, what a setting costs at least."""
    return on * touched_ratio(inputs, price.phases) * max(1 - 1 / price.least, 0.0)


def price_evidence(inputs: RuleInputs, price: Price) -> tuple[Evidence, ...]:
    """The price, and the share of the step that it is paid for."""
    phases = " and ".join(price.phases) if len(price.phases) < 3 else "all phases of the model"
    return (
        Evidence(name=f"measured price, least ({MEASURED})", value=price.least, unit=""),
        Evidence(name="measured price, most", value=price.most, unit=""),
        Evidence(
            name=f"{phases}, share of the step",
            value=touched_ratio(inputs, price.phases),
            unit="ratio",
        ),
    )


PRICES: Mapping[str, Price] = {
    "anomaly": Price(least=1.17, most=6.54, phases=MODEL),
    "profiler": Price(least=1.01, most=1.48, phases=MODEL),
    "float64": Price(least=1.16, most=3.31, phases=STEP),
    "tracemalloc": Price(least=1.00, most=1.34, phases=MODEL),
    "deterministic": Price(least=1.00, most=1.03, phases=MODEL),
    "mkldnn_convolutions": Price(least=2.01, most=2.01, phases=MODEL),
    "find_unused_parameters": Price(least=1.02, most=1.18, phases=MODEL),
}
"""Least and most of the medians in `benchmarks/results/settings_price.md`, over its jobs."""
