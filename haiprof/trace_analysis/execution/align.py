"""Longest common subsequence of two sequences of names, in bounded time."""

from __future__ import annotations

import numpy as np

from haiprof.base.arrays import Ints

DIFFERENCE_LIMIT = 500
"""Maximum number of names in only one of the sequences; beyond, they are different programs."""


def align_names(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Positions of the names in the longest common subsequence.

    Source: Myers, An O(ND) Difference Algorithm and Its Variations, 1986: the greedy one.
    """
    head = _common(first, second)
    tail = _common(first[head:][::-1], second[head:][::-1])
    inner = _match(
        first[head : len(first) - tail].tolist(), second[head : len(second) - tail].tolist()
    )
    left, right = np.array(inner, dtype=np.int64).reshape(-1, 2).T
    begin, end = np.arange(head), np.arange(tail, 0, -1)
    return (
        np.concatenate([begin, left + head, len(first) - end]),
        np.concatenate([begin, right + head, len(second) - end]),
    )


def _common(first: Ints, second: Ints) -> int:
    """Length of the common beginning."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _match(first: list[int], second: list[int]) -> list[tuple[int, int]]:
    """Pairs of places, by the furthest reaching paths."""
    steps = _paths(first, second)
    if steps is None:
        return []
    pairs: list[tuple[int, int]] = []
    at, other = len(first), len(second)
    for depth in range(len(steps) - 1, -1, -1):
        before, diagonal = steps[depth], at - other
        down = diagonal == -depth or (
            diagonal != depth and before.get(diagonal - 1, -1) < before.get(diagonal + 1, -1)
        )
        last = diagonal + 1 if down else diagonal - 1
        start = before.get(last, 0) if depth else 0
        stop = start - last if depth else 0
        while at > start and other > stop and first[at - 1] == second[other - 1]:
            at, other = at - 1, other - 1
            pairs.append((at, other))
        at, other = start, stop
    return pairs[::-1]


def _paths(first: list[int], second: list[int]) -> list[dict[int, int]] | None:
    """How far each diagonal reaches at each number of differences; None beyond the limit."""
    reach, steps, sizes = {1: 0}, [], (len(first), len(second))
    for depth in range(min(sum(sizes), DIFFERENCE_LIMIT) + 1):
        steps.append({at: value for at, value in reach.items() if abs(at) <= depth})
        for diagonal in range(-depth, depth + 1, 2):
            down = diagonal == -depth or (
                diagonal != depth and reach[diagonal - 1] < reach[diagonal + 1]
            )
            at = reach[diagonal + 1] if down else reach[diagonal - 1] + 1
            other = at - diagonal
            while at < sizes[0] and other < sizes[1] and first[at] == second[other]:
                at, other = at + 1, other + 1
            reach[diagonal] = at
            if at >= sizes[0] and other >= sizes[1]:
                return steps
    return None
