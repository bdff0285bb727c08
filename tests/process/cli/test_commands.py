"""Commands as processes: what they load, and a reader that goes away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.tables import HOST
from tests.process.jobs import environment, run_command
from tests.sampling import first_of
from tests.unit.analysis.recorded import (
    CLOCK,
    row_of,
    spans_of,
    write_rank,
    write_records,
    write_run,
)
from tests.unit.analysis.test_compare import write


@pytest.mark.parametrize(
    "module", ["haiprof.cli.names", "haiprof.show.run_list", "haiprof.show.views.trace_report"]
)
def test_modules_load_nothing_that_they_do_not_need(module: str) -> None:
    """A list of runs reads those alone that have no kept answer; a report of traces none."""
    heavy = ["haiprof.run_analysis.deaths", "webbrowser"]
    heavy += ["typer", "rich", "polars"] if module == "haiprof.cli.names" else []
    code = f"import sys, {module}; print([n for n in sys.modules if n in {heavy}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reader_that_closes_stdout_gets_no_traceback(tmp_path: Path) -> None:
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * 40, span_ns=1_000_000, gap_ns=10_000))
    command = f"{sys.executable} -m haiprof verdict overview {run.root} --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_reader_that_is_gone_gets_the_kept_answer_no_other_way(tmp_path: Path) -> None:
    run = write_run(tmp_path / "job-1")
    write_manifest(run, replace(read_manifest(run), end_wall_ns=time.time_ns()))
    write_rank(run, spans_of("D F B O " * 40, span_ns=1_000_000, gap_ns=10_000))
    haiprof = f"{sys.executable} -m haiprof verdict {run.root}"
    subprocess.run(["bash", "-c", f"{haiprof} | cat"], capture_output=True, check=True)
    assert list(run.answers.glob("verdict-*"))
    program = f"(sleep 0.2; {haiprof}; echo $? >&2) | true"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["141"]


def test_disk_that_is_full_is_not_taken_for_success(tmp_path: Path) -> None:
    program = "from haiprof import __main__ as m; m.main = lambda: print('short') or 0; m.run()"
    command = [sys.executable, "-c", program]  # what is long is written before the end
    environ = {k: v for k, v in environment().items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ, check=False
        )
    assert done.returncode != 0
    assert "No space left" in done.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["verdict", "{run}", "--json"], 0),
        pytest.param(["rank", "{run}", "0"], 0, marks=pytest.mark.proof),
        pytest.param(["verdict", "gone"], 3, marks=pytest.mark.proof),
    ],
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
    assert (done.returncode, done.stdout) == (status, here.stdout)
    # Jobs of tests that run beside this one come and go.
    one, other = (re.sub(r"; running: .*", "", text) for text in (done.stderr, here.stderr))
    assert one == other
    assert here.returncode == status


def test_reader_that_has_gone_is_neither_a_verdict_nor_a_defect(tmp_path: Path) -> None:
    before = write(tmp_path, "before", seed=1, second=1)
    after = write(tmp_path, "after", seed=2, data_ms=7.0)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "haiprof", "compare", str(before), str(after)]
    with os.fdopen(writing, "w") as gone:
        ended = subprocess.run(
            command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert ended.returncode == 141
    assert ended.stderr == ""


@pytest.mark.parametrize("form", first_of(["csv", "prometheus", "otlp-json"], "csv"))
def test_reader_of_an_export_that_closes_stdout_gets_no_traceback(
    tmp_path: Path, form: str
) -> None:
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * 20))
    sample = row_of(HOST, time_ns=CLOCK.mono_ns, cpu_count=2, disk_read_bytes=1)
    later = row_of(HOST, time_ns=CLOCK.mono_ns + 10**9, cpu_count=2, disk_read_bytes=2)
    write_records(run.node("node0").records("host"), HOST, [sample, later], host="node0")
    command = f"{sys.executable} -m haiprof export {run.root} --to {form} | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert len(done.stdout) == 10
    hints = [line for line in done.stderr.splitlines() if form == "csv" and "--what: steps" in line]
    assert done.stderr.splitlines() == hints  # csv's comes where the reader is slower than it
