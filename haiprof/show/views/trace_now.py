"""What `haiprof trace-now` shows: which steps were traced on which ranks, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import bytes_text, duration_text, ranks_text
from haiprof.live.trace_now import TraceNow, failures
from haiprof.show.text import printable
from haiprof.show.views.blocks import one_line

MOST_FILES = 8


def trace_now_view(found: TraceNow) -> RenderableType:
    """The whole view."""
    notes = (Text(printable(note), style="yellow") for note in found.notes)
    return Group(*_result_lines(found), *_failure_lines(found), *notes)


def _result_lines(found: TraceNow) -> Iterator[RenderableType]:
    by_steps: dict[tuple[int, int] | None, list[int]] = {}
    for rank in found.done:
        by_steps.setdefault(rank.steps, []).append(rank.rank)
    for steps, ranks in by_steps.items():
        said = "" if steps is None else f"steps {steps[0]} to {steps[1] - 1} "
        yield Text(f"traced {said}on {ranks_text(ranks)}", style="bold")
    stalls = [rank.stall_ns for rank in found.done if rank.stall_ns is not None]
    paths = [Path(rank.path) for rank in found.done if rank.path]
    if stalls:
        size = bytes_text(sum(path.stat().st_size for path in paths if path.is_file()))
        yield Text(
            f"{len(paths)} files, {size}; the job stood still for {duration_text(max(stalls))} "
            "at most",
            style="dim",
        )
    for path in paths[:MOST_FILES]:
        yield one_line(f"  {path}")
    if len(paths) > MOST_FILES:
        yield Text(f"  and {len(paths) - MOST_FILES} more", style="dim")
    if not found.aligned:
        words = "did not record" if found.counted_alike else "may not have recorded"
        yield Text(f"the ranks {words} the same steps", style="yellow")


def _failure_lines(found: TraceNow) -> Iterator[RenderableType]:
    by_reason: dict[str, list[int]] = {}
    for rank in failures(found):
        by_reason.setdefault(f"{rank.state}: {rank.reason or 'no reason given'}", []).append(
            rank.rank
        )
    for reason, ranks in by_reason.items():
        yield Text(f"{ranks_text(ranks)} {printable(reason)}", style="yellow")
