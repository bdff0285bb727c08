"""Stacks of many ranks as one tree, and the few ranks that differ from the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from haiprof.run_format.stack_frames import Frame, Stack, parse_frames


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
    """Ranks with the same stack."""

    stack: Stack
    ranks: tuple[int, ...]


def groups(stacks: Mapping[int, Stack]) -> list[Group]:
    """Groups ranks by their stack, the largest group first (as in ByteRobust)."""
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


def py_spy_frames(thread: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Frames of one thread in py-spy's JSON, which may hold anything; the innermost first."""
    frames = thread.get("frames")
    return [f for f in frames if isinstance(f, dict)] if isinstance(frames, list) else []
