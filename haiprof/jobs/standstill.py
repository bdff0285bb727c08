"""Who holds a job up: what the ranks' collectives and stacks, taken together, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from haiprof.jobs.stacks import Frame, Stack, frame_text, odd_ranks, own_frame
from haiprof.units import ranks_text

GroupStatus = Mapping[str, Sequence[int]]
"""By process group: sequence numbers of the last collective enqueued, started, completed."""
STOPPED = ("T", "t")
"""Letters of the kernel's for a process that is stopped."""
GONE = "X"
"""The same for one that is no more."""
_DISTRIBUTED = "torch/distributed/"
_SAVERS = ("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is known of one rank at the time of the snapshot."""

    rank: int
    host: str | None
    pid: int | None
    answered: bool
    """Whether its own interpreter answered."""
    process_state: str | None
    """The kernel's letter; null where its node did not tell."""
    stack: Stack | None
    """Of its main thread."""
    collectives: GroupStatus
    """At the second look."""
    before: GroupStatus
    """At the first look."""
    begun: bool = True
    """Whether it has come to its first backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank that the others wait for, and why that is thought."""

    rank: int
    reason: str
    doing: str
    """What it does instead, for people."""
    certain: bool
    """Whether it follows from what was seen, and is not only unlike the others."""


def suspects(states: Sequence[RankState], mismatches: Sequence[Mismatch]) -> list[Suspect]:
    """The ranks that hold the job up, the surest first.

    A rank that is stopped or gone holds up all others. In a process group, those that have begun
    fewer collectives than the others are the ones that the others wait for; so are those that have
    not begun to train while others have. Where nothing of it says anything, ranks that are not in
    torch.distributed as the others are, or whose main thread is elsewhere than that of more than
    half of the ranks. In a job that is suspended as a whole nobody holds up anybody.
    """
    if suspended(states):
        return []
    found: dict[int, Suspect] = {}
    for suspect in (
        *_stopped(states),
        *_mismatched(mismatches),
        *_not_begun(states),
        *_behind(states),
        *_elsewhere(states),
        *_odd(states),
    ):
        found.setdefault(suspect.rank, suspect)
    return sorted(found.values(), key=lambda s: (not s.certain, s.rank))


def suspended(states: Sequence[RankState]) -> bool:
    """Whether all ranks are stopped: somebody suspended the job."""
    return bool(states) and all(state.process_state in STOPPED for state in states)


def moves(states: Sequence[RankState]) -> bool | None:
    """Whether any rank began a collective between the two looks; null where no rank has any."""
    pairs = [(s.before, s.collectives) for s in states if s.before and s.collectives]
    if not pairs:
        return None
    return any(before != after for before, after in pairs)


def _stopped(states: Sequence[RankState]) -> list[Suspect]:
    found = []
    for state in states:
        if state.process_state in STOPPED:
            why = "its process is stopped by a signal (SIGSTOP, SIGTSTP) or a debugger"
        elif state.process_state == GONE:
            why = "its process is gone: it was killed"
        elif state.process_state == "Z":
            why = "its process has ended, and its parent has not noticed"
        else:
            continue
        found.append(Suspect(rank=state.rank, reason=why, doing=doing(state), certain=True))
    return found


def _not_begun(states: Sequence[RankState]) -> list[Suspect]:
    """Ranks that have not come to their first backward pass, where others have."""
    begun = [state.rank for state in states if state.begun]
    return [
        Suspect(
            rank=state.rank,
            reason="it has not come to its first backward pass, as "
            f"{ranks_text(begun)} {'has' if len(begun) == 1 else 'have'}",
            doing=doing(state),
            certain=moves(states) is False,
        )
        for state in states
        if begun and not state.begun
    ]


def _elsewhere(states: Sequence[RankState]) -> list[Suspect]:
    """Before anybody has begun: ranks that are not in torch.distributed, as the others are."""
    if any(state.begun for state in states):
        return []
    waiting = [s.rank for s in states if any(_DISTRIBUTED in file for file, _, _ in s.stack or ())]
    return [
        Suspect(
            rank=state.rank,
            reason=f"it does not wait in torch.distributed, as {ranks_text(waiting)} "
            f"{'does' if len(waiting) == 1 else 'do'}",
            doing=doing(state),
            certain=False,
        )
        for state in states
        if waiting and state.stack and state.rank not in waiting
    ]


def _behind(states: Sequence[RankState]) -> list[Suspect]:
    """Ranks that have begun fewer collectives of a group than the one that has begun most."""
    found = []
    for group in sorted({name for state in states for name in state.collectives}):
        begun = {s.rank: s.collectives[group][0] for s in states if group in s.collectives}
        most = max(begun.values())
        waiting = [rank for rank, count in begun.items() if count == most]
        for state in states:
            count = begun.get(state.rank, most)
            if count < most and len(waiting) < len(begun):
                found.append(
                    Suspect(
                        rank=state.rank,
                        reason=f"it has begun {count} collectives of group {group}, "
                        f"{ranks_text(waiting)} {most}",
                        doing=doing(state),
                        certain=moves(states) is False,
                    )
                )
    return found


def _odd(states: Sequence[RankState]) -> list[Suspect]:
    stacks = {state.rank: state.stack for state in states if state.stack is not None}
    odd = odd_ranks(stacks)
    return [
        Suspect(
            rank=state.rank,
            reason=f"it does something else than the other {len(stacks) - len(odd)} ranks",
            doing=doing(state),
            certain=False,
        )
        for state in states
        if state.rank in odd
    ]


def saving(states: Sequence[RankState]) -> tuple[int, ...]:
    """Ranks whose main thread is saving a checkpoint: the others may wait for that."""
    return tuple(s.rank for s in states if any(_is_save(frame) for frame in s.stack or ()))


def _is_save(frame: Frame) -> bool:
    file, _, function = frame
    saves = function.lstrip("_").startswith(("save", "async_save"))
    return saves and any(part in file for part in _SAVERS)


def doing(state: RankState) -> str:
    """What a rank does, in a few words."""
    if state.stack:
        own = own_frame(state.stack)
        inner = state.stack[-1]
        if own is not None and own != inner:
            return f"{frame_text(own)} → {frame_text(inner)}"
        return frame_text(inner)
    if state.process_state == GONE:
        return "nothing: it is gone"
    if state.process_state in STOPPED:
        return "nothing: it is stopped"
    if state.pid is None:
        return "not known: nothing of it is seen from here"
    return "not known: it did not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks that are at the same place of a group's sequence with different collectives."""

    group: str
    sequence: int
    what: str
    """`kind`, `element_count` or `dtype`."""
    values: Mapping[str, tuple[int, ...]]
    """Ranks by value."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks with another value than the most common one; all of them where there is a tie."""
        ordered = sorted(self.values.items(), key=lambda item: -len(item[1]))
        tie = len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1])
        odd = [rank for _, ranks in ordered[0 if tie else 1 :] for rank in ranks]
        return tuple(sorted(odd))

    def as_text(self) -> str:
        """For people."""
        said = ", ".join(f"{ranks_text(ranks)} {value}" for value, ranks in self.values.items())
        return f"collective {self.sequence} of group {self.group}: {said} ({self.what} differs)"


_SIZED = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "allreduce")
"""Kinds whose ranks all bring the same number of elements."""


def mismatched(collectives: pl.DataFrame) -> list[Mismatch]:
    """The first place of each group at which the ranks' collectives contradict each other.

    Args:
        collectives: From `lateness.collective_frame`.

    Source: matching by sequence number, then kind, size and type, as in torch's Flight Recorder
    analyzer (torch.distributed.flight_recorder.components).
    """
    found = []
    rows = collectives.filter(~pl.col("p2p"))
    for (group,), part in rows.group_by("group", maintain_order=True):
        for what in ("kind", "element_count", "dtype"):
            of_interest = part
            if what == "element_count":
                of_interest = part.filter(pl.col("kind").is_in(_SIZED))
            differing = (
                of_interest.group_by("sequence")
                .agg(pl.col(what).n_unique().alias("values"))
                .filter(pl.col("values") > 1)["sequence"]
            )
            if not differing.len():
                continue
            sequence = int(str(differing.min()))
            at = of_interest.filter(pl.col("sequence") == sequence)
            values: dict[str, list[int]] = {}
            for rank, value in at.select("rank", what).rows():
                values.setdefault(str(value), []).append(rank)
            found.append(
                Mismatch(
                    group=str(group),
                    sequence=sequence,
                    what=what,
                    values={value: tuple(sorted(ranks)) for value, ranks in values.items()},
                )
            )
            break
    return found


def _mismatched(mismatches: Sequence[Mismatch]) -> list[Suspect]:
    return [
        Suspect(rank=rank, reason=mismatch.as_text(), doing="", certain=True)
        for mismatch in mismatches
        for rank in mismatch.odd
    ]
