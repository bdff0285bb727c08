"""A rank's execution trace as a Chakra file, or drawn: typed nodes, dependencies, durations."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError, UsageError
from haiprof.base.intervals import Bools, Ints
from haiprof.base.safe_files import whole_file
from haiprof.trace_analysis.call_tree import climb, depths
from haiprof.trace_analysis.collectives import kind_of
from haiprof.trace_analysis.device_time import MEMORY_CATEGORIES
from haiprof.trace_analysis.execution_link import execution_files, link, pairs
from haiprof.trace_format import chakra
from haiprof.trace_format.execution import (
    ATTRIBUTE_NAMES,
    COLUMN_OF_ATTRIBUTE,
    ExecutionTrace,
    integer,
    load_execution_trace,
)
from haiprof.trace_format.find import LINKED_NAME, TRACE_ENDINGS, rank_in_name, trace_files
from haiprof.trace_format.kineto.events import GPU_BACKENDS, HOST_BACKENDS

GROUPS_NOTE = "## process_group:init ##"
_KERNEL = re.compile(r"^(?:void )?(?:nccl|rccl|hccl)|nccl(?:Dev)?Kernel|rcclKernel")
_BACKEND = re.compile(f"^(?:{GPU_BACKENDS}|{HOST_BACKENDS}):")
_TO_DEVICE = re.compile(r"HtoD|Host ?To ?Device|HostToDevice", re.IGNORECASE)
_ANCESTORS = 4  # nccl:all_to_all, record_param_comms, c10d::alltoall_base_ and one more
_ROLES = {"send": chakra.COMM_SEND, "receive": chakra.COMM_RECV}

TYPE_SCHEMA: dict[str, Any] = {
    "type": pl.Int64, "collective_kind": pl.String, "comm_bytes": pl.Int64, "peer": pl.Int64,
    "tag": pl.Int64, "group": pl.String,
}  # fmt: skip


_Row = tuple[int, str | None, int | None, int | None, int | None, str | None]
_NOTHING = (None, None, None, None, None)


class _Rows:
    """The columns that the type depends on, and where parents are."""

    def __init__(self, nodes: pl.DataFrame) -> None:
        columns = ("name", "category", "process_group", "collective", "input_values", "input_types")
        self.rows = nodes.select(columns).to_dicts()
        place = {number: at for at, number in enumerate(nodes["node"].to_list())}
        self.parents = [place.get(number, -1) for number in nodes["parent"].to_list()]
        self.launched = {
            self.parents[at] for at, row in enumerate(self.rows)
            if row["category"] is not None and _KERNEL.search(row["name"])
        }  # fmt: skip
        groups = {str(group.get("pg_name")) for row in self.rows if row["name"] == GROUPS_NOTE
                  for listed in _json(row["input_values"]) if isinstance(listed, str)
                  for group in _json(listed) if isinstance(group, dict)}  # fmt: skip
        self.only_group = groups.pop() if len(groups) == 1 else None  # that the observer noted

    def type_of(self, at: int) -> _Row:
        name, category = self.rows[at]["name"], self.rows[at]["category"]
        if name == GROUPS_NOTE:
            return chakra.METADATA, *_NOTHING
        if category in MEMORY_CATEGORIES:
            return chakra.MEM_LOAD if _TO_DEVICE.search(name) else chakra.MEM_STORE, *_NOTHING
        pattern = _BACKEND if category is None else _KERNEL
        if not pattern.search(name) or (category is None and at in self.launched):
            return chakra.COMP, *_NOTHING
        chain, above = [at], at
        while len(chain) <= _ANCESTORS and (above := self.parents[above]) >= 0:
            chain.append(above)
        around = [self.rows[place] for place in chain]
        kinds = [kind_of(text) for row in around if (text := row["collective"] or row["name"])]
        # NCCL's all-to-all is also a send/receive kernel: only its caller says which it is.
        plain = [kind for kind in kinds if kind not in ("other", "send_receive")]
        kind = plain[0] if plain else kinds[0]
        if category is None and kind == "other":
            return chakra.COMP, *_NOTHING
        peer, tag = _peer(around) if kind in _ROLES else (None, None)
        groups = (row["process_group"] for row in around if row["process_group"])
        size = next((size for row in around if (size := _input_bytes(row)) is not None), None)
        group = next(groups, self.only_group)
        return _ROLES.get(kind, chakra.COMM_COLL), kind, size, peer, tag, group


def _input_bytes(row: dict[str, Any]) -> int | None:
    """Of the input tensors; null without one."""
    sizes = [
        size
        for value, kind in zip(_json(row["input_values"]), _json(row["input_types"]), strict=False)
        if isinstance(kind, str) and "Tensor" in kind
        for size in _tensor_bytes(value)
    ]
    return sum(sizes) if sizes else None


def _peer(around: list[dict[str, Any]]) -> tuple[int | None, int | None]:
    """Peer and tag of `c10d::send(tensors, group, dst, tag)` and `c10d::recv_`."""
    for row in around:
        if re.match(r"c10d::(send|recv_?)$", row["name"]):
            numbers = [value for value in _json(row["input_values"]) if type(value) is int]
            if len(numbers) >= 2:
                return numbers[-2], numbers[-1]
    return None, None


def _json(text: str | None) -> list[Any]:
    try:
        found = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _tensor_bytes(value: object) -> list[int]:
    """Of `[tensor, storage, offset, elements, bytes per element, device]`, or of a list of such."""
    if not isinstance(value, list) or not value:
        return []
    if isinstance(value[0], list):
        return [size for inner in value for size in _tensor_bytes(inner)]
    whole = len(value) >= 5 and all(type(number) is int for number in value[:5])
    return [value[3] * value[4]] if whole else []


THREAD, LAUNCH, STREAM, GAP, SYNC = "thread", "launch", "stream", "gap", "sync"
"""Why there is an edge: the operator before on the thread; the operator that launched it; the GPU
event before on the stream; another thread after a gap; a blocking call waited for the GPU."""


def data_dependencies(nodes: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Edges from nodes that must end first to nodes that depend on them.

    Source: Chakra's converter, which makes the order of calls the data dependency, with
    inter-thread and sync dependencies of the linker. Here the order is that of the timeline's
    threads where nodes have times (the observer notes asynchronous work of gloo on the thread
    that asked for it), and GPU events also follow the one before on their stream.
    """
    rows = nodes.with_row_index("place").select(
        pl.col("place").cast(pl.Int64), "node", "parent", "tid", "host_tid", "ts_ns", "category",
        "stream", "device", "thread_dependency", "sync_dependencies",
    )  # fmt: skip
    host, gpu = rows.filter(pl.col("category").is_null()), rows.drop_nulls("category")
    linked = host.drop_nulls("ts_ns").sort("ts_ns", "node")
    bare = host.filter(pl.col("ts_ns").is_null()).sort("node")
    callers = linked.select(parent="node", caller_tid="host_tid", caller_ns="ts_ns")
    found = linked.join(callers, on="parent", how="inner")
    other = (pl.col("caller_tid") != pl.col("host_tid")) & (pl.col("caller_ns") <= pl.col("ts_ns"))
    parts = [
        _chain(linked, ["host_tid"], THREAD),
        _chain(bare, ["tid"], THREAD),
        _chain(gpu.sort("ts_ns", "node"), ["device", "stream"], STREAM),
        gpu.select(before="parent", after="node", why=pl.lit(LAUNCH)),
        found.filter(other).select(before="parent", after="node", why=pl.lit(LAUNCH)),
        linked.select(before="thread_dependency", after="node", why=pl.lit(GAP)),
        linked.explode("sync_dependencies").select(
            before="sync_dependencies", after="node", why=pl.lit(SYNC)
        ),
    ]
    edges = pl.concat(parts).drop_nulls().unique(["before", "after"], maintain_order=True)
    known = edges.filter(pl.col("before").is_in(nodes["node"].implode()))
    # Without edges that close circles; the callers' tree stays.
    kept, numbers = known, nodes["node"].to_numpy()
    called = nodes.drop_nulls("parent")
    tree = (np.searchsorted(numbers, called["parent"]), np.searchsorted(numbers, called["node"]))
    for attempt in range(3):
        before, after = (
            np.searchsorted(numbers, kept[name].to_numpy()) for name in ("before", "after")
        )
        stuck = in_circles(len(numbers), np.append(tree[0], before), np.append(tree[1], after))
        if not stuck.any():
            break
        inside = stuck[before] & stuck[after]
        backward = (before >= after) if attempt == 0 else np.ones(len(before), dtype=np.bool_)
        kept = kept.filter(pl.Series(~(inside & backward), dtype=pl.Boolean))
    return kept, len(known) - len(kept)


def _chain(rows: pl.DataFrame, keys: list[str], why: str) -> pl.DataFrame:
    """Each of a thread or stream after the one before it."""
    before = pl.col("node").shift(1).over(keys)
    return rows.select(before=before, after="node", why=pl.lit(why))


def in_circles(count: int, before: Ints, after: Ints) -> Bools:
    """Nodes in circles, or behind one: a topological order never reaches them."""
    order = np.argsort(before, kind="stable")
    targets = after[order].tolist()
    first = np.searchsorted(before[order], np.arange(count + 1)).tolist()
    waiting = np.bincount(after, minlength=count).tolist()
    ready = deque(at for at in range(count) if not waiting[at])
    while ready:
        at = ready.popleft()
        for target in targets[first[at] : first[at + 1]]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return np.array(waiting, dtype=np.int64) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraGraph:
    """One rank's nodes and what each depends on."""

    rank: int
    nodes: pl.DataFrame  # `NODE_SCHEMA` and what `chakra_graph` adds, by number
    edges: pl.DataFrame
    """`before`, `after`, `why`: data dependencies; with the callers free of circles."""
    dropped_count: int  # dependencies that would have closed a circle
    header: dict[str, Any]  # `schema`, `pid`, `time`, `start_ts`, `finish_ts`

    @property
    def type_counts(self) -> dict[str, int]:
        """Nodes by type."""
        counted = self.nodes["type"].value_counts().sort("type").iter_rows()
        return {chakra.NODE_TYPES[kind]: count for kind, count in counted}

    @property
    def notes(self) -> list[str]:
        """What a person must know."""
        kind, size = pl.col("collective_kind"), pl.col("comm_bytes")
        talking = self.nodes.filter(pl.col("type").is_in(chakra.COMMUNICATION))
        nameless = talking.filter(
            (pl.col("type") == chakra.COMM_COLL) & ~kind.is_in(list(chakra.COLLECTIVES))
        )
        sizeless = talking.filter(size.is_null() & (kind != "barrier"))
        groupless = talking["group"].null_count()
        counted = (
            (self.nodes["ts_ns"].is_null().all(), "nodes have no times: link them with a timeline"),
            (self.dropped_count, f"{self.dropped_count} dependencies closed circles: left out"),
            (len(nameless), f"{len(nameless)} collectives of a kind that Chakra has no name for"),
            (len(sizeless), f"{len(sizeless)} communications without comm_size: no input tensor"),
            (groupless, f"{groupless} communications without pg_name: nothing says which group"),
        )
        return [f"rank {self.rank}: {note}" for is_so, note in counted if is_so]


def chakra_graph(nodes: pl.DataFrame, rank: int, header: Mapping[str, Any]) -> ChakraGraph:
    """Types and dependencies of one rank's nodes."""
    edges, dropped = data_dependencies(nodes)
    rows = _Rows(nodes)
    found = [rows.type_of(place) for place in range(len(nodes))]
    return ChakraGraph(
        rank=rank, nodes=nodes.hstack(pl.DataFrame(found, schema=TYPE_SCHEMA, orient="row")),
        edges=edges, dropped_count=dropped, header=dict(header),
    )  # fmt: skip


def write_chakra(path: Path, graph: ChakraGraph) -> None:
    """Writes a Chakra file; it is complete or absent.

    Durations are exclusive, as in Chakra's converter, whole microseconds, and 0 of what is not
    linked; attributes `ts_ns`, `dur_ns` (inclusive) and `self_ns` are exact, and absent there.
    """
    try:
        with whole_file(path, below=path.parent) as file:
            said = graph.header.items()
            plain = {key: value for key, value in said if isinstance(value, (int, str, bool))}
            file.write(chakra.delimit(chakra.global_metadata({**plain, "rank": graph.rank})))
            for message in _messages(graph):
                file.write(chakra.delimit(message))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from None


def _messages(graph: ChakraGraph) -> Iterator[bytes]:
    before = dict(graph.edges.group_by("after").agg(pl.col("before").sort()).iter_rows())
    for row in graph.nodes.iter_rows(named=True):
        # Attributes with the names of Chakra's converter, then exact times, then communication's.
        found: dict[str, chakra.Attribute | None] = {
            **{name: row[COLUMN_OF_ATTRIBUTE[name]] for name in ATTRIBUTE_NAMES},
            "op_schema": row["op_schema"] or "",
            "is_cpu_op": row["category"] is None,
            **{name: row[name] for name in ("ts_ns", "dur_ns", "self_ns", "linked_by")},
        }
        if row["category"] is not None:
            found |= {"stream": row["stream"], "device": row["device"], "tensor_size": row["bytes"]}
        if row["type"] in chakra.COMMUNICATION:
            found |= {"comm_size": row["comm_bytes"], "pg_name": row["group"]}
            found |= {"comm_type": chakra.COLLECTIVES.get(row["collective_kind"] or "")}
        if row["type"] in (chakra.COMM_SEND, chakra.COMM_RECV):
            end = "comm_dst" if row["type"] == chakra.COMM_SEND else "comm_src"
            found |= {end: row["peer"], "comm_tag": row["tag"], "comm_type": None}
        times = (row[name] for name in ("ts_ns", "self_ns"))
        start_us, duration_us = (None if ns is None else max(0, ns) // 1000 for ns in times)
        inputs, outputs = (
            chakra.io_info(
                *(row[f"{direction}_{part}"] or "[]" for part in ("values", "shapes", "types"))
            )
            for direction in ("input", "output")
        )
        yield chakra.node(
            row["node"], row["name"], row["type"], start_us=start_us, duration_us=duration_us,
            control=[] if row["parent"] is None else [row["parent"]],
            data=before.get(row["node"], []), inputs=inputs, outputs=outputs, attributes=found,
        )  # fmt: skip


def graphs(
    source: Path, execution: Path | None = None, *, window: int | None = None,
    rank: int | None = None,
) -> Iterator[tuple[ChakraGraph, list[str]]]:  # fmt: skip
    """Yields the graph of each rank, with notes for people."""
    bare = [] if execution or window is not None else _execution_only(source)
    if bare:
        yield from _load(bare, rank)
        return
    found, alone = pairs(source, execution, window=window, rank=rank)
    for pair in found:
        linked = link(pair)
        header = {"schema": pair.execution.schema, "pid": pair.execution.pid}
        graph = chakra_graph(linked.nodes, pair.rank, header | pair.execution.header)
        yield graph, [*alone, *linked.share.notes, *graph.notes]
        alone = []


def _execution_only(source: Path) -> list[ExecutionTrace]:
    """Joined files if there are any; bare ones where no timeline is beside them."""
    if source.is_file():
        try:
            return [load_execution_trace(source)]
        except TraceFormatError:
            trace_files(source)
            if execution_files(source):
                return []
            raise
    if not source.is_dir():
        raise TraceFormatError(f"{source}: no such file or folder")
    folder = source / "traces" if (source / "traces").is_dir() else source
    joined = sorted(
        path for path in folder.iterdir()
        if path.name.startswith(f"{LINKED_NAME}.") and path.name.endswith(TRACE_ENDINGS)
    )  # fmt: skip
    if joined:
        return [load_execution_trace(path) for path in joined]
    files = execution_files(source)
    try:
        timelines = {path for path in trace_files(source) if path not in files}
    except TraceFormatError:
        timelines = set()
    return [] if timelines else [load_execution_trace(path) for path in files]


def _load(found: list[ExecutionTrace], rank: int | None) -> Iterator[tuple[ChakraGraph, list[str]]]:
    taken: dict[int, Path] = {}
    for place, execution in enumerate(found):
        said = integer(execution.header.get("rank"))
        own = rank_in_name(execution.path.name) if said is None else said
        own = place if own is None else own
        if own in taken:
            raise TraceFormatError(
                f"two execution traces of rank {own}: {taken[own]} and {execution.path}"
            )
        taken[own] = execution.path
        if rank in (None, own):
            header = {"schema": execution.schema, "pid": execution.pid} | execution.header
            graph = chakra_graph(execution.nodes, own, header)
            yield graph, [*execution.report.notes, *graph.notes]
    if rank is not None and rank not in taken:
        known = ", ".join(map(str, sorted(taken)))
        raise MissingDataError(f"no execution trace of rank {rank}; there are those of {known}")


_ROOT = "[pytorch|profiler|"
_STEP = "ProfilerStep#"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDrawing:
    """What a picture shows."""

    nodes: pl.DataFrame
    """`node`, `name`, `type` (as Chakra names it), `gpu`, `folded_count` (nodes that stand behind
    it, itself not counted), `self_ns` of all of them (null where none is linked), `bytes`
    and `collective_kind` of communication."""
    edges: pl.DataFrame
    """`before`, `after`, `why`: `call`, or what `chakra` says of data dependencies."""
    notes: tuple[str, ...]


def draw_graph(
    graph: ChakraGraph, *, max_nodes: int, step: int | None = None, depth: int | None = None
) -> GraphDrawing:
    """Selects the part of a graph that fits a picture."""
    nodes, left_out = _of_step(graph.nodes, step), 0
    nodes = nodes.filter(~pl.col("name").str.starts_with(_ROOT)).sort("node")
    place = {number: at for at, number in enumerate(nodes["node"].to_list())}
    parent = np.array([place.get(number, -1) for number in nodes["parent"].to_list()], np.int64)
    apart = nodes.select(
        pl.col("category").is_not_null() & pl.col("type").is_in(chakra.COMMUNICATION)
    ).to_series().to_numpy()  # fmt: skip
    deep = depths(parent)
    assert deep is not None, "callers are resolved where an execution trace is read"
    deepest = int(deep.max(initial=0)) + 1
    fewer = np.cumsum(np.bincount(deep[~apart], minlength=deepest)) + int(apart.sum())
    levels = min(depth or max(1, int(np.sum(fewer <= max_nodes))), deepest)
    # Each node is drawn as itself, or as its innermost caller that is shown.
    is_shown = (deep < levels) | apart
    shown = climb(np.arange(len(parent)), parent, lambda _, row: is_shown[row])
    representative = nodes["node"].to_numpy()[shown] if len(nodes) else shown
    grouped = nodes.with_columns(of=pl.Series(representative)).group_by("of").agg(
        folded_count=pl.len().cast(pl.Int64) - 1,
        self_ns=pl.when(pl.col("self_ns").is_not_null().any()).then(pl.col("self_ns").sum()),
        has_gpu=(pl.col("category").is_not_null() & (pl.col("type") == chakra.COMP)).any(),
    )  # fmt: skip
    own = nodes.select(
        "node", "name", "type", "category", "ts_ns", "collective_kind", bytes="comm_bytes"
    )
    found = own.join(grouped, left_on="node", right_on="of", how="inner").sort("node")
    kind = pl.col("type").replace_strict(chakra.NODE_TYPES, return_dtype=pl.String)
    of_gpu = (pl.col("category").is_not_null() | pl.col("has_gpu")).alias("gpu")
    rest = ("folded_count", "self_ns", "bytes", "collective_kind", "ts_ns")
    table = found.select("node", "name", kind, of_gpu, *rest)
    if len(table) > max_nodes:
        left_out = len(table) - max_nodes
        table = table.sort(pl.col("ts_ns").fill_null(0), "node").head(max_nodes)
    edges = _edges(graph, nodes, representative, table["node"])
    folded = f"{levels} of {deepest} levels of operators: deeper ones are folded"
    cut = f"{left_out} later nodes are left out: --max-nodes, --depth or --steps shows others"
    reasons = ((folded, levels < deepest), (cut, left_out > 0))
    return GraphDrawing(
        nodes=table, edges=edges, notes=tuple(note for note, is_so in reasons if is_so)
    )


def _of_step(nodes: pl.DataFrame, step: int | None) -> pl.DataFrame:
    if step is None:
        return nodes
    marks = nodes.filter(pl.col("name").str.starts_with(_STEP)).drop_nulls("ts_ns")
    mark = marks.filter(pl.col("name") == f"{_STEP}{step}")
    if mark.is_empty():
        known = ", ".join(marks["name"].str.strip_prefix(_STEP).to_list()) or "none"
        raise MissingDataError(f"no profiler step {step} among the linked nodes; there is: {known}")
    start, end = mark["ts_ns"][0], mark["ts_ns"][0] + mark["dur_ns"][0]
    host = pl.col("category").is_null() & pl.col("ts_ns").is_between(start, end, closed="left")
    inside = nodes.filter(host)["node"]
    of_gpu = pl.col("category").is_not_null() & pl.col("parent").is_in(inside.implode())
    return nodes.filter(host | of_gpu)


def _edges(
    graph: ChakraGraph, nodes: pl.DataFrame, representative: Ints, shown: pl.Series
) -> pl.DataFrame:
    known = pl.DataFrame({"number": nodes["node"], "of": representative})
    # A step's mark calls everything: arrows that say nothing, over the whole picture.
    marks = nodes.filter(pl.col("name").str.starts_with(_STEP))["node"]
    called = nodes.drop_nulls("parent").filter(~pl.col("parent").is_in(marks.implode()))
    calls = called.select(before="parent", after="node", why=pl.lit("call"))
    both = pl.concat([calls, graph.edges])
    found = both.join(known, left_on="before", right_on="number").join(
        known, left_on="after", right_on="number", suffix="_after"
    )
    ends = ["before", "after"]
    plain = found.select(before="of", after="of_after", why="why")
    seen = pl.all_horizontal(pl.col(ends).is_in(shown.implode()))
    plain = plain.filter(pl.col("before") != pl.col("after"), seen)
    return plain.unique(ends, keep="first", maintain_order=True).sort(ends)
