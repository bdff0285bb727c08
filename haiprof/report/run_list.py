"""The runs of a log directory, with how far each came and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.errors import HaiprofError
from haiprof.report.blocks import one_line, plain_table
from haiprof.report.run_header import RUNNING, manifest_or_none, run_header
from haiprof.report.text import moment_text
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import find_runs
from haiprof.units import MISSING, duration_text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run of the list."""

    name: str
    path: str
    start_wall_ns: int | None
    duration_ns: int | None
    state: str
    exit_status: int | None
    signal: str | None
    rank_count: int
    step_count: int | None
    """Steps of the rank that has most; null where the ranks cannot be read."""
    problem: str | None
    """Why something of it cannot be read."""


def run_list(log_dir: Path) -> list[RunEntry]:
    """The runs directly below a log directory, newest last.

    Raises:
        RunNotFoundError: The directory does not exist or cannot be listed.
    """
    return [_entry(RunPaths(path)) for path in find_runs(log_dir)]


def list_view(log_dir: Path, runs: Sequence[RunEntry]) -> RenderableType:
    """The runs as a table for people."""
    if not runs:
        return Group(
            Text(f"no runs in {log_dir}"), Text("record one: haiprof train.py", style="dim")
        )
    names = ("start", "lasted", "ranks", "steps", "state", "exit", "run")
    table = plain_table(*names, left=("start", "state", "run"))
    table.columns[-1].overflow = "ellipsis"
    for run in runs:
        table.add_row(
            moment_text(run.start_wall_ns),
            duration_text(run.duration_ns),
            str(run.rank_count),
            MISSING if run.step_count is None else str(run.step_count),
            Text(run.state, style="green" if run.state == RUNNING else ""),
            _exit_text(run),
            one_line(Path(run.path).name),
        )
    problems = [Text(f"{run.name}: {run.problem}", style="dim") for run in runs if run.problem]
    return Group(one_line(str(log_dir), style="bold"), table, *problems)


def _entry(run: RunPaths) -> RunEntry:
    problem = None
    try:
        header = run_header(run, manifest_or_none(run))
    except HaiprofError as error:
        header, problem = run_header(run, None), str(error)
    steps, unread = _step_count(run)
    return RunEntry(
        name=header.name,
        path=header.path,
        start_wall_ns=header.start_wall_ns,
        duration_ns=header.duration_ns,
        state=header.state,
        exit_status=header.exit_status,
        signal=header.signal,
        rank_count=len({rank for rank, _, _ in run.rank_folders()}),
        step_count=steps,
        problem=problem or unread,
    )


def _step_count(run: RunPaths) -> tuple[int | None, str | None]:
    """Steps of the rank that has most, or why they cannot be counted."""
    from haiprof.analysis.analyzer import Analyzer

    try:
        counts = Analyzer(run.root).steps()["rank"].value_counts()["count"]
    except HaiprofError as error:
        return None, str(error)
    most = counts.max()
    return (most if isinstance(most, int) else 0), None


def _exit_text(run: RunEntry) -> str:
    if run.signal:
        return run.signal
    return MISSING if run.exit_status is None else str(run.exit_status)
