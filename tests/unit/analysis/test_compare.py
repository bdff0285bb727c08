"""Two runs compared: what is claimed, what is not, and what is said to make the difference."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from haiprof.base.errors import MissingDataError
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.compare.baseline import last_good, note_outcome
from haiprof.diagnosis.compare.compared_run import open_compared_run
from haiprof.diagnosis.compare.comparison import (
    Comparison,
    State,
    caveats,
    compare_runs,
    exceeds,
    other_load_ns,
)
from haiprof.diagnosis.compare.counters import Load
from haiprof.diagnosis.compare.step_time import Change, step_change
from haiprof.run_analysis.nesting import Spans
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.show.views.compare import headline
from tests.unit.analysis.recorded import CLOCK, KINDS, spans_from, write_rank
from tests.unit.analysis.test_bootstrap import noise

STEP_NS = 20 * NS_PER_MS


def steps(seed: int, *, ratio: float = 1.0, count: int = 300, memory: float = 0.5) -> np.ndarray:
    """Step times of a real sort: lognormal, each like the one before, 2 % of them much longer.

    Runs of the same code differ by 0.5 %, as COMPARE_RUN_RATIO takes them to.
    """
    random = np.random.default_rng(seed)
    level = STEP_NS * ratio * math.exp(0.005 * random.standard_normal())
    stalls = np.where(random.random(count) < 0.02, 3.0, 1.0)
    return np.asarray(level * np.exp(0.04 * noise(random, count, memory)) * stalls)


def share_claimed(
    ratio: float, *, memory: float, count: int = 300, repetitions: int = 100
) -> float:
    found = [
        step_change(steps(2 * n, memory=memory, count=count),
                    steps(2 * n + 1, ratio=ratio, memory=memory, count=count), replicates=300)
        for n in range(repetitions)
    ]  # fmt: skip
    return sum(change.is_slower or change.is_faster for change in found) / repetitions


@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_equal_runs_are_claimed_different_no_more_often_than_stated(memory: float) -> None:
    assert share_claimed(1.0, memory=memory) <= 0.01 + 2 * math.sqrt(0.01 * 0.99 / 100)


def unsteady(seed: int, count: int = 300) -> np.ndarray:
    """Of a machine that is faster in some seconds than in others, and in some runs than others."""
    random = np.random.default_rng(seed)
    levels = np.repeat(0.015 * random.standard_normal(8), math.ceil(count / 8))[:count]
    run = 0.015 * random.standard_normal()
    return np.asarray(steps(seed, count=count) * np.exp(levels + run))


def test_runs_of_an_unsteady_machine_are_seldom_claimed_different() -> None:
    found = [step_change(unsteady(2 * n), unsteady(2 * n + 1), replicates=300) for n in range(100)]
    claimed = sum(change.is_slower or change.is_faster for change in found)
    assert claimed <= 5


def test_runs_three_percent_apart_are_mostly_found() -> None:
    assert share_claimed(1.03, memory=0.3, count=1000) >= 0.8


def test_runs_ten_percent_apart_are_found() -> None:
    assert share_claimed(1.10, memory=0.7) >= 0.99


def test_interval_holds_the_true_ratio() -> None:
    held = 0
    for seed in range(100):
        change = step_change(steps(2 * seed), steps(2 * seed + 1, ratio=1.1), replicates=300)
        assert change.low_ratio is not None
        assert change.high_ratio is not None
        held += change.low_ratio <= 1.1 <= change.high_ratio
    assert held >= 99 - 2 * 1.0  # two standard errors of 100 tries


def test_few_steps_are_not_judged() -> None:
    change = step_change(steps(1, count=19), steps(2, count=300, ratio=2.0))
    assert change.low_ratio is None
    assert "19 and 300 steps" in change.unknown


def test_steps_that_repeat_each_other_are_not_judged() -> None:
    drifting = np.linspace(STEP_NS, 2 * STEP_NS, 100)
    change = step_change(drifting, steps(2, ratio=1.1))
    assert change.low_ratio is None
    assert "independent" in change.unknown


# -- whole runs ---------------------------------------------------------------------------------


def spans(step_count: int, seed: int, *, data_ms: float, compute_ms: float = 10.0) -> Spans:
    """`D F B O` steps, with a little noise in each span."""
    random = np.random.default_rng(seed)
    rows, time = [], 1_000_000
    lengths = {"D": data_ms, "F": compute_ms / 2, "B": compute_ms / 2, "O": 1.0}
    for _ in range(step_count):
        for word, length in lengths.items():
            end = time + int(length * NS_PER_MS * math.exp(0.02 * random.standard_normal()))
            rows.append((KINDS[word], 0, time, end))
            time = end + 20_000
    return spans_from(rows)


def write(
    log_dir: Path, folder: str, *, data_ms: float = 4.0, seed: int = 0, second: int = 0,
    world: int = 1, step_count: int = 150, **manifest: object,
) -> Path:  # fmt: skip
    """A run directory that was started so many seconds after the others."""
    run = RunPaths(log_dir / folder)
    run.root.mkdir(parents=True)
    start = CLOCK.wall_ns + second * 1_000_000_000
    values = {"haiprof_version": "0", "name": "job", "command": ["python", "train.py"],
              "start_wall_ns": start, "end_wall_ns": start + 1, "exit_status": 0}  # fmt: skip
    write_manifest(run, Manifest(**{**values, **manifest}))  # type: ignore[arg-type]
    for rank in range(world):
        own = spans(step_count, seed * 10 + rank, data_ms=data_ms)
        write_rank(run, own, rank=rank, world_size=world)
    return run.root


def compared(before: Path, after: Path) -> Comparison:
    return compare_runs(open_compared_run(before), open_compared_run(after))


def test_the_phase_that_grew_is_named_with_its_share(tmp_path: Path) -> None:
    found = compared(
        write(tmp_path, "a", data_ms=4.0, seed=1), write(tmp_path, "b", data_ms=6.0, seed=2)
    )
    assert found.state == "slower"
    first = next(part for part in found.parts if part.share_ratio is not None)
    assert first.name == "dataloader"
    assert first.low_ns <= 2 * NS_PER_MS <= first.high_ns
    assert first.share_ratio == pytest.approx(1.0, abs=0.1)
    assert "dataloader +2.0" in headline(found)
    assert "% slower (" in headline(found)
    assert not {p.name for p in found.parts if p.is_significant} & {"forward", "optimizer"}
    shares = [part.share_ratio for part in found.parts if part.share_ratio is not None]
    assert sum(shares) == pytest.approx(1.0)


def test_equal_runs_claim_nothing(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a", seed=3), write(tmp_path, "b", seed=4))
    assert found.state == "same"
    assert headline(found).startswith("no difference found")
    assert exceeds(found, 0.05) is False


@pytest.mark.parametrize(
    ("data_ms", "limit", "expected"),
    [(6.0, 0.05, True), (6.0, 0.30, False), (2.0, 0.05, False), (4.5, 0.05, False)],
)
def test_limit_is_on_the_claimed_slowdown(
    tmp_path: Path, data_ms: float, limit: float, expected: bool
) -> None:
    found = compared(write(tmp_path, "a", seed=5), write(tmp_path, "b", data_ms=data_ms, seed=6))
    assert exceeds(found, limit) is expected


def test_interval_beyond_the_limit_cannot_be_judged(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a", seed=7), write(tmp_path, "b", seed=8))
    assert exceeds(found, 0.0001) is None


def test_slow_rank_slows_the_step_and_is_named(tmp_path: Path) -> None:
    before = write(tmp_path, "a", world=4, seed=9)
    after = write(tmp_path, "b", world=4, seed=10)
    run = RunPaths(after)
    for path in run.rank(2).root.iterdir():
        path.unlink()
    run.rank(2).root.rmdir()
    write_rank(run, spans(150, 77, data_ms=9.0), rank=2, world_size=4)
    found = compared(before, after)
    assert found.ranks[0].rank == 2
    assert [r.rank for r in found.ranks if r.change.is_slower] == [2]


def test_drift_within_a_run_is_said(tmp_path: Path) -> None:
    change = step_change(steps(1, count=900), steps(2, count=900) * np.linspace(1, 1.1, 900))
    assert change.after_drift_ratio == pytest.approx(0.066, abs=0.02)
    before, after = write(tmp_path, "a", seed=1), write(tmp_path, "b", seed=2)
    found = compared(before, after)
    assert not any("drift" in line for line in caveats(found))


def test_run_that_failed_is_said(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a"), write(tmp_path, "b", seed=2, exit_status=1))
    assert any("new run: it did not end with exit status 0" in line for line in caveats(found))


def changed(ratio: float, low: float, high: float) -> Change:
    return Change(
        before_ns=1e7, after_ns=ratio * 1e7, before_step_count=300, after_step_count=300,
        ratio=ratio, low_ratio=low, high_ratio=high, p_value=0.001, before_effective_count=50.0,
        after_effective_count=50.0, before_drift_ratio=0.0, after_drift_ratio=0.0, unknown="",
    )  # fmt: skip


def load(other: float, *, wait: float = 0.0, main: float = 1.0) -> Load:
    return Load(other_cores=other, core_count=4.0, wait_ratio=wait, main_cores=main)


def test_other_load_explains_what_it_can_and_no_more() -> None:
    slower = changed(1.1, 1.08, 1.12)
    assert other_load_ns(slower, (load(0.0), load(0.0))) == 0
    assert other_load_ns(slower, (load(2.0), load(0.0))) == 0  # there was less of it
    # 50 % more of the cores, each shared core half again as slow, and all of the step computing:
    assert other_load_ns(slower, (load(0.0), load(2.0))) == pytest.approx(0.25 * 1.1e7)
    # the same, with a step that mostly sleeps:
    assert other_load_ns(slower, (load(0.0, main=0.1), load(2.0, main=0.1))) < 0.05e7
    # waiting for a core counts whole:
    waiting = load(2.0, wait=0.09, main=0.1)
    assert other_load_ns(slower, (load(0.0, main=0.1), waiting)) > 0.09e7


def test_what_cannot_be_judged_is_still_measured_with_its_interval(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a", seed=1), write(tmp_path, "b", data_ms=5.0, seed=2))
    loaded = replace(found, loads=(load(0.0), load(3.8, wait=0.2)))
    assert loaded.state == "undecided"
    text = headline(loaded)
    assert "others used 95 % of the cores" in text
    assert re.search(r"measured: \+6\.\d % \(\+\d\.\d % to \+\d\.\d %\)$", text), text


# -- the last good run --------------------------------------------------------------------------


def test_last_good_run_passes_over_what_is_not_fit(tmp_path: Path) -> None:
    good = write(tmp_path, "good", second=1, seed=1)
    write(tmp_path, "other-name", second=2, name="another")
    write(tmp_path, "failed", second=3, exit_status=1)
    write(tmp_path, "two-ranks", second=4, world=2)
    write(tmp_path, "short", second=5, step_count=12)
    slow = write(tmp_path, "slow", second=6)
    state: State = "slower"
    assert note_outcome(open_compared_run(slow), {"verdict": {"state": state}})
    new = write(tmp_path, "new", second=7, seed=2)
    write(tmp_path, "later", second=8)
    found = last_good(open_compared_run(new))
    assert found.side.path == good
    assert "passed over: slow was itself found slower" in found.why


def test_no_good_run_is_one_error_that_says_why(tmp_path: Path) -> None:
    write(tmp_path, "failed", second=1, exit_status=3)
    new = write(tmp_path, "new", second=2)
    with pytest.raises(MissingDataError, match="failed did not end with exit status 0"):
        last_good(open_compared_run(new))
