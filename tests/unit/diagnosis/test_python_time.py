"""What of a phase is the job's own Python, from sampled stacks."""

from __future__ import annotations

import numpy as np
import pytest
from haiprof.diagnosis.python_time import DISPATCH_RATIO, MIN_COUNT, python_time

from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples, CodeTree
from haiprof.run_analysis.stack_files import Frame
from haiprof.run_format.stack_lines import LOCK_ELSEWHERE, LOCK_HELD, LOCK_UNKNOWN

OWN, TORCH = 1, 2


def samples(stacks: list[int], held: list[bool]) -> CodeSamples:
    """Samples in forward that end in the job's own code or in torch's."""
    count = len(stacks)
    tree = CodeTree(
        frames=(
            Frame(file="train.py", line=3, function="forward"),
            Frame(file="/x/site-packages/torch/nn/modules/linear.py", line=9, function="forward"),
        ),
        library=np.array([False, True]),
        parent=np.array([0, 0, 1]),
        place=np.array([-1, 0, 1]),
    )
    same = np.zeros(count, dtype=np.int64)
    return CodeSamples(
        tree=tree, rank=same, worker=same - 1, time_ns=same, step=same, notes=(),
        late_ns=same, cpu_ns=same - 1, queue_ns=same - 1, wait=same - 1,
        lock_wait=np.where(held, LOCK_HELD, LOCK_ELSEWHERE),
        slow=np.zeros(count, dtype=np.bool_),
        phase=same + CODE_PHASES.index("forward"), stack=np.array(stacks),
        weight_ns=np.ones(count),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stacks", "holds", "own", "held"),
    [
        ([TORCH] * 40, [False] * 40, 0.0, 0.0),  # the model's own operators
        ([OWN] * 20 + [TORCH] * 20, [False] * 40, 0.5, 0.0),  # operators that the job calls itself
        ([OWN] * 20 + [TORCH] * 20, [True] * 20 + [False] * 20, 0.5, 0.5),  # loops in Python
        ([OWN] * 20 + [TORCH] * 20, [True] * 40, 0.5, 0.0),  # operators so small that calls count
    ],
)
def test_python_is_told_from_operators(
    stacks: list[int], holds: list[bool], own: float, held: float
) -> None:
    found = python_time(samples(stacks, holds), "forward")
    assert found is not None
    assert (found.own_ratio, found.held_ratio) == pytest.approx((own, held))


def test_few_samples_tell_nothing() -> None:
    few = MIN_COUNT - 1
    assert python_time(samples([OWN] * few, [True] * few), "forward") is None
    assert python_time(samples([OWN] * 40, [True] * 40), "backward") is None


@pytest.mark.parametrize(
    ("count", "held"),
    [
        (10, 0.0),  # calls of small operators hold the lock as often
        (20, (0.5 - DISPATCH_RATIO) / (1 - DISPATCH_RATIO)),
        (40, 1.0),
    ],
)
def test_calls_of_operators_are_no_python_of_the_job(count: int, held: float) -> None:
    found = python_time(samples([OWN] * 40, [True] * count + [False] * (40 - count)), "forward")
    assert found is not None
    assert found.held_ratio == pytest.approx(held)


def test_without_a_look_at_the_lock_nothing_is_said_of_it() -> None:
    unknown = samples([OWN] * 40, [True] * 40)
    unknown.lock_wait[:] = LOCK_UNKNOWN
    found = python_time(unknown, "forward")
    assert found is not None
    assert (found.own_ratio, found.held_ratio) == (1.0, 0.0)
