"""Where in its step a thread was, by the order of its spans; a table of loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.intervals import union
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.step_positions import StepPositions, step_positions
from haiprof.run_analysis.steps import segment
from tests.unit.analysis.recorded import GAP_NS, SPAN_NS, spans_of
from tests.unit.analysis.test_steps_properties import RANDOM_LINES, RUNS

BACK = "forward loss backward"
STEP = f"{BACK} gradients optimizer"


def cut(line: str, compiled: tuple[int, int] | None = None) -> StepPositions:
    spans = spans_of(line)
    times = None if compiled is None else union(*(np.array([each]) for each in compiled))
    return step_positions(segment(spans, families={0: 0, 1: 1}), spans, times)


def told(found: StepPositions) -> list[str]:
    """By step: its positions in order; `*` where collections stop the thread."""
    steps: list[list[str]] = [[] for _ in range(found.step_count)]
    for step, position, collecting in zip(
        found.period.tolist(), found.position.tolist(), found.collecting.tolist(), strict=True
    ):
        name = POSITIONS[position] + "*" * collecting
        if steps[step][-1:] != [name]:
            steps[step].append(name)
    return [" ".join(step) for step in steps]


@pytest.mark.parametrize(
    ("loop", "second"),
    [
        ("D F B O", f"input prepare {STEP} after_step"),
        ("F B O", f"prepare {STEP}"),
        ("D F B D F B O", f"input prepare {BACK} after_step input prepare {STEP} after_step"),
        ("D F B O0 F B O1", f"input prepare {STEP} prepare {STEP} after_step"),
        ("F B O0 F B O1", f"prepare {STEP} prepare {STEP}"),
        ("D F F B O", f"input prepare forward loss {STEP} after_step"),
        ("D F B B O", f"input prepare {BACK} gradients backward gradients optimizer after_step"),
        ("D F B O O", f"input prepare {STEP} gradients optimizer after_step"),
        ("D N F B O", f"input prepare {STEP} after_step"),  # a teacher, a rollout
        ("D F B(F) O", f"input prepare {STEP} after_step"),  # recomputed activations
        ("D F B S(O)", f"input prepare {STEP} after_step"),
        ("D O(F B)", f"input prepare {BACK} optimizer after_step"),  # Lightning
        ("O(D F B)", f"after_step input prepare {BACK} optimizer"),  # and its data iterator
        ("D O(F B F B)", f"input prepare {BACK} optimizer {BACK} optimizer after_step"),  # LBFGS
        ("D F(GC) B O", f"input prepare forward forward* {STEP} after_step"),
        ("D F B O GC", f"input prepare {STEP} after_step after_step* after_step"),
        ("D F B O E E", f"input prepare {STEP} after_step evaluation between_steps"),
        ("D F B SAVE O", f"input prepare {BACK} gradients checkpoint gradients optimizer "
         "after_step"),
        ("D F B O SAVE", f"input prepare {STEP} after_step checkpoint after_step"),
        ("D F B C O", f"input prepare {STEP} after_step"),
        ("ITER D F B O END", f"input after_step input prepare {STEP} after_step input after_step"),
        ("D B", "input prepare backward after_step"),  # a step compiled as a whole
        ("D E", "input prepare forward loss"),  # no training at all
        ("D M", "after_step input after_step"),  # steps that the job marks
    ],
)  # fmt: skip
def test_positions_follow_from_the_order_of_spans(loop: str, second: str) -> None:
    assert told(cut(f"{loop} " * 4))[1] == second


def test_compilation_is_no_forward() -> None:
    begin = 1_000 + SPAN_NS + GAP_NS + 20  # in the first forward
    found = told(cut("D F B O " * 2, compiled=(begin, begin + 30)))
    assert found[0] == f"input prepare forward compile {STEP} after_step"
    assert "compile" not in found[1]


def test_moments_are_placed_and_what_lies_outside_of_all_steps_is_not() -> None:
    found = cut("D F B O " * 2)
    first, last = int(found.start_ns[0]), found.end_ns
    moments = np.array([first - 1, first, first + SPAN_NS, last - 1, last])
    places = found.at(moments)
    assert places.tolist()[::4] == [-1, -1]
    assert [POSITIONS[p] for p in found.position[places[1:4]]] == ["input", "prepare", "optimizer"]


def test_a_thread_without_steps_has_no_positions() -> None:
    found = cut("D")
    assert (found.step_count, len(found.start_ns)) == (0, 0)
    assert all(part.shape == (len(POSITIONS), 0) for part in found.sums())


@RUNS
@given(RANDOM_LINES, st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 900)), max_size=6))
def test_positions_of_any_line_add_up_to_each_period(
    words: list[str], compiled: list[tuple[int, int]]
) -> None:
    spans = spans_of(" ".join(words))
    segments = segment(spans, families={0: 0, 1: 1})
    starts, lengths = np.array(compiled, dtype=np.int64).reshape(-1, 2).T
    found = step_positions(segments, spans, union(starts, starts + lengths))
    steps = segments.steps
    edges = np.append(steps.start_ns, steps.end_ns[-1:])
    assert np.add(*found.sums()).sum(axis=0).tolist() == np.diff(edges).tolist()
    assert (np.diff(np.append(found.start_ns, found.end_ns)) > 0).all() or not len(edges)
    places = found.at(np.arange(int(edges[0]), int(edges[-1]), 7) if len(edges) else edges)
    assert (places >= 0).all()
