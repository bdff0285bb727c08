"""Cores that ranks want and do not get, measured: what the rules about cores share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from haiprof.diagnosis.finding import Evidence
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    CORE_WAIT_WARNING_RATIO,
    CORES_FULL_RATIO,
    CORES_WANTED_RATIO,
)

NO_PLACEMENT = "no placement of a rank was recorded"
NO_WAIT = "no waiting for cores of a rank was recorded"
SLOWED_ALIKE = (
    "jitter/all_phases",
    "step_time_drift/sudden_all_phases",
    "step_time_drift/gradual_all_phases",
)
"""What missing cores or memory would bring about: no phase in particular becomes slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Ranks that fill their cores and wait for them."""

    core_count: float
    busy_cores: float
    """Used by these ranks and their children together."""
    wanted_cores: float
    """Those, and one for each main thread that waits: at least so many threads could run."""
    wait_ratio: float
    """Share of time in which the main thread of the rank that waits least could run and did not."""

    @property
    def is_their_own(self) -> bool:
        """Whether they wait because of what they run themselves, and not for the load of others.

        That is sure where they fill the cores, and where more of their threads could run than
        there are cores.
        """
        full = self.busy_cores >= CORES_FULL_RATIO * self.core_count
        wanted = self.wanted_cores >= CORES_WANTED_RATIO * self.core_count
        return (full or wanted) and self.wait_ratio >= CORE_WAIT_WARNING_RATIO

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The numbers."""
        return (
            Evidence(name="cores they may use", value=self.core_count, unit="cores"),
            Evidence(name="cores they use", value=self.busy_cores, unit="cores"),
            Evidence(name="cores they could use at least", value=self.wanted_cores, unit="cores"),
            Evidence(
                name="main thread could run and got no core (the least of the ranks)",
                value=self.wait_ratio,
                unit="ratio",
            ),
        )


def contention(inputs: RuleInputs, ranks: Collection[int], core_count: float) -> Contention | None:
    """How much these ranks want their cores; None where something of one is not known."""
    if not all(rank in inputs.busy_cores and rank in inputs.core_waits for rank in ranks):
        return None
    busy = sum(inputs.busy_cores[rank] for rank in ranks)
    waits = [inputs.core_waits[rank] for rank in ranks]
    return Contention(
        core_count=core_count,
        busy_cores=busy,
        wanted_cores=busy + sum(waits),
        wait_ratio=min(waits),
    )


def hosts_of(inputs: RuleInputs) -> dict[int, str]:
    """The last host of each rank, where its CPUs were counted."""
    rows = inputs.ranks.select("rank", "host").drop_nulls().rows()
    return {rank: host for rank, host in rows if host in inputs.node_cpus}


def cores_of(inputs: RuleInputs, host: str) -> float | None:
    """CPUs of a host; None where they were not counted."""
    count = inputs.node_cpus[host].core_count
    return None if count is None else float(count)


def used_by_others(inputs: RuleInputs, host: str, hosts: Mapping[int, str]) -> float | None:
    """Cores of a host that others than its ranks used; None where that is not known."""
    cores = cores_of(inputs, host)
    busy = inputs.counted.nodes.get(host, {}).get(None, {}).get("cpu_utilization_ratio")
    ranks = [rank for rank in inputs.world if hosts.get(rank) == host]
    if cores is None or busy is None or not all(r in inputs.busy_cores for r in ranks):
        return None
    return max(busy * cores - sum(inputs.busy_cores[r] for r in ranks), 0.0)


def cores_of_others(inputs: RuleInputs) -> dict[int, float]:
    """By rank: cores of its host that others than the host's ranks used, where that is known."""
    hosts = hosts_of(inputs)
    used = {host: used_by_others(inputs, host, hosts) for host in set(hosts.values())}
    return {rank: cores for rank, host in hosts.items() if (cores := used[host]) is not None}
