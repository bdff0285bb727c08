"""Execution traces of PyTorch (ExecutionTraceObserver): read as frames, written with times."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import polars as pl

from haiprof.base.errors import TraceFormatError, UsageError, convert_os_errors
from haiprof.base.safe_files import named_file
from haiprof.run_format.unpack import read_text

_NONE = msgspec.Raw(b"[]")
_NO_ATTRIBUTES = msgspec.Raw(b"null")


class Values(msgspec.Struct, gc=False):
    """Inputs or outputs of an operator; each is the JSON array of the file."""

    values: msgspec.Raw = _NONE
    shapes: msgspec.Raw = _NONE
    types: msgspec.Raw = _NONE
    strides: msgspec.Raw = _NONE


class Node(msgspec.Struct, gc=False):
    """A node of schema 1.0.2-chakra and later, with what a linker (Chakra's, or haiprof's) adds."""

    id: Any = None
    name: Any = None
    ctrl_deps: Any = None
    inputs: Values = msgspec.field(default_factory=Values)
    outputs: Values = msgspec.field(default_factory=Values)
    attrs: msgspec.Raw = _NO_ATTRIBUTES
    ts: Any = None
    inclusive_dur: Any = None
    exclusive_dur: Any = None
    cat: Any = None
    stream: Any = None
    pg_name: Any = None
    inter_thread_dep: Any = None
    sync_dep: Any = None
    haiprof: Any = None


class OldNode(msgspec.Struct, gc=False):
    """A node of schema 1.0.1 and before: attributes beside the name, one parent."""

    id: Any = None
    name: Any = None
    parent: Any = None
    rf_id: Any = None
    fw_parent: Any = None
    seq_id: Any = None
    scope: Any = None
    tid: Any = None
    fw_tid: Any = None
    op_schema: Any = None
    inputs: msgspec.Raw = _NONE
    input_shapes: msgspec.Raw = _NONE
    input_types: msgspec.Raw = _NONE
    outputs: msgspec.Raw = _NONE
    output_shapes: msgspec.Raw = _NONE
    output_types: msgspec.Raw = _NONE


class Attribute(msgspec.Struct, gc=False):
    """A named value of a node."""

    name: Any = None
    value: Any = None


class _Head(msgspec.Struct):
    schema: Any = None
    pid: Any = None
    time: Any = None
    start_ts: Any = None
    finish_ts: Any = None
    rank: Any = None
    haiprof: Any = None
    nodes: msgspec.Raw = _NO_ATTRIBUTES


_HEAD = msgspec.json.Decoder(_Head)
_NODES = msgspec.json.Decoder(list[Node])
_OLD_NODES = msgspec.json.Decoder(list[OldNode])
_RAW_NODES = msgspec.json.Decoder(list[msgspec.Raw])
_NODE, _OLD_NODE = msgspec.json.Decoder(Node), msgspec.json.Decoder(OldNode)
_ATTRIBUTES = msgspec.json.Decoder(list[Attribute])
ATTRIBUTE_NAMES = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema")
"""What every node has; a field of its own in old files."""
JsonError = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class NoNodesError(Exception):
    """The text is JSON, but not an execution trace."""


def decode(text: bytes) -> tuple[dict[str, Any], Sequence[Node | OldNode], int]:
    """The header, the nodes, and how many nodes could not be read."""
    try:
        head = _HEAD.decode(text)
    except msgspec.ValidationError:
        raise NoNodesError from None
    if not bytes(head.nodes).lstrip().startswith(b"["):
        raise NoNodesError
    header = {name: getattr(head, name) for name in _Head.__struct_fields__ if name != "nodes"}
    return header, *_decode_nodes(head.nodes)


def _decode_nodes(text: msgspec.Raw) -> tuple[Sequence[Node | OldNode], int]:
    for decoder in (_NODES, _OLD_NODES):
        try:
            found: Sequence[Node | OldNode] = decoder.decode(text)
        except msgspec.ValidationError:
            continue
        if decoder is _OLD_NODES or not _is_old(text):
            return found, 0
    raws, good = _RAW_NODES.decode(text), list[Node | OldNode]()
    for raw in raws:
        with suppress(msgspec.ValidationError):
            good.append(_OLD_NODE.decode(raw) if _is_old(raw) else _NODE.decode(raw))
    return good, len(raws) - len(good)


def _is_old(text: msgspec.Raw) -> bool:
    """Nodes without values have the same form in both but for where their parent stands."""
    return b'"ctrl_deps"' not in bytes(text)


def attributes(node: Node | OldNode) -> dict[str, Any]:
    """A node's named values; empty where they are of another form."""
    if isinstance(node, OldNode):
        return {name: getattr(node, name) for name in ATTRIBUTE_NAMES}
    try:
        return {each.name: each.value for each in _ATTRIBUTES.decode(node.attrs)
                if isinstance(each.name, str)}  # fmt: skip
    except (msgspec.ValidationError, UnicodeDecodeError):
        return {}


def values(node: Node | OldNode) -> tuple[Values, Values]:
    """Inputs and outputs in the new form."""
    if isinstance(node, Node):
        return node.inputs, node.outputs
    return (
        Values(values=node.inputs, shapes=node.input_shapes, types=node.input_types),
        Values(values=node.outputs, shapes=node.output_shapes, types=node.output_types),
    )


TEXT_LIMIT_BYTES = 4 << 30
_MIN, _MAX = -(1 << 63), (1 << 63) - 1
COLUMN_OF_ATTRIBUTE = {
    "rf_id": "record_function_id", "fw_parent": "forward_parent", "seq_id": "sequence_number",
    "scope": "scope", "tid": "tid", "fw_tid": "forward_tid", "op_schema": "op_schema",
    "kernel_backend": "kernel_backend", "kernel_file": "kernel_file", "pg_name": "process_group",
    "pg_size": "group_size", "collective_name": "collective", "dtype": "dtype",
    "in_msg_nelems": "in_count", "out_msg_nelems": "out_count",
}  # fmt: skip
_TEXTS = {"op_schema", "kernel_backend", "kernel_file", "process_group", "collective", "dtype"}
_PARTS = ("values", "shapes", "types", "strides")
VALUE_COLUMNS = tuple(f"{way}_{part}" for way in ("input", "output") for part in _PARTS)
LINK_SCHEMA: dict[str, Any] = {
    "ts_ns": pl.Int64, "dur_ns": pl.Int64, "self_ns": pl.Int64, "host_tid": pl.Int64,
    "linked_by": pl.String, "category": pl.String, "stream": pl.Int64, "device": pl.Int64,
    "bytes": pl.Int64, "thread_dependency": pl.Int64, "sync_dependencies": pl.List(pl.Int64),
}  # fmt: skip
"""Columns that a link adds; null in a bare execution trace. `host_tid` is the thread of the
operator or of the launch, `category` that of GPU work."""
NODE_SCHEMA: dict[str, Any] = {
    "node": pl.Int64, "name": pl.String, "parent": pl.Int64,
    **{name: pl.String if name in _TEXTS else pl.Int64 for name in COLUMN_OF_ATTRIBUTE.values()},
    **dict.fromkeys(VALUE_COLUMNS, pl.String), "attributes": pl.String, **LINK_SCHEMA,
}  # fmt: skip
"""Columns of `ExecutionTrace.nodes`: values and attributes are JSON as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionReport:
    """Counts of a file's nodes: read, repaired, lost."""

    path: str
    node_count: int  # in the frame
    lost_count: int  # of another form, or without a number
    repeated_count: int  # with the number of an earlier node: left out
    orphan_count: int  # whose parent is not in the file, roots not counted: they have none
    cycle_count: int  # that were their own ancestors: they have no parent

    @property
    def notes(self) -> list[str]:
        """Notes for people."""
        counted = (
            (self.lost_count, "nodes cannot be read"),
            (self.repeated_count, "nodes have the number of an earlier one and were left out"),
            (self.cycle_count, "nodes are their own ancestors: they stand without a parent"),
            (self.orphan_count, "nodes have a parent that is not in the file"),
        )
        return [f"{self.path}: {count} {text}" for count, text in counted if count]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTrace:
    """The nodes of one process, and the header of their file."""

    path: Path
    schema: str
    pid: int | None
    header: dict[str, Any]  # `time`, `start_ts`, `finish_ts` ... as written
    nodes: pl.DataFrame  # by number; columns are `NODE_SCHEMA`
    report: ExecutionReport


def load_execution_trace(path: Path) -> ExecutionTrace:
    """Reads an execution trace, plain or gzip, linked or not."""
    try:
        header, records, lost = decode(_text(path))
    except NoNodesError:
        raise TraceFormatError(
            f"{path}: no execution trace: it has no list of nodes",
            hint="expected what torch.profiler.ExecutionTraceObserver writes (haiprof "
            "--execution-trace), plain or gzip",
        ) from None
    except JsonError as error:
        raise TraceFormatError(
            f"{path}: cannot be read as JSON ({error})",
            hint="an execution trace is whole only after the observer was stopped",
        ) from None
    rows = zip(*map(_row, records), strict=True)
    frame = pl.DataFrame(dict(zip(NODE_SCHEMA, rows, strict=False)), schema=NODE_SCHEMA)
    known = frame.drop_nulls("node")
    once = known.unique("node", keep="first", maintain_order=True).sort("node")
    places = pl.DataFrame({"parent": once["node"], "at": np.arange(len(once))})
    said = once.select("parent")
    found = said.join(places, on="parent", how="left", maintain_order="left")
    above = found["at"].fill_null(-1).to_numpy()
    # Which nodes are their own ancestors: pointer jumping never takes those to a root.
    reached = np.append(above, -1)  # place -1 stays where it is
    for _ in range(len(above).bit_length()):
        reached = reached[reached]
    circle = np.zeros(len(above), dtype=np.bool_)
    circle[reached[reached >= 0]] = True
    # The process's root is node 1 in some versions and missing in others; a root names itself so,
    # and is its own parent.
    root = once["name"].str.starts_with("[pytorch|profiler|").to_numpy()
    outside = (above < 0) & said["parent"].is_not_null().to_numpy() & ~root
    around = circle & ~(root & (above == np.arange(len(above))))
    report = ExecutionReport(
        path=str(path), node_count=len(once), lost_count=lost + frame["node"].null_count(),
        repeated_count=len(known) - len(once), orphan_count=int(outside.sum()),
        cycle_count=int(around.sum()),
    )  # fmt: skip
    return ExecutionTrace(
        path=path, schema=str(header.pop("schema") or ""), pid=integer(header.pop("pid")),
        header=header, report=report,
        nodes=once.with_columns(pl.when(pl.Series((above >= 0) & ~circle)).then("parent")),
    )  # fmt: skip


def integer(value: object) -> int | None:
    """A number that an integer column can hold; None for everything else."""
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if type(value) is int and _MIN <= value <= _MAX else None


def _text(path: Path) -> bytes:
    try:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no such file"
            raise TraceFormatError(f"{path}: {kind}")
        text = read_text(path, limit_bytes=TEXT_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"{path}: cannot be read ({error})") from None
    return text.removeprefix(b"\xef\xbb\xbf")


def _row(record: Node | OldNode) -> Iterator[Any]:
    """In the order of the schema."""
    is_new = isinstance(record, Node)
    yield integer(record.id)
    yield record.name if isinstance(record.name, str) else str(record.name or "")
    parent = record.ctrl_deps if is_new else record.parent  # type: ignore[union-attr]
    yield integer(parent[0] if isinstance(parent, list) and parent else parent)
    named = attributes(record)
    if is_new and record.pg_name is not None:  # type: ignore[union-attr]
        named["pg_name"] = record.pg_name  # type: ignore[union-attr]
    for key, name in COLUMN_OF_ATTRIBUTE.items():
        value = named.get(key)
        yield _text_or_null(value) if name in _TEXTS else integer(value)
    for side in values(record):
        yield from (bytes(getattr(side, part)).decode("utf-8", "replace") for part in _PARTS)
    yield bytes(record.attrs).decode("utf-8", "replace") if isinstance(record, Node) else None
    yield from _link(record)


def _text_or_null(value: object) -> str | None:
    return str(value) if value not in (None, "") else None


def _link(record: Node | OldNode) -> list[Any]:
    if isinstance(record, OldNode) or (record.ts is None and record.haiprof is None):
        return [None] * len(LINK_SCHEMA)
    exact = record.haiprof if isinstance(record.haiprof, dict) else {}
    micros = {"ts_ns": record.ts, "dur_ns": record.inclusive_dur, "self_ns": record.exclusive_dur}
    row = {name: integer(exact.get(name, _ns(value))) for name, value in micros.items()}
    waits = record.sync_dep if isinstance(record.sync_dep, list) else []
    row |= {name: integer(exact.get(name)) for name in ("host_tid", "device", "bytes")}
    others = {
        "linked_by": _text_or_null(exact.get("linked_by", "chakra")),
        "category": _text_or_null(record.cat),
        "stream": integer(record.stream) if record.cat is not None else None,
        "thread_dependency": integer(record.inter_thread_dep),
        "sync_dependencies": [number for number in map(integer, waits) if number is not None],
    }
    return [(row | others)[name] for name in LINK_SCHEMA]


def _ns(micros: object) -> int | None:
    known = isinstance(micros, (int, float)) and abs(micros) < 1e15
    return round(micros * 1000) if known else None  # type: ignore[operator]


SCHEMA = "1.1.1-chakra.0.0.4"  # the schema that is written: mlc-chakra 1.0.0 reads no later one
_TYPES = dict.fromkeys(ATTRIBUTE_NAMES, "uint64") | {"seq_id": "int64", "op_schema": "string"}
_EXACT = ("ts_ns", "dur_ns", "self_ns", "host_tid", "linked_by", "device", "bytes")
_EMPTY: dict[str, Any] = {"op_schema": "", "seq_id": -1}


def write_linked(path: Path, nodes: pl.DataFrame, header: Mapping[str, Any]) -> None:
    """Writes nodes with their times; the file is complete or absent."""
    head = {"schema": SCHEMA, **{key: value for key, value in header.items() if value is not None}}
    with convert_os_errors(UsageError, f"{path}: cannot be written"), ExitStack() as files:
        file: BinaryIO = files.enter_context(named_file(path))
        if path.name.endswith(".gz"):
            file = files.enter_context(gzip.GzipFile("", "wb", 6, file))  # type: ignore[assignment]
        file.write(msgspec.json.encode(head)[:-1] + b',"nodes":[')
        separator = b"\n"
        for row in nodes.iter_rows(named=True):
            file.write(separator + msgspec.json.encode(_node(row)))
            separator = b",\n"
        file.write(b"\n]}\n")


def _node(row: dict[str, Any]) -> dict[str, Any]:
    node: dict[str, Any] = {
        "id": row["node"],
        "name": row["name"],
        "ctrl_deps": row["node"] if row["parent"] is None else row["parent"],
        "inputs": _values(row, "input"),
        "outputs": _values(row, "output"),
        "attrs": _attributes(row),
    }
    if row["ts_ns"] is None:
        return node
    node |= {
        "ts": row["ts_ns"] / 1000, "inclusive_dur": row["dur_ns"] / 1000,
        "exclusive_dur": row["self_ns"] / 1000, "inter_thread_dep": row["thread_dependency"],
        "haiprof": {name: row[name] for name in _EXACT if row[name] is not None},
    }  # fmt: skip
    if row["sync_dependencies"]:
        node["sync_dep"] = row["sync_dependencies"]
    if row["category"] is not None:
        node |= {"cat": row["category"], "ph": "X", "stream": row["stream"]}
        if row["process_group"] is not None:
            node["pg_name"] = row["process_group"]
    return node


def _values(row: dict[str, Any], direction: str) -> dict[str, msgspec.Raw]:
    return {part: msgspec.Raw((row[f"{direction}_{part}"] or "[]").encode()) for part in _PARTS}


def _attributes(row: dict[str, Any]) -> object:
    """As they were written; of old nodes in today's form."""
    if row["attributes"] is not None and row["attributes"] != "null":
        return msgspec.Raw(row["attributes"].encode())
    return [
        {"name": name, "type": _TYPES[name],
         "value": _EMPTY.get(name, 0) if value is None else value}
        for name in ATTRIBUTE_NAMES
        for value in (row[COLUMN_OF_ATTRIBUTE[name]],)
    ]  # fmt: skip
