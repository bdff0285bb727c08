"""Where each rank ran: its cores, its pages, its GPU and the network adapters, by NUMA node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.run_analysis.run_files import NodeFiles, RankFiles, RunFiles, integer, text

_CPU_LIMIT = 1 << 16  # a list with a higher number is damage
_KEYS = ("pid", "start_ticks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One rank as it was placed last."""

    rank: int
    host: str
    allowed_cpus: frozenset[int] | None
    """Cores that it may run on; None where not known."""
    cpu_nodes: tuple[int, ...]
    """NUMA nodes of those; empty where not known."""
    memory_pages: Mapping[int, int]
    """Sampled pages by NUMA node; empty where not known."""
    thread_count: int | None
    gpu_node: int | None
    """NUMA node of its GPU; None without a GPU, or where firmware does not say."""
    adapters: tuple[tuple[str, int], ...]
    """Network adapters for RDMA with their NUMA node, where it is known."""

    @property
    def nodes(self) -> frozenset[int]:
        """Every NUMA node that is spoken of."""
        gpu = () if self.gpu_node is None else (self.gpu_node,)
        adapters = (node for _, node in self.adapters)
        return frozenset((*self.cpu_nodes, *self.memory_pages, *gpu, *adapters))

    def pages_off(self, nodes: Iterable[int]) -> float | None:
        """Share of the sampled pages that lie on other nodes; None without any."""
        total = sum(self.memory_pages.values())
        here = sum(self.memory_pages.get(node, 0) for node in set(nodes))
        return 1 - here / total if total else None


def placements(run: RunFiles) -> dict[int, Placement]:
    """The last placement of each rank's last attempt, where one was recorded."""
    lines = {
        (node.host, *key): line
        for node in run.nodes
        for line in node.of_type("placement")
        if (key := _key(line))
    }
    last = {rank.rank: rank for rank in sorted(run.ranks, key=lambda r: (r.rank, r.attempt))}
    found = {}
    for number, rank in last.items():
        host = _host(rank, run.nodes)
        line = lines.get((host, *_key(rank.report)))
        if line is not None:
            found[number] = _placement(number, host, line)
    return found


def _host(rank: RankFiles, nodes: Iterable[NodeFiles]) -> str:
    """As the rank names it; of a run with one node that one, whatever it is called."""
    hosts = [node.host for node in nodes]
    return hosts[0] if len(hosts) == 1 else text(rank.report.get("host")) or ""


def _key(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Process id and start time; empty where they are damaged."""
    found = [integer(content.get(name)) for name in _KEYS]
    numbers = tuple(value for value in found if value is not None)
    return numbers if len(numbers) == len(_KEYS) else ()


def _placement(rank: int, host: str, line: Mapping[str, Any]) -> Placement:
    pages = line.get("memory_nodes")
    adapters = [each for each in _items(line.get("nics")) if isinstance(each, dict)]
    named = ((text(each.get("name")), _node(each.get("node"))) for each in adapters)
    nodes = (_node(value) for value in _items(line.get("cpu_nodes")))
    return Placement(
        rank=rank,
        host=host,
        allowed_cpus=cpu_list(line.get("allowed_cpus")),
        cpu_nodes=tuple(sorted({node for node in nodes if node is not None})),
        memory_pages=_pages(pages) if isinstance(pages, dict) else {},
        thread_count=integer(line.get("thread_count")),
        gpu_node=_node(line.get("gpu_node")),
        adapters=tuple((name, node) for name, node in named if name and node is not None),
    )


def cpu_list(value: object) -> frozenset[int] | None:
    """Numbers of a kernel CPU list such as `0-15,32`; None for anything else.

    Source: Linux Documentation/admin-guide/cputopology.rst.
    """
    cpus: set[int] = set()
    for part in value.strip().split(",") if isinstance(value, str) else [""]:
        first, dash, last = part.partition("-")
        numbers = [_decimal(first), _decimal(last) if dash else _decimal(first)]
        if None in numbers:
            return None
        low, high = (number or 0 for number in numbers)
        if high < low:
            return None
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def _decimal(word: str) -> int | None:
    plain = word.isascii() and word.isdigit() and len(word) < 6
    return int(word) if plain and int(word) < _CPU_LIMIT else None


def _node(value: object) -> int | None:
    """A NUMA node; -1 is firmware that does not say."""
    node = integer(value)
    return node if node is not None and node >= 0 else None


def _pages(content: Mapping[str, Any]) -> dict[int, int]:
    found = ((_decimal(name), integer(count)) for name, count in content.items())
    return {node: count for node, count in found if node is not None and count and count > 0}


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def sharing_groups(placed: Iterable[Placement]) -> list[tuple[Placement, ...]]:
    """Ranks of one host whose cores overlap, also by way of a third, together; in order of rank.

    A rank alone on its cores is a group of one; those whose cores are not known are left out.
    """
    groups: list[tuple[str, set[int], list[Placement]]] = []
    for each in sorted(placed, key=lambda placement: placement.rank):
        if not each.allowed_cpus:
            continue
        cpus, members = set(each.allowed_cpus), [each]
        apart = []
        for host, held, others in groups:
            if host == each.host and held & cpus:
                cpus, members = cpus | held, others + members
            else:
                apart.append((host, held, others))
        groups = [*apart, (each.host, cpus, members)]
    ordered = [tuple(sorted(members, key=lambda p: p.rank)) for _, _, members in groups]
    return sorted(ordered, key=lambda members: members[0].rank)
