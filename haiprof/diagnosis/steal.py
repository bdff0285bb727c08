"""What steal accounts for: time of the cores that the hypervisor gave to other machines."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import STOLEN_NOTED_RATIO


def stolen_notes(inputs: RuleInputs) -> tuple[str, ...]:
    """What the verdict says of steal."""
    lost = max(inputs.stolen.values(), default=0.0)
    if lost < STOLEN_NOTED_RATIO:
        return ()
    return (
        f"the hypervisor gave the cores to others {ratio_text(lost)} of the time in which ranks "
        "trained (steal): their steps are longer by that",
    )
