"""Writes a node's counters for months: each second for hours, then means of 10 s and of 5 min."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from haiprof.agent.samplers.loop import MAX_FACTOR, Stream
from haiprof.base.safe_files import remove_file
from haiprof.base.units import NS_PER_S
from haiprof.linux.readings import Clock
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.entities import Key
from haiprof.run_format.layout import NodePaths
from haiprof.run_format.node_history import FILES_PER_TIER, TIERS, Tier, history_table, kept_columns
from haiprof.run_format.rates import NS_OF_EVENTS, growth, is_known
from haiprof.run_format.schema import Table, counter_end
from haiprof.run_format.tables import COUNTER_TABLES
from haiprof.run_format.writer import RecordWriter

_CLOCK_SET_NS = NS_PER_S
"""Unix time that moves so much against the monotonic clock was set, or the machine slept."""
_GAP_INTERVALS = 2 * MAX_FACTOR
"""What a counter did in so long a gap says nothing of the time at its end: it has no rate."""
_OPEN_AGAIN_NS = 60 * NS_PER_S
"""How long rows are dropped before a file is tried again on a disk that was full."""

Note = Callable[[Mapping[str, object]], None]
Cell = tuple[float, float, float, float]
"""Sum of value times weight, sum of weights, least and greatest value; a weight is seconds, of
gauges samples, of mean times events."""
_EMPTY: Cell = (0.0, 0.0, math.inf, -math.inf)


class NodeHistory:
    """All that is kept of a node, within one limit: the oldest of the greatest part goes first.

    `note` takes lines on a full disk and on a clock that was set; the clock is Unix time in ns.
    """

    def __init__(
        self, node: NodePaths, limit_bytes: int, *, note: Note, clock: Clock = time.time_ns
    ) -> None:
        self.node, self.note, self.clock = node, note, clock
        self.size_bytes = 0
        self._limit_bytes = limit_bytes
        self._offset_ns: int | None = None
        self._is_full = False
        self.files = {
            table.name: [TierFiles(self, table, tier) for tier in TIERS] for table in COUNTER_TABLES
        }
        """Of each source and tier, also of what is not sampled any more."""

    def open_source(
        self, stream: Stream, _path: Path, _anchor: ClockAnchor, extra: Mapping[str, object]
    ) -> SourceHistory:
        """The writer of one source; an `OpenWriter` of the sampling loop."""
        files = self.files[stream.sampler.name]
        for each in files:
            each.stream, each.extra = stream, extra
        return SourceHistory(self, stream, files)

    def wall_ns(self, mono_ns: int) -> int:
        """Unix time now; says so where that was set since the last call."""
        now = self.clock()
        offset, before = now - mono_ns, self._offset_ns
        if before is None or abs(offset - before) > _CLOCK_SET_NS:
            self._offset_ns = offset
            if before is not None:
                self.note({"type": "clock_set", "by_ns": offset - before})
        return now

    def hold_limit(self) -> None:
        """Removes the oldest files of what takes most, until all fit."""
        tiers = [tier for tiers in self.files.values() for tier in tiers]
        while self.size_bytes > self._limit_bytes:
            if not max(tiers, key=lambda tier: tier.size_bytes).remove_oldest():
                return

    def say_full(self, reason: str) -> None:
        """Says once that rows are dropped, and once that they are kept again."""
        if bool(reason) != self._is_full:
            self._is_full = bool(reason)
            self.note({"type": "disk_full" if reason else "disk_again", "reason": reason})


class TierFiles:
    """One tier of one source: rows of the time that goes on, and files, the oldest of which go."""

    def __init__(self, history: NodeHistory, table: Table, tier: Tier) -> None:
        self.tier, self.table = tier, history_table(table, tier)
        self.stream: Stream | None = None
        """None for what is not sampled any more."""
        self.extra: Mapping[str, object] = {}
        self.row_bytes = 0
        """Of one time, as measured: all entities together."""
        self.dropped_bytes = self.size_bytes = 0
        self._history, self._pack = history, self.table.struct.pack
        self._begin_ns = self._again_ns = self._header_bytes = 0
        self._rows: dict[Key, tuple[int, Sequence[Cell]]] = {}
        self._writer: RecordWriter | None = None
        self._described: frozenset[Key] = frozenset()
        self._sizes: dict[int, int] = {}
        for number, path in history.node.history_files(table.name, tier.name):
            self._grow(number, path.stat().st_size)
        self._number = max(self._sizes, default=0)

    @property
    def kept_bytes(self) -> int:
        """Of all that is to be kept, by the rows as they were measured; 0 for what is not sampled.

        Retention is by recorded time, not by age: a clock that is set, or a machine that was off
        for months, removes nothing.
        """
        if self.stream is None:
            return 0
        interval_ns = max(self.tier.interval_ns, self.stream.interval_ns)
        return self.tier.kept_ns // interval_ns * self.row_bytes

    @property
    def most_bytes(self) -> int:
        """What all files take at most: what is kept, another file, their headers."""
        file_bytes = self.kept_bytes // FILES_PER_TIER + self.row_bytes + self._header_bytes
        return (FILES_PER_TIER + 1) * file_bytes

    def take(self, wall_ns: int, mono_ns: int, found: Mapping[Key, Sequence[Cell]]) -> None:
        """Adds a sample, after the time before it was written; a clock may also go back."""
        is_first = self.tier is TIERS[0]
        begin_ns = wall_ns - (0 if is_first else wall_ns % self.tier.interval_ns)
        if begin_ns != self._begin_ns:
            self.flush(wall_ns, mono_ns)
            self._begin_ns = begin_ns
        for key, cells in found.items():
            count, before = self._rows.get(key, (0, ()))
            merged = [*map(_merge, before, cells)] if before else cells
            self._rows[key] = count + 1, merged
        if is_first:
            self.flush(wall_ns, mono_ns)

    def flush(self, wall_ns: int, mono_ns: int) -> None:
        """Writes the rows of one time; a full disk loses them."""
        rows, self._rows = self._rows, {}
        packed = []
        for key, (count, cells) in rows.items():
            values: list[float] = []
            for total, weight, low, high in cells:
                mean = total / weight if weight else math.nan
                values += (mean, low, high) if weight else (mean,) * 3
            if self.tier is TIERS[0]:
                values = values[::3]
            with suppress(OverflowError, struct.error):  # beyond f32: damage, not a rate
                packed.append(self._pack(self._begin_ns, count, *key, *values))
        if not rows:
            return
        full_bytes = self.kept_bytes // FILES_PER_TIER + self._header_bytes
        is_full = self._writer is None or self._sizes.get(self._number, 0) >= full_bytes
        is_other = self.stream is not None and self._described != self.stream.entities.keys()
        if (is_full or is_other) and mono_ns >= self._again_ns:
            self._open(wall_ns, mono_ns)
        data = b"".join(packed)
        lost = len(data)
        if self._writer is not None:
            before = self._writer.dropped_bytes
            self._writer.append(data)
            lost = self._writer.dropped_bytes - before
            self._grow(self._number, len(data) - lost)
            self._history.say_full("no room for rows" if lost else "")
        self.dropped_bytes += lost
        while len(self._sizes) > 1 and (
            self.size_bytes - self._sizes[min(self._sizes)]
            - (len(self._sizes) - 1) * self._header_bytes >= self.kept_bytes
        ):  # fmt: skip
            self.remove_oldest()
        self._history.hold_limit()

    def remove_oldest(self) -> bool:
        """Removes one file, the one that is written to only where there is no other."""
        if not self._sizes:
            return False
        oldest = min(self._sizes)
        if oldest == self._number:
            self.close()
        path = self._history.node.history(self.table.name, self.tier.name, oldest)
        remove_file(path, below=self._history.node.run_root)
        self._grow(oldest, -self._sizes[oldest])
        del self._sizes[oldest]
        return True

    def close(self) -> None:
        """Closes the file that is written to."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _grow(self, number: int, by_bytes: int) -> None:
        self._sizes[number] = self._sizes.get(number, 0) + by_bytes
        self.size_bytes += by_bytes
        self._history.size_bytes += by_bytes

    def _open(self, wall_ns: int, mono_ns: int) -> None:
        """Begins the next file, whose header names all entities that are known by now."""
        self.close()
        entities = {} if self.stream is None else self.stream.entities
        self._described, self._number = frozenset(entities), self._number + 1
        node = self._history.node
        path = node.history(self.table.name, self.tier.name, self._number)
        extra = {**self.extra, "entities": list(entities.values()), "tier": self.tier.name}
        clock = ClockAnchor(wall_ns, mono_ns)
        try:
            self._writer = RecordWriter(path, self.table, clock=clock, extra=extra)
            self._header_bytes = path.stat().st_size
            self._grow(self._number, self._header_bytes)
        except OSError as error:
            self._again_ns = mono_ns + _OPEN_AGAIN_NS
            remove_file(path, below=node.run_root)  # its header is torn
            self._history.say_full(error.strerror or str(error))


class SourceHistory:
    """Turns the records of one source into the rows of all tiers."""

    def __init__(self, history: NodeHistory, stream: Stream, files: Sequence[TierFiles]) -> None:
        table = stream.sampler.table
        places = {column.name: place for place, column in enumerate(table.columns)}
        self._plan = [
            (
                places[column.name],
                counter_end(column.kind),
                column.unit == "ns",
                places.get(NS_OF_EVENTS.get(column.name, "")),
            )
            for column in kept_columns(table)
        ]  # fmt: skip
        self._key = slice(2, 2 + len(table.keys))
        self._struct, self._history, self._files = table.struct, history, files
        self._gap_s = _GAP_INTERVALS * stream.interval_ns / NS_PER_S
        self._before: dict[Key, tuple[Any, ...]] = {}

    @property
    def dropped_bytes(self) -> int:
        """Rows that found no room on the disk."""
        return sum(files.dropped_bytes for files in self._files)

    def append(self, data: bytes) -> None:
        """Takes one record of each entity."""
        records = list(self._struct.iter_unpack(data))
        mono_ns = records[-1][0]
        wall_ns = self._history.wall_ns(mono_ns)
        found = {record[self._key]: self._cells(record) for record in records}
        for files in self._files:
            files.row_bytes = max(files.row_bytes, len(records) * files.table.record_bytes)
            files.take(wall_ns, mono_ns, found)
        self._before = {record[self._key]: record for record in records}

    def close(self) -> None:
        """Writes what was begun, and closes the files."""
        for files in self._files:
            files.flush(self._history.clock(), 0)
            files.close()

    def _cells(self, record: tuple[Any, ...]) -> list[Cell]:
        """What each column did since the record before; weight 0 where that is not known."""
        before = self._before.get(record[self._key])
        elapsed_s = 0.0 if before is None else (record[0] - before[0]) / NS_PER_S
        cells = []
        for place, end, is_ns, events in self._plan:
            value, weight = float(record[place]), 1.0 if is_known(record[place]) else 0.0
            if end is not None:
                grown = None
                if before is not None and 0 < elapsed_s <= self._gap_s:
                    grown = growth(before[place], record[place], end)
                if grown is None or before is None:
                    weight = 0.0
                elif events is None:
                    weight, value = elapsed_s, grown / (elapsed_s * (NS_PER_S if is_ns else 1))
                else:
                    weight = max(0.0, record[events] - before[events])
                    value = grown / weight if weight else 0.0
            cells.append((value * weight, weight, value, value) if weight else _EMPTY)
        return cells


def _merge(one: Cell, other: Cell) -> Cell:
    return (
        one[0] + other[0], one[1] + other[1], min(one[2], other[2]), max(one[3], other[3]),
    )  # fmt: skip
