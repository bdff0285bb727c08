"""What of a phase is the job's own Python, from sampled stacks."""

from __future__ import annotations

import numpy as np
import pytest

from haiprof.diagnosis.python_time import LATE_NS, MIN_COUNT, python_time
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples, CodeTree
from haiprof.run_analysis.stack_files import Frame

OWN, TORCH = 1, 2


def samples(stacks: list[int], late: list[bool]) -> CodeSamples:
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
        late_ns=np.where(late, 2 * LATE_NS, 0), lock_wait=same - 1,
        slow=np.zeros(count, dtype=np.bool_),
        phase=same + CODE_PHASES.index("forward"), stack=np.array(stacks),
        weight_ns=np.ones(count),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stacks", "late", "own", "held"),
    [
        ([TORCH] * 40, [False] * 40, 0.0, 0.0),  # the model's own operators
        ([OWN] * 20 + [TORCH] * 20, [False] * 40, 0.5, 0.0),  # operators that the job calls itself
        ([OWN] * 20 + [TORCH] * 20, [True] * 20 + [False] * 20, 0.5, 0.5),  # loops in Python
        ([OWN] * 20 + [TORCH] * 20, [True] * 40, 0.5, 0.0),  # the sampler itself got no core
    ],
)
def test_python_is_told_from_operators(
    stacks: list[int], late: list[bool], own: float, held: float
) -> None:
    found = python_time(samples(stacks, late), "forward")
    assert found is not None
    assert (found.own_ratio, found.held_ratio) == pytest.approx((own, held))


def test_few_samples_tell_nothing() -> None:
    few = MIN_COUNT - 1
    assert python_time(samples([OWN] * few, [True] * few), "forward") is None
    assert python_time(samples([OWN] * 40, [True] * 40), "backward") is None


@pytest.mark.parametrize(
    ("late", "wait", "held"),
    [
        (24, 0.6, 0.0),  # six of ten are late by the wait alone, however few of torch there are
        (37, 0.4, 0.875),  # the interpreter is held in 0.875, and the rest late in four of ten
        (40, 0.98, 0.04),  # next to all are late anyway: nothing is made of the last two
    ],
)
def test_samples_are_late_as_often_as_the_thread_waits_for_a_core(
    late: int, wait: float, held: float
) -> None:
    found = python_time(
        samples([OWN] * 40, [True] * late + [False] * (40 - late)), "forward", core_wait=wait
    )
    assert found is not None
    assert found.held_ratio == pytest.approx(held)
