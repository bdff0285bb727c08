"""When the forward and backward passes of a window that is recorded began and ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from haiprof.run_format.phase_ranges import KEY, LIMIT, PhaseRange, pack_ranges
from haiprof.run_format.schema import BACKWARD, FORWARD, FORWARD_EVAL, ClockAnchor

_NAMES = {FORWARD: "forward", FORWARD_EVAL: "forward", BACKWARD: "backward"}

_now = time.perf_counter_ns


class PhaseTimes:
    """Notes two times for each pass; they become ranges of the trace when its file is finished."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, int]] = []
        self._tid: int | None = None

    def begin(self, kind: int, end: Callable[[], None]) -> Callable[[], None]:
        """A span begins."""
        # Ranges of torch's own (`record_function`) would be events of the profiler while it
        # records, nodes of the execution trace, and ranges on the GPU: these cost nothing there.
        # Both clocks agree to less than a microsecond (tests/process/test_traced_run.py).
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
        ranges, follows = [], FORWARD
        for kind, start, end in sorted(self._spans, key=lambda span: span[1], reverse=True):
            follows = follows if kind == FORWARD_EVAL else kind
            # A module in evaluation mode counts only where a backward pass comes next.
            if kind != FORWARD_EVAL or follows == BACKWARD:
                began, name = start + offset_ns, _NAMES[kind]
                ranges.append(PhaseRange(name=name, start_wall_ns=began, duration_ns=end - start))
        return {KEY: pack_ranges(ranges[::-1], since_ns=clock.wall_ns), "tid": self._tid}
