"""diagnosis.json: what was found in a run, for scripts and other tools."""

from __future__ import annotations

from typing import Any

from haiprof.diagnosis.finding import Finding
from haiprof.diagnosis.verdict import Verdict
from haiprof.errors import HaiprofError
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.writer import write_json

SCHEMA = "haiprof.diagnosis.1"
FIELDS = {
    "schema": "name and version of this format",
    "run": "the run directory",
    "name": "the job's name",
    "headline": "one line: the first finding, that there is none, or why nothing is known",
    "step_ns": "median training step after warm-up, traced steps left out; null without steps",
    "step_count": "training steps of all ranks",
    "ranks": "ranks that have steps",
    "since_ns": "only steps from this Unix time on were judged; null: the whole run",
    "findings": "most important first, a cause right before what it explains",
    "abstained": "rules that could not be judged: `slug`, and `why`",
    "checked": "slugs of rules that had their data and found nothing",
}
"""Every field of the document."""
FINDING_FIELDS = {
    "slug": "the rule",
    "cause": "why, where the rule tells several causes apart; else null",
    "severity": "`critical`, `warning` or `info`",
    "confidence": "in [0, 1]",
    "title": "the cause in one line",
    "evidence": "the numbers: `name`, `value` (base units; null: not known), `unit`",
    "remedy": "what to change",
    "ranks": "ranks it is about; empty: all",
    "explained_by": "slug of the finding that is its cause; null: it is a cause itself",
    "missing": "what could not be measured and would make it surer",
    "scope": "`run`: all judged steps prove it; `window`: the steps of a trace",
}
"""Every field of one finding."""


def as_document(verdict: Verdict, *, since_ns: int | None = None) -> dict[str, Any]:
    """The verdict in the documented form; see docs/diagnosis.md.

    Args:
        verdict: What was found.
        since_ns: Where only the steps from a Unix time on were judged.
    """
    content = verdict.as_json()
    return {
        "schema": SCHEMA,
        **{n: content[n] for n in ("run", "name", "headline", "step_ns", "step_count", "ranks")},
        "since_ns": since_ns,
        "findings": [_finding(finding) for finding in verdict.findings],
        "abstained": [{"slug": rule, "why": why} for rule, why in verdict.abstained],
        "checked": list(verdict.checked),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    content = finding.as_json()
    content["slug"] = finding.rule
    content["ranks"] = [] if finding.rank is None else [finding.rank]
    return {name: content[name] for name in FINDING_FIELDS}


def save_document(content: dict[str, Any], run: RunPaths) -> None:
    """Writes report/diagnosis.json.

    Raises:
        HaiprofError: The run directory is gone, read-only or full.
    """
    try:
        run.report.mkdir(exist_ok=True)
        write_json(run.diagnosis_json, content)
    except OSError as error:
        raise HaiprofError(
            f"{run.report}: the diagnosis cannot be saved: {error.strerror or error}"
        ) from None
