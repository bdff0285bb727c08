"""Collectives that contradict each other: ranks at one place of a group do different things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from haiprof.base.units import ranks_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks that are at the same place of a group's sequence with different collectives."""

    group: str
    sequence: int
    what: str
    """`kind`, `element_count` or `dtype`."""
    values: Mapping[str, tuple[int, ...]]
    """Ranks by value."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks with another value than the most common one; all of them where there is a tie."""
        ordered = sorted(self.values.items(), key=lambda item: -len(item[1]))
        tie = len(ordered) > 1 and len(ordered[0][1]) == len(ordered[1][1])
        odd = [rank for _, ranks in ordered[0 if tie else 1 :] for rank in ranks]
        return tuple(sorted(odd))

    def as_text(self) -> str:
        """For people."""
        said = ", ".join(f"{ranks_text(ranks)} {value}" for value, ranks in self.values.items())
        return f"collective {self.sequence} of group {self.group}: {said} ({self.what} differs)"


_SIZED = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "allreduce")
"""Kinds whose ranks all bring the same number of elements."""


def find_mismatches(collectives: pl.DataFrame) -> list[Mismatch]:
    """The first place of each group at which the ranks' collectives contradict each other.

    Source: matching by sequence number, then kind, size and type, as in torch's Flight Recorder
    analyzer (torch.distributed.flight_recorder.components).
    """
    found = []
    rows = _with_members(collectives.filter(~pl.col("p2p")))
    for (group,), part in rows.group_by("group", maintain_order=True):
        for what in ("kind", "element_count", "dtype"):
            of_interest = part.drop_nulls(what)  # a scatter has inputs on its root alone
            if what == "element_count":
                of_interest = of_interest.filter(pl.col("kind").is_in(_SIZED))
            differing = (
                of_interest.group_by("sequence", "member")
                .agg(pl.col(what).n_unique().alias("values"))
                .filter(pl.col("values") > 1)
                .sort("sequence", "member")
            )
            if not differing.height:
                continue
            at = of_interest.join(differing.head(1), on=["sequence", "member"], how="semi")
            values: dict[str, list[int]] = {}
            for rank, value in at.select("rank", what).rows():
                values.setdefault(str(value), []).append(rank)
            found.append(
                Mismatch(
                    group=str(group),
                    sequence=int(at["sequence"][0]),
                    what=what,
                    values={value: tuple(sorted(ranks)) for value, ranks in values.items()},
                )
            )
            break
    return found


def _with_members(rows: pl.DataFrame) -> pl.DataFrame:
    """With `member`: the place of a collective among those of its rank with one sequence number.

    Collectives that NCCL runs as one (coalesced ones, an all_gather of uneven tensors) share a
    number. Where a rank's ring begins within them their places are not known: left out.
    """
    own = ["rank", "group"]
    rows = rows.with_columns(
        pl.int_range(pl.len()).over(*own, "sequence").alias("member"),
        pl.len().over(*own, "sequence").alias("member_count"),
        (pl.col("sequence") == pl.col("sequence").min().over(own)).alias("oldest"),
    )
    cut = pl.col("oldest") & (pl.col("sequence") > 1)
    unknown = cut.any() & (pl.col("member_count") > 1).any()
    return rows.filter(~unknown.over("group", "sequence"))
