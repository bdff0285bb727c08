"""A finding: the cause, the numbers that prove it, what to change, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from haiprof.base.units import ratio_text, visible

Severity = Literal["critical", "warning", "info"]
Scope = Literal["run", "window"]
SCOPES: tuple[Scope, ...] = ("run", "window")
_PLACE_LIMIT = 200
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number behind a finding."""

    name: str
    """What was measured, for people."""
    value: float | None
    """In base units; None where it is not known."""
    unit: str
    """ns, ratio, cores, count, bytes, bytes/s, or empty for a plain factor."""


def place_text(file: str, line: int, function: str) -> str:
    """`train.py:88 load_image`; the names are whatever the run directory holds."""
    text = f"{file.rpartition('/')[2]}:{line} {function}"
    return visible(" ".join(text[:_PLACE_LIMIT].split()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLine:
    """A function of the job's own code that a finding is about, as it was sampled."""

    file: str
    line: int
    """Its line that was seen most often."""
    function: str
    share: float
    """Of what `of` says."""
    low: float | None
    high: float | None
    """Where the share lies with 95 % certainty; None where that is not known."""
    of: str
    """What it is a share of: `the step`, `the workers' loading`."""
    sample_count: int
    callees: tuple[str, ...]
    """Functions of libraries in which most of that time passes, from its own call inwards."""
    callers: tuple[str, ...] = ()
    """The job's own lines through which most of that time came there, from the nearest outwards:
    `train.py:307 log_metrics`."""

    @property
    def location(self) -> str:
        """`train.py:88 load_image`; the names are whatever the run directory holds."""
        return place_text(self.file, self.line, self.function)

    def describe(self) -> str:
        """`train.py:88 load_image: 61 % of the step (55 to 67 %), in PIL.Image.open`."""
        between = ""
        if self.low is not None and self.high is not None:
            between = f" ({100 * self.low:.0f} to {ratio_text(self.high)})"
        inside = visible(f", in {' > '.join(self.callees)}") if self.callees else ""
        by = f", called by {' < '.join(self.callers)}" if self.callers else ""
        return f"{self.location}: {ratio_text(self.share)} of {self.of}{between}{inside}{by}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What the mean step becomes without an opportunity, in ns."""

    step_ns: float
    left_ns: float
    low_ns: float
    high_ns: float
    """Where that lies with 95 % certainty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause that a rule found."""

    rule: str
    """Slug of the rule."""
    title: str
    """The cause in one line."""
    evidence: tuple[Evidence, ...]
    remedy: str
    """What to change."""
    confidence: float
    """In [0, 1]."""
    severity: Severity = "warning"
    """Where the time is known, what follows from it takes the place of what a rule says."""
    lost_ratio: float | None = None
    """Share of the time that it costs, in [0, 1]; None where that is not known.

    Findings are ordered by it, and with the confidence it gives the severity."""
    gain: Gain | None = None
    """What the step becomes without it; None of facts that are no opportunity."""
    account: int | None = None
    """The account of the ledger that it is about; None of facts beside it."""
    missing: tuple[str, ...] = ()
    """What could not be measured and would make it surer."""
    rank: int | None = None
    """The rank it is about; None where it is about all."""
    scope: Scope = "run"
    """What proves it: all steps of the run, or the few of a traced window."""
    cause: str | None = None
    """Slug of why, where the rule tells several causes apart (`epoch_restart`)."""
    phases: tuple[str, ...] = ()
    """Of a setting: the phases whose operators `lost_ratio` is the price of."""
    code_lines: tuple[CodeLine, ...] = ()
    """The job's own code that it is about, most time first."""

    @property
    def numbers(self) -> tuple[Evidence, ...]:
        """Its evidence as people see it: without times of what never happened, below 1 ns."""
        return tuple(
            each
            for each in self.evidence
            if each.unit != "ns" or each.value is None or abs(each.value) >= 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstention:
    """Why a rule could not be judged."""

    rule: str
    why: str


Judgement = Finding | Abstention | None
"""What a rule returns: a finding, why it cannot tell, or nothing amiss."""
