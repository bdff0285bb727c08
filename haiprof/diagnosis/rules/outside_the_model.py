"""The step is spent outside forward, backward, optimizer and dataloader."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, median, usual_share
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    HELD_STEP_RATIO,
    LOOP_NS,
    MIN_STEPS,
    OTHER_WARNING_RATIO,
    OWN_STEP_RATIO,
    SAVE_MAIN_RATIO,
)

RULE = "outside_the_model"


def _without_gradients(inputs: RuleInputs) -> float:
    """Time in teachers, target networks and rollouts, which are the model's own work."""
    ranks = inputs.ranks.filter(inputs.ranks["rank"].is_in(list(inputs.world)))
    return float(ranks["nograd_ns"].sum() or 0)


def _of_steps_without_phases(inputs: RuleInputs) -> Judgement:
    """Fires where Python holds the interpreter for a third of a step.

    Operators that such a loop calls by itself, and what it waits for, are taken for its work.
    """
    code = inputs.python_time("other")
    if code is None:
        return Abstention(rule=RULE, why="no phase of the steps was seen, and too few stacks")
    if code.held_ratio < OTHER_WARNING_RATIO:
        return None
    held_ns = code.held_ratio * float(inputs.steps["step_ns"].sum()) / inputs.steps.height
    return Finding(
        rule=RULE,
        title=f"Python of the job's own takes {ratio_text(code.held_ratio)} of a step, and no "
        "operator begins meanwhile",
        evidence=(
            Evidence(name="Python, share of the step", value=code.held_ratio, unit="ratio"),
            Evidence(name="Python, mean per step", value=held_ns, unit="ns"),
        ),
        remedy="operators on whole tensors instead of a loop, fewer of such calls, or a process of "
        "its own beside the job",
        confidence=0.8 if inputs.steps.height >= CRITICAL_MIN_STEPS else 0.5,
        lost_ratio=code.held_ratio,
    )


def outside_the_model(inputs: RuleInputs) -> Judgement:
    """Fires where a third of the step or more is in none of the four phases.

    What any loop takes there for each backward pass (LOOP_NS: the loss, zero_grad, its own lines)
    is taken off first, and so a tiny model is left alone, most of whose step is launching. What is
    beyond that is worth naming, be it metrics or batches that the loop makes itself: 0.3 ms a step
    can be changed as well as 3 ms.
    """
    share = usual_share(inputs, "other")
    if share is None or inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    phases = ("dataloader", "forward", "backward", "optimizer")
    if all(inputs.steps[f"{phase}_host_ns"].null_count() for phase in phases):
        return _of_steps_without_phases(inputs)
    whole_ns = max(float(inputs.steps["step_ns"].sum()), 1.0)
    without = _without_gradients(inputs) / whole_ns
    step_ns = whole_ns / inputs.steps.height
    loops = LOOP_NS * max(median(inputs.steps["micro_step_count"]) or 1.0, 1.0) / step_ns
    lost = max(share - without - loops, 0.0)
    code = inputs.python_time("other")
    held = min(code.held_ratio * share, lost) if code else 0.0
    own = min(code.own_ratio * share, lost) if code else 0.0
    found = held >= HELD_STEP_RATIO or own >= OWN_STEP_RATIO
    if lost < OTHER_WARNING_RATIO and not found:
        return None
    other_ns = float(inputs.steps["other_host_ns"].sum())
    saves = inputs.save_ns >= SAVE_MAIN_RATIO * other_ns
    enough = inputs.steps.height >= CRITICAL_MIN_STEPS
    what = "mostly in saving checkpoints" if saves else "in no phase of training"
    step = "a step" if inputs.marked_by else "a training step"
    if inputs.marked_by and not saves:
        what = "neither in it nor in a loader"
    return Finding(
        rule=RULE,
        title=f"outside the model: {ratio_text(share)} of {step}, {what}",
        evidence=(
            Evidence(name="other, share of the step", value=share, unit="ratio"),
            Evidence(name="other, mean per step", value=other_ns / inputs.steps.height, unit="ns"),
            *(
                (
                    Evidence(
                        name="models without gradients, share of the time",
                        value=without,
                        unit="ratio",
                    ),
                )
                if without
                else ()
            ),
            Evidence(name="checkpoint saves, all steps", value=inputs.save_ns, unit="ns"),
        ),
        remedy="save less often, or on another thread (torch.distributed.checkpoint.async_save)"
        if saves
        else "look between the phases: .item() and printing every step, metrics, logging, a loss "
        "outside the model, batches made by hand; haiprof rank shows the slowest steps",
        confidence=0.8 if enough else 0.5,
        lost_ratio=lost,
        missing=("which code it is: a torch.profiler window with stacks would say",),
    )
