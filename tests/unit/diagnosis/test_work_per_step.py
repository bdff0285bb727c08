"""Steps that have more to do are no drift; steps that take longer for the same work are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_format import schema
from tests.unit.diagnosis.stories import START_NS, PhaseTimes, write_story
from tests.unit.diagnosis.test_run_rules import (
    BALANCED,
    judged,
    neighbours,
    rules,
    write_line,
)
from tests.unit.diagnosis.test_setting_rules import note

RULE = "step_time_drift"
STEPS, STAGE = 120, 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def stages(*, grow: float, optimizer: float = 1.0) -> PhaseTimes:
    """Forward and backward of the last stage take so many times what they do in the first."""

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        part = min(step // STAGE, 2) / 2
        model = 1 + (grow - 1) * part
        return (0.2, 5.0 * model, 10.0 * model, 2.0 * (1 + (optimizer - 1) * part))

    return times


def drift(root: Path, times: PhaseTimes, sizes: Callable[[int], int | None]) -> Verdict:
    """A run whose inputs are looked at once in ten steps: so many numbers, by step."""
    write_story(root, times, steps=STEPS)
    now = START_NS
    for step in range(STEPS):
        size = sizes(step)
        if step % 10 == 0 and size is not None:
            line = {"type": "input_size", "time_ns": int(now), "step": step}
            note(root, 0, {**line, "root": 1, "number_count": size})
        now += int((sum(times(0, step)) + 0.8) * NS_PER_MS)
    return judged(root)


@pytest.mark.parametrize("grow", [2.0, 3.0, 7.0])
def test_a_curriculum_is_no_drift(root: Path, grow: float) -> None:
    """Inputs three times as long: time may grow by less, as much, or up to the square of that."""
    verdict = drift(root, stages(grow=grow), lambda step: 1000 * (1 + step // STAGE))
    assert RULE not in rules(verdict)
    assert "inputs grew to 3 times" in dict(verdict.abstained)[RULE]


@pytest.mark.parametrize(
    ("times", "phase"),
    [
        (stages(grow=2.0), "several phases"),
        (lambda _, s: (0.2, 5.0 + 0.1 * s, 10.0, 2.0), "forward"),  # a list that grows
        (lambda _, s: (0.2 + 10.0 * (s > STAGE), 5.0, 10.0, 2.0), "dataloader"),  # slower storage
    ],
)
def test_inputs_of_one_size_make_any_slowdown_a_drift(
    root: Path, times: PhaseTimes, phase: str
) -> None:
    verdict = drift(root, times, lambda step: 1000 if not step else None)
    (finding,) = [f for f in verdict.findings if f.rule == RULE]
    assert phase in finding.title
    assert not any("sequence length" in lack for lack in finding.missing)


def test_what_is_beyond_the_growth_of_the_inputs_is_a_drift(root: Path) -> None:
    """Inputs grow by a fifth, which explains 1.44 times; steps take five times as long."""
    verdict = drift(root, stages(grow=5.0), lambda step: 1000 + 100 * (step // STAGE))
    (finding,) = [f for f in verdict.findings if f.rule == RULE]
    whole = drift(root.with_name("same"), stages(grow=5.0), lambda step: 1000)
    (other,) = [f for f in whole.findings if f.rule == RULE]
    assert finding.lost_ratio is not None
    assert other.lost_ratio is not None
    assert 0 < finding.lost_ratio < other.lost_ratio


def test_lengths_that_differ_by_chance_hide_no_drift(root: Path) -> None:
    verdict = drift(root, stages(grow=3.0), lambda step: 1000 + 37 * step % 500)
    assert RULE in rules(verdict)


@pytest.mark.parametrize(
    ("optimizer", "is_drift"), [(1.0, False), (2.0, True)], ids=["more work", "slower machine"]
)
def test_sizes_that_are_not_known_are_judged_by_the_phases(
    root: Path, optimizer: float, is_drift: bool
) -> None:
    verdict = drift(root, stages(grow=2.0, optimizer=optimizer), lambda _: None)
    assert (RULE in rules(verdict)) is is_drift


def test_more_passes_in_a_step_are_more_work(root: Path) -> None:
    """A batch that grows by accumulation: two passes, then four."""
    rows, now = [], START_NS
    kinds = (schema.DATA, schema.FORWARD, schema.BACKWARD)
    for step in range(STEPS):
        passes = 2 if step < STEPS // 2 else 4
        for kind, ms in [*zip(kinds, BALANCED[:3], strict=True)] * passes + [
            (schema.OPTIMIZER, 2.0)
        ]:
            rows.append((kind, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.1) * NS_PER_MS)
    size = {"type": "input_size", "time_ns": START_NS, "root": 1, "number_count": 1000}
    write_line(root, rows, [size])
    verdict = judged(root)
    assert "inputs grew to 2 times" in dict(verdict.abstained)[RULE]


@pytest.mark.parametrize(
    ("node", "slower", "severity"),
    [
        (2.0, 1.3, "info"),  # a core and a half of others: the other half of a physical core
        (0.6, 1.3, "info"),  # nobody else is there: machines drift by themselves
        (0.6, 1.5, "warning"),  # the clock, heat
        (2.0, 2.5, "warning"),  # no sharing makes work that much longer
    ],
)
def test_phases_that_grow_alike_beside_neighbours_are_a_note(
    root: Path, node: float, slower: float, severity: str
) -> None:
    """The thread hardly waits for a core: it shares one's caches and its other half."""

    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        return tuple(ms * (slower if step > 400 else 1) for ms in BALANCED)  # type: ignore[return-value]

    verdict = neighbours(root, wait=0.02, node=node, shape=times)
    (finding,) = [f for f in verdict.findings if f.rule == RULE]
    assert finding.severity == severity
    assert finding.cause == "sudden_all_phases"


def test_sizes_and_times_that_cannot_be_are_left_out(root: Path) -> None:
    write_story(root, stages(grow=3.0), steps=STEPS)
    line = {"type": "input_size", "time_ns": START_NS, "root": 1, "number_count": 1000}
    beyond = (1 << 63) - 1
    for wrong in ({"time_ns": beyond}, {"number_count": -5}, {"root": "x"}, {"number_count": None}):
        note(root, 0, {**line, **wrong})
    note(root, 0, {"type": "compile", "time_ns": beyond, "count": 1, "spent_ns": 1})
    note(root, 0, {**line, "number_count": beyond})
    assert "step_time_drift" in rules(judged(root))
