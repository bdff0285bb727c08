"""The stacks that were seen: each is its caller's stack and one frame, and has a number."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

from haiprof.in_job.frames import Place, line_of
from haiprof.run_format.stack_lines import LEFT_OUT

MAX_DEPTH = 256
"""Of a deeper stack (a recursion) the innermost frames count."""
MAX_STACKS = 8192
MAX_PLACES = 32_768
"""Instructions at which frames were seen, per stack: what is looked up at each sample."""
_CODE_BITS = 48

_OWN_FOLDER = __file__.rpartition("/in_job/")[0] + "/"


class _Node:
    """One stack: which stacks it leads to, by the code and the instruction of the next frame."""

    __slots__ = ("by_frame", "number", "places")

    def __init__(self, number: int) -> None:
        self.number = number
        self.places: dict[int, _Node] = {}
        self.by_frame: dict[int, _Node] = {}


class StackTree:
    """Numbers for stacks; a stack that was seen before costs one dictionary look-up per frame.

    Code objects are held, so that the identity of one is never that of another; they are bounded.
    """

    def __init__(self) -> None:
        self._root = _Node(0)
        self._left_out = _Node(LEFT_OUT)
        self._codes: dict[int, CodeType] = {}
        self._frames: dict[tuple[str, int, str], int] = {}
        self._place_count = 0
        self._stack_count = 0
        self._new_frames: list[tuple[str, int, str, int]] = []
        self._new_stacks: list[tuple[int, int]] = []
        self._taken_frames = 0
        self._taken_stacks = 0

    def find(self, stack: Sequence[Place]) -> int:
        """The number of a stack, given from its innermost frame on."""
        node = self._root
        for place in reversed(stack):
            code, offset = place
            key = id(code) | offset << _CODE_BITS
            found = node.places.get(key)
            node = self._add(node, key, place) if found is None else found
        return node.number

    def take_definitions(self) -> dict[str, Any]:
        """Frames and stacks that are new since the last time, as a line holds them.

        It may be called while another thread finds stacks: a stack is new after its frame.
        """
        stacks, frames = take_all(self._new_stacks), take_all(self._new_frames)
        if not frames and not stacks:
            return {}
        first_frame, first_stack = self._taken_frames, self._taken_stacks + 1
        self._taken_frames += len(frames)
        self._taken_stacks += len(stacks)
        return {
            "first_frame": first_frame,
            "frames": frames,
            "first_stack": first_stack,
            "stacks": stacks,
        }

    def _add(self, node: _Node, key: int, place: Place) -> _Node:
        """The stack behind an instruction that was not seen there before."""
        if node is self._left_out or self._place_count >= MAX_PLACES:
            return self._left_out
        code, _ = place
        if code.co_filename.startswith(_OWN_FOLDER):
            found = node  # haiprof's own frame is passed over: what it calls is the job's
        else:
            found = self._add_stack(node, code, line_of(place))
        if found is not self._left_out:
            self._codes[id(code)] = code
            self._place_count += 1
            node.places[key] = found
        return found

    def _add_stack(self, node: _Node, code: CodeType, line: int) -> _Node:
        """The stack of one more frame: one that has its number already, while there is room."""
        name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
        key = (code.co_filename, line, name)
        number = self._frames.get(key, len(self._frames))
        found = node.by_frame.get(number)
        if found is not None:
            return found
        if self._stack_count >= MAX_STACKS:
            return self._left_out
        if number == len(self._frames):
            self._frames[key] = number
            self._new_frames.append((*key, code.co_firstlineno))
        self._stack_count += 1
        found = node.by_frame[number] = _Node(self._stack_count)
        self._new_stacks.append((node.number, number))
        return found


def take_all(items: list[Any]) -> list[Any]:
    """Takes out what is there now; what another thread appends meanwhile stays."""
    count = len(items)
    taken = items[:count]
    del items[:count]
    return taken
