"""The verdict of a run: its ledger read aloud, and the facts beside it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import polars as pl

from haiprof.base.ledger import PROBLEM_RATIO, Account, Ledger
from haiprof.base.log_addresses import shown_path
from haiprof.base.units import bytes_text, duration_text, number_text, ratio_text, visible
from haiprof.diagnosis import explanations, run_notes, thresholds
from haiprof.diagnosis.background_saves import SLOWED
from haiprof.diagnosis.machine_causes import NEIGHBOURS, machine_text, stolen_notes
from haiprof.diagnosis.named_nodes import failed_before
from haiprof.diagnosis.own_work import describe_work, own_functions
from haiprof.diagnosis.restart_advice import restart_advice
from haiprof.diagnosis.rule_inputs import RuleInputs, gather_inputs
from haiprof.diagnosis.run_facts import KEPT_REMEDY, RULES
from haiprof.diagnosis.run_ledger import RunLedger, run_ledger
from haiprof.diagnosis.settings_facts import FUSED_GAINS, UNFUSED_ADAM
from haiprof.diagnosis.slow_parts import RULE as SLOW_PART
from haiprof.diagnosis.slow_parts import slow_part
from haiprof.diagnosis.small_operators import has_gradients
from haiprof.diagnosis.traced_window import step_work, traced_device
from haiprof.diagnosis.verdict import SEVERITIES, Cost, Events, Finding, Severity, gain_of, ranks_of
from haiprof.diagnosis.verdict import Verdict as Verdict
from haiprof.run_analysis.code_samples import OTHER_THREADS, TRAINING_PHASES
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.ledger import ACTIVITIES, DISPATCH_RATIO, GIL_WAIT, JOB, UNKNOWN
from haiprof.run_analysis.lines import CodeLine, find_statement, written_in
from haiprof.run_analysis.printed_lines import printed_notes
from haiprof.run_analysis.run_files import integer, number
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import GC_PHASE, SAVE_PHASE, STEP_PHASES
from haiprof.run_analysis.step_positions import OPTIMIZER
from haiprof.run_analysis.steps import WORDS
from haiprof.run_format.stack_lines import LOCK_HELD

STANDSTILL, FIRST_BATCH = "standstill", "first_batch"
"""It comes first: a job that stands still loses all of its time from then on."""
_OF_SLOW_PARTS = ("ranks_uneven", "blocking_collectives")
"""What else is seen of a part of the job that the others wait for."""
_BETWEEN_RANKS = {
    "wait: link": "exchanges data between ranks", "wait: peer": "waits for other ranks"
}  # fmt: skip
_NO_WORK = (*_BETWEEN_RANKS, "wait: loader", "wait: lock")
"""Activities that are no work of the model's, however needed."""
_LISTED_RATIO = PROBLEM_RATIO / 5  # Opportunities below this are in the ledger alone
_LISTED = 10
_LOADING = TRAINING_PHASES.index("dataloader")
_ADAM_FILES = ("/torch/optim/adam.py", "/torch/optim/adamw.py")
_MOST_RATIO = 0.5  # Of a step: from here on the headline is what the model's own work consists of
_NOTHING = "nothing stands out"
_ADDS = re.compile(r"\.(?:append|appendleft|extend|add|insert|update|setdefault)\(|\+=|\]\s*=(?!=)")
"""Of lines that keep what they make."""


def diagnose(
    analyzer: RunFrames, *, trace_limit_bytes: int | None = None, since_ns: int | None = None
) -> Verdict:
    """Judges a run."""
    return judge(analyzer, trace_limit_bytes=trace_limit_bytes, since_ns=since_ns)[0]


def judge(
    analyzer: RunFrames, *, trace_limit_bytes: int | None = None, since_ns: int | None = None
) -> tuple[Verdict, RunLedger | None]:
    """The same, with what its ledger is made of; None without judged steps."""
    inputs = gather_inputs(analyzer, trace_limit_bytes=trace_limit_bytes, since_ns=since_ns)
    manifest = analyzer.files.manifest
    deaths, wall_time = analyzer.deaths(), analyzer.goodput()
    death = next((each for each in deaths if each.final), None)
    facts, abstained, checked = judge_facts(inputs)
    found = run_ledger(inputs, facts)
    ledger = None if found is None else found.ledger
    few = inputs.steps.height < thresholds.CRITICAL_MIN_STEPS
    more = () if found is None else (slow_part(inputs, found), _kept_graph(inputs, found))
    facts += (_grade(each, few=few) for each in more if each is not None)
    findings = _name_nodes(inputs, _findings(inputs, found, facts), ledger)
    creep = next((each for each in findings if each.rule == "memory_creep"), None)
    memory = analyzer.memory_at_end() if death else ()
    gpu_memory = analyzer.gpu_memory_at_end() if death else ()
    grown = next((m.growth_bytes_per_step for m in memory if m.growth_bytes_per_step), None)
    if death and death.cause == "out_of_memory" and not gpu_memory and (creep or grown):
        title, remedy = (creep.title, creep.remedy) if creep else ("", KEPT_REMEDY)
        if grown:  # one number for one growth: the death tells it
            title = f"memory grew by {bytes_text(round(grown))} a step"
            findings = tuple(each for each in findings if each is not creep)
        if death.line is not None and _ADDS.search(death.source or ""):
            first = f"see first what {death.line}, where it ran out, adds to: clear it, keep less, "
            remedy = f"{first}or write it to a file; else {remedy}"
        death = replace(death, remedy=f"{title}: {remedy}")
    run = shown_path(analyzer.run.root)
    step_ns = None if ledger is None else ledger.mean_ns
    functions = [] if found is None else own_functions(inputs, found)
    own = [] if found is None else describe_work(inputs, found, functions)
    headline = _headline(inputs, findings, found, own)
    verdict = Verdict(
        run=run, name=manifest.name if manifest else analyzer.run.root.name,
        headline=death.headline if death else headline, death=death,
        advice=restart_advice(analyzer), memory_at_end=memory, gpu_memory_at_end=gpu_memory,
        starts=wall_time.starts if deaths else (),
        goodput=wall_time if deaths and wall_time.has_ended else None, ledger=ledger,
        device=traced_device(analyzer.run, inputs.traces),
        own_work=tuple(each for each in functions[:_LISTED] if each.ratio >= PROBLEM_RATIO),
        run_time=wall_time.accounts if wall_time.has_ended else {}, split=_split(ledger, inputs),
        step_ns=step_ns, work=step_work(analyzer.run, step_ns, limit_bytes=trace_limit_bytes),
        step_count=inputs.step_count, most_steps=analyzer.most_steps(),
        end_wall_ns=manifest.end_wall_ns if manifest else None, ranks=inputs.world,
        findings=findings, abstained=abstained, checked=checked,
        not_measured=run_notes.not_measured(inputs, ledger),
        evaluation_ns=integer(
            (inputs.ranks["eval_ns"] - inputs.ranks["eval_compile_ns"].fill_null(0)).max()
        ),
        compile_ns=integer(inputs.ranks["compile_ns"].max()),
        events=_events(
            analyzer.pauses().join(inputs.ranks, on=["rank", "attempt"], how="semi"),
            [blocks.pauses for blocks in inputs.blocks.values()],
        ),
        machine=machine_text(inputs), cost=_cost(inputs),
        next_command=_next_command(run, inputs, findings, death),
        notes=(
            *([WORDS[inputs.marked_by]] if inputs.marked_by else []),
            *run_notes.untrained_notes(inputs.untrained),
            *run_notes.late_start_notes(analyzer),
            *analyzer.notes(),
            *run_notes.attempt_notes(analyzer),
            *short_notes(inputs),
            *uneven_notes(ledger),
            *(f"the model's own work: {text}" for _, text in own if text not in headline),
            *stolen_notes(inputs),
            *printed_notes(inputs.output, step_ns, _step_sizes(inputs), died=death is not None),
        ),
        traces=run_notes.traced_lines(analyzer, since_ns=since_ns),
        reactions=tuple(run_notes.reacted_lines(inputs, ledger)), nccl=analyzer.nccl().known,
    )  # fmt: skip
    return verdict, found


def judge_facts(
    inputs: RuleInputs,
) -> tuple[list[Finding], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What the ledger does not hold (memory, settings, hangs), and rules that could not judge."""
    if not inputs.steps.height:
        return [], tuple((rule.__name__, "no steps") for rule in RULES), ()
    judged = [(rule.__name__, rule(inputs)) for rule in RULES]
    few = inputs.steps.height < thresholds.CRITICAL_MIN_STEPS
    facts = [_grade(replace(each, rule=name), few=few)
             for name, each in judged if isinstance(each, Finding)]  # fmt: skip
    abstained = tuple((name, why) for name, why in judged if isinstance(why, str))
    return facts, abstained, tuple(name for name, each in judged if each is None)


def _grade(found: Finding, *, few: bool) -> Finding:
    """A fact with a share of the time is a problem above the one limit, as an opportunity is."""
    if few and found.rule != STANDSTILL:  # which is seen at once, and needs no steps
        found = replace(found, confidence=min(found.confidence, thresholds.FEW_STEPS_SURE))
    if found.lost_ratio is None or found.severity == "info":
        return found
    if found.lost_ratio < PROBLEM_RATIO:
        return replace(found, severity="info")
    return replace(
        found, severity="critical" if found.lost_ratio >= thresholds.CRITICAL_RATIO else "warning"
    )


def _findings(
    inputs: RuleInputs, found: RunLedger | None, facts: Sequence[Finding]
) -> tuple[Finding, ...]:
    """Opportunities by their gain; facts without one behind those of their severity."""
    rows = [*facts]
    if found is not None:
        ledger, samples = found.ledger, found.samples
        # Where no other thread of the job's was seen, haiprof's own had the interpreter lock.
        has_threads = ((samples.phase == OTHER_THREADS) & (samples.worker < 0)).any()
        of_haiprof = "" if has_threads else ACTIVITIES[GIL_WAIT]
        listed = [
            (row, account)
            for row, account in zip(ledger.opportunities, ledger.largest(), strict=True)
            if account.gain_ns >= _LISTED_RATIO * ledger.mean_ns and account.activity != of_haiprof
        ]
        priced = {fact.rule: fact for fact in facts if fact.is_priced}
        rows = [replace(_finding(inputs, found, account, priced), account=row)
                for row, account in listed[:_LISTED]]  # fmt: skip
        if any(fact.rule == SLOW_PART for fact in facts):
            rows = [row for row in rows if row.rule not in _OF_SLOW_PARTS]
        named = {row.rule for row in rows}
        rows += (_with_samples(found, fact) for fact in facts if fact.rule not in named)
        rows = [_name_setting(inputs, found, row) if row.setting else row for row in rows]
    rows.sort(key=lambda row: (
        row.rule != STANDSTILL, SEVERITIES.index(row.severity),
        -(_sure_ratio(row) if row.rule == NEIGHBOURS else row.lost_ratio or 0.0),
    ))  # fmt: skip
    # What others do on the machine counts by what is sure, behind all that surely gains more.
    at = next((place for place, row in enumerate(rows) if row.rule == NEIGHBOURS), None)
    if at is not None:
        more = [place for place, row in enumerate(rows) if _sure_ratio(row) > _sure_ratio(rows[at])]
        rows.insert(max([at, *more]), rows.pop(at))
    return tuple(rows)


def _with_samples(found: RunLedger, fact: Finding) -> Finding:
    """A fact with what samples tell of it."""
    table, samples, mean_ns = found.table, found.samples, found.ledger.mean_ns
    if fact.rule == FIRST_BATCH:  # before all judged steps: in no account
        first = samples.take((samples.step == 0) & (samples.phase == _LOADING))
        return replace(fact, code_lines=explanations.code_lines(first, "the first batch", 1.0))
    if fact.rule != UNFUSED_ADAM:
        return fact
    # What fused=True gains of the optimizer's own work, which is needed and in no other gain.
    updates = table.tree.within(_ADAM_FILES)[table.stack] & (table.position == OPTIMIZER)
    ns = found.time.mean_of(table, np.flatnonzero(table.needed & updates))
    least, usual, most = (ns * share for share in FUSED_GAINS)
    return replace(fact, gain=gain_of(mean_ns, usual, least, most), lost_ratio=usual / mean_ns)


def _name_setting(inputs: RuleInputs, found: RunLedger, row: Finding) -> Finding:
    """The finding with the line of the job's that sets what it is about, where one alone does."""
    manifest, gain = inputs.analyzer.files.manifest, row.gain
    since_ns = manifest.start_wall_ns if manifest else 0
    place = find_statement(found.samples.tree, row.setting, since_ns)
    if place is None:
        return row
    share = low = high = None
    if gain is not None:
        share = row.lost_ratio
        low, high = (1.0 - ns / gain.step_ns for ns in (gain.high_ns, gain.low_ns))
    file, line, function = place
    said = CodeLine(
        file=file, line=line, function=function, share=share, low=low, high=high, of="the step",
        sample_count=None, callees=(),
    )  # fmt: skip
    return replace(row, code_lines=(said, *row.code_lines))


def _sure_ratio(row: Finding) -> float:
    """The share of the step that is gained without it for sure; 0 where that is not known."""
    return 0.0 if row.gain is None else 1.0 - row.gain.high_ns / row.gain.step_ns


def _name_nodes(
    inputs: RuleInputs, findings: tuple[Finding, ...], ledger: Ledger | None
) -> tuple[Finding, ...]:
    """Findings with the nodes of their ranks, and what the last preflight said of these."""
    hosts, named, files = inputs.hosts, [], inputs.analyzer.files
    for finding in findings:
        own = {hosts[rank] for rank in ranks_of(finding, ledger) if rank in hosts}
        is_part = 0 < len(own) < len(set(hosts.values()))
        named.append(replace(finding, nodes=tuple(sorted(own))) if is_part else finding)
    nodes = sorted({node for one in named for node in one.nodes})
    if files.manifest is None or not nodes:
        return tuple(named)
    failed = failed_before(files.paths.root.parent, nodes, files.manifest.start_wall_ns)
    for place, finding in enumerate(named):
        said = "; ".join(f"{visible(one.host)} ({visible(one.what)})" for one in failed
                         if one.host in finding.nodes)  # fmt: skip
        if said:
            first = f"the last preflight before this run had named {said}: measure it again "
            first += "(`haiprof preflight`), and leave it out if it still is; otherwise "
            named[place] = replace(finding, remedy=first + finding.remedy)
    return tuple(named)


def _finding(
    inputs: RuleInputs, found: RunLedger, account: Account, priced: dict[str, Finding]
) -> Finding:
    """One opportunity in words."""
    ledger, samples, gain_ns = found.ledger, found.samples, account.gain_ns
    severity: Severity = "info"
    if ledger.is_problem(account) and not inputs.is_short:
        is_sure = account.gain_low_ns >= thresholds.CRITICAL_RATIO * ledger.mean_ns
        severity = "critical" if is_sure else "warning"
    gain = gain_of(ledger.mean_ns, gain_ns, account.gain_low_ns, account.gain_high_ns)
    ratio = gain_ns / max(ledger.mean_ns, 1.0)
    if account.explanation in priced:
        fact = priced[account.explanation]
        is_known = fact.lost_ratio is None and not fact.seen_in  # its price, which was missing
        missing = () if is_known else fact.missing
        return replace(fact, lost_ratio=ratio, gain=gain, severity=severity, missing=missing)
    question = explanations.Question(
        inputs=inputs, samples=samples, account=account, mean_ns=ledger.mean_ns,
        collections_ns=found.collections_ns(account),
    )  # fmt: skip
    if account.explanation == "ranks_uneven" and found.late is not None:
        extra_ns = found.late.extra_ns  # of which others may still have to wait for someone else
        extra_ns = gain_ns if gain_ns < found.late.goes * extra_ns / 2 else extra_ns
        named = (each for each in ledger.largest() if each.ranks == account.ranks)
        is_rest = any(each != account for each in named)
        said = explanations.stragglers(question, extra_ns, is_rest=is_rest)
    elif account.explanation == SLOWED and found.slowed is not None:
        said = explanations.slowed_by_saves(question, found.slowed)
    else:
        said = explanations.explain(question)
    line = explanations.account_line(account, ledger.mean_ns)
    few = inputs.steps.height < thresholds.CRITICAL_MIN_STEPS
    said = _with_operators_beside(found, account, said)
    return replace(
        said, gain=gain, confidence=thresholds.FEW_STEPS_SURE if few else said.confidence,
        severity=severity if said.is_choice else "info", lost_ratio=min(ratio, 1.0),
        rank=account.ranks[0] if len(account.ranks) == 1 else account.slowest_rank,
        code_lines=(line, *said.code_lines) if line else said.code_lines,
    )  # fmt: skip


def uneven_notes(ledger: Ledger | None) -> Iterator[str]:
    """What the model itself does in a part of the steps alone."""
    for each in () if ledger is None else ledger.accounts:
        works = each.needed and each.activity not in _NO_WORK
        if works and each.when.startswith(("since", "until", "every")):
            is_beside = each.position in ("prepare", "between_steps")
            yield (
                f"{each.code_place or each.where}, {each.in_words}: "
                f"{duration_text(each.ns_per_step)} of the mean step, {each.paid}; it is the "
                "model's own work, and the other steps are without it"
                + "; where nothing learns from it (samples, previews), do it less often"
                * is_beside
            )


def short_notes(inputs: RuleInputs) -> tuple[str, ...]:
    """What the verdict says of a run that is too short for its counters."""
    if not inputs.step_count or not inputs.is_short:
        return ()
    return (
        f"less than {thresholds.SHORT_RUN_S:g} s of training was recorded: competition for cores "
        "cannot be assessed, and findings are shown as info",
    )


def _headline(
    inputs: RuleInputs, findings: tuple[Finding, ...], found: RunLedger | None,
    own: Sequence[tuple[float, str]],
) -> str:  # fmt: skip
    if not inputs.step_count:
        return f"no training steps: {run_notes.why_no_steps(inputs)}"
    if any(each.severity != "info" for each in findings):
        return findings[0].title
    if found is None:
        return nothing_text(None)
    few = inputs.is_short or inputs.steps.height < thresholds.CRITICAL_MIN_STEPS
    if not few and findings and _sure_ratio(findings[0]) >= thresholds.CRITICAL_RATIO:
        return findings[0].title  # no setting of the job's removes it
    ratio, text = max(own, default=(0.0, ""))
    if not few and ratio >= _MOST_RATIO:
        return text
    inside = "".join(f"; {text}" for _, text in own)
    return nothing_text(found.ledger, few=few, inside=inside, findings=findings)


def _kept_graph(inputs: RuleInputs, found: RunLedger) -> Finding | None:
    """A backward that is too long for its forward and keeps graphs: it may go through old ones."""
    ledger, samples = found.ledger, found.samples
    forward = ledger.positions.get("forward", 0.0) + ledger.positions.get("loss", 0.0)
    # Of backward, what waits for ranks, and what has a price of its own, is no graph's.
    backward = ledger.positions.get("backward", 0.0) - sum(
        each.ns_per_step for each in ledger.accounts
        if each.position == "backward" and (not each.needed or each.activity in _BETWEEN_RANKS)
    )  # fmt: skip
    kept = any(settings.looks.kept_graph_count for settings in inputs.settings.values())
    if not kept or not forward:
        return None
    # Several losses may each go backward through the graph of one forward.
    phases = inputs.analyzer.phases()["phase"]
    backwards, forwards = (int((phases == name).sum()) for name in ("backward", "forward"))
    own = forward * max(backwards / max(forwards, 1), 1.0)
    most, usual, least = (backward - ratio * own for ratio in thresholds.BACKWARD_RATIOS)
    if least < 0:
        return None
    in_backward = samples.take(samples.phase == TRAINING_PHASES.index("backward"))
    return Finding(
        title=f"backward takes {number_text(backward / forward)} times as long as forward and "
        "keeps its graph (retain_graph=True): a tensor that a step takes over from the one before "
        "without detach() makes it go through the graphs of both",
        remedy="detach() what a step takes over (a hidden state, a running average, a target), and "
        "leave retain_graph=True out: where backward then raises, an older graph is still used",
        rule="kept_graph", lost_ratio=usual / ledger.mean_ns,
        gain=gain_of(ledger.mean_ns, usual, least, most),
        code_lines=explanations.code_lines(in_backward, "backward", 1.0),
    )  # fmt: skip


def _with_operators_beside(found: RunLedger, account: Account, said: Finding) -> Finding:
    """What small operators take that the same function calls: with its loop they become fewer."""
    if account.package != JOB or account.activity != "python" or account.position == "evaluation":
        return said
    place = account.position, account.file, written_in(account.function or "")
    same = [
        (each, rows)
        for each, rows in zip(found.ledger.accounts, found.rows, strict=True)
        if each.needed and each.activity == "operators"
        and (each.position, each.file, written_in(each.function or "")) == place
    ]  # fmt: skip
    spent_ns = sum(each.ns_per_step for each, _ in same)
    if spent_ns < PROBLEM_RATIO * found.ledger.mean_ns:
        return said
    whole = np.concatenate([rows for _, rows in same])
    seen = np.unique(found.table.sample[whole])
    held = found.samples.lock_wait[seen[seen >= 0]] == LOCK_HELD
    if held.mean() < DISPATCH_RATIO:  # the thread held the interpreter lock for less of the time
        return said
    text = f"; the small operators that it calls take another {duration_text(spent_ns)}"
    if account.position in ("forward", "loss") and has_gradients(found.table, whole):
        # What backward does is not told by line here: it has their share of forward.
        positions = found.ledger.positions
        forward_ns = positions.get("forward", 0.0) + positions.get("loss", 0.0)
        share = min((account.ns_per_step + spent_ns) / max(forward_ns, 1.0), 1.0)
        backward_ns = share * positions.get("backward", 0.0)
        text += f", and their backward about {duration_text(backward_ns)}" if backward_ns else ""
    return replace(said, title=said.title + text, remedy=_ALL_AT_ONCE)


_ALL_AT_ONCE = (
    "do it for all elements at once, without a loop (batched operators, torch.stack, torch.vmap); "
    "where each round needs the one before, torch.compile makes the calls cheaper"
)


def nothing_text(
    ledger: Ledger | None, *, few: bool = False, inside: str = "", findings: Sequence[Finding] = ()
) -> str:  # fmt: skip
    """What the step consists of, where nothing stands out; or what may, of too few steps.

    `inside` says more of the model's own work; a setting of the `findings` may gain most.
    """
    if ledger is None:
        return f"{_NOTHING}: no step was evaluated"
    mean = max(ledger.mean_ns, 1.0)
    if ledger.device_idle_ns is None:
        own_ns = sum(account.ns_per_step for account in ledger.accounts
                     if account.needed and account.activity not in _NO_WORK)  # fmt: skip
        share = ratio_text((own_ns + ledger.residual_ns) / mean)
        is_seen = own_ns >= ledger.residual_ns
        what = "passes in the model, whose code was not sampled"
        what = "is the model's own work" if is_seen else what
        text = f"{_NOTHING}: {share} of the step {what}{inside}"
        for activity, does in _BETWEEN_RANKS.items():
            spent_ns = sum(a.ns_per_step for a in ledger.accounts if a.activity == activity)
            if spent_ns >= PROBLEM_RATIO * mean:
                text += f", {ratio_text(spent_ns / mean)} {does}"
    else:
        least = "at least" if ledger.device_idle_is_bound else "about"
        share = ratio_text(1 - ledger.device_idle_ns / mean)
        text = f"{_NOTHING}: the device is busy for {least} {share} of the step"
    most_ns = max((account.gain_ns for account in ledger.largest()), default=0.0)
    settings = [(gain, each.title) for each in findings if each.account is None
                for gain in [each.gain] if gain is not None]  # fmt: skip
    for gain, title in [] if few else sorted(settings, key=lambda one: one[0].left_ns)[:1]:
        if mean - gain.left_ns > most_ns:
            ratios = (1.0 - ns / gain.step_ns for ns in (gain.left_ns, gain.high_ns, gain.low_ns))
            share, low, high = map(ratio_text, ratios)
            return f"{text}; largest opportunity: {title}, {share} ({low} to {high})"
    if not ledger.opportunities:
        return text
    largest = ledger.largest()  # what was not sampled is nothing to do about
    most = next((each for each in largest if each.activity != ACTIVITIES[UNKNOWN]), largest[0])
    share, low, high = (
        ratio_text(ns / mean) for ns in (most.gain_ns, most.gain_low_ns, most.gain_high_ns)
    )
    varies = most.gain_low_ns < PROBLEM_RATIO * mean
    if most.gain_ns >= thresholds.CRITICAL_RATIO * mean and (few or varies):
        at = f" ({most.code_place})" if most.code_place else ""
        few_steps = f"too little was recorded to be sure ({ledger.count:,} steps)"
        why = few_steps if few else "not certain"
        takes = f"{most.in_words}{at} takes {share} ({low} to {high}) of the step"
        return f"{why}: {takes}{most.paid_aside}"
    if most.gain_ns >= PROBLEM_RATIO * mean and not ledger.is_problem(most):
        share += f" ({low} to {high}: not certain)"
    return f"{text}; largest opportunity: {most.in_words}, {share}{most.paid_aside}"


def _step_sizes(inputs: RuleInputs) -> dict[str, tuple[float, ...]]:
    """How many steps, and samples of its DataLoader, a step of one rank and of all ranks has."""
    passes = number(inputs.steps["micro_step_count"].median()) or 1.0
    batches = (size * passes for size in sorted(set(inputs.batch_sizes.values()))[:1])
    return {
        "steps": (1.0,),
        "samples": tuple(count * each for each in batches for count in (1, len(inputs.world))),
    }


def _split(ledger: Ledger | None, inputs: RuleInputs) -> dict[str, float | None]:
    """The mean step by phase: it adds up to `mean_ns`, what lies between steps in `other`."""
    if ledger is None:
        return dict.fromkeys(STEP_PHASES)
    found: dict[str, float | None] = {}
    for phase in STEP_PHASES[:-1]:
        seen = inputs.steps[f"{phase}_host_ns"].null_count() < inputs.steps.height
        position = "input" if phase == "dataloader" else phase
        found[phase] = ledger.positions.get(position, 0.0) if seen else None
    found["other"] = ledger.mean_ns - sum(value or 0.0 for value in found.values())
    return found


def _events(pauses: pl.DataFrame, folded: Sequence[tuple[int, int, int]]) -> dict[str, Events]:
    """Collector pauses and checkpoint saves, where there were any."""
    # `folded`, of other collector pauses: how many, their sum and the longest.
    found = {}
    for phase, more in ((GC_PHASE, folded), (SAVE_PHASE, ())):
        own = pauses.filter(phase=phase)["duration_ns"]
        parts = ((len(own), int(own.sum()), integer(own.max()) or 0), *more)
        counts, sums, longest = zip(*parts, strict=True)
        if any(counts):
            found[phase] = Events(count=sum(counts), total_ns=sum(sums), longest_ns=max(longest))
    return found


def _cost(inputs: RuleInputs) -> Cost:
    lines = [node.last("cost") for node in inputs.analyzer.files.nodes]
    times = [(number(line.get("cpu_ns")), number(line.get("elapsed_ns"))) for line in lines]
    return Cost(
        hook_ns_per_step=number(inputs.ranks["cost_ns_per_step"].max()),
        hook_ratio=number(inputs.ranks["cost_ratio"].max()),
        threads_cpu_ratio=number(inputs.ranks["beside_cpu_ratio"].max()),
        agent_cpu_ratio=max((ns / of for ns, of in times if ns is not None and of), default=None),
    )


def _next_command(
    run: str, inputs: RuleInputs, findings: tuple[Finding, ...], death: Death | None
) -> str:
    """The rank that died first, that a finding is about, or the one with the longest steps."""
    run = shlex.quote(run)
    if not inputs.steps.height:
        return f"haiprof verdict overview {run}"
    died = (rank for rank in (death.ranks if death else ()) if rank in inputs.by_rank)
    of_findings = (finding.rank for finding in findings if finding.rank is not None)
    named = next(chain(died, of_findings), None)
    means = {rank: number(part["step_ns"].mean()) or 0.0 for rank, part in inputs.by_rank.items()}
    slowest = min(means, key=lambda rank: (-means[rank], rank))
    return f"haiprof verdict rank {run} {slowest if named is None else named}"
