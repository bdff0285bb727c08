"""What is noted beside the profiler while a window is recorded: its passes, lines of operators.

Autograd counts the operators that have a backward, and a trace has that number of the operator and
of its backward. So the number at which a line began says which of them it called: no clock is
needed. Python calls a trace function (`sys.settrace`) at each line for that: in a window alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any

import haiprof
from haiprof.base.code_places import is_library
from haiprof.in_job.stack_sampler import library_folders
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


NO_NUMBERS = "no lines of operators: this torch does not tell its sequence numbers"
TAKEN = "no lines of operators: the job's own trace function (sys.settrace) uses them"
_Step = Callable[[FrameType, str, Any], Any]


class ForwardLines:
    """The lines that ran on one thread, by the number of the next operator."""

    def __init__(self) -> None:
        self._number: Callable[[], int] | None = None
        self._on = False
        self._libraries = [*library_folders(), os.path.dirname(haiprof.__file__)]
        self._is_own: dict[CodeType, bool] = {}
        self._places: dict[tuple[CodeType, int], int] = {}
        self._at: list[list[int]] = []
        self._entered: list[FrameType] = []

    def start(self) -> str | None:
        """Begins on this thread; why not, where it cannot."""
        from torch._C import _autograd

        self._number = getattr(_autograd, "_get_sequence_nr", None)
        if self._number is None:
            return NO_NUMBERS
        if sys.gettrace() is not None:
            return TAKEN
        self._on = True
        for frame, _ in walk_stack(sys._getframe()):
            if frame.f_trace is None and self._is_of_job(frame.f_code):
                frame.f_trace = self._step
                self._entered.append(frame)
        sys.settrace(self._call)
        return None

    def stop(self) -> dict[str, Any] | None:
        """Ends it; `places` (file, line, function) and `at`: [number, place] in their order."""
        if not self._on:
            return None
        self._on = False
        if sys.gettrace() == self._call:  # on another thread it ends itself, at the next call
            sys.settrace(None)
        for frame in self._entered:
            frame.f_trace = None
        self._entered.clear()
        places = [
            [code.co_filename, line, getattr(code, "co_qualname", code.co_name)]
            for code, line in self._places
        ]
        return {"places": places, "at": self._at}

    def _call(self, frame: FrameType, event: str, argument: Any) -> _Step | None:
        if not self._on:
            sys.settrace(None)
            return None
        return self._step if self._is_of_job(frame.f_code) else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> _Step | None:
        """A line begins, or one goes on since a function that it called has ended."""
        # An error in here would be the job's: it does nothing that can fail.
        if not self._on or self._number is None:
            return None
        if event not in ("line", "return"):
            return self._step
        at: FrameType | None = frame
        if event == "return":
            at = frame.f_back
            while at is not None and not self._is_of_job(at.f_code):
                at = at.f_back
        if at is not None:
            key = (at.f_code, at.f_lineno)
            place = self._places.setdefault(key, len(self._places))
            number = self._number()
            if self._at and self._at[-1][0] == number:
                self._at[-1][1] = place
            elif not self._at or self._at[-1][1] != place:
                self._at.append([number, place])
        return self._step

    def _is_of_job(self, code: CodeType) -> bool:
        known = self._is_own.get(code)
        if known is None:
            known = not is_library(code.co_filename, code.co_name, libraries=self._libraries)
            self._is_own[code] = known
        return known
