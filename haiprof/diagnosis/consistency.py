"""What must hold of every verdict before it is shown: no part above its whole, no contradiction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from haiprof.diagnosis.causes import PHASE_RULES, STANDSTILL
from haiprof.diagnosis.finding import SEVERITIES, Finding

SHARE_OF_USUAL = "the same, share of the step"
"""Of a finding's evidence: the one before it, of the usual step; all of it where that is longer."""
_SLACK = 1e-6


def impossible_findings(
    findings: Sequence[Finding], split: Mapping[str, float | None]
) -> dict[str, str]:
    """Rules whose numbers cannot be so, each with why; empty as long as no rule has a mistake.

    Args:
        findings: In any order.
        split: The usual step by phase, as the card's bar shows it.
    """
    whole = sum(value or 0.0 for value in split.values())
    found: dict[str, str] = {}
    for finding in findings:
        for why in _impossible(finding, split, whole):
            found.setdefault(finding.rule, why)
    return found


def _impossible(finding: Finding, split: Mapping[str, float | None], whole: float) -> Iterator[str]:
    lost = finding.lost_ratio
    if lost is not None and not -_SLACK <= lost <= 1 + _SLACK:
        yield f"it would cost {lost:.3g} of the time"
    for evidence in finding.evidence:
        value = evidence.value
        if evidence.unit == "ratio" and value is not None and not -_SLACK <= value <= 1 + _SLACK:
            yield f"{evidence.name} would be {value:.3g} of its whole"
    for part, share in pairwise(finding.evidence):
        if share.name == SHARE_OF_USUAL and whole and None not in (part.value, share.value):
            known = min((part.value or 0.0) / whole, 1.0)
            if abs((share.value or 0.0) - known) > _SLACK:
                yield f"{part.name} would be {share.value:.3g} of a step, and is {known:.3g}"
    phase = PHASE_RULES.get(finding.rule)
    device = any("(device time)" in evidence.name for evidence in finding.evidence)
    if phase is None or device or lost is None or not whole:
        return
    if lost > (split.get(phase) or 0.0) / whole + _SLACK:
        yield f"it would cost more than all of {phase}"


def is_in_order(findings: Sequence[Finding]) -> bool:
    """Whether nothing stands below what is milder, and each consequence behind its cause.

    A job that stands still comes first, however mild; and right behind its own cause a milder
    consequence may stand.
    """
    places = {finding.rule: place for place, finding in enumerate(findings)}
    behind = ["", *(finding.rule for finding in findings)]
    weights = [
        SEVERITIES.index(finding.severity)
        for finding, above in zip(findings, behind, strict=False)
        if finding.rule != STANDSTILL and (not above or finding.explained_by != above)
    ]
    return (
        places.get(STANDSTILL, 0) == 0
        and weights == sorted(weights)
        and all(
            finding.explained_by is None or places[finding.explained_by] < place
            for place, finding in enumerate(findings)
        )
    )
