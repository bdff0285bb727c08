"""A finding: the cause, the numbers that prove it, what to change, and how sure that is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["critical", "warning", "info"]
Scope = Literal["run", "window"]
SCOPES: tuple[Scope, ...] = ("run", "window")
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number behind a finding."""

    name: str
    """What was measured, for people."""
    value: float | None
    """In base units; null where it is not known."""
    unit: str
    """ns, ratio, cores, count, bytes, bytes/s, or empty for a plain factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause that a rule found."""

    rule: str
    """Slug of the rule."""
    severity: Severity
    title: str
    """The cause in one line."""
    evidence: tuple[Evidence, ...]
    remedy: str
    """What to change."""
    confidence: float
    """In [0, 1]."""
    missing: tuple[str, ...] = ()
    """What could not be measured and would make it surer."""
    rank: int | None = None
    """The rank it is about; null where it is about all."""
    scope: Scope = "run"
    """What proves it: all steps of the run, or the few of a traced window."""
    cause: str | None = None
    """Slug of why, where the rule tells several causes apart (`epoch_restart`)."""
    explains: tuple[str, ...] = ()
    """Rules, or `rule/cause`, whose findings are consequences of this one: they come after it."""
    explained_by: str | None = None
    """The rule whose finding is the cause of this one; set when all rules have been asked."""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstention:
    """Why a rule could not be judged."""

    rule: str
    why: str


Judgement = Finding | Abstention | None
"""What a rule returns: a finding, why it cannot tell, or nothing amiss."""
