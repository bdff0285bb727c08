"""Types of the C extension `haiprof.in_job._frames`, built from frames.c where it can be."""

from collections.abc import Container
from types import CodeType

VERSION: int

def read_stacks(
    idents: Container[int] | None, until: CodeType | None, limit: int, /
) -> dict[int, list[tuple[CodeType, int]]]: ...
def sample_into(
    samples: list[tuple[int, int, int, list[tuple[CodeType, int]]]],
    most: int,
    until: CodeType | None,
    limit: int,
    /,
) -> int: ...
