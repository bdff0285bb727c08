"""What haiprof did by itself, in a line each; and whether the job went on after it stood still."""

from __future__ import annotations

import time
from collections.abc import Sequence

import polars as pl

from haiprof.base.log_addresses import shown_path
from haiprof.base.units import NS_PER_S, duration_text, ratio_text
from haiprof.run_analysis.reactions import Reaction, outcome_text
from haiprof.run_format.layout import RunPaths


def reacted_lines(reactions: Sequence[Reaction], run: RunPaths) -> tuple[str, ...]:
    """What a reader of a run should know of it; empty where nothing happened."""
    return tuple(_slow(r, run) if r.trigger == "slow" else _hang(r) for r in reactions)


def went_on(reaction: Reaction, steps: pl.DataFrame) -> int | None:
    """Unix time of the end of the first step that ended after it was noticed; None if none did."""
    ends = (steps["start_ns"] + steps["step_ns"]).rename("end_ns")
    later = ends.filter(ends > reaction.wall_ns).min()
    return later if isinstance(later, int) else None


def _slow(reaction: Reaction, run: RunPaths) -> str:
    grown = None
    if reaction.before_ns and reaction.after_ns:
        grown = reaction.after_ns / reaction.before_ns - 1
    line = (
        f"step {reaction.step} on became {ratio_text(grown)} slower on rank {reaction.rank} "
        f"({duration_text(reaction.before_ns)} to {duration_text(reaction.after_ns)}) "
        f"at {_clock_text(reaction.since_wall_ns)}"
    )
    line += f"; {outcome_text(reaction)}"
    if reaction.window is None:
        return line
    return f"{line}: haiprof trace-report {shown_path(run.root)} --window {reaction.window}"


def _hang(reaction: Reaction) -> str:
    said = f"{outcome_text(reaction)}; {reaction.path}" if reaction.path else outcome_text(reaction)
    return f"{reaction.reason} at {_clock_text(reaction.wall_ns)}: {said}"


def _clock_text(wall_ns: int) -> str:
    """`14:02:11` in the reader's time zone."""
    return time.strftime("%H:%M:%S", time.localtime(wall_ns / NS_PER_S))
