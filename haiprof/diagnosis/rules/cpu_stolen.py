"""The hypervisor gives the machine's cores to other virtual machines."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.core_contention import SLOWED_ALIKE
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.loader_causes import COMPUTED_BATCHES
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import STOLEN_WARNING_RATIO

RULE = "cpu_stolen"


def cpu_stolen(inputs: RuleInputs) -> Judgement:
    """Fires where a main thread lost a quarter of the time to what the hypervisor did.

    Steal is "time spent in other operating systems when running in a virtualized environment"
    (proc(5), /proc/stat). Less of it is a note of the verdict, and taken off what other rules find.
    """
    if not inputs.stolen:
        return Abstention(rule=RULE, why="no CPU times of a node, or of its ranks, were recorded")
    rank = max(inputs.stolen, key=lambda r: (inputs.stolen[r], -r))
    lost = inputs.stolen[rank]
    if lost < STOLEN_WARNING_RATIO:
        return None
    return Finding(
        rule=RULE,
        title=f"the hypervisor gave the cores to others {ratio_text(lost)} of the time in which "
        f"rank {rank} trained",
        evidence=(
            Evidence(name=f"rank {rank}: main thread lost by steal", value=lost, unit="ratio"),
            Evidence(
                name="cores used by that main thread", value=inputs.main_cores[rank], unit="cores"
            ),
            Evidence(
                name="ranks that lost a quarter or more",
                value=float(sum(each >= STOLEN_WARNING_RATIO for each in inputs.stolen.values())),
                unit="count",
            ),
        ),
        remedy="nothing inside this machine takes them: ask for one with cores of its own "
        "(dedicated or pinned vCPUs; burstable types are throttled this way without credits), or "
        "move to another host",
        confidence=0.5,  # a fault of the job comes before it
        lost_ratio=lost,
        explains=(*SLOWED_ALIKE, *COMPUTED_BATCHES, "data_imbalance"),
    )
