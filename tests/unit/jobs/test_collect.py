"""`haiprof verdict JOB --collect`: what it says while it waits for a job's next seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from haiprof.live import trace_now
from tests.unit.analysis.recorded import write_run


def test_the_time_that_was_asked_for_is_told_before_steps_are_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(trace_now, "DRAIN_S", 0.0)
    monkeypatch.setattr(trace_now, "trace_now", lambda *_, **__: time.sleep(0.1))
    trace_now.collect(write_run(tmp_path / "run"), 8.0, trace={"count": 2}, progress=said.append)
    assert said[0] == "watching the job for 8 s"
    assert not any("watching" in line for line in said[1:])
