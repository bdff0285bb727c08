"""What a rank keeps of its old steps: `folded.rec`, sums of blocks of steps, and slow steps whole.

A rank's own files grow with each step. What is older than the hours that are kept in full is folded
beside the job: sums of blocks of about a minute, slow steps, saves and a part of the samples go
into `folded.rec`, which takes its place at once, by a rename. Only then the room of the records
that it stands for is given back to the file system, as a hole at the beginning of each file: who
appends to them notices nothing, and places in them stay what they were. A reader takes from
`folded.rec` where its own records begin, and never looks at what is before.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from haiprof.base.errors import RunFormatError
from haiprof.base.ledger import POSITIONS
from haiprof.base.safe_files import open_to_append, whole_file
from haiprof.run_format.reader import RecordFile, check_version, is_consistent, open_regular
from haiprof.run_format.schema import FORMAT_NAME, SCHEMA_VERSION, Column, Table

T = TypeVar("T")
FOLDED = "folded"
_HEADER_LIMIT_BYTES = 64 << 20
_DATA_LIMIT_BYTES = 1 << 32
HOST_PHASES = ("dataloader", "forward", "backward", "optimizer")

BLOCKS = Table(
    "blocks",
    (
        Column("first_step", "i64", "count", "key", "number of its first step"),
        Column("step_count", "i64", "count", "gauge", "how many steps follow each other in it"),
        Column("start_ns", "i64", "ns", "time", "begin of its first step; it ends at the next's"),
        Column("trained_ns", "i64", "ns", "time", "end of the last optimizer step in it"),
        Column("step_ns", "i64", "ns", "span", "sum over its steps, without evaluations"),
        Column("longest_ns", "i64", "ns", "span", "the longest of them"),
        Column("optimizer_step_count", "i64", "count", "gauge", "in all of them"),
        Column("micro_step_count", "i64", "count", "gauge", "backward passes in all of them"),
        Column("skipped_count", "i64", "count", "gauge", "steps that the scaler skipped"),
        Column("traced", "i64", "count", "gauge", "1: a trace window was in them"),
        Column("idle_ns", "f64", "ns", "span", "of the mean step, nothing queued: at most; NaN"),
        *(Column(f"{p}_host_ns", "i64", "ns", "span", "sum of the phase") for p in HOST_PHASES),
        *(Column(f"{p}_ns", "i64", "ns", "span", "sum, collections apart") for p in POSITIONS),
        *(Column(f"{p}_gc_ns", "i64", "ns", "span", "collections in it") for p in POSITIONS),
    ),
)
"""Sums of consecutive steps; all steps are in one, slow ones too. Columns of zeros are left out."""
SLOW = Table(
    "slow",
    (
        Column("step", "i64", "count", "key", "its number"),
        Column("start_ns", "i64", "ns", "time", "CLOCK_MONOTONIC"),
        Column("step_ns", "i64", "ns", "span", "without evaluations"),
        *(Column(f"{p}_host_ns", "i64", "ns", "span", "in the phase") for p in HOST_PHASES),
        Column("micro_step_count", "i64", "count", "gauge", "backward passes"),
        Column("optimizer_step_count", "i64", "count", "gauge", "optimizer steps"),
        Column("skipped", "i64", "count", "gauge", "1: the scaler let no optimizer step"),
        Column("boundary", "i64", "count", "gauge", "what marks it, as in run_analysis.steps"),
        Column("traced", "i64", "count", "gauge", "1: a trace window was in it"),
        Column("confidence", "f64", "ratio", "gauge", "how sure its boundary is"),
    ),
)
"""The first step, and those that took much longer than the others around them."""
STRETCHES = Table(
    "stretches",
    (
        Column("start_ns", "i64", "ns", "time", "CLOCK_MONOTONIC"),
        Column("end_ns", "i64", "ns", "time", "the same"),
        Column("kind", "i64", "count", "key", "a position, or one of those below"),
        Column("step", "i64", "count", "key", "in whose period it lies; -1: in none"),
    ),
)
"""Times of evaluations, checkpoints and compilations in their order; saves; waits for ranks."""
EVALUATED, SAVED, MET = range(len(POSITIONS), len(POSITIONS) + 3)
"""Kinds beside the positions: an evaluation, a save, a collective before the first step."""
SAMPLED = Table(
    "samples",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC"),
        Column("step", "i64", "count", "key", "-1: outside steps"),
        Column("period", "i64", "count", "key", "the step in whose period it lies; -1: none"),
        Column("cpu_ns", "i64", "ns", "span", "CPU time since the one before; -1: not known"),
        Column("queue_ns", "i64", "ns", "span", "waiting for a core, likewise"),
        Column("stack", "u32", "count", "key", "as the process numbers it"),
        Column("codes", "u32", "count", "packed", "see CODE_BITS"),
    ),
)
"""Samples of the training thread at about even distances."""
CODE_BITS = {
    "position": 4, "phase": 4, "lock_wait": 3, "wait": 4, "around": 1, "hidden": 1
}  # fmt: skip
"""Bits of a sample's codes, the lowest first; all ones of several is -1."""
SPANS = Table(
    "spans",
    (
        Column("start", "i64", "packed", "span", "as in phases.rec"),
        Column("end", "i64", "packed", "span", "as in phases.rec"),
    ),
)
"""All spans of the slow steps."""
SECTIONS = (BLOCKS, SLOW, STRETCHES, SAMPLED, SPANS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedFile:
    """A `folded.rec` as it was read."""

    sections: Mapping[str, RecordFile]  # by name of SECTIONS
    facts: Mapping[str, Any]  # where each file goes on, how many steps were folded, sums of all
    stack_lines: Sequence[Mapping[str, Any]]
    """What stacks.jsonl would begin with: its header, and all frames and stacks so far."""

    def whole(self, name: str) -> int:
        """A fact that is a number; 0 where it lacks."""
        value = self.facts.get(name)
        return value if type(value) is int and 0 <= value < 1 << 62 else 0


_TRIES = 3  # so often is read what is folded at the same time, which happens once an hour


def read_of_one_folding(path: Path, read: Callable[[], T]) -> T:
    """What is read of a file and of what was folded of it, which must both be of one moment."""

    def identity() -> tuple[int, int] | None:
        """Tells one folding from the next; None without any."""
        try:
            found = os.stat(path, follow_symlinks=False)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    for _ in range(_TRIES):
        before, found = identity(), read()
        if before == identity():
            break
    return found


def write_folded(
    path: Path, sections: Mapping[str, tuple[Sequence[Column], bytes]], *,
    facts: Mapping[str, object], stack_lines: Sequence[Mapping[str, object]],
    clock: Mapping[str, int], below: Path,
) -> None:  # fmt: skip
    """Puts it in place at once; what it stands for may be removed once this has returned."""
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in stack_lines)
    header = {
        "format": FORMAT_NAME, "version": SCHEMA_VERSION, "table": FOLDED, "clock": dict(clock),
        "facts": dict(facts),
        "sections": [
            {"table": name, "columns": [[c.name, c.type, c.unit, c.kind] for c in columns],
             "record_bytes": Table(name, tuple(columns)).record_bytes, "bytes": len(data)}
            for name, (columns, data) in sections.items()
        ],
        "stack_bytes": len(lines),
    }  # fmt: skip
    data = json.dumps(header).encode() + b"\n" + b"".join(d for _, d in sections.values()) + lines
    write_synced(path, data, below=below)


def write_synced(path: Path, data: bytes, *, below: Path) -> None:
    """Puts a file in place once it is on the disk: what it replaces is given up after that."""
    with whole_file(path, below=below) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_folded(path: Path) -> FoldedFile | None:
    """What was folded of a rank; None where nothing was."""
    if (read := _read_whole(path)) is None:
        return None
    text, body = read
    try:
        header = json.loads(text)
        check_version(path, header.get("version"))
        sections, at = {}, 0
        for each in header["sections"]:
            one = {"clock": header["clock"], **each}
            size = each["bytes"]
            data = body[at : at + size]
            if not is_consistent(one) or len(data) != size or size % each["record_bytes"]:
                raise ValueError(each["table"])
            columns = tuple((str(n), str(t), str(u), str(k)) for n, t, u, k in each["columns"])
            sections[each["table"]] = RecordFile(path, each["table"], columns, one, data, ())
            at += size
        rest = body[at : at + header["stack_bytes"]]
        lines = [line for line in map(json.loads, rest.splitlines()) if isinstance(line, dict)]
        facts = header["facts"]
        lacking = [t.name for t in SECTIONS if t.name not in sections]
        sound = header["table"] == FOLDED and len(rest) == header["stack_bytes"]
        if not sound or lacking or not isinstance(facts, dict):
            raise ValueError(lacking)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunFormatError(f"{path}: damaged: what was folded is not known") from None
    return FoldedFile(sections=sections, facts=facts, stack_lines=lines)


def _read_whole(path: Path) -> tuple[bytes, bytes] | None:
    """The header's line, and all behind it; None where there is no such file."""
    try:
        with open_regular(path) as file:
            return file.readline(_HEADER_LIMIT_BYTES), file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFormatError(f"{path}: {error.strerror or error}") from None


def write_folded_records(path: Path, head: Mapping[str, Any], data: bytes, *, below: Path) -> None:
    """A node's old records of one source, with how many of its file they stand for."""
    text = json.dumps({**head, "bytes": len(data)}).encode() + b"\n"
    write_synced(path, text + zlib.compress(data, 6), below=below)


def read_folded_records(path: Path) -> RecordFile | None:
    """The old records, by time; None where nothing was folded."""
    if (read := _read_whole(path)) is None:
        return None
    text, body = read
    try:
        header = json.loads(text)
        check_version(path, header.get("version"))
        size = header["bytes"]
        data = zlib.decompressobj().decompress(body, min(size, _DATA_LIMIT_BYTES))
        sound = is_consistent(header) and len(data) == size and not size % header["record_bytes"]
        if not sound or type(header["folded"]["records"]) is not int:
            raise ValueError(size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error):
        raise RunFormatError(f"{path}: damaged: what was folded is not known") from None
    columns = tuple((str(n), str(t), str(u), str(k)) for n, t, u, k in header["columns"])
    return RecordFile(path, header["table"], columns, header, data, ())


_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2


def free_beginning(path: Path, *, first: int, end: int, below: Path) -> bool:
    """Gives a file's room between two places back; what reads there finds zeros.

    The file keeps its size, and whoever appends to it notices nothing (fallocate(2),
    FALLOC_FL_PUNCH_HOLE: ext4, XFS, btrfs, tmpfs, Lustre, NFS 4.2). Whether that worked: other file
    systems keep all of it.
    """
    if end <= first:
        return True
    if (fallocate := getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)) is None:
        return False
    number = open_to_append(path, below=below)
    try:
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        offset, length = ctypes.c_int64(first), ctypes.c_int64(end - first)
        return bool(fallocate(number, mode, offset, length) == 0)
    finally:
        os.close(number)
