"""Real jobs that die again: what a job script is told to do, in words and as exit status."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import newest_run
from tests.process.jobs import (
    PYTHON,
    TWO_RANKS,
    environment,
    haiprof_command,
    run_command,
    run_job,
)
from tests.process.live import within
from tests.sampling import variants

pytestmark = pytest.mark.slow

JOB = """
import os, resource, sys, time
import torch
how = sys.argv[1]
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
if how == "memory":
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), used + (1 << 29)))
for number in range(2000 if how == "wait" else 6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if how == "wait":
        time.sleep(0.05)
    if number == 4 and how == "line":
        raise ConnectionError("no answer for shard 9")
    if number == 4 and how == "name":
        undefined
    if number == 4 and how == "memory":
        kept = bytearray(1 << 40)
    if number == 4 and how == "disk":
        with open("/dev/full", "w") as full:
            full.write("checkpoint")
"""
RESTARTED = (
    "torchrun", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1",
    "--monitor-interval", "0.1",
)  # fmt: skip


def write(folder: Path) -> str:
    script = folder / "job.py"
    script.write_text(JOB)
    return str(script)


def advice(logs: Path) -> tuple[int, str, dict[str, Any]]:
    """The exit status, the first line, and what `--json` says."""
    said = run_command(["verdict", "--advice", str(logs)], folder=logs)
    found = run_command(["verdict", "--advice", "--json", str(logs)], folder=logs)
    assert found.returncode == said.returncode
    return said.returncode, said.stdout.splitlines()[0], json.loads(found.stdout)["advice"]


@pytest.mark.parametrize(
    ("how", "first", "second", "reason"),
    [
        ("line", 10, 12, "same_line"),
        *variants(("name", 12, 12, "same_line"), ("memory", 10, 12, "same_memory"),
                  ("disk", 12, 12, "disk_full"), ("none", 0, 0, None)),
    ],
)  # fmt: skip
def test_job_of_one_run_id_is_stopped_once_it_dies_alike(
    tmp_path: Path, how: str, first: int, second: int, reason: str | None
) -> None:
    script, logs = write(tmp_path), tmp_path / "logs"
    found = []
    for number in range(2):
        run_job(("python", script, how), folder=tmp_path / f"run-{number}", haiprof=True,
                options=("--quiet", "--run-id=7"), log_dir=logs)  # fmt: skip
        found.append(advice(logs))
    assert [status for status, _, _ in found] == [first, second]
    status, line, content = found[-1]
    assert line == {0: "NOTHING: no death of this job is known", 12: "STOP"}[status]
    if reason is None:
        assert content is None
        return
    assert (content["reason"], content["exit_status"]) == (reason, 12)
    assert [attempt["run"] for attempt in content["attempts"]] == ["job-7", "job-7-2"]
    assert found[-1] == advice(logs), "the same run gives the same advice"
    card = run_command(["verdict", str(logs)], folder=logs).stdout
    assert "then: STOP: " in card


@pytest.mark.proof
@pytest.mark.parametrize("by", ["Slurm's number", "its command and folder"])
def test_attempts_of_one_job_are_joined_and_of_another_are_not(tmp_path: Path, by: str) -> None:
    script, logs, folder = write(tmp_path), tmp_path / "logs", tmp_path / "run"
    said = []
    for job, how in (("41", "line"), ("42", "memory"), ("41", "line")):
        shutil.rmtree(folder, ignore_errors=True)
        how, extra = ("line", {"SLURM_JOB_ID": job}) if by == "Slurm's number" else (how, {})
        run_job(("python", script, how), folder=folder, haiprof=True, options=("--quiet",),
                log_dir=logs, extra_environment=extra)  # fmt: skip
        said.append(advice(logs)[:2])
    assert said == [(10, "RESTART"), (10, "RESTART"), (12, "STOP")]


def test_restart_by_torchrun_counts(tmp_path: Path) -> None:
    job = run_job((*RESTARTED, write(tmp_path), "line"), folder=tmp_path / "run", haiprof=True,
                  options=("--quiet",))  # fmt: skip
    assert job.log_dir is not None
    status, _, content = advice(job.log_dir)
    assert (status, content["reason"]) == (12, "same_line")
    assert [attempt["generation"] for attempt in content["attempts"]] == [0, 1]


@pytest.mark.proof
def test_rank_killed_from_outside_is_started_again_however_often(tmp_path: Path) -> None:
    script, logs = write(tmp_path), tmp_path / "logs"
    command = [PYTHON if word == "python" else word for word in (*TWO_RANKS, script, "wait")]
    words = haiprof_command(command, log_dir=logs, options=("--quiet", "--run-id=7"))
    for count in (1, 2):
        with subprocess.Popen(words, cwd=tmp_path, env=environment()) as launcher:
            report = _wait_for_rank(logs, count)
            os.kill(json.loads(report.read_text())["pid"], signal.SIGKILL)
            launcher.wait(timeout=60)
        status, line, content = advice(logs)
        assert (status, line) == (10, "RESTART"), content
        assert [attempt["cause"] for attempt in content["attempts"]] == ["killed"] * count


def _wait_for_rank(logs: Path, count: int) -> Path:
    """The report of rank 1, once that run has trained."""

    def report() -> Path | None:
        if len(list(logs.glob("[!.]*"))) != count:
            return None
        rank = RunPaths(newest_run(logs)).rank(1)
        return rank.report if rank.phases.exists() and rank.phases.stat().st_size > 4000 else None

    return within(60, report)


@pytest.mark.parametrize("word", ["--save", "--collect", "--svg=a.svg", "--last=3"])
def test_advice_goes_with_nothing_else(tmp_path: Path, word: str) -> None:
    done = run_command(["verdict", "--advice", word], folder=tmp_path)
    assert done.returncode == 2
    assert "--advice" in done.stderr
