"""The verdict of a run: its findings with their numbers, and the document that scripts read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from haiprof.base.code_places import place_text
from haiprof.base.errors import HaiprofError
from haiprof.base.ledger import Ledger, expression_text, ledger_document
from haiprof.base.safe_files import make_folder
from haiprof.base.units import ratio_text, shorten
from haiprof.diagnosis.restart_advice import Advice
from haiprof.diagnosis.traced_window import StepWork
from haiprof.run_analysis.before_death import GpuMemoryAtEnd, MemoryAtEnd
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.lines import CodeLine as CodeLine
from haiprof.run_analysis.nccl_witness import NcclReport
from haiprof.run_analysis.restarts import Goodput, Start
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import write_json

if TYPE_CHECKING:  # it reads traces, which most runs do not have
    from haiprof.trace_analysis.device_verdict import DeviceLedger

Severity = Literal["critical", "warning", "info"]
CODE_CHARS = 50  # Of an expression in a title: the whole stands in the ledger
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number behind a finding."""

    name: str  # What was measured, for people
    value: float | None  # In base units; None where it is not known
    unit: str  # ns, ratio, cores, count, bytes, bytes/s, or empty for a plain factor


def evidence_rows(*rows: tuple[str, float | None, str]) -> tuple[Evidence, ...]:
    """Evidence from its fields: name, value and unit."""
    return tuple(Evidence(name=name, value=value, unit=unit) for name, value, unit in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What the mean step becomes without an opportunity, in ns."""

    step_ns: float
    left_ns: float
    low_ns: float
    high_ns: float  # Where that lies with 95 % certainty


def gain_of(step_ns: float, ns: float, low_ns: float, high_ns: float) -> Gain:
    """The gain of what takes so much of the step, and so much at least and at most."""
    left_ns, most_ns, least_ns = (max(step_ns - each, 0.0) for each in (ns, low_ns, high_ns))
    return Gain(step_ns=step_ns, left_ns=left_ns, low_ns=least_ns, high_ns=most_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause that a rule found; FINDING_FIELDS says what its fields mean."""

    title: str
    remedy: str
    evidence: tuple[Evidence, ...] = ()
    confidence: float = 0.95
    rule: str = ""
    """Slug of the rule: the function's name where a function of `run_facts.RULES` found it."""
    severity: Severity = "warning"
    """Where the time is known, what follows from it takes the place of what a rule says."""
    lost_ratio: float | None = None
    """Findings are ordered by it, and with the confidence it gives the severity."""
    gain: Gain | None = None
    account: int | None = None
    missing: tuple[str, ...] = ()
    rank: int | None = None  # The rank it is about; None where it is about all
    scope: Literal["run", "window"] = "run"
    cause: str | None = None
    phases: tuple[str, ...] = ()
    """Of a setting: the phases whose operators `lost_ratio` is the price of."""
    work_ratio: float = 0.0
    """Of a setting: by what share of the operators' numbers in these it adds to them."""
    exchange_ratio: float = 0.0
    """Of a setting: what it costs of the exchanges between ranks in these, waits included."""
    python_ratio: float = 0.0
    """Of a setting: what it costs of the Python that runs outside of torch, in any phase."""
    python_spread: tuple[float, float] | None = None  # The same at least and at most, over that
    seen_in: tuple[tuple[str, str], ...] = ()
    """Of a setting: files and functions (empty: all of the file) whose code runs for its sake."""
    unsure_ratio: float = 0.0  # Of a setting: what part of `lost_ratio` it may not cost
    setting: str = ""
    """Pattern of the call or assignment of the job's that sets it (`lines.find_statement`)."""
    code_lines: tuple[CodeLine, ...] = ()
    nodes: tuple[str, ...] = ()
    is_choice: bool = True  # Whether a change removes it; else it is a fact, however large

    @property
    def is_priced(self) -> bool:
        """Whether it costs a known share of some phases or of Python, or is code of its own."""
        shares = self.lost_ratio or self.work_ratio or self.exchange_ratio
        return bool((shares and self.phases) or self.python_ratio or self.seen_in)

    @property
    def numbers(self) -> tuple[Evidence, ...]:
        """Its evidence as people see it: without times of what never happened, below 1 ns."""
        return tuple(
            each
            for each in self.evidence
            if each.unit != "ns" or each.value is None or abs(each.value) >= 1
        )


def make_finding(
    title: str,
    remedy: str,
    *rows: tuple[str, float | None, str],
    **fields: Any,  # noqa: ANN401 - those of Finding
) -> Finding:
    """A finding with its evidence: rows of name, value and unit."""
    return Finding(title=title, remedy=remedy, evidence=evidence_rows(*rows), **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFunction:
    """A function of the job's that does a considerable part of the model's own work."""

    file: str
    line: int  # The line of it that takes most
    function: str
    expression: str  # Of that line; empty where it is not known
    line_count: int  # Lines of it that were seen
    position: str  # Of POSITIONS, where that line is
    ns_per_step: float  # Up to backward, without the job's functions that it calls
    backward_ns: float
    """What backward takes for it: as a window's sequence numbers tell, else by its share of the
    forward that autograd records."""
    is_estimate: bool  # Whether any of that is by its share
    ratio: float  # Both, of the step

    @property
    def code_place(self) -> str:
        """`net.py:6 Net.forward x[:, index]`."""
        code = shorten(expression_text(self.expression), CODE_CHARS)
        return f"{place_text(self.file, self.line, self.function)} {code}".strip()

    def describe(self) -> str:
        """`41 % of the step, its part of backward included: net.py:6 Net.forward`."""
        text = f"{ratio_text(self.ratio)} of the step"
        if self.backward_ns:
            about = "about " * self.is_estimate
            text = f"{about}{text}, its part of backward included"
        others = self.line_count - 1
        more = f" and {others} more line{'s' * (others > 1)} of it" if others else ""
        return f"{text}: {self.code_place}{more}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Interruptions of one kind, over all ranks."""

    count: int
    total_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What haiprof itself took, measured in this run."""

    hook_ns_per_step: float | None
    """Of the training thread, the costliest rank; None where no cost was recorded."""
    hook_ratio: float | None  # The same as a share of the recorded time
    threads_cpu_ratio: float | None
    """Share of one CPU that haiprof's own threads used in a process of the job, at most."""
    agent_cpu_ratio: float | None  # CPU time of the node agent per elapsed time, the busiest node


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found in one run; a field that FIELDS has too means what is said there."""

    run: str
    name: str
    headline: str
    split: Mapping[str, float | None]
    step_ns: float | None
    work: StepWork | None
    step_count: int
    ranks: tuple[int, ...]
    findings: tuple[Finding, ...]
    abstained: tuple[tuple[str, str], ...]  # (rule, why it could not be judged)
    not_measured: tuple[tuple[str, str], ...]  # (what, why)
    evaluation_ns: int | None
    compile_ns: int | None
    events: Mapping[str, Events]
    cost: Cost
    next_command: str
    notes: tuple[str, ...]
    ledger: Ledger | None = None  # The accounts of the mean step; None without judged steps
    device: DeviceLedger | None = None
    own_work: tuple[OwnFunction, ...] = ()
    run_time: Mapping[str, int] = field(default_factory=dict)
    most_steps: int = 0
    end_wall_ns: int | None = None
    death: Death | None = None
    advice: Advice | None = None
    memory_at_end: tuple[MemoryAtEnd, ...] = ()
    gpu_memory_at_end: tuple[GpuMemoryAtEnd, ...] = ()
    starts: tuple[Start, ...] = ()
    goodput: Goodput | None = None
    checked: tuple[str, ...] = ()
    machine: str | None = None
    traces: tuple[str, ...] = ()
    reactions: tuple[str, ...] = ()
    nccl: NcclReport | None = None


SCHEMA = "haiprof.diagnosis.1"
FIELDS = {
    "schema": "name and version of this format",
    "run": "the run directory",
    "name": "the job's name",
    "headline": "one line: the first problem, that nothing stands out, or why nothing is known",
    "death": "why the job died: rank, cause, how, line, the others; null where it has not",
    "advice": "what a job script should do after the death: `action` (RESTART, RESTART WITHOUT, "
    "STOP), `nodes`, `reason`, `text`, `exit_status`, `attempts`; null where nothing died",
    "memory_at_end": "memory of the ranks that the death began with, where it may be the reason",
    "gpu_memory_at_end": "GPU memory of the same ranks, where it ran out: docs/deaths.md",
    "starts": "each start of the job's ranks and how it ended; empty where one did not die",
    "goodput": "of the run's wall time the share in steps that counted, as in `haiprof goodput`: "
    "`ratio`, `ratio_high`, `wall_ns`, `lost_steps` (at least, at most); null where nothing died",
    "step": "the mean step: `mean_ns` (with what is paid between steps), `median_ns` (without), "
    "`count`, `residual_ns`, `device_idle_ns` (no host code gains more; null: not known), "
    "`device_idle_is_bound`, `positions` (ns by position, exact); null without steps",
    "ledger": "accounts of the mean step; their `ns_per_step` and the residual add up to `mean_ns`",
    "opportunities": "rows of `ledger` that a change would remove, largest gain first",
    "device": "the same of the GPUs' time in the last trace window: `step`, `ledger`, "
    "`opportunities`, `ranks`, `device_name`, `peak` (who states it), `operators` with what they "
    "reach and `do`, `gaps` (the longest idle times), `explanations` (of each account: "
    "what to do), `late`; null where no GPU was traced",
    "own_work": "functions of the job that do most of the model's own work, as facts: `file`, "
    "`line`, `function`, `expression`, `line_count` of its lines that were seen, `position`, "
    "`ns_per_step` in forward and loss, `backward_ns` (by its share of forward where "
    "`is_estimate`), `ratio` of the step; empty where a device does it",
    "run_time": "the run's wall time in ns by account, as in `haiprof goodput`; they add up to it; "
    "empty without an end",
    "problem_count": "findings that are problems: warnings and critical ones",
    "step_ns": "mean training step after warm-up, traced ones left out; null without steps",
    "work": "floating-point work of one rank in the mean step, from a window traced with shapes: "
    "`model_flops`, `flops_per_s`, `mfu_ratio`, `is_lower_bound`, `kernel_known_ratio`, `device`, "
    "`peak`, `reason`; null without one",
    "split": "the mean step by phase, host time in ns; null: not measured",
    "step_count": "training steps of all ranks, of the last attempt of each, from `since_ns` on",
    "most_steps": "steps of the rank that has most, in all its attempts",
    "end_wall_ns": "Unix time of the job's end; null where it still ran, or that was not noted",
    "ranks": "ranks that have steps",
    "since_ns": "only steps from this Unix time on were evaluated; null: the whole run",
    "findings": "a hang first, then by what they cost",
    "abstained": "rules that could not be evaluated: `slug`, and `why`",
    "checked": "slugs of rules that had their data and found nothing",
    "not_measured": "`what`, and `why`",
    "evaluation_ns": "time in evaluations without compiling, the rank with the most; null: not "
    "known",
    "compile_ns": "time in which torch.compile worked, the rank with the most; null: not known",
    "events": "`gc` and `save`, where there were any: `count`, `total_ns`, `longest_ns`",
    "machine": "what the cores of the job's busiest node did while it trained; null: not known",
    "cost": "what haiprof itself took: `hook_ns_per_step` of the training thread, `hook_ratio`; "
    "`threads_cpu_ratio`, of one CPU, in its own threads of the job; `agent_cpu_ratio` beside it",
    "next_command": "what to run next",
    "notes": "what was damaged or left out while reading, and what to know of the run, such as a "
    "rank for which the others waited in `init_process_group` for at least 5 % of it",
    "traces": "what was traced, and why the rest was not",
    "reactions": "what haiprof noticed while the job ran, and did by itself",
    "nccl": "what NCCL's Inspector and profiler plugin wrote, by rank: `collectives` (number of "
    "the last one, rates, `bus_ratio` to the others' median, `since_ns`), `waits` of its network "
    "proxy; null: the job was not told to write such files, or none is there",
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
    "nodes": "nodes that these ranks are on, where the job has others too; empty: no node is named",
    "account": "row of `ledger` that it is about; null: none",
    "code_lines": "the job's own code that it is about, most time first: `file`, `line`, "
    "`function`, `share` (null: of a setting whose cost is not known) with its 95 % interval `low` "
    "to `high`, `of` what, `sample_count` (null: the share is an account's of `ledger`), "
    "`callees` in libraries, `callers` in the job's own code; empty: not known",
    "explained_by": "null, as each cost is in one account (before 0.2: the finding of its cause)",
    "missing": "what could not be measured and would make it surer",
    "scope": "`run`: all evaluated steps prove it; `window`: the steps of a trace",
}
"""Every field of one finding."""


def as_document(verdict: Verdict, *, since_ns: int | None = None) -> dict[str, Any]:
    """The verdict as documented in docs/diagnosis.md; `since_ns`: only later steps were judged."""
    ledger, device = verdict.ledger, None
    if verdict.device is not None:
        from haiprof.trace_analysis.device_verdict import device_document

        device = device_document(verdict.device)
    content = asdict(verdict) | {
        **ledger_document(ledger),
        "device": device,
        "nccl": None if verdict.nccl is None else verdict.nccl.as_json(),
        "goodput": None if verdict.goodput is None else verdict.goodput.summary(),
        "problem_count": sum(found.severity != "info" for found in verdict.findings),
        "schema": SCHEMA,
        "since_ns": since_ns,
        "findings": [_finding(finding, ledger) for finding in verdict.findings],
        "abstained": [{"slug": rule, "why": why} for rule, why in verdict.abstained],
        "not_measured": [{"what": what, "why": why} for what, why in verdict.not_measured],
    }
    return {name: content[name] for name in FIELDS}


def ranks_of(finding: Finding, ledger: Ledger | None) -> tuple[int, ...]:
    """The ranks that a finding is about; empty: all."""
    if ledger is not None and finding.account is not None:
        return tuple(ledger.accounts[finding.account].ranks)
    return () if finding.rank is None else (finding.rank,)


def _finding(finding: Finding, ledger: Ledger | None) -> dict[str, Any]:
    content = asdict(finding) | {"explained_by": None}
    content["slug"] = finding.rule
    content["ranks"] = list(ranks_of(finding, ledger))
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
