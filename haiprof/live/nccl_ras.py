"""NCCL as a second witness, by RAS or by its files: which rank did not join, without torch."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from haiprof.base.errors import MissingDataError
from haiprof.base.units import visible
from haiprof.live.standstill import RankState, Suspect, doing
from haiprof.run_analysis.nccl_witness import NcclRank, nccl_report, ranks_behind
from haiprof.run_analysis.run_files import RunFiles, integer, mapping, objects, text

PORT = 28028
"""NCCL's default; each process that uses NCCL 2.24 or newer listens on it, on loopback alone."""
_ASK_S = 10.0
_LEG_S = 3
"""How long RAS may wait for a process that does not answer it."""
_ANSWER_LIMIT = 16 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BETWEEN_S = 1.0
_TAIL_BYTES = 1 << 20
"""Of a file of NCCL's the last records tell where a rank stands."""


Address = tuple[str, int]


def find_address(files: RunFiles) -> Address | None:
    """Where RAS of a run's job listens on this machine; None where the job does not use NCCL.

    The user may have set another port, or another machine, which is never asked.
    """
    variables: dict[str, Any] = {}
    uses_nccl = False
    for rank in files.ranks:
        uses_nccl |= str(rank.report.get("device", "")).startswith("cuda")
        variables |= mapping(rank.last("environment").get("variables"))
    host, _, port = (text(variables.get("NCCL_RAS_ADDR")) or f"localhost:{PORT}").rpartition(":")
    host = host.strip("[]").lower()
    if not uses_nccl or variables.get("NCCL_RAS_ENABLE") == "0" or host not in _LOOPBACK:
        return None
    return (host, int(port)) if port.isdecimal() and 0 < int(port) < 1 << 16 else None


def ask_ras(address: Address, *, timeout_s: float = _ASK_S) -> str:
    """The status of all communicators, as JSON where this NCCL knows that (2.28), else as text.

    Source: NCCL, src/ras/client.cc (protocol 2), docs/userguide/source/troubleshooting/ras.rst.
    """
    until_s = time.monotonic() + timeout_s
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            talk = _Talk(connection, until_s)
            greeting = talk.ask("CLIENT PROTOCOL 2")
            if not greeting.upper().startswith("SERVER PROTOCOL "):
                raise MissingDataError(f"something else listens on port {address[1]}")
            talk.ask(f"TIMEOUT {_LEG_S}")
            talk.ask("SET FORMAT json")  # an older NCCL says ERROR, and goes on with text
            return talk.ask_all("VERBOSE STATUS")
    except OSError as error:
        what = "no whole answer in time" if isinstance(error, TimeoutError) else error.strerror
        raise MissingDataError(f"NCCL's RAS on port {address[1]}: {what or error}") from None


class _Talk:
    """Questions and answers on one connection, until a moment."""

    def __init__(self, connection: socket.socket, until_s: float) -> None:
        self._connection, self._until_s = connection, until_s
        self._left = bytearray()

    def ask(self, question: str) -> str:
        """One line for one line."""
        self._connection.sendall(f"{question}\n".encode())
        while b"\n" not in self._left:
            self._receive()
        end = self._left.index(b"\n")
        line = self._left[:end].decode(errors="replace")
        del self._left[: end + 1]
        return line

    def ask_all(self, question: str) -> str:
        """All that comes until the other side closes."""
        self._connection.sendall(f"{question}\n".encode())
        while self._receive(or_end=True):
            pass
        return self._left.decode(errors="replace")

    def _receive(self, *, or_end: bool = False) -> bool:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        part = self._connection.recv(1 << 16)
        if (not part and not or_end) or len(self._left) + len(part) > _ANSWER_LIMIT:
            raise OSError("no answer of NCCL's")
        self._left += part
        return bool(part)


def parse_ras(answer: str) -> list[NcclRank]:
    """The ranks that have begun fewer operations of a kind than others, or that do not answer."""
    if answer.lstrip().startswith("{"):
        try:
            content = json.loads(answer)
        except (ValueError, RecursionError):
            raise MissingDataError("NCCL's RAS: an answer that is cut") from None
        communicators = objects(mapping(content).get("communicators"))
        return [rank for one in communicators for rank in _judge_communicator(one)]
    if "Warnings" not in answer.splitlines():  # the last section, there also when it is empty
        raise MissingDataError("NCCL's RAS: an answer that is cut")
    return _parse_text(answer)


def _judge_communicator(content: Mapping[str, Any]) -> list[NcclRank]:
    size, found = integer(content.get("size")), []
    for missing in objects(content.get("missing_ranks")):
        status = mapping(missing.get("status"))
        why = "its process is not reached by NCCL's RAS"
        if status.get("unresponsive") is not True and status.get("considered_dead") is not True:
            why = f"it has not joined a communicator of {size} ranks"
        found.append(_ras_rank(missing, size, why))
    counts: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for rank in objects(content.get("ranks")):
        for kind, count in mapping(rank.get("collective_counts")).items():
            if (number := integer(count)) is not None:
                counts.setdefault(kind, []).append((number, rank))
    for kind, known in counts.items():
        most = max(number for number, _ in known)
        found += [
            _ras_rank(rank, size, _behind_text(kind, number, most))
            for number, rank in known
            if number < most
        ]
    return found


def _ras_rank(content: Mapping[str, Any], size: int | None, why: str) -> NcclRank:
    pid = integer(content.get("pid"))
    return NcclRank(rank=integer(content.get("rank")), size=size, why=why,
                   pid=pid if pid is not None and pid > 0 else None)  # fmt: skip


def _behind_text(kind: str, count: int, most: int) -> str:
    """`it has begun 41 AllReduce of 42 others have begun`."""
    return f"it has begun {count} {visible(kind)[:40]}, others {most}, as NCCL's RAS tells"


_GROUP = re.compile(r"\s*(\d{1,9})(?:\s+[\d-]+){3}\s+(\d{1,9})\s+\d+\s+\w+\s+\w+\s*$")
"""A row of the table of groups: its number, and the fifth column, ranks per communicator."""
_HEADING = re.compile(r"#(\d{1,9})-\d+ \([0-9a-f]+\) ([A-Z]+)$")
_KIND = re.compile(r"  Communicator ranks have different (.{1,40}?) operation counts$")
_SHARED = re.compile(r"  \d+ ranks have (?:launched up to operation (\d{1,18})|not launched any)")
_RANK = re.compile(
    r"  Rank (\d{1,9})"
    r"(?: has (?:launched up to operation (\d{1,18})|(not) launched any operations))?"
    r" -- (?:.* managed by process (\d{1,9}) on node|\[)"
)
_PROCESS = re.compile(r"  Process (\d{1,9}) on node .* managing GPU")


def _parse_text(answer: str) -> list[NcclRank]:
    """The same of the text for people, in which only outliers are named."""
    sizes: dict[str, int] = {}
    found: list[NcclRank] = []
    behind: list[tuple[int, int, int | None, int | None]] = []
    size, section, kind, shared, most = None, "", "", None, 0

    def settle() -> None:
        """Those that have begun fewer than the most of one kind of operation."""
        found.extend(
            NcclRank(rank=rank, size=of, pid=pid, why=_behind_text(kind, count, most))
            for rank, count, pid, of in behind
            if count < most
        )
        behind.clear()

    for line in answer.splitlines():
        if row := _GROUP.match(line):
            sizes[row[1]] = int(row[2])
        elif heading := _HEADING.match(line):
            settle()
            size, section, kind, shared, most = sizes.get(heading[1]), heading[2], "", None, 0
        elif line in ("INCOMPLETE", "DEAD"):
            size, section = None, line
        elif named := _KIND.match(line):
            settle()
            kind, shared, most = named[1], None, 0
        elif (same := _SHARED.match(line)) and kind:
            shared = int(same[1] or 0)
            most = max(most, shared)
        elif one := _RANK.match(line):
            pid = int(one[4]) if one[4] else None
            if section == "INCOMPLETE":
                found.append(NcclRank(rank=int(one[1]), size=size, pid=pid,
                                     why="its process is not reached by NCCL's RAS"))  # fmt: skip
            elif kind and (one[2] or one[3] or shared is not None):
                count = int(one[2] or 0) if one[2] or one[3] else shared or 0
                most = max(most, count)
                behind.append((int(one[1]), count, pid, size))
        elif (gone := _PROCESS.match(line)) and section in ("INCOMPLETE", "DEAD"):
            found.append(NcclRank(rank=None, size=None, pid=int(gone[1]),
                                 why="its process is not reached by NCCL's RAS"))  # fmt: skip
    settle()
    return found


def ras_suspects(
    states: Sequence[RankState],
    address: Address,
    *,
    ask: Callable[[Address], str] = ask_ras,
    between_s: float = _BETWEEN_S,
) -> list[Suspect]:
    """Ranks that block the job by what NCCL itself counts."""
    return _still_named(states, lambda: parse_ras(ask(address)), between_s, certain=True)


def file_suspects(
    states: Sequence[RankState], files: RunFiles, *, between_s: float = _BETWEEN_S
) -> tuple[list[Suspect], tuple[str, ...]]:
    """The same by what NCCL wrote into files, and notes on those.

    Never certain: a rank may have written less than it did.
    """
    notes: dict[str, None] = {}

    def look() -> list[NcclRank]:
        report = nccl_report(files, limit_bytes=_TAIL_BYTES)
        notes.update(dict.fromkeys(report.notes))
        return ranks_behind(report)

    return _still_named(states, look, between_s, certain=False), tuple(notes)


def _still_named(
    states: Sequence[RankState],
    look: Callable[[], list[NcclRank]],
    between_s: float,
    *,
    certain: bool,
) -> list[Suspect]:
    """Asked twice: who is behind in both answers, at the same count, does not move."""
    first = look()
    time.sleep(between_s)
    second = look()
    still = [each for each in first if each in second]
    by_pid: dict[int, list[RankState]] = {}
    for state in states:
        if state.pid is not None:
            by_pid.setdefault(state.pid, []).append(state)
    by_rank = {state.rank: state for state in states}
    found: dict[int, Suspect] = {}
    for each in still:
        named = by_pid.get(each.pid, []) if each.pid is not None else []
        named = [state for state in named if each.host in (None, state.host)]
        if each.pid is None and each.rank is not None and each.size == len(states):
            named = [by_rank[each.rank]] if each.rank in by_rank else []
        if len(named) == 1:  # two nodes may have the same process id
            state = named[0]
            suspect = Suspect(rank=state.rank, reason=each.why, doing=doing(state), certain=certain)
            found.setdefault(state.rank, suspect)
    if still and not found:
        raise MissingDataError("NCCL names ranks, but no process of this job")
    return list(found.values())
