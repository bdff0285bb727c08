"""The engine of most samplers: entities, the reads that fill their columns, whole records out."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from haiprof.agent.samplers.sampler import ALL_METRICS, CounterState, Missing, MissingLog
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
from haiprof.run_format.schema import NULL_I64, Column, Table

_I64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class _Bound:
    """A reading with the positions of its columns; `refused` once reading again is pointless."""

    reading: Reading
    positions: tuple[int, ...]
    refused: list[Unavailable]


class TableSampler:
    """Samples entities into a table; a subclass names the source and finds the entities.

    Subclasses also take what `Node` holds under the same name, for tests: `root`, `nvml`.
    """

    name: str
    recorder: str
    table: Table
    every = 1
    read_limit_ns = 50_000_000

    def __init__(self, *, clock: Clock = time.perf_counter_ns) -> None:
        self.missing = MissingLog()
        self._clock = clock
        self._lines: list[Mapping[str, object]] = []
        self._entities: dict[tuple[int, ...], tuple[Entity, list[_Bound]]] = {}
        self._opened = False
        self._nulls = [math.nan if c.type[0] == "f" else NULL_I64 for c in self.table.metrics]
        self._positions = {column.name: at for at, column in enumerate(self.table.metrics)}
        self._record = self.table.struct

    # -- for subclasses - ----------------------------------------------------------------

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

    # -- for the loop - -----------------------------------------------------------------

    def open(self) -> list[Missing]:
        """Finds the entities and reads each of them once."""
        try:
            for entity in self.find():
                self.add(entity)
        except Unavailable as why:
            return [Missing(ALL_METRICS, why.reason, why.status, why.remedy)]
        self._opened = True
        self.sample()
        return self.drain_missing()

    def header(self) -> dict[str, object]:
        """`entities`: key and name of each, where the table has keys."""
        if not self.table.keys:
            return {}
        return {"entities": [_describe(entity) for entity in self.entities]}

    def urgent(self) -> bool:
        """Whether something new needs a sample now; False by default."""
        return False

    def sample(self) -> bytes:
        """One record per entity."""
        self.refresh()
        return b"".join([self._sample(*entry) for entry in list(self._entities.values())])

    def drain_missing(self) -> list[Missing]:
        """What could not be read since the last call."""
        return self.missing.drain()

    def drain_lines(self) -> list[Mapping[str, object]]:
        """Lines for the events file since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def states(self) -> list[CounterState]:
        """Every column of every entity, each read timed."""
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

    # -- one entity ---------------------------------------------------------------------------

    def _sample(self, entity: Entity, bound: list[_Bound]) -> bytes:
        before = self._clock()
        values = self._nulls.copy()
        try:
            for each in bound:
                for place, value in zip(each.positions, self._read(entity, each), strict=True):
                    if value is not None:
                        values[place] = value
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
                self._note(entity, column.name, "a count beyond 63 bits", "unsupported", "")
            found.append(value if fits else null)
        return found

    def _read(self, entity: Entity, bound: _Bound) -> Sequence[Value]:
        """The values of one read; nulls, with the reason noted, where there are none."""
        reading = bound.reading
        if bound.refused:
            return (None,) * len(reading.columns)
        try:
            values = reading.read()
        except (Unavailable, OSError, ValueError, IndexError, KeyError) as error:
            why = as_unavailable(error, reading)
            if why.lasting:
                bound.refused.append(why)
            for column in reading.columns:
                self._note(entity, column, why.reason, why.status, why.remedy)
            return (None,) * len(reading.columns)
        plain: list[Value] = []
        for column, value in zip(reading.columns, values, strict=True):
            if value is None or isinstance(value, Unavailable):
                why = value or _lacking(reading)
                self._note(entity, column, why.reason, why.status, why.remedy)
                plain.append(None)
            else:
                plain.append(value)
        return plain

    def _note(self, entity: Entity, column: str, reason: str, status: Status, remedy: str) -> None:
        where = f"{entity.name}: " if entity.name else ""
        self.missing.note(column, f"{where}{reason}", status, remedy)

    def _states(self, entity: Entity, bound: _Bound) -> Iterable[CounterState]:
        reading = bound.reading
        why: Unavailable | None = None
        values: tuple[Value | Unavailable, ...] = ()
        began = time.perf_counter_ns()
        try:
            values = tuple(reading.read())
        except EntityGone:
            return
        except (Unavailable, OSError, ValueError, IndexError, KeyError) as error:
            why = as_unavailable(error, reading)
        read_ns = time.perf_counter_ns() - began
        columns = {column.name: column for column in self.table.metrics}
        for at, name in enumerate(reading.columns):
            value = values[at] if values else None
            yield self._state(entity, columns[name], reading, why, value, read_ns)

    def _state(
        self,
        entity: Entity,
        column: Column,
        reading: Reading,
        why: Unavailable | None,
        value: Value | Unavailable,
        read_ns: int,
    ) -> CounterState:
        if isinstance(value, Unavailable):
            why, value = value, None
        elif why is None and value is None:
            why = _lacking(reading)
        return CounterState(
            source=self.name,
            entity=entity.name,
            metric=column.name,
            unit=column.unit,
            status="available" if why is None else why.status,
            value=value,
            origin=reading.origin,
            read_ns=read_ns if why is None else None,
            reason="" if why is None else why.reason,
            remedy="" if why is None else why.remedy,
        )


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


def _lacking(reading: Reading) -> Unavailable:
    """The `Unavailable` of a value that the content does not have."""
    reason = f"{reading.origin}: {reading.lacking or 'no such value in it'}"
    return Unavailable(reason, status="unsupported", remedy=reading.remedy)


def _describe(entity: Entity) -> dict[str, object]:
    return {"key": list(entity.key), "name": entity.name, **entity.details}


def _close(entity: Entity) -> None:
    for reading in entity.readings:
        if reading.close is not None:
            reading.close()
