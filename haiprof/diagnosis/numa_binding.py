"""Ranks whose cores, memory, GPU or network adapters are on different NUMA nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from haiprof.base.units import ranks_text
from haiprof.diagnosis.finding import Evidence
from haiprof.diagnosis.thresholds import PAGES_ELSEWHERE_RATIO, PAGES_MIN_COUNT
from haiprof.run_analysis.settings import Placement

_NAMED_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MisplacementKind:
    """One way to be misplaced."""

    weight: int
    """The heavier one names the finding; from 2 on it is a warning."""
    title: str
    remedy: str


_CORES = MisplacementKind(
    weight=3,
    title="run on another NUMA node than their GPU",
    remedy="bind each rank to its GPU's node: torchrun --numa-binding=node, srun "
    "--gpu-bind=closest with --cpu-bind, or numactl --cpunodebind=N --membind=N "
    "(nvidia-smi topo -m shows which)",
)
_MEMORY = MisplacementKind(
    weight=2,
    title="have most of their memory on another NUMA node than their cores",
    remedy="bind before memory is taken, not afterwards: numactl --cpunodebind=N --membind=N in "
    "front of the command, or torchrun --numa-binding=node",
)
_UNBOUND = MisplacementKind(
    weight=1,
    title="are not bound, and have most of their memory on another NUMA node than their GPU",
    remedy=_CORES.remedy,
)
_ADAPTER = MisplacementKind(
    weight=0,
    title="run on a NUMA node without a network adapter, while another has one",
    remedy="bind the ranks to the adapters' node: numactl --cpunodebind=N --membind=N",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplacement:
    """The ranks that are misplaced in the heaviest way that was found."""

    kind: MisplacementKind
    placements: tuple[Placement, ...]

    @property
    def ranks(self) -> list[int]:
        """Which ranks."""
        return [placement.rank for placement in self.placements]

    @property
    def title(self) -> str:
        """What is wrong, in one line."""
        title = self.kind.title if len(self.placements) > 1 else _singular(self.kind.title)
        return f"{ranks_text(self.ranks)} {title}"

    @property
    def is_sure(self) -> bool:
        """Whether it is more than a guess that this costs something."""
        return self.kind is not _ADAPTER

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Where the first of the ranks run."""
        return tuple(_evidence(each, self.kind) for each in self.placements[:_NAMED_RANKS])


def find_misplacement(placed: Sequence[Placement]) -> Misplacement | None:
    """The heaviest kind of misplacement among ranks, and all ranks that have it.

    A machine with one node, and a rank that may run anywhere with its memory near its GPU, is fine.
    Network adapters count where no GPU says where the rank belongs; a rank beside a GPU without an
    adapter of its node is how the machine is built.
    """
    judged = [
        (placement, _misplacement_kind(placement)) for placement in placed if placement.cpu_nodes
    ]
    kinds = [kind for _, kind in judged if kind is not None]
    if not kinds:
        return None
    worst = max(kinds, key=lambda kind: kind.weight)
    return Misplacement(kind=worst, placements=tuple(p for p, kind in judged if kind is worst))


def _misplacement_kind(placement: Placement) -> MisplacementKind | None:
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


def _evidence(placement: Placement, kind: MisplacementKind) -> Evidence:
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
