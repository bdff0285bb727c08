"""Device time of phases: pooled CUDA events on the current stream, never waited for.

Everything runs on the training thread: a query from another thread could break a CUDA graph that is
being captured. One record goes out per optimizer step, once the device has passed its last mark.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
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
_NAN = float("nan")


class _Interval:
    """The marks between two optimizer steps."""

    __slots__ = ("end_ns", "first", "last", "missing", "spans")

    def __init__(self, first: Any) -> None:
        self.first = first
        self.last: Any = None
        self.end_ns = 0
        self.missing = 0
        self.spans: list[tuple[int, int, Any, Any]] = []  # slot, order of start, start, end


class DeviceTimer:
    """Marks the current stream at the ends of spans."""

    def __init__(self, torch: Any, records: list[bytes]) -> None:
        self._event = torch.cuda.Event
        self._capturing = torch.cuda.is_current_stream_capturing
        self._records = records
        self._pool: list[Any] = []
        self._pending: deque[_Interval] = deque()
        self._started = 0
        self._interval = _Interval(None)
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
            self._interval = _Interval(None)
            return None
        if len(self._interval.spans) > MAX_SPANS:
            self._interval = _Interval(None)
        start = self._mark()
        if self._interval.first is None:
            self._interval.first = start
        self._started += 1
        order = self._started

        def end() -> None:
            if self._capturing():
                self._interval.missing += 1
            else:
                self._interval.spans.append((slot, order, start, self._mark()))

        return end

    def close(self, end_ns: int) -> None:
        """Ends the interval at an optimizer span's end, and writes intervals that are done."""
        capturing = self._capturing()
        interval = self._interval
        last = None if capturing else self._mark()
        interval.last, interval.end_ns = last, end_ns
        self._pending.append(interval)
        self._interval = _Interval(last)
        # A query would break the capture of a CUDA graph.
        while not capturing and self._pending and self._is_done(self._pending[0]):
            self._records.append(self._record(self._pending.popleft()))

    def _mark(self) -> Any:
        event = self._pool.pop() if self._pool else self._event(enable_timing=True)
        event.record()
        return event

    def _is_done(self, interval: _Interval) -> bool:
        if interval.last is not None and interval.last.query():
            return True
        if interval.last is not None and len(self._pending) <= MAX_PENDING:
            return False
        interval.missing += len(interval.spans)
        interval.spans, interval.last = [], None
        return True

    def _record(self, interval: _Interval) -> bytes:
        """One record; spans inside others (closures, GradScaler) count once, for the inner."""
        sums = [0.0] * _SLOT_COUNT
        for index, (slot, order, start, end) in enumerate(interval.spans):
            try:
                elapsed = start.elapsed_time(end) * NS_PER_MS
            except RuntimeError:  # not on the stream of the closing mark, and not done yet
                interval.missing += 1
                continue
            sums[slot] += elapsed
            # The span around it is the next to end among those that started before. They come in
            # the order of their ends; one that never ended (a step that raised) is not there.
            later = interval.spans[index + 1 :]
            outer = next((slot for slot, started, _, _ in later if started < order), None)
            if outer is not None:
                sums[outer] -= elapsed
        whole = _NAN
        if interval.first is not None and interval.last is not None:
            whole = interval.first.elapsed_time(interval.last) * NS_PER_MS
        self._reuse(interval)
        return self._pack(interval.end_ns, *sums, whole, interval.missing)

    def _reuse(self, interval: _Interval) -> None:
        """Gives the events back, all but the last: it also begins the next interval."""
        for _, _, start, end in interval.spans:
            if start is not interval.first:
                self._pool.append(start)
            self._pool.append(end)
        if interval.first is not None:
            self._pool.append(interval.first)
