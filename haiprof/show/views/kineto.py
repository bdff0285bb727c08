"""What a trace through Kineto's side shows: which steps of which ranks, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import bytes_text
from haiprof.live.kineto.result import KinetoTraces, ProcessTrace
from haiprof.show.text import printable
from haiprof.show.views.blocks import one_line

MOST_FILES = 8


def kineto_view(found: KinetoTraces) -> RenderableType:
    """The whole view."""
    return Group(*_result_lines(found), *_failure_lines(found))


def _result_lines(found: KinetoTraces) -> Iterator[RenderableType]:
    for each in found.done:
        yield Text(f"traced {_steps(each)} of {_name(each)}", style="bold")
    paths = [Path(each.path) for each in found.done if each.path]
    if paths:
        size = bytes_text(sum(path.stat().st_size for path in paths if path.exists()))
        yield Text(f"{len(paths)} files, {size}", style="dim")
    for path in paths[:MOST_FILES]:
        yield one_line(f"  {path}")
    if len(paths) > MOST_FILES:
        yield Text(f"  and {len(paths) - MOST_FILES} more", style="dim")
    for reason in sorted({each.steps_reason for each in found.done if each.steps_reason}):
        yield Text(f"steps are not marked: {reason}", style="dim")
    if found.aligned is False:
        yield Text("the ranks did not record the same steps", style="yellow")


def _steps(each: ProcessTrace) -> str:
    if each.steps is not None:
        return f"steps {each.steps[0]} to {each.steps[1] - 1}"
    return f"{each.optimizer_step_count} optimizer steps"


def _name(each: ProcessTrace) -> str:
    return f"process {each.pid}" if each.rank is None else f"rank {each.rank}"


def _failure_lines(found: KinetoTraces) -> Iterator[RenderableType]:
    for each in found.processes:
        if each.state != "done":
            reason = printable(each.reason or "no reason given")
            yield Text(f"{_name(each)} {each.state}: {reason}", style="yellow")
