"""How a job's ranks are laid out: pipeline stages, data and tensor shards, from process groups."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from haiprof.base.units import ranks_text
from haiprof.run_analysis.run_files import RunFiles, entries, integer, objects, text

_WORDS = (
    ("pipeline stage", "PP", {"pp", "pipe", "pipeline", "stage", "stages"}),
    ("tensor shard", "TP", {"tp", "tensor"}),
    ("expert group", "EP", {"ep", "expert", "experts", "moe"}),
    ("context shard", "CP", {"cp", "context", "sequence", "sp"}),
    ("data shard", "DP", {"dp", "data", "ddp", "fsdp", "replicate", "shard", "hsdp"}),
)  # fmt: skip
"""What a place in a group is called, in short, and names of groups that say so: DeviceMesh's
(`mesh_dp`), Megatron's (`TENSOR_MODEL_PARALLEL_GROUP`), and the user's own."""
MACHINE = "machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Ranks that have one coordinate in common: a stage, a shard, a machine."""

    kind: str  # `pipeline stage`, `data shard`, ..., `machine`; `place` in groups without a name
    name: str  # `pipeline stage 1 of 0-1`, `machine node7`
    ranks: frozenset[int]

    @property
    def text(self) -> str:
        """With its ranks, for people."""
        return f"{self.name} ({ranks_text(self.ranks)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The dimensions in which a job's ranks are laid out."""

    dimensions: tuple[tuple[Part, ...], ...]
    """Parts by dimension; those of one dimension have no rank in common, and together all."""
    coordinates: Mapping[int, str]  # by rank, for people: `DP 0, PP 1, TP 1`

    def names(self, ranks: Collection[int]) -> str:
        """`pipeline stage 1 of 0-1 (ranks 2, 3)`, `rank 5 (DP 1, PP 0)`, or `ranks 1 and 4`."""
        found = [part for parts in self.dimensions for part in parts if part.ranks == {*ranks}]
        if found:
            return ", which is ".join([found[0].text, *(part.name for part in found[1:])])
        where = self.coordinates.get(next(iter(ranks))) if len(ranks) == 1 else None
        return ranks_text(ranks) + (f" ({where})" if where else "")


def find_layout(files: RunFiles) -> Layout | None:
    """The layout of a run's last attempts; None where no groups are parts of the world."""
    last = files.last_attempts()
    groups: dict[tuple[int, ...], str] = {}
    for rank in last.values():
        for group in objects(rank.last("process_groups").get("groups")):
            ranks = [n for n in map(integer, entries(group.get("ranks"))) if n is not None]
            name = text(group.get("description")) or ""
            if rank.rank in ranks:
                groups.setdefault(tuple(sorted(set(ranks))), name)
    hosts: dict[str, set[int]] = {}
    for number, rank in last.items():
        hosts.setdefault(text(rank.report.get("host")) or "", set()).add(number)
    return layout_of(groups, hosts, frozenset(last))


def layout_of(
    groups: Mapping[tuple[int, ...], str], hosts: Mapping[str, set[int]], world: frozenset[int]
) -> Layout | None:
    """The layout that groups tell of; None without any whose like cover the world."""
    # Groups of one dimension have the same name but for numbers or, without a name, the same size
    # and distance of their ranks. A rank's coordinate is its place in its group.
    families: dict[tuple[str, object], list[tuple[int, ...]]] = {}
    for ranks, name in groups.items():
        words = set(re.split(r"[^a-z]+", name.lower()))
        word = next((word for word, _, own in _WORDS if words & own), "")
        steps = tuple(after - before for before, after in itertools.pairwise(ranks))
        alike = (re.sub(r"\d", "", name), len(ranks)) if word else steps
        families.setdefault((word, alike), []).append(ranks)
    order = [word for word, _, _ in _WORDS]
    found = sorted(
        (
            (order.index(word) if word else len(order), _coordinate_parts(word, family))
            for (word, _), family in families.items()
            if sum(map(len, family)) == len(world) and frozenset().union(*family) == world
        ),
        key=lambda one: one[0],
    )
    if not found:
        return None
    places: dict[int, list[str]] = {}
    for kind, parts in found:
        short = _WORDS[kind][1] if kind < len(_WORDS) else "place"
        for place, part in enumerate(parts):
            for rank in part.ranks:
                places.setdefault(rank, []).append(f"{short} {place}")
    dimensions = [parts for _, parts in found]
    if len(hosts) > 1:
        dimensions.append(tuple(
            Part(kind=MACHINE, name=f"machine {host}", ranks=frozenset(ranks))
            for host, ranks in sorted(hosts.items())
        ))  # fmt: skip
    return Layout(
        dimensions=tuple(dimensions),
        coordinates={rank: ", ".join(own) for rank, own in places.items()},
    )


def _coordinate_parts(word: str, family: Sequence[tuple[int, ...]]) -> tuple[Part, ...]:
    """Ranks at the same place of each group of a family."""
    like = "" if word else f" in groups like {ranks_text(family[0])}"
    return tuple(
        Part(kind=word or "place", ranks=frozenset(ranks),
             name=f"{word or 'place'} {place} of 0-{len(family[0]) - 1}{like}")
        for place, ranks in enumerate(zip(*family, strict=True))
    )  # fmt: skip
