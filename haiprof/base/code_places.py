"""Frames of Python stacks: whose code one is, the user's or a library's; how it is written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from haiprof.base.units import visible

Frame = tuple[str, int, str]  # file, line, function
Stack = tuple[Frame, ...]  # from the outermost to the innermost frame
_LIBRARY = re.compile(
    r"[/\\](?:(?:site|dist)-packages|torchinductor[^/\\]*|lib(?:64)?[/\\]python\d[^/\\]*)[/\\]"
)
_TYPED = ("<string>", "<stdin>")
"""Code of `python -c` and of a prompt is the user's; dataclasses write dunder methods there."""
_INSTALLED = re.compile(
    r".*[/\\](?:(?:site|dist)-packages|lib(?:64)?[/\\]python\d[^/\\]*)[/\\](.*)", re.DOTALL
)
_PLACE_LIMIT, _FRAME_LIMIT = 200, 200  # characters of a place, frames of a stack
_HOOK = "/haiprof/in_job/"


def place_text(file: str, line: int | None, function: str) -> str:
    """`train.py:88 load_image`; the names are whatever the run directory or trace holds."""
    name = file.rpartition("/")[2]
    text = f"{name} {function}" if line is None else f"{name}:{line} {function}"
    return visible(" ".join(text[:_PLACE_LIMIT].split()))


def is_library(file: str, function: str = "", *, libraries: Sequence[str] = ()) -> bool:
    """Whether code is of an installed package, of Python itself or made by a library."""
    if file.startswith("<"):
        return file not in _TYPED or function.rpartition(".")[2].startswith("__")
    return bool(_LIBRARY.search(file)) or any(file.startswith(f"{x}/") for x in libraries if x)


def code_name(file: str, function: str) -> str:
    """A library's function as people import it: `PIL.Image.open`, `json.dumps`."""
    if (match := _INSTALLED.match(file)) is None:
        return f"{file.rpartition('/')[2].removesuffix('.py')}.{function}"
    parts = match[1].removesuffix(".py").replace("\\", "/").split("/")
    parts = [part for part in parts if part != "__init__"]
    return ".".join((*parts, function))


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
