"""`haiprof verdict JOB --collect`: what it says while it waits for a job's next seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.live import trace_now
from haiprof.live.find import Answers, Member
from haiprof.run_format.control import new_request
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


def test_progress_of_a_trace_begins_with_the_first_rank_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(
        *_: object, progress: Callable[[int, int], None] = lambda *_: None, **__: object
    ) -> Answers:
        for done in range(3):
            progress(done, 2)
        return Answers(request=new_request("trace", valid_s=1.0), replies={}, silent=())

    ranks = [Member(name=str(rank), rank=rank, host="a", pid=None) for rank in range(2)]
    monkeypatch.setattr(trace_now, "members", lambda _: ranks)
    monkeypatch.setattr(trace_now, "ask", ask)
    said: list[str] = []
    trace_now.trace_now(write_run(tmp_path / "run"), {}, progress=said.append)
    assert said[0].startswith("asking 2 ranks for a trace; waiting up to ")
    assert said[1:] == ["1 of 2 ranks are done", "2 of 2 ranks are done"]
