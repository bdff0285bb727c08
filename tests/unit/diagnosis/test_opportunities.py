"""Opportunities: nodes of the call tree that a change would remove, from written stacks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from haiprof.base.ledger import POSITIONS
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.opportunities import (
    POLLED,
    find_opportunities,
    join_restarts,
    join_worker_cores,
    mark_needed,
)
from haiprof.run_analysis.ledger import ACTIVITIES
from haiprof.run_format.stack_lines import (
    INDEPENDENT,
    OPERATIONS_BIT,
    RECURRENCE,
    WAIT_LETTERS,
    WAITS,
)
from tests.unit.diagnosis.tables import (
    BARRIER,
    ENGINE,
    FORWARD,
    LINEAR,
    MAIN,
    MODULE,
    PYTHON,
    SCRIPT,
    SENDS_BUFFERS,
    SHARDED,
    SITE,
    STEP,
    TRAINING,
    Part,
    job,
    opportunities,
    table_of,
)

STEPS = 12
DUMPS = (f"{PYTHON}/json/__init__.py", 231, "dumps")
ENCODE = (f"{PYTHON}/json/encoder.py", 200, "JSONEncoder.encode")
FSDP = (f"{SITE}/torch/distributed/fsdp/_runtime_utils.py", 700, "_post_backward_hook")
COPY = (f"{PYTHON}/copy.py", 128, "deepcopy")
PARAMETER = (f"{SITE}/torch/nn/parameter.py", 60, "Parameter.__deepcopy__")
NORM = (f"{SITE}/numpy/linalg/linalg.py", 2300, "norm")
CALLS_HOOKS = (MODULE[0], MODULE[1] + 60, "Module._call_impl.<locals>.inner")
EVALUATE = [job(90 + line, "evaluate") for line in range(10)]
LOOP = job(50, "main")
LOADER = (
    f"{SITE}/torch/utils/data/dataloader.py", 1300, "_MultiProcessingDataLoaderIter._get_data"
)  # fmt: skip
OF_DISABLED = (f"{SITE}/torch/_dynamo/eval_frame.py", 1200, "DisableContext.__call__.<locals>._fn")
COLLATE = (f"{SITE}/torch/utils/data/_utils/collate.py", 398, "default_collate")
TRAINER = (f"{SITE}/transformers/trainer.py", 2100, "Trainer._inner_training_loop")


def found(*parts: Any) -> dict[str, Any]:
    """By place: ms of a step, where and what, of what stands beside a usual step."""
    every = opportunities(table_of(*TRAINING, *parts, steps=STEPS))
    return {place: (ms / STEPS, *rest) for place, (ms, *rest) in every.items()}


def test_the_models_own_work_is_in_none() -> None:
    """Operators that its lines call, its gradients, torch's Python around them, its optimizer."""
    own = [
        ("forward", (SCRIPT, MAIN, MODULE, FORWARD), 3),
        ("forward", (SCRIPT, MAIN, MODULE, FORWARD, MODULE, LINEAR), 3, "h"),
        ("loss", (SCRIPT, job(42, "main"), (f"{SITE}/torch/nn/functional.py", 3, "nll")), 2),
        ("prepare", (SCRIPT, MAIN, MODULE, FORWARD, MODULE, LINEAR), 2),  # a teacher
        ("optimizer", (SCRIPT, MAIN, STEP), 3, "h"),
        ("forward", (SCRIPT, TRAINER, MODULE, FORWARD), 2),
    ]
    assert found(*own) == {}


def test_a_module_that_is_copied_between_steps_runs_no_model() -> None:
    """`load_state_dict` stands in the file in which modules are called."""
    loads = (MODULE[0], 2600, "Module.load_state_dict")
    stack = (SCRIPT, job(50, "main"), job(7, "sync_target"), loads)
    assert found(("between_steps", stack, 4, "h")) == {
        "sync_target:7": (4, "between_steps", "python")
    }


def test_an_average_of_the_weights_is_no_part_of_the_optimizer() -> None:
    update = (f"{SITE}/torch/optim/swa_utils.py", 300, "AveragedModel.update_parameters")
    assert found(("after_step", (SCRIPT, LOOP, update), 4, "h")) == {
        "main:50": (4, "after_step", "python")
    }


def test_what_is_never_compiled_is_no_part_of_the_model_for_that() -> None:
    """A hook of the job's logs each gradient's norm, inside of the optimizer's closure."""
    log = (f"{SITE}/lightning/pytorch/core/module.py", 531, "LightningModule.log")
    moves = (f"{SITE}/lightning_utilities/core/apply_func.py", 154, "apply_to_collection")
    hook = (SCRIPT, MAIN, STEP, job(20, "Lit.on_before_optimizer_step"), log, OF_DISABLED, moves)
    assert found(("gradients", hook, 6, "h")) == {
        "Lit.on_before_optimizer_step:20": (6, "gradients", "python")
    }


def test_an_evaluation_by_a_trainer_is_one_whatever_it_runs() -> None:
    """Its own code, the model's below it, and what the trainer and the loader do around it."""
    fit = (SCRIPT, job(25, "main"), TRAINER)
    rows = [
        ("evaluation", (*fit, job(12, "M.validation_step"), MODULE, LINEAR), 7, "0"),
        ("evaluation", (*fit, job(13, "M.validation_step"), OF_DISABLED), 2, "h"),
        ("after_step", (*fit, job(13, "M.validation_step"), OF_DISABLED), 1, "h"),
        ("evaluation", (*fit, COLLATE), 5, "h"),
    ]
    ((place, (ms, position, _activity)),) = found(*rows).items()
    assert (place, ms, position) == ("M.validation_step:12", 15, "evaluation")


def test_hooks_are_no_part_of_the_model_whatever_they_call() -> None:
    """A module's, called from another line than `forward`, and one of gradients."""
    watch, clip = job(60, "watch.<locals>.hook"), job(70, "clip")
    hooks = [
        ("forward", (SCRIPT, MAIN, MODULE, FORWARD, MODULE, CALLS_HOOKS, watch), 3, "0"),
        ("backward", (SCRIPT, job(43, "main"), ENGINE, clip), 2, "0"),
    ]
    assert found(*hooks) == {
        "watch.<locals>.hook:60": (3, "forward", "operators"),
        "clip:70": (2, "backward", "operators"),
    }


def test_what_one_rank_alone_evaluates_between_steps_is_no_part_of_the_model() -> None:
    beside = ("between_steps", (SCRIPT, job(50, "sanity"), MODULE, FORWARD, MODULE, LINEAR), 9)
    table = table_of(*TRAINING, beside)
    both, is_beside = table.step % 2, table.position == POSITIONS.index("between_steps")
    assert opportunities(replace(table, rank=both)) == {}
    alone = replace(table, rank=np.where(is_beside, 0, both))
    assert list(opportunities(alone)) == ["sanity:50"]


def test_parameters_that_are_updated_by_hand_are_the_models_own_work() -> None:
    update = (*job(13, "main"), "p -= 0.01 * p.grad")
    rows = [*TRAINING[:2], ("between_steps", (SCRIPT, update), 3)]
    assert opportunities(table_of(*rows)) == {}
    assert list(opportunities(table_of(*rows, TRAINING[2]))) == ["main:13"]  # a log of gradients


def test_what_backward_computes_again_is_the_line_that_asks_for_it() -> None:
    asks, save = job(12, "Net.forward"), (f"{SITE}/torch/utils/checkpoint.py", 490, "checkpoint")
    again = (f"{SITE}/torch/utils/checkpoint.py", 1100, "unpack_hook")
    rows = [
        ("forward", (SCRIPT, MAIN, MODULE, asks, save, MODULE, LINEAR), 3),
        ("backward", (SCRIPT, MAIN, ENGINE, again, MODULE, FORWARD, MODULE, LINEAR), 5),
    ]
    assert found(*rows) == {"Net.forward:12": (5.0, "backward", "operators")}


@pytest.mark.parametrize(
    ("position", "stack", "lock", "place", "activity"),
    [
        ("forward", (SCRIPT, MAIN, MODULE, job(9, "Net.forward")), "h", "Net.forward:9", "python"),
        ("forward", (SCRIPT, MAIN, MODULE, job(9, "Net.forward"), NORM), "0", "Net.forward:9",
         "native"),
        ("backward", (SCRIPT, MAIN, ENGINE, job(3, "hook")), "h", "hook:3", "python"),
        ("gradients", (SCRIPT, job(45, "main"), job(7, "clip")), "0", "clip:7", "operators"),
        ("after_step", (SCRIPT, LOOP, job(8, "log"), DUMPS, ENCODE), "h", "log:8", "python"),
        ("prepare", (SCRIPT, LOOP), "0", "main:50", "operators"),
        ("input", (SCRIPT, LOOP, job(2, "Data.__getitem__")), "0", "Data.__getitem__:2",
         "native"),
        ("input", (SCRIPT, LOOP, LOADER), "0", "wait: loader", "wait: loader"),
        ("backward", (SCRIPT, LOOP, ENGINE, FSDP, BARRIER), "0", "wait: link", "wait: link"),
        ("backward", (SCRIPT, LOOP, ENGINE, BARRIER), "0", "main:50", "wait: link"),
        ("forward", (SCRIPT, MAIN, MODULE, FORWARD, BARRIER), "0", "Net.forward:5", "wait: link"),
        ("after_step", (SCRIPT, LOOP, job(8, "share"), BARRIER), "0", "share:8", "wait: link"),
        ("loss", (SCRIPT, LOOP, COPY, PARAMETER), "h", "main:50", "python"),
        ("forward", (SCRIPT, MAIN, MODULE, SENDS_BUFFERS), "0", "main:40", "wait: link"),
        ("after_step", (SCRIPT, LOOP, SHARDED), "0", "main:50", "wait: link"),
        ("forward", (SCRIPT, MAIN, MODULE, FORWARD), "1", "wait: interpreter lock",
         "wait: interpreter lock"),
        ("compile", (SCRIPT, MAIN, MODULE, FORWARD), "h", "Net.forward:5", "python"),
        ("after_step", (), "0", "unknown", "unknown"),  # nobody looked there
        ("checkpoint", (SCRIPT, LOOP, job(8, "save")), "0", "save:8", "operators"),
    ],
)  # fmt: skip
def test_what_a_change_would_remove_is_one_with_its_line(
    position: str, stack: Any, lock: str, place: str, activity: str
) -> None:
    assert found((position, stack, 4, lock)) == {place: (pytest.approx(4), position, activity)}


def test_the_call_of_a_compiled_model_is_the_models_own() -> None:
    site = MODULE[0].partition("/torch/")[0]
    call = (f"{site}/torch/_dynamo/eval_frame.py", 400, "OptimizedModule.__call__")
    stack = (SCRIPT, job(10, "main"), call, ("/usr/lib/python3.12/contextlib.py", 141, "__enter__"))
    assert found(("after_step", stack, 4, "h")) == {}
    assert found(("compile", stack, 4, "h")).keys() == {"main:10"}


def test_batches_that_an_evaluation_waits_for_are_its_own() -> None:
    rows = [
        ("evaluation", (SCRIPT, MAIN, job(90, "evaluate"), LOADER), 3),
        ("evaluation", (SCRIPT, MAIN, job(91, "evaluate"), MODULE, FORWARD, MODULE, LINEAR), 2),
    ]
    ((_, (ms, position, _activity)),) = found(*rows).items()
    assert (ms, position) == (5.0, "evaluation")


@pytest.mark.parametrize(
    ("lock", "expected"), [("0", {}), ("-", {}), ("h", {"log:8": (4, "after_step", "python")})]
)
def test_operators_of_steps_without_any_phase_are_the_models(
    lock: str, expected: dict[str, Any]
) -> None:
    """A loop of `haiprof.step()` around functions: nothing says what is forward."""
    own: Any = ("after_step", (SCRIPT, LOOP, job(8, "log")), 4, lock)
    torch: Any = ("after_step", (SCRIPT, LOOP, job(8, "log"), LINEAR), 2)
    every = opportunities(table_of(own, torch, steps=STEPS))
    assert every.keys() == expected.keys()
    for place, (ms, *_) in every.items():
        assert ms / STEPS == pytest.approx(expected[place][0])


def test_a_line_of_the_loop_in_two_positions_is_one_in_each() -> None:
    """`for batch in loader:` is where batches are made, and where the loop goes on."""
    table = table_of(
        *TRAINING, ("input", (SCRIPT, LOOP), 3, "h"), ("after_step", (SCRIPT, LOOP), 2, "h")
    )
    places = [each.at for each in find_opportunities(mark_needed(table))]
    assert [place and place.line for place in places] == [50, 50]


def test_a_line_between_several_passes_of_a_step_is_one_opportunity() -> None:
    """A meta-learner copies the model for each of its tasks, behind an optimizer or a forward."""
    parts = [(position, (SCRIPT, LOOP), 2, "h") for position in ("loss", "prepare", "after_step")]
    table = mark_needed(table_of(*TRAINING, *parts))
    (found,) = find_opportunities(table)
    assert float(table.ns[found.rows].sum()) == pytest.approx(float(table.ns[~table.needed].sum()))
    assert found.at is not None
    assert found.at.line == 50


def test_statements_of_one_line_are_opportunities_of_their_own() -> None:
    sleeps, sorts = ((*job(50, "main"), text, number)
                     for number, text in enumerate(("time.sleep(0.1)", "sorted(x)")))  # fmt: skip
    table = table_of(
        *TRAINING, ("after_step", (SCRIPT, sleeps), 3), ("after_step", (SCRIPT, sorts), 2, "h")
    )
    parts = find_opportunities(mark_needed(table))
    sums = sorted(float(table.ns[each.rows].sum()) / NS_PER_MS for each in parts)
    assert sums == pytest.approx([24, 36])


@pytest.mark.parametrize(
    ("kind", "key"),
    [(RECURRENCE | 3 << OPERATIONS_BIT, POLLED), (INDEPENDENT | 2 << OPERATIONS_BIT, None),
     (RECURRENCE | 9 << OPERATIONS_BIT, None)],
    ids=["while not len(queue)", "for _ in range(n)", "a loop that works"],
)  # fmt: skip
def test_a_sleep_that_asks_for_something_waits_for_that(kind: int, key: str | None) -> None:
    asks = (*job(50, "main"), "time.sleep(0.1)", 0, 49, kind)
    table = table_of(*TRAINING, ("after_step", (SCRIPT, asks), 3))
    (found,) = (each for each in find_opportunities(mark_needed(table)) if each.at)
    assert (found.at and found.at.line, found.key) == (50, key)


MODEL = (MODULE, FORWARD, MODULE, LINEAR)
IN_ITS_OWN_FORWARD = (SCRIPT, job(41, "main"), MODULE, job(6, "Net.forward"), job(7, "normalise"))
ONE: dict[str, tuple[list[Any], str, float, str, str]] = {
    "collections, wherever they come": (
        [Part(position=at, stack=(SCRIPT, MAIN, MODULE, FORWARD), ms=2, collecting=True)
         for at in ("forward", "after_step")],
        "garbage collection", 4, "forward", "garbage collection"),
    "ten helpers of one evaluation, of which none is most": (
        [("after_step", (SCRIPT, LOOP, EVALUATE[i], job(100 + i, f"metric_{i}")), 2 + (i == 3), "h")
         for i in range(10)],
        "evaluate:93", 21, "after_step", "python"),
    "an evaluation, not the layers that it runs": (
        [("after_step", (SCRIPT, LOOP, EVALUATE[0], *MODEL), 9)],
        "evaluate:90", 9, "after_step", "operators"),
    "an evaluation written into the loop": (
        [("evaluation", (SCRIPT, LOOP, *MODEL), 9)], "main:50", 9, "evaluation", "operators"),
    "a helper that is most of it": (
        [("after_step", (SCRIPT, LOOP, EVALUATE[0], job(7, "outer"), job(8, "inner")), 8, "h"),
         ("after_step", (SCRIPT, LOOP, EVALUATE[1]), 1, "h")],
        "inner:8", 9, "after_step", "python"),
    "library code called from one line": (
        [("after_step", (SCRIPT, LOOP, DUMPS), 2, "h"),
         ("after_step", (SCRIPT, LOOP, DUMPS, ENCODE), 3, "h"),
         ("after_step", (SCRIPT, LOOP, NORM), 1)],
        "main:50", 6, "after_step", "python"),
    "a lambda of the script": (
        [("after_step", (job(50, "<module>"),), 2, "h"),
         ("after_step", (job(50, "<module>"), job(50, "<lambda>")), 3, "h")],
        "<module>:50", 5, "after_step", "python"),
    **{f"a {inner} of the function that it is written in": (
        [("after_step", (SCRIPT, LOOP, job(8, "log")), 2, "h"),
         ("after_step", (SCRIPT, LOOP, job(8, "log"), job(9, f"log.<locals>.{inner}")), 3, "h")],
        "log:8", 5, "after_step", "python")
       for inner in ("<genexpr>", "<listcomp>", "<dictcomp>", "<lambda>",
                     "<listcomp>.<locals>.<listcomp>.<locals>.<genexpr>")},
    "a function that is reached by two ways": (
        [("after_step", (SCRIPT, LOOP, job(8, "log"), NORM), 3),
         ("after_step", (SCRIPT, job(60, "main"), job(70, "end"), job(8, "log"), NORM), 2)],
        "log:8", 5, "after_step", "native"),
    "a hook of layers that three lines of one forward call": (
        [("forward", (SCRIPT, MAIN, MODULE, job(line, "Net.forward"), MODULE, CALLS_HOOKS,
                      job(60, "watch.<locals>.hook")), 3, "0") for line in (12, 13, 14)],
        "watch.<locals>.hook:60", 9, "forward", "operators"),
    "Python between operators of a layer of the job's own, which are needed": (
        [("forward", (SCRIPT, MAIN, MODULE, job(9, "Cell.forward")), 12, "hh0")],
        "Cell.forward:9", 6, "forward", "python"),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE)
def test_what_belongs_together_is_one(case: str) -> None:
    parts, place, ms, position, activity = ONE[case]
    told = {place: (pytest.approx(ms), position, activity)}
    assert found(*parts) == told


def test_what_a_model_calls_in_its_own_forward_is_named_though_it_runs_operators_too() -> None:
    assert list(found(("forward", IN_ITS_OWN_FORWARD, 12, "hhh0"))) == ["normalise:7"]


def test_two_faults_in_one_loop_are_two() -> None:
    parts = [
        ("after_step", (SCRIPT, LOOP, job(8, "log"), DUMPS), 3, "h"),
        ("after_step", (SCRIPT, job(51, "main"), job(9, "draw"), NORM), 4),
        ("prepare", (SCRIPT, job(39, "main"), NORM), 2),
    ]
    assert list(found(*parts)) == ["draw:9", "log:8", "main:39"]


@pytest.mark.parametrize(("expression", "own_ms"), [("log(x, y)", None), ("log(x, y) + f(x)", 3.0)])
def test_entering_and_leaving_a_function_goes_with_it(
    expression: str, own_ms: float | None
) -> None:
    """Its lists are freed when it returns, by when its caller's line runs."""
    call = (*job(45, "main"), expression)
    rows = [
        ("after_step", (SCRIPT, call), 3, "h"),
        ("after_step", (SCRIPT, call, job(7, "log")), 9, "h"),
    ]
    told = found(*rows)
    whole = 12.0 if own_ms is None else 9.0
    assert told["log:7"] == (whole, "after_step", "python")
    assert told.get("main:45", (None,))[0] == own_ms


def test_workers_that_epochs_start_and_end_are_one_opportunity_with_the_wait_for_them() -> None:
    starts = (LOADER[0], 1100, "_MultiProcessingDataLoaderIter.__init__")
    ends = (LOADER[0], 1600, "_MultiProcessingDataLoaderIter._shutdown_workers")
    copies = (SCRIPT, job(60, "main"), (f"{PYTHON}/copy.py", 10, "deepcopy"))
    table = mark_needed(table_of(
        *TRAINING,
        ("input", (SCRIPT, MAIN, starts, (f"{PYTHON}/popen_fork.py", 66, "_launch")), 4, "h"),
        ("input", (SCRIPT, MAIN, ends), 2),
        ("input", (SCRIPT, MAIN, LOADER, (f"{PYTHON}/queue.py", 180, "Queue.get")), 3),
        ("input", copies, 5, "h"),
        steps=STEPS,
    ))  # fmt: skip
    plain = find_opportunities(table)
    joined = join_restarts(table, plain)
    ms = {
        ACTIVITIES[each.activity]: float(table.ns[each.rows].sum()) / NS_PER_MS / STEPS
        for each in joined
    }
    assert ms == pytest.approx({"wait: loader": 9, "python": 5})
    assert sum(len(each.rows) for each in joined) == sum(len(each.rows) for each in plain)


@pytest.mark.parametrize(("waits_ms", "taken_ms"), [(12, 6.0), (4, 0.0)])
def test_cores_that_loader_workers_take_go_with_the_wait_for_their_batches(
    waits_ms: int, taken_ms: float
) -> None:
    """Where that wait is the longer one; what others took stays."""
    takes = (f"{PYTHON}/queue.py", 180, "Queue.get")
    table = mark_needed(table_of(
        *TRAINING,
        Part(position="forward", stack=(SCRIPT, MAIN, MODULE, FORWARD), ms=10, queued=0.8),
        ("input", (SCRIPT, MAIN, LOADER, takes), waits_ms),
        steps=STEPS,
    ))  # fmt: skip
    plain = find_opportunities(table)
    joined_table, joined = join_worker_cores(table, plain, 0.75)
    ms = {
        ACTIVITIES[each.activity]: float(joined_table.ns[each.rows].sum()) / NS_PER_MS / STEPS
        for each in joined
    }
    assert ms["wait: loader"] == pytest.approx(waits_ms + taken_ms, rel=0.01)
    assert ms["no core"] == pytest.approx(8.0 - taken_ms, rel=0.01)
    assert joined_table.ns.sum() == pytest.approx(table.ns.sum())


@pytest.mark.parametrize(
    ("file", "wait", "activity"),
    [
        ("pipelining/schedules.py", "lock", "wait: link"),
        ("fsdp/_runtime_utils.py", "none", "operators"),  # it computes there
        ("checkpoint/filesystem.py", "lock", "operators"),
        ("checkpoint/filesystem.py", "file", "wait: file"),
    ],
)
def test_torchs_own_code_for_ranks_waits_for_them_where_it_is_at_a_lock(
    file: str, wait: str, activity: str
) -> None:
    stack = (SCRIPT, MAIN, (f"{SITE}/torch/distributed/{file}", 60, "_own"))
    part = Part(position="forward", stack=stack, ms=9, wait=WAIT_LETTERS[WAITS.index(wait)])
    table = table_of(*TRAINING, part, steps=STEPS)
    ns = dict.fromkeys(ACTIVITIES, 0.0)
    for each, at in zip(table.activity.tolist(), table.ns.tolist(), strict=True):
        ns[ACTIVITIES[each]] += at
    assert ns[activity] >= 9 * STEPS * NS_PER_MS * 0.99


def test_receiving_starting_and_other_work_of_one_line_are_opportunities_of_their_own() -> None:
    """What workers made must be received, whatever they do, though they answer for each tensor.

    Starting them is a sure gain.
    """
    copies = (f"{PYTHON}/copy.py", 10, "deepcopy")
    starts = (LOADER[0], 1100, "_MultiProcessingDataLoaderIter.__init__")
    opens = (f"{SITE}/torch/multiprocessing/reductions.py", 540, "rebuild_storage_fd")
    answers = (f"{PYTHON}/multiprocessing/connection.py", 768, "answer_challenge")
    ends = (LOADER[0], 1600, "_MultiProcessingDataLoaderIter._shutdown_workers")
    call = (*job(40, "main"), "for x, y in loader")
    table = mark_needed(table_of(
        *TRAINING,
        Part(position="input", stack=(SCRIPT, call, LOADER, opens), ms=6,
             wait=WAIT_LETTERS[WAITS.index("none")]),
        ("input", (SCRIPT, call, LOADER, opens, answers), 2),
        ("input", (SCRIPT, call, starts), 5, "h"),
        ("input", (SCRIPT, call, LOADER, ends), 4, "h"),
        ("input", (SCRIPT, call, copies), 7, "h"),
        steps=STEPS,
    ))  # fmt: skip
    ms = {
        (each.key, each.unsure_ns): round(table.ns[each.rows].sum() / NS_PER_MS / STEPS)
        for each in find_opportunities(table)
    }
    assert ms == {("receiving", math.inf): 8, ("worker_start", 0.0): 9, (None, 0.0): 7}


def test_what_rounding_makes_larger_than_all_takes_no_more_than_there_is() -> None:
    table = table_of(*TRAINING, steps=STEPS)
    rows = np.flatnonzero(table.ns > 0)
    split, taken = table.split(rows, 1 + 1e-9)
    assert split.ns.min() == 0
    assert split.ns[taken].sum() == table.ns.sum()


def test_forward_and_backward_of_one_function_are_one() -> None:
    """Statistics that a layer exchanges in both: who changes one changes the other."""
    reduces = (BARRIER[0], 3100, "all_reduce")
    own = (job(9, "Stats.forward", "net.py"), job(17, "Stats.backward", "net.py"))
    applies = (f"{SITE}/torch/autograd/function.py", 311, "BackwardCFunction.apply")
    parts = [
        ("forward", (SCRIPT, MAIN, MODULE, FORWARD, own[0], reduces), 3),
        ("backward", (SCRIPT, job(43, "main"), ENGINE, applies, own[1], reduces), 2),
    ]
    assert found(*parts) == {"Stats.forward:9": (5, "forward", "wait: link")}


def test_backward_of_a_trainer_is_no_part_of_its_forward() -> None:
    """LightningModule has both names; no Function of autograd's does."""
    parts = [
        ("forward", (SCRIPT, MAIN, MODULE, job(9, "Lit.forward"), DUMPS), 3, "h"),
        ("backward", (SCRIPT, job(17, "Lit.backward"), DUMPS), 2, "h"),
    ]
    assert {place: row[0] for place, row in found(*parts).items()} == {
        "Lit.forward:9": 3, "Lit.backward:17": 2,
    }  # fmt: skip
