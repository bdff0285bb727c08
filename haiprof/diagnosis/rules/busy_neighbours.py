"""Others keep the cores busy that the job would need."""

from __future__ import annotations

from collections.abc import Mapping

from haiprof.analysis.placement import sharing_groups
from haiprof.diagnosis.cores import NO_WAIT, SLOWED_ALIKE, contention, ranks_text, severity_of_wait
from haiprof.diagnosis.facts import Facts
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.loader_causes import COMPUTED_BATCHES
from haiprof.diagnosis.rules.cpu_throttled import cpu_throttled
from haiprof.diagnosis.thresholds import CORE_WAIT_WARNING_RATIO
from haiprof.units import ratio_text

RULE = "busy_neighbours"


def busy_neighbours(facts: Facts) -> Judgement:
    """Fires where ranks wait for cores that neither they nor a limit of theirs keep from them.

    What others use is what the node's CPUs did less what the ranks and their children did. It must
    be as much as the ranks miss.
    """
    if not facts.core_waits:
        return Abstention(rule=RULE, why=NO_WAIT)
    if isinstance(cpu_throttled(facts), Finding):
        return None  # the same waiting, with its cause known
    own = _own_doing(facts)
    waiting = [
        rank
        for rank in facts.world
        if facts.core_waits.get(rank, 0.0) >= CORE_WAIT_WARNING_RATIO and rank not in own
    ]
    hosts = _hosts(facts)
    others = {host: _others(facts, host, hosts) for host in {hosts.get(r) for r in waiting} if host}
    known = [
        (rank, used) for rank in waiting if (used := others.get(hosts.get(rank, ""))) is not None
    ]
    if waiting and not known:
        return Abstention(rule=RULE, why="ranks wait for cores, and the node's CPU use is unknown")
    judged = [(rank, used) for rank, used in known if used >= facts.core_waits[rank]]
    if not judged:
        return None
    rank, used = max(judged, key=lambda pair: (facts.core_waits[pair[0]], -pair[0]))
    wait = facts.core_waits[rank]
    ranks = [each for each, _ in judged]
    return Finding(
        rule=RULE,
        severity=severity_of_wait(facts, wait),
        title=f"others use the CPUs: {ranks_text(ranks)} could run and got no core "
        f"{ratio_text(wait)} of the time",
        evidence=(
            Evidence(name=f"rank {rank}: could run and got no core", value=wait, unit="ratio"),
            Evidence(name="cores used by others on its node", value=used, unit="cores"),
            Evidence(name="cores used by the rank", value=facts.busy_cores.get(rank), unit="cores"),
            Evidence(name="cores of the node", value=_cores(facts, hosts[rank]), unit="cores"),
        ),
        remedy="see what else runs there (top, haiprof ps, other containers of the node), and give "
        "the job cores of its own: srun --exclusive, a cpuset, Kubernetes' static CPU manager, or "
        "move the neighbour",
        confidence=0.85,
        rank=rank if len(ranks) < len(facts.world) else None,
        explains=(
            *SLOWED_ALIKE,
            *COMPUTED_BATCHES,
            "ranks_uneven/waits_for_cores",
            "late_rank/waits_for_cores",
            "data_imbalance",
        ),
    )


def _own_doing(facts: Facts) -> set[int]:
    """Ranks that want more cores than there are, together with those on the same ones."""
    placed = [facts.placements[r] for r in facts.world if r in facts.placements]
    found: set[int] = set()
    for group in sharing_groups(placed):
        ranks = [placement.rank for placement in group]
        cores = frozenset().union(*(p.allowed_cpus or frozenset() for p in group))
        measured = contention(facts, ranks, len(cores))
        if measured is not None and measured.is_their_own:
            found.update(ranks)
    return found


def _hosts(facts: Facts) -> dict[int, str]:
    """The last host of each rank, where its CPUs were counted."""
    rows = facts.ranks.select("rank", "host").drop_nulls().rows()
    return {rank: host for rank, host in rows if host in facts.node_cpus}


def _cores(facts: Facts, host: str) -> float | None:
    count = facts.node_cpus[host].core_count
    return None if count is None else float(count)


def _others(facts: Facts, host: str, hosts: Mapping[int, str]) -> float | None:
    """Cores of a host that others than its ranks used; null where that is not known."""
    cores = _cores(facts, host)
    busy = facts.counted.nodes.get(host, {}).get(None, {}).get("cpu_utilization_ratio")
    ranks = [rank for rank in facts.world if hosts.get(rank) == host]
    if cores is None or busy is None or not all(r in facts.busy_cores for r in ranks):
        return None
    return max(busy * cores - sum(facts.busy_cores[r] for r in ranks), 0.0)
