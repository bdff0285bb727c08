"""Dumps of PyTorch's Flight Recorder: the last collectives of one rank, with their times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec
import polars as pl

from haiprof.base.code_places import frame_text, own_frame
from haiprof.base.errors import TraceFormatError
from haiprof.run_format.unpack import read_text
from haiprof.trace_format.execution import JsonError
from haiprof.trace_format.memory_snapshot import read_plain_pickle

SIZE_LIMIT_BYTES = 1 << 28  # of the unpacked text: a ring of 100,000 entries is 50 MB

TORCH_DUMP_LIMIT_BYTES = 64_000_000
_RANKS_CHARS, _FRAMES = 1 << 20, 64

FLIGHT_SCHEMA = {
    "group": pl.String, "group_name": pl.String, "sequence": pl.Int64, "kind": pl.String,
    "p2p": pl.Boolean, "element_count": pl.Int64, "dtype": pl.String, "created_ns": pl.Int64,
    "started_ns": pl.Int64, "completed_ns": pl.Int64, "state": pl.String,
}  # fmt: skip


class _Entry(msgspec.Struct, gc=False):
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    is_p2p: bool = False
    profiling_name: str = ""
    process_group: list[str] = []
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] | str = []
    frames: list[dict[str, str | int]] = []
    time_created_ns: int = 0
    time_discovered_started_ns: int | None = 0
    time_discovered_completed_ns: int | None = 0
    state: str = ""


class _Ring(msgspec.Struct):
    entries: list[_Entry] = []


class _Dump(msgspec.Struct):
    wall_ns: int
    groups: dict[str, list[int]] = {}
    traces: list[_Ring] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """What one rank's Flight Recorder held at one time."""

    wall_ns: int | None  # Unix time of the dump; None in one of torch's own
    groups: Mapping[str, Sequence[int]]
    """Global ranks of each process group, by the group's name, where the job knew them."""
    lines: Sequence[str | None] = ()
    """Of a dump of torch's own: the line of the job's code that enqueued each entry."""
    entries: pl.DataFrame
    """Columns of FLIGHT_SCHEMA, in the order in which they were enqueued.

    `sequence` counts the collectives of a group (of `p2p` ones, the point-to-point operations);
    `created_ns` is Unix time at which the rank enqueued it; `started_ns` and `completed_ns` are
    null where the backend does not tell (gloo).
    """


def read_flight(path: Path) -> Flight:
    """Reads a dump that a rank of a recorded run wrote."""
    try:
        content = read_text(path, limit_bytes=SIZE_LIMIT_BYTES)
        dump = msgspec.json.decode(content, type=_Dump)
        frames = [_frame(ring.entries) for ring in dump.traces]
    except (OSError, OverflowError, TypeError, *JsonError) as error:
        raise TraceFormatError(f"{path}: no dump of the Flight Recorder: {error}") from None
    empty = pl.DataFrame(schema=FLIGHT_SCHEMA)
    keys = ["group", "kind", "sequence", "p2p", "created_ns"]
    entries = pl.concat([empty, *frames]).unique(keys, maintain_order=True, keep="first")
    return Flight(wall_ns=dump.wall_ns, groups=dump.groups, entries=entries)


def read_torch_dump(path: Path) -> Flight:
    """Reads a dump as PyTorch's own watchdog writes it: a pickle of plain values, or JSON."""
    try:
        if path.stat().st_size > TORCH_DUMP_LIMIT_BYTES:
            raise OverflowError("it is larger than 64 MB")
        content = path.read_bytes()
        found = json.loads(content) if content[:1] == b"{" else read_plain_pickle(content)
        if not isinstance(found, dict) or not {"entries", "pg_config"} & set(found):
            raise TypeError("it has no entries")
        entries = msgspec.convert(found.get("entries", []), type=list[_Entry], strict=False)
        return Flight(
            wall_ns=None, groups=dict(_members(found.get("pg_config"))), entries=_frame(entries),
            lines=[_line(entry) for entry in entries],
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001  damaged pickles raise errors of any type
        raise TraceFormatError(f"{path}: no dump of the Flight Recorder: {error}") from None


def _members(config: object) -> Iterator[tuple[str, list[int]]]:
    """Ranks by group from `pg_config`, where they are a text: `[0, 1]`."""
    for name, group in config.items() if isinstance(config, dict) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        numbers = [int(each) for each in re.findall(r"\d{1,7}", str(ranks)[:_RANKS_CHARS])]
        if numbers:
            yield str(name), numbers


def _line(entry: _Entry) -> str | None:
    stack = [(str(f.get("filename", "")), int(f.get("line", 0)), str(f.get("name", "")))
             for f in reversed(entry.frames[:_FRAMES])]  # fmt: skip
    frame = own_frame(stack)
    return None if frame is None else frame_text(frame)


def _frame(entries: Sequence[_Entry]) -> pl.DataFrame:
    # PyTorch's tests of its own reader have one text in place of a list of types.
    types = [
        [e.input_dtypes] if isinstance(e.input_dtypes, str) else e.input_dtypes for e in entries
    ]
    columns = {
        "group": [next(iter(e.process_group), "") for e in entries],
        "group_name": [next(reversed(e.process_group), "") for e in entries],
        "sequence": [e.p2p_seq_id if e.is_p2p else e.collective_seq_id for e in entries],
        "kind": [e.profiling_name.rpartition(":")[2] for e in entries],
        "p2p": [e.is_p2p for e in entries],
        "element_count": [sum(prod(size) for size in e.input_sizes) for e in entries],
        "dtype": [next(iter(own), None) or None for own in types],
        "created_ns": [e.time_created_ns or None for e in entries],
        "started_ns": [e.time_discovered_started_ns or None for e in entries],
        "completed_ns": [e.time_discovered_completed_ns or None for e in entries],
        "state": [e.state for e in entries],
    }
    return pl.DataFrame(columns, schema=FLIGHT_SCHEMA)
