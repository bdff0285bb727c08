"""Sends a request to the ranks of a running job, and waits for their replies or a timeout."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import RunFormatError
from haiprof.run_format.control import (
    ANSWERED,
    Request,
    new_request,
    post_request,
    read_members,
    read_replies,
)
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import read_json, read_lines

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The replies to a request."""

    request: Request
    replies: Mapping[str, Mapping[str, Any]]
    """The last reply of each rank that answered, by the rank's name."""
    silent: tuple[Member, ...]
    """Ranks that gave no final answer in time."""


def members(run: RunPaths, *, proc: Path = Path("/proc")) -> list[Member]:
    """The latest attempt of each rank, without those whose process has ended on this node."""
    return [member for member in _latest(run) if not _has_ended(member, proc)]


def lost_members(run: RunPaths, *, proc: Path = Path("/proc")) -> list[Member]:
    """Ranks of this node whose process is gone without an orderly end: killed."""
    ended = [member for member in _latest(run) if _has_ended(member, proc)]
    return [member for member in ended if not _has_closed(run, member)]


def _has_closed(run: RunPaths, member: Member) -> bool:
    """Whether its recording has an end, which a killed process does not write."""
    attempt = int(member.name.partition(".")[2] or 0)
    try:
        lines, _ = read_lines(run.rank(member.rank, attempt).events)
    except RunFormatError:
        return False
    return any(line.get("type") in ("record_end", "hook_error") for line in lines)


def _latest(run: RunPaths) -> list[Member]:
    latest: dict[int, Member] = {}
    for rank, attempt, paths in run.rank_folders():
        try:
            report = read_json(paths.report)
        except RunFormatError:
            continue  # it has not reported in yet
        pid, host = report.get("pid"), report.get("host")
        latest[rank] = Member(
            name=f"{rank}.{attempt}" if attempt else str(rank),
            rank=rank,
            host=host if isinstance(host, str) else None,
            pid=pid if type(pid) is int else None,
        )
    for name, told in read_members(run).items():
        number, pid, host = told.get("rank"), told.get("pid"), told.get("host")
        if type(number) is int and number not in latest:
            latest[number] = Member(
                name=name,
                rank=number,
                host=host if isinstance(host, str) else None,
                pid=pid if type(pid) is int else None,
            )
    return list(latest.values())


def _has_ended(member: Member, proc: Path) -> bool:
    return member.here and member.pid is not None and not (proc / str(member.pid)).exists()


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
