"""A finding: the cause, the numbers that prove it, what to change, and how sure that is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One number behind a finding."""

    name: str
    """What was measured, for people."""
    value: float | None
    """In base units; null where it is not known."""
    unit: str
    """ns, ratio, cores, count, bytes, or empty for a plain factor."""


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
