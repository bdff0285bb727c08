"""The sampling loop beside a real process that reports in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from haiprof.linux.procfs import read_process
from haiprof.run_format.layout import RunPaths
from tests.unit.samplers.test_loop import NODE, count, loop_for
from tests.unit.samplers.test_process import report


def test_loop_samples_a_rank_soon_after_it_reports(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as rank:
        stop = threading.Event()
        loop = loop_for(run, ("process",), interval_s=60)
        thread = threading.Thread(target=loop.run, args=(stop,))
        thread.start()
        time.sleep(0.3)
        reading = read_process(Path("/"), rank.pid)
        assert reading is not None
        report(run, 0, rank.pid, reading.start_ticks, host=NODE)
        deadline = time.monotonic() + 30
        while not count(run, "process") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert count(run, "process") == 1
        stop.set()
        thread.join(10)
        rank.kill()
