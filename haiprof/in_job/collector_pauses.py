"""Garbage collections that stop the interpreter for a while, and those that the job asked for."""

from __future__ import annotations

import gc
import time

from haiprof.in_job.recorder import Recorder
from haiprof.run_format.schema import GC, TAG_BITS

PAUSE_MIN_NS = 200_000
"""Shorter pauses are part of normal allocation."""
_WHOLE = 2  # what gc.collect() collects by default
_SLACK = 64

_now = time.perf_counter_ns


class CollectorPauses:
    """Puts a span per pause, and counts what gc.collect() took."""

    def __init__(self, recorder: Recorder) -> None:
        self.asked_count = 0
        """Whole collections that the job asked for so far."""
        self.asked_ns = 0
        self._recorder = recorder
        self._put = recorder.spans.put
        self._start = 0
        self._is_asked = False

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """What gc.callbacks calls before and after each collection."""
        recorder = self._recorder
        if not recorder.armed or recorder.closed:
            return
        try:
            if phase == "start":
                self._is_asked = info["generation"] == _WHOLE and _is_asked()
                self._start = _now()
                return
            start, end, self._start = self._start, _now(), 0
            if not start:
                return
            if self._is_asked:
                self._is_asked = False
                self.asked_count += 1
                self.asked_ns += end - start
            if end - start > PAUSE_MIN_NS:
                self._put(start, end, GC | info["generation"] << TAG_BITS)
        except Exception as error:
            recorder.fault("gc", error)


def _is_asked() -> bool:
    """Whether the collector would not have begun by itself.

    It begins when more objects were made than the first threshold; CPython 3.12 does so at the next
    safe place, when some may be gone again (`_PyObject_GC_Del`).
    """
    threshold = gc.get_threshold()[0]
    return not gc.isenabled() or gc.get_count()[0] <= threshold - min(threshold // 8, _SLACK)
