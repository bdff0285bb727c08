"""Asks every rule and puts the verdict together."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace

import polars as pl

from haiprof.base.log_addresses import shown_path
from haiprof.diagnosis.attempts import attempt_notes
from haiprof.diagnosis.causes import STANDSTILL, agreeing, in_order
from haiprof.diagnosis.code_questions import CodeAnswers
from haiprof.diagnosis.consistency import impossible_findings
from haiprof.diagnosis.finding import Abstention, Finding
from haiprof.diagnosis.gaps import not_measured, why_no_steps
from haiprof.diagnosis.reactions import reacted_lines
from haiprof.diagnosis.recorded_windows import traced_lines
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs, typical_rank, usual_split
from haiprof.diagnosis.rules import RULES
from haiprof.diagnosis.steal import stolen_notes
from haiprof.diagnosis.step_work import step_work
from haiprof.diagnosis.thresholds import CRITICAL_MIN_STEPS, FEW_STEPS_SURE, SHORT_RUN_S
from haiprof.diagnosis.verdict import Cost, Events
from haiprof.diagnosis.verdict import Verdict as Verdict
from haiprof.run_analysis.phases import GC_PHASE, SAVE_PHASE
from haiprof.run_analysis.records import number
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_boundaries import WORDS
from haiprof.run_analysis.step_frame import STEP_PHASES

_BALANCED = "nothing wrong found"


def diagnose(
    analyzer: RunFrames, *, trace_limit_bytes: int | None = None, since_ns: int | None = None
) -> Verdict:
    """Judges a run.

    Args:
        analyzer: Of the run.
        trace_limit_bytes: Traces that are larger in sum are not read; None reads all.
        since_ns: Only steps that began at or after this Unix time are judged; None judges all but
            the first ones.

    Raises:
        RunNotFoundError: There is no run.
        RunFormatError: It is of another version, or nothing in it can be read.
    """
    inputs = gather_inputs(analyzer, trace_limit_bytes=trace_limit_bytes, since_ns=since_ns)
    manifest = analyzer.files.manifest
    deaths = analyzer.deaths()
    death = next((each for each in deaths if each.final), None)
    split: Mapping[str, float | None] = dict.fromkeys(STEP_PHASES)
    if inputs.steps.height:
        split = usual_split(inputs.of_rank(typical_rank(inputs)))
    findings, abstained, checked = _judge(inputs, split)
    answers = CodeAnswers(analyzer, inputs)
    findings = tuple(answers.name_lines(finding) for finding in findings)
    run = shown_path(analyzer.run.root)
    step_ns = sum(ns or 0.0 for ns in split.values()) if inputs.steps.height else None
    return Verdict(
        run=run,
        name=manifest.name if manifest else analyzer.run.root.name,
        headline=death.headline if death else _headline(analyzer, inputs, findings, len(checked)),
        death=death,
        memory_at_end=analyzer.memory_at_end() if death else (),
        gpu_memory_at_end=analyzer.gpu_memory_at_end() if death else (),
        starts=tuple(analyzer.starts()) if deaths else (),
        goodput=analyzer.goodput() if deaths else None,
        split=split,
        step_ns=step_ns,
        work=step_work(analyzer.run, step_ns, limit_bytes=trace_limit_bytes),
        step_count=inputs.step_count,
        most_steps=analyzer.most_steps(),
        end_wall_ns=manifest.end_wall_ns if manifest else None,
        ranks=inputs.world,
        findings=findings,
        abstained=abstained,
        checked=checked,
        not_measured=not_measured(analyzer, inputs),
        evaluation_ns=_largest(inputs.ranks["eval_ns"] - _compiled_in_evaluation(inputs)),
        compile_ns=_largest(inputs.ranks["compile_ns"]),
        events=_events(analyzer.pauses().join(inputs.ranks, on=["rank", "attempt"], how="semi")),
        cost=_cost(analyzer, inputs),
        next_command=_next_command(run, inputs, findings),
        notes=(
            *([WORDS[inputs.marked_by]] if inputs.marked_by else []),
            *analyzer.notes(),
            *attempt_notes(analyzer.steps()),
            *short_notes(inputs),
            *stolen_notes(inputs),
        ),
        traces=traced_lines(analyzer.windows(), analyzer.steps(), analyzer.run),
        reactions=reacted_lines(inputs.reactions, analyzer.run),
    )


def _judge(
    inputs: RuleInputs, split: Mapping[str, float | None]
) -> tuple[tuple[Finding, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Findings in order, the rules that could not be judged, and those that found nothing."""
    if not inputs.steps.height:
        return (), tuple((rule.__name__, "no steps") for rule in RULES), ()
    judged = [(rule.__name__, rule(inputs)) for rule in RULES]
    fired = [judgement for _, judgement in judged if isinstance(judgement, Finding)]
    impossible = impossible_findings(fired, split)
    fired = [found for found in fired if found.rule not in impossible]
    if inputs.steps.height < CRITICAL_MIN_STEPS:
        fired = [_less_sure(found) for found in fired]
    findings = in_order(agreeing(fired))
    if inputs.is_short:  # too short for its counters: whatever it shows is a note, in that order
        findings = tuple(_as_note(found) for found in findings)
    named = {found.rule for found in findings}
    abstained = [(x.rule, x.why) for _, x in judged if isinstance(x, Abstention)]
    abstained += [(rule, f"left out: {why}") for rule, why in impossible.items()]
    checked = [
        x
        for x, judgement in judged
        if not isinstance(judgement, Abstention) and x not in named and x not in impossible
    ]
    return findings, tuple(abstained), tuple(checked)


def _less_sure(found: Finding) -> Finding:
    if found.rule == STANDSTILL:  # which is seen at once, and needs no steps
        return found
    return replace(found, confidence=min(found.confidence, FEW_STEPS_SURE))


def _as_note(found: Finding) -> Finding:
    if found.rule == STANDSTILL:
        return found
    return replace(found, lost_ratio=None, severity="info")


def short_notes(inputs: RuleInputs) -> tuple[str, ...]:
    """What the verdict says of a run that is too short for its counters."""
    if not inputs.step_count or not inputs.is_short:
        return ()
    return (
        f"less than {SHORT_RUN_S:g} s of steps were judged: too short for counters, so that who "
        "had the cores meanwhile is not known, and findings are no more than notes",
    )


def _headline(
    analyzer: RunFrames, inputs: RuleInputs, findings: tuple[Finding, ...], checked: int
) -> str:
    if not inputs.step_count:
        return f"no training steps: {why_no_steps(analyzer, inputs)[0]}"
    return findings[0].title if findings else f"{_BALANCED}: {checked} causes were checked"


def _events(phases: pl.DataFrame) -> dict[str, Events]:
    """Collector pauses and checkpoint saves, where there were any."""
    found = (
        phases.filter(pl.col("phase").is_in([GC_PHASE, SAVE_PHASE]))
        .group_by("phase")
        .agg(
            count=pl.len(),
            total=pl.col("duration_ns").sum(),
            longest=pl.col("duration_ns").max(),
        )
        .sort("phase")
    )
    return {
        phase: Events(count=count, total_ns=total, longest_ns=longest)
        for phase, count, total, longest in found.rows()
    }


def _cost(analyzer: RunFrames, inputs: RuleInputs) -> Cost:
    agents = []
    for node in analyzer.files.nodes:
        line = node.of_type("cost")[-1:]
        spent = number(line[0].get("cpu_ns")) if line else None
        elapsed = number(line[0].get("elapsed_ns")) if line else None
        if spent is not None and elapsed:
            agents.append(spent / elapsed)
    return Cost(
        hook_ns_per_step=number(inputs.ranks["cost_ns_per_step"].max()),
        hook_ratio=number(inputs.ranks["cost_ratio"].max()),
        agent_cpu_ratio=max(agents, default=None),
    )


def _compiled_in_evaluation(inputs: RuleInputs) -> pl.Series:
    return inputs.ranks["eval_compile_ns"].fill_null(0)


def _largest(values: pl.Series) -> int | None:
    value = values.max()
    return value if isinstance(value, int) else None


def _next_command(run: str, inputs: RuleInputs, findings: tuple[Finding, ...]) -> str:
    """The rank that a finding is about, or the one with the longest steps."""
    run = shlex.quote(run)
    if not inputs.steps.height:
        return f"haiprof overview {run}"
    named = next((finding.rank for finding in findings if finding.rank is not None), None)
    means = inputs.steps.group_by("rank").agg(pl.col("step_ns").mean())
    slowest = means.sort("step_ns", "rank", descending=[True, False])["rank"][0]
    return f"haiprof rank {run} {slowest if named is None else named}"
