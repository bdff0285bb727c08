"""The files of one rank, as the drain thread writes them."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Mapping
from typing import Any

from haiprof.hook.collectives import FlightRecorder
from haiprof.hook.identity import claim_folder, environment_line, rank_and_world, report_in
from haiprof.hook.side_facts import SideFacts
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
        self.attempt = attempt
        self.rank = rank
        self.collectives: FlightRecorder | None = FlightRecorder(self._paths, self._clock)
        report_in(
            self._paths, rank=rank, attempt=attempt, clock=self._clock,
            facts={**facts, "phases": dict(phases)},
        )  # fmt: skip
        self.note(environment_line())
        self._side_facts: SideFacts | None = SideFacts()
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
        self._note_side_facts(allocator=True)

    def _note_side_facts(self, *, allocator: bool = False) -> None:
        """What torch counts; where reading it fails, it is not read again."""
        facts = self._side_facts
        if facts is None:
            return
        try:
            line = facts.allocator_line() if allocator else facts.compile_line()
        except Exception as error:
            self._side_facts = None
            line = {"type": "side_facts_failed", "reason": f"{type(error).__name__}: {error}"}
        if line is not None:
            self.note(line)

    def beat(self) -> None:
        """Notes compilations and how far collectives have come; what fails is left alone."""
        self._note_side_facts()
        if self.collectives is not None:
            try:
                self.collectives.beat()
            except Exception as error:
                self._lose_collectives(error)

    def keep_collectives(self) -> None:
        """Writes the last collectives down, at the end of the recording."""
        if self.collectives is not None:
            try:
                self.collectives.dump()
            except Exception as error:
                self._lose_collectives(error)

    def _lose_collectives(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.note({"type": "collectives_failed", "reason": reason})
        self.collectives = None

    def close(self) -> None:
        """Closes all files."""
        if self.collectives is not None:
            with contextlib.suppress(OSError):
                self.collectives.close()
        for writer in (self._phases, self._device, self._events):
            if writer is not None:
                with contextlib.suppress(OSError):  # the job has closed all descriptors
                    writer.close()
