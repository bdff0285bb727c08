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
from haiprof.report.blocks import one_line
from haiprof.report.run_header import RunHeader
from haiprof.report.split_bar import SplitBar
from haiprof.report.split_legend import PhaseMark
from haiprof.report.text import count_text, share_text, value_text
from haiprof.units import MISSING, duration_text, ratio_text

if TYPE_CHECKING:
    from haiprof.diagnosis.engine import Verdict
    from haiprof.diagnosis.finding import Finding

MAX_WIDTH = 100
_SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_NOTHING = "No rule found a bottleneck"
_TOO_LITTLE = "Not enough was recorded for a verdict"


def verdict_card(verdict: Verdict, run: RunHeader) -> RenderableType:
    """The card as the terminal shows it at the end of a run.

    Args:
        verdict: What was found.
        run: Name, state and outcome of the run.
    """
    parts: list[RenderableType] = [_headline(verdict), Text()]
    if verdict.step_count:
        parts += [*_split(verdict), Text()]
    for finding in verdict.findings:
        parts += [_finding(finding), Text()]
    parts += _closing(verdict)
    title = Text.assemble((" haiprof ", "bold"), (f" {run.name} ", ""), (f" {run.outcome} ", "dim"))
    title.truncate(MAX_WIDTH - 8, overflow="ellipsis")
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        border_style="dim",
        padding=(1, 2),
        width=None,
    )


def _headline(verdict: Verdict) -> Text:
    if verdict.findings:
        first = verdict.findings[0]
        return Text(first.title, style=_SEVERITY_STYLES[first.severity])
    return Text(_NOTHING if verdict.step_count else _TOO_LITTLE, style="bold")


def _split(verdict: Verdict) -> Iterator[RenderableType]:
    yield SplitBar(verdict.split)
    yield _split_numbers(verdict.split)
    total = sum(ns or 0.0 for ns in verdict.split.values())
    facts = f"middle step {duration_text(total)} · {count_text(verdict.step_count, 'step')}"
    yield Text(facts, style="dim")


def _split_numbers(split: Mapping[str, float | None]) -> RenderableType:
    """Mark, name, time and share of each phase, one column each."""
    total = sum(ns or 0.0 for ns in split.values())
    grid = Table.grid(padding=(0, 2, 0, 0), expand=False)
    for _ in PHASES:
        grid.add_column(no_wrap=True, overflow="ellipsis")
    names = []
    for phase in PHASES:
        name = Table.grid(padding=(0, 1, 0, 0))
        name.add_row(PhaseMark(phase), phase)
        names.append(name)
    grid.add_row(*names)
    grid.add_row(*(f"  {duration_text(split[p])}" for p in PHASES), style="bold")
    grid.add_row(*(f"  {share_text(split[p], total)}" for p in PHASES), style="dim")
    return grid


def _finding(finding: Finding) -> RenderableType:
    head = Text()
    head.append(finding.severity, style=_SEVERITY_STYLES[finding.severity])
    head.append(f"  {finding.title}", style="bold")
    head.append(f"  (confidence {ratio_text(finding.confidence)})", style="dim")
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
    for what, why in verdict.not_measured:
        grid.add_row("not measured", f"{what}: {why}")
    for rule, why in verdict.abstained:
        grid.add_row("not judged", f"{rule}: {why}")
    grid.add_row("haiprof's cost", _cost_text(verdict))
    yield grid
    yield one_line(f"next  {verdict.next_command}")


def _cost_text(verdict: Verdict) -> str:
    return MISSING
