"""An execution trace as a frame of nodes, with a report of what was read and what not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.run_format.unpack import read_text
from haiprof.trace_format.execution.records import (
    JsonError,
    Node,
    NoNodesError,
    OldNode,
    attributes,
    decode,
    values,
)

TEXT_LIMIT_BYTES = 4 << 30
_MIN, _MAX = -(1 << 63), (1 << 63) - 1
_COLUMN_OF_ATTRIBUTE = {
    "rf_id": "record_function_id",
    "fw_parent": "forward_parent",
    "seq_id": "sequence_number",
    "scope": "scope",
    "tid": "tid",
    "fw_tid": "forward_tid",
    "op_schema": "op_schema",
    "kernel_backend": "kernel_backend",
    "kernel_file": "kernel_file",
    "pg_name": "process_group",
    "pg_size": "group_size",
    "collective_name": "collective",
    "dtype": "dtype",
    "in_msg_nelems": "in_count",
    "out_msg_nelems": "out_count",
}
_TEXTS = {"op_schema", "kernel_backend", "kernel_file", "process_group", "collective", "dtype"}
_PARTS = ("values", "shapes", "types", "strides")
VALUE_COLUMNS = tuple(f"{way}_{part}" for way in ("input", "output") for part in _PARTS)
LINK_SCHEMA: dict[str, Any] = {
    "ts_ns": pl.Int64,
    "dur_ns": pl.Int64,
    "self_ns": pl.Int64,
    "host_tid": pl.Int64,
    "linked_by": pl.String,
    "category": pl.String,
    "stream": pl.Int64,
    "device": pl.Int64,
    "bytes": pl.Int64,
    "thread_dependency": pl.Int64,
    "sync_dependencies": pl.List(pl.Int64),
}
"""Columns that a link adds; null in a bare execution trace. `host_tid` is the thread of the
operator or of the launch, `category` that of GPU work."""
NODE_SCHEMA: dict[str, Any] = {
    "node": pl.Int64,
    "name": pl.String,
    "parent": pl.Int64,
    **{name: pl.String if name in _TEXTS else pl.Int64 for name in _COLUMN_OF_ATTRIBUTE.values()},
    **dict.fromkeys(VALUE_COLUMNS, pl.String),
    "attributes": pl.String,
    **LINK_SCHEMA,
}
"""Columns of `ExecutionTrace.nodes`: values and attributes are JSON as it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionReport:
    """Counts of a file's nodes: read, repaired, lost."""

    path: str
    node_count: int
    """In the frame."""
    lost_count: int
    """Of another form, or without a number."""
    repeated_count: int
    """With the number of an earlier node: left out."""
    orphan_count: int
    """Whose parent is not in the file, roots not counted: they have none."""
    cycle_count: int
    """That were their own ancestors: they have no parent."""

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
    header: dict[str, Any]
    """`time`, `start_ts`, `finish_ts` ... as written."""
    nodes: pl.DataFrame
    """By number; columns are `NODE_SCHEMA`."""
    report: ExecutionReport

    @property
    def is_linked(self) -> bool:
        """Whether its nodes have times."""
        return bool(self.nodes["ts_ns"].is_not_null().any())


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
    frame = _frame(records)
    nodes, repeated = _number_rows(frame)
    nodes, orphans, cycles = _resolve_parents(nodes)
    report = ExecutionReport(
        path=str(path),
        node_count=len(nodes),
        lost_count=lost + frame["node"].null_count(),
        repeated_count=repeated,
        orphan_count=orphans,
        cycle_count=cycles,
    )
    pid = integer(header.pop("pid"))
    schema = str(header.pop("schema") or "")
    return ExecutionTrace(
        path=path, schema=schema, pid=pid, header=header, nodes=nodes, report=report
    )


def integer(value: object) -> int | None:
    """A number that an integer column can hold; None for everything else."""
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdecimal() and len(value) < 20 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if type(value) is not int:
        return None
    return value if _MIN <= value <= _MAX else None


def _text(path: Path) -> bytes:
    try:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no such file"
            raise TraceFormatError(f"{path}: {kind}")
        text = read_text(path, limit_bytes=TEXT_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        raise TraceFormatError(f"{path}: cannot be read ({error})") from None
    return text.removeprefix(b"\xef\xbb\xbf")


def _frame(records: Sequence[Node | OldNode]) -> pl.DataFrame:
    columns: dict[str, list[Any]] = {name: [] for name in NODE_SCHEMA}
    add = [columns[name].append for name in NODE_SCHEMA]
    for record in records:
        for append, value in zip(add, _row(record), strict=True):
            append(value)
    return pl.DataFrame(columns, schema=NODE_SCHEMA)


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
    for key, name in _COLUMN_OF_ATTRIBUTE.items():
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
    others = {
        "linked_by": _text_or_null(exact.get("linked_by", "chakra")),
        "category": _text_or_null(record.cat),
        "stream": integer(record.stream) if record.cat is not None else None,
        "host_tid": integer(exact.get("host_tid")),
        "device": integer(exact.get("device")),
        "bytes": integer(exact.get("bytes")),
        "thread_dependency": integer(record.inter_thread_dep),
        "sync_dependencies": [number for number in map(integer, waits) if number is not None],
    }
    return [(row | others)[name] for name in LINK_SCHEMA]


def _ns(micros: object) -> int | None:
    known = isinstance(micros, (int, float)) and abs(micros) < 1e15
    return round(micros * 1000) if known else None  # type: ignore[operator]


def _number_rows(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    known = frame.drop_nulls("node")
    once = known.unique("node", keep="first", maintain_order=True).sort("node")
    return once, len(known) - len(once)


def _resolve_parents(nodes: pl.DataFrame) -> tuple[pl.DataFrame, int, int]:
    """Nodes without orphaned or circular parents, and how many had such parents."""
    numbers = nodes["node"].to_numpy()
    if not len(numbers):
        return nodes, 0, 0
    said = nodes["parent"]
    place = np.searchsorted(numbers, said.fill_null(_MIN).to_numpy()).clip(0, len(numbers) - 1)
    above = np.where(numbers[place] == said.fill_null(_MIN).to_numpy(), place, -1)
    outside = (above < 0) & said.is_not_null().to_numpy()
    circle = _circles(above)
    # The process's root is node 1 in some versions and missing in others; a root names itself so.
    root = nodes["name"].str.starts_with("[pytorch|profiler|").to_numpy()
    known = pl.Series((above >= 0) & ~circle)
    parent = pl.select(pl.when(known).then(nodes["node"].gather(above.clip(0)))).to_series()
    orphans = int(np.count_nonzero(outside & ~root))
    return (
        nodes.with_columns(parent.alias("parent")),
        orphans,
        int(np.count_nonzero(circle & ~_self(above, root))),
    )


def _self(above: npt.NDArray[np.int64], root: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The process's root, which is its own parent."""
    own: npt.NDArray[np.bool_] = root & (above == np.arange(len(above)))
    return own


def _circles(above: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which nodes are their own ancestors: pointer jumping never takes those to a root."""
    reached = np.append(above, -1)  # place -1 stays where it is
    for _ in range(len(above).bit_length()):
        reached = reached[reached]
    found = np.zeros(len(above), dtype=np.bool_)
    found[reached[reached >= 0]] = True
    return found
