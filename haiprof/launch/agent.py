"""The node agent: samples counters in a side thread, and watches which ranks reported in."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.config import Options
from haiprof.errors import RunFormatError
from haiprof.rundir.clock import ClockAnchor
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.reader import read_json, read_lines
from haiprof.rundir.schema import SCHEMA_VERSION
from haiprof.rundir.writer import LineWriter, write_json
from haiprof.samplers.loop import SamplingLoop
from haiprof.samplers.unreported import Unreported, find_unreported

if TYPE_CHECKING:
    from haiprof.launch.scrape import Scrape

FIRST_SCAN_S = 0.5
SCAN_GROWTH = 1.6
MAX_SCAN_S = 60.0
STOP_WAIT_S = 5.0
SETTLE_S = 0.05


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
    elected: bool = False
    """Whether this launcher is the one that samples this node."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _scrape: Scrape | None = None
    _scan_at: float = 0.0
    _scan_gap_s: float = FIRST_SCAN_S
    _started_s: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        """Starts sampling, unless another launcher on this node already does."""
        self.elected = self._elect()
        if not self.elected:
            return
        loop = SamplingLoop(self.run, self.host, self.options)
        self._thread = threading.Thread(
            target=self._sample, args=(loop,), name="haiprof-sampler", daemon=True
        )
        self._thread.start()
        if self.options.prometheus_port:
            from haiprof.launch.scrape import Scrape

            self._scrape = Scrape(self.run, self.host, self.options, loop)
            self._scrape.start()

    def _sample(self, loop: SamplingLoop) -> None:
        """Body of the side thread; a command that ends at once is over before it is sampled."""
        if not self._stop.wait(SETTLE_S):
            loop.run(self._stop)

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
        """Whether the time is up in some rank, and every other one has ended or is gone."""
        options = self.options
        if time.monotonic() - self._started_s < options.time_s + options.warmup_s:
            return False  # it cannot be: nothing is read while a long recording goes on
        endings = [_ending(paths.events) for _, _, paths in self.run.rank_folders()]
        if "time" not in endings:
            return False
        recording = [
            report
            for report, ending in zip(self.reports(), endings, strict=False)
            if ending is None and report.get("host") == self.host
        ]
        return not any(Path(f"/proc/{report.get('pid')}").exists() for report in recording)

    def stop(self) -> None:
        """Ends sampling."""
        self._stop.set()
        if self._scrape is not None:
            self._scrape.stop()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)
            self._thread = None

    def note_unreported(self) -> list[dict[str, object]]:
        """Writes down, once, who should have reported in and did not.

        Returns:
            The same, for the manifest.

        Raises:
            OSError: The run directory is gone, read-only or full.
        """
        reported = {report.get("pid") for report in self.reports()}
        missing: list[dict[str, object]] = [
            asdict(process) for process in self.unreported.values() if process.pid not in reported
        ]
        self.unreported.clear()
        if missing:
            writer = LineWriter(self.run.node(self.host).events)
            for process in missing:
                writer.append({"type": "unreported", **process})
            writer.close()
        return missing

    def _elect(self) -> bool:
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

    def reports(self) -> list[dict[str, Any]]:
        """rank.json of every rank that reported in, on any node; empty where it is not whole."""
        return [_report(paths.report) for _, _, paths in self.run.rank_folders()]

    def _reported_pids(self) -> set[int]:
        mine = [report for report in self.reports() if report.get("host") == self.host]
        return {report["pid"] for report in mine if isinstance(report.get("pid"), int)}


def _report(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except RunFormatError:
        return {}  # it is being written, or its disk is full: the reader will say so


def _ending(events: Path) -> str | None:
    """How a rank's recording ended: `time`, `exit`, `hook_error`; null while it goes on."""
    try:
        lines, _ = read_lines(events)
    except RunFormatError:
        return None
    for line in reversed(lines):
        if line.get("type") == "hook_error":
            return "hook_error"
        if line.get("type") == "record_end":
            return str(line.get("reason"))
    return None
