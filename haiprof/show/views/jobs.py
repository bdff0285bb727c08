"""What `haiprof ps` shows: running jobs, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import MISSING, duration_text, ranks_text, ratio_text
from haiprof.live.progress import JobProgress
from haiprof.show.figures.style import PHASE_COLORS
from haiprof.show.text import printable
from haiprof.show.views.blocks import FittingTable, one_line

_STALL_STEPS = 5
"""A warning is shown after this multiple of the usual step without a step."""


def jobs_view(jobs: Sequence[JobProgress]) -> RenderableType:
    """The jobs as a table for people."""
    if not jobs:
        return Group(
            Text("no job runs under haiprof here"), Text("start one: haiprof train.py", style="dim")
        )
    names = ("pid", "for", "ranks", "step", "each", "split", "cpu", "gpu", "id")
    rows = [
        (
            str(job.pid),
            duration_text(job.elapsed_ns),
            _ranks(job),
            MISSING if job.step is None else str(job.step + 1),
            duration_text(job.step_ns),
            split_text(job),
            MISSING if job.cpu_cores is None else f"{job.cpu_cores:.1f}",
            ratio_text(job.gpu_ratio),
            one_line(job.id),
        )
        for job in jobs
    ]
    table = FittingTable(
        names, rows, left=("split", "id"), first_to_go=("cpu", "ranks", "gpu", "for", "split")
    )
    words = [
        Text(f"{printable(j.name)}: {printable(j.problem)}", style="dim") for j in jobs if j.problem
    ]
    words += [
        Text(f"{printable(job.name)}: {printable(job.verdict)}") for job in jobs if job.verdict
    ]
    stalls = (f"{printable(job.name)}: {said}" for job in jobs if (said := _stall(job)) is not None)
    return Group(table, *words, *(Text(text, style="yellow") for text in stalls))


def _ranks(job: JobProgress) -> str:
    whole = job.world_size is None or job.ranks == job.world_size
    count = str(job.ranks) if whole else f"{job.ranks} of {job.world_size}"
    return count if len(job.hosts) < 2 else f"{count} on {len(job.hosts)} nodes"


def split_text(job: JobProgress, *, width: int = 12) -> Text:
    """The phases of the last steps as a bar of so many columns."""
    bar = Text()
    shares = [(phase, share) for phase, share in job.split.items() if share]
    done = 0.0
    for phase, share in shares:
        length = round((done + share) * width) - round(done * width)
        done += share
        bar.append("█" * length, style=PHASE_COLORS.get(phase, ""))
    return bar if shares else Text(MISSING)


def _stall(job: JobProgress) -> str | None:
    if job.suspended:
        return "suspended: all its ranks are stopped by a signal (kill -CONT)"
    snapshot = f"haiprof snapshot {job.id} shows what its ranks do"
    if job.stopped:
        return f"{ranks_text(job.stopped)} stopped by a signal; {snapshot}"
    if not job.recording or job.idle_ns is None or not job.step_ns:
        return None
    if job.idle_ns <= max(_STALL_STEPS * job.step_ns, 10e9):
        return None
    return f"no step for {duration_text(job.idle_ns)}; {snapshot}"
