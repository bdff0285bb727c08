"""Waits for the next seconds of a running job, so that they can be judged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from haiprof.live.ask import ask, members
from haiprof.live.trace_now import TraceNow, trace_now
from haiprof.run_format.layout import RunPaths

DRAIN_S = 2.5
"""Ranks write once a second, agents sample once a second: what happened is in the files then."""
_ANSWER_S = 5.0
_TALK_S = 10.0
_POLL_S = 0.1

Progress = Callable[[str], None]


def collect(
    run: RunPaths,
    time_s: float,
    *,
    trace: Mapping[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> tuple[tuple[int, int], TraceNow | None]:
    """Waits until the next seconds of a job, or what it still trains of them, are in its files."""
    since = time.time_ns()
    limit = time.monotonic() + time_s
    traced = trace_now(run, trace, progress=progress) if trace is not None else None
    progress(f"watching the job for {max(limit - time.monotonic(), 0.0):.0f} s")
    wait(lambda: not members(run), limit, progress)
    until = time.time_ns()
    ask(run, "collectives", {"entries": True}, timeout_s=_ANSWER_S)
    time.sleep(DRAIN_S)
    return (since, until), traced


def wait(done: Callable[[], bool], limit_s: float, progress: Progress) -> None:
    """Waits for a condition or a monotonic time; reports the remaining time at intervals."""
    told = time.monotonic()
    while not done() and time.monotonic() < limit_s:
        time.sleep(_POLL_S)
        if time.monotonic() > told + _TALK_S:
            told = time.monotonic()
            progress(f"up to {limit_s - told:.0f} s more")
