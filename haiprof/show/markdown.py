"""Verdicts as Markdown, for a pull request, a summary or an agent; what Markdown consists of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from haiprof.base.ledger import position_words
from haiprof.base.units import MISSING, duration_text
from haiprof.show.text import printable

if TYPE_CHECKING:
    from haiprof.diagnosis.verdict import Finding, Verdict

_MARKS = "\\`*_[]<>|#~"


def markdown_text(text: str | None) -> str:
    """Text in Markdown: no markup, no new line."""
    kept = printable(text or MISSING)
    for mark in _MARKS:
        kept = kept.replace(mark, f"\\{mark}")
    return kept


def markdown_code(text: str | None) -> str:
    """Text between backticks: none in it."""
    return printable(text or "").replace("`", "'")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of one table; cells are text."""
    lines = [head, ["---"] * len(head), *([markdown_text(c) if c else "" for c in r] for r in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def verdict_markdown(verdict: Verdict, name: str) -> str:
    """Headline, the step by position, the causes with their gain, what is not known."""
    lines = [f"## {markdown_text(name)}: {markdown_text(verdict.headline)}", ""]
    ledger = verdict.ledger
    if ledger is not None:
        parts = (f"{position_words(k)} {duration_text(ns)}" for k, ns in ledger.positions.items())
        step = f"{duration_text(ledger.mean_ns)} (median {duration_text(ledger.median_ns)})"
        lines += [f"Step {step}: {', '.join(parts)}.", ""]
    if verdict.findings:
        head = ("", "cause", "step without it", "at", "do")
        lines += [*markdown_table(head, map(_cause, verdict.findings)), ""]
    unknown = [f"{what}: {why}" for what, why in verdict.not_measured]
    lines += [f"- not measured: {markdown_text(text)}" for text in unknown]
    lines += [f"- {markdown_text(note)}" for note in verdict.notes]
    return "\n".join(lines).rstrip() + "\n"


def _cause(finding: Finding) -> tuple[str, ...]:
    gain = finding.gain
    low, high = (duration_text(gain.low_ns), duration_text(gain.high_ns)) if gain else ("", "")
    between = f"{low} to {high}" if gain and gain.low_ns > 0 else f"at most {high}"
    without = gain and f"{duration_text(gain.left_ns)} ({between})"
    at = "; ".join(place.location for place in finding.code_lines[:2])
    return finding.severity, finding.title, without or "not known", at, finding.remedy
