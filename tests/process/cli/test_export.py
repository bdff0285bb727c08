"""`haiprof export` into a pipe whose reader goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from haiprof.run_format.tables import HOST
from tests.unit.analysis.recorded import (
    CLOCK,
    row_of,
    spans_of,
    write_rank,
    write_records,
    write_run,
)


@pytest.mark.parametrize("form", ["csv", "prometheus", "otlp-json"])
def test_reader_that_closes_stdout_gets_no_traceback(tmp_path: Path, form: str) -> None:
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * 20))
    sample = row_of(HOST, time_ns=CLOCK.mono_ns, cpu_count=2, disk_read_bytes=1)
    later = row_of(HOST, time_ns=CLOCK.mono_ns + 10**9, cpu_count=2, disk_read_bytes=2)
    write_records(run.node("node0").records("host"), HOST, [sample, later], host="node0")
    command = f"{sys.executable} -m haiprof export {run.root} --to {form} | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert len(done.stdout) == 10
    assert done.stderr == ""
