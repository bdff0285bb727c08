"""The training thread waits for the interpreter lock: said with its share, and who holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import write_beside, write_story
from tests.unit.diagnosis.test_code_questions import sample

TRAIN: Stack = (("/home/me/train.py", 40, "main"),)
REFRESH: Stack = (("/home/me/cache.py", 12, "refresh"),)


def judge(
    tmp_path: Path, every: int | None, *, ranks: int = 1, of_rank: int = 0, known: bool = True
) -> Verdict:
    """A run in which every such sample of a rank found its thread waiting for the lock."""
    root = write_story(tmp_path / "run", lambda *_: (0.2, 10.0, 20.0, 2.0), ranks=ranks, steps=200)
    run = RunFrames(root)
    for rank in range(ranks):
        samples = sample(run, lambda *_: TRAIN, rank=rank)
        waits = [rank == of_rank and bool(every) and i % (every or 1) == 0
                 for i in range(len(samples))]  # fmt: skip
        path = RunPaths(root).rank(rank).stacks
        write_stacks(path, samples, waits=waits if known else None, other=REFRESH)
    return diagnose(Analyzer(root))


def test_the_share_of_the_time_is_said_and_the_line_that_holds_it(tmp_path: Path) -> None:
    found = judge(tmp_path, 3).findings[0]
    assert found.rule == "interpreter_lock"
    assert found.rank is None
    assert found.lost_ratio == pytest.approx(1 / 3, abs=0.03)
    assert found.code_lines[0].location == "cache.py:12 refresh"
    assert "begin at cache.py:12 refresh" in found.remedy


def test_one_rank_of_two_is_named(tmp_path: Path) -> None:
    found = {f.rule: f for f in judge(tmp_path, 2, ranks=2, of_rank=1).findings}
    assert found["interpreter_lock"].rank == 1
    assert "rank 1 waits for it" in found["interpreter_lock"].title


def test_rank_that_says_nothing_of_the_lock_is_not_taken_for_one_that_never_waits(
    tmp_path: Path,
) -> None:
    root = write_story(tmp_path / "run", lambda *_: (0.2, 10.0, 20.0, 2.0), ranks=2, steps=200)
    samples = sample(RunFrames(root), lambda *_: TRAIN, rank=1)
    write_stacks(RunPaths(root).rank(1).stacks, samples, waits=[True] * len(samples))
    found = {f.rule: f for f in diagnose(Analyzer(root)).findings}["interpreter_lock"]
    assert found.rank is None


def test_a_thread_of_a_job_beside_it_holds_no_lock_of_this_one(tmp_path: Path) -> None:
    root = write_story(tmp_path / "run", lambda *_: (0.2, 10.0, 20.0, 2.0), steps=200)
    samples = sample(RunFrames(root), lambda *_: TRAIN)
    write_beside(root, 10.0, steps=400)
    path = RunPaths(root).rank
    write_stacks(path(0, 1).stacks, samples, waits=[False] * len(samples), other=REFRESH)
    write_stacks(path(0).stacks, samples, waits=[True] * len(samples), other=REFRESH)
    assert "interpreter_lock" in diagnose(Analyzer(root)).checked


def test_seldom_waits_are_no_finding(tmp_path: Path) -> None:
    verdict = judge(tmp_path, 15)
    assert "interpreter_lock" in verdict.checked


def test_what_is_not_known_is_not_taken_for_no_waiting(tmp_path: Path) -> None:
    verdict = judge(tmp_path, None, known=False)
    assert "interpreter_lock" in dict(verdict.abstained)
