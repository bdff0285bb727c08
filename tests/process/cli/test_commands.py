"""Commands as processes: what they load, and a reader that goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.analysis.recorded import spans_of, write_rank, write_run


def test_names_load_nothing_heavy() -> None:
    code = "import sys, haiprof.cli.names; print({'typer', 'rich', 'polars'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_reader_that_closes_stdout_gets_no_traceback(tmp_path: Path) -> None:
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * 40, span_ns=1_000_000, gap_ns=10_000))
    command = f"{sys.executable} -m haiprof overview {run.root} --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
