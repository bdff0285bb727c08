"""The stacks of this process's threads, read without holding a frame or letting one end meanwhile.

frames.c says what would happen otherwise. Plain Python does the same where that is safe: not in
CPython 3.11, where making a frame object may start a garbage collection.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import opcode
import os
import sys
import time
import tokenize
from collections.abc import Container, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from haiprof.base.code_places import Frame, is_library
from haiprof.in_job.loops import find_loop
from haiprof.run_format.stack_lines import LEFT_OUT

Place = tuple[CodeType, int]  # where a frame is: its code and its instruction's offset in bytes

MAX_DEPTH = 256  # of a deeper stack (a recursion) the innermost frames count
MAX_STACKS = 8192
MAX_PLACES = 32_768  # instructions at which frames were seen, per stack: looked up at each sample
EXPRESSION_LIMIT = 80
_SOURCE_LIMIT_BYTES = 1 << 20
_SOURCE_COUNT = 64
_LOADED_S = time.time()  # a file that is newer may not be what runs

OWN_FOLDER = __file__.rpartition("/in_job/")[0] + "/"

_VERSION = 7  # of frames.c; one that was built of older text is not used
_MODULE_CONTENT: Any = vars(ModuleType)["__dict__"]
_CLASS_CONTENT: Any = vars(type)["__dict__"]  # without the job's `__getattr__`
_FOR_ITER = bytes([opcode.opmap["FOR_ITER"]])
_RESUME = opcode.opmap.get("RESUME")  # at a function's begin, and behind a `yield`; from 3.11 on
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
    """Stacks of some threads, or of all, the innermost frame first; at most `limit` frames each.

    The frame of the function `until`, and those of its callers, are left out.
    """
    native = None if _compiled is None else _compiled.read_stacks(idents, until, limit)
    stacks: dict[int, list[Place]] = native or {}
    if native is not None:
        return stacks
    collects = _COLLECTS_WHEN_READ and gc.isenabled()
    if collects:
        gc.disable()
    try:
        for ident, innermost in sys._current_frames().items():
            frame: FrameType | None = innermost if idents is None or ident in idents else None
            stack = stacks.setdefault(ident, []) if frame is not None else []
            while frame is not None and len(stack) < limit and frame.f_code is not until:
                stack.append((frame.f_code, frame.f_lasti))
                frame = frame.f_back
        return stacks
    finally:
        if collects:
            gc.enable()


def compiled_part() -> Any | None:
    """The module that samples by itself (sample_clock.c); None where it was not built."""
    return _compiled


def find_codes(wanted: Sequence[tuple[int, int]]) -> list[CodeType]:
    """Code objects with these addresses whose functions the modules with these globals have."""
    # Neither address is followed: what was there may be gone. No code of the job runs.
    if not wanted:  # a walk over all modules takes a millisecond, after a fork several
        return []
    addresses: dict[int, set[int]] = {}
    for address, globals_address in wanted:
        addresses.setdefault(globals_address, set()).add(address)
    found: list[CodeType] = []
    for module in list(sys.modules.values()):
        if not addresses:
            break
        if issubclass(type(module), ModuleType):
            content: dict[str, Any] = _MODULE_CONTENT.__get__(module)
            if id(content) in addresses:
                found += _codes_in(content, addresses.pop(id(content)))
    return found


def _codes_in(content: dict[str, Any], addresses: set[int]) -> list[CodeType]:
    left, seen, found = list(content.values()), set[int](), list[CodeType]()
    while left and len(found) < len(addresses):
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is CodeType:
            if id(value) in addresses:
                found.append(value)
            left += [inner for inner in value.co_consts if type(inner) is CodeType]
        elif type(value) is FunctionType:
            left += [value.__code__] if value.__globals__ is content else []
            left.append(value.__dict__.get("__wrapped__"))
        elif type(value) in (staticmethod, classmethod):
            left.append(value.__func__)
        elif type(value) is property:
            left.append(value.fget)
        elif issubclass(type(value), type):
            members = _CLASS_CONTENT.__get__(value)
            if members.get("__module__") == content.get("__name__"):
                left += list(members.values())
    return found


def line_of(place: Place) -> int:
    """The line of an instruction; where it has none, of the one before it in the code."""
    # The jump back to a loop's begin has none after an `if`; a thread often gives up the
    # interpreter lock there, and what it ran until then is the end of the loop's body.
    code, offset = place
    known = code.co_firstlineno
    for begin, _, line in code.co_lines():
        if begin > offset:
            break
        known = line or known
    return known


def _is_begin(place: Place) -> bool:
    """Whether a frame was only just entered, or resumed."""
    # A thread notices a request for the interpreter lock there, after calls and at jumps back, and
    # not after an operator (`a @ b`): the next function's begin comes up for it. So do samples
    # whose place was not read beforehand: without the compiled part, and of another thread.
    code, offset = place
    return code.co_code[offset : offset + 1] == bytes(() if _RESUME is None else (_RESUME,))


def frame_lines(stack: Sequence[Place]) -> list[Frame]:
    """File, line and function of each frame, from the outermost to the innermost."""
    return [(p[0].co_filename, line_of(p), p[0].co_name) for p in reversed(stack)]


class StackTree:
    """Numbers for stacks; a stack that was seen before costs one dictionary look-up per frame."""

    def __init__(self, libraries: Sequence[str] = ()) -> None:
        self._libraries = libraries
        self._sources: dict[str, list[bytes]] = {}
        self._places: dict[tuple[int, int, int], int] = {}
        self._codes: dict[int, CodeType] = {}
        self._keys: dict[tuple[int, int], tuple[str, int, str, str, int, int, int]] = {}
        self._loops: dict[str, dict[int, int]] = {}
        self._frames: dict[tuple[str, int, str, str, int, int, int], int] = {}
        self._stacks: dict[tuple[int, int], int] = {}
        self._new_frames: list[tuple[Any, ...]] = []
        self._new_stacks: list[tuple[int, int]] = []
        self._taken_frames = self._taken_stacks = 0

    def find(self, stack: Sequence[Place]) -> int:
        """The number of a stack, given from its innermost frame on."""
        number = 0
        for place in reversed(stack):
            number = self.below(number, place)
        return number

    def below(self, caller: int, place: Place) -> int:
        """The number of the stack of one more frame, which a stack called."""
        # Code objects are held, so that the identity of one is never that of another; they are
        # bounded. Expressions are told of the user's own code alone: of none in the folders
        # `libraries`.
        code, offset = place
        key = (caller, id(code), offset)
        found = self._places.get(key)
        if found is None:
            found = self._add(caller, place)
            if found != LEFT_OUT:
                self._codes[id(code)] = code
                self._places[key] = found
        return found

    def take_definitions(self) -> dict[str, Any]:
        """Frames and stacks that are new since the last time, as a line holds them."""
        # It may be called while another thread finds stacks: a stack is new after its frame.
        stacks, frames = take_all(self._new_stacks), take_all(self._new_frames)
        if not frames and not stacks:
            return {}
        first_frame, first_stack = self._taken_frames, self._taken_stacks + 1
        self._taken_frames += len(frames)
        self._taken_stacks += len(stacks)
        return {"first_frame": first_frame, "frames": frames, "first_stack": first_stack,
                "stacks": stacks}  # fmt: skip

    def _add(self, caller: int, place: Place) -> int:
        """The stack behind an instruction that was not seen there before, while there is room."""
        if caller == LEFT_OUT or len(self._places) >= MAX_PLACES:
            return LEFT_OUT
        code, _ = place
        if code.co_filename.startswith(OWN_FOLDER):
            return caller  # haiprof's own frame is passed over: what it calls is the job's
        if caller and _is_begin(place):
            return caller  # what took the time was before it, in its caller
        at = id(code), place[1]
        key = self._keys.get(at)
        if key is None:
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            key = (code.co_filename, line_of(place), name, *self._expression(place, name))
        frame = self._frames.get(key, len(self._frames))
        found = self._stacks.get((caller, frame))
        if found is None and len(self._stacks) < MAX_STACKS:
            if frame == len(self._frames):
                self._frames[key] = frame
                count = next((n for n in (7, 6, 5, 4) if key[n - 1]), 3)
                self._new_frames.append((*key[:3], code.co_firstlineno, *key[3:count]))
            found = self._stacks[caller, frame] = len(self._stacks) + 1
            self._new_stacks.append((caller, frame))
        if found is None:
            return LEFT_OUT
        self._keys[at] = key
        return found

    def _expression(self, place: Place, name: str) -> tuple[str, int, int, int]:
        """What an instruction of the user's code works out, as its source has it; else empty."""
        # And which statement of its line that is, from 0 on; the line of the loop around it, and
        # what that is (`haiprof.in_job.loops`).
        code, offset = place
        if not hasattr(code, "co_positions") or is_library(
            code.co_filename, name, libraries=self._libraries
        ):
            return "", 0, 0, 0
        positions = itertools.islice(code.co_positions(), max(offset, 0) // 2, None)
        line, end_line, begin, end = next(positions, (None,) * 4)
        if line is None or end_line is None or begin is None or end is None:
            return "", 0, 0, 0
        source = self._source(code.co_filename)
        lines = source[line - 1 : end_line]
        if not lines:
            return "", 0, 0, 0
        number = _statement(lines[0], begin)
        known = self._loops.setdefault(code.co_filename, {})
        column = end if line == end_line else len(lines[0])
        loop, kind = find_loop(source, line, column, code.co_firstlineno, name, known)
        head = lines[0].lstrip()
        if head.startswith(b"for ") and code.co_code[offset : offset + 1] == _FOR_ITER:
            begin = len(lines[0]) - len(head)  # from CPython 3.13 on it has its items' columns
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][begin:]
        if lines[0].startswith((b"for ", b"async for ")):  # the next round: with all of its body
            lines = [lines[0].rstrip().removesuffix(b":")]
        text = b" ".join(b" ".join(lines).split()).decode(errors="replace")
        if text.isidentifier():
            text = ""  # a name is only fetched or stored; what it is part of takes the time
            number = 0
        cut = f"{text[: EXPRESSION_LIMIT - 1]}…" if len(text) > EXPRESSION_LIMIT else text
        return cut, number, loop, kind

    def _source(self, file: str) -> list[bytes]:
        """The lines of a file in UTF-8, in which columns count; read once. Empty: not known."""
        lines = self._sources.get(file)
        if lines is None and len(self._sources) < _SOURCE_COUNT:
            lines = self._sources[file] = _read_source(file)
        return lines or []


def _statement(line: bytes, column: int) -> int:
    """How many statements of a line end before a column."""
    if b";" not in line:
        return 0
    count = 0
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # the line may be part of one
        for token in tokenize.tokenize(iter([line]).__next__):
            at = len(token.line[: token.start[1]].encode())
            count += token.string == ";" and at < column
    return count


def _read_source(file: str) -> list[bytes]:
    """Not by linecache: what that holds is the job's."""
    try:
        status = os.stat(file)
        if status.st_size > _SOURCE_LIMIT_BYTES or status.st_mtime > _LOADED_S:
            return []
        with tokenize.open(file) as source:
            return [line.encode() for line in source]
    except (OSError, ValueError, SyntaxError):
        return []


def take_all(items: list[Any]) -> list[Any]:
    """Takes out what is there now; what another thread appends meanwhile stays."""
    count = len(items)
    taken = items[:count]
    del items[:count]
    return taken
