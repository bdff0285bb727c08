"""A process that never trains has steps: what repeats in it, or what its own code marks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.in_job.repeats import Repeats
from haiprof.run_analysis.steps import BOUNDARIES, EVAL_PHASE, Segmentation, segment
from haiprof.run_format import schema
from tests.sampling import examples
from tests.unit.analysis.recorded import GAP_NS, SPAN_NS, spans_of


def cut(line: str) -> Segmentation:
    return segment(spans_of(line))


def kinds(found: Segmentation) -> set[str]:
    return {BOUNDARIES[code] for code in found.steps.boundary}


@pytest.mark.parametrize(("line", "count", "kind"), [
    pytest.param("ITER D E D E D E END", 3, "fetch", id="evaluation-only"),
    pytest.param("ITER D E D E END ITER D E D E END", 4, "fetch", id="two-epochs"),
    pytest.param("D D E D E D E END E", 4, "fetch", id="one-batch-fetched-ahead"),
    pytest.param("D E E E D E D E E E E D E END", 4, "fetch", id="generation-by-batches"),
    pytest.param("D E E E D E E E E", 7, "module", id="two-batches-are-no-loop-yet"),
    pytest.param("ITER D D D END", 3, "fetch", id="nothing-but-a-loader"),
    pytest.param("D D D", 2, "fetch", id="a-loader-left-early"),
    pytest.param("E E E", 3, "module", id="inference"),
    pytest.param("FE FE FE", 3, "module", id="inference-with-gradients"),
    pytest.param("D E E E E", 4, "module", id="one-batch-for-all"),
    pytest.param("ITER D D D END E E E E E", 5, "module", id="a-loader-read-before"),
    pytest.param("N1 N2 " * 4, 4, "module", id="actor-and-critic"),
    pytest.param("N3 " + "N1 N2 " * 4, 4, "module", id="set-up-by-another-module"),
    pytest.param("C1 C1 C1", 3, "collective", id="barrier"),
    pytest.param("C1 C2 " * 3, 3, "collective", id="all-reduce-and-barrier"),
    pytest.param("E C1 E C1 E C1", 3, "module", id="collectives-beside-modules"),
    pytest.param("M M M", 3, "mark", id="marks-alone"),
    pytest.param("E E M E E M", 2, "mark", id="marks-over-modules"),
    pytest.param("D F B O D F B O M D F B O D F B O M", 2, "mark", id="marks-over-optimizer"),
])  # fmt: skip
def test_what_repeats_is_a_step(line: str, count: int, kind: str) -> None:
    found = cut(line)
    assert (len(found.steps.start_ns), kinds(found)) == (count, {kind})
    assert (found.steps.step_ns > 0).all()
    assert (found.steps.other_ns >= 0).all()
    assert not len(found.evaluations.starts)


@pytest.mark.parametrize("line", ["D E END", "E", "C1", "D END", "F", ""])
def test_what_comes_once_is_no_step(line: str) -> None:
    assert not len(cut(line).steps.start_ns)


@pytest.mark.parametrize(
    "line",
    ["E E E E D F B O D F B O", "ITER D E D E D E END D F B O D F B O", "C1 C1 C1 F B O F B O"],
)
def test_process_that_trains_has_the_steps_of_its_training(line: str) -> None:
    found = cut(line)
    assert len(found.steps.start_ns) == 2
    assert kinds(found) <= {"dataloader", "optimizer"}
    assert bool(len(found.evaluations.starts)) == ("E" in line)


def test_step_by_fetch_is_from_batch_to_batch() -> None:
    steps = cut("D E D E D E END").steps
    assert steps.step_ns.tolist() == [2 * (SPAN_NS + GAP_NS)] * 3
    assert steps.host_ns[:2].tolist() == [[SPAN_NS] * 3, [SPAN_NS] * 3]  # dataloader, forward
    assert steps.micro_step_count.tolist() == [1] * 3


def test_evaluation_between_marked_steps_is_in_none() -> None:
    found = cut("D F B O M D F B O M D E D E END D F B O M")
    assert (found.phase == EVAL_PHASE).sum() == 2
    assert len(set(found.steps.step_ns[1:].tolist())) == 1


def test_mark_inside_a_call_ends_the_step_with_the_call() -> None:
    found = cut("F(M) F(M) F(M)")
    forward = found.nested.spans.kind == schema.FORWARD
    assert found.steps.end_ns.tolist() == found.nested.spans.end_ns[forward].tolist()


def count_in_job(line: str) -> int:
    """What the job's own counter says after these calls, none of them inside another."""
    repeats = Repeats()
    for word in line.split():
        name = word.rstrip("0123456789")
        tag = int(word[len(name) :] or 0)
        if name in ("D", "ITER", "END"):
            repeats.fetch()
        if name == "D":
            repeats.batch()
        elif name == "E":
            repeats.call(tag)
        elif name == "C":
            repeats.collective(tag)
        elif name == "M":
            repeats.mark()
    return repeats.count


@settings(max_examples=examples(300), deadline=None)
@given(st.randoms(use_true_random=False))
def test_job_counts_as_the_analysis_does(draw: random.Random) -> None:
    body = draw.choice([
        "E1", "E1 E2", "D E1", "D E1 E1", "D E1 E2 M", "C1", "C1 C2", "E1 C1", "D D E1", "M",
        "D E1 C1",
    ])  # fmt: skip
    line = " ".join([body] * draw.randint(2, 12))
    if draw.random() < 0.5 and "D" in body:
        line = f"ITER {line} END " * draw.randint(1, 3)
    elif draw.random() < 0.3:
        line = f"E3 {line}"
    assert count_in_job(line) == len(cut(line).steps.start_ns), line


def test_windows_hear_of_the_steps_that_begin() -> None:
    told: list[int] = []
    repeats = Repeats()
    repeats.listener = told.append
    for _ in range(5):
        repeats.fetch()
        repeats.batch()
        repeats.call(1)
    assert repeats.settled
    assert told[-1] == 4  # the fifth, counted from 0, has begun with its batch
    repeats.trained = True
    repeats.fetch()
    assert told[-1] == 4
    assert repeats.count == 0
