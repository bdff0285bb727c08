"""The wall time of a job by account, and its starts with the steps that counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text, ratio_text, shorten
from haiprof.show.markdown import markdown_text
from haiprof.show.text import count_text, moment_text, printable, share_text
from haiprof.show.views.blocks import label_table, plain_table, section

if TYPE_CHECKING:  # a list of runs has words of this file, and reads no run
    from haiprof.run_analysis.restarts import Goodput, Start

_WORDS = {
    "productive_steps": "productive steps", "input": "input", "evaluation": "evaluation",
    "checkpoint": "checkpoint", "compile": "compile", "init": "init and import",
    "waiting_for_ranks": "waiting for ranks", "hang": "hang", "lost_steps": "lost steps",
    "uncertain_steps": "steps that may be lost", "drain": "after training", "queue": "queue",
    "unknown": "not known",
}  # fmt: skip
_MEANINGS = {
    "productive_steps": "training, without what is below",
    "input": "in these steps, waiting for batches",
    "checkpoint": "save and restore",
    "init": "from a process's start to its first step",
    "waiting_for_ranks": "in torch.distributed, before the first step",
    "hang": "nothing moved",
    "lost_steps": "trained again, or never finished",
    "uncertain_steps": "no checkpoint of them was seen: they may be trained again",
    "drain": "from the last step, or a death, to the end",
    "queue": "between runs",
    "unknown": "no rank was recorded",
}
SCHEMA = "haiprof.goodput.1"


def account_text(name: str) -> str:
    """An account, as people see it."""
    return _WORDS.get(name, name)


def fate_text(start: Start) -> str:
    """`, 3 of them lost`: what became of a start's steps; empty where all of them counted."""
    parts = [f"{start.lost_steps} of them lost"] if start.lost_steps else []
    if start.uncertain_steps:
        parts.append(f"{start.uncertain_steps} of them may be lost")
    return "".join(f", {part}" for part in parts)


def goodput_text(found: Goodput) -> str:
    """One line: the share of the wall time that counted, and how many steps were lost."""
    wall = duration_text(found.wall_ns)
    if found.ratio is None:
        return f"no step in {wall}"
    share, most = ratio_text(found.ratio), ratio_text(found.ratio_high)
    share = share if share == most else f"between {share} and {most}"
    return f"goodput: {share} of {wall} was training that counts; {_lost_text(found)}"


def _lost_text(found: Goodput) -> str:
    low, high = found.lost_steps
    if not high:
        return "no step was lost"
    if low == high:
        return f"{count_text(low, 'step')} lost"
    return f"{low} to {count_text(high, 'step')} lost, as no checkpoint of them was seen"


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
            share = share_text(ns, found.wall_ns)
            yield account_text(name), duration_text(ns), share, _MEANINGS.get(name, "")
    whole = share_text(found.wall_ns, found.wall_ns)
    yield "all", duration_text(found.wall_ns), whole, f"in none of these: {found.residual_ns} ns"


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
        starts.add_row(*(shorten(cells[place].removeprefix(f"{day} ")) for place in shown))
    parts += [
        section("wall time", accounts),
        section(f"starts on {day}" if day else "starts", starts),
    ]
    if joined:
        parts.append(section("runs", label_table(_run_rows(found.starts))))
    return Group(*parts)


def _run_rows(starts: Sequence[Start]) -> Iterator[tuple[str, str]]:
    """Which starts were of which run."""
    numbered = enumerate(starts, start=1)
    for run, group in itertools.groupby(numbered, key=lambda each: each[1].run):
        places = [place for place, _ in group]
        last = f" to {places[-1]}" if len(places) > 1 else ""
        yield f"start {places[0]}{last}", printable(run)


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
        "schema": SCHEMA,
        "runs": [str(run) for run in runs],
        "joined_by": joined or None,
        **found.summary(),
        "has_ended": found.has_ended,
        "accounts": dict.fromkeys(ACCOUNTS, 0) | dict(found.accounts),
        "residual_ns": found.residual_ns,
        "starts": [asdict(start) | {"lost_steps": start.lost_steps} for start in found.starts],
    }
