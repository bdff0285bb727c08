"""How many of its cases a test tries: a sample of them, or all where proofs are asked for.

`-m proof` takes in every property test, and the tests marked `sampled`, with all their cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")

PROOFS = False
"""Whether all cases are tried; set by conftest.py before any test is imported."""
SHARE = 5


def examples(count: int) -> int:
    """How many examples hypothesis draws, of so many in a proof."""
    return count if PROOFS else max(count // SHARE, 10)


def sample(cases: Iterable[Case], *, every: int = SHARE) -> list[Case]:
    """Every Nth of the cases, the first one always; all of them in a proof."""
    return list(cases)[:: 1 if PROOFS else every]
