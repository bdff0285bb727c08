"""Every shape of training loop gives the steps that its author would count; random loops too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.base.intervals import union
from haiprof.base.ledger import POSITIONS
from haiprof.run_analysis.nesting import MAX_DEPTH, nest
from haiprof.run_analysis.step_positions import StepPositions, step_positions
from haiprof.run_analysis.steps import EVAL_PHASE, PHASES, Segmentation, segment
from haiprof.run_format import schema
from tests.sampling import examples
from tests.unit.analysis.recorded import GAP_NS, SPAN_NS, spans_from, spans_of
from tests.unit.analysis.training_loops import Loop, loops

EPOCH = "ITER D F B O D F B O D F B O END"


def cut(line: str, **families: int) -> Segmentation:
    return segment(spans_of(line), families={int(k[1:]): v for k, v in families.items()})


def held(found: Segmentation, line: str) -> list[str]:
    """The outermost tokens of each step, as words."""
    words = [w for w in line.split() if not w.startswith(("GC", "SAVE"))]
    top = found.nested.parent < 0
    steps = found.step[top].tolist()
    assert len(words) == len(steps), "use held() on flat lines"
    count = len(found.steps.start_ns)
    return [" ".join(w for w, s in zip(words, steps, strict=True) if s == k) for k in range(count)]


@pytest.mark.parametrize(("line", "steps"), [
    pytest.param("D F B O D F B O", ["D F B O"] * 2, id="plain"),
    pytest.param("D F B D F B O " * 2, ["D F B D F B O"] * 2, id="accumulation"),
    pytest.param("D F B O0 F B O1 " * 3, ["D F B O0 F B O1"] * 3, id="gan"),
    pytest.param("F F B O0 F B O1 " * 3, ["F F B O0 F B O1"] * 3, id="gan-no-loader"),
    pytest.param("D F B O0 O0 O0 " * 2, ["D F B O0 O0 O0"] * 2, id="parameter-groups"),
    pytest.param("F B O0 O0 O0 " * 2, ["F B O0 O0 O0"] * 2, id="parameter-groups-no-loader"),
    pytest.param("F B O F B O F B O", ["F B O"] * 3, id="no-loader"),
    pytest.param(
        "ITER D D D F B F B O D D F B F B O D END F B F B O END",
        ["ITER D D D F B F B O", "D D F B F B O", "D END F B F B O END"],
        id="transformers-trainer",
    ),
    pytest.param("D F B S D F B S", ["D F B S"] * 2, id="scaler-skips"),
    pytest.param("F B S F B S", ["F B S"] * 2, id="scaler-skips-no-loader"),
    pytest.param("D D O D O D O END O", ["D D O", "D O", "D O", "END O"], id="lightning"),
    pytest.param("D F B O F B O F B O", ["D F B O", "F B O", "F B O"], id="one-batch-for-all"),
    pytest.param("D F B O F B O F B O " * 4, ["D F B O F B O F B O"] * 4, id="inner-loop"),
    pytest.param("F B F B", ["F B"] * 2, id="compiled-optimizer"),
    pytest.param("D B D B", ["D B"] * 2, id="compiled-whole-step"),
    pytest.param("B B B", ["B"] * 3, id="compiled-whole-step-no-loader"),
    pytest.param("D O D O", ["D O"] * 2, id="optimizer-only"),
    pytest.param("O O O", ["O"] * 3, id="optimizer-only-no-loader"),
])  # fmt: skip
def test_steps_of_a_loop_are_its_iterations(line: str, steps: list[str]) -> None:
    spread = [step.split() for step in steps]
    if "END" in line.split()[-1] and "END" in steps[-1].split()[-1]:
        spread[-1].pop()  # the end of the last epoch is after the last step
    found = cut(line)
    assert [s.split() for s in held(found, line)] == spread


def test_steps_of_epochs_with_evaluation_are_the_batches() -> None:
    evaluation = "ITER D E D E END"
    line = " ".join([EPOCH, evaluation] * 2)
    found = cut(line)
    assert len(found.steps.start_ns) == 6
    assert len(found.evaluations.starts) == 2
    assert held(found, line)[2] == "D F B O END"
    assert (found.phase == EVAL_PHASE).sum() == 4


@pytest.mark.parametrize("evaluation", ["E", "D E D E", "ITER D D E D E END E", "D E END D E END",
                                        "ITER D E D E END", "D END E"])  # fmt: skip
@pytest.mark.parametrize("train", ["D F B O", "F B O", "D F B D F B O"])
def test_evaluation_is_in_no_step(train: str, evaluation: str) -> None:
    found = cut(f"{train} {train} {evaluation} {train} {train} {evaluation} {train}")
    steps = found.steps
    assert len(steps.start_ns) == 5
    assert len(found.evaluations.starts) == 2
    words = len(train.split())
    assert (steps.step_ns <= words * SPAN_NS + (words + 1) * GAP_NS).all()
    for begin, end in zip(found.evaluations.starts, found.evaluations.ends, strict=True):
        assert ((steps.end_ns <= begin) | (steps.start_ns >= end)).all()


@pytest.mark.parametrize(
    ("train", "passes", "is_evaluation"),
    [("F B O", "F F F F F", True), ("D F B O", "D F D F D F D F D F", True),
     ("F B O", "FE FE FE FE FE", True), ("F F B O", "F", False), ("F B O", "F F", False),
     ("F B O", "F F F F F F B(GC GC) O", False)],
)  # fmt: skip
def test_forward_passes_that_no_backward_uses_are_an_evaluation(
    train: str, passes: str, is_evaluation: bool
) -> None:
    """Without no_grad, in training mode or (FE) not.

    A penalty that is seldom added is none, nor are passes for which a backward is longer.
    """
    line = f"{train} {train} {train} {train} {passes} {train} {train} {train} {passes} {train}"
    found = cut(line)
    assert len(found.evaluations.starts) == (2 if is_evaluation else 0)
    assert len(found.steps.start_ns) == 8 + 2 * passes.count("O")


def test_evaluation_between_micro_steps_is_taken_out_of_the_step() -> None:
    found = cut("D F B E E D F B O D F B D F B O")
    assert found.steps.step_ns[0] == found.steps.end_ns[0] - found.steps.start_ns[0] - 207
    assert found.steps.micro_step_count.tolist() == [2, 2]


def test_teacher_pass_is_other_time_of_its_step() -> None:
    line = "D E1 F0 B O " * 3
    found = cut(line, t0=0, t1=1)
    assert held(found, line)[1] == "D E1 F0 B O"
    assert found.steps.other_ns[1] == SPAN_NS + 5 * GAP_NS
    assert not len(found.evaluations.starts)


@pytest.mark.parametrize(("line", "families", "steps", "evaluations"), [
    pytest.param("ITER D D F B O ITER D D E END E D F B O D F B O ITER D D E END E END F B O",
                 (0, 0), ["ITER D D F B O", "D F B O", "D F B O", "END F B O"], 2,
                 id="prefetching-loader-with-evaluation-in-the-epoch"),
    pytest.param("D F0 B O D F0 B O D E1 D E1 END D F0 B O", (0, 1), ["D F0 B O"] * 3, 1,
                 id="averaged-copy-over-a-loader"),
    pytest.param("D E F B O " * 4, (0, 0), ["D E F B O"] * 4, 0, id="pseudo-labels"),
    pytest.param("D F0 B O E1 D F0 B O", (5, 5), ["D F0 B O"] * 2, 1, id="wrapped-module"),
    pytest.param("D FE B O D FE B O D FE D FE END", (0, 0), ["D FE B O"] * 2, 1,
                 id="forward-in-eval-mode"),
    pytest.param("D E D E D N END", (0, 0), ["D E", "D E", "D N"], 0, id="evaluation-alone"),
])  # fmt: skip
def test_evaluation_is_told_from_the_passes_of_a_step(
    line: str, families: tuple[int, int], steps: list[str], evaluations: int
) -> None:
    found = cut(line, t0=families[0], t1=families[1])
    assert held(found, line) == steps
    assert len(found.evaluations.starts) == evaluations
    assert (found.steps.host_ns[1][found.steps.micro_step_count > 0] > 0).all()


def test_closure_counts_forward_and_backward_apart_from_the_optimizer() -> None:
    found = cut("D D O(F B) D O(F B) END O(F B)")
    assert len(found.steps.start_ns) == 3
    forward, backward, optimizer = found.steps.host_ns[1:]
    assert forward.tolist() == backward.tolist() == [SPAN_NS] * 3
    assert optimizer.tolist() == [3 * GAP_NS] * 3


def test_scaler_adds_up_to_its_whole_and_says_when_it_skipped() -> None:
    found = cut("D F B S(O) D F B S D F B S(O)")
    assert found.steps.skipped.tolist() == [False, True, False]
    assert found.steps.optimizer_step_count.tolist() == [1, 0, 1]
    assert found.steps.host_ns[3].tolist() == [SPAN_NS + 2 * GAP_NS, SPAN_NS, SPAN_NS + 2 * GAP_NS]
    whole, skips = "F B S(O0) F B S(O1)", "F B S(O0) F B S"
    found = cut(" ".join([whole, whole, skips, whole]))
    assert found.steps.optimizer_step_count.tolist() == [2, 2, 1, 2]
    assert not found.steps.skipped.any()


@pytest.mark.parametrize("line", ["D F(B) B O", "D F B(F) O", "D F B(B F) O", "D(N) F B O"])
def test_span_inside_a_foreign_one_belongs_to_it(line: str) -> None:
    found = cut(line)
    assert len(found.nested.spans.kind) == 4
    assert found.steps.micro_step_count.tolist() == [1]


def test_collector_and_saves_do_not_take_part() -> None:
    plain, with_events = cut("D F B O D F B O"), cut("D F(GC) B O SAVE D F B O")
    assert len(plain.steps.start_ns) == len(with_events.steps.start_ns) == 2
    assert with_events.steps.host_ns[1].tolist() == [SPAN_NS + 2 * GAP_NS, SPAN_NS]


def test_recording_that_ends_in_the_middle_leaves_micro_steps_unfinished() -> None:
    found = cut("D F B D F B O D F B")
    assert len(found.steps.start_ns) == 1
    assert found.unfinished_micro_step_count == 1
    assert found.steps.end_ns[0] == found.nested.spans.start_ns[7]


def test_confidence_falls_with_what_is_seen() -> None:
    loader, optimizer = cut("D F B O " * 4), cut("F B O " * 4)
    split, backward = cut("D F B O F B O D F B O"), cut("F B " * 4)
    best = [found.steps.confidence.max() for found in (loader, optimizer, split, backward)]
    assert best == [0.95, 0.8, 0.95, 0.4]
    assert split.steps.confidence.tolist() == [0.5, 0.5, 0.95]


def test_segment_of_nothing_is_no_steps() -> None:
    for line in ("", "GC SAVE", "D", "F", "E", "END"):
        found = cut(line)
        assert not len(found.steps.start_ns)
        assert found.steps.host_ns.shape == (len(PHASES), 0)
    assert len(cut("END ITER D F B O D F B O").steps.start_ns) == 2
    assert len(cut("F B O D F B O").steps.start_ns) == 2
    found = cut("D F B D F B(O0 O1) D F B D F B(O0 O1)")
    assert found.steps.micro_step_count.tolist() == [2, 2]


@pytest.mark.parametrize("line", ["D F(B O) " * 3, "D F(B S(O)) " * 3, "F(B O) " * 3])
def test_module_that_is_a_whole_train_step_gives_all_its_phases(line: str) -> None:
    found = cut(line)
    assert found.steps.optimizer_step_count.tolist() == [1, 1, 1]
    by_phase = dict(zip(PHASES, found.steps.host_ns.tolist(), strict=True))
    assert by_phase["forward"] == [GAP_NS] * 3
    assert by_phase["backward"] == [SPAN_NS] * 3
    assert min(by_phase["optimizer"]) >= SPAN_NS


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
    spent = (found.evaluations.ends - found.evaluations.starts).sum()
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


BACK = "forward loss backward"
STEP = f"{BACK} gradients optimizer"


def cut_positions(line: str, compiled: tuple[int, int] | None = None) -> StepPositions:
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


@pytest.mark.parametrize(("loop", "second"), [
    ("D F B O", f"input prepare {STEP} after_step"),
    ("F B O", f"between_steps {STEP}"),
    ("D F B D F B O", f"input prepare {BACK} gradients input prepare {STEP} after_step"),
    ("D F B O0 F B O1", f"input prepare {STEP} prepare {STEP} after_step"),
    ("F B O0 F B O1", f"between_steps {STEP} prepare {STEP}"),
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
])  # fmt: skip
def test_positions_follow_from_the_order_of_spans(loop: str, second: str) -> None:
    assert told(cut_positions(f"{loop} " * 4))[1] == second


def test_compilation_is_no_forward() -> None:
    begin = 1_000 + SPAN_NS + GAP_NS + 20  # in the first forward
    found = told(cut_positions("D F B O " * 2, compiled=(begin, begin + 30)))
    assert found[0] == f"input prepare forward compile {STEP} after_step"
    assert "compile" not in found[1]
    nothing = cut_positions("D")
    assert (nothing.step_count, len(nothing.start_ns)) == (0, 0)
    assert all(part.shape == (len(POSITIONS), 0) for part in nothing.sums())


def test_moments_are_placed_and_what_lies_outside_of_all_steps_is_not() -> None:
    found = cut_positions("D F B O " * 2)
    first, last = int(found.start_ns[0]), found.end_ns
    moments = np.array([first - 1, first, first + SPAN_NS, last - 1, last])
    places = found.at(moments)
    assert places.tolist()[::4] == [-1, -1]
    assert [POSITIONS[p] for p in found.position[places[1:4]]] == ["input", "prepare", "optimizer"]


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
