"""Several processes of one rank: restarts one after another, or jobs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import polars as pl

from haiprof.base.units import duration_text

_NAMED = 4
_SIDE_BY_SIDE_RATIO = 0.1


def attempt_notes(steps: pl.DataFrame) -> tuple[str, ...]:
    """What the verdict says where a rank had several processes with steps."""
    if not steps.height or not (steps["attempt"] > 0).any():
        return ()
    spans = steps.group_by("rank", "attempt").agg(
        pl.len(),
        begin=pl.col("start_ns").min(),
        end=(pl.col("start_ns") + pl.col("step_ns")).max(),
    )
    return tuple(_notes(spans.sort("rank", "attempt")))


def _notes(spans: pl.DataFrame) -> Iterator[str]:
    for (rank,), rows in spans.group_by("rank", maintain_order=True):
        if rows.height < 2:
            continue
        counts = _list_attempts(rows["len"].to_list())
        last = rows["attempt"][-1]
        if _side_by_side(rows):
            yield (
                f"{rows.height} processes trained at the same time and none had a rank of its own: "
                f"they are jobs of their own ({counts} steps), and this verdict is of the one that "
                f"began last (ranks/{rank}.{last})"
            )
        else:
            gap = max(0, int(rows["begin"][-1]) - int(rows["end"][-2]))
            yield (
                f"rank {rank} was started {rows.height} times ({counts} steps): the last start is "
                f"judged, {duration_text(gap)} after the step before it"
            )


def _side_by_side(rows: pl.DataFrame) -> bool:
    """Whether two of them overlap by more than a tenth of the shorter one."""
    spans = sorted(zip(rows["begin"].to_list(), rows["end"].to_list(), strict=True))
    return any(
        min(one[1], other[1]) - other[0]
        > _SIDE_BY_SIDE_RATIO * max(min(one[1] - one[0], other[1] - other[0]), 1)
        for one, other in pairwise(spans)
    )


def _list_attempts(counts: Sequence[int]) -> str:
    shown = [f"{count:,}" for count in counts[:_NAMED]]
    more = len(counts) - _NAMED
    shown += [f"{more} more"] if more > 0 else []
    return ", ".join(shown[:-1]) + f" and {shown[-1]}"
