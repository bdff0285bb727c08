"""The files of one rank, as the drain thread writes them."""

from __future__ import annotations

import contextlib
import sys
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from haiprof.base.safe_files import write_file
from haiprof.in_job.collectives import FlightRecorder
from haiprof.in_job.identity import claim_folder, environment_line, rank_and_world, report_in
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import DEVICE, PHASES, ClockAnchor
from haiprof.run_format.writer import LineWriter, RecordWriter

_COMPILATIONS = ("_compile.compile_inner", "_compile.<locals>.compile_inner")
"""Dynamo's own name for one compilation of a frame, in this torch and in 2.2 to 2.5."""
_now = time.perf_counter_ns


class RankFiles:
    """Claims the rank's folder, reports in and opens the files."""

    def __init__(
        self, run: RunPaths, phases: Mapping[str, str], details: Mapping[str, Any]
    ) -> None:
        rank, _ = rank_and_world()
        attempt, self._paths = claim_folder(run, rank)
        self._clock = ClockAnchor.now()
        self._events = LineWriter(self._paths.events)
        self._phases = RecordWriter(
            self._paths.phases, PHASES, clock=self._clock, extra={"rank": rank}
        )
        self._device: RecordWriter | None = None
        self._stacks: LineWriter | None = None
        self.attempt = attempt
        self.rank = rank
        self.collectives: FlightRecorder | None = FlightRecorder(self._paths, self._clock)
        report_in(
            self._paths, attempt=attempt, clock=self._clock,
            details={**details, "phases": dict(phases)},
        )  # fmt: skip
        self.note(environment_line())
        self._torch_counters: TorchCounters | None = TorchCounters()
        self._lost_counts: dict[str, int] = {}
        self.event_count = self.drain_cpu_ns = 0
        self.sampling_cpu_ns = self.sampling_held_ns = 0
        self.event_ns = self.module_call_ns = 0.0

    def write(self, spans: array[int], device_records: list[bytes]) -> None:
        """Appends whole records."""
        self.event_count += len(spans) // 2
        if spans:
            self._phases.append(memoryview(spans).cast("B"))
        if device_records:
            if self._device is None:
                self._device = RecordWriter(self._paths.device, DEVICE, clock=self._clock, extra={})
            self._device.append(b"".join(device_records))

    def open_stacks(self, header: Mapping[str, Any]) -> None:
        """Begins the file of sampled stacks."""
        self._stacks = LineWriter(self._paths.stacks)
        self._stacks.append(header)

    def write_stacks(self, line: Mapping[str, Any] | None) -> None:
        """Appends what was sampled."""
        if self._stacks is not None and line is not None:
            self._stacks.append(line)
            self.sampling_cpu_ns, self.sampling_held_ns = line["cpu_ns"], line["held_ns"]

    def note_lost(self) -> None:
        """Says which files the job has closed under our hands since the last time."""
        heartbeat = None if self.collectives is None else self.collectives.writer
        for writer in (self._phases, self._device, heartbeat, self._stacks, self._events):
            if writer is None:
                continue
            file, name = writer.file, writer.file.path.name
            if file.lost_count > self._lost_counts.get(name, 0):
                self._lost_counts[name] = file.lost_count
                lost = {"type": "descriptor_lost", "time_ns": _now()}
                self.note({**lost, "file": name, "reopened": file.is_open})

    def note(self, line: Mapping[str, Any]) -> None:
        """Appends one line to events.jsonl."""
        self._events.append(line)

    def note_cost(self, started_ns: int | None) -> None:
        """Cumulative cost: spans times their price, CPU time of our threads, training held up."""
        now = _now()
        writers = [w for w in (self._phases, self._device) if w is not None]
        self.note({
            "type": "cost", "time_ns": now, "elapsed_ns": now - (started_ns or now),
            "event_count": self.event_count, "event_ns": self.event_ns,
            "module_call_ns": self.module_call_ns, "drain_cpu_ns": self.drain_cpu_ns,
            "sampling_cpu_ns": self.sampling_cpu_ns, "sampling_held_ns": self.sampling_held_ns,
            "written_bytes": sum(w.written_bytes for w in writers),
            "dropped_bytes": sum(w.dropped_bytes for w in writers),
        })  # fmt: skip
        self._note_torch_counters(allocator=True)

    def _note_torch_counters(self, *, allocator: bool = False) -> None:
        """What torch counts; where reading it fails, it is not read again."""
        details = self._torch_counters
        if details is None:
            return
        try:
            line = details.allocator_line() if allocator else details.compile_line()
        except Exception as error:
            self._torch_counters = None
            line = {"type": "side_facts_failed", "reason": f"{type(error).__name__}: {error}"}
        if line is not None:
            self.note(line)

    def beat(self) -> None:
        """Notes lost files, compilations and collectives; what fails is left alone."""
        self.note_lost()
        self._note_torch_counters()
        self._read_collectives(FlightRecorder.beat)

    def keep_collectives(self) -> None:
        """Writes the last collectives down, at the end of the recording."""
        self._read_collectives(FlightRecorder.dump)

    def _read_collectives(self, read: Callable[[FlightRecorder], object]) -> None:
        if self.collectives is not None:
            try:
                read(self.collectives)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self.note({"type": "collectives_failed", "reason": reason})
                self.collectives = None

    def close(self) -> None:
        """Closes all files."""
        if self._stacks is not None:
            with contextlib.suppress(OSError):  # DataLoader workers are not sampled any more
                write_file(self._paths.sampling_over, b"", below=self._paths.run_root)
        for each in (self.collectives, self._phases, self._device, self._stacks, self._events):
            if each is not None:
                with contextlib.suppress(OSError):  # the job has closed all descriptors
                    each.close()


class TorchCounters:
    """What torch itself counts, as lines for events.jsonl. Nothing is imported for it."""

    def __init__(self) -> None:
        self._compiled = 0
        self._last: Any = None

    def compile_line(self) -> dict[str, Any] | None:
        """What was compiled so far, where there was something since the last line."""
        # Source: `torch._dynamo.utils.compilation_time_metrics`, seconds by name, and
        # `get_compilation_metrics`, which also knows backward graphs and when each began.
        # `count` and `spent_ns` of all compilations of frames so far, and `spans`: (Unix time in
        # us, length in us) of each compilation since the last line, of backward graphs too.
        utils = sys.modules.get("torch._dynamo.utils")
        metrics = getattr(utils, "compilation_time_metrics", None)
        if not isinstance(metrics, Mapping):
            return None
        times = next((metrics[name] for name in _COMPILATIONS if name in metrics), ())
        count, spans = len(times), self._new_spans(utils)
        if count <= self._compiled and not spans:
            return None
        self._compiled = count
        spent = sum(list(times)[:count])
        return {
            "type": "compile", "time_ns": _now(), "count": count, "spent_ns": int(spent * 1e9),
            "spans": spans,
        }  # fmt: skip

    def _new_spans(self, utils: Any) -> list[tuple[int, int]]:
        """Of compilations since the last call; torch keeps the last 64."""
        known = getattr(utils, "get_compilation_metrics", lambda: ())()
        found = []
        for metrics in reversed(known):
            if metrics is self._last:
                break
            found.append(_span(metrics))
        self._last = known[-1] if known else None
        return [span for span in reversed(found) if span is not None]

    def allocator_line(self) -> dict[str, Any] | None:
        """Retries and failures of the CUDA allocator so far, where the job has started CUDA."""
        # Source: `torch.cuda.memory_stats`, `num_alloc_retries` (cached memory given back to the
        # driver to find room) and `num_ooms`.
        cuda: Any = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return None
        stats = cuda.memory_stats()
        found = (int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0)))
        return {
            "type": "allocator", "time_ns": _now(), "retry_count": found[0], "oom_count": found[1]
        }  # fmt: skip


def _span(metrics: Any) -> tuple[int, int] | None:
    """Begin and length in us; None where this torch does not tell (backward graphs of 2.5)."""
    begin, length = (getattr(metrics, name, None) for name in ("start_time_us", "duration_us"))
    if begin is None or length is None:  # torch 2.5
        begin = getattr(metrics, "start_time", None)
        length = getattr(metrics, "entire_frame_compile_time_s", None)
        if begin is None or length is None:
            return None
        begin, length = begin * 1e6, length * 1e6
    return int(begin), int(length)
