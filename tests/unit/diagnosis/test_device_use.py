"""For how long a device was idle in each step: by its events, its counter, or both."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from haiprof.diagnosis.job_time import DeviceUse
from tests.unit.diagnosis.stories import judged, write_story

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
    ledger = judged(tmp_path / "run").ledger
    assert ledger is not None
    assert ledger.device_idle_ns == pytest.approx(0.25 * ledger.mean_ns, rel=0.1)
    (batches,) = (account for account in ledger.largest() if account.position == "input")
    assert batches.ns_per_step > 0.3 * ledger.mean_ns
    assert batches.gain_ns == pytest.approx(ledger.device_idle_ns)
