"""The agent has a long run folded: once an hour, by one child at a time, and not a short one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from haiprof.agent import trace_finisher
from haiprof.agent.trace_finisher import RunFolder
from haiprof.run_format.layout import RunPaths
from tests.unit.analysis.recorded import spans_from, write_rank, write_run
from tests.unit.analysis.test_folding import steps_of

HOUR_S = 3600.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def started(run: RunPaths, clock: Clock, hours: float) -> RunFolder:
    return RunFolder(run, "node0", hours, clock=clock)


def wait(folder: RunFolder) -> None:
    """Until no child runs."""
    ends = time.monotonic() + 60
    while folder._helper.child is not None and time.monotonic() < ends:
        if folder._helper.child.poll() is not None:
            return
        time.sleep(0.02)


def test_a_child_folds_once_detail_and_an_hour_have_passed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = steps_of(np.random.default_rng(1), count=4_000)
    write_rank(run, spans_from(rows))
    run.node("node0").root.mkdir(parents=True)
    clock = Clock()
    folder = started(run, clock, 0.25)
    folder.tick()
    assert folder._helper.child is None
    clock.now += 0.3 * HOUR_S
    folder.tick()
    assert folder._helper.child is None
    clock.now += 0.25 * HOUR_S
    folder.tick()
    assert folder._helper.child is not None
    wait(folder)
    assert run.rank(0).folded.exists()
    (line,) = map(json.loads, run.node("node0").events.read_text().splitlines())
    assert (line["type"], line["not_folded"]) == ("folded", [])
    folder.tick()
    assert folder._helper.child is None


def test_one_child_at_a_time_and_none_after_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_finisher, "_FOLD_PROGRAM", "import time; time.sleep(100)")
    clock = Clock()
    folder = started(write_run(tmp_path / "run"), clock, 2.0)
    clock.now += 3.1 * HOUR_S
    folder.tick()
    first = folder._helper.child
    assert first is not None
    clock.now += 1.1 * HOUR_S
    folder.tick()
    assert folder._helper.child is first
    folder.close()
    assert first.poll() is not None
