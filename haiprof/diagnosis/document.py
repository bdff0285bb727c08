"""diagnosis.json and verdict.json: what was found in a run, for scripts and other tools."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from haiprof.base.errors import HaiprofError
from haiprof.base.ledger import Account
from haiprof.base.safe_files import make_folder
from haiprof.diagnosis.finding import Finding
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import write_json

SCHEMA = "haiprof.diagnosis.1"
FIELDS = {
    "schema": "name and version of this format",
    "run": "the run directory",
    "name": "the job's name",
    "headline": "one line: the first problem, that nothing stands out, or why nothing is known",
    "death": "why the job died: rank, cause, how, line, the others; null where it has not",
    "memory_at_end": "memory of the ranks that the death began with, where it may be the reason",
    "gpu_memory_at_end": "GPU memory of the same ranks, where it ran out: docs/deaths.md",
    "starts": "each start of the job's ranks and how it ended; empty where one did not die",
    "goodput": "share of the run's wall time in steps that counted; null where nothing died",
    "step": "the mean step: `mean_ns` (with what is paid between steps), `median_ns` (without), "
    "`count`, `residual_ns`, `positions` (ns by position, exact); null without steps",
    "ledger": "accounts of the mean step; their `ns_per_step` and the residual add up to `mean_ns`",
    "opportunities": "rows of `ledger` that a change would remove, largest gain first",
    "run_time": "the run's wall time in ns by what passed, from start to end; empty without an end",
    "problem_count": "findings that are problems: warnings and critical ones",
    "step_ns": "mean training step after warm-up, traced ones left out; null without steps",
    "work": "floating-point work of one rank in the mean step, from a window traced with shapes: "
    "`model_flops`, `flops_per_s`, `mfu_ratio`, `is_lower_bound`, `kernel_known_ratio`, `device`, "
    "`peak`, `reason`; null without one",
    "split": "the mean step by phase, host time in ns; null: not measured",
    "step_count": "training steps of all ranks, of the last attempt of each",
    "most_steps": "steps of the rank that has most, in all its attempts",
    "end_wall_ns": "Unix time of the job's end; null where it still ran, or that was not noted",
    "ranks": "ranks that have steps",
    "since_ns": "only steps from this Unix time on were judged; null: the whole run",
    "findings": "a hang first, then by what they cost",
    "abstained": "rules that could not be judged: `slug`, and `why`",
    "checked": "slugs of rules that had their data and found nothing",
    "not_measured": "`what`, and `why`",
    "evaluation_ns": "time in evaluations without compiling, the rank with the most; null: not "
    "known",
    "compile_ns": "time in which torch.compile worked, the rank with the most; null: not known",
    "events": "`gc` and `save`, where there were any: `count`, `total_ns`, `longest_ns`",
    "cost": "what haiprof itself took: `hook_ns_per_step`, `hook_ratio`, `agent_cpu_ratio`",
    "next_command": "what to run next",
    "notes": "what was damaged or left out while reading, and what to know of the run",
    "traces": "what was traced, and why the rest was not",
    "reactions": "what haiprof noticed while the job ran, and did by itself",
}
"""Every field of the document."""
FINDING_FIELDS = {
    "slug": "the rule",
    "cause": "why, where the rule tells several causes apart; else null",
    "severity": "`critical`, `warning` or `info`",
    "confidence": "in [0, 1]",
    "lost_ratio": "share of the time that it costs; null: not known",
    "gain": "what the mean step becomes without it: `step_ns`, `left_ns`, and the 95 % interval "
    "`low_ns` to `high_ns`; null: not known",
    "title": "the cause in one line",
    "evidence": "the numbers: `name`, `value` (base units; null: not known), `unit`",
    "remedy": "what to change",
    "ranks": "ranks it is about; empty: all",
    "code_lines": "the job's own code that it is about, most time first: `file`, `line`, "
    "`function`, `share` with its 95 % interval `low` to `high`, `of` what, `sample_count`, "
    "`callees` in libraries, `callers` in the job's own code; empty: not known",
    "explained_by": "null, as each cost is in one account (before 0.2: the finding of its cause)",
    "missing": "what could not be measured and would make it surer",
    "scope": "`run`: all judged steps prove it; `window`: the steps of a trace",
}
"""Every field of one finding."""
STEP_FIELDS = ("mean_ns", "median_ns", "count", "residual_ns", "positions", "rests_on", "missing")


def as_document(verdict: Verdict, *, since_ns: int | None = None) -> dict[str, Any]:
    """The verdict in the documented form; see docs/diagnosis.md."""
    ledger = verdict.ledger
    content = asdict(verdict) | {
        "step": None if ledger is None else {name: getattr(ledger, name) for name in STEP_FIELDS},
        "ledger": [] if ledger is None else [account_document(a) for a in ledger.accounts],
        "opportunities": [] if ledger is None else list(ledger.opportunities),
        "problem_count": sum(found.severity != "info" for found in verdict.findings),
        "schema": SCHEMA,
        "since_ns": since_ns,
        "findings": [_finding(finding) for finding in verdict.findings],
        "abstained": [{"slug": rule, "why": why} for rule, why in verdict.abstained],
        "not_measured": [{"what": what, "why": why} for what, why in verdict.not_measured],
    }
    return {name: content[name] for name in FIELDS}


def account_document(account: Account) -> dict[str, Any]:
    """One row of the ledger."""
    return asdict(account) | {"ranks": list(account.ranks)}


def _finding(finding: Finding) -> dict[str, Any]:
    content = asdict(finding) | {"explained_by": None}
    content["slug"] = finding.rule
    content["ranks"] = [] if finding.rank is None else [finding.rank]
    return {name: content[name] for name in FINDING_FIELDS}


def save_document(content: dict[str, Any], run: RunPaths) -> None:
    """Writes report/diagnosis.json."""
    try:
        make_folder(run.report, below=run.root)
        write_json(run.diagnosis_json, content, below=run.root)
    except OSError as error:
        raise HaiprofError(
            f"{run.report}: the diagnosis cannot be saved: {error.strerror or error}"
        ) from None
