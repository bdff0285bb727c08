"""Real jobs of two ranks hang, become slower, or have a slow rank: haiprof says who it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import haiprof
from haiprof.diagnosis.engine import diagnose
from haiprof.run_analysis.reactions import reactions
from haiprof.run_analysis.run_files import open_run
from tests.process.jobs import EXAMPLES, REPOSITORY, TORCHRUN, run_command, run_job, succeeded
from tests.process.live import LiveJob, plain_ranks

pytestmark = pytest.mark.slow

JOB = str(REPOSITORY / "tests" / "process" / "faulty_job.py")


def live(folder: Path, fault: str, *options: str) -> LiveJob:
    return LiveJob(folder, plain_ranks(2, JOB, *fault.split()), *options, said="FAULT")


def verdict(folder: Path) -> dict[str, Any]:
    done = run_command(["verdict", str(folder / "logs"), "--json"], folder=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("wait_for_lock", "wait_for_lock", marks=pytest.mark.proof),
        ("stop", "stopped by a signal"),
    ],
)
def test_hang_is_looked_at_by_itself_and_the_verdict_names_the_rank(
    fault: str, said: str, tmp_path: Path
) -> None:
    with live(tmp_path, f"{fault} --at 25", "--hang-limit", "3") as job:
        hang = job.first_hang(within_s=60)
        assert (hang.trigger, hang.state) == ("hang", "done")
        assert [suspect.rank for suspect in hang.suspects] == [1]
        assert said in hang.suspects[0].reason + hang.suspects[0].doing
        assert "rank 1 holds the job up" in job.stderr
        assert job.process.poll() is None, "looking at a job does not end it"
    findings = verdict(tmp_path)["findings"]
    assert (findings[0]["slug"], findings[0]["ranks"]) == ("standstill", [1])


@pytest.mark.proof
def test_steps_that_become_slower_are_traced_and_losses_stay_the_same(tmp_path: Path) -> None:
    command = [*TORCHRUN, JOB, "slow:1.3", "--at", "90", "--steps", "200"]
    options = ("--react", "both", "--trace-stacks", "--quiet")
    under = succeeded(run_job(command, folder=tmp_path / "a", haiprof=True, options=options))
    faster = [*command[:-4], "--at", "0", "--steps", "200", "--step-s", "0"]
    bare = succeeded(run_job(faster, folder=tmp_path / "b", haiprof=False))
    losses = [line for line in under.stdout.splitlines() if line.startswith("LOSSES")]
    assert losses
    assert losses[0] in bare.stdout
    (slow,) = reactions(open_run(tmp_path / "a" / "logs"))
    assert (slow.trigger, slow.state) == ("slow", "done")
    assert slow.step is not None
    assert abs(slow.step - 90) <= 10
    assert slow.steps is not None
    assert slow.steps[0] >= slow.step
    traces = haiprof.TraceAnalysis(next((tmp_path / "a" / "logs").iterdir())).traces
    assert all(trace.python.height for trace in traces.values()), "no Python stacks in it"
    found = verdict(tmp_path / "a")
    assert f"step {slow.step} on became" in found["reactions"][0]
    assert f"steps {slow.steps[0]} to {slow.steps[1] - 1} were traced" in found["reactions"][0]


WHERE = {"dataloader": "batches", "forward": "in forward", "backward": "in backward"}
DEFAULT = {("forward", 1)}
CASES = [
    pytest.param(phase, rank, marks=() if (phase, rank) in DEFAULT else pytest.mark.proof)
    for phase in ("dataloader", "forward", "backward")
    for rank in (0, 1)
]


@pytest.mark.parametrize(("phase", "slow_rank"), CASES)
def test_slow_rank_is_named_within_thirty_steps(tmp_path: Path, phase: str, slow_rank: int) -> None:
    script = [str(EXAMPLES / "two_ranks_slow_one.py"), "--steps", "30", "--slow-phase", phase]
    command = plain_ranks(2, *script, "--slow-rank", str(slow_rank))
    job = run_job(command, folder=tmp_path / "job", haiprof=True)
    assert job.returncode == 0, job.stderr
    verdict = diagnose(job.analyzer())
    others = ("busy_neighbours", "shared_cores", "no_core")  # of the machine, beside the cause
    first = next(found for found in verdict.findings if found.rule not in others)
    assert first.rank == slow_rank
    assert WHERE[phase] in first.title
    late = job.analyzer().lateness().row(0, named=True)
    assert late["rank"] == slow_rank
    assert late["late_ns_per_step"] > 8e6, "20 ms per step were injected; others may delay both"
