"""Jobs of unusual shapes are silent, and what is wrong in such a shape is found all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.finding import Finding
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import START_NS, PhaseTimes, write_story
from tests.unit.diagnosis.test_code_questions import MAIN, sample, story
from tests.unit.diagnosis.test_run_rules import counters, judged, neighbours, rules, write_line
from tests.unit.diagnosis.test_setting_rules import told

SITE = "/opt/venv/lib/python3.11/site-packages"
GRAPH = ("/home/me/model.py", 9, "Graph.forward")
LOSS = ("/home/me/train.py", 24, "loss_by_token")
CROSS_ENTROPY = (f"{SITE}/torch/nn/functional.py", 3000, "cross_entropy")
ENGINE = (f"{SITE}/torch/autograd/graph.py", 800, "_engine_run_backward")
STEP = (f"{SITE}/torch/optim/optimizer.py", 500, "step")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def findings(root: Path) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(Analyzer(root)).findings}


# -- frozen parameters ----------------------------------------------------------------------------


def at_frozen(phase: str, step: int) -> Stack:
    """Operators that a model's own lines call: no frame of torch is on their stacks."""
    return (MAIN, GRAPH) if phase == "forward" else (MAIN, STEP)


@pytest.mark.parametrize(
    ("trainable", "cores", "fires"),
    [
        (20, 1.0, False),  # a frozen backbone: backward has next to nothing to do
        (1000, 1.0, True),  # all is trained, and forward takes fifty times as long
        (20, 0.3, True),  # frozen, and forward waits for something: no operator does
    ],
)
def test_forward_of_a_frozen_backbone_is_silent(
    tmp_path: Path, trainable: int, cores: float, fires: bool
) -> None:
    root = story(tmp_path, lambda *_: (0.2, 25.0, 0.5, 0.5), at_frozen, steps=200)
    told(root, model={"trainable_count": trainable})
    counters(root, lambda t: {"cpu_ns": int(cores * (t + 2) * NS_PER_S),
                              "cpu_main_ns": int(cores * (t + 2) * NS_PER_S),
                              "run_queue_wait_ns": 0})  # fmt: skip
    assert ("forward_bound" in findings(root)) is fires


# -- the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fires"), [("AdamW", True), ("LBFGS", False)])
def test_an_optimizer_that_searches_is_its_own_work(root: Path, name: str, fires: bool) -> None:
    write_story(root, lambda *_: (0.2, 5.0, 10.0, 60.0))
    told(root, optimizer={"name": name})
    assert ("optimizer_bound" in findings(root)) is fires


# -- gradients ------------------------------------------------------------------------------------


def at_loop(phase: str, step: int) -> Stack:
    """A loss between forward and backward; backward itself shows the engine alone."""
    if phase == "other":
        return (MAIN, LOSS, CROSS_ENTROPY)
    return (MAIN, ENGINE) if phase == "backward" else (MAIN, STEP)


def loss_story(tmp_path: Path, *, loss_ms: float, passes: int = 1) -> Path:
    """5 ms of forward and 60 of backward, with a loss of so many ms between them."""
    rows, now = [], START_NS
    for _ in range(150):
        each = ((schema.FORWARD, 5.0, loss_ms), (schema.BACKWARD, 60.0 / passes, 0.1))
        for kind, ms, gap_ms in [each[0], *([each[1]] * passes), (schema.OPTIMIZER, 1.0, 0.1)]:
            rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + gap_ms) * NS_PER_MS)
    root = tmp_path / "run"
    write_line(root, rows)
    write_stacks(RunPaths(root).rank(0).stacks, _with_loss(RunFrames(root), loss_ms))
    return root


def _with_loss(run: RunFrames, loss_ms: float) -> list[tuple[int, Stack]]:
    """As `sample`, with the sample after forward in the middle of the loss."""
    taken = sample(run, at_loop)
    late = int(loss_ms / 2 * NS_PER_MS)
    return sorted(
        (at + (late if stack == at_loop("other", 0) else 0), stack) for at, stack in taken
    )


def test_a_loss_in_a_loop_is_named_with_its_line(tmp_path: Path) -> None:
    finding = findings(loss_story(tmp_path, loss_ms=5.0))["backward_bound"]
    assert finding.cause == "loss"
    assert [line.function for line in finding.code_lines] == ["loss_by_token"]
    assert "in one operator" in finding.remedy
    assert finding.lost_ratio == pytest.approx((60 - 2 * 10) / 71, abs=0.03)


def test_dear_gradients_of_the_model_itself_name_no_line_of_the_loop(tmp_path: Path) -> None:
    finding = findings(loss_story(tmp_path, loss_ms=0.3))["backward_bound"]
    assert (finding.cause, finding.code_lines) == ("gradients", ())


@pytest.mark.parametrize(("loss_ms", "passes"), [(20.0, 1), (5.0, 2)])
def test_gradients_of_the_usual_length_and_of_several_passes_are_silent(
    tmp_path: Path, loss_ms: float, passes: int
) -> None:
    """A loss as long as its gradients ask for; and gradients of gradients (a penalty)."""
    root = loss_story(tmp_path, loss_ms=loss_ms, passes=passes)
    assert "backward_bound" not in findings(root)


# -- between the phases ---------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "fires"), [(1.0, False), (60.0, True)])
def test_the_loop_of_a_tiny_model_is_its_launching(root: Path, scale: float, fires: bool) -> None:
    """The same shares, of a step of 0.3 ms and of one of 17 ms: a third is in no phase."""
    times: PhaseTimes = lambda *_: (0.0, 0.06 * scale, 0.1 * scale, 0.02 * scale)  # noqa: E731
    write_story(root, times, steps=400, gap_ms=0.04 * scale)
    found = [f for f in judged(root).findings if f.severity != "info"]
    assert ("outside_the_model" in [f.rule for f in found]) is fires


# -- models without gradients ---------------------------------------------------------------------


def rollouts(
    root: Path, *, calls: Callable[[int], int], every: int = 16, call_ms: float = 0.04,
    around_ms: float = 0.03, late: Callable[[int], float] = lambda step: 0.0,
) -> dict[str, Finding]:  # fmt: skip
    """Updates of 0.5 ms, and every so many of them a rollout before it, of so many calls."""
    rows, now = [], START_NS
    for step in range(2400):
        for _ in range(0 if step % every else calls(step)):
            rows.append((schema.NOGRAD, 0, now, now + int(call_ms * NS_PER_MS)))
            now += int((call_ms + around_ms) * NS_PER_MS)
        now += int(late(step) * NS_PER_MS)
        for kind, ms in ((schema.FORWARD, 0.1), (schema.BACKWARD, 0.2), (schema.OPTIMIZER, 0.12)):
            rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.02) * NS_PER_MS)
    write_line(root, rows)
    return findings(root)


@pytest.mark.parametrize(
    ("calls", "call_ms", "around_ms"),
    [
        (lambda step: 64, 0.04, 0.02),
        (lambda step: 64, 0.02, 0.04),  # two thirds of a rollout are the environment
        (lambda step: 20 + step * 37 % 200, 0.04, 0.02),  # episodes of any length
    ],
)
def test_rollouts_between_updates_are_no_jitter(
    root: Path, calls: Callable[[int], int], call_ms: float, around_ms: float
) -> None:
    assert "jitter" not in rollouts(root, calls=calls, call_ms=call_ms, around_ms=around_ms)


def test_rollouts_that_are_late_now_and_then_are_jitter_among_rollouts(root: Path) -> None:
    found = rollouts(root, calls=lambda step: 32, late=lambda step: 12.0 * (step % 112 == 0))
    assert found["jitter"].cause == "other"
    assert found["jitter"].evidence[1].value == pytest.approx(2400 / 112, abs=1)
    assert found["jitter"].lost_ratio == pytest.approx(12 / 112 / (0.5 + 2.2 / 16 + 0.1), abs=0.03)


def test_logging_beside_one_call_without_gradients_stays_jitter(root: Path) -> None:
    found = rollouts(root, calls=lambda step: 1, call_ms=0.1, late=lambda s: 4.0 * (s % 16 == 0))
    assert found["jitter"].cause == "other"


# -- beside neighbours ----------------------------------------------------------------------------


@pytest.mark.parametrize(("first_ms", "is_theirs"), [(2000.0, True), (9000.0, False)])
def test_a_first_batch_beside_neighbours_is_as_slow_as_all_else(
    root: Path, first_ms: float, is_theirs: bool
) -> None:
    """A thread that waits for a core six tenths of the time: it would be 5 % or 16 % without."""
    times: Any = lambda _, step: (first_ms if not step else 0.2, *BALANCED_MODEL)  # noqa: E731
    verdict = neighbours(root, wait=0.6, node=2.0, shape=times)
    (finding,) = [f for f in verdict.findings if f.rule == "first_batch"]
    assert finding.explained_by == ("busy_neighbours" if is_theirs else None)


BALANCED_MODEL = (5.0, 10.0, 2.0)


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "ms", "fires"), [(30, 500.0, False), (300, 50.0, True)])
def test_memory_that_fills_in_the_first_steps_is_no_leak_yet(
    root: Path, steps: int, ms: float, fires: bool
) -> None:
    write_story(root, lambda *_: (0.2, ms / 3, ms / 2, 2.0), steps=steps)
    counters(root, lambda t: {"memory_rss_bytes": int((1 + 0.1 * (t + 2)) * (1 << 30))})
    verdict = judged(root)
    assert ("memory_creep" in rules(verdict)) is fires
    for finding in verdict.findings:
        if finding.rule == "memory_creep":
            assert "tracemalloc" in finding.missing[0]
