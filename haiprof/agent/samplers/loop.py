"""The node's sampling thread: every source at its own interval into the run directory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol

from haiprof.agent.samplers.table import ALL_METRICS, Missing, Node, RankReports, TableSampler
from haiprof.base.options import MIN_INTERVAL_S, Options
from haiprof.base.safe_files import make_folder
from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import SuspendWatch, boot_ns
from haiprof.linux.readings import Clock
from haiprof.run_format.entities import Key, entities_by_key
from haiprof.run_format.layout import NodePaths, RunPaths
from haiprof.run_format.schema import ClockAnchor
from haiprof.run_format.writer import LineWriter, RecordWriter

MAX_FACTOR = 16
_RECOVER_AFTER = 30  # quick reads in a row after which the interval is halved again


class Pace:
    """The schedule of one sampler."""

    def __init__(self, interval_ns: int, limit_ns: int, now_ns: int) -> None:
        self._interval_ns, self._limit_ns = interval_ns, limit_ns
        self.factor, self.missed_count, self._quick_count = 1, 0, 0
        self.due_ns = now_ns + interval_ns

    @property
    def interval_ns(self) -> int:
        """Between two samples, as it is now."""
        return self._interval_ns * self.factor

    def advance(self, now_ns: int, read_ns: int) -> None:
        """Notes a sample that has just been taken; ticks missed meanwhile are counted."""
        if read_ns > self._limit_ns:
            self.factor = min(self.factor * 2, MAX_FACTOR)
            self._quick_count = 0
        else:
            self._quick_count += 1
            if self.factor > 1 and self._quick_count >= _RECOVER_AFTER:
                self.factor //= 2
                self._quick_count = 0
        step = self.interval_ns
        late_count = max(0, (now_ns - self.due_ns) // step)
        self.missed_count += late_count
        self.due_ns += step * (late_count + 1)

    def restart(self, now_ns: int) -> None:
        """Restarts the grid after a sample out of turn."""
        self.due_ns = now_ns + self.interval_ns


# CPU times come in ticks of 10 ms: two samples closer than this would make a rate of noise.
_MIN_GAP_NS = int(MIN_INTERVAL_S * NS_PER_S)

Report = Callable[[Mapping[str, object]], None]  # takes one line for the node's events file


class Writer(Protocol):
    """Takes the records of one source."""

    @property
    def dropped_bytes(self) -> int:
        """Records that found no room on the disk."""

    def append(self, data: bytes) -> None:
        """Takes whole records: one of each entity."""

    def close(self) -> None:
        """Nothing more comes."""


OpenWriter = Callable[["Stream", Path, ClockAnchor, Mapping[str, object]], Writer]
"""Begins the file of a stream, with more for its header."""


def _write_records(
    stream: Stream, path: Path, anchor: ClockAnchor, extra: Mapping[str, object]
) -> Writer:
    return RecordWriter(path, stream.sampler.table, clock=anchor, extra=extra)


@dataclass
class Stream:
    """Carries the records of one sampler to its file."""

    sampler: TableSampler
    interval_ns: int  # between two samples where none of them takes long
    clock: Clock
    report: Report
    open_writer: OpenWriter = _write_records
    entities: Mapping[Key, Mapping[str, object]] = field(default_factory=dict)
    """Description of each entity; never changed in place, as other threads read it."""
    latest: tuple[int, bytes] = (0, b"")  # CLOCK_MONOTONIC at the last sample, and its records
    sample_count: int = 0
    cpu_ns: int = 0  # time that this thread spent in samples
    _last_ns: int = 0
    _reasons: set[str] = field(default_factory=set)
    _writer: Writer | None = None

    def __post_init__(self) -> None:
        self.name = self.sampler.table.name
        self.pace = Pace(self.interval_ns, self.sampler.read_limit_ns, self.clock())

    @property
    def dropped_bytes(self) -> int:
        """Records that found no room on the disk."""
        return self._writer.dropped_bytes if self._writer is not None else 0

    def start(self, node: NodePaths, anchor: ClockAnchor, header: Mapping[str, object]) -> bool:
        """Opens the sampler and its file, and takes the first sample."""
        with self._guard():
            missing = self.sampler.open()
            self._report_missing(missing)
            if any(each.metric == ALL_METRICS for each in missing):
                return False
            path, extra = node.records(self.name), {**header, **self.sampler.header()}
            self._describe(extra.get("entities"))
            self._writer = self.open_writer(self, path, anchor, extra)
        if self._writer is None:
            return False
        self._take()
        # Only now does the sampler know how much it reads.
        self.pace = Pace(self.interval_ns, self.sampler.read_limit_ns, self._last_ns)
        return True

    def sample_if_due(self, now_ns: int, *, with_others: bool = False) -> None:
        """Samples when it is time, or out of turn when the sampler has something new.

        `with_others`: another one samples now, and this one does so, too, where it is soon due.
        """
        early_ns = self.pace.interval_ns * _EARLY_RATIO if with_others else 0
        if now_ns >= self.pace.due_ns - early_ns:
            read_ns = self._take()
            self.pace.advance(self.clock(), read_ns)
        elif now_ns - self._last_ns >= _MIN_GAP_NS:
            with self._guard():
                if self.sampler.urgent():
                    self._take()
                    self.pace.restart(self._last_ns)

    def finish(self) -> None:
        """Takes the last sample, unless there has just been one."""
        if self.clock() - self._last_ns >= _MIN_GAP_NS:
            self._take()

    def close(self) -> None:
        """Closes the sampler and its file."""
        with self._guard():
            self.sampler.close()
        if self._writer is not None:
            self._writer.close()

    def _take(self) -> int:
        self._last_ns, began = self.clock(), time.thread_time_ns()
        data = None
        with self._guard():
            sampled = self.sampler.sample()
            read_ns = self.clock() - self._last_ns
            self.cpu_ns += time.thread_time_ns() - began
            self.sample_count += 1
            self._report_missing(self.sampler.missing.drain())
            for line in self.sampler.drain_lines():
                self.report({**line, "source": self.name})
                if line.get("type") == "entity":
                    self._describe([line])
            data = sampled
        if data is None:
            return self.sampler.read_limit_ns + 1
        self.latest = (self._last_ns, data)
        if data and self._writer is not None:
            self._writer.append(data)
        return read_ns

    def _describe(self, entities: object) -> None:
        if isinstance(entities, list):
            self.entities = {**self.entities, **entities_by_key(entities)}

    def _report_missing(self, missing: list[Missing]) -> None:
        for each in missing:
            line = {"type": "counter_missing", "source": self.name}
            self.report({**line, **{k: v for k, v in each._asdict().items() if v}})

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Reports each fault once: a sampler that always fails does so at every tick."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  one sampler must not stop the others
            reason = f"{type(error).__name__}: {error}"
            if reason not in self._reasons:
                self._reasons.add(reason)
                line = {"type": "sampler_error", "source": self.name, "reason": reason}
                self.report(line)


_POLL_S, _LATER_POLL_S = 0.25, 1.0  # how soon a rank that reports in is noticed
_LATER_NS = 60 * NS_PER_S  # from the start: then ranks have reported in, but for those restarted
_EARLY_RATIO = 0.25  # of its interval: so much earlier a sample is taken with those of others
_LIST_NS = NS_PER_S // 10  # samplers that look for ranks at one poll share one list
_COST_EVERY_NS = 10 * NS_PER_S
_COST_SPREAD = 0.05  # of the run from line to line: some hundred lines in weeks


@dataclass
class SamplingLoop:
    """Samples this node until it is stopped; `run` is the body of a thread and never raises."""

    run_paths: RunPaths
    host: str
    options: Options
    root: Path = Path("/")
    nvml: ModuleType | None = None
    clock: Clock = time.perf_counter_ns
    boot_clock: Clock = boot_ns
    samplers: Sequence[TableSampler] | None = None
    open_writer: OpenWriter = _write_records
    failure: str | None = None  # why nothing was recorded
    streams: tuple[Stream, ...] = ()  # replaced as a whole, as other threads read the list
    _events: LineWriter | None = None

    def __post_init__(self) -> None:
        self._paths = self.run_paths.node(self.host)
        self._surroundings = Node(
            run=self.run_paths, host=self.host, root=self.root, nvml=self.nvml, clock=self.clock,
            reports=RankReports(self.run_paths.ranks, clock=self.clock, fresh_ns=_LIST_NS),
        )  # fmt: skip

    def run(self, stop: threading.Event) -> None:
        """Samples now, then at every interval, and once more when `stop` is set."""
        try:
            make_folder(self._paths.root, below=self._paths.run_root)
            self._events = LineWriter(self._paths.events)
            self._record(stop)
        except Exception as error:  # noqa: BLE001  the job must not feel that sampling fails
            self.failure = f"{type(error).__name__}: {error}"
            self._report({"type": "sampler_error", "source": "loop", "reason": self.failure})
        finally:
            if self._events is not None:
                self._events.close()

    def _record(self, stop: threading.Event) -> None:
        began_ns, began_cpu_ns = self.clock(), time.thread_time_ns()
        due_ns = began_ns + _COST_EVERY_NS
        watch = SuspendWatch(self.clock, self.boot_clock)
        streams = self._start()
        try:
            while True:
                now = self.clock()
                dues = [(stream.pace.due_ns - now) / NS_PER_S for stream in streams]
                poll_s = _POLL_S if now < began_ns + _LATER_NS else _LATER_POLL_S
                if stop.wait(max(0.0, min([poll_s, *dues]))):
                    break
                self._report_suspend(watch)
                now = self.clock()
                is_due = any(stream.pace.due_ns <= now for stream in streams)
                for stream in streams:
                    stream.sample_if_due(self.clock(), with_others=is_due)
                elapsed_ns = self.clock() - began_ns
                if began_ns + elapsed_ns >= due_ns:
                    due_ns += max(_COST_EVERY_NS, int(elapsed_ns * _COST_SPREAD))
                    self._report_cost(streams, began_ns, began_cpu_ns)
            self._report_suspend(watch)
            for stream in streams:
                stream.finish()
        finally:
            for stream in streams:
                stream.close()
            self._report_cost(streams, began_ns, began_cpu_ns)

    def _start(self) -> list[Stream]:
        """Opens one sampler after the other: the first counts before a slow driver answers."""
        header = {"host": self.host, "pid": os.getpid()}
        anchor = ClockAnchor.now()
        samplers, streams = self.samplers, []
        if samplers is None:
            from haiprof.agent.samplers.registry import SAMPLERS  # slow: not earlier

            chosen = [kind for kind in SAMPLERS if kind.recorder in self.options.recorder]
            samplers = [kind(self._surroundings) for kind in chosen]
        for sampler in samplers:
            interval_ns = int(self.options.interval(sampler.recorder) * sampler.every * NS_PER_S)
            stream = Stream(
                sampler, interval_ns, clock=self.clock, report=self._report,
                open_writer=self.open_writer,
            )  # fmt: skip
            if stream.start(self._paths, anchor, header):
                streams.append(stream)
                self.streams = tuple(streams)
            else:
                stream.close()
        return streams

    def _report_suspend(self, watch: SuspendWatch) -> None:
        if gap_ns := watch.gap_ns():
            self._report({"type": "suspend", "gap_ns": gap_ns})

    def _report_cost(self, streams: Sequence[Stream], began_ns: int, began_cpu_ns: int) -> None:
        """CPU and wall time since the start, also by source; missed ticks, lost bytes, slowness."""
        self._report({
            "type": "cost",
            "cpu_ns": time.thread_time_ns() - began_cpu_ns,
            "elapsed_ns": self.clock() - began_ns,
            "missed_tick_count": sum(stream.pace.missed_count for stream in streams),
            "dropped_bytes": sum(stream.dropped_bytes for stream in streams),
            "sources": {
                s.name: {"sample_count": s.sample_count, "cpu_ns": s.cpu_ns}
                for s in streams
            },
            "slowed": {s.name: s.pace.factor for s in streams if s.pace.factor > 1},
        })  # fmt: skip

    def _report(self, line: Mapping[str, object]) -> None:
        if self._events is not None:
            self._events.append({"time_ns": self.clock(), **line})
