"""A rank's cores, its memory, its GPU or its network adapters are on different NUMA nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from haiprof.analysis.placement import Placement
from haiprof.diagnosis.cores import NO_PLACEMENT, ranks_text
from haiprof.diagnosis.facts import Facts
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.thresholds import PAGES_ELSEWHERE_RATIO, PAGES_MIN_COUNT

RULE = "numa_placement"
_NAMED_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One way to be misplaced."""

    weight: int
    """The heavier one names the finding; from 2 on it is a warning."""
    title: str
    remedy: str


_CORES = _Kind(
    weight=3,
    title="run on another NUMA node than their GPU",
    remedy="bind each rank to its GPU's node: torchrun --numa-binding=node, srun "
    "--gpu-bind=closest with --cpu-bind, or numactl --cpunodebind=N --membind=N "
    "(nvidia-smi topo -m shows which)",
)
_MEMORY = _Kind(
    weight=2,
    title="have most of their memory on another NUMA node than their cores",
    remedy="bind before memory is taken, not afterwards: numactl --cpunodebind=N --membind=N in "
    "front of the command, or torchrun --numa-binding=node",
)
_UNBOUND = _Kind(
    weight=1,
    title="are not bound, and have most of their memory on another NUMA node than their GPU",
    remedy=_CORES.remedy,
)
_ADAPTER = _Kind(
    weight=0,
    title="run on a NUMA node without a network adapter, while another has one",
    remedy="bind the ranks to the adapters' node: numactl --cpunodebind=N --membind=N",
)


def numa_placement(facts: Facts) -> Judgement:
    """Fires where a rank's cores exclude its GPU's node, or most of its pages are elsewhere.

    A machine with one node, and a rank that may run anywhere with its memory near its GPU, is fine.
    Network adapters count where no GPU says where the rank belongs; a rank beside a GPU without an
    adapter of its node is how the machine is built.
    """
    placed = [facts.placements[rank] for rank in facts.world if rank in facts.placements]
    if not placed:
        return Abstention(rule=RULE, why=NO_PLACEMENT)
    known = [placement for placement in placed if placement.cpu_nodes]
    if not known:
        return Abstention(rule=RULE, why="the NUMA nodes of the ranks' cores are not known")
    judged = [(placement, _misplaced(placement)) for placement in known]
    found = [(placement, kind) for placement, kind in judged if kind is not None]
    if not found:
        return None
    worst = max((kind for _, kind in found), key=lambda kind: kind.weight)
    return _finding([placement for placement, kind in found if kind is worst], worst)


def _misplaced(placement: Placement) -> _Kind | None:
    """The heaviest kind that fits."""
    gpu, cores = placement.gpu_node, placement.cpu_nodes
    if len(placement.nodes) < 2:
        return None
    if gpu is not None and gpu not in cores:
        return _CORES
    if _elsewhere(placement, cores):
        return _MEMORY
    if gpu is not None and len(cores) > 1 and _elsewhere(placement, [gpu]):
        return _UNBOUND
    adapters = {node for _, node in placement.adapters}
    if gpu is None and len(cores) == 1 and adapters and cores[0] not in adapters:
        return _ADAPTER
    return None


def _elsewhere(placement: Placement, nodes: Collection[int]) -> bool:
    """Whether most pages lie on other nodes, and enough were looked at."""
    share = placement.pages_off(nodes)
    enough = sum(placement.memory_pages.values()) >= PAGES_MIN_COUNT
    return enough and share is not None and share >= PAGES_ELSEWHERE_RATIO


def _finding(placed: Sequence[Placement], kind: _Kind) -> Finding:
    ranks = [placement.rank for placement in placed]
    title = kind.title if len(ranks) > 1 else _singular(kind.title)
    return Finding(
        rule=RULE,
        severity="warning" if kind.weight >= 2 else "info",
        title=f"{ranks_text(ranks)} {title}",
        evidence=tuple(_evidence(each, kind) for each in placed[:_NAMED_RANKS]),
        remedy=kind.remedy,
        confidence=0.5 if kind is _ADAPTER else 0.7,
        missing=("what it costs: counters of memory read from other nodes would say",),
        rank=ranks[0] if len(ranks) == 1 else None,
    )


def _evidence(placement: Placement, kind: _Kind) -> Evidence:
    gpu = None if kind is _MEMORY else placement.gpu_node
    away = "its cores" if gpu is None else "its GPU"
    return Evidence(
        name=f"rank {placement.rank}: {_where(placement)}; pages away from {away}",
        value=placement.pages_off(placement.cpu_nodes if gpu is None else [gpu]),
        unit="ratio",
    )


def _singular(title: str) -> str:
    words = {"run ": "runs ", "have ": "has ", "are ": "is ", "their ": "its "}
    for plural, single in words.items():
        title = title.replace(plural, single)
    return title


def _where(placement: Placement) -> str:
    parts = [f"cores on node {_nodes(placement.cpu_nodes)}"]
    if placement.gpu_node is not None:
        parts.append(f"GPU on {placement.gpu_node}")
    adapters = sorted({node for _, node in placement.adapters})
    if adapters:
        parts.append(f"network on {_nodes(adapters)}")
    return ", ".join(parts)


def _nodes(nodes: Collection[int]) -> str:
    return " and ".join(map(str, sorted(nodes)))
