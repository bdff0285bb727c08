"""Writes an execution trace joined with its timeline in the form that Chakra's converter reads."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import polars as pl

from haiprof.base.errors import UsageError
from haiprof.base.safe_files import named_file
from haiprof.trace_format.execution.records import ATTRIBUTE_NAMES

SCHEMA = "1.1.1-chakra.0.0.4"
"""The schema that is written: mlc-chakra 1.0.0 reads no later one."""
_TYPES = dict.fromkeys(ATTRIBUTE_NAMES, "uint64") | {"seq_id": "int64", "op_schema": "string"}
_COLUMNS = {
    "rf_id": "record_function_id", "fw_parent": "forward_parent", "seq_id": "sequence_number",
    "scope": "scope", "tid": "tid", "fw_tid": "forward_tid", "op_schema": "op_schema",
}  # fmt: skip
_EXACT = ("ts_ns", "dur_ns", "self_ns", "host_tid", "linked_by", "device", "bytes")
_EMPTY: dict[str, Any] = {"op_schema": "", "seq_id": -1}


def write_linked(path: Path, nodes: pl.DataFrame, header: Mapping[str, Any]) -> None:
    """Writes nodes with their times; the file is complete or absent."""
    head = {"schema": SCHEMA, **{key: value for key, value in header.items() if value is not None}}
    with _whole(path) as file:
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
        "ts": row["ts_ns"] / 1000,
        "inclusive_dur": row["dur_ns"] / 1000,
        "exclusive_dur": row["self_ns"] / 1000,
        "inter_thread_dep": row["thread_dependency"],
        "haiprof": {name: row[name] for name in _EXACT if row[name] is not None},
    }
    if row["sync_dependencies"]:
        node["sync_dep"] = row["sync_dependencies"]
    if row["category"] is not None:
        node |= {"cat": row["category"], "ph": "X", "stream": row["stream"]}
        if row["process_group"] is not None:
            node["pg_name"] = row["process_group"]
    return node


def _values(row: dict[str, Any], direction: str) -> dict[str, msgspec.Raw]:
    parts = ("values", "shapes", "types", "strides")
    return {part: msgspec.Raw((row[f"{direction}_{part}"] or "[]").encode()) for part in parts}


def _attributes(row: dict[str, Any]) -> object:
    """As they were written; of old nodes in today's form."""
    if row["attributes"] is not None and row["attributes"] != "null":
        return msgspec.Raw(row["attributes"].encode())
    return [
        {"name": name, "type": _TYPES[name],
         "value": _EMPTY.get(name, 0) if row[column] is None else row[column]}
        for name, column in _COLUMNS.items()
    ]  # fmt: skip


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name once it is complete."""
    try:
        with named_file(path) as file:
            if path.name.endswith(".gz"):
                with gzip.GzipFile("", "wb", 6, file) as packed:
                    yield packed  # type: ignore[misc]
            else:
                yield file
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from None
