"""A job on CPUs that waits for Python and the dispatcher: one thread does all the work."""

from __future__ import annotations

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, usual_share
from haiprof.diagnosis.thresholds import (
    CORE_WAIT_WARNING_RATIO,
    DATALOADER_WARNING_RATIO,
    DISPATCH_RATIO,
    MAIN_CORE_FULL,
    MIN_STEPS,
    OTHER_THREADS_RATIO,
)

RULE = "host_bound"
_SPIN = (
    "all cores are used, but threads that wait for the next operator spin and look busy: a trace "
    "(--trace) tells"
)


def host_bound(inputs: RuleInputs) -> Judgement:
    """Fires where operators are too small to share: by the trace, or as one thread alone works.

    Operators on fewer than 32,768 elements stay on one thread (at::internal::GRAIN_SIZE), so it is
    Python and the dispatcher that take the time, and not computing. Matrix products start threads
    whatever their size, and these spin for some ms before they sleep (libgomp's GOMP_SPINCOUNT):
    without a trace cores that are used prove nothing.
    """
    if inputs.gpu_use or inputs.ranks["device"].is_in(["cuda"]).any():
        return Abstention(rule=RULE, why="the ranks use a GPU: gpu_waits_for_host judges that")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    traced = _by_trace(inputs)
    return traced if traced is not None else _by_cores(inputs)


def _by_trace(inputs: RuleInputs) -> Finding | None:
    """By the operators of a window; None where they do not say so, or there is none."""
    patterns = inputs.traces.patterns
    if patterns is None or patterns.totals["has_gpu"].any():
        return None
    rank, signs = max(
        patterns.signs.items(), key=lambda item: (item[1].operators.dispatch_ratio, -item[0])
    )
    found = signs.operators
    if found.dispatch_ratio < DISPATCH_RATIO:
        return None
    return _finding(
        inputs,
        rank,
        title=f"host-bound: {ratio_text(found.dispatch_ratio)} of the time goes into launching "
        f"operators of {duration_text(found.median_ns)}, not into computing",
        evidence=(
            Evidence(
                name="in short operators and between them", value=found.dispatch_ratio, unit="ratio"
            ),
            Evidence(name="operators in the window", value=float(found.count), unit="count"),
            Evidence(name="median operator", value=found.median_ns, unit="ns"),
        ),
        confidence=0.8,
    )


def _by_cores(inputs: RuleInputs) -> Judgement:
    judged = [
        rank
        for rank in inputs.world
        if inputs.last_attempts.operator_threads.get(rank, 1) > 1
        and rank in inputs.main_cores
        and len(_allowed_cores(inputs, rank)) > 1
    ]
    if not judged:
        return Abstention(rule=RULE, why="operators have one thread each, or no CPU use is known")
    rank = max(judged, key=lambda r: (inputs.main_cores[r], -r))
    used = inputs.main_cores[rank]
    threads = min(inputs.last_attempts.operator_threads[rank], len(_allowed_cores(inputs, rank)))
    waits = inputs.core_waits.get(rank, 0.0) >= CORE_WAIT_WARNING_RATIO
    loader = (usual_share(inputs, "dataloader") or 0.0) >= DATALOADER_WARNING_RATIO
    most = 1 + OTHER_THREADS_RATIO * (threads - 1)
    if used > most and inputs.traces.patterns is None:
        return Abstention(rule=RULE, why=_SPIN)
    if waits or loader or not MAIN_CORE_FULL <= used <= most:
        return None
    return _finding(
        inputs,
        rank,
        title=f"host-bound: one thread does all the work, {used:.2f} of {threads} cores are used",
        evidence=(
            Evidence(name="cores used by the training process", value=used, unit="cores"),
            Evidence(name="threads per operator", value=float(threads), unit="count"),
            Evidence(name="waiting for cores", value=inputs.core_waits.get(rank), unit="ratio"),
        ),
        confidence=0.6,
    )


def _finding(
    inputs: RuleInputs, rank: int, *, title: str, evidence: tuple[Evidence, ...], confidence: float
) -> Finding:
    return Finding(
        rule=RULE,
        severity="info",
        title=title,
        evidence=evidence,
        remedy="the operators are too small to be shared among threads: larger batches, fewer and "
        "larger operators (torch.compile, batched in place of loops), or run several jobs with "
        "OMP_NUM_THREADS=1 each",
        confidence=confidence,
        missing=("which Python code it is: a trace with --trace-stacks would say",),
        rank=rank if len(inputs.world) > 1 else None,
    )


def _allowed_cores(inputs: RuleInputs, rank: int) -> frozenset[int]:
    placement = inputs.placements.get(rank)
    return (placement.allowed_cpus if placement is not None else None) or frozenset()
