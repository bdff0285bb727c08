"""The order of proofs: CI begins as many as it has time for, and others after each landing."""

from __future__ import annotations

import subprocess
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import pytest

Item = TypeVar("Item")


def order_proofs(
    items: Sequence[Item], ranks: Sequence[int], files: Sequence[Hashable], *, commit: str
) -> list[Item]:
    """The proofs of the first rank, then those of the next, each beginning where the commit says.

    With a fixed order the last ones would never run where time is short. Tests of one file stay
    together and in their order: some end the job that those before them share.
    """
    found: list[Item] = []
    for rank in sorted(set(ranks)):
        own = [(file, item) for item, r, file in zip(items, ranks, files, strict=True) if r == rank]
        blocks = [
            [item for _, item in block] for _, block in groupby(own, key=lambda pair: pair[0])
        ]
        start = int(commit or "0", 16) % len(blocks)
        found += [item for block in blocks[start:] + blocks[:start] for item in block]
    return found


def mark_and_rank(items: Iterable[pytest.Item]) -> list[int]:
    """Ranks of tests; those that try a sample of their cases become proofs too, with all of them.

    Whole tests come first, then variants of what scripts/test runs and what is marked
    `proof("exhaustive")`, then samples tried in full.
    """
    ranks = []
    for item in items:
        function = getattr(item, "obj", None)
        marks = [m for m in getattr(function, "pytestmark", []) if m.name == "proof"]
        rank = 1 if not marks or "exhaustive" in marks[0].args else 0
        if getattr(function, "is_hypothesis_test", False) or item.get_closest_marker("sampled"):
            item.add_marker("proof")
            rank = 2
        ranks.append(rank)
    return ranks


def this_commit() -> str:
    """The name of the commit that is checked out, or "" where git does not know."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if not done.returncode else ""
