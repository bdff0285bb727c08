"""Time in a rank's other process groups: lateness that a rank has from others and passes on.

In a job of several kinds of parallelism a slow rank holds up its tensor-parallel group, all of
which then come late to their data-parallel groups: only the first of these is its own lateness.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import covered_lengths, union

_GROUP = ("process_group", "group_ranks")


def with_time_elsewhere(kernels: pl.DataFrame) -> pl.DataFrame:
    """How long each rank was in communication of its other groups before a collective.

    The same with `elsewhere_ns`: from the end of the rank's last collective of the same group
    (of the first: from its first collective of all) to the beginning of this one, the time in
    kernels of other groups, waiting included. 0 where a rank has one group.
    """
    texts = (pl.col(name).fill_null("") for name in _GROUP)
    group = pl.concat_str(*texts, separator="|").rank("dense").cast(pl.Int64)
    placed = kernels.with_columns(group=group).with_row_index("place")
    found = np.zeros(len(kernels), dtype=np.int64)
    for own in placed.sort("start_ns").partition_by("rank"):
        if own["group"].n_unique() > 1:
            found[own["place"].to_numpy()] = _elsewhere(own)
    return kernels.with_columns(pl.Series("elsewhere_ns", found, dtype=pl.Int64))


def _elsewhere(own: pl.DataFrame) -> Ints:
    """Of one rank's kernels by start."""
    starts, ends = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
    groups = own["group"].to_numpy()
    found = np.zeros(len(own), dtype=np.int64)
    for group in np.unique(groups):
        mine = groups == group
        others = union(starts[~mine], ends[~mine])
        left = np.append(starts[0], np.maximum.accumulate(ends[mine])[:-1])
        found[mine] = covered_lengths(others, np.minimum(left, starts[mine]), starts[mine])
    return found


def with_passed_on(arrivals: pl.DataFrame) -> pl.DataFrame:
    """With `passed_on`: how much longer than the others' each rank's time elsewhere was."""
    found = above_others(arrivals, "elsewhere_ns", "passed_on")
    return found.with_columns(pl.col("passed_on").clip(0))


def above_others(arrivals: pl.DataFrame, column: str, name: str) -> pl.DataFrame:
    """With a value of each rank less the median of the other ranks' in the same collective."""
    values = pl.col(column).sort().over("collective", mapping_strategy="join")
    place = pl.col(column).rank("ordinal").over("collective").cast(pl.Int64) - 1
    others = pl.len().over("collective").cast(pl.Int64) - 1
    placed = arrivals.with_columns(values=values, place=place, others=others)
    for end, middle in (("lower", (pl.col("others") - 1) // 2), ("upper", pl.col("others") // 2)):
        placed = placed.with_columns(at=middle)
        kept = pl.col("at") + (pl.col("place") <= pl.col("at")).cast(pl.Int64)  # not its own
        placed = placed.with_columns(pl.col("values").list.get(kept, null_on_oob=True).alias(end))
    apart = ((pl.col(column) - pl.col("lower")) + (pl.col(column) - pl.col("upper"))) / 2
    return placed.with_columns(apart.alias(name)).drop(
        "values", "place", "others", "at", "lower", "upper"
    )
