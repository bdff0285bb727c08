"""How a job died, and where the wall time of its starts went: in the terminal, for a ticket."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from haiprof.base import units
from haiprof.base.version import read_data
from haiprof.show.run_header import RunHeader
from haiprof.show.text import (
    count_text,
    markdown_code,
    markdown_table,
    markdown_text,
    moment_text,
    printable,
    share_text,
)
from haiprof.show.views.blocks import LabelTable, plain_table, section

if TYPE_CHECKING:  # a list of runs has words of this file, and reads no run
    from haiprof.diagnosis.restart_advice import Advice
    from haiprof.diagnosis.verdict import Verdict
    from haiprof.run_analysis.deaths import Death, Fate
    from haiprof.run_analysis.restarts import Goodput, Start

SHOWN_FATES = 12
_FRAMES = 12
_SAID = read_data("show/views/deaths.json")
WORDS: Mapping[str, str] = _SAID["causes"]
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
    fates = Table.grid(padding=(0, 2, 0, 0))
    for style in ("bold", "dim", ""):
        fates.add_column(style=style, no_wrap=style == "bold", overflow="fold")
    rows = list(grouped_fates(death))
    for who, role, text in rows[:SHOWN_FATES]:
        fates.add_row(who, role, printable(text))
    if len(rows) > SHOWN_FATES:
        fates.add_row("", "", f"and {len(rows) - SHOWN_FATES} more, in --json")
    parts.append(_indent(fates))
    parts += [_indent(Text(line, style="dim")) for line in _death_lines(verdict)]
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(Text("  do:", style="bold green"), Text(death.remedy))
    if verdict.advice is not None:
        then = Text(printable(advice_text(verdict.advice)))
        grid.add_row(Text("  then:", style="bold green"), then)
    return Group(*parts, grid)


def advice_text(advice: Advice) -> str:
    """`STOP: why`, as a card and the page have it."""
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


def grouped_fates(death: Death) -> Iterator[tuple[str, str, str]]:
    """(ranks, role, what became of them): ranks that ended alike in one line, the cause first."""
    order = ("cause", "victim", "stopped", "absent", "unknown", "clean")
    found: dict[tuple[str, str], list[Fate]] = {}
    for fate in sorted(death.fates, key=lambda f: (order.index(f.role), f.ended_ns or 0)):
        found.setdefault((fate.role, _became_text(fate, death.headline)), []).append(fate)
    for (role, what), fates in found.items():
        times = [f.ended_ns - death.died_ns for f in fates if f.ended_ns and death.died_ns]
        later = max(times, default=0)
        when = f", {units.later_text(later)}" if later > 0 and role != "cause" else ""
        yield units.ranks_text([f.rank for f in fates]), role, what + when


def _became_text(fate: Fate, headline: str) -> str:
    is_cause = fate.role == "cause"
    waited = f"waited in {fate.waited_in}" if fate.waited_in and not is_cause else ""
    what = "" if is_cause and fate.what in headline else fate.what  # said once
    step = f"last step recorded {fate.step}" if is_cause and fate.step is not None else ""
    return ", ".join(filter(None, (waited, what, step)))


def _death_lines(verdict: Verdict) -> Iterator[str]:
    death = verdict.death
    assert death is not None
    if death.died_ns:
        order = f" · order: {death.clock}" if len(death.fates) > 1 else ""
        zone = time.strftime("%Z", time.localtime(death.died_ns / units.NS_PER_S))
        yield f"at {moment_text(death.died_ns)} {zone}{order}"
    yield from said_lines(death)
    yield from map(printable, death.scheduler)
    yield from memory_lines(verdict)
    yield from start_lines(verdict.starts, death)
    if verdict.goodput is not None:
        is_short = verdict.goodput.ratio is not None and verdict.goodput.wall_ns < _SHORT_NS
        yield _lost_text(verdict.goodput) if is_short else goodput_text(verdict.goodput)


_SHORT_NS = 300 * units.NS_PER_S
"""Of a job that died so soon, the share of time that counted tells of its start alone."""
_TOLD_NS = 20 * units.NS_PER_S
"""When a line was printed is told from so long before the death on: it was read up to 2 s later."""


def said_lines(death: Death) -> Iterator[str]:
    """The words in which memory ran out, and what the job printed before it died."""
    said = (death.message or "").strip().partition("\n")[0]
    if death.cause == "out_of_memory" and said:
        yield printable(f"in its own words: {units.shorten(units.without_source_places(said))}")
    for each in death.witnesses:
        before_ns = (death.died_ns or 0) - each.wall_ns  # when it was read
        before = f" about {units.duration_text(before_ns)} before" if before_ns >= _TOLD_NS else ""
        yield printable(f"{each.who} printed{before}: {units.without_source_places(each.text)}")


def memory_lines(verdict: Verdict) -> Iterator[str]:
    """Memory of the ranks that it began with, where that may be the reason: GPU's, then host's."""
    for each in verdict.gpu_memory_at_end:
        yield from map(printable, each.texts)
    if not verdict.gpu_memory_at_end:
        yield from (each.text for each in verdict.memory_at_end)


def start_lines(starts: Sequence[Start], death: Death) -> Iterator[str]:
    """One line for each start of the ranks, where there were several; the headline tells one."""
    for place, start in enumerate(starts if len(starts) > 1 else (), start=1):
        is_told = start.generation == death.died_in
        why = "its death is the headline" if is_told else start.why or "no death"
        yield printable(f"start {place}: {start.step_count} steps{fate_text(start)}, {why}")


def exit_report(verdict: Verdict, run: RunHeader) -> str:
    """How the job ended, as Markdown for a ticket."""
    lines = [f"## {markdown_text(run.name)}: {markdown_text(verdict.headline)}", "",
             f"- run: `{markdown_code(run.path)}`",
             f"- command: `{markdown_code(shlex.join(run.command))}`",
             f"- host: `{markdown_code(run.host)}`, started {moment_text(run.start_wall_ns)}, "
             f"{run.outcome} after {units.duration_text(run.duration_ns)}"]  # fmt: skip
    death = verdict.death
    if death is None:
        return "\n".join([*lines, "", "No rank died."]) + "\n"
    likely = "" if death.certain else " (likely, not proved)"
    lines.append(f"- cause: **{WORDS.get(death.cause, death.cause)}**{likely}")
    if death.line:
        source = f" `{markdown_code(death.source)}`" if death.source else ""
        lines.append(f"- line: `{markdown_code(death.line)}`{source}")
    if death.step is not None:
        lines.append(f"- last step recorded: {death.step}")
    lines += [f"- {markdown_text(line)}" for line in _death_lines(verdict)]
    lines += ["", *markdown_table(("ranks", "", "what became of them"), grouped_fates(death))]
    if death.traceback:
        frames = [markdown_code(frame) for frame in death.traceback[-_FRAMES:]]
        said = [markdown_code(line) for line in (death.message or "").splitlines()[:20]]
        lines += ["", "```", *frames, *said, "```"]
    for fate in [f for f in death.fates if f.role == "cause" and f.printed][:1]:
        last = [markdown_code(line) for line in fate.printed]
        lines += ["", f"Last lines of rank {fate.rank}:", "", "```", *last, "```"]
    lines += ["", f"**Do:** {markdown_text(death.remedy)}"]
    if verdict.advice is not None:
        lines += ["", f"**Then:** {markdown_text(advice_text(verdict.advice))}"]
    return "\n".join(lines) + "\n"


SCHEMA = "haiprof.goodput.1"


def account_text(name: str) -> str:
    """An account, as people see it."""
    # The data file has those whose names do not say what they are.
    return _SAID["accounts"].get(name) or name.replace("_", " ")


def fate_text(start: Start) -> str:
    """`, 3 of them lost`: what became of a start's steps; empty where all of them counted."""
    counts = ((start.lost_steps, "lost"), (start.uncertain_steps, "may be lost"))
    return "".join(f", {count} of them {became}" for count, became in counts if count)


def goodput_text(found: Goodput) -> str:
    """One line: the share of the wall time that counted, and how many steps were lost."""
    wall = units.duration_text(found.wall_ns)
    if found.ratio is None:
        return f"no step in {wall}"
    share, most = units.ratio_text(found.ratio), units.ratio_text(found.ratio_high)
    if share != most:
        share = f"{share} to {most}" if found.ratio else f"at most {most}"
    return f"goodput: {share} of {wall}; {_lost_text(found)}"


def _lost_text(found: Goodput) -> str:
    low, high = found.lost_steps
    if not high:
        return "no step was lost"
    if low == high:
        return f"{count_text(low, 'step')} lost"
    least = f"{low} to " if low else "up to "
    has_saved = any(start.has_saved for start in found.starts)
    since = "from the last checkpoint that was seen," if has_saved else "no checkpoint was seen:"
    return f"{since} a restart repeats {least}{count_text(high, 'step')}"


def _origin_text(start: Start) -> str:
    """What a start went on from."""
    if start.went_on == "checkpoint" and start.from_start is not None:
        name = Path(start.file).name if start.file else "a checkpoint"
        exact = "" if start.first_step is not None else "at least "
        return f"start {start.from_start + 1}, {exact}{start.from_step} steps: {name}"
    if start.went_on == "not known":
        return "not known: no checkpoint was seen to be read"
    return {"first": "the beginning", "never trained": "never trained"}.get(start.went_on, "")


def _rows(found: Goodput) -> Iterator[tuple[str, str, str, str]]:
    from haiprof.run_analysis.restarts import ACCOUNTS

    for name in ACCOUNTS:
        if ns := found.accounts.get(name):
            share, meaning = share_text(ns, found.wall_ns), _SAID["meanings"].get(name, "")
            yield account_text(name), units.duration_text(ns), share, meaning
    whole, rest = share_text(found.wall_ns, found.wall_ns), found.residual_ns
    yield "all", units.duration_text(found.wall_ns), whole, f"in none of these: {rest} ns"


_HEAD = ("start", "began", "steps", "count", "went on from", "run", "ended")


def _start_rows(starts: Sequence[Start]) -> Iterator[list[str]]:
    before = None
    for place, start in enumerate(starts, start=1):
        may = f" to {start.kept_steps + start.uncertain_steps}" if start.uncertain_steps else ""
        yield [
            str(place), moment_text(start.began_ns), str(start.step_count),
            f"{start.kept_steps}{may}", _origin_text(start),
            "as before" if start.run == before else printable(start.run),
            printable(start.why or "no death"),
        ]  # fmt: skip
        before = start.run


def goodput_view(found: Goodput, *, joined: str) -> RenderableType:
    """The accounts, then the starts; `joined`: what its runs have in common."""
    parts: list[RenderableType] = [Text(goodput_text(found), style="bold")]
    parts += [Text(printable(line), style="dim") for line in _notes(found, joined)]
    accounts = plain_table("account", "time", "share", "what", left=["account", "what"])
    accounts.columns[-1].no_wrap = False
    for row in _rows(found):
        accounts.add_row(*row)
    days = {moment_text(start.began_ns).partition(" ")[0] for start in found.starts}
    day = days.pop() if len(days) == 1 and found.starts[0].began_ns is not None else ""
    shown = [place for place, name in enumerate(_HEAD) if name != "run"]
    starts = plain_table(*(_HEAD[place] for place in shown), left=_HEAD[4:])
    for column in starts.columns[-2:]:
        column.no_wrap = False
    for cells in _start_rows(found.starts):
        starts.add_row(*(units.shorten(cells[place].removeprefix(f"{day} ")) for place in shown))
    title = f"starts on {day}" if day else "starts"
    parts += [section("wall time", accounts), section(title, starts)]
    if joined:  # which starts were of which run
        by_run = itertools.groupby(enumerate(found.starts, start=1), key=lambda each: each[1].run)
        places = ((run, [place for place, _ in group]) for run, group in by_run)
        rows = [(f"start {at[0]}" + f" to {at[-1]}" * (len(at) > 1), printable(run))
                for run, at in places]  # fmt: skip
        parts.append(section("runs", LabelTable(rows)))
    return Group(*parts)


def _notes(found: Goodput, joined: str) -> Iterator[str]:
    runs = len({start.run for start in found.starts})
    if joined:
        yield f"{count_text(runs, 'run')} joined: {joined}"
    if not found.has_ended:
        yield "its last run has not ended, or nobody saw its end: up to the last sign of it"


def goodput_markdown(found: Goodput, *, joined: str) -> str:
    """The same for a pull request or a ticket."""
    lines = [f"## {markdown_text(goodput_text(found))}", ""]
    lines += [f"- {markdown_text(line)}" for line in _notes(found, joined)]
    lines += ["", "| account | time | share | |", "|---|--:|--:|---|"]
    lines += [f"| {' | '.join(map(markdown_text, row))} |" for row in _rows(found)]
    lines += ["", f"| {' | '.join(_HEAD)} |", "|--:|---|--:|--:|---|---|---|"]
    lines += [f"| {' | '.join(map(markdown_text, row))} |" for row in _start_rows(found.starts)]
    return "\n".join(lines) + "\n"


def goodput_data(found: Goodput, runs: Sequence[Path], *, joined: str) -> dict[str, Any]:
    """The same for scripts; docs/deaths.md describes the fields."""
    from haiprof.run_analysis.restarts import ACCOUNTS

    return {
        "schema": SCHEMA, "runs": [str(run) for run in runs], "joined_by": joined or None,
        **found.summary(), "has_ended": found.has_ended,
        "accounts": dict.fromkeys(ACCOUNTS, 0) | dict(found.accounts),
        "residual_ns": found.residual_ns,
        "starts": [asdict(start) | {"lost_steps": start.lost_steps} for start in found.starts],
    }  # fmt: skip
