"""The agent of a node without a job: counters for months, jobs that come and go, GPUs held."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from haiprof.agent.samplers.loop import MAX_FACTOR, SamplingLoop, Stream
from haiprof.agent.samplers.nvml import Nvml
from haiprof.base.errors import UsageError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_ACTIVE, Options
from haiprof.base.safe_files import (
    file_size,
    make_folder,
    make_named_folder,
    open_to_append,
    remove_file,
    rename,
)
from haiprof.base.units import NS_PER_S, bytes_text, shorten
from haiprof.linux.procfs import (
    TICK_NS,
    boot_ns,
    command_line,
    environment,
    has_mapped,
    process_ids,
    read_start_ticks,
    read_stat,
    user_id,
)
from haiprof.linux.readings import Clock, Unavailable
from haiprof.run_format.entities import Key
from haiprof.run_format.layout import NodePaths, RunPaths
from haiprof.run_format.node_history import FILES_PER_TIER, TIERS, Tier, history_table, kept_columns
from haiprof.run_format.schema import (
    NS_OF_EVENTS,
    ClockAnchor,
    Table,
    counter_end,
    growth,
    is_known,
)
from haiprof.run_format.secrets import mask_command
from haiprof.run_format.tables import COUNTER_TABLES
from haiprof.run_format.writer import RecordWriter, note_line

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
        files = self.files[stream.name]
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
            if before:
                cells = [(a[0] + b[0], a[1] + b[1], min(a[2], b[2]), max(a[3], b[3]))
                         for a, b in zip(before, cells, strict=True)]  # fmt: skip
            self._rows[key] = count + 1, cells
        if is_first:
            self.flush(wall_ns, mono_ns)

    def flush(self, wall_ns: int, mono_ns: int) -> None:
        """Writes the rows of one time; a full disk loses them."""
        rows, self._rows = self._rows, {}
        packed, shown = [], 1 if self.tier is TIERS[0] else 3
        for key, (count, cells) in rows.items():
            values: list[float] = []
            for total, weight, low, high in cells:
                cell = (total / weight, low, high) if weight else (math.nan,) * 3
                values += cell[:shown]
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
            (places[own.name], counter_end(own.kind), own.unit == "ns",
             places.get(NS_OF_EVENTS.get(own.name, ""))) for own in kept_columns(table)
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


SCAN_S = 5.0
_LONGEST_S = 600.0
"""Between two looks at a process that has not loaded torch; each waits twice the process's age, as
the maps of hundreds of processes at every scan would cost more than all counters."""
Holders = Mapping[int, Collection[int]]
Line = dict[str, object]


@dataclass(slots=True, kw_only=True)
class _Job:
    id: str
    run: str | None
    group: int
    members: dict[int, int] = field(default_factory=dict)  # Start ticks by process
    most: int = 0


def gpu_holders(nvml: Nvml) -> dict[int, set[int]]:
    """Processes with memory on each GPU, as the driver numbers them; of no GPU without NVML."""
    found: dict[int, set[int]] = {}
    with suppress(Unavailable):
        for gpu in range(nvml.call("nvmlDeviceGetCount")):
            handle = nvml.call("nvmlDeviceGetHandleByIndex", gpu)
            held = nvml.call("nvmlDeviceGetComputeRunningProcesses", handle)
            found[gpu] = {int(process.pid) for process in held}
    return found


@dataclass
class JobWatch:
    """Finds processes that run under haiprof or have torch loaded, and joins them to jobs.

    A job is a run of haiprof, or a process with torch, its descendants with torch and what else of
    its process group has it. Of other users' processes only root can look into the maps.
    """

    holders: Callable[[], Holders] = dict
    proc: Path = Path("/proc")
    clock: Callable[[], float] = time.monotonic
    boot_clock: Clock = boot_ns
    wall_clock: Clock = time.time_ns
    _due_s: dict[int, float] = field(default_factory=dict)
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _held: dict[int, Collection[int]] = field(default_factory=dict)

    def scan(self) -> list[Line]:
        """What came and went since the last call, as lines for `NodePaths.seen`."""
        alive, now_s = set(process_ids(self.proc)), self.clock()
        lines = [*self._find_ended(alive)]
        members = {pid: job for job in self._jobs.values() for pid in job.members}
        self._due_s = {pid: due for pid, due in self._due_s.items() if pid in alive}
        for pid in sorted(alive - members.keys()):
            if self._due_s.get(pid, 0.0) <= now_s:
                lines += self._look(pid, now_s)
        return [*lines, *self._find_holders()]

    def _find_ended(self, alive: Collection[int]) -> Iterator[Line]:
        root = self.proc.parent
        for job in list(self._jobs.values()):
            for pid, ticks in list(job.members.items()):
                if pid not in alive or read_start_ticks(root, pid) != ticks:
                    del job.members[pid]
                    self._due_s.pop(pid, None)  # its number may be another's by now
            if not job.members:
                del self._jobs[job.id]
                yield {"type": "job_end", "job": job.id, "process_count": job.most}

    def _look(self, pid: int, now_s: float) -> Iterator[Line]:
        """A line where a process begins a job."""
        fields = read_stat(self.proc.parent, pid)
        if fields is None:
            return
        ticks = int(fields[19])
        age_ns = max(0, self.boot_clock() - ticks * TICK_NS)
        self._due_s[pid] = now_s + min(max(2 * age_ns / NS_PER_S, SCAN_S), _LONGEST_S)
        run = environment(pid, proc=self.proc).get(ENV_ACTIVE) or None
        if run is None and not has_mapped(pid, b"libtorch", proc=self.proc):
            return
        parent, group = int(fields[1]), int(fields[2])
        own = (
            job for job in self._jobs.values() if job.run == run
            and (run is not None or parent in job.members or job.group == group)
        )  # fmt: skip
        job = next(own, None)
        if job is None:
            job = _Job(id=f"{pid}-{ticks}", run=run, group=group)
            self._jobs[job.id] = job
            yield {
                "type": "job_start", "job": job.id, "run": run, **self._describe(pid),
                "start_wall_ns": self.wall_clock() - age_ns,
            }  # fmt: skip
        job.members[pid] = ticks
        job.most = max(job.most, len(job.members))

    def _find_holders(self) -> Iterator[Line]:
        held = {gpu: set(pids) for gpu, pids in self.holders().items()}
        members = {pid: job for job in self._jobs.values() for pid in job.members}
        for gpu in sorted(held.keys() | self._held.keys()):
            before, now = set(self._held.get(gpu, ())), held.get(gpu, set())
            for pid in sorted(before - now):
                yield {"type": "gpu_released", "gpu": gpu, "pid": pid}
            for pid in sorted(now - before):
                job = members[pid].id if pid in members else None
                yield {"type": "gpu_held", "gpu": gpu, "job": job, **self._describe(pid)}
        self._held = dict(held)

    def _describe(self, pid: int) -> Line:
        command = " ".join(mask_command(command_line(pid, proc=self.proc)))
        return {"pid": pid, "uid": user_id(pid, proc=self.proc), "command": shorten(command)}


RECORDERS = ("host", "gpu", "infiniband", "numa", "filesystem")
"""What is sampled: all that needs no rank."""
_DAY_S, _COST_S = 86_400.0, 600.0
_LINES_BYTES = 4 << 20
"""Of what was seen, and of events: the same once more is kept of what was before."""
_SETTLED_S = 3.0  # After so long every source was sampled
_SAID = {
    "disk_full": "{reason}: counters are dropped until there is room",
    "disk_again": "there is room again: counters are kept",
    "clock_set": "the clock was set, or the machine slept: {by_ns:+} ns",
}


def run_node_agent(
    folder: Path, *, limit_bytes: int, options: Options, stop: threading.Event
) -> None:
    """Records this node into its own folder below `folder`, until it is told to stop."""
    make_named_folder(folder, mode=0o700)
    node = RunPaths(folder.absolute()).node(socket.gethostname())
    make_folder(node.root, below=node.run_root)
    with _only_agent(node):
        _Agent(node, limit_bytes, options).run(stop)


@contextmanager
def _only_agent(node: NodePaths) -> Iterator[None]:
    """Holds a lock that the kernel releases when this process ends."""
    fd = open_to_append(node.lock, below=node.run_root)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{node.root}: a node agent already records this node",
                hint="haiprof node --show shows what it has",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


@dataclass
class _Agent:
    """Counters in a thread; jobs, holders of GPUs and its own cost in the main thread."""

    node: NodePaths
    limit_bytes: int
    options: Options
    _loop: SamplingLoop | None = None
    _cost_s: float = 0.0

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        node, nvml = self.node, Nvml()
        with suppress(Unavailable):
            nvml.open()
        watch = JobWatch(holders=lambda: gpu_holders(nvml))
        kept = ", ".join(f"{tier.name} for {tier.kept_text}" for tier in TIERS)
        limit = bytes_text(self.limit_bytes)
        print_message(f"recording this node into {node.root}: {kept}; at most {limit}")
        if os.geteuid():
            print_message(
                "not root: other users' jobs without haiprof are seen only where they hold a GPU; "
                "haiprof doctor lists the counters that need more"
            )
        self._note({"type": "agent_start", "pid": os.getpid(), "uid": os.getuid()})
        scrape = None
        if self.options.prometheus_port:
            from haiprof.agent.prometheus_endpoint import Scrape

            run = RunPaths(node.run_root)
            scrape = Scrape(
                run, node.root.name, self.options, lambda: self._loop.streams if self._loop else ()
            )
            scrape.start()
        try:
            while not stop.is_set():
                self._record(watch, stop)
        finally:
            if scrape is not None:
                scrape.stop()
            nvml.close()
            self._note_cost()
            self._note({"type": "agent_end"})

    def _record(self, watch: JobWatch, stop: threading.Event) -> None:
        """One day: then sources are found anew, and what is known of those that went is dropped."""
        node, over = self.node, threading.Event()
        _put_away(node, node.events)
        limit_bytes = max(0, self.limit_bytes - 4 * _LINES_BYTES)
        history = NodeHistory(node, limit_bytes, note=self._note)
        run = RunPaths(node.run_root)
        loop = SamplingLoop(run, node.root.name, self.options, open_writer=history.open_source)
        self._loop = loop
        thread = threading.Thread(target=loop.run, args=(over,), name="haiprof-sampler")
        thread.start()
        try:
            stop.wait(_SETTLED_S)
            # How much it will be, by the rows that this node has.
            tiers = [sum(each.most_bytes for each in of_tier)
                     for of_tier in zip(*history.files.values(), strict=True)]  # fmt: skip
            whole = sum(tiers)
            named = zip(TIERS, tiers, strict=True)
            sizes = ", ".join(f"{tier.name} {bytes_text(size)}" for tier, size in named)
            goes = f"; the oldest goes at {bytes_text(self.limit_bytes)}"
            cut = goes if whole > self.limit_bytes else ""
            print_message(f"when full {bytes_text(whole)} ({sizes}){cut}")
            self._note({"type": "sizes", "whole_bytes": whole, "limit_bytes": self.limit_bytes})
            until_s = time.monotonic() + _DAY_S
            while time.monotonic() < until_s and (file_size(node.events) or 0) < _LINES_BYTES:
                for line in watch.scan():
                    self._note(line)
                if time.monotonic() - self._cost_s > _COST_S:
                    self._note_cost()
                if loop.failure or stop.wait(SCAN_S):
                    break
        finally:
            over.set()
            thread.join()
        if loop.failure:
            print_message(f"{loop.failure}: trying again in a minute")
            stop.wait(60.0)

    def _note(self, line: Mapping[str, object]) -> None:
        """Writes a line of what was seen; on a full disk it is lost."""
        said = _SAID.get(str(line["type"]))
        if said is not None:
            print_message(said.format_map(line))
        _put_away(self.node, self.node.seen, at_bytes=_LINES_BYTES)
        note_line(self.node.seen, {"wall_ns": time.time_ns(), **line})

    def _note_cost(self) -> None:
        self._cost_s = time.monotonic()
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cpu_ns = time.process_time_ns()
        self._note({"type": "agent_cost", "cpu_ns": cpu_ns, "peak_rss_bytes": peak_bytes})


def _put_away(node: NodePaths, path: Path, *, at_bytes: int = 0) -> None:
    """Moves a file of lines to the place of the one before, where it has so many bytes."""
    if (file_size(path) or 0) > at_bytes:
        with suppress(OSError):
            rename(path, node.earlier(path), below=node.run_root)
