"""The job's cgroup has a CPU limit, and the kernel stops the job at it."""

from __future__ import annotations

from haiprof.base.statistics.medians import lower_median
from haiprof.base.units import ratio_text
from haiprof.diagnosis.core_contention import SLOWED_ALIKE
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.loader_causes import COMPUTED_BATCHES
from haiprof.diagnosis.rule_inputs import NodeCpu, RuleInputs
from haiprof.diagnosis.thresholds import THROTTLED_MIN_PERIODS, THROTTLED_RATIO

RULE = "cpu_throttled"


def cpu_throttled(inputs: RuleInputs) -> Judgement:
    """Fires where something had to stop in a quarter of the limit's periods.

    The time lost is the main thread's wait for a core: the kernel counts a thread that is stopped
    at the limit as waiting (measured with 20 % of a core: 80 % waiting).
    """
    counted = {h: node for h, node in inputs.node_cpus.items() if node.period_count is not None}
    if not counted:
        return Abstention(rule=RULE, why="no periods of a CPU limit were recorded")
    throttled = {h: node for h, node in counted.items() if _is_throttled(node)}
    if not throttled:
        return None
    host = max(throttled, key=lambda name: throttled[name].throttled_ratio or 0.0)
    node = throttled[host]
    wait = _wait(inputs, host)
    limit = (
        "its limit" if node.limit_cores is None else f"its limit of {node.limit_cores:.3g} cores"
    )
    return Finding(
        rule=RULE,
        title=f"CPU throttled: the job's cgroup stops at {limit} in "
        f"{ratio_text(node.throttled_ratio)} of the periods",
        evidence=(
            Evidence(
                name="periods with a stop, of those in which the job ran",
                value=node.throttled_ratio,
                unit="ratio",
            ),
            Evidence(name="CPU limit", value=node.limit_cores, unit="cores"),
            Evidence(name="cores used by the ranks", value=_busy(inputs, host), unit="cores"),
            Evidence(
                name="main thread could run and did not (median rank)", value=wait, unit="ratio"
            ),
        ),
        remedy="raise the limit (Kubernetes resources.limits.cpu, docker --cpus, cgroup cpu.max), "
        "or run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers): by default "
        "they are as many as the node has cores, not as the limit allows",
        confidence=0.8 if wait is None else 0.9,
        lost_ratio=wait,
        missing=() if wait is not None else ("how long the ranks waited",),
        supersedes=("too_few_cores", "shared_cores", "busy_neighbours"),
        explains=(
            *COMPUTED_BATCHES,
            *SLOWED_ALIKE,
            "ranks_uneven/waits_for_cores",
            "late_rank/waits_for_cores",
            "data_imbalance",
            "host_bound",
        ),
    )


def _is_throttled(node: NodeCpu) -> bool:
    enough = (node.period_count or 0.0) >= THROTTLED_MIN_PERIODS
    return enough and (node.throttled_ratio or 0.0) >= THROTTLED_RATIO


def _ranks(inputs: RuleInputs, host: str) -> list[int]:
    rows = inputs.ranks.filter(inputs.ranks["host"] == host)["rank"].unique().to_list()
    return sorted(set(rows) & set(inputs.world))


def _wait(inputs: RuleInputs, host: str) -> float | None:
    """Of the lower median rank of the host; None where none is known."""
    waits = [inputs.core_waits[r] for r in _ranks(inputs, host) if r in inputs.core_waits]
    return lower_median(waits) if waits else None


def _busy(inputs: RuleInputs, host: str) -> float | None:
    """All ranks of the host together; None where one is not known."""
    ranks = _ranks(inputs, host)
    known = [inputs.busy_cores[rank] for rank in ranks if rank in inputs.busy_cores]
    return sum(known) if known and len(known) == len(ranks) else None
