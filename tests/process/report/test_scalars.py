"""Live scalars as a process: a signal ends it in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.report.fake_run import empty_run


def test_scalars_follow_ends_on_sigterm(tmp_path: Path) -> None:
    empty_run(tmp_path, end_wall_ns=None, exit_status=None, start_wall_ns=time.time_ns())
    process = subprocess.Popen(
        [sys.executable, "-m", "haiprof", "scalars", str(tmp_path), "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(6)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert '"point_count": 0' in output
