"""Calls of torch.distributed as spans, in a process that has not trained yet."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

from haiprof.in_job.patches import State
from haiprof.run_format.schema import COLLECTIVE, TAG_BITS, TAG_MASK

CALLS = (
    "barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object",
    "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list",
)  # fmt: skip
_MEETING = "init_process_group"
_Place = tuple[CodeType, int]  # in the job's code that calls a collective
_CALLERS = 2  # frames between the caller and ours: torch's own decorator


def number_place(name: str, tags: dict[_Place, int], lines: list[dict[str, Any]]) -> int:
    """The number of the place that called the wrapper; the last one stands for many."""
    frame = sys._getframe(_CALLERS + 1)
    key = (frame.f_code, frame.f_lasti)
    known = tags.get(key)
    if known is not None:
        return known
    if len(tags) + 1 >= TAG_MASK:
        return TAG_MASK
    tag = tags[key] = len(tags) + 1
    place = {"file": frame.f_code.co_filename, "line": frame.f_lineno}
    lines.append({"type": "collective_call", "tag": tag, "name": name, **place})
    return tag


def wrap_calls(module: Any, state: State) -> list[Callable[[], None]]:
    """Puts wrappers behind the functions of `torch.distributed.distributed_c10d`; the undos."""
    # torch decorates each of them with a function that logs its exceptions, and what is replaced is
    # the function inside that decorator. So the names that the job imports, pickles, and by which
    # Dynamo knows collectives that it can trace, stay the objects that they were.
    undos: list[Callable[[], None]] = []
    tags: dict[_Place, int] = {}
    for name in (*CALLS, _MEETING):
        function = getattr(module, name, None)
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        if code is None or code.co_freevars != ("func",) or not cells:
            continue  # another torch: these calls are not seen
        original = cells[0].cell_contents
        cells[0].cell_contents = (
            _wrap_meeting(original, state)
            if name == _MEETING
            else wrap_collective(original, state, name=name, tags=tags)
        )
        undos.append(functools.partial(setattr, cells[0], "cell_contents", original))
    return undos


def _wrap_meeting(original: Callable[..., Any], state: State) -> Callable[..., Any]:
    """Writes down how long the ranks took to meet; it is no step of anything, and so no span."""

    @functools.wraps(original)
    def meet(*args: Any, **kwargs: Any) -> Any:
        line: dict[str, Any] = {"type": "process_group", "start_ns": time.perf_counter_ns()}
        try:
            return original(*args, **kwargs)
        finally:
            state.recorder.lines.append({**line, "end_ns": time.perf_counter_ns()})

    return meet


def wrap_collective(
    original: Callable[..., Any], state: State, *, name: str, tags: dict[_Place, int]
) -> Callable[..., Any]:
    """Times outermost calls of the training thread."""
    recorder, is_tracing = state.recorder, state.is_tracing
    begin, end = recorder.spans.begin, recorder.spans.end

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if is_tracing() or state.busy or state.loading:
            return original(*args, **kwargs)
        code = start = 0
        mark = None
        try:
            try:
                if state.begins_here():
                    found = COLLECTIVE | number_place(name, tags, recorder.lines) << TAG_BITS
                    mark = state.begin(COLLECTIVE, None)
                    start = begin(COLLECTIVE)
                    code = found
                    state.loading = True  # what it calls itself is no other
            except Exception as error:
                recorder.fault("collective", error)
            return original(*args, **kwargs)
        finally:
            if code:
                try:
                    end(start, code)
                    state.loading = False
                    state.end(mark, code)
                except Exception as error:
                    recorder.fault("collective", error)
                finally:
                    state.loading = state.is_closed

    return collective
