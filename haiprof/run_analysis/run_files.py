"""Opens a run directory: records as columns, sampled stacks, and what each rank and node left."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Floats, Ints
from haiprof.base.units import duration_text
from haiprof.run_format.layout import NodePaths, RankPaths, RunPaths
from haiprof.run_format.manifest import Manifest, newest_run, read_manifest
from haiprof.run_format.reader import (
    RecordFile,
    check_version,
    read_failures,
    read_json,
    read_lines,
    read_records,
)
from haiprof.run_format.schema import Table
from haiprof.run_format.stack_lines import (
    HEADER,
    LOCK_STATES,
    SAMPLES,
    STACKS_VERSION,
    WAIT_LETTERS,
)

_NUMPY_TYPE = {"i64": "<i8", "f64": "<f8", "f32": "<f4", "u32": "<u4"}
_I64_LIMIT = 1 << 63
T = TypeVar("T")


def record_columns(records: RecordFile) -> dict[str, npt.NDArray[Any]]:
    """The records as one strided array per column, without a copy."""
    row = np.dtype([(name, _NUMPY_TYPE[kind]) for name, kind, _, _ in records.columns])
    table = np.frombuffer(records.data, dtype=row)
    return {name: table[name] for name, _, _, _ in records.columns}


def read_table(
    path: Path, table: Table, *, first: int = 0, limit: int | None = None,
    optional: Collection[str] = (),
) -> RecordFile:  # fmt: skip
    """Reads a record file that must hold the columns of one table, but for optional ones."""
    records = read_records(path, first=first, limit=limit)
    have = {(name, kind) for name, kind, _, _ in records.columns}
    lacking = [c.name for c in table.columns if (c.name, c.type) not in have]
    lacking = [name for name in lacking if name not in optional]
    if records.table != table.name or lacking:
        raise RunFormatError(
            f"{path}: holds the table {records.table!r}, expected {table.name!r}"
            + (f" with the column {lacking[0]!r}" if lacking else "")
        )
    return records


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
    "int | None": integer,
    "float | None": number,
    "str | None": text,
    "bool | None": switch,
    "str": lambda value: text(value) or "",
    "bool": lambda value: value is True,
    "Mapping[str, int]": counts,
    "tuple[str, ...]": lambda value: tuple(filter(None, map(text, entries(value)))),
    "tuple[int, ...]": lambda value: tuple(n for n in entries(value) if type(n) is int),
}
"""How a field of a record is read from JSON, by its type."""


def read_record(record: type[T], content: Mapping[str, Any], **known: object) -> T:
    """A record from a JSON object whose keys are its fields; `known` has what is read otherwise."""
    types = {f.name: str(f.type) for f in fields(cast(Any, record)) if f.name not in known}
    return record(**known, **{name: _OF_TYPE[of](content.get(name)) for name, of in types.items()})


def clock_offset_ns(anchor: object) -> int | None:
    """Unix time minus the monotonic clock, by a clock anchor in JSON; None without a whole one."""
    wall, mono = (integer(mapping(anchor).get(name)) for name in ("wall_ns", "mono_ns"))
    return None if wall is None or mono is None else wall - mono


def mean(values: pl.Series) -> float | None:
    """Mean without nulls; None where nothing is left."""
    value = values.mean()
    return float(value) if isinstance(value, (int, float)) else None


def median(values: pl.Series) -> float | None:
    """Median without nulls; None where nothing is left."""
    value = values.median()
    return float(value) if isinstance(value, (int, float)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLines:
    """What a rank or the agent of a node wrote down of its events."""

    lines: tuple[Mapping[str, Any], ...]
    """events.jsonl, in order."""
    notes: tuple[str, ...]
    """What was damaged."""

    def of_type(self, line_type: str) -> list[Mapping[str, Any]]:
        """Lines of one type, in order."""
        return [line for line in self.lines if line.get("type") == line_type]

    def last(self, line_type: str) -> Mapping[str, Any]:
        """The last line of one type; empty where there is none."""
        return next((x for x in reversed(self.lines) if x.get("type") == line_type), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles(EventLines):
    """What one rank reported, apart from its spans."""

    rank: int
    attempt: int
    paths: RankPaths
    report: Mapping[str, Any]
    """rank.json; empty where it cannot be read."""

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
    manifest: Manifest | None
    """run.json; None where it is damaged."""
    ranks: tuple[RankFiles, ...]
    nodes: tuple[NodeFiles, ...]
    hook_failures: tuple[str, ...]
    """Processes in which the hook could not be loaded, with the error."""
    notes: tuple[str, ...]
    """What was damaged, ranks and nodes apart."""

    def last_attempts(self) -> dict[int, RankFiles]:
        """The last attempt of each rank."""
        return {r.rank: r for r in sorted(self.ranks, key=lambda r: (r.rank, r.attempt))}


def node_notes(node: NodeFiles) -> list[str]:
    """What was damaged, and what happened to the whole machine while it recorded."""
    gaps = [integer(line.get("gap_ns")) for line in node.of_type("suspend")]
    return [
        *node.notes,
        *(
            f"the machine was suspended for {duration_text(gap)}: rates are right, but Unix times"
            " after it are too early by as much"
            for gap in gaps
        ),
        *(_suspended_text(line) for line in node.of_type("job_suspended")),
    ]


def _suspended_text(line: Mapping[str, Any]) -> str:
    gap = duration_text(integer(line.get("gap_ns")))
    if line.get("seen") is True:
        return f"the job was suspended for {gap}: its ranks were stopped by a signal"
    return (
        f"the launcher did not run for {gap}: the job was suspended (Ctrl-Z, SIGSTOP), or the node "
        "had no time for it"
    )


def open_run(path: Path) -> RunFiles:
    """Opens a run directory, or the newest run of a log directory."""
    paths = RunPaths(newest_run(path))
    manifest, notes = _manifest(paths)
    ranks = tuple(_rank_files(*folder) for folder in paths.rank_folders())
    nodes = []
    for host, own in paths.node_folders():
        lines, damaged = _events(own.events)
        nodes.append(NodeFiles(host=text(host) or "", paths=own, lines=lines, notes=damaged))
    if manifest is None and not any(r.lines for r in ranks) and not any(n.lines for n in nodes):
        raise RunFormatError(f"{notes[0]}; and no rank or node of this run can be read")
    return RunFiles(
        paths=paths,
        manifest=manifest,
        ranks=ranks,
        nodes=tuple(nodes),
        hook_failures=tuple(read_failures(paths.boot_failures)),
        notes=notes,
    )


def _manifest(paths: RunPaths) -> tuple[Manifest | None, tuple[str, ...]]:
    content, damaged = _or_note(read_json, paths.manifest, dict[str, Any]())
    if damaged:
        return None, damaged
    version = content.get("version")
    if type(version) is int:
        check_version(paths.manifest, version)
    try:
        return read_manifest(paths), ()
    except RunFormatError as error:
        return None, (str(error),)


def _rank_files(rank: int, attempt: int, paths: RankPaths) -> RankFiles:
    report, damaged = _or_note(read_json, paths.report, dict[str, Any]())
    lines, notes = _events(paths.events)
    return RankFiles(rank=rank, attempt=attempt, paths=paths, report=report, lines=lines,
                     notes=damaged + notes)  # fmt: skip


def _events(path: Path) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    none: tuple[list[dict[str, Any]], tuple[str, ...]] = [], ()
    (lines, notes), unread = _or_note(read_lines, path, none)
    return tuple(lines), (*notes, *unread)


def _or_note(read: Callable[[Path], T], path: Path, none: T) -> tuple[T, tuple[str, ...]]:
    """What a file holds, or why it cannot be read."""
    try:
        return read(path), ()
    except RunFormatError as error:
        return none, (str(error),)


_NS_PER_US = 1000
_TIME_LIMIT_NS = 1 << 62
_STACK_LIMIT = 1 << 16
"""Stacks of one process that are read; a rank writes an eighth of that."""


class Frame(NamedTuple):
    """One line of code that was running."""

    file: str
    line: int
    function: str
    expression: str = ""
    """What of that line was running, in the user's own code; empty where it is not known."""
    statement: int = 0
    """Which one of its line, where several are on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProcess:
    """What was sampled of one process."""

    pid: int
    worker: int | None
    """Number of the DataLoader worker; None for the training process."""
    libraries: tuple[str, ...]
    """Folders of installed code."""
    frames: Sequence[Frame]
    parents: Sequence[int]
    """Of each stack from 1 on: its caller's; 0 has no frames."""
    places: Sequence[int]
    """Of each stack from 1 on: its frame."""
    time_ns: Ints
    """One per sample, on the clock of the spans."""
    late_ns: Ints
    stack: Ints
    """0 where no Python code ran or the stack is not known."""
    lock_wait: Ints
    """How the training thread stood to the interpreter lock: LOCK_HELD and the others."""
    cpu_ns: Ints
    """CPU time of the thread since the sample before; -1 where it is not known."""
    queue_ns: Ints
    """How long it waited for a core since that was last known; -1 where nobody asked."""
    wait: Ints
    """What it waited for: an index into WAITS; -1 where it is not known."""
    other_time_ns: Ints
    """One per look at another Python thread of the process that was busy."""
    other_stack: Ints
    other_cores: Floats
    """Share of a core that it used since the look before."""
    other_since_ns: Ints
    """Time since the look before."""
    unknown_count: int
    """Samples whose stack was left out, or is damaged."""


_PER_SAMPLE = ("time_ns", "late_ns", "stack", "lock_wait", "cpu_ns", "queue_ns", "wait")


@dataclass(slots=True)
class _Read:
    """One process while its lines are read."""

    worker: int | None = None
    libraries: tuple[str, ...] = ()
    frames: dict[int, Frame] = field(default_factory=dict)
    stacks: dict[int, tuple[int, int]] = field(default_factory=dict)
    parts: list[tuple[Ints, ...]] = field(default_factory=list)
    """Columns of _PER_SAMPLE, of each line."""
    others: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Time, stack, thousandths of a core and time since the look before."""


def read_stack_file(path: Path) -> tuple[list[SampledProcess], tuple[str, ...]]:
    """The processes of one file, in order; and what was damaged."""
    lines, notes = read_lines(path)
    found: dict[int, _Read] = {}
    for line in lines:
        pid = integer(line.get("pid"))
        if pid is None:
            continue
        if line.get("type") == HEADER and line.get("version") == STACKS_VERSION:
            found[pid] = _begin(line)
        elif line.get("type") == SAMPLES and pid in found:
            _add(found[pid], line)
    return [_process(pid, read) for pid, read in found.items()], notes


def _begin(line: Mapping[str, Any]) -> _Read:
    named = map(text, entries(line.get("libraries")))
    return _Read(integer(line.get("worker")), tuple(name for name in named if name))


def _add(read: _Read, line: Mapping[str, Any]) -> None:
    """Takes in one line of samples; what does not fit in it is passed over."""
    for number, frame in _number_entries(line, "frames", "first_frame"):
        if len(frame) >= 3:
            file, at, name = text(frame[0]), integer(frame[1]), text(frame[2])
            expression = [text(part) or "" for part in frame[4:5]]
            if file is not None and at is not None and name is not None:
                statement = integer(frame[5]) if len(frame) > 5 else None
                read.frames[number] = Frame(file, at, name, "".join(expression), statement or 0)
    for number, entry in _number_entries(line, "stacks", "first_stack"):
        parent, place = (*(integer(value) for value in entry[:2]), None, None)[:2]
        known = parent is not None and 0 <= parent < number and place in read.frames
        if known and (parent == 0 or parent in read.stacks):
            read.stacks[number] = (int(parent or 0), int(place or 0))
    begin = integer(line.get("time_ns"))
    columns = [_integers(line.get(name)) for name in ("offset_us", "late_us", "stack")]
    if (
        begin is not None
        and 0 <= begin < _TIME_LIMIT_NS
        and len({len(column) for column in columns}) == 1
    ):
        offset, late, stack = columns
        count = len(stack)
        read.parts.append(
            (
                begin + offset * _NS_PER_US,
                late * _NS_PER_US,
                stack,
                _letters(line.get("lock_wait"), LOCK_STATES, count),
                _times_ns(line.get("run_us"), count),
                _times_ns(line.get("queue_us"), count),
                _letters(line.get("wait"), WAIT_LETTERS, count),
            )
        )
        for entry in entries(line.get("others")):
            values = _integers(entry).tolist()
            if len(values) == 5:
                at_ns, since_ns = begin + values[0] * _NS_PER_US, values[4] * _NS_PER_US
                read.others.append((at_ns, values[2], values[3], since_ns))


def _letters(value: object, known: str, count: int) -> Ints:
    """One number per sample of a line: the place of its letter; -1 for the last, and for others."""
    letters = text(value) or ""
    if len(letters) != count:
        return np.full(count, -1, dtype=np.int64)
    return np.array([known.find(letter, 0, -1) for letter in letters], dtype=np.int64)


def _times_ns(value: object, count: int) -> Ints:
    """One per sample of a line; -1 where it is not known."""
    times = _integers(value)
    if len(times) != count:
        return np.full(count, -1)
    return np.where(times < 0, -1, times * _NS_PER_US)


def _number_entries(
    line: Mapping[str, Any], name: str, first: str
) -> Iterable[tuple[int, list[Any]]]:
    """The entries of a list that counts on from a number."""
    number = integer(line.get(first))
    if number is None or not 0 <= number <= _STACK_LIMIT:
        return
    own = entries(line.get(name))
    for place, entry in enumerate(own[: _STACK_LIMIT - number], start=number):
        if isinstance(entry, list):
            yield place, entry


def _integers(values: object) -> Ints:
    if not isinstance(values, list) or not all(type(v) is int and abs(v) < 1 << 50 for v in values):
        return np.zeros(0, dtype=np.int64)
    return np.array(values, dtype=np.int64)


def _process(pid: int, read: _Read) -> SampledProcess:
    """Numbers without gaps: frames in the order of the stacks, unknown stacks as none."""
    order = sorted(read.stacks)
    number = {stack: place for place, stack in enumerate(order, start=1)}
    number[0] = 0
    frame_number = {frame: place for place, frame in enumerate(sorted(read.frames))}
    columns = {
        name: np.concatenate([part[place] for part in read.parts] or [np.zeros(0, dtype=np.int64)])
        for place, name in enumerate(_PER_SAMPLE)
    }
    stack = columns["stack"]
    table = np.zeros(max(order, default=0) + 1, dtype=np.int64)
    table[[0, *order]] = [0, *range(1, len(order) + 1)]
    columns["stack"] = _renumber(stack, table)
    others = np.array(read.others, dtype=np.int64).reshape(-1, 4).T
    return SampledProcess(
        pid=pid,
        worker=read.worker,
        libraries=read.libraries,
        frames=[read.frames[frame] for frame in sorted(read.frames)],
        parents=[number[read.stacks[stack][0]] for stack in order],
        places=[frame_number[read.stacks[stack][1]] for stack in order],
        **columns,
        other_time_ns=others[0],
        other_stack=_renumber(others[1], table),
        other_cores=others[2] / 1000,
        other_since_ns=others[3],
        unknown_count=int(((columns["stack"] == 0) & (stack != 0)).sum()),
    )


def _renumber(stack: Ints, table: Ints) -> Ints:
    """Stacks by the table of their new numbers; 0 for those that are not in it."""
    known = (stack >= 0) & (stack < len(table))
    return np.where(known, table[np.where(known, stack, 0)], 0)
