"""The node's sampling thread: every source at its own interval into the run directory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from haiprof.agent.samplers.rank_reports import RankReports
from haiprof.agent.samplers.sampler import Node, Sampler
from haiprof.agent.samplers.stream import Stream
from haiprof.base.options import Options
from haiprof.base.safe_files import make_folder
from haiprof.base.units import NS_PER_S
from haiprof.linux.readings import Clock
from haiprof.linux.suspend import SuspendWatch, boot_ns
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import LineWriter

_POLL_S = 0.25  # how soon a rank that reports in is noticed
_LIST_NS = NS_PER_S // 10  # samplers that look for ranks at one poll share one list
_COST_EVERY_NS = 10 * NS_PER_S
_COST_SPREAD = 0.05  # of the run from line to line: some hundred lines in weeks


class SamplingLoop:
    """Samples this node until it is stopped; `run` is the body of a thread and never raises."""

    def __init__(
        self,
        run: RunPaths,
        host: str,
        options: Options,
        *,
        root: Path = Path("/"),
        nvml: ModuleType | None = None,
        clock: Clock = time.perf_counter_ns,
        boot_clock: Clock = boot_ns,
        samplers: Sequence[Sampler] | None = None,
    ) -> None:
        self.failure: str | None = None
        """Why nothing was recorded."""
        self.streams: tuple[Stream, ...] = ()
        """The sampled streams; replaced as a whole, as other threads read the list."""
        self._host = host
        self._options = options
        self._clock = clock
        self._boot_clock = boot_clock
        self._paths = run.node(host)
        self._samplers = samplers
        self._surroundings = Node(
            run=run,
            host=host,
            root=root,
            nvml=nvml,
            clock=clock,
            reports=RankReports(run.ranks, clock=clock, fresh_ns=_LIST_NS),
        )
        self._events: LineWriter | None = None

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
        meter = _CostMeter(self._clock)
        watch = SuspendWatch(self._clock, self._boot_clock)
        streams = self._start()
        try:
            while not stop.wait(self._seconds_to_wait(streams)):
                self._report_suspend(watch)
                for stream in streams:
                    stream.sample_if_due(self._clock())
                if meter.due():
                    self._report(meter.line(streams))
            self._report_suspend(watch)
            for stream in streams:
                stream.finish()
        finally:
            for stream in streams:
                stream.close()
            self._report(meter.line(streams))

    def _start(self) -> list[Stream]:
        """Opens one sampler after the other: the first counts before a slow driver answers."""
        header = {"host": self._host, "pid": os.getpid()}
        anchor = ClockAnchor.now()
        streams = []
        for sampler in self._choose():
            interval_ns = int(self._options.interval(sampler.recorder) * sampler.every * NS_PER_S)
            stream = Stream(sampler, interval_ns, clock=self._clock, report=self._report)
            if stream.start(self._paths, anchor, header):
                streams.append(stream)
                self.streams = tuple(streams)
            else:
                stream.close()
        return streams

    def _choose(self) -> Sequence[Sampler]:
        if self._samplers is not None:
            return self._samplers
        from haiprof.agent.samplers.registry import (
            SAMPLERS,  # slow: in this thread, not earlier
        )

        chosen = [kind for kind in SAMPLERS if kind.recorder in self._options.recorder]
        return [kind.for_node(self._surroundings) for kind in chosen]

    def _seconds_to_wait(self, streams: Sequence[Stream]) -> float:
        now = self._clock()
        dues = [(stream.pace.due_ns - now) / NS_PER_S for stream in streams]
        return max(0.0, min([_POLL_S, *dues]))

    def _report_suspend(self, watch: SuspendWatch) -> None:
        gap_ns = watch.gap_ns()
        if gap_ns:
            self._report({"type": "suspend", "gap_ns": gap_ns})

    def _report(self, line: Mapping[str, object]) -> None:
        if self._events is not None:
            self._events.append({"time_ns": self._clock(), **line})


class _CostMeter:
    """The cost of this thread, as the cumulative `cost` line of the events file."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_ns = clock()
        self._start_cpu_ns = time.thread_time_ns()
        self._next_ns = self._start_ns + _COST_EVERY_NS

    def due(self) -> bool:
        """Whether it is time for the next line."""
        if self._clock() < self._next_ns:
            return False
        elapsed_ns = self._clock() - self._start_ns
        self._next_ns += max(_COST_EVERY_NS, int(elapsed_ns * _COST_SPREAD))
        return True

    def line(self, streams: Sequence[Stream]) -> dict[str, object]:
        """CPU and wall time since the start, also by source; missed ticks, lost bytes, slowness."""
        return {
            "type": "cost",
            "cpu_ns": time.thread_time_ns() - self._start_cpu_ns,
            "elapsed_ns": self._clock() - self._start_ns,
            "missed_tick_count": sum(stream.pace.missed_count for stream in streams),
            "dropped_bytes": sum(stream.dropped_bytes for stream in streams),
            "sources": {
                s.sampler.name: {"sample_count": s.sample_count, "cpu_ns": s.cpu_ns}
                for s in streams
            },
            "slowed": {s.sampler.name: s.pace.factor for s in streams if s.pace.factor > 1},
        }
