"""Commands as processes: what they load, and a reader that goes away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.jobs import environment, run_command
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


@pytest.mark.parametrize(
    ("words", "status"),
    [(["rank", "{run}", "0"], 0), (["verdict", "{run}", "--json"], 0), (["verdict", "gone"], 3)],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_command_answers_alike_as_a_process_and_in_this_one(
    tmp_path: Path, words: list[str], status: int
) -> None:
    """Most tests of commands call them: what the process around them adds is nothing."""
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * 40, span_ns=1_000_000, gap_ns=10_000))
    words = [word.format(run=run.root) for word in words]
    here = run_command(words, folder=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", *words],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (status, here.stdout, here.stderr)
    assert here.returncode == status
