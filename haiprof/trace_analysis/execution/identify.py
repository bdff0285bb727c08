"""Identifies the operator of each node of an execution trace: by id, or by order and name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.call_tree import CallTree
from haiprof.trace_analysis.execution.align import align_names

RECORD_FUNCTION_ID, EXTERNAL_ID, ORDER = "record_function_id", "external_id", "order"
"""How a link was made."""
SAME_NAMES_RATIO = 0.9
"""Ids whose names agree less often are not the same ids (pytorch#122833: shifted by a constant;
2023: counted over all threads in one file, per thread in the other)."""
ROUNDING_NS = 1000
"""Traces of before 2024 have whole microseconds: a child may seem to begin before its parent."""
_ROOT = "[pytorch|profiler|"
_NOT_IN_TIMELINE = "## process_group:init ##"
_STEP = "ProfilerStep#"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identified:
    """Links of one process."""

    row: Ints
    """Row of the call tree of each node; -1 where there is none."""
    by: str | None
    """`record_function_id`, `external_id` or `order`; null where nothing could be linked."""
    linkable: npt.NDArray[np.bool_]
    """Nodes that a timeline shows: neither roots nor the observer's note of process groups."""
    outside_count: int
    """Links by id that begin before or after the operator of their parent on the same thread."""
    refused: dict[str, int]
    """Number of pairs with equal ids that were rejected, by reason."""
    notes: tuple[str, ...]
    """Why ids were not used, for people."""


def identify(nodes: pl.DataFrame, tree: CallTree) -> Identified:
    """Links the nodes of an execution trace to the operators of a timeline."""
    linkable = _linkable(nodes)
    notes, refused = [], {}
    for column in (RECORD_FUNCTION_ID, EXTERNAL_ID):
        row, differing = _by_id(nodes, tree, linkable, column)
        found = int(np.count_nonzero(row >= 0))
        if not found + differing:
            continue
        if found >= SAME_NAMES_RATIO * (found + differing):
            refused["other name with the same id"] = differing
            break
        notes.append(
            f"{column}: only {found} of {found + differing} operators with the same id have the "
            "same name, so these ids count something else"
        )
    else:
        column, row = ORDER, _by_order(nodes, tree, linkable)
    outside = _outside_parent(nodes, tree, row)
    if column == ORDER:
        row[outside] = -1
        refused["outside the operator of its parent"] = len(outside)
    return Identified(
        row=row,
        by=column if (row >= 0).any() else None,
        linkable=linkable,
        outside_count=0 if column == ORDER else len(outside),
        refused={reason: count for reason, count in refused.items() if count},
        notes=tuple(notes),
    )


def _linkable(nodes: pl.DataFrame) -> npt.NDArray[np.bool_]:
    name = pl.col("name")
    host = pl.col("category").is_null()
    found: npt.NDArray[np.bool_] = nodes.select(
        host & ~name.str.starts_with(_ROOT) & (name != _NOT_IN_TIMELINE)
    )["category"].to_numpy()
    return found


def _by_id(
    nodes: pl.DataFrame, tree: CallTree, linkable: npt.NDArray[np.bool_], column: str
) -> tuple[Ints, int]:
    """Row of each node with the same id and name, and how many have the same id only."""
    spans = tree.spans.select(pl.col("name").cast(pl.String).alias("span_name"), id=column)
    spans = spans.with_row_index("row").drop_nulls("id").unique("id", keep="none")
    own = nodes.select("name", id="record_function_id").with_row_index("place")
    own = own.filter(pl.Series(linkable), pl.col("id") > 0).unique("id", keep="none")
    pairs = own.join(spans, on="id", how="inner")
    same = pairs.filter(pl.col("name") == pl.col("span_name"))
    row = np.full(len(nodes), -1, dtype=np.int64)
    row[same["place"].to_numpy()] = same["row"].to_numpy()
    return row, len(pairs) - len(same)


def _by_order(nodes: pl.DataFrame, tree: CallTree, linkable: npt.NDArray[np.bool_]) -> Ints:
    """Row of each node, by order and name within threads that call the same names most."""
    texts = pl.concat([nodes["name"], tree.spans["name"].cast(pl.String)]).rank("dense")
    codes = texts.to_numpy().astype(np.int64)
    own, others = codes[: len(nodes)], codes[len(nodes) :]
    steps = tree.spans["name"].cast(pl.String).str.starts_with(_STEP).to_numpy()
    row = np.full(len(nodes), -1, dtype=np.int64)
    threads = _threads(nodes.select("tid"), linkable)
    timelines = _threads(tree.spans.select("pid", "tid"), ~steps | np.isin(others, own))
    for one, unordered in _pair_threads(threads, timelines, own, others):
        other = _begin_order(unordered, tree)
        left, right = align_names(own[one], others[other])
        row[one[left]] = other[right]
    return row


def _threads(frame: pl.DataFrame, wanted: npt.NDArray[np.bool_]) -> list[Ints]:
    """Places of each thread's rows, in their order."""
    rows = frame.with_row_index("place").filter(pl.Series(wanted, dtype=pl.Boolean))
    groups = rows.group_by(frame.columns, maintain_order=True).agg("place")["place"]
    return [places.to_numpy().astype(np.int64) for places in groups]


def _begin_order(rows: Ints, tree: CallTree) -> Ints:
    """Rows of a thread as they began: by external id, which counts, where times do not object.

    Whole microseconds leave the order of what began at the same time open.
    """
    ids = tree.spans["external_id"][rows]
    if ids.null_count():
        return rows
    counted: Ints = rows[np.argsort(ids.to_numpy(), kind="stable")]
    return counted if (np.diff(tree.starts[counted]) >= -ROUNDING_NS).all() else rows


def _pair_threads(
    threads: list[Ints], timelines: list[Ints], own: Ints, others: Ints
) -> list[tuple[Ints, Ints]]:
    """Threads of both, by how many calls of the same names they have: most first."""
    size = int(max(own.max(initial=0), others.max(initial=0))) + 1
    shared = [
        (int(np.minimum(np.bincount(own[one], minlength=size),
                        np.bincount(others[other], minlength=size)).sum()), at, place)
        for at, one in enumerate(threads) for place, other in enumerate(timelines)
    ]  # fmt: skip
    found, used, taken = [], set(), set()
    for count, at, place in sorted(shared, key=lambda each: -each[0]):
        if count and at not in used and place not in taken:
            used.add(at)
            taken.add(place)
            found.append((threads[at], timelines[place]))
    return found


def _outside_parent(nodes: pl.DataFrame, tree: CallTree, row: Ints) -> Ints:
    """Places of linked nodes that begin outside of their parent's operator on the same thread."""
    above = _row_of_parent(nodes, row)
    at = np.flatnonzero((above >= 0) & (row >= 0))
    thread = tree.spans.select(pl.struct("pid", "tid").rle_id()).to_series().to_numpy()
    inner, outer = row[at], above[at]
    begun = tree.starts[inner] >= tree.starts[outer] - ROUNDING_NS
    running = tree.starts[inner] <= tree.ends[outer] + ROUNDING_NS
    found: Ints = at[(thread[inner] == thread[outer]) & ~(begun & running)]
    return found


def _row_of_parent(nodes: pl.DataFrame, row: Ints) -> Ints:
    """Row of the tree of each node's parent; -1 where it has none or that has none."""
    if nodes.is_empty():
        return row
    numbers, parent = nodes["node"].to_numpy(), nodes["parent"].fill_null(-1).to_numpy()
    place = np.searchsorted(numbers, parent).clip(0, len(numbers) - 1)
    found: Ints = np.where(numbers[place] == parent, row[place], -1)
    return found
