"""What `haiprof ls --live` shows: running jobs, the ranks of one, one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.base.units import MISSING, bytes_text, duration_text, ranks_text, ratio_text
from haiprof.live.follow import JobNow, RankNow
from haiprof.show.figures.style import PHASE_COLORS, PHASES
from haiprof.show.run_header import is_stall
from haiprof.show.terminal import filling, fit_width, sparkline
from haiprof.show.text import printable
from haiprof.show.views.blocks import FittingTable, one_line, plain_table

_WIDE_BAR = 12


def jobs_view(jobs: Sequence[JobNow], *, colored: bool = False) -> RenderableType:
    """The jobs as a table for people."""
    if not jobs:
        return Group(
            Text("no job runs under haiprof here"), Text("start one: haiprof train.py", style="dim")
        )
    users = ["user"] if any(job.user for job in jobs) else []
    names = ("pid", "for", "ranks", "step", "each", "split", "cpu", "gpu", *users, "id")
    rows: list[tuple[str | Text, ...]] = [
        (
            str(job.pid), duration_text(job.elapsed_ns),
            _count_text(job.rank_count, job.world_size)
            + (f" on {len(job.hosts)} nodes" if len(job.hosts) > 1 else ""),
            MISSING if job.step is None else str(job.step + 1), duration_text(job.step_ns),
            split_text(job.split, width=_WIDE_BAR, colored=colored), _number(job.cpu_cores),
            ratio_text(job.gpu_ratio), *(job.user or "" for _ in users), one_line(job.id),
        )
        for job in jobs
    ]  # fmt: skip
    table = FittingTable(names, rows, left=("split", *users, "id"),
                         first_to_go=("cpu", "ranks", "gpu", "for", "split"))  # fmt: skip
    notes = [
        Text(f"{printable(job.name)}: {printable(said)}", style=style)
        for style, say in (("dim", attrgetter("problem")), ("", attrgetter("verdict")),
                           ("yellow", _stall))
        for job in jobs if (said := say(job))
    ]  # fmt: skip
    return Group(table, *notes)


def _count_text(ranks: int, world_size: int | None) -> str:
    return str(ranks) if world_size in (None, ranks) else f"{ranks} of {world_size}"


def split_text(split: Mapping[str, float | None], *, width: int, colored: bool = False) -> Text:
    """The phases of the last steps as a bar of so many columns."""
    bar, done = Text(), 0.0
    for phase, share in split.items():
        length = round((done + (share or 0.0)) * width) - round(done * width)
        done += share or 0.0
        bar.append(filling(phase, colored=colored) * length, style=PHASE_COLORS.get(phase, ""))
    return bar if done else Text(MISSING)


def _stall(job: JobNow) -> str | None:
    if job.suspended:
        return "suspended: all its ranks are stopped by a signal (kill -CONT)"
    snapshot = f"haiprof snapshot {job.id} shows what its ranks do"
    if job.stopped:
        return f"{ranks_text(job.stopped)} stopped by a signal; {snapshot}"
    return f"no step for {duration_text(job.idle_ns)}; {snapshot}" if is_stalled(job) else None


JOBS, RANKS, RANK = "jobs", "ranks", "rank"
UP, DOWN, ENTER, BACK, QUIT = "up", "down", "enter", "back", "quit"
_BAR, _LINE, _STEPS = 10, 12, 50
_JOB, _JOB_LINES = 12, 4
_NARROW, _NARROW_JOB, _NARROW_JOB_LINES = 78, 18, 4
"""Below this many columns a job has no bar and no line of steps, and more room for its name."""
_HEAD_LINES = 9
_LEFT = ("job", "host", "split", "last steps")
_COUNTERS: dict[str, tuple[str, Callable[[float], str]]] = {
    "cpu_cores": ("cores, with its workers", "{:.2f}".format),
    "cpu_main_cores": ("cores, the process alone", "{:.2f}".format),
    "memory_rss_bytes": ("memory", bytes_text),
    "utilization_ratio": ("GPU utilization", ratio_text),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The current selection in `haiprof ls --live`."""

    level: str = JOBS
    job: int = 0
    rank: int = 0
    alone: bool = False  # Whether one job was named, so that there is no list of jobs to go back to


def move(selection: Selection, key: str, jobs: Sequence[JobNow]) -> Selection | None:
    """The selection after a key; None to leave."""
    of_jobs = selection.level == JOBS
    ranks = jobs[selection.job].ranks if selection.job < len(jobs) else ()
    count = len(jobs if of_jobs else ranks)
    if key in (UP, DOWN):
        at = (selection.job if of_jobs else selection.rank) + (1 if key == DOWN else -1)
        at = min(max(at, 0), max(count - 1, 0))
        return replace(selection, job=at) if of_jobs else replace(selection, rank=at)
    if key == ENTER and count:
        return replace(selection, level=RANKS if of_jobs else RANK)
    if key == QUIT or (key == BACK and selection.level == (RANKS if selection.alone else JOBS)):
        return None
    if key == BACK:
        return replace(selection, level=RANKS if selection.level == RANK else JOBS)
    return selection


def top_view(
    jobs: Sequence[JobNow], selection: Selection, *, height: int | None = 24, width: int = 80,
    colored: bool = True,
) -> RenderableType:  # fmt: skip
    """One frame."""
    if not jobs:
        return Text("no job runs under haiprof here; start one: haiprof train.py")

    def keys(enter: str, leave: str, part: str) -> list[Text]:
        return [Text(f"↑ ↓ ⏎ {enter}   {leave}   {part}".rstrip(), style="dim")] if is_live else []

    is_live = height is not None
    height = height or len(jobs) + sum(len(job.ranks) for job in jobs) + _HEAD_LINES
    if selection.level == JOBS or selection.job >= len(jobs):
        lines = _NARROW_JOB_LINES if width < _NARROW else _JOB_LINES
        shown = _visible_range(len(jobs), selection.job, (height - 4) // lines)
        table = _jobs(jobs, selection, shown, width=width, colored=colored)
        return Group(table, *keys("enter a job", "q quit", _part(shown, len(jobs), "jobs")))
    job = jobs[selection.job]
    head = _head(job, colored)
    if selection.level == RANKS or selection.rank >= len(job.ranks):
        leave = "q quit" if selection.alone else "q back"
        shown = _visible_range(len(job.ranks), selection.rank, height - _HEAD_LINES - len(head) + 4)
        ranks = _top_ranks(job, selection, shown, width=width, colored=colored)
        part = _part(shown, len(job.ranks), "ranks")
        return Group(*head, ranks, *keys("enter a rank", leave, part))
    rank = _rank(job.ranks[selection.rank], width=width, colored=colored)
    return Group(*head, *rank, *keys("other ranks", "q back", ""))


def _part(shown: range, count: int, what: str) -> str:
    """`jobs 3 to 7 of 12`; empty where all are shown."""
    return "" if len(shown) == count else f"{what} {shown[0] + 1} to {shown[-1] + 1} of {count}"


def _jobs(
    jobs: Sequence[JobNow], selection: Selection, shown: range, *, width: int, colored: bool
) -> Table:
    narrow = width < _NARROW
    pictures = () if narrow else ("split", "last steps")
    numbers = ("job", "ranks", "step", "each", *pictures[:1], "cores", "gpu", *pictures[1:])
    table = plain_table(*numbers, left=_LEFT)
    names = table.columns[0]
    names.no_wrap, names.overflow = False, "fold"  # numbers stay whole
    names.min_width = _NARROW_JOB if narrow else _JOB
    for at in shown:
        job = jobs[at]
        bar = () if narrow else (split_text(job.split, width=_BAR, colored=colored),)
        line = () if narrow else (_line(job.ranks[0].times_ns) if job.ranks else "",)
        table.add_row(
            printable(job.id) + (f" ({job.user})" if job.user else ""),
            _count_text(len(job.ranks), job.world_size),
            _step(job.step, all(r.step_is_exact for r in job.ranks)), duration_text(job.step_ns),
            *bar, _number(job.cpu_cores), ratio_text(job.gpu_ratio), *line,
            style="reverse" if at == selection.job else "",
        )  # fmt: skip
    return table


def _head(job: JobNow, colored: bool) -> list[RenderableType]:
    title = Text(overflow="fold")
    title.append(printable(job.id), style="bold")
    title.append("" if job.id.startswith(job.name) else f"  {printable(job.name)}")
    title.append(f"  {job.user}'s, read-only" if job.user else "", style="dim")
    title.append(f"  {duration_text(job.elapsed_ns)}", style="dim")
    if not job.running:
        title.append("  ended", style="yellow")
    summary = _count_text(len(job.ranks), job.world_size)
    summary += f" {'rank' if job.world_size == len(job.ranks) == 1 else 'ranks'}  "
    summary += f"step {_step(job.step, all(r.step_is_exact for r in job.ranks))}  "
    cores = _number(job.cpu_cores)
    summary += f"{duration_text(job.step_ns)} each  {cores} cores  "
    summary += f"GPU {ratio_text(job.gpu_ratio)}"
    verdict = Text(printable(job.verdict or "no verdict yet"))
    verdict.stylize("bold" if job.verdict else "dim")
    legend = Text(overflow="fold")
    for phase in PHASES:
        if job.split.get(phase) is not None:
            legend.append(filling(phase, colored=colored), style=PHASE_COLORS.get(phase, ""))
            legend.append(f" {phase} {ratio_text(job.split[phase])} ")
    return [title, Text(summary), *([legend] if legend else []), verdict, *_warnings(job)]


def _warnings(job: JobNow) -> list[RenderableType]:
    stalled = [rank for rank in job.ranks if is_stalled(rank)]
    if job.running and job.stopped:
        which = "suspended: all ranks" if job.suspended else ranks_text(job.stopped)
        return [Text(f"{which} stopped by a signal", style="yellow")]
    if not job.running or not stalled:
        return []
    longest = max(rank.idle_ns or 0 for rank in stalled)
    text = f"no step for {duration_text(longest)} on {len(stalled)} ranks: haiprof snapshot"
    return [Text(text, style="yellow")]


def is_stalled(rank: RankNow | JobNow) -> bool:
    """Whether it has made no step for several times its step time, and ten seconds."""
    if not rank.recording or rank.idle_ns is None or not rank.step_ns:
        return False
    return is_stall(rank.idle_ns, rank.step_ns)


def _top_ranks(
    job: JobNow, selection: Selection, shown: range, *, width: int, colored: bool
) -> RenderableType:
    if not job.ranks:
        return Text("no rank has reported in yet: it does so at its first training step")
    hosts = ["host"] if len({rank.host for rank in job.ranks}) > 1 else []
    narrow = width < _NARROW and bool(hosts)
    bars = [] if narrow else ["split"]
    names = ("rank", *hosts, "step", "each", *bars, "cores", "gpu", "last steps")
    table = plain_table(*names, left=_LEFT)
    for at in shown:
        rank = job.ranks[at]
        table.add_row(
            str(rank.rank), *(one_line(rank.host or MISSING) for _ in hosts),
            _step(rank.step, rank.step_is_exact), duration_text(rank.step_ns),
            *([] if narrow else [split_text(rank.split, width=_BAR, colored=colored)]),
            _number(rank.counters.get("cpu_cores")),
            ratio_text(rank.counters.get("utilization_ratio")),
            "stopped" if rank.stopped else "stalled" if is_stalled(rank) else _line(rank.times_ns),
            style="reverse" if at == selection.rank else "",
        )  # fmt: skip
    return table


def _rank(rank: RankNow, *, width: int, colored: bool) -> list[RenderableType]:
    where = f"rank {rank.rank}, {rank.host or MISSING}, pid {rank.pid or MISSING}"
    state = "" if rank.recording else ", its recording has ended"
    if rank.elsewhere:
        state = ": its node keeps its files to itself; haiprof ls --live shows it there"
    parts: list[RenderableType] = [Text(printable(where + state), style="bold")]
    times = plain_table("phase", "share", "of a step", left=("phase",))
    for phase in PHASES:
        share = rank.split.get(phase)
        spent = None if share is None or rank.step_ns is None else share * rank.step_ns
        mark = f"{filling(phase, colored=colored)} {phase}"
        named = Text(mark, style=PHASE_COLORS.get(phase, ""))
        times.add_row(named, ratio_text(share), duration_text(spent))
    line = sparkline(fit_width(rank.times_ns, min(_STEPS, width - len("last steps  "))))
    parts += [times, Text(f"last steps  {line}")]
    for step, spent_ns, phase in rank.slowest[:3]:
        parts.append(Text(f"  step {step}: {duration_text(spent_ns)}, most of it in {phase}"))
    for metric, (name, shown) in _COUNTERS.items():
        if metric in rank.counters:
            parts.append(Text(f"  {name}: {shown(rank.counters[metric])}"))
    return parts


def _visible_range(count: int, chosen: int, room: int) -> range:
    """The part of a long list that fits, with the selected line."""
    room = max(room, 3)
    start = min(max(chosen - room // 2, 0), max(count - room, 0))
    return range(start, min(start + room, count))


def _step(step: int | None, exact: bool) -> str:
    if step is None:
        return MISSING
    return str(step) if exact else f"~{step}"


def _number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}"


def _line(times_ns: Sequence[int]) -> str:
    return sparkline(times_ns[-_LINE:])
