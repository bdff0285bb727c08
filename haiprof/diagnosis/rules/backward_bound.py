"""Backward takes far longer than twice forward: something beside the gradients happens there."""

from __future__ import annotations

from dataclasses import dataclass

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import (
    RuleInputs,
    after_gradients_ns,
    median,
    own_backward_ns,
    own_wait_ratio,
    usual_phases,
    usual_share,
)
from haiprof.diagnosis.thresholds import (
    BACKWARD_FORWARD_RATIO,
    BACKWARD_STEP_RATIO,
    COSTLY_WARNING_RATIO,
    DEAR_GRADIENTS_RATIO,
    HELD_STEP_RATIO,
    MIN_STEPS,
    MODEL_OWN_RATIO,
    OWN_STEP_RATIO,
    SEEN_SURE,
    USUAL_FORWARD_RATIO,
)

RULE = "backward_bound"
LOSS, GRADIENTS = "loss", "gradients"
"""Causes: gradients are dear, of what is computed between the phases, or of the model itself."""
_WAITS = "backward holds waiting for other ranks, and no collectives were recorded to tell it apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    forward_ns: float
    backward_ns: float
    own_ns: float | None
    """Of backward, up to the last collective; None: not known."""
    after_ns: float
    """From then on, without waiting for other ranks: transfer, and what else runs there."""
    step_ns: float
    clock: str

    @property
    def ratio(self) -> float:
        return self.busy_ns / max(self.forward_ns, 1.0)

    @property
    def lost(self) -> float:
        """Of the step: backward beyond the double of forward that is usual."""
        beyond = self.busy_ns - self.forward_ns / USUAL_FORWARD_RATIO
        return max(beyond, 0.0) / max(self.step_ns, 1.0)

    @property
    def busy_ns(self) -> float:
        """Without waiting for other ranks."""
        return (self.own_ns or 0.0) + self.after_ns

    @property
    def is_after(self) -> bool:
        """Whether most of it comes when the gradients are computed."""
        return self.after_ns > self.busy_ns / 2


def backward_bound(inputs: RuleInputs) -> Judgement:
    """Fires where backward without waiting for ranks is six times forward, and much of the step.

    Where all of it is torch's own code, it is the gradients themselves. Several passes, and
    gradients of gradients, are the job's method; a single one that takes more than twice the usual
    of all that may have gradients, the loss between the phases with it, has far more operators than
    its model, or gradients far larger than what was computed: slices in a Python loop, say.
    """
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    if inputs.sharded:
        return Abstention(rule=RULE, why="a sharded model waits in forward and backward")
    measured = _measure(inputs)
    if measured is None:
        return Abstention(rule=RULE, why="forward or backward is not measured")
    if measured.own_ns is None:
        return Abstention(rule=RULE, why=_WAITS)
    share = measured.busy_ns / max(measured.step_ns, 1.0)
    code = None if inputs.uses_gpu else inputs.python_time("backward")
    part = measured.backward_ns / max(measured.step_ns, 1.0)
    held = min(code.held_ratio * part, share) if code else 0.0
    waits = own_wait_ratio(inputs, code, part) if code else 0.0
    bound = measured.ratio >= BACKWARD_FORWARD_RATIO and share >= BACKWARD_STEP_RATIO
    if bound and code and code.own_ratio * part < MODEL_OWN_RATIO * measured.lost:
        dear = _gradients(inputs, measured, share)
        if dear is not None:
            return dear
        bound = False
    if not bound and held < HELD_STEP_RATIO and waits < OWN_STEP_RATIO:
        return None
    where = ", most of it after its gradients are computed" if measured.is_after else ""
    return Finding(
        rule=RULE,
        title=f"backward-bound: backward takes {ratio_text(share)} of the step, "
        f"{measured.ratio:.1f}x forward{where}",
        evidence=_evidence(inputs, measured, share),
        remedy=_remedy(inputs, is_after=measured.is_after),
        confidence=SEEN_SURE if code else 0.5 if measured.is_after else 0.6,
        lost_ratio=max(measured.lost, held, waits),
        missing=("which function it is: a trace with --trace-stacks would say",),
        cause="after_gradients" if measured.is_after else None,
    )


def _evidence(inputs: RuleInputs, measured: _Measured, share: float) -> tuple[Evidence, ...]:
    clock = measured.clock
    return (
        Evidence(name=f"backward ({clock} time)", value=measured.backward_ns, unit="ns"),
        Evidence(name="of it the rank's own work", value=measured.own_ns, unit="ns"),
        Evidence(
            name="after its last collective began, without waiting for ranks",
            value=measured.after_ns if len(inputs.world) > 1 else None,
            unit="ns",
        ),
        Evidence(name=f"forward ({clock} time)", value=measured.forward_ns, unit="ns"),
        Evidence(name="backward / forward (about 2 is usual)", value=measured.ratio, unit=""),
        Evidence(name="backward, share of the step", value=share, unit="ratio"),
    )


def _gradients(inputs: RuleInputs, measured: _Measured, share: float) -> Finding | None:
    """Where one pass of torch's own takes far longer than the gradients of what comes before it."""
    other_ns = (usual_share(inputs, "other") or 0.0) * measured.step_ns
    before_ns = measured.forward_ns + other_ns
    passes = median(inputs.steps["micro_step_count"])
    if passes != 1 or measured.is_after or measured.busy_ns < DEAR_GRADIENTS_RATIO * before_ns:
        return None
    usual = before_ns / USUAL_FORWARD_RATIO
    outside = other_ns >= COSTLY_WARNING_RATIO * measured.step_ns
    return Finding(
        rule=RULE,
        title=f"backward-bound: backward takes {ratio_text(share)} of the step, "
        f"{measured.ratio:.1f}x forward, in torch's own operators",
        evidence=(
            *_evidence(inputs, measured, share),
            Evidence(name="between the phases: loss and others", value=other_ns, unit="ns"),
        ),
        remedy=_FEWER,
        confidence=0.6,
        lost_ratio=(measured.busy_ns - usual) / max(measured.step_ns, 1.0),
        missing=("which operators they are: a trace (--trace) would say",),
        cause=LOSS if outside else GRADIENTS,
    )


_OWN = (
    "look in what runs with the gradients: tensor and module hooks, a custom autograd.Function "
    "written in Python, dense gradients of a large embedding (sparse=True), anomaly detection "
    "(torch.autograd.set_detect_anomaly), create_graph=True"
)
_FEWER = (
    "every operator of forward and of the loss has a gradient of its own, and that of a slice is "
    "as large as the tensor it was taken from: compute in one operator what a loop in Python "
    "computes for each token, sample or element (a loss over all of them at once); a large "
    "embedding: sparse=True"
)
_AFTER = (
    "something runs after the gradients: hooks on accumulated gradients, a custom "
    "autograd.Function next to the input; or their transfer is slow ("
)


def _remedy(inputs: RuleInputs, *, is_after: bool) -> str:
    if not is_after:
        return _OWN
    hosts = inputs.ranks["host"].drop_nulls().n_unique()
    measure = "measure the network between the nodes; " if hosts > 1 else ""
    return f"{_AFTER}{measure}accumulate with no_sync, compress with a communication hook)"


def _measure(inputs: RuleInputs) -> _Measured | None:
    """Medians over steps."""
    medians = usual_phases(inputs, "forward", "backward")
    if medians is None:
        return None
    clock, (forward, backward, whole) = medians
    own = own_backward_ns(inputs, backward, clock)
    after = min(after_gradients_ns(inputs), backward - own) if own is not None else 0.0
    return _Measured(
        forward_ns=forward, backward_ns=backward, own_ns=own, after_ns=after, step_ns=whole,
        clock=clock,
    )  # fmt: skip
