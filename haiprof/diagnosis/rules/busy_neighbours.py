"""Others keep the cores busy that the job would need."""

from __future__ import annotations

from collections.abc import Mapping

from haiprof.base.units import ranks_text, ratio_text
from haiprof.diagnosis.core_contention import (
    NO_WAIT,
    SLOWED_ALIKE,
    contention,
    cores_of,
    hosts_of,
    used_by_others,
)
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.loader_causes import COMPUTED_BATCHES, own_wait_share
from haiprof.diagnosis.rule_inputs import RuleInputs, usual_split
from haiprof.diagnosis.thresholds import (
    CORE_WAIT_WARNING_RATIO,
    DATALOADER_WARNING_RATIO,
    EXPLAINED_RATIO,
    FREE_CORES,
    STARVING_CORES,
)
from haiprof.run_analysis.placement import sharing_groups

RULE = "busy_neighbours"


def busy_neighbours(inputs: RuleInputs) -> Judgement:
    """Fires where ranks wait for cores that neither they nor a limit of theirs keep from them.

    What others use is what the node's CPUs did less what the ranks and their children did. It must
    be as much as the ranks miss. A rank whose loader's workers wait does not wait itself: there the
    node's cores must be full.
    """
    if not inputs.core_waits:
        return Abstention(rule=RULE, why=NO_WAIT)
    own, hosts = _own_doing(inputs), hosts_of(inputs)
    lost = {rank: _lost_ratio(inputs, rank, hosts) for rank in inputs.world if rank not in own}
    waiting = [rank for rank, share in lost.items() if share >= _limit(inputs, rank, share)]
    others = {r: used_by_others(inputs, hosts[r], hosts) for r in waiting if r in hosts}
    known = {rank: used for rank, used in others.items() if used is not None}
    if waiting and not known:
        return Abstention(rule=RULE, why="ranks wait for cores, and the node's CPU use is unknown")
    ranks = [rank for rank, used in known.items() if used >= inputs.core_waits.get(rank, 0.0)]
    if not ranks:
        return None
    return _finding(inputs, max(ranks, key=lambda r: (lost[r], -r)), ranks, lost, known)


def _limit(inputs: RuleInputs, rank: int, share: float) -> float:
    starved = share > inputs.core_waits.get(rank, 0.0)
    return DATALOADER_WARNING_RATIO if starved else CORE_WAIT_WARNING_RATIO


def _lost_ratio(inputs: RuleInputs, rank: int, hosts: Mapping[int, str]) -> float:
    """Share of the time: the main thread's wait for a core, or its wait for starved workers."""
    wait = inputs.core_waits.get(rank, 0.0)
    workers = inputs.last_attempts.loaders.get(rank)
    if workers is None or not workers.workers or rank not in hosts:
        return wait
    host = hosts[rank]
    busy = inputs.counted.nodes.get(host, {}).get(None, {}).get("cpu_utilization_ratio") or 0.0
    free = (1.0 - busy) * (cores_of(inputs, host) or 0.0)
    used = used_by_others(inputs, host, hosts) or 0.0
    if free >= FREE_CORES or used < STARVING_CORES:
        return wait
    share = _loader_share(inputs, rank)
    return max(wait, share - own_wait_share(inputs, rank, share))


def _loader_share(inputs: RuleInputs, rank: int) -> float:
    split = usual_split(inputs.of_rank(rank))
    return (split["dataloader"] or 0.0) / max(sum(v or 0.0 for v in split.values()), 1.0)


def _slowed_loaders(inputs: RuleInputs, rank: int) -> tuple[str, ...]:
    """Causes of a loader that is slow for want of cores, and not by its own work."""
    loader, share = inputs.last_attempts.loaders.get(rank), _loader_share(inputs, rank)
    if loader is not None and not loader.workers:  # training makes them, and is as slow itself
        return ()
    if own_wait_share(inputs, rank, share) >= EXPLAINED_RATIO * share > 0.0:
        return ()
    return (*COMPUTED_BATCHES, "dataloader_bound/storage", "dataloader_bound/slow_samples")


def _finding(
    inputs: RuleInputs, rank: int, ranks: list[int], lost: Mapping[int, float],
    used: Mapping[int, float],
) -> Finding:  # fmt: skip
    wait, cores = inputs.core_waits.get(rank), cores_of(inputs, hosts_of(inputs)[rank])
    starved = lost[rank] > (wait or 0.0)
    what = "waits for workers that get no core" if starved else "could run and got no core"
    return Finding(
        rule=RULE,
        title=f"others use the CPUs: {ranks_text(ranks)} {what} {ratio_text(lost[rank])} of the "
        "time",
        evidence=(
            Evidence(name=f"rank {rank}: {what}", value=lost[rank], unit="ratio"),
            Evidence(name="cores used by others on its node", value=used[rank], unit="cores"),
            Evidence(
                name="cores used by the rank", value=inputs.busy_cores.get(rank), unit="cores"
            ),
            Evidence(name="cores of the node", value=cores, unit="cores"),
        ),
        remedy="see what else runs there (top, haiprof ps, other containers of the node), and give "
        "the job cores of its own: srun --exclusive, a cpuset, Kubernetes' static CPU manager, or "
        "move the neighbour",
        confidence=0.85,
        lost_ratio=min(lost[rank], 1.0),
        rank=rank if len(ranks) < len(inputs.world) else None,
        explains=(
            *SLOWED_ALIKE,
            *_slowed_loaders(inputs, rank),
            "ranks_uneven/waits_for_cores",
            "late_rank/waits_for_cores",
            "late_rank/now_and_then",
            "data_imbalance",
            "first_batch/cores_full",
        ),
    )


def _own_doing(inputs: RuleInputs) -> set[int]:
    """Ranks that want more cores than there are, together with those on the same ones."""
    placed = [inputs.placements[r] for r in inputs.world if r in inputs.placements]
    found: set[int] = set()
    for group in sharing_groups(placed):
        ranks = [placement.rank for placement in group]
        cores = frozenset().union(*(p.allowed_cpus or frozenset() for p in group))
        measured = contention(inputs, ranks, len(cores))
        if measured is not None and measured.is_their_own:
            found.update(ranks)
    return found
