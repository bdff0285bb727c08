"""The order of findings: by what they cost, each consequence behind its cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from haiprof.diagnosis.finding import SCOPES, SEVERITIES, Finding, Severity
from haiprof.diagnosis.thresholds import (
    COSTLY_CRITICAL_RATIO,
    COSTLY_WARNING_RATIO,
    SURE_CRITICAL,
    SURE_WARNING,
)

STANDSTILL = "standstill"
"""It comes first: a job that stands still loses all of its time from then on."""
PHASE_RULES = {
    "dataloader_bound": "dataloader",
    "outside_the_model": "other",
    "optimizer_bound": "optimizer",
    "forward_bound": "forward",
    "backward_bound": "backward",
}
"""Rules that say how much of the usual step one phase costs."""
_LATE_BY_TURNS = "late_rank/now_and_then"
"""What takes long in a phase of all ranks never takes equally long on each."""
CONTRADICTIONS = (
    ("ranks_uneven", "data_imbalance"),
    ("late_rank", "data_imbalance"),
    ("ranks_uneven", "late_rank"),
)
"""Of two findings that cannot both be so the costlier is believed."""


def severity_of(finding: Finding) -> Severity:
    """From the time that it costs and how sure that is; the rule's own where no time is known."""
    lost, sure = finding.lost_ratio, finding.confidence
    if finding.is_one_event:
        return "info"
    if lost is None or finding.rule == STANDSTILL:
        return finding.severity
    if lost >= COSTLY_CRITICAL_RATIO and sure >= SURE_CRITICAL:
        return "critical"
    return "warning" if lost >= COSTLY_WARNING_RATIO and sure >= SURE_WARNING else "info"


def agreeing(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Without those that another one says better, and without contradictions."""
    by_rule = {f.rule: f for f in findings if not any(other.replaces(f) for other in findings)}
    for pair in CONTRADICTIONS:
        both = [by_rule[rule] for rule in pair if rule in by_rule]
        if len(both) < len(pair) or any(_explains_exactly(*each) for each in permutations(both)):
            continue
        if both[0].rank is None or both[0].rank != both[1].rank:
            del by_rule[min(both, key=lambda f: (f.lost_ratio or 0.0, f.confidence)).rule]
    return tuple(by_rule.values())


def _explains_exactly(cause: Finding, other: Finding) -> bool:
    """Whether the one names the other's own cause: who is late by turns contradicts none."""
    return f"{other.rule}/{other.cause}" in cause.explains and cause.is_enough_for(other)


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings by severity and by what they cost, each consequence behind its cause.

    A rule says which other rules' findings its own would bring about (`Finding.explains`: a rule,
    or a rule and its cause). Where both have fired, and the first costs most of what the second
    does, the second is its consequence. A cause is at least as severe as what follows from it. What
    has several causes goes behind the weightiest; of two that explain each other the weightier is
    the cause. A job that stands still comes before everything else. Nothing stands above what is
    graver, unless it is right behind its own cause: of several consequences the first one.

    Args:
        findings: At most one of each rule.

    Returns:
        The same ones, `severity` and `explained_by` set.
    """
    by_weight = sorted(map(_set_weight, findings), key=_weight)
    later = [f for f in by_weight if f.rule != STANDSTILL]
    cause_of: dict[str, str] = {}
    for cause in by_weight:
        for other in later:
            free = other.rule not in cause_of and other.rule not in _line(cause.rule, cause_of)
            if free and cause.is_cause_of(other):
                cause_of[other.rule] = cause.rule
    raised = [
        replace(f, severity=_severity(f, by_weight, cause_of), explained_by=cause_of.get(f.rule))
        for f in by_weight
    ]
    return tuple(_arrange(sorted(raised, key=_weight)))


def _set_weight(finding: Finding) -> Finding:
    late = (_LATE_BY_TURNS,) if finding.rule in PHASE_RULES and finding.rank is None else ()
    return replace(finding, severity=severity_of(finding), explains=(*finding.explains, *late))


def _weight(finding: Finding) -> tuple[bool, int, int, float, float, str]:
    return (
        finding.rule != STANDSTILL,
        SEVERITIES.index(finding.severity),
        SCOPES.index(finding.scope),
        -(finding.lost_ratio or 0.0),
        -finding.confidence,
        finding.rule,
    )


def _line(rule: str, cause_of: Mapping[str, str]) -> list[str]:
    """A rule, its cause, that one's cause, and so on."""
    line = [rule]
    while line[-1] in cause_of:
        line.append(cause_of[line[-1]])
    return line


def _severity(
    finding: Finding, findings: Sequence[Finding], cause_of: Mapping[str, str]
) -> Severity:
    family = [f.severity for f in findings if finding.rule in _line(f.rule, cause_of)]
    return min(family, key=SEVERITIES.index)


def _arrange(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Each consequence behind its cause, as near as those that are graver leave it.

    Args:
        findings: By weight, a cause at least as severe as what follows from it.
    """
    left, placed = list(findings), list[str]()
    while left:
        known = [f for f in left if f.explained_by is None or f.explained_by in placed]
        behind = [f for f in known if placed and f.explained_by == placed[-1]]
        gravest = [f for f in known if _gravity(f) == min(map(_gravity, known))]
        nearest = max(gravest, key=lambda f: _place_of_cause(f, placed))  # of several the first
        found = behind[0] if behind else nearest
        placed.append(found.rule)
        left.remove(found)
        yield found


def _place_of_cause(finding: Finding, placed: Sequence[str]) -> int:
    return -1 if finding.explained_by is None else placed.index(finding.explained_by)


def _gravity(finding: Finding) -> tuple[bool, int]:
    return finding.rule != STANDSTILL, SEVERITIES.index(finding.severity)
