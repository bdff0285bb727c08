"""The verdict card: the cause, the numbers that prove it, what to do, and how sure that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from haiprof.plots.style import PHASES
from haiprof.report.run_header import RunHeader
from haiprof.report.split_bar import SplitBar
from haiprof.report.split_legend import PhaseName
from haiprof.report.text import count_text, fine_ratio_text, share_text, value_text
from haiprof.units import duration_text, ratio_text

if TYPE_CHECKING:
    from haiprof.diagnosis.finding import Finding
    from haiprof.diagnosis.verdict import Cost, Verdict

MAX_WIDTH = 100
_NOTE_LIMIT = 4
_EVENT_NAMES = {"gc": "garbage collections", "save": "checkpoint saves"}
_SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def verdict_card(verdict: Verdict, run: RunHeader, *, width: int = MAX_WIDTH) -> RenderableType:
    """The card as the terminal shows it at the end of a run.

    Args:
        verdict: What was found.
        run: Name, state and outcome of the run.
        width: Columns of the terminal; the card takes at most 100.
    """
    parts: list[RenderableType] = [_headline(verdict), Text()]
    if verdict.step_count:
        parts += [*_split(verdict, width), Text()]
    for place, finding in enumerate(verdict.findings):
        parts += [_finding(finding, titled=place > 0), Text()]
    parts += _closing(verdict)
    title = Text.assemble((" haiprof ", "bold"), (f" {run.name} ", ""), (f" {run.outcome} ", "dim"))
    title.truncate(min(width, MAX_WIDTH) - 8, overflow="ellipsis")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        border_style="bright_black",
        padding=(1, 2),
        width=min(width, MAX_WIDTH),
    )


def _headline(verdict: Verdict) -> Text:
    if verdict.findings:
        first = verdict.findings[0]
        return Text(verdict.headline, style=_SEVERITY_STYLES[first.severity])
    return Text(verdict.headline, style="bold green" if verdict.step_count else "bold yellow")


def _split(verdict: Verdict, width: int) -> Iterator[RenderableType]:
    yield SplitBar(verdict.split)
    yield _split_numbers(verdict.split, width)
    ranks = count_text(len(verdict.ranks), "rank")
    steps = count_text(verdict.step_count, "step")
    together = " together" if len(verdict.ranks) > 1 else ""
    facts = [f"median step {duration_text(verdict.step_ns)}", f"{steps} of {ranks}{together}"]
    if verdict.evaluation_ns:
        facts.append(f"{duration_text(verdict.evaluation_ns)} of evaluation apart from that")
    facts += [
        f"{_EVENT_NAMES.get(kind, kind)}: {e.count} for {duration_text(e.total_ns)}"
        for kind, e in verdict.events.items()
    ]
    yield Text(" · ".join(facts), style="dim")


def _split_numbers(split: Mapping[str, float | None], width: int) -> RenderableType:
    """Mark, name, time and share of each phase, one column each."""
    total = sum(ns or 0.0 for ns in split.values())
    gap = 3 if width >= MAX_WIDTH else 1
    grid = Table.grid(padding=(0, gap, 0, 0))
    for _ in PHASES:
        grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(*(PhaseName(phase, width=width) for phase in PHASES))
    grid.add_row(*(f"  {duration_text(split[p])}" for p in PHASES), style="bold")
    grid.add_row(*(f"  {share_text(split[p], total)}" for p in PHASES), style="dim")
    return grid


def _finding(finding: Finding, *, titled: bool) -> RenderableType:
    """Its severity and numbers; the first one's title is the headline."""
    head = Text()
    head.append(finding.severity, style=_SEVERITY_STYLES[finding.severity])
    if titled:
        head.append(f"  {finding.title}", style="bold")
    sure = f"confidence {ratio_text(finding.confidence)}".replace(" ", "\N{NO-BREAK SPACE}")
    head.append(f"  {sure}", style="dim")
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(overflow="fold")
    rows.add_column(justify="right", no_wrap=True)
    for evidence in finding.evidence:
        rows.add_row(Text(evidence.name, style="dim"), value_text(evidence.value, evidence.unit))
    parts: list[RenderableType] = [
        head,
        Padding(rows, (0, 0, 0, 2)),
        _labelled("do", finding.remedy),
    ]
    if finding.missing:
        parts.append(_labelled("not known", ", ".join(finding.missing), style="dim"))
    return Group(*parts)


def _labelled(label: str, text: str, *, style: str = "") -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(
        Text(f"  {label}:", style="bold green" if label == "do" else "dim"), Text(text, style=style)
    )
    return grid


def _closing(verdict: Verdict) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold", style="dim")
    for place, line in enumerate(verdict.reactions):
        grid.add_row("" if place else "noticed", line)
    for place, line in enumerate(verdict.traces):
        grid.add_row("" if place else "traced", line)
    for label, what, why in _unknowns(verdict):
        grid.add_row(label, f"{what}: {why}" if what else why)
    grid.add_row("own cost", cost_text(verdict.cost))
    yield grid
    yield Text()
    yield Text.assemble(("next  ", "dim"), (verdict.next_command, "bold"), overflow="fold")


def _unknowns(verdict: Verdict) -> Iterator[tuple[str, str, str]]:
    """(label, what, why), the label only where it changes."""
    for place, (what, why) in enumerate(verdict.not_measured):
        yield "" if place else "not measured", what, why
    rules: dict[str, list[str]] = {}
    for rule, why in verdict.abstained:
        rules.setdefault(why, []).append(rule.replace("_", " "))
    for place, (why, names) in enumerate(rules.items()):
        yield "" if place else "not judged", ", ".join(names), why
    for place, note in enumerate(verdict.notes[:_NOTE_LIMIT]):
        yield "" if place else "notes", "", note
    if len(verdict.notes) > _NOTE_LIMIT:
        yield "", "", f"and {len(verdict.notes) - _NOTE_LIMIT} more, in --json"


def cost_text(cost: Cost) -> str:
    """What haiprof itself took, in the job and beside it."""
    inside = "in the job not recorded"
    if cost.hook_ns_per_step is not None:
        share = f" ({fine_ratio_text(cost.hook_ratio)})" if cost.hook_ratio is not None else ""
        inside = f"{duration_text(cost.hook_ns_per_step)} per step in the job{share}"
    if cost.agent_cpu_ratio is None:
        return f"{inside}; beside it not recorded"
    return f"{inside}; {fine_ratio_text(cost.agent_cpu_ratio)} of one CPU beside it"
