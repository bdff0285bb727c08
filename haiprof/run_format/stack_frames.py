"""Frames of Python stacks: which one is the user's own code, and how it is written for people."""

from __future__ import annotations

from collections.abc import Sequence

from haiprof.base.code_places import is_library

Frame = tuple[str, int, str]  # file, line, function
Stack = tuple[Frame, ...]  # from the outermost to the innermost frame
_FRAME_LIMIT = 200
_HOOK = "/haiprof/in_job/"


def own_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code: not of Python's library, nor of a package.

    Where there is none, the innermost of all.
    """
    return job_frame(stack) or (stack[-1] if stack else None)


def job_frame(stack: Sequence[Frame]) -> Frame | None:
    """The same; None where there is none."""
    own = [f for f in stack if not is_library(f[0], f[2]) and _HOOK not in f[0]]
    return own[-1] if own else None


def frame_text(frame: Frame) -> str:
    """`train.py:42 in step`."""
    return f"{frame[0].rpartition('/')[2]}:{frame[1]} in {frame[2]}"


def stack_text(stack: Sequence[Frame]) -> str:
    """The user's own line, and the innermost one where that is another."""
    own, last = own_frame(stack), stack[-1]
    return frame_text(last) if own in (None, last) else f"{frame_text(own)} → {frame_text(last)}"


def parse_frames(frames: object) -> Stack | None:
    """Frames from JSON that may hold anything, the outermost first; None if they are none.

    Frames of haiprof's hook that called something else are left out: the job called it.
    """
    if not isinstance(frames, list):
        return None
    found = []
    for frame in frames[:_FRAME_LIMIT]:
        if not isinstance(frame, list) or len(frame) != 3:
            return None
        file, line, function = frame
        if not isinstance(file, str) or type(line) is not int or not isinstance(function, str):
            return None
        found.append((file, line, function))
    return tuple(f for at, f in enumerate(found, 1) if _HOOK not in f[0] or at == len(found))
