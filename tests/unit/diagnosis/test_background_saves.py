"""Saves that are written beside the training: what they cost steps, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from haiprof.base.statistics import excess
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.background_saves import BackgroundSave, steps_beside
from haiprof.diagnosis.job_time import BESIDE, FREE, NEITHER
from haiprof.diagnosis.verdict import Finding, as_document
from haiprof.run_analysis.run_frames import RunFrames
from tests.unit.analysis.recorded import WALL_OFFSET_NS
from tests.unit.diagnosis.stories import (
    BALANCED,
    PhaseTimes,
    judged,
    ledger_of,
    note,
    saved_ns,
    write_story,
)

STEPS = 400
LINE = {"begun_file": "/home/me/train.py", "begun_line": 88, "begun_function": "save"}


def beside(step: int) -> bool:
    """Every 50 steps a save begins late in a step, and is written during the next 20."""
    return 10 <= step % 50 < 30


def write_saving(
    root: Path, times: PhaseTimes, *, ranks: int = 1, of: int = 0, line: object = LINE
) -> None:
    """Such a run; the saves are those of one rank."""
    write_story(root, times, steps=STEPS, ranks=ranks)
    steps = RunFrames(root).steps()
    begins = steps.filter(steps["rank"] == of)["start_ns"].to_numpy() - WALL_OFFSET_NS
    for step in range(9, STEPS - 30, 50):
        start, end = int(begins[step + 1]) - 10_000, int(begins[step + 21]) - 10_000
        note(root, of, type="checkpoint", action="save", start_ns=start, beside_ns=start,
             end_ns=end, file="/data/last.pt", written_ns=None,
             **(line if isinstance(line, dict) else {}))  # fmt: skip


def slower(ms: float) -> PhaseTimes:
    """Forward takes so many ms longer while a save is written."""
    return lambda _, step: (0.2, 5.0 + ms * beside(step), 10.0, 2.0)


def said(root: Path) -> Finding | None:
    return next((f for f in judged(root).findings if f.rule == "background_save"), None)


def test_steps_beside_a_save_are_an_account_with_its_line(tmp_path: Path) -> None:
    write_saving(tmp_path / "run", slower(5.0))
    verdict = judged(tmp_path / "run")
    first = verdict.findings[0]
    assert first.rule == "background_save"
    assert first.severity == "warning"
    assert first.title.startswith("steps are 5.0")
    assert "save (train.py:88)" in first.title
    assert "2.0" in first.title.rpartition(": ")[2]  # two in five steps
    assert [line.location for line in first.code_lines] == ["train.py:88 save"]
    assert first.gain is not None
    assert saved_ns(first) / NS_PER_MS == pytest.approx(2.0, abs=0.15)
    assert first.gain.low_ns < first.gain.left_ns < first.gain.high_ns
    ledger = ledger_of(verdict)
    assert abs(ledger.sum_error_ns) < 1
    (account,) = (a for a in ledger.accounts if a.explanation == "background_save")
    assert account.when == "in 160 of 382 steps, 5.00 ms" or account.when.startswith("in 1")
    assert as_document(verdict)["findings"][0]["cause"] == account.activity


@pytest.mark.parametrize(
    "times",
    [
        lambda *_: BALANCED,
        lambda _, step: (0.2, 5.0 + 5.0 * (step >= 200), 10.0, 2.0),  # all from a step on
        lambda _, step: (0.2, 5.0 + step / 50, 10.0, 2.0),
        lambda _, step: (0.2, 5.0 + 40.0 * (step % 97 == 11), 10.0, 2.0),
        lambda _, step: (0.2, 5.0 - 2.0 * beside(step), 10.0, 2.0),
    ],
    ids=["alike", "later steps", "growing", "a few long ones", "faster"],
)
def test_nothing_is_said_of_saves_that_chance_may_have_put_there(
    tmp_path: Path, times: PhaseTimes
) -> None:
    write_saving(tmp_path / "run", times)
    assert said(tmp_path / "run") is None


def test_of_two_ranks_the_one_that_saves_holds_both_up(tmp_path: Path) -> None:
    def times(rank: int, step: int) -> tuple[float, float, float, float]:
        late = 5.0 * beside(step)  # rank 1 waits for it in backward
        return (0.2, 5.0 + late * (rank == 0), 10.0 + late * (rank == 1), 2.0)

    write_saving(tmp_path / "run", times, ranks=2)
    found = said(tmp_path / "run")
    assert found is not None
    assert found.rank == 0
    assert found.title.startswith("rank 0 alone: steps are ")


def test_a_save_whose_line_was_not_seen_says_so(tmp_path: Path) -> None:
    write_saving(tmp_path / "run", slower(5.0), line=None)
    found = said(tmp_path / "run")
    assert found is not None
    assert found.code_lines == ()
    assert found.missing == ("which line begins the saves",)


def test_a_step_is_beside_a_save_that_was_written_when_it_began() -> None:
    begins = np.arange(0, 100, 10)
    saves = [
        BackgroundSave(start_ns=start, end_ns=end, begun_at=None)
        for start, end in ((12, 35), (33, 41), (60, 61), (95, 200))
    ]
    expected = [FREE, NEITHER, BESIDE, BESIDE, BESIDE, FREE, BESIDE, FREE, FREE, NEITHER]
    assert steps_beside(saves, begins).tolist() == expected
    assert steps_beside([], begins).tolist() == [FREE] * 10


DICE = np.random.default_rng(3)
Noise = Callable[[int], np.ndarray]


@pytest.mark.parametrize(
    "noise",
    [
        lambda n: DICE.normal(size=n),
        lambda n: np.convolve(DICE.normal(size=n + 9), np.ones(10), "valid"),  # neighbours alike
        lambda n: DICE.pareto(1.5, size=n),
    ],
    ids=["independent", "alike", "far out"],
)
def test_intervals_of_an_excess_hold_the_truth(noise: Noise) -> None:
    """Nine in ten is what is asked of 95 %: there are eight stretches, and values far out."""
    chosen = np.array([beside(step) for step in range(400)])
    found = [excess(noise(400) + 0.5 * chosen, chosen) for _ in range(200)]
    held = [each.low <= 0.5 <= each.high for each in found if each is not None]
    assert np.mean(held) > 0.9


def test_an_excess_needs_two_stretches_and_values_around_them() -> None:
    values, place = np.arange(100.0), np.arange(100)
    assert excess(values, place < 0) is None
    assert excess(values, place >= 0) is None
    assert excess(values, (place > 40) & (place < 60)) is None
    found = excess(
        values[:99], place[:99] % 9 == 4
    )  # what only grows makes no value larger than others
    assert found is not None
    assert found.low <= 0.0 <= found.high
