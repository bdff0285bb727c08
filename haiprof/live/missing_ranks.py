"""Ranks of a job that have not reported in: late ones, and ones that are unknown here."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import RunFormatError
from haiprof.base.units import ranks_text
from haiprof.linux.training_processes import ranks_below
from haiprof.live.ask import Member, members
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.reader import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRanks:
    """Ranks that have not reported in."""

    late: tuple[Member, ...] = ()
    """Ranks of nodes that write to this run directory: they have not begun to train."""
    unknown: tuple[int, ...] = ()
    """Ranks about which nothing is known here."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on all of them, for people."""
        found = [self.note] if self.note else []
        if self.late:
            verb = "has" if len(self.late) == 1 else "have"
            ranks = ranks_text([member.rank for member in self.late])
            found.insert(0, f"{ranks} {verb} not begun to train")
        return tuple(found)

    @property
    def note(self) -> str | None:
        """A note on the unknown ones, for people; None if there are none."""
        if not self.unknown:
            return None
        verb = "is" if len(self.unknown) == 1 else "are"
        return (
            f"{ranks_text(self.unknown)} {verb} not known here: not under haiprof, or of a node "
            "that writes to another disk (with --reach, ask on the node that it names)"
        )


def find_missing_ranks(run: RunPaths, known: Sequence[Member] | None = None) -> MissingRanks:
    """Finds late processes of this node, and ranks that the world size lacks on others.

    A missing rank is late if a node writes to this run directory and has fewer ranks than the
    fullest one; if no node has room for it, it may train elsewhere.
    """
    if read_manifest(run).environment.get("attached"):
        return MissingRanks()  # of such a job only some ranks may be recorded
    known = members(run) if known is None else known
    host = socket.gethostname()
    reports = {rank: _json(paths.report) for rank, _, paths in run.rank_folders()}
    pids = [report.get("pid") for report in reports.values() if report.get("host") == host]
    job = _json(run.node(host).agent).get("job_pid")
    here = [p for p in (ranks_below(job) if type(job) is int else []) if p.pid not in pids]
    late = {
        rank: Member(name=str(rank), rank=rank, host=host, pid=process.pid)
        for process in here
        if (rank := process.rank or 0) not in {member.rank for member in known}
    }
    hosts = {rank: report.get("host") for rank, report in reports.items()}
    hosts |= {member.rank: member.host for member in (*known, *late.values())}
    sizes = [*(r.get("world_size") for r in reports.values()), *(p.world_size for p in here)]
    world = max((size for size in sizes if type(size) is int), default=0)
    lacking = [rank for rank in range(world) if rank not in hosts]
    if len(lacking) > _room([name for name, _ in run.node_folders()], list(hosts.values())):
        return MissingRanks(late=_in_order(late), unknown=tuple(lacking))
    late |= {rank: Member(name=str(rank), rank=rank, host=None, pid=None) for rank in lacking}
    return MissingRanks(late=_in_order(late))


def _room(nodes: Sequence[str], hosts: Sequence[object]) -> int:
    """How many ranks the nodes lack until all have as many as the fullest one."""
    count = Counter(host for host in hosts if host is not None)
    return sum(max(count.values(), default=0) - count[node] for node in nodes)


def _in_order(late: dict[int, Member]) -> tuple[Member, ...]:
    return tuple(late[rank] for rank in sorted(late))


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except RunFormatError:
        return {}
