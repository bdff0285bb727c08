"""The job stood still, and a snapshot says which rank held it up."""

from __future__ import annotations

from haiprof.diagnosis.finding import Evidence, Finding, Judgement
from haiprof.diagnosis.reactions import went_on
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.run_analysis.reactions import Reaction

RULE = "standstill"
_STOPPED = "stopped by a signal"
_DIFFERS = "differs)"


def standstill(inputs: RuleInputs) -> Judgement:
    """Fires where a snapshot, taken because no step ended for long, names a rank.

    Where the job was saving, or collectives went on, it did not stand still.
    """
    hangs = [r for r in inputs.reactions if r.trigger == "hang" and r.suspects]
    if not hangs:
        return None
    hang = hangs[-1]
    suspect = hang.suspects[0]
    resumed_ns = went_on(hang, inputs.steps)
    evidence = [Evidence(name="no step for, when noticed", value=hang.silent_ns, unit="ns")]
    if hang.step is not None:
        evidence.append(Evidence(name="last step", value=float(hang.step), unit="count"))
    if resumed_ns is not None:
        stood = float(resumed_ns - hang.since_wall_ns)
        evidence.append(Evidence(name="until the next step ended", value=stood, unit="ns"))
    return Finding(
        rule=RULE,
        severity="warning" if resumed_ns is not None or not suspect.certain else "critical",
        title=f"the job stood still: {_who(hang)}",
        evidence=tuple(evidence),
        remedy=_remedy(suspect.reason, suspect.doing, hang.path),
        confidence=0.9 if suspect.certain else 0.5,
        missing=() if suspect.certain else ("whether the other ranks waited for this one",),
        rank=None if hang.contradiction else suspect.rank,
    )


def _who(hang: Reaction) -> str:
    if hang.contradiction is not None:
        return "ranks issued collectives that contradict each other"
    first, others = hang.suspects[0], len(hang.suspects) - 1
    verb = "held the job up" if first.certain else "did something else than the other ranks"
    more = f", and {others} more" if others else ""
    return f"rank {first.rank} {verb}{more}" + (f": {first.doing}" if first.doing else "")


def _remedy(reason: str, doing: str, path: str | None) -> str:
    see = f" (all ranks' stacks: {path})" if path else ""
    if _STOPPED in reason:
        return f"find out who stopped the process: kill -CONT lets it go on{see}"
    if reason.endswith(_DIFFERS):
        return f"let all ranks issue the same collectives in the same order: {reason}{see}"
    where = f"see why it stays at {doing}" if doing else "see what it does instead"
    return f"{where}: {reason}{see}"
