"""The engine of samplers: entities, reads of columns, whole records, and what is missing."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from haiprof.linux.procfs import list_names
from haiprof.linux.readings import (
    Clock,
    Entity,
    EntityGone,
    Reading,
    Status,
    Unavailable,
    Value,
    os_status,
)
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.reader import read_json
from haiprof.run_format.schema import NULL_I64, Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One process to look at."""

    name: str  # for people: `rank 0`, `rank 0 attempt 1`
    pid: int
    start_ticks: int  # its start time (stat field 22): with the pid it names a process for good
    gpu_uuid: str | None = None  # the GPU that it uses, as it reported


class RankReports:
    """Reports of a run's ranks: listed once for all samplers of a node, and each read once."""

    def __init__(self, ranks: Path, *, clock: Clock, fresh_ns: int = 0) -> None:
        self._ranks, self._clock, self._fresh_ns = ranks, clock, fresh_ns
        self._listed_ns: int | None = None
        self._names: frozenset[str] = frozenset()
        self._contents: dict[str, Mapping[str, Any]] = {}

    def folders(self) -> frozenset[str]:
        """Names of the rank folders; none before a rank has reported in."""
        now = self._clock() if self._fresh_ns else 0
        if self._listed_ns is None or now - self._listed_ns >= self._fresh_ns:
            self._listed_ns = now
            # None where no rank has reported in yet, or the run directory was deleted.
            self._names = frozenset(list_names(self._ranks))
        return self._names

    def is_there(self, folder: str) -> bool:
        """Whether a rank folder has its report."""
        return folder in self._contents or self._path(folder).exists()

    def content(self, folder: str) -> Mapping[str, Any]:
        """The report."""
        if folder not in self._contents:
            self._contents[folder] = read_json(self._path(folder))
        return self._contents[folder]

    def _path(self, folder: str) -> Path:
        return RankPaths(self._ranks / folder).report


REASONS_PER_METRIC = 200
ALL_METRICS = "all"  # the metric of a `Missing` that leaves nothing of the sampler


class Missing(NamedTuple):
    """One metric that cannot be measured here."""

    metric: str  # a column of the table, an entity of the source (`gpu 0`, `rank 1`), `ALL_METRICS`
    reason: str  # why, with the file or call that refused
    status: Status = "absent"
    remedy: str = ""  # what a user or an administrator would have to set; empty where nothing helps


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterState:
    """One counter as `haiprof doctor` lists it."""

    source: str  # the sampler's name
    entity: str  # what of it, such as `gpu 0` or `mlx5_0 port 1`; empty for the node as a whole
    metric: str  # the column, or `ALL_METRICS` where nothing of the sampler is there
    unit: str
    status: Status
    value: float | int | None  # as read now: of a counter that only grows, its present count
    origin: str  # the file or call that it is read from
    read_ns: int | None  # what that read takes, with the other columns that it fills
    reason: str = ""
    remedy: str = ""

    @classmethod
    def of(
        cls, source: str, entity: str, column: Column, value: Value | Unavailable, *, origin: str,
        read_ns: int | None = None,
    ) -> CounterState:  # fmt: skip
        """The state of a column that has a finite value, or a reason for having none."""
        if isinstance(value, float) and not math.isfinite(value):
            value = Unavailable(f"{origin}: no value", status="unsupported")
        why = value if isinstance(value, Unavailable) else None
        return cls(
            source=source, entity=entity, metric=column.name, unit=column.unit,
            status="available" if why is None else why.status,
            value=None if isinstance(value, Unavailable) else value, origin=origin,
            read_ns=read_ns if why is None else None, reason="" if why is None else why.reason,
            remedy="" if why is None else why.remedy,
        )  # fmt: skip


_NO_RUN = RunPaths(Path(os.devnull))  # no folder can be below it: nobody reports in


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The surroundings of a sampler; tests put fakes in."""

    run: RunPaths = _NO_RUN  # the run that is recorded
    host: str = ""  # this node's name, as the ranks report it
    root: Path = Path("/")  # where /proc and /sys are
    nvml: ModuleType | None = None  # a module like pynvml; None imports that
    clock: Clock = time.perf_counter_ns  # CLOCK_MONOTONIC in ns
    pid: int | None = None  # a process to treat as a rank: `haiprof doctor`'s own
    reports: RankReports | None = None  # what ranks reported, read once for all samplers


class MissingLog:
    """Collects what cannot be read, and returns each metric and reason once."""

    def __init__(self) -> None:
        self._said: dict[str, set[Missing]] = {}
        self._new: list[Missing] = []

    def note(self, metric: str, why: Unavailable, *, of: str = "") -> None:
        """Remembers why a metric, of an entity, cannot be read, unless it was noted before."""
        # A reason may hold a number that differs each time: only the first `REASONS_PER_METRIC` of
        # one metric are stored, so that neither this nor the events file grows without bound.
        reason = f"{of}: {why.reason}" if of else why.reason
        missing = Missing(metric, reason, why.status, why.remedy)
        said = self._said.setdefault(metric, set())
        if missing not in said and len(said) < REASONS_PER_METRIC:
            said.add(missing)
            self._new.append(missing)

    def drain(self) -> list[Missing]:
        """What is new since the last call."""
        new, self._new = self._new, []
        return new


_I64_MAX = (1 << 63) - 1

_FAILURES = (Unavailable, OSError, ValueError, IndexError, KeyError)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A reading with the positions of its columns; `refused` once reading again is pointless."""

    reading: Reading
    positions: tuple[int, ...]
    refused: list[Unavailable]


class TableSampler:
    """Samples a source's entities into a table, on one thread; a subclass finds the entities."""

    recorder: str  # the recorder in `config.RECORDERS` that switches it
    table: Table  # what a record holds; its name is that of the source and of its record file
    every = 1  # it samples at every Nth interval of its recorder
    read_limit_ns = 50_000_000  # a sample that takes longer makes the loop sample less often

    def __init__(self, node: Node) -> None:
        self.root = node.root
        self.missing = MissingLog()
        self._clock = node.clock
        self._lines: list[Mapping[str, object]] = []
        self._entities: dict[tuple[int, ...], tuple[Entity, list[_Bound]]] = {}
        self._opened = False
        self._nulls = [math.nan if c.type[0] == "f" else NULL_I64 for c in self.table.metrics]
        self._positions = {column.name: at for at, column in enumerate(self.table.metrics)}
        self._record = self.table.struct

    def find(self) -> Iterable[Entity]:
        """The entities at the start."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Called before each sample: `add` new entities, `drop` old ones; a no-op by default."""

    def release(self) -> None:
        """Called at the end to close a library; nothing by default."""

    def add(self, entity: Entity) -> None:
        """Adds an entity; one after the start also gets a line in the events file."""
        bound = [
            _Bound(reading, tuple(self._positions[name] for name in reading.columns), [])
            for reading in entity.readings
        ]
        self._entities[entity.key] = (entity, bound)
        if self._opened:
            self.note_line({"type": "entity", **_describe(entity)})

    def drop(self, key: tuple[int, ...]) -> None:
        """Drops an entity."""
        entity, _ = self._entities.pop(key)
        _close(entity)

    def note_line(self, line: Mapping[str, object]) -> None:
        """Queues a line for the node's events file."""
        self._lines.append(line)

    @property
    def entities(self) -> list[Entity]:
        """The sampled entities."""
        return [entity for entity, _ in self._entities.values()]

    def open(self) -> list[Missing]:
        """Finds the entities and reads each of them once."""
        try:
            for entity in self.find():
                self.add(entity)
        except Unavailable as why:
            return [Missing(ALL_METRICS, why.reason, why.status, why.remedy)]
        self._opened = True
        self.sample()
        return self.missing.drain()

    def header(self) -> dict[str, object]:
        """`entities`: key and name of each, where the table has keys."""
        if not self.table.keys:
            return {}
        return {"entities": [_describe(entity) for entity in self.entities]}

    def urgent(self) -> bool:
        """Whether something new needs a sample now; False by default."""
        return False

    def sample(self) -> bytes:
        """One record per entity; values that cannot be read are missing."""
        self.refresh()
        return b"".join([self._sample(*entry) for entry in list(self._entities.values())])

    def drain_lines(self) -> list[Mapping[str, object]]:
        """What else happened since the last call, as lines for the node's events file."""
        # Each has a `type`: `entity` for an entity that appeared later (with `key` and `name`), or
        # one that the sampler documents.
        lines, self._lines = self._lines, []
        return lines

    def states(self) -> list[CounterState]:
        """Every column of every entity, read once more and timed: for `haiprof doctor`."""
        self.refresh()
        return [
            state
            for entity, bound in self._entities.values()
            for each in bound
            for state in self._states(entity, each)
        ]

    def close(self) -> None:
        """Closes files and libraries."""
        for entity in self.entities:
            _close(entity)
        self._entities = {}
        self.release()

    def _sample(self, entity: Entity, bound: list[_Bound]) -> bytes:
        before = self._clock()
        values = self._nulls.copy()
        try:
            for each in bound:
                if each.refused:
                    continue
                names, answers = each.reading.columns, _read(each)
                for place, name, answer in zip(each.positions, names, answers, strict=True):
                    if isinstance(answer, Unavailable):
                        self.missing.note(name, answer, of=entity.name)
                    else:
                        values[place] = answer
        except EntityGone:
            self.drop(entity.key)
            return b""
        head = (before, self._clock() - before, *entity.key)
        try:
            return self._record.pack(*head, *values)
        except struct.error:  # kernels write a count that fell below 0 as a number near 2^64
            return self._record.pack(*head, *self._storable(entity, values))

    def _storable(self, entity: Entity, values: Sequence[Value]) -> list[Value]:
        """The values, without those that do not fit their column."""
        found = []
        for column, value, null in zip(self.table.metrics, values, self._nulls, strict=True):
            fits = column.type[0] == "f" or (isinstance(value, int) and abs(value) <= _I64_MAX)
            if not fits and value != null:
                why = Unavailable("a count beyond 63 bits", status="unsupported")
                self.missing.note(column.name, why, of=entity.name)
            found.append(value if fits else null)
        return found

    def _states(self, entity: Entity, bound: _Bound) -> Iterable[CounterState]:
        reading, columns = bound.reading, {column.name: column for column in self.table.metrics}
        began = time.perf_counter_ns()
        try:
            answers = _read(bound)
        except EntityGone:
            return
        read_ns = time.perf_counter_ns() - began
        for name, answer in zip(reading.columns, answers, strict=True):
            yield CounterState.of(
                self.table.name, entity.name, columns[name], answer, origin=reading.origin,
                read_ns=read_ns,
            )  # fmt: skip


class ChangingSampler(TableSampler):
    """Samples what comes and goes, as a subclass tells; what comes back has a new number."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.known: dict[Hashable, tuple[int, ...] | None] = {}
        """Keys of what is there, by what tells it from all else; None where nothing is sampled."""
        self._next = 0

    def present(self) -> Mapping[Any, Any]:
        """What is there now, by what tells it from all else."""
        raise NotImplementedError

    def take_up(self, number: int, found: Any) -> Entity | None:  # noqa: ANN401  a value of `present`
        """The entity of something new; None where nothing of it can be sampled."""
        raise NotImplementedError

    def find(self) -> Iterable[Entity]:
        """What is there at the start."""
        return self._new_entities(self.present())

    def refresh(self) -> None:
        """Drops what is gone, and adds what is new."""
        try:
            present = self.present()
        except Unavailable as why:
            self.missing.note(ALL_METRICS, why)
            present = {}
        for identity in self.known.keys() - present.keys():
            if (key := self.known.pop(identity)) is not None:
                self.drop(key)
        for entity in self._new_entities(present):
            self.add(entity)

    def _new_entities(self, present: Mapping[Any, Any]) -> list[Entity]:
        entities = []
        for identity, found in present.items():
            if identity not in self.known:
                entity = self.take_up(self._next, found)
                self.known[identity] = None if entity is None else entity.key
                if entity is not None:
                    entities.append(entity)
                    self._next += 1
        return entities


def _read(bound: _Bound) -> Sequence[int | float | Unavailable]:
    """One answer per column: a value, or why there is none."""
    reading = bound.reading
    try:
        values = reading.read()
    except _FAILURES as error:
        why = as_unavailable(error, reading)
        if why.lasting:
            bound.refused.append(why)
        return (why,) * len(reading.columns)
    lacks = f"{reading.origin}: {reading.lacking or 'no such value in it'}"
    missing = Unavailable(lacks, status="unsupported", remedy=reading.remedy)
    return [missing if value is None else value for value in values]


def as_unavailable(error: Exception, reading: Reading) -> Unavailable:
    """What a failed read means."""
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, OSError):
        status = os_status(error)
        because = f" ({reading.lacking})" if reading.lacking and status != "denied" else ""
        reason = f"{reading.origin}: {error.strerror or error}{because}"
        return Unavailable(reason, status=status, remedy=reading.remedy, lasting=status == "denied")
    return Unavailable(f"{reading.origin}: unexpected content", status="unsupported")


def _describe(entity: Entity) -> dict[str, object]:
    return {"key": list(entity.key), "name": entity.name, **entity.details}


def _close(entity: Entity) -> None:
    for reading in entity.readings:
        if reading.close is not None:
            reading.close()
