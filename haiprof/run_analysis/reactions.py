"""What haiprof did by itself while the job ran: a hang looked at, slower steps noted or traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from haiprof.base.code_places import Frame, frame_text, job_frame, parse_frames
from haiprof.base.errors import RunFormatError
from haiprof.run_analysis import run_files
from haiprof.run_format.reader import read_json
from haiprof.trace_format.frame_columns import Columns, types_of

_NOWHERE = ("nothing:", "not known:")
"""How what a rank does begins where it is no place in the code: the reason says that already."""

REACTION_COLUMNS: Columns = {
    "trigger": (pl.String, "hang or slow"),
    "noticed_ns": (pl.Int64, "Unix time"),
    "since_ns": (pl.Int64, "Unix time of the last sign of life, or of the first slower step"),
    "host": (pl.String, "whose launcher noticed it"),
    "rank": (pl.Int64, "whose steps"),
    "step": (pl.Int64, "the first slower one; with hang the last that ended"),
    "reason": (pl.String, "what was compared"),
    "before_step_ns": (pl.Float64, "median step before; null with hang"),
    "after_step_ns": (pl.Float64, "slower step; null with hang"),
    "silent_ns": (pl.Float64, "without a step; null with slow"),
    "action": (pl.String, "snapshot, trace-now or none"),
    "state": (pl.String, "done, failed, begun or none"),
    "failure": (pl.String, "why it failed"),
    "suspect_rank": (pl.Int64, "the first rank that the snapshot named"),
    "suspect_reason": (pl.String, "why it was named"),
    "suspect_doing": (pl.String, "what it did"),
    "suspect_certain": (pl.Boolean, "it follows from what was seen"),
    "suspect_count": (pl.Int64, "ranks that were named"),
    "collectives_moved": (pl.Boolean, "during the snapshot"),
    "saving_rank": (pl.Int64, "the first that saved a checkpoint then"),
    "window": (pl.Int64, "number of the trace window"),
    "first_step": (pl.Int64, "traced"),
    "end_step": (pl.Int64, "the one after the last traced"),
    "path": (pl.String, "of the snapshot"),
    "outcome": (pl.String, "for people"),
}
REACTION_SCHEMA = types_of(REACTION_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectSeen:
    """A rank that a snapshot named."""

    rank: int
    reason: str
    doing: str  # empty where its collectives contradict others': the reason says what it does
    certain: bool  # whether it follows from what was seen, and is not only unlike the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """One reaction."""

    trigger: str  # `hang` or `slow`
    wall_ns: int  # Unix time at which it was noticed
    since_wall_ns: int  # when it began: the last sign of life, or the first slower step
    host: str  # whose agent noticed it
    rank: int | None  # whose steps
    step: int | None  # the first slower one; with `hang` the last that ended
    reason: str  # what was compared, for people
    before_ns: float | None  # usual step; None with `hang`
    after_ns: float | None  # slower step; None with `hang`
    silent_ns: float | None  # time without a step when it was noticed; None with `slow`
    action: str  # `snapshot`, `trace-now`, or `none` where it was only noted
    state: str  # `done`, `failed`, `begun` where the result is not known, `none` without an action
    failure: str | None
    path: str | None  # the snapshot
    moves: bool | None  # whether collectives went on during the snapshot
    saving: tuple[int, ...]  # ranks that were saving a checkpoint then
    suspects: tuple[SuspectSeen, ...]
    all_at: str | None  # the line at which all ranks were, where none of them is suspected
    window: int | None  # number of the trace window
    steps: tuple[int, int] | None  # traced steps: the first, and the one after the last

    @property
    def mismatched_ranks(self) -> tuple[int, ...] | None:
        """The ranks whose collectives contradict others'; None where that is not what it is of."""
        first = self.suspects[0] if self.suspects else None
        if first is None or first.doing:
            return None
        return tuple(suspect.rank for suspect in self.suspects if suspect.reason == first.reason)

    @property
    def contradiction(self) -> str | None:
        """What ranks do that cannot go together, where none of them is in the minority."""
        return self.suspects[0].reason if len(self.mismatched_ranks or ()) > 1 else None


def reactions(files: run_files.RunFiles) -> list[Reaction]:
    """All reactions of a run, in order of time; lines that are none are passed over."""
    found = []
    for node in files.nodes:
        results = {str(line.get("name")): line for line in node.of_type("reaction_result")}
        lines = [(x, results.get(str(x.get("name")), {})) for x in node.of_type("reaction")]
        found += [known for pair in lines if (known := _reaction(node.host, *pair)) is not None]
    return sorted(found, key=lambda reaction: reaction.wall_ns)


def asked_snapshots(files: run_files.RunFiles) -> list[Reaction]:
    """Snapshots that name who holds the job up, as hangs that were noticed then; oldest first."""
    found = []
    for path, content in _snapshots(files):
        time = dict.fromkeys(("wall_ns", "since_wall_ns"), content.get("wall_ns"))
        line = {"trigger": "hang", "action": "snapshot", "path": str(path), **time}
        reaction = _reaction("", line, {**content, "state": "done"})
        if reaction is not None and reaction.suspects and not reaction.moves:
            found.append(reaction)
    return found


def _snapshots(files: run_files.RunFiles) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Those that can be read, oldest first."""
    for path in files.paths.snapshot_files():
        with contextlib.suppress(RunFormatError):
            yield path, read_json(path)


class SnapshotLines(NamedTuple):
    """Where the ranks were in a snapshot."""

    folder: str
    wall_ns: int
    frames: Mapping[int, Frame]  # by rank, its line of the job's own code

    @property
    def at(self) -> Mapping[int, str]:
        """The same for people."""
        return {rank: frame_text(frame) for rank, frame in self.frames.items()}


def lines_in_snapshots(files: run_files.RunFiles) -> Iterator[SnapshotLines]:
    """Lines of all snapshots that can be read, oldest first."""
    for path, content in _snapshots(files):
        lines = [(run_files.integer(each.get("rank")), parse_frames(each.get("stack")) or ())
                 for each in run_files.objects(content.get("ranks"))]  # fmt: skip
        at = {rank: frame for rank, stack in lines
              if rank is not None and (frame := job_frame(stack))}  # fmt: skip
        yield SnapshotLines(path.parent.name, run_files.integer(content.get("wall_ns")) or 0, at)


def reaction_frame(found: Sequence[Reaction]) -> pl.DataFrame:
    """Reactions as a frame."""
    return pl.DataFrame([_row(reaction) for reaction in found], schema=REACTION_SCHEMA)


def outcome_text(reaction: Reaction) -> str:
    """What came of it, for people."""
    slow = reaction.trigger == "slow"
    if reaction.action == "none":  # of slower steps nothing more is worth a word
        return "" if slow else "nothing was done: with --react snapshot the ranks are looked at"
    if slow and reaction.state == "done" and reaction.steps is not None:
        return f"steps {reaction.steps[0]} to {reaction.steps[1] - 1} were traced"
    if not slow and reaction.state == "done":
        if reaction.contradiction is not None:
            return f"ranks contradicted each other: {reaction.contradiction}"
        for first in reaction.suspects[:1]:
            verb = "held the job up" if first.certain else "did something different from the rest"
            is_placed = first.doing and not first.doing.startswith(_NOWHERE)
            place = f"; it was at {first.doing}" if is_placed else ""
            return f"rank {first.rank} {verb}: {first.reason}{place}"
        if reaction.saving:
            return f"rank {reaction.saving[0]} was saving a checkpoint"
        if reaction.moves:
            return "collectives went on"
        where = f": all were at {reaction.all_at}" if reaction.all_at else ""
        return f"no rank differed from the others{where}"
    what = "no trace of them" if slow else "no snapshot"
    return f"{what}: {reaction.failure or 'none was done by then'}"


_OF_SUSPECT = ("rank", "reason", "doing", "certain")


def _row(reaction: Reaction) -> dict[str, object]:
    suspect = reaction.suspects[0] if reaction.suspects else None
    first, end = reaction.steps or (None, None)
    same = ("trigger", "host", "rank", "step", "reason", "silent_ns", "action", "state", "failure")
    return {
        **{name: getattr(reaction, name) for name in (*same, "window", "path")},
        "noticed_ns": reaction.wall_ns, "since_ns": reaction.since_wall_ns,
        "before_step_ns": reaction.before_ns, "after_step_ns": reaction.after_ns,
        **{f"suspect_{name}": getattr(suspect, name, None) for name in _OF_SUSPECT},
        "suspect_count": len(reaction.suspects), "collectives_moved": reaction.moves,
        "saving_rank": reaction.saving[0] if reaction.saving else None,
        "outcome": outcome_text(reaction), "first_step": first, "end_step": end,
    }  # fmt: skip


def _reaction(host: str, line: Mapping[str, Any], result: Mapping[str, Any]) -> Reaction | None:
    trigger, wall_ns = run_files.text(line.get("trigger")), run_files.integer(line.get("wall_ns"))
    since = run_files.integer(line.get("since_wall_ns"))
    if trigger not in ("hang", "slow") or wall_ns is None or since is None:
        return None
    action = run_files.text(line.get("action")) or "none"
    unknown = "none" if action == "none" else "begun"
    steps = [step for step in run_files.entries(result.get("steps")) if type(step) is int]
    return run_files.read_record(
        Reaction, {**result, **line}, trigger=trigger, wall_ns=wall_ns, since_wall_ns=since,
        host=host, action=action, state=run_files.text(result.get("state")) or unknown,
        failure=run_files.text(result.get("reason")),
        suspects=tuple(
            run_files.read_record(SuspectSeen, entry, rank=rank)
            for entry in run_files.objects(result.get("suspects"))
            if (rank := run_files.integer(entry.get("rank"))) is not None
        ),
        steps=(steps[0], steps[1]) if len(steps) == 2 else None,
    )  # fmt: skip


_COUNTS = {
    "step_count": "steps", "watched_count": "watched", "slow_count": "slow_seen",
    "kept_count": "slow_kept", **{name: name for name in (
        "kept_limit", "usual_ns", "cost_ns", "memory_bytes", "kept_bytes")},
}  # fmt: skip
"""Columns of `watched_frame`, and what a rank calls them."""
_SHARES = ("cost_ratio", "budget_ratio")
WATCHED_SCHEMA = {
    "rank": pl.Int64, "attempt": pl.Int64, **dict.fromkeys(_COUNTS, pl.Int64),
    **dict.fromkeys(_SHARES, pl.Float64), "refused": pl.String,
}  # fmt: skip


def watched_frame(files: run_files.RunFiles) -> pl.DataFrame:
    """What each rank said last of its rolling windows; without rows where there were none."""
    rows = [
        {"rank": rank.rank, "attempt": rank.attempt,
         **{name: run_files.integer(line.get(field)) for name, field in _COUNTS.items()},
         **{name: run_files.number(line.get(name)) for name in _SHARES},
         "refused": run_files.text(line.get("refused"))}
        for rank in files.ranks if (line := rank.last("keep_slow"))
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=WATCHED_SCHEMA).sort("rank", "attempt")
