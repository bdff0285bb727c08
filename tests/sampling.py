"""How many of its cases a test tries: a sample of them, or all where proofs are asked for.

`-m proof` takes in every property test, and the tests marked `sampled`, with all their cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")

PROOFS = False
"""Whether all cases are tried; set by conftest.py before any test is imported."""
SHARE = 5


def first_of(cases: Iterable[Case], *chosen: Case) -> list[object]:
    """Parameters; those that were not chosen are proofs: variants of what the chosen ones show."""
    return [
        case if case in chosen else pytest.param(case, marks=pytest.mark.proof) for case in cases
    ]


def variants(*cases: tuple[object, ...]) -> list[object]:
    """Parameters that are proofs: variants of what stands before them."""
    return [pytest.param(*case, marks=pytest.mark.proof) for case in cases]


def examples(count: int) -> int:
    """How many examples hypothesis draws, of so many in a proof."""
    return count if PROOFS else max(count // SHARE, 10)


def sample(cases: Iterable[Case], *, every: int = SHARE) -> list[Case]:
    """Every Nth of the cases, the first one always; all of them in a proof."""
    return list(cases)[:: 1 if PROOFS else every]
