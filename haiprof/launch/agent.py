"""The node agent: samples counters in a side thread, and watches which ranks reported in."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.config import Options
from haiprof.errors import RunFormatError
from haiprof.rundir.clock import ClockAnchor
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.reader import read_json, read_lines
from haiprof.rundir.schema import SCHEMA_VERSION
from haiprof.rundir.writer import LineWriter, write_json
from haiprof.samplers.loop import SamplingLoop
from haiprof.samplers.unreported import Unreported, find_unreported

FIRST_SCAN_S = 0.5
SCAN_GROWTH = 1.6
MAX_SCAN_S = 60.0
STOP_WAIT_S = 5.0


@dataclass
class Agent:
    """What runs beside the job on this node, in the launcher's process.

    Args:
        run: The run directory.
        options: What to record.
    """

    run: RunPaths
    options: Options
    host: str = field(default_factory=socket.gethostname)
    unreported: dict[int, Unreported] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _scan_at: float = 0.0
    _scan_gap_s: float = FIRST_SCAN_S

    def start(self) -> None:
        """Starts sampling, unless another launcher on this node already does."""
        if not self._elected():
            return
        self._thread = threading.Thread(target=self._sample, name="haiprof-sampler", daemon=True)
        self._thread.start()

    def tick(self, job_pid: int) -> None:
        """Looks for ranks that never report in, at growing intervals."""
        now = time.monotonic()
        if now < self._scan_at:
            return
        self._scan_at = now + self._scan_gap_s
        self._scan_gap_s = min(self._scan_gap_s * SCAN_GROWTH, MAX_SCAN_S)
        found = find_unreported(job_pid, self._reported_pids(), self.run.boot)
        ended = {pid: p for pid, p in self.unreported.items() if not Path(f"/proc/{pid}").exists()}
        self.unreported = {**ended, **{process.pid: process for process in found}}

    def recording_is_over(self) -> bool:
        """Whether every rank of this node that reported in has ended its recording."""
        folders = [paths for _, _, paths in self.run.rank_folders()]
        return bool(folders) and all(_has_ended(paths.events) for paths in folders)

    def stop(self) -> None:
        """Ends sampling and writes down who did not report in."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)
            self._thread = None
        reported = self._reported_pids()
        missing = [p for p in self.unreported.values() if p.pid not in reported]
        if not missing:
            return
        writer = LineWriter(self.run.node(self.host).events)
        for process in missing:
            writer.append(
                {
                    "type": "unreported",
                    "pid": process.pid,
                    "command": process.command,
                    "reason": process.reason,
                    "remedy": process.remedy,
                }
            )
        writer.close()

    def _elected(self) -> bool:
        node = self.run.node(self.host)
        try:
            node.root.mkdir(parents=True)
        except FileExistsError:
            return False
        clock = ClockAnchor.now()
        write_json(
            node.agent,
            {
                "version": SCHEMA_VERSION,
                "host": self.host,
                "pid": os.getpid(),
                "clock": {"wall_ns": clock.wall_ns, "mono_ns": clock.mono_ns},
            },
        )
        return True

    def _sample(self) -> None:
        SamplingLoop(self.run, self.host, self.options).run(self._stop)

    def _reported_pids(self) -> set[int]:
        pids: set[int] = set()
        for _, _, paths in self.run.rank_folders():
            try:
                report = read_json(paths.report)
            except RunFormatError:
                continue  # it is being written, or its disk is full: the reader will say so
            if report.get("host") == self.host and isinstance(report.get("pid"), int):
                pids.add(report["pid"])
        return pids


def _has_ended(events: Path) -> bool:
    try:
        lines, _ = read_lines(events)
    except RunFormatError:
        return False
    return any(line.get("type") in ("record_end", "hook_error") for line in lines)
