"""When the forward and backward passes of a window that is recorded began and ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.phase_ranges import KEY, LIMIT, PhaseRange, pack_ranges
from haiprof.run_format.schema import BACKWARD, FORWARD, FORWARD_EVAL

_NAMES = {FORWARD: "forward", FORWARD_EVAL: "forward", BACKWARD: "backward"}

_now = time.perf_counter_ns


class PhaseTimes:
    """Notes two times for each pass; they become ranges of the trace when its file is finished.

    Ranges of torch's own (`record_function`) would be events of the profiler while it records,
    nodes of the execution trace, and ranges on the GPU: these cost nothing there. Both clocks agree
    to less than a microsecond (tests/process/test_traced_run.py).
    """

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, int]] = []
        self._tid: int | None = None

    def begin(self, kind: int, end: Callable[[], None]) -> Callable[[], None]:
        """A span begins."""
        spans = self._spans
        if kind not in _NAMES or len(spans) >= LIMIT:
            return end
        if self._tid is None:
            self._tid = threading.get_native_id()

        def end_pass() -> None:
            spans.append((kind, start_ns, _now()))
            end()

        start_ns = _now()
        return end_pass

    def as_json(self, clock: ClockAnchor) -> dict[str, Any]:
        """For the sidecar."""
        offset_ns = clock.wall_ns - clock.mono_ns
        ranges = (
            PhaseRange(name=_NAMES[kind], start_wall_ns=start + offset_ns, duration_ns=end - start)
            for kind, start, end in self._training_spans()
        )
        packed = pack_ranges(ranges, since_ns=clock.wall_ns)
        return {KEY: packed, "tid": self._tid}

    def _training_spans(self) -> list[tuple[int, int, int]]:
        """By start; a module in evaluation mode counts only where a backward pass comes next."""
        found, follows = [], FORWARD
        for span in sorted(self._spans, key=lambda span: span[1], reverse=True):
            if span[0] != FORWARD_EVAL:
                follows = span[0]
            if span[0] != FORWARD_EVAL or follows == BACKWARD:
                found.append(span)
        return found[::-1]
