"""The stacks of this process's threads, read without holding a frame or letting one end meanwhile.

frames.c says what would happen otherwise. Plain Python does the same where that is safe: not in
CPython 3.11, where making a frame object may start a garbage collection.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Sequence
from types import CodeType, FrameType
from typing import Any

from haiprof.run_format.stack_frames import Frame

Place = tuple[CodeType, int]
"""Where a frame is: its code and the offset of its instruction, in bytes."""

_VERSION = 3
"""Of frames.c; one that was built of older text is not used."""
_COLLECTS_WHEN_READ = sys.version_info[:2] == (3, 11)

try:
    from haiprof.in_job import _frames
except ImportError:  # not built, or another interpreter than it was built for
    _compiled = None
else:
    _compiled = _frames if getattr(_frames, "VERSION", 0) == _VERSION else None


def why_not_safe() -> str:
    """Why stacks cannot be read again and again beside a job; empty where they can."""
    if _compiled is None and _COLLECTS_WHEN_READ:
        return (
            "Python 3.11 may collect garbage, and crash, while frames are read: haiprof's compiled "
            "part is needed (install it where there is a C compiler)"
        )
    return ""


def read_stacks(
    idents: Container[int] | None, *, until: CodeType | None = None, limit: int
) -> dict[int, list[Place]]:
    """Stacks by thread, the innermost frame first.

    Args:
        idents: Of these threads; None of all.
        until: A function whose frame, and those of its callers, are left out.
        limit: Of a deeper stack so many innermost frames.
    """
    if _compiled is not None:
        stacks: dict[int, list[Place]] = _compiled.read_stacks(idents, until, limit)
        return stacks
    collects = _COLLECTS_WHEN_READ and gc.isenabled()
    if collects:
        gc.disable()
    try:
        return _read_plainly(idents, until, limit)
    finally:
        if collects:
            gc.enable()


def compiled_part() -> Any | None:
    """The module that samples by itself (sample_clock.c); None where it was not built."""
    return _compiled


def line_of(place: Place) -> int:
    """The line of an instruction; that of the function where the instruction has none."""
    code, offset = place
    for begin, end, line in code.co_lines():
        if begin <= offset < end:
            return code.co_firstlineno if line is None else line
    return code.co_firstlineno


def frame_lines(stack: Sequence[Place]) -> list[Frame]:
    """File, line and function of each frame, from the outermost to the innermost."""
    return [(p[0].co_filename, line_of(p), p[0].co_name) for p in reversed(stack)]


def _read_plainly(
    idents: Container[int] | None, until: CodeType | None, limit: int
) -> dict[int, list[Place]]:
    stacks = {}
    for ident, innermost in sys._current_frames().items():
        if idents is not None and ident not in idents:
            continue
        stack: list[Place] = []
        frame: FrameType | None = innermost
        while frame is not None and len(stack) < limit and frame.f_code is not until:
            stack.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        stacks[ident] = stack
    return stacks
