"""Sends a request to the ranks of a running job and waits for replies; who has not reported in."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.units import ranks_text
from haiprof.linux.processes import ranks_below
from haiprof.run_analysis.run_files import integer, text
from haiprof.run_format.control import (
    ANSWERED,
    Request,
    new_request,
    post_request,
    read_members,
    read_replies,
)
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.reader import try_read_json, try_read_lines

POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank that reported in and, as far as this node can tell, has not ended."""

    name: str
    """The name in its replies: `3`, `3.1` for its second attempt."""
    rank: int
    host: str | None
    pid: int | None

    @property
    def here(self) -> bool:
        """Whether it runs on this node."""
        return self.host == socket.gethostname()

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone, as far as this node can tell."""
        return self.here and self.pid is not None and not Path(f"/proc/{self.pid}").exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The replies to a request."""

    request: Request
    replies: Mapping[str, Mapping[str, Any]]
    """The last reply of each rank that answered, by the rank's name."""
    silent: tuple[Member, ...]
    """Ranks that gave no final answer in time."""


def members(run: RunPaths) -> list[Member]:
    """The latest attempt of each rank, without those whose process has ended on this node."""
    return [member for member in _latest(run) if not member.has_ended]


def lost_members(run: RunPaths) -> list[Member]:
    """Ranks of this node whose process is gone without an orderly end: killed."""
    return [
        member
        for member in _latest(run)
        if member.has_ended and not recording_has_ended(RankPaths(run.ranks / member.name))
    ]


def recording_has_ended(paths: RankPaths) -> bool:
    """Whether a rank's recording has an end, which a killed process does not write."""
    return has_end(try_read_lines(paths.events))


def has_end(lines: Iterable[Mapping[str, Any]]) -> bool:
    """The same of its lines in events.jsonl."""
    return any(line.get("type") in ("record_end", "hook_error") for line in lines)


def _latest(run: RunPaths) -> list[Member]:
    latest: dict[int, Member] = {}
    for rank, attempt, paths in run.rank_folders():
        if report := try_read_json(paths.report):  # else it has not reported in yet
            latest[rank] = as_member(f"{rank}.{attempt}" if attempt else str(rank), rank, report)
    for name, told in read_members(run).items():
        latest.setdefault(told["rank"], as_member(name, told["rank"], told))
    return list(latest.values())


def as_member(name: str, rank: int, told: Mapping[str, Any]) -> Member:
    """A rank by what it has told, which may be anything."""
    return Member(name=name, rank=rank, host=text(told.get("host")), pid=integer(told.get("pid")))


def ask(
    run: RunPaths,
    kind: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout_s: float,
    ranks: tuple[int, ...] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Answers:
    """Posts a request and waits."""
    asked = [m for m in members(run) if ranks is None or m.rank in ranks]
    request = new_request(kind, arguments, valid_s=timeout_s, ranks=ranks)
    limit = time.monotonic() + timeout_s
    post_request(run, request)
    told = -1
    while True:
        replies = read_replies(run, request.id)
        silent = tuple(m for m in asked if replies.get(m.name, {}).get("state") not in ANSWERED)
        if progress is not None and len(asked) - len(silent) != told:
            told = len(asked) - len(silent)
            progress(told, len(asked))
        if not silent or time.monotonic() > limit:
            return Answers(request=request, replies=replies, silent=silent)
        time.sleep(POLL_S)


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
            ranks = ranks_text([member.rank for member in self.late], "has", "have")
            found.insert(0, f"{ranks} not begun to train")
        return tuple(found)

    @property
    def note(self) -> str | None:
        """A note on the unknown ones, for people; None if there are none."""
        if not self.unknown:
            return None
        return (
            f"{ranks_text(self.unknown, 'is', 'are')} not known here: not under haiprof, or of a "
            "node that writes to another disk (with --reach, ask on the node that it names)"
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
    reports = {rank: try_read_json(paths.report) for rank, _, paths in run.rank_folders()}
    pids = [report.get("pid") for report in reports.values() if report.get("host") == host]
    job = try_read_json(run.node(host).agent).get("job_pid")
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
    # How many ranks the nodes lack until all have as many as the fullest one.
    count = Counter(host for host in hosts.values() if host is not None)
    fullest = max(count.values(), default=0)
    if len(lacking) > sum(fullest - count[node] for node, _ in run.node_folders()):
        unknown = tuple(lacking)
    else:
        unknown = ()
        late |= {rank: Member(name=str(rank), rank=rank, host=None, pid=None) for rank in lacking}
    return MissingRanks(late=tuple(late[rank] for rank in sorted(late)), unknown=unknown)
