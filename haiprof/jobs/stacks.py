"""Stacks of many ranks as one tree, and the few ranks that do something else than the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Frame = tuple[str, int, str]
"""File, line, function."""
Stack = tuple[Frame, ...]
"""From the outermost to the innermost frame."""
_FRAME_LIMIT = 200


@dataclass(slots=True)
class Node:
    """A frame, and the ranks that are in it."""

    frame: Frame | None
    ranks: list[int] = field(default_factory=list)
    children: dict[Frame, Node] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The tree as plain JSON values."""
        return {
            "frame": None if self.frame is None else list(self.frame),
            "ranks": self.ranks,
            "children": [child.as_json() for child in self.children.values()],
        }


def merge(stacks: Mapping[int, Stack]) -> Node:
    """The prefix tree of the stacks, as in STAT (Arnold et al., IPDPS 2007)."""
    root = Node(None)
    for rank, stack in sorted(stacks.items()):
        node = root
        node.ranks.append(rank)
        for frame in stack:
            node = node.children.setdefault(frame, Node(frame))
            node.ranks.append(rank)
    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that do the same."""

    stack: Stack
    ranks: tuple[int, ...]


def groups(stacks: Mapping[int, Stack]) -> list[Group]:
    """Ranks by what they do, the largest group first (ByteRobust groups ranks in this way)."""
    found: dict[Stack, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        found.setdefault(stack, []).append(rank)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[1]))
    return [Group(stack=stack, ranks=tuple(ranks)) for stack, ranks in ordered]


def odd_ranks(stacks: Mapping[int, Stack]) -> tuple[int, ...]:
    """Ranks outside the group that holds more than half of them; none where no group does."""
    found = groups(stacks)
    if not found or 2 * len(found[0].ranks) <= len(stacks):
        return ()
    return tuple(sorted(rank for group in found[1:] for rank in group.ranks))


def main_stack(threads: Sequence[Any]) -> Stack | None:
    """The main thread's stack from a rank's reply, which may hold anything."""
    for thread in threads:
        if isinstance(thread, dict) and thread.get("main") is True:
            return parse_frames(thread.get("frames"))
    return None


def parse_frames(frames: object) -> Stack | None:
    """Frames from JSON that may hold anything; null if they are none."""
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
    return tuple(found)


def own_frame(stack: Stack) -> Frame | None:
    """The innermost frame of the user's own code: not of Python's library, nor of a package."""
    own = [f for f in stack if "site-packages" not in f[0] and "/lib/python" not in f[0]]
    own = [f for f in own if not f[0].startswith("<")]
    return own[-1] if own else (stack[-1] if stack else None)


def frame_text(frame: Frame) -> str:
    """`train.py:42 in step`."""
    return f"{frame[0].rpartition('/')[2]}:{frame[1]} in {frame[2]}"
