"""How far each rank had come in its process groups when it was last seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.run_analysis.run_files import RunFiles, read_table, record_columns
from haiprof.run_format.schema import HEARTBEAT, NULL_I64

_TAIL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCollective:
    """The last collective that a rank began in a group."""

    group: str
    sequence: int
    kind: str | None
    """None where only its number is known."""

    @property
    def text(self) -> str:
        """`all_reduce 241`."""
        return f"{self.kind or 'collective'} {self.sequence}"


def last_collectives(
    files: RunFiles, collectives: pl.DataFrame, attempts: Mapping[int, int]
) -> dict[int, dict[str, LastCollective]]:
    """By rank and group: the last collective begun, from heartbeats and the last dumps."""
    found: dict[int, dict[str, LastCollective]] = {}
    for rank in files.ranks:
        if attempts.get(rank.rank) == rank.attempt:
            for group, sequence in _heartbeats(rank.paths.heartbeat).items():
                last = LastCollective(group=group, sequence=sequence, kind=None)
                found.setdefault(rank.rank, {})[group] = last
    own = collectives.filter(~pl.col("p2p"))
    newest = own.sort("sequence", "created_ns").group_by("rank", "attempt", "group").last()
    for row in newest.select("rank", "attempt", "group", "sequence", "kind").rows():
        rank, attempt, group, sequence, kind = row
        if attempts.get(rank) != attempt:
            continue
        known = found.setdefault(rank, {}).get(group)
        if known is None or sequence >= known.sequence:
            found[rank][group] = LastCollective(group=group, sequence=sequence, kind=kind)
    kinds = {(g, s): k for g, s, k in own.select("group", "sequence", "kind").unique().rows()}
    return {
        rank: {g: _with_name(last, kinds) for g, last in groups.items()}
        for rank, groups in found.items()
    }


def behind(last: Mapping[int, Mapping[str, LastCollective]]) -> dict[int, LastCollective]:
    """Ranks that have begun fewer collectives of a group than others, with the one they lack.

    Only of the group with the most ranks: in smaller ones all members may lag behind alike.
    """
    sizes: dict[str, int] = {}
    for groups in last.values():
        for group in groups:
            sizes[group] = sizes.get(group, 0) + 1
    for group in sorted(sizes, key=lambda g: (-sizes[g], g)):
        begun = {rank: groups[group] for rank, groups in last.items() if group in groups}
        most = max(begun.values(), key=lambda each: (each.sequence, each.kind is not None))
        found = {rank: most for rank, each in begun.items() if each.sequence < most.sequence}
        if found:
            return found
    return {}


def _with_name(last: LastCollective, kinds: Mapping[tuple[str, int], str]) -> LastCollective:
    kind = last.kind or kinds.get((last.group, last.sequence))
    return LastCollective(group=last.group, sequence=last.sequence, kind=kind)


def _heartbeats(path: Path) -> dict[str, int]:
    """The last number begun, by group; empty where there is no file."""
    try:
        columns = record_columns(read_table(path, HEARTBEAT, first=-_TAIL))
    except RunFormatError:
        return {}
    pairs = zip(columns["group"].tolist(), columns["enqueued"].tolist(), strict=True)
    return {str(group): number for group, number in pairs if number != NULL_I64}
