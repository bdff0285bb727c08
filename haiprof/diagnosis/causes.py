"""The order of findings: a cause first, and right after it what it explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from haiprof.diagnosis.finding import SCOPES, SEVERITIES, Finding, Severity


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings by weight, each consequence behind its cause.

    A rule says which other rules' findings its own would bring about (`Finding.explains`: a rule,
    or a rule and its cause). Where both have fired, the second is the first one's consequence. A
    cause is at least as severe as what follows from it. What has several causes goes behind the
    weightiest; of two that explain each other the weightier is the cause.

    Args:
        findings: At most one of each rule.

    Returns:
        The same ones, `explained_by` set, and `severity` raised where a consequence is worse.
    """
    by_weight = sorted(findings, key=_weight)
    cause_of: dict[str, str] = {}
    for cause in by_weight:
        for other in by_weight:
            free = other.rule not in cause_of and other.rule not in _line(cause.rule, cause_of)
            if free and {other.rule, f"{other.rule}/{other.cause}"} & set(cause.explains):
                cause_of[other.rule] = cause.rule
    raised = [replace(f, severity=_severity(f, by_weight, cause_of)) for f in by_weight]
    roots = sorted((f for f in raised if f.rule not in cause_of), key=_weight)
    return tuple(found for root in roots for found in _family(root, raised, cause_of))


def _weight(finding: Finding) -> tuple[int, int, float, str]:
    return (
        SEVERITIES.index(finding.severity),
        SCOPES.index(finding.scope),
        -finding.confidence,
        finding.rule,
    )


def _line(rule: str, cause_of: dict[str, str]) -> list[str]:
    """A rule, its cause, that one's cause, and so on."""
    line = [rule]
    while line[-1] in cause_of:
        line.append(cause_of[line[-1]])
    return line


def _severity(finding: Finding, findings: Sequence[Finding], cause_of: dict[str, str]) -> Severity:
    family = [f.severity for f in findings if finding.rule in _line(f.rule, cause_of)]
    return min(family, key=SEVERITIES.index)


def _family(
    root: Finding, findings: Sequence[Finding], cause_of: dict[str, str]
) -> Iterator[Finding]:
    yield replace(root, explained_by=cause_of.get(root.rule))
    for finding in sorted(findings, key=_weight):
        if cause_of.get(finding.rule) == root.rule:
            yield from _family(finding, findings, cause_of)
