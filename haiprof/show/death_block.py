"""How a job died, for people: in the terminal, in a list, and as Markdown for a ticket."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from haiprof.base.units import NS_PER_S, duration_text, later_text, ranks_text
from haiprof.show.markdown import markdown_code, markdown_text
from haiprof.show.run_header import RunHeader
from haiprof.show.text import moment_text, printable
from haiprof.show.views.goodput import fate_text, goodput_text

if TYPE_CHECKING:
    from haiprof.diagnosis.restart_advice import Advice
    from haiprof.diagnosis.verdict import Verdict
    from haiprof.run_analysis.deaths import Death, Fate
    from haiprof.run_analysis.restarts import Start

SHOWN_FATES = 12
_FRAMES = 12
WORDS = {
    "exception": "exception", "out_of_memory": "out of memory", "killed": "killed",
    "crash": "crash", "exit": "exit status", "early_exit": "early exit", "hang": "hang",
    "deadlock": "deadlock", "mismatch": "collective mismatch", "node_lost": "node lost",
    "never_started": "not started",
    "shared_memory_full": "/dev/shm full", "disk_full": "disk full", "time_limit": "time limit",
    "preempted": "preempted", "requeued": "requeued", "evicted": "evicted",
    "cancelled": "cancelled", "signal": "signal",
    "interrupted": "interrupted", "launcher": "launcher", "gone": "gone", "unknown": "not known",
}  # fmt: skip
"""Causes in a word, by their slugs."""


def death_block(verdict: Verdict) -> RenderableType:
    """What stands below the headline of a run that died."""
    death = verdict.death
    assert death is not None
    head = Text("cause", style="bold red")
    head.append(f"     {WORDS.get(death.cause, death.cause)}", style="bold")
    head.append("" if death.certain else "  likely, not proved", style="dim")
    parts: list[RenderableType] = [head]
    if death.source:
        place = f"{death.line}:  " if death.line else ""
        parts.append(_indent(Text(printable(place + death.source), style="bold")))
    parts.append(_indent(_fate_table(death)))
    parts += [_indent(Text(line, style="dim")) for line in _death_lines(verdict)]
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("  do:", style="bold green"), Text(death.remedy))
    if verdict.advice is not None:
        grid.add_row(
            Text("  restart:", style="bold green"), Text(printable(_advice_text(verdict.advice)))
        )
    return Group(*parts, grid)


def _advice_text(advice: Advice) -> str:
    return f"{advice.headline}: {advice.text}"


def advice_view(advice: Advice | None) -> RenderableType:
    """The advice alone, in its first line what a script reads, then all deaths that it rests on."""
    if advice is None:
        return Text("NOTHING: no death of this job is known")
    starts = (f"  {a.run}, start {a.generation + 1}: {a.headline}" for a in advice.attempts)
    first = Text(printable(advice.headline), no_wrap=True, overflow="ignore")
    return Group(first, *(Text(printable(line)) for line in (f"  {advice.text}", *starts)))


def _indent(part: RenderableType) -> RenderableType:
    return Padding(part, (0, 0, 0, 2))


def _fate_table(death: Death) -> Table:
    rows = Table.grid(padding=(0, 2, 0, 0))
    for style in ("bold", "dim", ""):
        rows.add_column(style=style, no_wrap=style == "bold", overflow="fold")
    shown = list(grouped_fates(death))
    for who, role, text in shown[:SHOWN_FATES]:
        rows.add_row(who, role, printable(text))
    if len(shown) > SHOWN_FATES:
        rows.add_row("", "", f"and {len(shown) - SHOWN_FATES} more, in --json")
    return rows


def grouped_fates(death: Death) -> Iterator[tuple[str, str, str]]:
    """(ranks, role, what became of them): ranks that ended alike in one line, the cause first."""
    order = ("cause", "victim", "stopped", "absent", "unknown", "clean")
    found: dict[tuple[str, str], list[Fate]] = {}
    for fate in sorted(death.fates, key=lambda f: (order.index(f.role), f.ended_ns or 0)):
        found.setdefault((fate.role, _fate_text(fate, death.headline)), []).append(fate)
    for (role, what), fates in found.items():
        times = [f.ended_ns - death.died_ns for f in fates if f.ended_ns and death.died_ns]
        later = max(times, default=0)
        when = f", {later_text(later)}" if later > 0 and role != "cause" else ""
        yield ranks_text([f.rank for f in fates]), role, what + when


def _fate_text(fate: Fate, headline: str) -> str:
    is_cause = fate.role == "cause"
    parts = [
        f"waited in {fate.waited_in}" if fate.waited_in and not is_cause else "",
        "" if is_cause and fate.what in headline else fate.what,  # said once
        f"last step recorded {fate.step}" if is_cause and fate.step is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _death_lines(verdict: Verdict) -> Iterator[str]:
    death = verdict.death
    assert death is not None
    if death.died_ns:
        order = f" · order: {death.clock}" if len(death.fates) > 1 else ""
        yield f"at {moment_text(death.died_ns)}{order}"
    yield from witness_lines(death)
    yield from map(printable, death.scheduler)
    yield from memory_lines(verdict)
    yield from start_lines(verdict.starts)
    if verdict.goodput is not None:
        yield goodput_text(verdict.goodput)


_TOLD_NS = 20 * NS_PER_S
"""When a line was printed is told from so long before the death on: it was read up to 2 s later."""


def witness_lines(death: Death) -> Iterator[str]:
    """What the job printed before it died, in a line each."""
    for each in death.witnesses:
        before_ns = (death.died_ns or 0) - each.wall_ns  # when it was read
        before = f" about {duration_text(before_ns)} before" if before_ns >= _TOLD_NS else ""
        yield printable(f"{each.who} printed{before}: {each.text}")


def memory_lines(verdict: Verdict) -> Iterator[str]:
    """Memory of the ranks that it began with, where that may be the reason: GPU's, then host's."""
    for each in verdict.gpu_memory_at_end:
        yield from map(printable, each.texts)
    if not verdict.gpu_memory_at_end:
        yield from (each.text for each in verdict.memory_at_end)


def start_lines(starts: Sequence[Start]) -> Iterator[str]:
    """One line for each start of the ranks, where there were several."""
    for place, start in enumerate(starts if len(starts) > 1 else (), start=1):
        why = start.why or "no death"
        yield printable(f"start {place}: {start.step_count} steps{fate_text(start)}, {why}")


def exit_report(verdict: Verdict, run: RunHeader) -> str:
    """How the job ended, as Markdown for a ticket."""
    lines = [f"## {markdown_text(run.name)}: {markdown_text(verdict.headline)}", ""]
    lines += [f"- run: `{markdown_code(run.path)}`",
              f"- command: `{markdown_code(shlex.join(run.command))}`",
              f"- host: `{markdown_code(run.host)}`, started {moment_text(run.start_wall_ns)}, "
              f"{run.outcome} after {duration_text(run.duration_ns)}"]  # fmt: skip
    death = verdict.death
    if death is None:
        return "\n".join([*lines, "", "No rank died."]) + "\n"
    lines += [f"- cause: **{WORDS.get(death.cause, death.cause)}**"
              f"{'' if death.certain else ' (likely, not proved)'}"]  # fmt: skip
    if death.line:
        source = f" `{markdown_code(death.source)}`" if death.source else ""
        lines.append(f"- line: `{markdown_code(death.line)}`{source}")
    if death.step is not None:
        lines.append(f"- last step recorded: {death.step}")
    lines += [f"- {markdown_text(line)}" for line in _death_lines(verdict)]
    lines += ["", "| ranks | | what became of them |", "|---|---|---|"]
    lines += [
        f"| {who} | {role} | {markdown_text(text)} |" for who, role, text in grouped_fates(death)
    ]
    if death.traceback:
        frames = [markdown_code(frame) for frame in death.traceback[-_FRAMES:]]
        said = [markdown_code(line) for line in (death.message or "").splitlines()[:20]]
        lines += ["", "```", *frames, *said, "```"]
    for fate in [f for f in death.fates if f.role == "cause" and f.printed][:1]:
        last = [markdown_code(line) for line in fate.printed]
        lines += ["", f"Last lines of rank {fate.rank}:", "", "```", *last, "```"]
    lines += ["", f"**Do:** {markdown_text(death.remedy)}"]
    if verdict.advice is not None:
        lines += ["", f"**Then:** {markdown_text(_advice_text(verdict.advice))}"]
    return "\n".join(lines) + "\n"
