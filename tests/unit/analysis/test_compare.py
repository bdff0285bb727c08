"""Two runs compared: what is claimed, what is not, and what is said to make the difference."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Floats
from haiprof.base.safe_files import make_folder
from haiprof.base.statistics import mean_error, student_p_value, student_quantile, without_trend
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.compare.compared_run import (
    baseline_named,
    last_good,
    note_outcome,
    open_compared_run,
    steady,
)
from haiprof.diagnosis.compare.comparison import (
    AccountChange,
    Comparison,
    Load,
    State,
    StepChange,
    caveats,
    compare_runs,
    exceeds,
    other_load_ns,
    step_change,
)
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import as_document
from haiprof.run_analysis.nesting import Spans
from haiprof.run_analysis.step_frame import STEP_PHASES
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.run_format.writer import write_json
from haiprof.show.views.compare import compare_markdown, headline, headline_notes
from tests.unit.analysis.recorded import CLOCK, KINDS, spans_from, write_rank

STEP_NS = 20 * NS_PER_MS


def steps(seed: int, *, ratio: float = 1.0, count: int = 300, memory: float = 0.5) -> np.ndarray:
    """Step times of a real sort: lognormal, each like the one before, 2 % of them much longer.

    Runs of the same code differ by 0.5 %, as RUN_RATIO takes them to.
    """
    random = np.random.default_rng(seed)
    level = STEP_NS * ratio * math.exp(0.005 * random.standard_normal())
    stalls = np.where(random.random(count) < 0.02, 3.0, 1.0)
    return np.asarray(level * np.exp(0.04 * noise(random, count, memory)) * stalls)


def change_of(before: np.ndarray, after: np.ndarray) -> StepChange:
    return step_change(before, after, (float(np.median(before)), float(np.median(after))))


def interval(change: StepChange) -> tuple[float, float]:
    assert change.low_ratio is not None
    assert change.high_ratio is not None
    return change.low_ratio, change.high_ratio


def share_claimed(
    ratio: float, *, memory: float, count: int = 300, repetitions: int = 100
) -> float:
    found = [
        change_of(steps(2 * n, memory=memory, count=count),
                  steps(2 * n + 1, ratio=ratio, memory=memory, count=count))
        for n in range(repetitions)
    ]  # fmt: skip
    return sum(change.is_slower or change.is_faster for change in found) / repetitions


@pytest.mark.parametrize("memory", [0.0, 0.7])
def test_equal_runs_are_claimed_different_no_more_often_than_stated(memory: float) -> None:
    claimed = share_claimed(1.0, memory=memory, repetitions=400)
    assert claimed <= 0.01 + 2 * math.sqrt(0.01 * 0.99 / 400)


def unsteady(seed: int, count: int = 300) -> np.ndarray:
    """Of a machine that is faster in some seconds than in others, and in some runs than others."""
    random = np.random.default_rng(seed)
    levels = np.repeat(0.015 * random.standard_normal(8), math.ceil(count / 8))[:count]
    run = 0.015 * random.standard_normal()
    return np.asarray(steps(seed, count=count) * np.exp(levels + run))


def test_runs_of_an_unsteady_machine_are_seldom_claimed_different() -> None:
    found = [change_of(unsteady(2 * n), unsteady(2 * n + 1)) for n in range(100)]
    assert sum(change.is_slower or change.is_faster for change in found) <= 8


@pytest.mark.parametrize(("ratio", "memory", "least"), [(1.2, 0.7, 0.99), (1.1, 0.3, 0.75)])
def test_runs_that_differ_are_found(ratio: float, memory: float, least: float) -> None:
    assert share_claimed(ratio, memory=memory) >= least


def test_what_is_paid_every_hundredth_step_counts_in_full_and_makes_no_noise() -> None:
    """The median feels nothing of it."""
    before = steps(1, count=1000)
    after = steps(2, count=1000) + np.where(np.arange(1000) % 100 == 99, 50 * STEP_NS, 0)
    change = change_of(before, after)
    assert change.is_slower
    assert change.ratio == pytest.approx(1.48, abs=0.05)
    assert change.after_median_ns == pytest.approx(change.before_median_ns, rel=0.03)


def test_interval_holds_the_true_ratio() -> None:
    held = 0
    for seed in range(100):
        change = change_of(steps(2 * seed), steps(2 * seed + 1, ratio=1.1))
        low, high = interval(change)
        held += low <= 1.1 <= high
    assert held >= 99 - 2 * 1.0  # two standard errors of 100 tries


def test_few_steps_are_not_judged() -> None:
    change = change_of(steps(1, count=19), steps(2, count=300, ratio=2.0))
    assert change.low_ratio is None
    assert "19 and 300 steps" in change.unknown


def test_growth_of_the_jobs_own_code_is_no_noise() -> None:
    """Its mean is what it was; how far that strays is what strays about the growth."""
    held, claimed = 0, 0
    for seed in range(50):
        growing = steps(2 * seed, memory=0.3) + np.linspace(0, STEP_NS, 300)
        plain = steps(2 * seed + 1, memory=0.3)
        change = change_of(without_trend(growing), plain)
        assert change.before_ns == pytest.approx(growing.mean())
        low, high = interval(change)
        held += low <= 1 / 1.47 <= high  # stalls add 4 %
        claimed += change.is_faster
        wide_low, wide_high = interval(change_of(growing, plain))
        assert (high / low) ** 1.5 < wide_high / wide_low
    assert (held >= 48, claimed >= 49) == (True, True)


@pytest.mark.parametrize(("when", "is_taken_out"), [("growing", True), ("each step", False)])
def test_only_a_trend_that_an_account_explains_is_taken_out(when: str, is_taken_out: bool) -> None:
    account = SimpleNamespace(when=when, gain_low_ns=0.2 * STEP_NS)
    found: Any = SimpleNamespace(ledger=SimpleNamespace(accounts=(account,), mean_ns=STEP_NS))
    drifting = np.linspace(STEP_NS, 2 * STEP_NS, 100)
    assert (np.ptp(steady(found, drifting)) < 1) == is_taken_out


def test_run_that_drifts_has_a_wide_interval() -> None:
    drifting = np.linspace(STEP_NS, 2 * STEP_NS, 100)
    assert interval(change_of(drifting, steps(2, ratio=1.1)))[0] < 0.6


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


def test_the_position_that_grew_is_named(tmp_path: Path) -> None:
    found = compared(
        write(tmp_path, "a", data_ms=4.0, seed=1), write(tmp_path, "b", data_ms=6.0, seed=2)
    )
    assert found.state == "slower"
    first = found.positions[0]
    assert (first.name, first.clock) == ("input", "host")
    assert first.low_ns <= 2 * NS_PER_MS <= first.high_ns
    assert re.search(r"% more time \(.*\): input \(\+2\.0\d ms a step\) makes", headline(found))
    assert {one.name for one in found.positions if one.is_certain} == {"input"}
    assert sum(one.difference_ns for one in found.positions) == pytest.approx(
        found.change.difference_ns, rel=1e-6
    )
    assert "no stacks were sampled" in found.no_accounts


def test_equal_runs_claim_nothing_and_noisy_ones_say_so(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a", seed=3), write(tmp_path, "b", seed=4))
    assert found.state == "same"
    assert re.match(r"no difference above \d\.\d %: ", headline(found))
    assert (exceeds(found, 0.05), exceeds(found, 0.0001)) == (False, None)
    noisy = replace(found, change=changed(1.02, 0.95, 1.12))
    assert noisy.state == "undecided"
    assert headline(noisy) == "inconclusive: too noisy (the change lies between -5.0 % and +12.0 %)"
    assert exceeds(noisy, 0.05) is None
    assert exceeds(noisy, 0.20) is False


@pytest.mark.parametrize(
    ("data_ms", "limit", "expected"),
    [(6.0, 0.05, True), (6.0, 0.30, False), (2.0, 0.05, False), (4.5, 0.05, False)],
)
def test_limit_is_on_the_claimed_slowdown(
    tmp_path: Path, data_ms: float, limit: float, expected: bool
) -> None:
    found = compared(write(tmp_path, "a", seed=5), write(tmp_path, "b", data_ms=data_ms, seed=6))
    assert exceeds(found, limit) is expected


def test_slow_rank_slows_the_step_and_is_named(tmp_path: Path) -> None:
    before = write(tmp_path, "a", world=4, seed=9)
    after = write(tmp_path, "b", world=4, seed=10)
    run = RunPaths(after)
    for path in run.rank(2).root.iterdir():
        path.unlink()
    run.rank(2).root.rmdir()
    write_rank(run, spans(150, 77, data_ms=9.0), rank=2, world_size=4)
    found = compared(before, after)
    assert [one.rank for one in found.ranks] == [2]
    assert found.ranks[0].difference_ns == pytest.approx(5 * NS_PER_MS, rel=0.1)


def test_phases_on_the_device_are_compared_where_both_runs_have_them(tmp_path: Path) -> None:
    sides = [
        open_compared_run(write(tmp_path, name, seed=seed)) for name, seed in (("a", 1), ("b", 2))
    ]
    phases = [f"{phase}_device_ns" for phase in STEP_PHASES]
    known = [
        replace(side, inputs=replace(side.inputs, steps=side.inputs.steps.with_columns(
            (pl.lit(ms * NS_PER_MS) + pl.col("step") % 7 * 1000).alias(name) for name in phases)))
        for side, ms in zip(sides, (3, 4), strict=True)
    ]  # fmt: skip
    found = [one for one in compare_runs(*known).positions if one.clock == "device"]
    assert [one.name for one in found if one.is_certain] == list(STEP_PHASES)
    assert found[0].title.endswith(", device")
    assert found[0].difference_ns == pytest.approx(NS_PER_MS)
    assert {one.clock for one in compare_runs(known[0], sides[1]).positions} == {"host"}


def test_run_that_failed_is_said(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a"), write(tmp_path, "b", seed=2, exit_status=1))
    assert any("new run: it did not end with exit status 0" in line for line in caveats(found))


def changed(ratio: float, low: float, high: float) -> StepChange:
    return StepChange(
        before_ns=1e7, after_ns=ratio * 1e7, before_median_ns=1e7, after_median_ns=ratio * 1e7,
        before_step_count=300, after_step_count=300, ratio=ratio, low_ratio=low, high_ratio=high,
        p_value=0.001, unknown="",
    )  # fmt: skip


def load(other: float, *, wait: float = 0.0, main: float = 1.0) -> Load:
    return Load(other_cores=other, core_count=4.0, wait_ratio=wait, main_cores=main)


def test_other_load_explains_what_it_can_and_no_more() -> None:
    slower = changed(1.1, 1.08, 1.12)
    assert other_load_ns(slower, (load(0.0), load(0.0))) == 0
    assert other_load_ns(slower, (load(2.0), load(0.0))) == 0  # there was less of it
    # Half of the cores, work on a shared core takes 1.5 times as long, all of the step computing:
    assert other_load_ns(slower, (load(0.0), load(2.0))) == pytest.approx(0.25 / 1.25 * 1.1e7)
    # What waits does not compute, and no more is explained than the step:
    full = load(4.0, wait=0.8)
    assert other_load_ns(slower, (load(0.0), full)) == pytest.approx((0.8 + 0.2 / 3) * 1.1e7)
    # the same, with a step that mostly sleeps:
    assert other_load_ns(slower, (load(0.0, main=0.1), load(2.0, main=0.1))) < 0.05e7
    # waiting for a core counts whole:
    waiting = load(2.0, wait=0.09, main=0.1)
    assert other_load_ns(slower, (load(0.0, main=0.1), waiting)) > 0.09e7


def certain_account(ns: float) -> AccountChange:
    return AccountChange(
        title="train.py:7 log", position="forward", activity="python", package="job",
        file="train.py", function="log", before_line=None, after_line=7, callees=(),
        when="each step", gain_ns=0.0, gain_low_ns=0.0, gain_high_ns=0.0, before_ns=0.0,
        after_ns=ns, low_ns=0.9 * ns, high_ns=1.1 * ns, p_value=0.0, adjusted_p_value=0.0,
    )  # fmt: skip


def test_what_cannot_be_judged_is_still_measured_with_its_interval(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a", seed=1), write(tmp_path, "b", data_ms=5.0, seed=2))
    loaded = replace(found, loads=(load(0.0), load(3.8, wait=0.2)))
    assert loaded.state == "undecided"
    text = headline(loaded)
    assert "other processes used 95 % of the cores" in text
    for share, leads in ((0.01, False), (0.5, True)):  # what is certain leads, but no crumb of it
        sure = certain_account(share * found.change.difference_ns)
        assert headline(replace(loaded, accounts=(sure,))).startswith(
            "496 µs a step more at train.py:7 log; the whole step: cannot" if leads else text
        )
    assert re.search(r"measured: \+6\.\d % \(\+\d\.\d % to \+\d\.\d %\)$", text), text
    said = "other processes used 0.0 % of the cores in the baseline, 95 % in the new run"
    assert said in headline_notes(loaded, "")
    assert not any("other processes" in line for line in headline_notes(found, ""))
    assert exceeds(loaded, 0.05) is None
    assert exceeds(loaded, 1.0) is False  # whatever others hid, it is not twice as slow


def test_load_weighs_the_same_whichever_run_comes_first() -> None:
    """A run of ten times the other's step, whose own noise is the interval."""
    slower, faster = changed(10.0, 6.0, 15.0), changed(0.1, 1 / 15, 1 / 6)
    faster = replace(faster, before_ns=slower.after_ns, after_ns=slower.before_ns)
    assert slower.least_ns == pytest.approx(faster.least_ns) == pytest.approx(5e7)


def test_runs_of_different_scripts_are_compared_with_a_word_on_that(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a", seed=1), write(tmp_path, "b", seed=2))
    assert found.before.manifest is not None
    assert not any("scripts" in line for line in caveats(found))
    other = replace(found.before.manifest, command=["torchrun", "other.py", "--lr", "1"])
    unlike = replace(found, before=replace(found.before, manifest=other))
    assert [line for line in caveats(unlike) if "different scripts, other.py and" in line]
    assert compare_markdown(unlike).count("different scripts, other.py and") == 1
    assert "different scripts, other.py and" in compare_markdown(unlike).splitlines()[2]


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


# -- the median of earlier runs -----------------------------------------------------------------


def mean_step_ns(run: Path) -> float:
    """From begin to begin, after the first ten steps: not as haiprof computes it."""
    starts = Analyzer(run).steps()["start_ns"].to_numpy()[10:]
    return float(np.diff(starts).mean())


def test_baseline_is_the_run_with_the_median_step_of_the_same_job(tmp_path: Path) -> None:
    times_ms = [4.0, 9.0, 5.0, 7.0, 6.0, 8.0, 4.5]
    launched = [["torchrun", "--rdzv-endpoint", f"node{n}:29500", "/jobs/train.py", "--lr", "1"]
                for n in range(len(times_ms))]  # fmt: skip
    runs = [
        write(tmp_path, f"run-{n}", data_ms=ms, second=n, seed=n, command=launched[n])
        for n, ms in enumerate(times_ms)
    ]
    other = ["python", "train.py", "--lr", "2"]
    write(tmp_path, "other-arguments", second=20, data_ms=1.0, command=other)
    write(tmp_path, "failed", second=21, data_ms=1.0, command=launched[0], exit_status=1)
    write(tmp_path, "two-ranks", second=22, data_ms=1.0, command=launched[0], world=2)
    new = write(
        tmp_path, "new", second=30, data_ms=7.5, command=["python", "train.py", "--lr", "1"]
    )
    write(tmp_path, "later", second=31, data_ms=1.0, command=launched[0])
    usual = statistics.median(map(mean_step_ns, runs))
    found = baseline_named("median", open_compared_run(new))
    assert found.side.path == runs[4]
    assert mean_step_ns(found.side.path) == usual
    assert [Path(run.path).name for run in found.of] == [run.name for run in runs]
    for run in found.of:
        assert run.step_ns == pytest.approx(mean_step_ns(Path(run.path)), rel=1e-3)
    assert "the median of 7 earlier runs of this job" in found.why
    assert "is longer than in 5)" in found.why
    assert "two-ranks has 2 ranks with steps, not 1; failed did not end" in found.why


def test_earlier_runs_are_known_by_the_verdicts_of_their_ends(tmp_path: Path) -> None:
    for n, ms in enumerate([6.0, 4.0, 5.0]):
        run = Analyzer(write(tmp_path, f"run-{n}", data_ms=ms, second=n, seed=n))
        make_folder(run.run.report, below=run.run.root)
        write_json(run.run.verdict_json, as_document(diagnose(run)), below=run.run.root)
    new = open_compared_run(write(tmp_path, "new", second=9))
    found = baseline_named("median", new)
    assert found.side.path == tmp_path / "run-2"
    (tmp_path / "run-2" / "ranks" / "0" / "phases.rec").unlink()
    assert [run.step_ns for run in baseline_named("median", new).of] == [
        run.step_ns for run in found.of
    ]


def test_runs_of_one_run_id_are_of_one_job(tmp_path: Path) -> None:
    first = write(tmp_path, "first", command=["python", "train.py", "1"], options={"run_id": "a"})
    new = write(tmp_path, "new", second=1, options={"run_id": "a"})
    assert baseline_named("median", open_compared_run(new)).side.path == first
    with pytest.raises(MissingDataError, match="no earlier run of this job that ended well"):
        baseline_named("median", open_compared_run(first))


def noise(random: np.random.Generator, count: int, memory: float) -> Floats:
    """Standard normal values, each like the one before by so much."""
    fresh = random.standard_normal(count) * math.sqrt(1 - memory**2)
    found = np.empty(count)
    last = random.standard_normal()
    for place, value in enumerate(fresh):
        last = found[place] = memory * last + value
    return found


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_series_has_no_error(value: float) -> None:
    assert mean_error(np.full(50, value)).half_width() == 0.0


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (7, 2.365), (30, 2.042)])
def test_students_t_is_that_of_the_tables(freedom: float, quantile: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=0.02)
    assert student_p_value(quantile, freedom) == pytest.approx(0.05, rel=0.08)
