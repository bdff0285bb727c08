"""Finds the ranks that block a job, from the collectives and stacks of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from haiprof.base.units import ranks_text
from haiprof.run_analysis.collectives import Mismatch
from haiprof.run_format.stack_frames import (
    Frame,
    Stack,
    frame_text,
    job_frame,
    parse_frames,
    stack_text,
)


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
    for thread in threads:
        if isinstance(thread, dict) and thread.get("main") is True:
            return parse_frames(thread.get("frames"))
    return None


def other_threads(threads: Sequence[Any]) -> str:
    """Where the job's code is in other threads, which may hold what the main thread waits for."""
    others = [t for t in threads if isinstance(t, dict) and t.get("main") is not True]
    at = [(t.get("name"), job_frame(parse_frames(t.get("frames")) or ())) for t in others]
    known = [f"its thread {name} is at {frame_text(frame)}" for name, frame in at if frame]
    return "; ".join(known[:_SHOWN_THREADS])


GroupStatus = Mapping[str, Sequence[int]]
"""By process group: sequence numbers of the last collective enqueued, started, completed."""
STOPPED = ("T", "t")
"""The kernel's letters for a stopped process."""
GONE = "X"
"""A state for a process that is gone."""
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
    process_state: str | None
    """The kernel's letter; None if its node did not report it."""
    answered: bool = False
    """Whether its own interpreter answered."""
    stack: Stack | None = None
    """Of its main thread."""
    collectives: GroupStatus = field(default_factory=dict)
    """At the second look."""
    before: GroupStatus = field(default_factory=dict)
    """At the first look."""
    begun: bool = True
    """Whether it has reached its first backward pass."""
    worker: str = ""
    """What a DataLoader worker does that its main thread waits for; empty where that is not so."""
    beside: str = ""
    """What its other threads do; empty without any of the job's own code."""


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
    for suspect in (
        *_stopped_ranks(states),
        *[
            Suspect(rank=rank, reason=mismatch.as_text(), doing="", certain=True)
            for mismatch in mismatches
            for rank in mismatch.odd
        ],
        *_mute(states),
        *_not_begun(states),
        *_behind(states),
        *_elsewhere(states),
        *_odd(states),
    ):
        found.setdefault(suspect.rank, suspect)
    all_of = list(found.values()) or _tied_ranks(states)
    return sorted(all_of, key=lambda s: (not s.certain, s.rank))


def is_suspended(states: Sequence[RankState]) -> bool:
    """Whether all ranks are stopped: the job is suspended."""
    return bool(states) and all(state.process_state in STOPPED for state in states)


def moves(states: Sequence[RankState]) -> bool | None:
    """Whether any rank began a collective between the two looks; None where no rank has any."""
    pairs = [(s.before, s.collectives) for s in states if s.before and s.collectives]
    if not pairs:
        return None
    return any(before != after for before, after in pairs)


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
    return any(
        _DISTRIBUTED in file or function == _ENGINE for file, _, function in state.stack or ()
    )


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
        waiting = [rank for rank, count in begun.items() if count == most]
        for state in states:
            count = begun.get(state.rank, most)
            waits_too = bool(unknown) and _waits(state)
            if count < most and not waits_too:
                told = f"{count} collectives of group {group}, {ranks_text(waiting)} {most}"
                suspect = _suspect(state, f"it has begun {told}", certain=moves(states) is False)
                found.append(suspect)
    return found


def _odd(states: Sequence[RankState]) -> list[Suspect]:
    stacks = {state.rank: state.stack for state in states if state.stack is not None}
    odd = odd_ranks(stacks)
    why = f"it does something else than the other {len(stacks) - len(odd)} ranks"
    return [_suspect(state, why, certain=False) for state in states if state.rank in odd]


def saving(states: Sequence[RankState]) -> tuple[int, ...]:
    """Ranks whose main thread is saving a checkpoint: the others may wait for that."""
    return tuple(s.rank for s in states if any(_is_save(frame) for frame in s.stack or ()))


def _is_save(frame: Frame) -> bool:
    file, _, function = frame
    saves = function.lstrip("_").startswith(("save", "async_save"))
    return saves and any(part in file for part in _SAVERS)


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
