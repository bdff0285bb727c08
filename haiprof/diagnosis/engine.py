"""Asks every rule and puts the verdict together."""

from __future__ import annotations

import polars as pl

from haiprof.analysis.analyzer import Analyzer
from haiprof.analysis.phases import GC_PHASE, SAVE_PHASE
from haiprof.analysis.records import number
from haiprof.analysis.step_frame import STEP_PHASES
from haiprof.diagnosis.causes import in_order
from haiprof.diagnosis.facts import Facts, gather_facts, median, middle_split
from haiprof.diagnosis.finding import Abstention, Finding
from haiprof.diagnosis.gaps import not_measured, why_no_steps
from haiprof.diagnosis.reacted import reacted_lines
from haiprof.diagnosis.rules import RULES
from haiprof.diagnosis.rules.cpu_stolen import stolen_notes
from haiprof.diagnosis.traced import traced_lines
from haiprof.diagnosis.verdict import Cost, Events
from haiprof.diagnosis.verdict import Verdict as Verdict

_BALANCED = "nothing wrong found"


def diagnose(
    analyzer: Analyzer, *, trace_limit_bytes: int | None = None, since_ns: int | None = None
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
    facts = gather_facts(analyzer, trace_limit_bytes=trace_limit_bytes, since_ns=since_ns)
    findings, abstained, checked = _judge(facts)
    manifest = analyzer.files.manifest
    run = str(analyzer.run.root)
    return Verdict(
        run=run,
        name=manifest.name if manifest else analyzer.run.root.name,
        headline=_headline(analyzer, facts, findings, len(checked)),
        split=middle_split(facts.steps) if facts.steps.height else dict.fromkeys(STEP_PHASES),
        step_ns=median(facts.steps["step_ns"]),
        step_count=facts.step_count,
        ranks=facts.world,
        findings=findings,
        abstained=abstained,
        checked=checked,
        not_measured=not_measured(analyzer, facts),
        evaluation_ns=_largest(facts.ranks["eval_ns"]),
        events=_events(analyzer.pauses()),
        cost=_cost(analyzer, facts),
        next_command=_next_command(run, facts, findings),
        notes=(*analyzer.notes(), *stolen_notes(facts)),
        traces=traced_lines(analyzer.windows(), analyzer.steps(), analyzer.run),
        reactions=reacted_lines(facts.reactions, analyzer.run),
    )


def _judge(
    facts: Facts,
) -> tuple[tuple[Finding, ...], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Findings in order, the rules that could not be judged, and those that found nothing."""
    if not facts.steps.height:
        return (), tuple((rule.__name__, "no steps") for rule in RULES), ()
    judged = [(rule.__name__, rule(facts)) for rule in RULES]
    findings = [judgement for _, judgement in judged if isinstance(judgement, Finding)]
    abstained = [(x.rule, x.why) for _, x in judged if isinstance(x, Abstention)]
    checked = [name for name, judgement in judged if judgement is None]
    return in_order(findings), tuple(abstained), tuple(checked)


def _headline(analyzer: Analyzer, facts: Facts, findings: tuple[Finding, ...], checked: int) -> str:
    if not facts.step_count:
        return f"no training steps: {why_no_steps(analyzer, facts)[0]}"
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


def _cost(analyzer: Analyzer, facts: Facts) -> Cost:
    agents = []
    for node in analyzer.files.nodes:
        line = node.of_type("cost")[-1:]
        spent = number(line[0].get("cpu_ns")) if line else None
        elapsed = number(line[0].get("elapsed_ns")) if line else None
        if spent is not None and elapsed:
            agents.append(spent / elapsed)
    return Cost(
        hook_ns_per_step=number(facts.ranks["cost_ns_per_step"].max()),
        hook_ratio=number(facts.ranks["cost_ratio"].max()),
        agent_cpu_ratio=max(agents, default=None),
    )


def _largest(values: pl.Series) -> int | None:
    value = values.max()
    return value if isinstance(value, int) else None


def _next_command(run: str, facts: Facts, findings: tuple[Finding, ...]) -> str:
    """The rank that a finding is about, or the one with the longest steps."""
    if not facts.steps.height:
        return f"haiprof overview {run}"
    named = next((finding.rank for finding in findings if finding.rank is not None), None)
    means = facts.steps.group_by("rank").agg(pl.col("step_ns").mean())
    slowest = means.sort("step_ns", "rank", descending=[True, False])["rank"][0]
    return f"haiprof rank {run} {slowest if named is None else named}"
