"""Trends of series; what devices and control groups counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from haiprof import Analyzer
from haiprof.base.statistics import growth_p_value
from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.job_time import DeviceUse
from haiprof.diagnosis.rule_inputs import gather_inputs
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import CGROUP, HOST
from tests.unit.analysis.recorded import row_of, write_records
from tests.unit.diagnosis.stories import START_NS, judged, ledger_of, write_story


@pytest.mark.parametrize("count", [8, 20, 60])
def test_growth_p_value_has_its_level_without_a_trend(count: int) -> None:
    random = np.random.default_rng(3)
    below = [growth_p_value(random.integers(0, 50, count).astype(float)) < 0.05 for _ in range(900)]
    assert np.mean(below) == pytest.approx(0.05, abs=0.025)


def test_growth_p_value_of_eight_rising_points_is_small() -> None:
    assert growth_p_value(np.arange(8.0)) < 0.001
    assert growth_p_value(-np.arange(8.0)) > 0.999


def test_growth_of_a_constant_is_no_growth() -> None:
    assert growth_p_value(np.full(20, 3.0)) == 1.0


STEPS = np.arange(4)
PERIODS = np.array([100.0, 100.0, 100.0, 500.0])
BOUNDS = [10.0, 10.0, np.nan, 400.0]


@pytest.mark.parametrize(
    ("bounds", "busy_ratio", "expected"),
    [
        (BOUNDS, None, [10.0, 10.0, 60.0, 400.0]),  # a step without events: their share of all
        (BOUNDS, 0.0, [10.0, 10.0, 60.0, 400.0]),  # the counter cannot make it longer
        (BOUNDS, 0.7, [5.0, 5.0, 30.0, 200.0]),  # 240 of 480, where the events are
        ([np.nan] * 4, 0.75, [25.0, 25.0, 25.0, 125.0]),
        ([np.nan] * 4, None, [100.0, 100.0, 100.0, 500.0]),
    ],
    ids=["events", "idle by counter", "both", "counter", "neither"],
)
def test_idle_time_is_where_events_saw_it_and_as_long_as_the_counter_says(
    bounds: list[float], busy_ratio: float | None, expected: list[float]
) -> None:
    use = DeviceUse(step=STEPS, bound_ns=np.array(bounds), busy_ratio=busy_ratio)
    assert use.idle_ns(STEPS, PERIODS) == pytest.approx(expected)
    assert use.is_known == (busy_ratio is not None or not np.isnan(bounds).all())


def test_host_code_gains_no_more_than_the_gpu_stands_still_on_the_mean(tmp_path: Path) -> None:
    """Its counter is 1 in three of four samples, so that its median says that it never does."""
    write_story(tmp_path / "run", lambda *_: (10.0, 5.0, 10.0, 2.0), gpu=lambda n: float(n % 4 > 0))
    ledger = ledger_of(judged(tmp_path / "run"))
    assert ledger.device_idle_ns == pytest.approx(0.25 * ledger.mean_ns, rel=0.1)
    (batches,) = (account for account in ledger.largest() if account.position == "input")
    assert batches.ns_per_step > 0.3 * ledger.mean_ns
    assert batches.gain_ns == pytest.approx(ledger.device_idle_ns)


def cgroup_row(time: int, index: int, cores: float, *, periods: float, share: float) -> list[float]:
    count = int(periods * time / NS_PER_S)
    return row_of(
        CGROUP,
        time_ns=time,
        cgroup_index=index,
        cpu_limit_cores=cores,
        cpu_period_count=count,
        cpu_throttled_period_count=int(share * count),
    )


@pytest.mark.parametrize("own_periods", [0, 10])
def test_the_cgroup_that_stops_the_job_most_is_the_one_that_counts(
    tmp_path: Path, own_periods: int
) -> None:
    root = tmp_path / "run"
    write_story(root, lambda *_: (0.2, 5.0, 10.0, 2.0), steps=900)
    node = RunPaths(root).node("node0")
    times = np.linspace(START_NS, START_NS + 900 * 18_000_000, 40).astype(int).tolist()
    levels = [
        cgroup_row(time, *level, periods=periods, share=share)
        for time in times
        for level, periods, share in (((0, 4.0), own_periods, 0.0), ((1, 4.5), 10, 0.5))
    ]
    entities = [{"key": [0], "name": "own"}, {"key": [1], "name": "job_7"}]
    write_records(node.records("cgroup"), CGROUP, levels, entities=entities)
    hosts = [row_of(HOST, time_ns=time, cpu_count=32) for time in times]
    write_records(node.records("host"), HOST, hosts)
    cpu = gather_inputs(Analyzer(root)).node_cpus["node0"]
    assert cpu.throttled_ratio == pytest.approx(0.5, rel=0.05)
    assert (cpu.core_count, cpu.limit_cores) == (32, 4.5)
