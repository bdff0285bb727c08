"""Opens a run directory: records as columns, and what each rank and node left."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from haiprof.base.errors import RunFormatError, TraceFormatError
from haiprof.base.units import duration_text
from haiprof.run_format import reader
from haiprof.run_format.layout import NodePaths, RankPaths, RunPaths
from haiprof.run_format.manifest import Manifest, newest_run, read_manifest
from haiprof.run_format.schema import Table

NUMPY_TYPE = {"i64": "<i8", "f64": "<f8", "f32": "<f4", "u32": "<u4"}
_I64_LIMIT = 1 << 63
T = TypeVar("T")


def record_rows(records: reader.RecordFile) -> npt.NDArray[Any]:
    """The records as they are, without a copy."""
    row = np.dtype([(name, NUMPY_TYPE[kind]) for name, kind, _, _ in records.columns])
    return np.frombuffer(records.data, dtype=row)


def record_columns(records: reader.RecordFile) -> dict[str, npt.NDArray[Any]]:
    """The records as one strided array per column, without a copy."""
    table = record_rows(records)
    return {name: table[name] for name, _, _, _ in records.columns}


def read_table(
    path: Path, table: Table, *, first: int = 0, limit: int | None = None,
    optional: Collection[str] = (),
) -> reader.RecordFile:  # fmt: skip
    """Reads a record file that must hold the columns of one table, but for optional ones."""
    records = reader.read_records(path, first=first, limit=limit)
    have = {(name, kind) for name, kind, _, _ in records.columns}
    lacking = [c.name for c in table.columns
               if (c.name, c.type) not in have and c.name not in optional]  # fmt: skip
    if records.table != table.name or lacking:
        raise RunFormatError(
            f"{path}: holds the table {records.table!r}, expected {table.name!r}"
            + (f" with the column {lacking[0]!r}" if lacking else "")
        )
    return records


def read_counters(
    path: Path, table: Table, *, first: int = 0, limit: int | None = None
) -> reader.RecordFile:
    """Reads a record file of counters: those that its haiprof did not have yet are not in it."""
    optional = [column.name for column in table.metrics]
    return read_table(path, table, first=first, limit=limit, optional=optional)


def integer(value: object) -> int | None:
    """A JSON value as an integer of 64 bits; None for anything else."""
    if type(value) is float and math.isfinite(value):
        value = int(value)
    return value if type(value) is int and -_I64_LIMIT < value < _I64_LIMIT else None


def number(value: object) -> float | None:
    """A JSON value as a finite number; None for anything else."""
    if type(value) is int and abs(value) < _I64_LIMIT:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else None


def text(value: object) -> str | None:
    """A JSON value as text that can be encoded; None for anything else."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def switch(value: object) -> bool | None:
    """A JSON value as a truth value; None for anything else."""
    return value if isinstance(value, bool) else None


def mapping(value: object) -> Mapping[str, Any]:
    """A JSON object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def entries(value: object) -> list[Any]:
    """A JSON list; empty for anything else."""
    return value if isinstance(value, list) else []


def objects(value: object) -> list[Mapping[str, Any]]:
    """The objects of a JSON list."""
    return [entry for entry in entries(value) if isinstance(entry, dict)]


def counts(value: object) -> dict[str, int]:
    """The numbers of a JSON object, by name."""
    pairs = ((text(name), integer(count)) for name, count in mapping(value).items())
    return {name: count for name, count in pairs if name is not None and count is not None}


_OF_TYPE: Mapping[str, Callable[[object], object]] = {
    "int | None": integer, "float | None": number, "str | None": text, "bool | None": switch,
    "str": lambda value: text(value) or "", "bool": lambda value: value is True,
    "Mapping[str, int]": counts,
    "tuple[str, ...]": lambda value: tuple(filter(None, map(text, entries(value)))),
    "tuple[int, ...]": lambda value: tuple(n for n in entries(value) if type(n) is int),
}  # fmt: skip
"""How a field of a record is read from JSON, by its type."""


def read_record(record: type[T], content: Mapping[str, Any], **known: object) -> T:
    """A record from a JSON object whose keys are its fields; `known` has what is read otherwise."""
    types = {f.name: str(f.type) for f in fields(cast(Any, record)) if f.name not in known}
    return record(**known, **{name: _OF_TYPE[of](content.get(name)) for name, of in types.items()})


def read_of_processes(
    paths: Iterable[Path], limit_bytes: int
) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Host, process and content of what processes wrote of themselves; damaged files left out."""
    for path in paths:
        try:
            content = {} if path.stat().st_size > limit_bytes else reader.read_json(path)
        except (OSError, RunFormatError):
            continue
        host, pid = text(content.get("host")), integer(content.get("pid"))
        if host is not None and pid is not None:
            yield host, pid, content


@contextlib.contextmanager
def note_damage(notes: list[str]) -> Iterator[None]:
    """Notes what cannot be read, and goes on behind the block."""
    try:
        yield
    except (RunFormatError, TraceFormatError) as error:
        notes.append(str(error))


def clock_offset_ns(anchor: object) -> int | None:
    """Unix time minus the monotonic clock, by a clock anchor in JSON; None without a whole one."""
    wall, mono = (integer(mapping(anchor).get(name)) for name in ("wall_ns", "mono_ns"))
    return None if wall is None or mono is None else wall - mono


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLines:
    """What a rank or the agent of a node wrote down of its events."""

    lines: tuple[Mapping[str, Any], ...]  # events.jsonl, in order
    notes: tuple[str, ...]  # what was damaged

    def of_type(self, line_type: str) -> list[Mapping[str, Any]]:
        """Lines of one type, in order."""
        return [line for line in self.lines if line.get("type") == line_type]

    def first(self, line_type: str) -> Mapping[str, Any]:
        """The first line of one type; empty where there is none."""
        return next((x for x in self.lines if x.get("type") == line_type), {})

    def last(self, line_type: str) -> Mapping[str, Any]:
        """The last line of one type; empty where there is none."""
        return next((x for x in reversed(self.lines) if x.get("type") == line_type), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles(EventLines):
    """What one rank reported, apart from its spans."""

    rank: int
    attempt: int
    paths: RankPaths
    report: Mapping[str, Any]  # rank.json; empty where it cannot be read

    @property
    def clock_offset_ns(self) -> int | None:
        """Unix time minus the rank's clock, as it wrote both when it began to be recorded."""
        return clock_offset_ns(self.report.get("clock"))

    def names(self, line_type: str) -> dict[int, str]:
        """Name by tag, from `root` or `optimizer` lines."""
        found = ((integer(x.get("tag")), text(x.get("name"))) for x in self.of_type(line_type))
        return {tag: name for tag, name in found if tag is not None and name is not None}

    def families(self) -> dict[int, int]:
        """Family by root tag; roots of one family share their parameters."""
        found = ((integer(x.get("tag")), integer(x.get("family"))) for x in self.of_type("root"))
        return {tag: family for tag, family in found if tag is not None and family is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFiles(EventLines):
    """What the agent of one host reported, apart from its counters."""

    host: str
    paths: NodePaths


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """A run directory as it was found."""

    paths: RunPaths
    manifest: Manifest | None  # run.json; None where it is damaged
    ranks: tuple[RankFiles, ...]
    nodes: tuple[NodeFiles, ...]
    hook_failures: tuple[str, ...]  # where the hook could not be loaded, with the error
    notes: tuple[str, ...]  # what was damaged, ranks and nodes apart

    @property
    def about(self) -> Manifest:
        """The manifest; an empty one where it is damaged."""
        return self.manifest or _NO_MANIFEST

    def last_attempts(self) -> dict[int, RankFiles]:
        """The last attempt of each rank."""
        return {r.rank: r for r in sorted(self.ranks, key=lambda r: (r.rank, r.attempt))}


_NO_MANIFEST = Manifest(haiprof_version="", name="", command=[])


def node_notes(node: NodeFiles) -> list[str]:
    """What was damaged, and what happened to the whole machine while it recorded."""
    notes = list(node.notes)
    for line in (*node.of_type("suspend"), *node.of_type("job_suspended")):
        gap = duration_text(integer(line.get("gap_ns")))
        notes.append(
            f"the machine was suspended for {gap}: rates are right, but Unix times after it are "
            "too early by as much" if line["type"] == "suspend" else
            f"the job was suspended for {gap}: its ranks were stopped by a signal"
            if line.get("seen") is True else
            f"the launcher did not run for {gap}: the job was suspended (Ctrl-Z, SIGSTOP), or the "
            "node had no time for it"
        )  # fmt: skip
    return notes


def open_run(path: Path, *, hosts: Collection[str] | None = None) -> RunFiles:
    """Opens a run directory, or the newest run of a log directory; all, or these nodes' part."""
    paths = RunPaths(newest_run(path))
    manifest, notes = _manifest(paths)
    ranks = tuple(_rank_files(*folder) for folder in paths.rank_folders()
                  if hosts is None or _report(folder[2])[0].get("host") in hosts)  # fmt: skip
    nodes = []
    for name, own in paths.node_folders():
        if hosts is None or name in hosts:
            lines, damaged = _events(own.events)
            nodes.append(NodeFiles(host=text(name) or "", paths=own, lines=lines, notes=damaged))
    if manifest is None and not any(r.lines for r in ranks) and not any(n.lines for n in nodes):
        raise RunFormatError(f"{notes[0]}; and no rank or node of this run can be read")
    return RunFiles(
        paths=paths, manifest=manifest, ranks=ranks, nodes=tuple(nodes),
        hook_failures=tuple(reader.read_failures(paths.boot_failures)), notes=notes,
    )  # fmt: skip


def _report(paths: RankPaths) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    return _or_note(reader.read_json, paths.report, dict[str, Any]())


def _manifest(paths: RunPaths) -> tuple[Manifest | None, tuple[str, ...]]:
    content, damaged = _or_note(reader.read_json, paths.manifest, dict[str, Any]())
    if damaged:
        return None, damaged
    version = content.get("version")
    if type(version) is int:
        reader.check_version(paths.manifest, version)
    try:
        return read_manifest(paths), ()
    except RunFormatError as error:
        return None, (str(error),)


def open_rank(folder: Path) -> RankFiles:
    """What one rank reported, of its folder in a run directory."""
    rank, _, attempt = folder.name.partition(".")
    return _rank_files(int(rank), int(attempt or 0), RankPaths(folder))


def _rank_files(rank: int, attempt: int, paths: RankPaths) -> RankFiles:
    report, damaged = _report(paths)
    lines, notes = _events(paths.events)
    return RankFiles(rank=rank, attempt=attempt, paths=paths, report=report, lines=lines,
                     notes=damaged + notes)  # fmt: skip


def _events(path: Path) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    none: tuple[list[dict[str, Any]], tuple[str, ...]] = [], ()
    (lines, notes), unread = _or_note(reader.read_lines, path, none)
    return tuple(lines), (*notes, *unread)


def _or_note(read: Callable[[Path], T], path: Path, none: T) -> tuple[T, tuple[str, ...]]:
    """What a file holds, or why it cannot be read."""
    try:
        return read(path), ()
    except RunFormatError as error:
        return none, (str(error),)
