"""Device time of phases: pooled CUDA events on the current stream, never waited for.

Everything runs on the training thread: a query from another thread could break a CUDA graph that is
being captured. One record goes out per optimizer step, once the device has passed its last mark.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from haiprof.run_format.schema import (
    BACKWARD,
    DATA,
    DATA_ITER,
    DEVICE,
    FORWARD,
    FORWARD_EVAL,
    OPTIMIZER,
    SCALER,
)

MAX_PENDING = 256  # intervals kept while the device is behind; older ones are given up as missing
MAX_SPANS = 4096  # of one interval: without an optimizer it has no end
NS_PER_MS = 1e6

_SLOTS = {
    DATA: 0, DATA_ITER: 0, FORWARD: 1, FORWARD_EVAL: 1, BACKWARD: 2, OPTIMIZER: 3, SCALER: 3,
}  # fmt: skip
_SLOT_COUNT = 4
_NAN, _INFINITE = float("nan"), float("inf")
CLOCK_DRIFT_RATIO = 5e-5
"""By how much the clocks of a device and its host go apart, at most: quartz differs by some 20 ppm.
Own choice."""


_Mark = tuple[int, int, Any]  # an event, after the host's time before and after it was recorded


class _Interval:
    """The marks between two optimizer steps."""

    __slots__ = ("closed", "end_ns", "follows", "marks", "missing", "spans")

    def __init__(self, marks: list[_Mark]) -> None:
        self.marks = marks
        self.follows = bool(marks)  # on the interval before
        self.closed = False
        self.end_ns = self.missing = 0
        self.spans: list[tuple[int, int, int]] = []  # slot, marks of its start and its end


class DeviceTimer:
    """Marks the current stream at the ends of spans."""

    def __init__(self, torch: Any, records: list[bytes]) -> None:
        self._event = torch.cuda.Event
        self._capturing = torch.cuda.is_current_stream_capturing
        self._records = records
        self._pool: list[Any] = []
        self._pending: deque[_Interval] = deque()
        self._interval = _Interval([])
        self._lag_ns = _NAN
        self._pack = DEVICE.struct.pack

    @classmethod
    def where_started(cls, records: list[bytes]) -> DeviceTimer | None:
        """A timer where the job itself has started CUDA (or ROCm), else None."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        return cls(torch, records)

    def begin(self, kind: int) -> Callable[[], None] | None:
        """Marks the start of a span; the returned function marks its end."""
        slot = _SLOTS.get(kind)
        if self._capturing():
            self._interval.missing += 1
            return None
        if slot is None:  # evaluation: the interval must not be measured across it
            self._interval = _Interval([])
            return None
        if len(self._interval.marks) > 2 * MAX_SPANS:
            self._interval = _Interval([])
        interval = self._interval
        start = len(interval.marks)
        interval.marks.append(self._mark())

        def end() -> None:
            if self._capturing():
                self._interval.missing += 1
                return
            if interval is self._interval:
                interval.marks.append(self._mark())
            interval.spans.append((slot, start, len(interval.marks) - 1))  # to its end at the most

        return end

    def close(self, end_ns: int) -> None:
        """Ends the interval at an optimizer span's end, and writes intervals that are done."""
        capturing = self._capturing()
        interval = self._interval
        last = [] if capturing else [self._mark()]
        interval.marks += last
        interval.closed, interval.end_ns = not capturing, end_ns
        self._pending.append(interval)
        self._interval = _Interval(last)
        # A query would break the capture of a CUDA graph.
        while not capturing and self._pending and self._is_done(self._pending[0]):
            self._records.append(self._record(self._pending.popleft()))

    def _mark(self) -> _Mark:
        event = self._pool.pop() if self._pool else self._event(enable_timing=True)
        before = monotonic_ns()
        event.record()
        return before, monotonic_ns(), event

    def _is_done(self, interval: _Interval) -> bool:
        if interval.closed and interval.marks[-1][2].query():
            return True
        if interval.closed and len(self._pending) <= MAX_PENDING:
            return False
        interval.missing += len(interval.spans)
        interval.spans, interval.closed = [], False
        return True

    def _record(self, interval: _Interval) -> bytes:
        """One record; spans inside others (closures, GradScaler) count once, for the inner."""
        sums = [0.0] * _SLOT_COUNT
        if not interval.closed or len(interval.marks) < 2:  # one mark tells no time
            self._lag_ns = _NAN
            return self._pack(interval.end_ns, *sums, _NAN, interval.missing, _NAN, _NAN)
        times = self._times_ns(interval.marks)
        for index, (slot, start, end) in enumerate(interval.spans):
            elapsed = times[end] - times[start]
            if elapsed != elapsed:  # not on the stream of the closing mark, and not done yet
                interval.missing += 1
                continue
            sums[slot] += elapsed
            # The span around it is the next to end among those that started before. They come in
            # the order of their ends; one that never ended (a step that raised) is not there.
            later = interval.spans[index + 1 :]
            outer = next((slot for slot, started, _ in later if started < start), None)
            if outer is not None:
                sums[outer] -= elapsed
        if not interval.follows or self._lag_ns != self._lag_ns:
            self._lag_ns, self._least_lag_ns = 0.0, _INFINITE
        idle_ns, lag_ns = self._idle_and_lag_ns(interval.marks, times)
        self._pool += [event for _, _, event in interval.marks[:-1]]  # the last begins the next one
        return self._pack(interval.end_ns, *sums, times[-1], interval.missing, idle_ns, lag_ns)

    def _times_ns(self, marks: list[_Mark]) -> list[float]:
        """When the device reached each mark, from the first one on; NaN where it has not."""
        first, times = marks[0][2], [0.0]
        for _, _, event in marks[1:]:
            try:
                times.append(first.elapsed_time(event) * NS_PER_MS)
            except RuntimeError:
                times.append(_NAN)
        return times

    def _idle_and_lag_ns(self, marks: list[_Mark], times: list[float]) -> tuple[float, float]:
        """For how long at most the device had nothing to do; what it had left to do at the end."""
        # A mark that the device reaches by `lag` after the host made it was queued behind work: the
        # device was busy for that time, back to the mark before it. Both clocks have no common
        # origin; the least lag so far is taken to be none, which makes lags too short where the
        # device was never idle, and the bound larger. It may grow again by what clocks drift apart.
        # The thread may lose its core beside a mark: the least lag counts from before it, others
        # from after it.
        origin = marks[0][1]
        lags = [self._lag_ns + at - (m[1] - origin) for m, at in zip(marks, times, strict=True)]
        longest = [lag + m[1] - m[0] for m, lag in zip(marks, lags, strict=True)]
        least = self._least_lag_ns + CLOCK_DRIFT_RATIO * (marks[-1][1] - origin)
        least = min([least, *(lag for lag in longest if lag == lag)])
        self._lag_ns, self._least_lag_ns = lags[-1], least
        idle, reached = 0.0, 0.0
        for lag, at in zip(lags[1:], times[1:], strict=True):
            if at == at:
                idle += max(at - reached - max(lag - least, 0.0), 0.0)
                reached = max(reached, at)
        return idle, max(lags[-1] - least, 0.0)
