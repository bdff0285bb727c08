"""Ctrl-C ends what waits for it, whenever it comes."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from haiprof.base.stop_signal import stop_event


def test_signal_that_comes_while_the_wait_begins_ends_it() -> None:
    """At every line of `wait`, also where a lock of an ordinary event would be held."""
    for line in range(1, 12):
        with stop_event() as stop:
            steps = 0

            def trace(frame: FrameType, event: str, _: object, at: int = line) -> object:
                nonlocal steps
                if event == "line" and frame.f_code.co_name in ("wait", "set", "get"):
                    steps += 1
                    if steps == at:
                        signal.raise_signal(signal.SIGINT)
                return trace

            sys.settrace(trace)  # type: ignore[arg-type]
            try:
                stop.wait(0.05)
            finally:
                sys.settrace(None)
            assert stop.is_set() is (steps >= line)
            assert stop.wait(0) is stop.is_set()
