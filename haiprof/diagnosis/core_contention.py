"""Who has the cores that a training thread waits for: a limit, its own ranks, or others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from haiprof.base.units import ranks_text, ratio_text
from haiprof.diagnosis.finding import Evidence
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.run_analysis.settings import Placement, sharing_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Starvation:
    """Why threads that could run got no core."""

    slug: str
    title: str
    remedy: str
    evidence: tuple[Evidence, ...]
    is_choice: bool = True
    """Whether somebody could give the job these cores; not where the node has no more of them."""


def starvation(inputs: RuleInputs) -> Starvation | None:
    """The cause that the counters show, of the rank that waits most; None where they show none.

    A limit comes first: the kernel counts a thread that is stopped at it as waiting. Then ranks
    that want more cores than they may use, which would wait without anybody else; then others.
    """
    waiting = sorted(inputs.core_waits, key=lambda rank: (-inputs.core_waits[rank], rank))
    for rank in (each for each in waiting[:1] if inputs.core_waits[each] > 0):
        for cause in (_limit(inputs, rank), _own_doing(inputs, rank), _neighbours(inputs, rank)):
            if cause is not None:
                return cause
    return None


def lost_to_waiting(inputs: RuleInputs) -> float:
    """Of the time in which a training thread could run, how long it had no core, at most.

    Its loader's workers lose as much: they run on the same cores.
    """
    lost = [
        wait / (wait + inputs.main_cores.get(rank, 0.0))
        for rank, wait in inputs.core_waits.items()
        if wait > 0
    ]
    return max(lost, default=0.0)


def _limit(inputs: RuleInputs, rank: int) -> Starvation | None:
    """The cgroup's limit stopped something in as much of its periods as the rank waited."""
    host = hosts_of(inputs).get(rank)
    node = inputs.node_cpus.get(host) if host is not None else None
    if node is None or not node.throttled_ratio:
        return None
    if node.throttled_ratio < inputs.core_waits[rank]:
        return None
    limit = (
        "its limit" if node.limit_cores is None else f"its limit of {node.limit_cores:.3g} cores"
    )
    stopped = ratio_text(node.throttled_ratio)
    return Starvation(
        slug="cpu_throttled",
        title=f"the job's cgroup stops at {limit} in {stopped} of the periods",
        remedy="raise the limit (Kubernetes resources.limits.cpu, docker --cpus, cgroup cpu.max), "
        "or run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers): by default "
        "they are as many as the node has cores, not as the limit allows",
        evidence=(
            Evidence(name="periods with a stop", value=node.throttled_ratio, unit="ratio"),
            Evidence(name="CPU limit", value=node.limit_cores, unit="cores"),
        ),
    )


def _own_doing(inputs: RuleInputs, rank: int) -> Starvation | None:
    """The ranks on these cores want more of them than there are."""
    group = next((g for g in _groups(inputs) if rank in {p.rank for p in g}), ())
    cores = frozenset[int]().union(*(p.allowed_cpus or frozenset() for p in group))
    ranks = [placement.rank for placement in group]
    if not cores or not all(r in inputs.busy_cores and r in inputs.core_waits for r in ranks):
        return None
    busy = sum(inputs.busy_cores[r] for r in ranks)
    wanted = busy + sum(inputs.core_waits[r] for r in ranks)
    if wanted <= len(cores):
        return None
    host = hosts_of(inputs).get(rank)
    others = used_by_others(inputs, host, hosts_of(inputs)) if host is not None else None
    if (others or 0.0) > busy:
        return None
    node = inputs.node_cpus.get(group[0].host)
    on_node = node.core_count if node is not None else None
    spare = on_node is not None and on_node > len(cores)
    return _name_demand(ranks, len(cores), on_node if spare else None, busy, wanted)


def _name_demand(
    ranks: list[int], cores: int, on_node: int | None, busy: float, wanted: float
) -> Starvation:
    shared = len(ranks) > 1
    count = "1 core" if cores == 1 else f"{cores} cores"
    of = f" of {on_node}" if on_node else ""
    fewer = (
        "run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers), "
        + ("fewer ranks per node, " * shared)
        + "or take a node with more cores"
    )
    wider = (
        "give each rank cores of its own: torchrun --numa-binding=exclusive, srun "
        "--cpus-per-task, mpirun --map-by slot:PE=N; look for a taskset or an affinity that all "
        "ranks inherit"
        if shared
        else "allow the rank more cores (srun --cpus-per-task, docker --cpuset-cpus, a wider "
        "taskset), or run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers)"
    )
    return Starvation(
        slug="shared_cores" if shared else "too_few_cores",
        title=f"{ranks_text(ranks)} share {count}{of}"
        if shared
        else f"too few cores: {ranks_text(ranks)} may use {cores}{of}",
        remedy=wider if on_node else fewer,
        evidence=(
            Evidence(name="cores they may use", value=float(cores), unit="cores"),
            Evidence(name="cores they use", value=busy, unit="cores"),
            Evidence(name="cores they could use at least", value=wanted, unit="cores"),
        ),
        is_choice=on_node is not None,
    )


def _neighbours(inputs: RuleInputs, rank: int) -> Starvation | None:
    """Others use as many cores as the rank misses."""
    hosts = hosts_of(inputs)
    used = used_by_others(inputs, hosts[rank], hosts) if rank in hosts else None
    if used is None or used < inputs.core_waits[rank]:
        return None
    return Starvation(
        slug="busy_neighbours",
        title=f"others use the CPUs ({used:.2g} cores)",
        remedy="see what else runs there (top, haiprof ps, other containers of the node), and give "
        "the job cores of its own: srun --exclusive, a cpuset, Kubernetes' static CPU manager, or "
        "move the neighbour",
        evidence=(
            Evidence(name="cores used by others on its node", value=used, unit="cores"),
            Evidence(
                name="cores used by the rank", value=inputs.busy_cores.get(rank), unit="cores"
            ),
        ),
    )


def _groups(inputs: RuleInputs) -> Iterator[tuple[Placement, ...]]:
    placed = [inputs.placements[rank] for rank in inputs.world if rank in inputs.placements]
    yield from sharing_groups(placed)


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
