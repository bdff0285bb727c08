"""The files of one rank, as the drain thread writes them."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Mapping
from typing import Any

from haiprof.hook.identity import claim_folder, rank_and_world, report_in
from haiprof.rundir.clock import ClockAnchor
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.schema import DEVICE, PHASES
from haiprof.rundir.writer import LineWriter, RecordWriter


class RankFiles:
    """Claims the rank's folder, reports in and opens the files.

    Args:
        run: The run directory.
        phases: Which phases are measured: `ok`, or why not.
        facts: Version and device, as the training thread saw them.

    Raises:
        OSError: The run directory is gone, read-only or full.
    """

    def __init__(self, run: RunPaths, phases: Mapping[str, str], facts: Mapping[str, Any]) -> None:
        rank, _ = rank_and_world()
        attempt, self._paths = claim_folder(run, rank)
        self._clock = ClockAnchor.now()
        self._events = LineWriter(self._paths.events)
        self._phases = RecordWriter(
            self._paths.phases, PHASES, clock=self._clock, extra={"rank": rank}
        )
        self._device: RecordWriter | None = None
        report_in(
            self._paths, rank=rank, attempt=attempt, clock=self._clock,
            facts={**facts, "phases": dict(phases)},
        )  # fmt: skip
        self.event_count = 0
        self.drain_cpu_ns = 0
        self.event_ns = 0.0
        self.module_call_ns = 0.0

    def write(self, spans: array[int], device_records: list[bytes]) -> None:
        """Appends whole records."""
        self.event_count += len(spans) // 2
        if spans:
            self._phases.append(memoryview(spans).cast("B"))
        if device_records:
            if self._device is None:
                self._device = RecordWriter(self._paths.device, DEVICE, clock=self._clock, extra={})
            self._device.append(b"".join(device_records))

    def note(self, line: Mapping[str, Any]) -> None:
        """Appends one line to events.jsonl."""
        self._events.append(line)

    def note_cost(self, started_ns: int | None) -> None:
        """Cumulative cost: spans times their calibrated price, and the CPU time of draining."""
        now = time.perf_counter_ns()
        writers = [w for w in (self._phases, self._device) if w is not None]
        self.note(
            {
                "type": "cost",
                "time_ns": now,
                "elapsed_ns": now - (started_ns or now),
                "event_count": self.event_count,
                "event_ns": self.event_ns,
                "module_call_ns": self.module_call_ns,
                "drain_cpu_ns": self.drain_cpu_ns,
                "written_bytes": sum(w.written_bytes for w in writers),
                "dropped_bytes": sum(w.dropped_bytes for w in writers),
            }
        )

    def close(self) -> None:
        """Closes all files."""
        for writer in (self._phases, self._device, self._events):
            if writer is not None:
                with contextlib.suppress(OSError):  # the job has closed all descriptors
                    writer.close()
