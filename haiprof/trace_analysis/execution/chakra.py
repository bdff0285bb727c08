"""A rank's execution trace as a Chakra file: typed nodes, dependencies, durations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import UsageError
from haiprof.base.safe_files import whole_file
from haiprof.trace_analysis.execution.dependencies import data_dependencies
from haiprof.trace_analysis.execution.graph_nodes import comm_type, with_type
from haiprof.trace_format.chakra.messages import (
    COLLECTIVES,
    COMM_COLL,
    COMM_RECV,
    COMM_SEND,
    NODE_TYPES,
    Attribute,
    global_metadata,
    io_info,
    node,
)
from haiprof.trace_format.chakra.wire import delimit

_COMMUNICATION = (COMM_COLL, COMM_SEND, COMM_RECV)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChakraGraph:
    """One rank's nodes and what each depends on."""

    rank: int
    nodes: pl.DataFrame
    """`NODE_SCHEMA` and `graph_nodes.TYPE_SCHEMA`, by number."""
    edges: pl.DataFrame
    """`before`, `after`, `why`: data dependencies; with the callers free of circles."""
    dropped_count: int
    """Dependencies that would have closed a circle."""
    header: dict[str, Any]
    """`schema`, `pid`, `time`, `start_ts`, `finish_ts`."""

    @property
    def type_counts(self) -> dict[str, int]:
        """Nodes by type."""
        counted = self.nodes["type"].value_counts().sort("type").iter_rows()
        return {NODE_TYPES[kind]: count for kind, count in counted}

    @property
    def notes(self) -> list[str]:
        """What a person must know."""
        kind, size = pl.col("collective_kind"), pl.col("comm_bytes")
        talking = self.nodes.filter(pl.col("type").is_in(_COMMUNICATION))
        nameless = talking.filter((pl.col("type") == COMM_COLL) & ~kind.is_in(list(COLLECTIVES)))
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
    return ChakraGraph(
        rank=rank,
        nodes=with_type(nodes),
        edges=edges,
        dropped_count=dropped,
        header=dict(header),
    )


def write_chakra(path: Path, graph: ChakraGraph) -> None:
    """Writes a Chakra file; it is complete or absent.

    Durations are exclusive, as in Chakra's converter, whole microseconds, and 0 of what is not
    linked; attributes `ts_ns`, `dur_ns` (inclusive) and `self_ns` are exact, and absent there.
    """
    try:
        with whole_file(path, below=path.parent) as file:
            file.write(delimit(_metadata(graph)))
            for message in _messages(graph):
                file.write(delimit(message))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from None


def _metadata(graph: ChakraGraph) -> bytes:
    plain = {
        name: value for name, value in graph.header.items() if isinstance(value, (int, str, bool))
    }
    return global_metadata({**plain, "rank": graph.rank})


def _messages(graph: ChakraGraph) -> Iterator[bytes]:
    before = dict(graph.edges.group_by("after").agg(pl.col("before").sort()).iter_rows())
    for row in graph.nodes.iter_rows(named=True):
        yield node(
            row["node"],
            row["name"],
            row["type"],
            control=[] if row["parent"] is None else [row["parent"]],
            data=before.get(row["node"], []),
            start_us=_micros(row["ts_ns"]),
            duration_us=_micros(row["self_ns"]),
            inputs=_io(row, "input"),
            outputs=_io(row, "output"),
            attributes=_attributes(row),
        )


def _micros(ns: int | None) -> int | None:
    return None if ns is None else max(0, ns) // 1000


def _io(row: dict[str, Any], direction: str) -> bytes:
    parts = ("values", "shapes", "types")
    return io_info(*(row[f"{direction}_{part}"] or "[]" for part in parts))


def _attributes(row: dict[str, Any]) -> dict[str, Attribute | None]:
    """Attributes with the names of Chakra's converter, then exact times, then communication's."""
    found: dict[str, Attribute | None] = {
        "rf_id": row["record_function_id"],
        "fw_parent": row["forward_parent"],
        "seq_id": row["sequence_number"],
        "scope": row["scope"],
        "tid": row["tid"],
        "fw_tid": row["forward_tid"],
        "op_schema": row["op_schema"] or "",
        "is_cpu_op": row["category"] is None,
        "ts_ns": row["ts_ns"],
        "dur_ns": row["dur_ns"],
        "self_ns": row["self_ns"],
        "linked_by": row["linked_by"],
    }
    if row["category"] is not None:
        found |= {"stream": row["stream"], "device": row["device"], "tensor_size": row["bytes"]}
    if row["type"] in _COMMUNICATION:
        found |= {"comm_size": row["comm_bytes"], "pg_name": row["group"]}
        found |= {"comm_type": comm_type(row["collective_kind"])}
    if row["type"] == COMM_SEND:
        found |= {"comm_dst": row["peer"], "comm_tag": row["tag"], "comm_type": None}
    if row["type"] == COMM_RECV:
        found |= {"comm_src": row["peer"], "comm_tag": row["tag"], "comm_type": None}
    return found
