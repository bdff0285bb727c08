"""Random loops: the same steps as a slow reading of the rules, and nothing lost or doubled."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.run_analysis.nesting import LOADER_KINDS, MAX_DEPTH, nest
from haiprof.run_analysis.steps import EVAL_PHASE, PHASES, Segmentation, segment
from haiprof.run_format import schema
from tests.sampling import examples
from tests.unit.analysis.oracle import Loop, Step, loops, slow_steps
from tests.unit.analysis.recorded import KINDS, spans_from, spans_of

WORDS = {kind: word for word, kind in KINDS.items()}
RUNS = settings(max_examples=examples(80), deadline=None, derandomize=True)
RANDOM_LINES = st.lists(
    st.sampled_from(["D", "END", "ITER", "F0", "F1", "E0", "E1", "N", "B", "O0", "O1", "O1", "S",
                     "S(O0)", "O(F B)", "FE", "GC", "SAVE", "F(B)", "B(F)", "O(O1)"]),
    max_size=60,
)  # fmt: skip


def check_whole(found: Segmentation) -> None:
    """Steps do not overlap each other nor evaluations, and their phases add up."""
    steps = found.steps
    assert (steps.host_ns.sum(axis=0) + steps.other_ns == steps.step_ns).all()
    assert (steps.other_ns >= 0).all()
    assert (steps.start_ns[1:] >= steps.end_ns[:-1]).all()
    spent = (found.evaluation_end_ns - found.evaluation_start_ns).sum()
    inside = steps.end_ns - steps.start_ns - steps.step_ns
    assert (inside >= 0).all()
    assert inside.sum() <= spent


@RUNS
@given(RANDOM_LINES)
def test_segment_of_any_line_is_whole(words: list[str]) -> None:
    found = segment(spans_of(" ".join(words)), families={0: 0, 1: 1})
    check_whole(found)
    kind = found.nested.spans.kind
    top = found.nested.parent < 0
    closing = np.isin(kind, (schema.OPTIMIZER, schema.SCALER)) & top
    if closing.any():
        assert (found.step[closing] >= 0).all(), "an optimizer step outside all steps"
    assert (found.step[found.phase >= EVAL_PHASE] == -1).all()


@RUNS
@given(loops())
def test_segment_of_a_loop_counts_its_steps(loop: Loop) -> None:
    found = segment(spans_of(" ".join(loop.words)))
    check_whole(found)
    assert len(found.steps.start_ns) == loop.steps
    assert found.steps.micro_step_count.sum() == loop.micro_steps
    assert found.unfinished_micro_step_count == 0


@RUNS
@given(loops())
def test_segment_of_a_loop_equals_the_slow_reading(loop: Loop) -> None:
    found = segment(spans_of(" ".join(loop.words)))
    expected = slow_steps(*tokens_of(found))
    steps = found.steps
    assert steps.start_ns.tolist() == [step.start for step in expected]
    assert steps.step_ns.tolist() == [s.end - s.start - s.evaluated for s in expected]
    for place, phase in enumerate(PHASES):
        assert steps.host_ns[place].tolist() == [getattr(s, phase) for s in expected], phase


@RUNS
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 63), st.integers(0, 300),
                          st.integers(0, 300)), max_size=50))  # fmt: skip
def test_segment_of_noise_is_whole(rows: list[tuple[int, int, int, int]]) -> None:
    found = segment(spans_from([(k, t, min(a, b), max(a, b)) for k, t, a, b in rows]))
    check_whole(found)
    assert (found.nested.self_ns >= 0).all()


@RUNS
@given(RANDOM_LINES, st.randoms(use_true_random=False))
def test_nesting_does_not_depend_on_the_order_of_rows(words: list[str], random: object) -> None:
    spans = spans_of(" ".join(words))
    order = list(range(len(spans.kind)))
    random.shuffle(order)  # type: ignore[attr-defined]
    mixed = nest(spans.take(np.array(order, dtype=np.int64)))
    assert mixed.self_ns.tolist() == nest(spans).self_ns.tolist()


def test_nesting_deeper_than_any_loop_is_left_out() -> None:
    rows = [(schema.OPTIMIZER, 0, i, 1_000 - i) for i in range(MAX_DEPTH + 20)]
    found = nest(spans_from(rows))
    assert 0 < len(found.spans.kind) <= MAX_DEPTH + 1
    assert found.overlapping_count == len(rows) - len(found.spans.kind)


def tokens_of(
    found: Segmentation,
) -> tuple[list[tuple[str, int, int]], dict[int, list[tuple[str, int]]]]:
    """The outermost spans as words, evaluation in lower case, and the time inside each."""
    nested = found.nested
    rows: list[tuple[str, int, int]] = []
    inner: dict[int, list[tuple[str, int]]] = {}
    position: dict[int, int] = {}
    for row, kind in enumerate(nested.spans.kind.tolist()):
        top = int(nested.top[row])
        if top == row:
            word = WORDS[kind]
            evaluated = found.phase[row] >= EVAL_PHASE
            position[row] = len(rows)
            edges = int(nested.spans.start_ns[row]), int(nested.spans.end_ns[row])
            rows.append((word.lower() if evaluated else word, *edges))
        if found.phase[row] < len(PHASES):
            name = "dataloader" if kind in LOADER_KINDS else PHASES[found.phase[row]]
            inner.setdefault(position[top], []).append((name, int(nested.self_ns[row])))
    return rows, inner


def test_slow_reading_of_two_batches_is_two_steps() -> None:
    expected = slow_steps(*tokens_of(segment(spans_of("D F B O D F B O"))))
    assert [type(step) for step in expected] == [Step, Step]
