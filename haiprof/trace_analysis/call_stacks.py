"""Call stacks as numbers: calls of the same name with the same callers have one stack."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints

_ROUNDS = 64  # of doubling: more callers than a trace can hold events


class Stacks(NamedTuple):
    """Distinct call stacks; callers come before callees."""

    of_call: Ints
    """Stack of each call, shape (calls,)."""
    caller: Ints
    """Stack without its last call, -1 for a root; shape (stacks,)."""
    name: Ints
    """Code of the last call's name, shape (stacks,)."""
    thread: Ints
    """Code of the thread, shape (stacks,): stacks of two threads are not the same."""
    level_starts: list[int]
    """Where each depth begins among the stacks; the last entry is their number."""


def levels(parent: Ints) -> list[Ints] | None:
    """Rows by their depth, the roots first.

    None if a row is its own caller in the end.
    """
    depth, above = (parent >= 0).astype(np.int64), parent.copy()
    active = np.flatnonzero(above >= 0)
    for _ in range(_ROUNDS):  # pointer jumping: the distance to the ancestor doubles
        if not len(active):
            break
        more, higher = depth[above[active]], above[above[active]]
        depth[active] += more
        above[active] = higher
        active = active[higher >= 0]
    else:
        return None
    order = np.argsort(depth, kind="stable")
    counts = np.bincount(depth) if len(depth) else np.zeros(0, dtype=np.int64)
    return np.split(order, np.cumsum(counts)[:-1]) if len(depth) else []


def stacks(by_level: list[Ints], parent: Ints, names: Ints, threads: Ints) -> Stacks:
    """Numbers the distinct stacks, level by level."""
    of_call = np.full(len(parent), -1, dtype=np.int64)
    count = int(names.max(initial=0)) + 1
    nothing = np.zeros(0, dtype=np.int64)
    callers, last, on, starts = [nothing], [nothing], [nothing], [0]
    for depth, rows in enumerate(by_level):
        before = of_call[parent[rows]] if depth else threads[rows]
        keys, place = np.unique(before * count + names[rows], return_inverse=True)
        of_call[rows] = starts[-1] + place
        above = keys // count
        callers.append(above if depth else np.full(len(keys), -1, dtype=np.int64))
        on.append(np.concatenate(on)[above] if depth else above)
        last.append(keys % count)
        starts.append(starts[-1] + len(keys))
    return Stacks(
        of_call, np.concatenate(callers), np.concatenate(last), np.concatenate(on), starts
    )


def uncovered_starts(starts: Ints, ends: Ints, parent: Ints) -> Ints:
    """The start of each call's uncovered time: if calls of one caller overlap, it counts once."""
    rows = pl.DataFrame({"parent": parent, "start": starts, "end": ends})
    reached = pl.col("end").cum_max().shift(1).over("parent")
    begin = pl.min_horizontal(pl.max_horizontal("start", reached), "end")
    found: Ints = rows.select(begin).to_series().to_numpy()
    return found


def is_outermost(found: Stacks) -> npt.NDArray[np.bool_]:
    """Whether no caller in a stack has the name of its last call; shape (stacks,)."""
    outermost = np.ones(len(found.name), dtype=bool)
    above = found.caller.copy()
    active = np.flatnonzero(above >= 0)
    while len(active):
        outermost[active[found.name[above[active]] == found.name[active]]] = False
        above[active] = found.caller[above[active]]
        active = active[(above[active] >= 0) & outermost[active]]
    return outermost


def stack_texts(found: Stacks, names: pl.Series) -> pl.Series:
    """Each stack as `root;...;leaf`; a semicolon inside a name becomes a comma."""
    plain = names.str.replace_all(";", ",", literal=True)
    own = plain.gather(pl.Series(found.name, dtype=pl.UInt32))
    texts = pl.Series("stack", [], dtype=pl.String)
    parts: list[pl.Series] = []
    for start, end in zip(found.level_starts[:-1], found.level_starts[1:], strict=True):
        level = own[start:end]
        if start:
            above = found.caller[start:end] - found.level_starts[len(parts) - 1]
            level = parts[-1].gather(pl.Series(above, dtype=pl.UInt32)) + ";" + level
        parts.append(level.alias("stack"))
    return pl.concat([texts, *parts])
