"""Execution traces paired and joined with timelines: times, GPU work and waits of each node."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError, UsageError
from haiprof.base.intervals import Bools, Ints
from haiprof.run_format.layout import (
    ET_RAW_SUFFIX,
    ET_SUFFIX,
    PLAIN_TRACE_SUFFIX,
    RAW_SUFFIX,
    TRACE_SUFFIX,
)
from haiprof.trace_analysis import dependencies
from haiprof.trace_analysis.attribution import with_operator
from haiprof.trace_analysis.call_tree import CallTree, nest, own_ns, take, thread_numbers
from haiprof.trace_format.execution import (
    NODE_SCHEMA,
    ExecutionTrace,
    load_execution_trace,
    write_linked,
)
from haiprof.trace_format.find import TRACE_ENDINGS, rank_in_name, window_files
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import BLOCKING

_LAST_NUMBER = re.compile(r"(\d{1,6})(?=\D*$)")
_ENDINGS = (ET_SUFFIX, ET_RAW_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One rank's timeline and its execution trace."""

    rank: int
    trace: Trace
    execution: ExecutionTrace


def pairs(
    source: Path, execution: Path | None = None, *, window: int | None = None,
    rank: int | None = None,
) -> tuple[list[Pair], list[str]]:  # fmt: skip
    """Timelines with their execution traces, by rank, and what has no partner, for people."""
    traces = [Trace(path) for path in window_files(source, window)]
    found = execution_files(execution or source)
    if not found:
        raise MissingDataError(
            f"{execution or source}: no execution trace in it",
            hint="record one with haiprof --execution-trace, or name it: --et FILE_OR_DIR",
        )
    alone_both = len(traces) == 1 and len(found) == 1
    matched = {0: found[0]} if alone_both else _pair_by_key(traces, found)
    ranks = {at: at if (said := traces[at].rank) is None else said for at in matched}
    made = [Pair(rank=ranks[at], trace=traces[at], execution=load_execution_trace(path))
            for at, path in matched.items() if rank in (None, ranks[at])]  # fmt: skip
    alone = [f"{trace.path}: no execution trace of its rank" for at, trace in enumerate(traces)
             if at not in matched]  # fmt: skip
    if not made:
        raise MissingDataError(
            f"{source}: no execution trace of rank {rank}; "
            f"there are those of {', '.join(map(str, sorted(ranks.values())))}"
        )
    return sorted(made, key=lambda pair: pair.rank), alone


def execution_files(source: Path) -> list[Path]:
    """The execution traces that a path means: of a folder those that end so, else all JSON."""
    if source.is_file() and not source.name.endswith(_ENDINGS):
        scripts = [source.with_name(_stem(source.name) + ending) for ending in _ENDINGS]
        there = [path for path in scripts if path.is_file()]
        return there[:1] or ([source] if _has_nodes(source) else [])
    if source.is_file():
        return [source]
    folder = source / "traces" if (source / "traces").is_dir() else source
    if not folder.is_dir():
        raise TraceFormatError(f"{source}: no such file or folder")
    paths = sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_file())
    named = [path for path in paths if path.name.endswith(_ENDINGS)]
    return named or [path for path in paths
                     if path.name.endswith(TRACE_ENDINGS) and _has_nodes(path)]  # fmt: skip


def _has_nodes(path: Path) -> bool:
    """Whether a file is an execution trace, by its content."""
    try:
        load_execution_trace(path)
    except TraceFormatError:
        return False
    return True


def _stem(name: str) -> str:
    """Name of a window's files without what says which of them it is."""
    for ending in (*_ENDINGS, TRACE_SUFFIX, PLAIN_TRACE_SUFFIX, RAW_SUFFIX, *TRACE_ENDINGS):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


_Sign = tuple[Callable[[Trace], object], Callable[[Path], object]]


def _pair_by_key(traces: Sequence[Trace], found: Sequence[Path]) -> dict[int, Path]:
    """Execution traces by index of their timeline: matched by the first key that is unique."""
    signs: tuple[_Sign, ...] = (
        (lambda trace: _stem(trace.path.name), lambda path: _stem(path.name)),
        (lambda trace: trace.rank, lambda path: rank_in_name(path.name)),
        (lambda trace: next(iter(trace.ops["pid"].drop_nulls()), None),
         lambda path: load_execution_trace(path).pid),
        (lambda trace: trace.rank,
         lambda path: int(last[1]) if (last := _LAST_NUMBER.search(_stem(path.name))) else None),
    )  # fmt: skip
    for of_trace, of_path in signs:
        places = _unique((of_trace(trace), at) for at, trace in enumerate(traces))
        paths = _unique((of_path(path), path) for path in found)
        both = sorted(places.keys() & paths.keys(), key=str)
        if both:
            return {places[sign]: paths[sign] for sign in both}
    raise TraceFormatError(
        f"{found[0]} and {len(found) - 1} more: nothing says whose they are",
        hint="name them with their rank, such as rank3.et.json.gz, or link one pair at a time",
    )


def _unique(signed: Iterable[tuple[object, int | Path]]) -> dict[object, Any]:
    """Items by key; empty where a key is missing or ambiguous."""
    items = list(signed)
    found: dict[object, Any] = dict(items)
    return found if len(found) == len(items) and None not in found else {}


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
    """Pairs of places, by the furthest reaching paths; none beyond the limit of differences."""
    # How far each diagonal reaches, and the runs of equal names on the way there, the last first.
    reach: dict[int, tuple[int, Any]] = {1: (0, None)}
    for depth in range(min(len(first) + len(second), DIFFERENCE_LIMIT) + 1):
        for diagonal in range(-depth, depth + 1, 2):
            down = diagonal == -depth or (
                diagonal != depth and reach[diagonal - 1][0] < reach[diagonal + 1][0]
            )
            before, runs = reach[diagonal + 1 if down else diagonal - 1]
            at = begin = before + (not down)
            while (at < len(first) and at - diagonal < len(second)
                   and first[at] == second[at - diagonal]):  # fmt: skip
                at += 1
            runs = (range(begin, at), diagonal, runs) if at > begin else runs
            reach[diagonal] = at, runs
            if at >= len(first) and at - diagonal >= len(second):
                pairs: list[tuple[int, int]] = []
                while runs is not None:
                    places, along, runs = runs
                    pairs += [(place, place - along) for place in reversed(places)]
                return pairs[::-1]
    return []


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


class Identified(NamedTuple):
    """Links of one process."""

    row: Ints  # row of the call tree of each node; -1 where there is none
    by: str | None
    """`record_function_id`, `external_id` or `order`; null where nothing could be linked."""
    linkable: Bools
    """Nodes that a timeline shows: neither roots nor the observer's note of process groups."""
    outside_count: int
    """Links by id that begin before or after the operator of their parent on the same thread."""
    refused: dict[str, int]  # number of pairs with equal ids that were rejected, by reason
    notes: tuple[str, ...]  # why ids were not used, for people


def identify(nodes: pl.DataFrame, tree: CallTree) -> Identified:
    """Links the nodes of an execution trace to the operators of a timeline."""
    name, on_host = pl.col("name"), pl.col("category").is_null()
    shown = on_host & ~name.str.starts_with(_ROOT) & (name != _NOT_IN_TIMELINE)
    linkable: Bools = nodes.select(shown).to_series().to_numpy()
    notes, refused = [], {}
    for column in (RECORD_FUNCTION_ID, EXTERNAL_ID):
        # Row of each node with the same id and name, and how many have the same id only.
        spans = tree.spans.select(pl.col("name").cast(pl.String).alias("span_name"), id=column)
        spans = spans.with_row_index("row").drop_nulls("id").unique("id", keep="none")
        own = nodes.select("name", id="record_function_id").with_row_index("place")
        own = own.filter(pl.Series(linkable), pl.col("id") > 0).unique("id", keep="none")
        both = own.join(spans, on="id", how="inner")
        same = both.filter(pl.col("name") == pl.col("span_name"))
        row = np.full(len(nodes), -1, dtype=np.int64)
        row[same["place"].to_numpy()] = same["row"].to_numpy()
        found, differing = len(same), len(both) - len(same)
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
    # Places of linked nodes that begin outside of their parent's operator on the same thread.
    numbers, parent = nodes["node"].to_numpy(), nodes["parent"].fill_null(-1).to_numpy()
    place = np.searchsorted(numbers, parent).clip(0, max(len(numbers) - 1, 0))
    above = np.where(numbers[place] == parent, row[place], -1)  # the parent's row; -1 for none
    at = np.flatnonzero((above >= 0) & (row >= 0))
    thread, inner, outer = thread_numbers(tree.spans), row[at], above[at]
    begun = tree.starts[inner] >= tree.starts[outer] - ROUNDING_NS
    running = tree.starts[inner] <= tree.ends[outer] + ROUNDING_NS
    outside = at[(thread[inner] == thread[outer]) & ~(begun & running)]
    if column == ORDER:
        row[outside] = -1
        refused["outside the operator of its parent"] = len(outside)
    return Identified(
        row=row, by=column if (row >= 0).any() else None, linkable=linkable,
        outside_count=0 if column == ORDER else len(outside),
        refused={reason: count for reason, count in refused.items() if count}, notes=tuple(notes),
    )  # fmt: skip


def _by_order(nodes: pl.DataFrame, tree: CallTree, linkable: Bools) -> Ints:
    """Row of each node, by order and name within threads that call the same names most."""
    texts = pl.concat([nodes["name"], tree.spans["name"].cast(pl.String)]).rank("dense")
    codes = texts.to_numpy().astype(np.int64)
    own, others = codes[: len(nodes)], codes[len(nodes) :]
    steps = tree.spans["name"].cast(pl.String).str.starts_with(_STEP).to_numpy()
    row = np.full(len(nodes), -1, dtype=np.int64)
    threads = _threads(nodes.select("tid"), linkable)
    timelines = _threads(tree.spans.select("pid", "tid"), ~steps | np.isin(others, own))
    # Threads of both, by how many calls of the same names they have: most first.
    size = int(max(own.max(initial=0), others.max(initial=0))) + 1
    counts, known = ([np.bincount(names[rows], minlength=size) for rows in each]
                     for names, each in ((own, threads), (others, timelines)))  # fmt: skip
    shared = [(int(np.minimum(one, other).sum()), at, place)
              for at, one in enumerate(counts) for place, other in enumerate(known)]  # fmt: skip
    used, taken = set(), set()
    for count, at, place in sorted(shared, key=lambda each: -each[0]):
        if not count or at in used or place in taken:
            continue
        used.add(at)
        taken.add(place)
        one, other = threads[at], timelines[place]
        # In the order of external ids, which count begins, where times do not object.
        ids = tree.spans["external_id"][other]
        if not ids.null_count():
            counted = other[np.argsort(ids.to_numpy(), kind="stable")]
            if (np.diff(tree.starts[counted]) >= -ROUNDING_NS).all():
                other = counted
        left, right = align_names(own[one], others[other])
        row[one[left]] = other[right]
    return row


def _threads(frame: pl.DataFrame, wanted: Bools) -> list[Ints]:
    """Places of each thread's rows, in their order."""
    rows = frame.with_row_index("place").filter(pl.Series(wanted, dtype=pl.Boolean))
    groups = rows.group_by(frame.columns, maintain_order=True).agg("place")["place"]
    return [places.to_numpy().astype(np.int64) for places in groups]


_LISTS = pl.List(pl.Int64)


def thread_dependencies(nodes: pl.DataFrame, tree: CallTree, row: Ints) -> pl.Series:
    """The node of another thread that the first node after a gap in its own thread waited for."""
    linked = np.flatnonzero(row >= 0)
    at = row[linked]
    begun = pl.DataFrame({
        "place": linked, "node": nodes["node"].gather(linked),
        "thread": thread_numbers(tree.spans)[at], "start": tree.starts[at], "end": tree.ends[at],
    }).sort("start", "place")  # fmt: skip
    gap = pl.col("start") - pl.col("end").shift(1).over("thread")
    first = begun.filter(gap.is_null() | (gap > dependencies.LONG_GAP_NS))
    found = np.full(len(nodes), None, dtype=object)
    for key, group in first.group_by("thread"):
        others = begun.filter(pl.col("thread") != key[0])
        at = np.searchsorted(others["start"].to_numpy(), group["start"].to_numpy(), "left") - 1
        for place, before in zip(group["place"].to_list(), at.tolist(), strict=True):
            found[place] = others["node"][before] if before >= 0 else None
    return pl.Series("thread_dependency", found.tolist(), dtype=pl.Int64)


def sync_dependencies(
    trace: Trace, nodes: pl.DataFrame, numbers: pl.DataFrame, tree: CallTree, row: Ints
) -> pl.Series:
    """GPU nodes that a node's thread waited for in a blocking call right before it.

    Source: as Chakra's sync_dep. It takes them from HTA's critical path, which fails with
    today's pandas (chakra#217).
    """
    found: list[list[int]] = [[] for _ in range(len(nodes))]
    gpu = dependencies.device_events(trace)
    if not len(numbers) or not len(gpu.calls.find(BLOCKING)):
        return pl.Series("sync_dependencies", found, dtype=_LISTS)
    # Calls that waited (when they ended), and the GPU event that each waited for.
    parts = [np.empty((0, 2), dtype=np.int64)]
    for why, call, event, _ in dependencies.host_waits(gpu):
        if why in (dependencies.COPY, dependencies.DEVICE, dependencies.STREAM):
            waited = (event >= 0) & (gpu.ends[event] > gpu.calls.starts[call])
            parts.append(np.stack([call, event], axis=1)[waited])
    pairs: Ints = np.concatenate(parts)
    ended = gpu.calls.frame.select("pid", "tid", after=pl.col("ts_ns") + pl.col("dur_ns"))
    waits = ended[pairs[:, 0]].with_columns(event=gpu.frame["event"].gather(pairs[:, 1]))
    held = waits.join(numbers, on="event").sort("after")
    linked = np.flatnonzero(row >= 0)
    begun = tree.spans.select("pid", "tid")[row[linked]].with_columns(
        start=pl.Series(tree.starts[row[linked]]), place=pl.Series(linked)
    ).sort("start", "place")  # fmt: skip
    after = held.join_asof(
        begun, left_on="after", right_on="start", by=["pid", "tid"], strategy="forward",
        check_sortedness=False,
    )  # fmt: skip
    for place, node in after.drop_nulls("place").select("place", "node").unique().iter_rows():
        found[place].append(node)
    return pl.Series("sync_dependencies", [sorted(each) for each in found], dtype=_LISTS)


_SPAN = (
    "event", "name", "pid", "tid", "ts_ns", "dur_ns", "external_id", "record_function_id",
)  # fmt: skip
_EXAMPLES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShare:
    """How much of one rank was linked, and why not the rest."""

    rank: int
    trace: str
    execution_trace: str
    linked_by: str | None
    """`record_function_id`, `external_id` or `order` (of begin, and name, in each thread)."""
    node_count: int
    linkable_count: int
    """Nodes that a timeline shows: neither roots nor the observer's note of process groups."""
    linked_count: int
    linked_ratio: float | None  # of the linkable; null where there is none
    operator_count: int  # operators and record_function ranges of the timeline
    operator_linked_count: int
    operator_linked_ratio: float | None
    kernel_count: int  # GPU events: kernels, copies, sets
    kernel_linked_count: int
    kernel_linked_ratio: float | None  # attributed to a node; null where the GPU was not recorded
    not_linked: dict[str, int]  # reason, and how many nodes, operators or kernels
    nodes_not_linked: dict[str, int]  # names of nodes without an operator, the most frequent first
    operators_not_linked: dict[str, int]  # names of operators without a node
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """One rank's execution trace with times and GPU work."""

    pair: Pair
    nodes: pl.DataFrame
    """`NODE_SCHEMA`, by number: the nodes as they were, and one per GPU event behind them, whose
    parent is the node that launched it."""
    share: LinkShare


def link(pair: Pair) -> Linked:
    """Links one rank's execution trace to its timeline.

    Each node with `ts_ns`, `dur_ns` and `self_ns` of its operator on the trace's clock,
    `linked_by`, and what it waited for; null where it was not linked. GPU events are nodes of
    their own with `category`, `stream`, `device`, `bytes`.

    Source: the fields of Chakra's trace_linker (mlcommons/chakra 1.0.0). It takes an equal id
    for a link whatever the names say, and sorts the whole file once more for each GPU event.
    """
    nodes = pair.execution.nodes.filter(pl.col("category").is_null())
    ranges, operators = pair.trace.host_ranges.select(_SPAN), pair.trace.ops.select(_SPAN)
    tree = nest(pl.concat([ranges, operators]).sort("event"))
    found = identify(nodes, tree)
    spans = tree.spans.with_columns(self_ns=pl.Series(own_ns(tree), dtype=pl.Int64), host_tid="tid")
    timed = nodes.with_columns(
        *(take(spans[name], found.row) for name in ("ts_ns", "dur_ns", "self_ns", "host_tid")),
        linked_by=pl.when(pl.Series(found.row) >= 0).then(pl.lit(found.by, dtype=pl.String)),
    )
    timed = timed.with_columns(thread_dependency=thread_dependencies(timed, tree, found.row))
    gpu, numbers, reasons = _gpu_nodes(pair.trace, timed, tree, found)
    joined = pl.concat([timed, gpu]) if len(gpu) else timed
    joined = joined.with_columns(
        sync_dependencies=sync_dependencies(pair.trace, joined, numbers, tree, found.row)
    )
    return Linked(pair=pair, nodes=joined, share=_share(pair, tree, found, gpu, reasons))


def _gpu_nodes(
    trace: Trace, nodes: pl.DataFrame, tree: CallTree, found: Identified
) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, int]]:
    """GPU events as nodes, by their launch, `event` and `node` of each, and why some are not."""
    owned = with_operator(trace, annotations=True)
    gpu, row = owned.gpu, owned.row
    place_of_row = np.full(len(tree.parent) + 1, -1, dtype=np.int64)
    linked = np.flatnonzero(found.row >= 0)
    place_of_row[found.row[linked]] = linked
    rows = tree.spans.select("event", row=pl.int_range(pl.len(), dtype=pl.Int64))
    same = owned.tree.spans.select("event").join(rows, on="event", maintain_order="left")["row"]
    inside = np.append(same.to_numpy(), -1)[row]
    holder = place_of_row[tree.climb(inside, place_of_row >= 0)]
    launch = gpu["call_ts_ns"].is_not_null().to_numpy()
    reasons = {
        "GPU events whose launch is not in the trace": int(np.sum((row < 0) & ~launch)),
        "GPU events launched outside of operators": int(np.sum((row < 0) & launch)),
        "GPU events of operators that are not linked": int(np.sum((row >= 0) & (holder < 0))),
    }
    kept = np.flatnonzero(holder >= 0)
    ordered = gpu[kept].with_columns(at=pl.Series(holder[kept])).sort("ts_ns", "event")
    # Copies of the nodes that launched, with what the GPU did.
    first = int(nodes["node"].max() or 0) + 1  # type: ignore[arg-type]
    group = pl.coalesce(pl.Series(ordered["process_group"].cast(pl.String)), "process_group")
    copies = nodes[ordered["at"].to_numpy()].with_columns(
        parent=pl.col("node"), node=pl.Series(range(first, first + len(ordered)), dtype=pl.Int64),
        name=ordered["name"].cast(pl.String), category=ordered["category"].cast(pl.String),
        self_ns=ordered["dur_ns"], host_tid=ordered["tid"], linked_by=pl.lit("correlation"),
        process_group=pl.when(group != "").then(group),
        thread_dependency=pl.lit(None, dtype=pl.Int64),
        **{name: ordered[name] for name in ("ts_ns", "dur_ns", "stream", "device", "bytes")},
    )  # fmt: skip
    made = copies.select(pl.col(name).cast(kind) for name, kind in NODE_SCHEMA.items())
    return made, pl.DataFrame([ordered["event"], made["node"]]), reasons


def _share(
    pair: Pair, tree: CallTree, found: Identified, gpu: pl.DataFrame, reasons: dict[str, int]
) -> LinkShare:
    nodes = pair.execution.nodes.filter(pl.col("category").is_null())
    linked = found.row >= 0
    linkable, count = int(found.linkable.sum()), int(linked.sum())
    free = np.setdiff1d(np.arange(len(tree.parent)), found.row)
    kernels = len(gpu) + sum(reasons.values())
    missing = nodes.filter(pl.Series(found.linkable & ~linked, dtype=pl.Boolean))["name"]
    not_linked = {f"nodes: {reason}": number for reason, number in found.refused.items()}
    rest = linkable - count - sum(found.refused.values())
    not_linked |= {f"nodes: not in the timeline by {found.by or 'anything'}": rest}
    not_linked |= {"operators that are not in the execution trace": len(free)} | reasons
    outside = (f"{found.outside_count} linked nodes do not begin within the operator of their "
               "parent: the observer noted another parent",)  # fmt: skip
    return LinkShare(
        rank=pair.rank, trace=str(pair.trace.path), execution_trace=str(pair.execution.path),
        linked_by=found.by, node_count=len(nodes),
        linkable_count=linkable, linked_count=count,
        linked_ratio=count / linkable if linkable else None,
        operator_count=len(tree.parent), operator_linked_count=count,
        operator_linked_ratio=count / len(tree.parent) if len(tree.parent) else None,
        kernel_count=kernels, kernel_linked_count=len(gpu),
        kernel_linked_ratio=len(gpu) / kernels if kernels else None,
        not_linked={reason: number for reason, number in not_linked.items() if number > 0},
        nodes_not_linked=_names(missing),
        operators_not_linked=_names(tree.spans["name"].cast(pl.String)[free]),
        notes=(*pair.execution.report.notes, *pair.trace.report.notes, *found.notes,
               *(outside if found.outside_count else ())),
    )  # fmt: skip


def _names(names: pl.Series) -> dict[str, int]:
    counted = names.alias("name").value_counts().sort(["count", "name"], descending=[True, False])
    return dict(counted.head(_EXAMPLES).iter_rows())


def linked_path(path: Path, rank: int | None) -> Path:
    """The file of one rank."""
    ending = next((ending for ending in reversed(TRACE_ENDINGS) if path.name.endswith(ending)), "")
    if not ending:
        raise UsageError(f"{path}: a joined trace ends in .json or .json.gz")
    if rank is None:
        return path
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


def write_rank(path: Path, linked: Linked) -> None:
    """Writes one rank's joined trace."""
    execution = linked.pair.execution
    header = {"pid": execution.pid, **execution.header, "rank": linked.pair.rank}
    write_linked(path, linked.nodes, header)
