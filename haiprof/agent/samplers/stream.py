"""One sampler with its record file: a failure becomes an event, never an exception."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from haiprof.agent.samplers.sampler import ALL_METRICS, Missing, Sampler
from haiprof.agent.samplers.schedule import Pace
from haiprof.base.options import MIN_INTERVAL_S
from haiprof.base.units import NS_PER_S
from haiprof.linux.readings import Clock
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.entities import Key, entities_by_key
from haiprof.run_format.layout import NodePaths
from haiprof.run_format.writer import RecordWriter

# CPU times come in ticks of 10 ms: two samples closer than this would make a rate of noise.
_MIN_GAP_NS = int(MIN_INTERVAL_S * NS_PER_S)

Report = Callable[[Mapping[str, object]], None]
"""Takes one line for the node's events file."""


class Stream:
    """Carries the records of one sampler to its file."""

    def __init__(self, sampler: Sampler, interval_ns: int, *, clock: Clock, report: Report) -> None:
        self.sampler = sampler
        self._interval_ns = interval_ns
        self.entities: Mapping[Key, Mapping[str, object]] = {}
        """Description of each entity; never changed in place, as other threads read it."""
        self.latest: tuple[int, bytes] = (0, b"")
        """CLOCK_MONOTONIC at the last sample, and its records; replaced as a whole."""
        self.sample_count = 0
        self.cpu_ns = 0
        """Time that this thread spent in samples."""
        self._last_ns = 0
        self._clock = clock
        self._report = report
        self._reasons: set[str] = set()
        self._writer: RecordWriter | None = None
        self.pace = Pace(interval_ns, sampler.read_limit_ns, clock())

    @property
    def dropped_bytes(self) -> int:
        """Records that found no room on the disk."""
        return self._writer.dropped_bytes if self._writer is not None else 0

    def start(self, node: NodePaths, anchor: ClockAnchor, header: Mapping[str, object]) -> bool:
        """Opens the sampler and its file, and takes the first sample."""
        try:
            missing = self.sampler.open()
            self._report_missing(missing)
            if any(each.metric == ALL_METRICS for each in missing):
                return False
            path, extra = node.records(self.sampler.name), {**header, **self.sampler.header()}
            self._writer = RecordWriter(path, self.sampler.table, clock=anchor, extra=extra)
            self._describe(extra.get("entities"))
        except Exception as error:  # noqa: BLE001  one sampler must not stop the others
            self._report_error(error)
            return False
        self._take()
        # Only now does the sampler know how much it reads.
        self.pace = Pace(self._interval_ns, self.sampler.read_limit_ns, self._last_ns)
        return True

    def sample_if_due(self, now_ns: int) -> None:
        """Samples when it is time, or out of turn when the sampler has something new."""
        if now_ns >= self.pace.due_ns:
            read_ns = self._take()
            self.pace.advance(self._clock(), read_ns)
        elif now_ns - self._last_ns >= _MIN_GAP_NS and self._is_urgent():
            self._take()
            self.pace.restart(self._last_ns)

    def finish(self) -> None:
        """Takes the last sample, unless there has just been one."""
        if self._clock() - self._last_ns >= _MIN_GAP_NS:
            self._take()

    def close(self) -> None:
        """Closes the sampler and its file."""
        try:
            self.sampler.close()
        except Exception as error:  # noqa: BLE001  one sampler must not stop the others
            self._report_error(error)
        if self._writer is not None:
            self._writer.close()

    def _take(self) -> int:
        """Writes one sample."""
        self._last_ns, began = self._clock(), time.thread_time_ns()
        try:
            data = self.sampler.sample()
            read_ns = self._clock() - self._last_ns
            self.cpu_ns += time.thread_time_ns() - began
            self.sample_count += 1
            self._report_missing(self.sampler.drain_missing())
            for line in self.sampler.drain_lines():
                self._report({**line, "source": self.sampler.name})
                if line.get("type") == "entity":
                    self._describe([line])
        except Exception as error:  # noqa: BLE001  one sampler must not stop the others
            self._report_error(error)
            return self.sampler.read_limit_ns + 1
        self.latest = (self._last_ns, data)
        if data and self._writer is not None:
            self._writer.append(data)
        return read_ns

    def _describe(self, entities: object) -> None:
        if isinstance(entities, list):
            self.entities = {**self.entities, **entities_by_key(entities)}

    def _is_urgent(self) -> bool:
        try:
            return self.sampler.urgent()
        except Exception as error:  # noqa: BLE001  one sampler must not stop the others
            self._report_error(error)
            return False

    def _report_missing(self, missing: list[Missing]) -> None:
        for each in missing:
            line = {"type": "counter_missing", "source": self.sampler.name}
            self._report({**line, **{k: v for k, v in each._asdict().items() if v}})

    def _report_error(self, error: Exception) -> None:
        """Reports each fault once: a sampler that always fails does so at every tick."""
        reason = f"{type(error).__name__}: {error}"
        if reason not in self._reasons:
            self._reasons.add(reason)
            line = {"type": "sampler_error", "source": self.sampler.name, "reason": reason}
            self._report(line)
