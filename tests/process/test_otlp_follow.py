"""`export --to otlp --follow` beside a real job: a collector gets its samples while it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.run_format.manifest import find_runs
from tests.process.jobs import PYTHON, environment, training
from tests.process.live import within
from tests.unit.report.test_otlp import collector, points_of

LOOP = training("for _ in range(240):", each="time.sleep(0.05)")


@pytest.mark.proof
def test_collector_gets_the_steps_of_a_running_job_once_each(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    logs = tmp_path / "logs"
    words = [PYTHON, "-m", "haiprof", "--quiet", "--log-dir", str(logs), "loop.py"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment()) as job, collector() as server:
        within(
            60, lambda: logs.is_dir() and [r for r in find_runs(logs) if (r / "ranks/0").exists()]
        )
        command = [PYTHON, "-m", "haiprof", "export", "--to", "otlp", "--follow", "--endpoint"]
        done = subprocess.run(
            [*command, server.url, str(logs)], env=environment(), capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert job.wait(60) == 0
    assert done.returncode == 0, done.stderr
    steps = Analyzer(logs).steps()["step_ns"].drop_nulls()
    took = [value for key, value in points_of(server.requests).items()
            if key[0] == "haiprof.step.duration"]  # fmt: skip
    assert sorted(took) == pytest.approx(sorted(ns / 1e9 for ns in steps))
    of_steps = [r for r in server.requests if "haiprof.step.duration" in str(r)]
    assert len(of_steps) > 1, "all of it came at the end"
