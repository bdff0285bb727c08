"""Finds the ranks that block a job: from collectives and stacks, or from what NCCL counts."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from haiprof.base.code_places import Frame, Stack, frame_text, job_frame, parse_frames, stack_text
from haiprof.base.errors import MissingDataError
from haiprof.base.units import ranks_text, visible
from haiprof.run_analysis.collectives import Mismatch
from haiprof.run_analysis.nccl_witness import NcclRank, nccl_report, ranks_behind
from haiprof.run_analysis.run_files import RunFiles, integer, mapping, objects, text


@dataclass(slots=True)
class Node:
    """A frame, and the ranks that are in it."""

    frame: Frame | None
    ranks: list[int] = field(default_factory=list)
    children: dict[Frame, Node] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The tree as plain JSON values."""
        return {
            "frame": None if self.frame is None else list(self.frame),
            "ranks": self.ranks,
            "children": [child.as_json() for child in self.children.values()],
        }


def merge(stacks: Mapping[int, Stack]) -> Node:
    """The prefix tree of the stacks, as in STAT (Arnold et al., IPDPS 2007)."""
    root = Node(None)
    for rank, stack in sorted(stacks.items()):
        node = root
        node.ranks.append(rank)
        for frame in stack:
            node = node.children.setdefault(frame, Node(frame))
            node.ranks.append(rank)
    return root


def odd_ranks(stacks: Mapping[int, Stack]) -> tuple[int, ...]:
    """Ranks outside the group that holds more than half of them; none where no group does.

    Ranks with the same stack are a group (as in ByteRobust).
    """
    for common, count in Counter(stacks.values()).items():
        if 2 * count > len(stacks):
            return tuple(sorted(rank for rank, stack in stacks.items() if stack != common))
    return ()


def main_stack(threads: Sequence[Any]) -> Stack | None:
    """The main thread's stack from a rank's reply, which may hold anything."""
    main = (t for t in threads if isinstance(t, dict) and t.get("main") is True)
    return next((parse_frames(thread.get("frames")) for thread in main), None)


def other_threads(threads: Sequence[Any]) -> str:
    """Where the job's code is in other threads, which may hold what the main thread waits for."""
    others = [t for t in threads if isinstance(t, dict) and t.get("main") is not True]
    at = [(t.get("name"), job_frame(parse_frames(t.get("frames")) or ())) for t in others]
    known = [f"its thread {name} is at {frame_text(frame)}" for name, frame in at if frame]
    return "; ".join(known[:_SHOWN_THREADS])


GroupStatus = Mapping[str, Sequence[int]]
"""By process group: sequence numbers of the last collective enqueued, started, completed."""
STOPPED = ("T", "t")  # The kernel's letters for a stopped process
GONE = "X"  # A state for a process that is gone
_STATE_WORDS = {
    **dict.fromkeys(STOPPED, "its process is stopped by a signal (SIGSTOP, SIGTSTP) or a debugger"),
    GONE: "its process is gone: it was killed",
    "Z": "its process has ended, and its parent has not noticed",
}
_SHOWN_THREADS = 2
_DISTRIBUTED = "torch/distributed/"
_ENGINE = "_engine_run_backward"
_SAVERS = ("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at the time of the snapshot."""

    rank: int
    host: str | None
    pid: int | None
    process_state: str | None  # The kernel's letter; None if its node did not report it
    answered: bool = False  # Whether its own interpreter answered
    stack: Stack | None = None  # Of its main thread
    collectives: GroupStatus = field(default_factory=dict)  # At the second look
    before: GroupStatus = field(default_factory=dict)  # At the first look
    begun: bool = True  # Whether it has reached its first backward pass
    worker: str = ""
    """What a DataLoader worker does that its main thread waits for; empty where that is not so."""
    beside: str = ""  # What its other threads do; empty without any of the job's own code


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank that the others seem to wait for, with the reason."""

    rank: int
    reason: str
    doing: str
    """What it does instead, for people; empty where the reason says it: collectives contradict."""
    certain: bool
    """Whether the observations prove it; otherwise the rank only differs from the others."""


def suspects(states: Sequence[RankState], mismatches: Sequence[Mismatch]) -> list[Suspect]:
    """The ranks that block the job, the most certain first.

    A rank that is stopped or gone blocks all others. In a process group the others wait for the
    ranks that have begun fewer collectives; likewise for ranks that have not begun to train while
    others have. Without such evidence, suspects are ranks outside torch.distributed while the
    others are in it, or whose main thread is elsewhere than that of more than half of the ranks. In
    a job that is suspended as a whole no rank blocks another.
    """
    if is_suspended(states):
        return []
    found: dict[int, Suspect] = {}
    contradict = [
        Suspect(rank=rank, reason=mismatch.as_text(), doing="", certain=True)
        for mismatch in mismatches
        for rank in mismatch.odd
    ]
    for suspect in (
        *_stopped_ranks(states), *contradict, *_mute(states), *_not_begun(states),
        *_behind(states), *_elsewhere(states), *_odd(states),
    ):  # fmt: skip
        found.setdefault(suspect.rank, suspect)
    all_of = list(found.values()) or _tied_ranks(states)
    return sorted(all_of, key=lambda s: (not s.certain, s.rank))


def is_suspended(states: Sequence[RankState]) -> bool:
    """Whether all ranks are stopped: the job is suspended."""
    return bool(states) and all(state.process_state in STOPPED for state in states)


def moves(states: Sequence[RankState]) -> bool | None:
    """Whether any rank began a collective between the two looks; None where no rank has any."""
    known = [s.before != s.collectives for s in states if s.before and s.collectives]
    return any(known) if known else None


def _suspect(state: RankState, reason: str, *, certain: bool) -> Suspect:
    return Suspect(rank=state.rank, reason=reason, doing=doing(state), certain=certain)


def _stopped_ranks(states: Sequence[RankState]) -> list[Suspect]:
    words = ((state, _STATE_WORDS.get(state.process_state or "")) for state in states)
    return [_suspect(state, why, certain=True) for state, why in words if why is not None]


def _mute(states: Sequence[RankState]) -> list[Suspect]:
    """Ranks whose interpreter does not answer, where others do and wait.

    A thread of theirs holds the interpreter lock in native code: it neither trains nor answers.
    """
    waiting = [state.rank for state in states if state.answered and _waits(state)]
    if not waiting or any(state.pid is None for state in states):
        return []
    why = (
        "its interpreter does not answer: native code holds the interpreter lock, while "
        f"{ranks_text(waiting, 'waits', 'wait')}"
    )
    return [
        _suspect(state, why, certain=moves(states) is not True)
        for state in states
        if not state.answered and state.begun and state.process_state in ("R", "S", "D")
    ]


def _waits(state: RankState) -> bool:
    """Whether a rank is where ranks wait for each other: in torch.distributed, or in backward."""
    stack = state.stack or ()
    return any(_DISTRIBUTED in file or function == _ENGINE for file, _, function in stack)


def _tied_ranks(states: Sequence[RankState]) -> list[Suspect]:
    """Where nothing tells more: ranks that do not wait, else all that do different things."""
    known = [state for state in states if state.stack]
    if len(known) < 2 or len({state.stack for state in known}) < 2 or moves(states):
        return []
    waiting = [state.rank for state in known if _waits(state)]
    odd = [state for state in known if state.rank not in waiting]
    if waiting and odd:
        why = f"it does not wait for others, as {ranks_text(waiting, 'waits', 'wait')}"
    else:
        odd = known
        both = ranks_text([state.rank for state in known])
        why = f"{both} do different things, and it is not known which of them waits"
    return [_suspect(state, why, certain=False) for state in odd]


def _not_begun(states: Sequence[RankState]) -> list[Suspect]:
    """Ranks that have not reached their first backward pass, while others have."""
    begun = [state.rank for state in states if state.begun]
    late = [state for state in states if not state.begun]
    if not begun:
        return []
    why = f"it has not come to its first backward pass, as {ranks_text(begun, 'has', 'have')}"
    return [_suspect(state, why, certain=moves(states) is False) for state in late]


def _elsewhere(states: Sequence[RankState]) -> list[Suspect]:
    """Before any rank has begun: ranks outside torch.distributed, while the others are in it."""
    waiting = [s.rank for s in states if any(_DISTRIBUTED in file for file, _, _ in s.stack or ())]
    if not waiting or any(state.begun for state in states):
        return []
    why = f"it does not wait in torch.distributed, as {ranks_text(waiting, 'does', 'do')}"
    others = [state for state in states if state.stack and state.rank not in waiting]
    return [_suspect(state, why, certain=False) for state in others]


def _behind(states: Sequence[RankState]) -> list[Suspect]:
    """Ranks that have begun fewer collectives of a group than the one that has begun most.

    One that waits for the others in an earlier collective is not named where a rank that is stopped
    or does not answer, whose count is not known, explains it: data goes from rank to rank, and some
    come through a collective in which others still wait.
    """
    silent = {suspect.rank for suspect in (*_stopped_ranks(states), *_mute(states))}
    unknown = silent - {state.rank for state in states if state.collectives}
    found = []
    for group in sorted({name for state in states for name in state.collectives}):
        begun = {s.rank: s.collectives[group][0] for s in states if group in s.collectives}
        most = max(begun.values())
        waiting = ranks_text([rank for rank, count in begun.items() if count == most])
        late = (s for s in states if begun.get(s.rank, most) < most)
        for state in (s for s in late if not (unknown and _waits(s))):
            told = f"{begun[state.rank]} collectives of group {group}, {waiting} {most}"
            found.append(_suspect(state, f"it has begun {told}", certain=moves(states) is False))
    return found


def _odd(states: Sequence[RankState]) -> list[Suspect]:
    stacks = {state.rank: state.stack for state in states if state.stack is not None}
    odd = odd_ranks(stacks)
    why = f"it does something else than the other {len(stacks) - len(odd)} ranks"
    return [_suspect(state, why, certain=False) for state in states if state.rank in odd]


def saving(states: Sequence[RankState]) -> tuple[int, ...]:
    """Ranks whose main thread is saving a checkpoint: the others may wait for that."""
    return tuple(
        state.rank for state in states
        if any(function.lstrip("_").startswith(("save", "async_save"))
               and any(part in file for part in _SAVERS) for file, _, function in state.stack or ())
    )  # fmt: skip


def doing(state: RankState) -> str:
    """A short description of what a rank does."""
    if state.stack:
        beside = state.worker or state.beside
        return "; ".join(filter(None, (stack_text(state.stack), beside)))
    if state.process_state == GONE:
        return "nothing: it is gone"
    if state.process_state in STOPPED:
        return "nothing: it is stopped"
    if state.pid is None:
        return "not known: nothing of it is seen from here"
    return "not known: it did not answer"


PORT = 28028
"""NCCL's default; each process that uses NCCL 2.24 or newer listens on it, on loopback alone."""
_ASK_S = 10.0
_LEG_S = 3  # How long RAS may wait for a process that does not answer it
_ANSWER_LIMIT = 16 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_BETWEEN_S = 1.0
_TAIL_BYTES = 1 << 20  # Of a file of NCCL's the last records tell where a rank stands


Address = tuple[str, int]


def find_address(files: RunFiles) -> Address | None:
    """Where RAS of a run's job listens on this machine; None where the job does not use NCCL.

    The user may have set another port, or another machine, which is never asked.
    """
    uses_nccl = any(str(r.report.get("device", "")).startswith("cuda") for r in files.ranks)
    variables: dict[str, Any] = {}
    for rank in files.ranks:
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
            ask = partial(_ask_once, connection, until_s, bytearray())
            greeting = ask("CLIENT PROTOCOL 2")
            if not greeting.upper().startswith("SERVER PROTOCOL "):
                raise MissingDataError(f"something else listens on port {address[1]}")
            ask(f"TIMEOUT {_LEG_S}")
            ask("SET FORMAT json")  # an older NCCL says ERROR, and goes on with text
            return ask("VERBOSE STATUS", to_end=True)
    except OSError as error:
        what = "no whole answer in time" if isinstance(error, TimeoutError) else error.strerror
        raise MissingDataError(f"NCCL's RAS on port {address[1]}: {what or error}") from None


def _ask_once(
    connection: socket.socket, until_s: float, left: bytearray, question: str, *,
    to_end: bool = False,
) -> str:  # fmt: skip
    """One line for one line; with `to_end` all that comes until the other side closes."""
    # What came behind the line stays in `left`. The time is that of all questions together.
    connection.sendall(f"{question}\n".encode())
    while to_end or b"\n" not in left:
        rest_s = until_s - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError
        connection.settimeout(rest_s)
        part = connection.recv(1 << 16)
        if (not part and not to_end) or len(left) + len(part) > _ANSWER_LIMIT:
            raise OSError("no answer of NCCL's")
        if not part:
            return left.decode(errors="replace")
        left += part
    line, _, left[:] = left.partition(b"\n")
    return line.decode(errors="replace")


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
        why = _UNREACHED
        if status.get("unresponsive") is not True and status.get("considered_dead") is not True:
            why = f"it has not joined a communicator of {size} ranks"
        found.append(_ras_rank(missing, size, why))
    ranks = objects(content.get("ranks"))
    told = [(rank, mapping(rank.get("collective_counts"))) for rank in ranks]
    for kind in dict.fromkeys(kind for _, counts in told for kind in counts):
        known = [(n, rank) for rank, counts in told if (n := integer(counts.get(kind))) is not None]
        most = max((number for number, _ in known), default=0)
        found += [_ras_rank(rank, size, _behind_text(kind, number, most))
                  for number, rank in known if number < most]  # fmt: skip
    return found


def _ras_rank(content: Mapping[str, Any], size: int | None, why: str) -> NcclRank:
    pid = integer(content.get("pid"))
    return NcclRank(rank=integer(content.get("rank")), size=size, why=why,
                   pid=pid if pid is not None and pid > 0 else None)  # fmt: skip


def _behind_text(kind: str, count: int, most: int) -> str:
    """`it has begun 41 AllReduce of 42 others have begun`."""
    return f"it has begun {count} {visible(kind)[:40]}, others {most}, as NCCL's RAS tells"


_UNREACHED = "its process is not reached by NCCL's RAS"
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
        found.extend(NcclRank(rank=rank, size=of, pid=pid, why=_behind_text(kind, count, most))
                     for rank, count, pid, of in behind if count < most)  # fmt: skip
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
                found.append(NcclRank(rank=int(one[1]), size=size, pid=pid, why=_UNREACHED))
            elif kind and (one[2] or one[3] or shared is not None):
                count = int(one[2] or 0) if one[2] or one[3] else shared or 0
                most = max(most, count)
                behind.append((int(one[1]), count, pid, size))
        elif (gone := _PROCESS.match(line)) and section in ("INCOMPLETE", "DEAD"):
            found.append(NcclRank(rank=None, size=None, pid=int(gone[1]), why=_UNREACHED))
    settle()
    return found


def ras_suspects(
    states: Sequence[RankState], address: Address, *, ask: Callable[[Address], str] = ask_ras,
    between_s: float = _BETWEEN_S,
) -> list[Suspect]:  # fmt: skip
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
    states: Sequence[RankState], look: Callable[[], list[NcclRank]], between_s: float, *,
    certain: bool,
) -> list[Suspect]:  # fmt: skip
    """Asked twice: who is behind in both answers, at the same count, does not move."""
    first = look()
    time.sleep(between_s)
    second = look()
    still = [each for each in first if each in second]
    found: dict[int, Suspect] = {}
    for each in still:
        if each.pid is not None:
            named = [s for s in states if s.pid == each.pid and each.host in (None, s.host)]
        else:
            named = [s for s in states if s.rank == each.rank and each.size == len(states)]
        if len(named) == 1:  # two nodes may have the same process id
            found.setdefault(named[0].rank, _suspect(named[0], each.why, certain=certain))
    if still and not found:
        raise MissingDataError("NCCL names ranks, but no process of this job")
    return list(found.values())
