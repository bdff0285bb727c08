"""What real jobs print into files: read beside them, joined to verdicts and deaths, unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Verdict
from tests.process.jobs import PYTHON, REPOSITORY, Job, run_command, run_job

pytestmark = pytest.mark.slow

NCCL = "node7:1:1 [0] NCCL WARN Call to connect returned Connection refused"
TRAINS = (
    f"NCCL = {NCCL!r}"
    + """
import os, sys, time, traceback
import torch
rank = int(os.environ.get("RANK", "0"))
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=.1)
for step in range(1, 61):
    parameter.sum().backward()
    optimizer.step()
    time.sleep(.03)
    if rank == int(sys.argv[1]):
        loss = "nan" if step >= 40 else 1 / step
        key = "api_key=sk-abcdef0123456789abcdef"
        print(f"step {step} loss {loss} {key} 1,000 tokens/s", flush=True)
    if step == 20 and rank == 0 and "catch" in sys.argv:
        try:
            {}["label"]
        except KeyError:
            traceback.print_exc()
        os.write(1, b"\\xff\\x00 no text\\r")
if "die" in sys.argv:
    print(NCCL, flush=True)
    os._exit(7)
"""
)


def trained(folder: Path, line: str, *, haiprof: bool = True) -> Job:
    script = folder.parent / "train.py"
    script.write_text(TRAINS)
    return run_job(["sh", "-c", line.format(script=script, python=PYTHON)], folder=folder,
                   haiprof=haiprof)  # fmt: skip


def verdict_of(job: Job) -> Verdict:
    return diagnose(job.analyzer())


def test_what_a_job_printed_is_told_and_stays_as_it_is(tmp_path: Path) -> None:
    line = "exec {python} {script} 0 die > out.txt 2> err.txt"
    bare, job = (trained(tmp_path / name, line, haiprof=name == "job") for name in ("bare", "job"))
    assert job.returncode == bare.returncode == 7
    for name in ("out.txt", "err.txt"):
        assert (job.folder / name).read_bytes() == (bare.folder / name).read_bytes()
    verdict = verdict_of(job)
    (finding,) = [f for f in verdict.findings if f.rule == "loss_not_finite"]
    assert "at step 40" in finding.title
    assert finding.rank == 0
    assert "sk-abcdef" not in finding.title + str(verdict.notes)
    (rate,) = [note for note in verdict.notes if "tokens/s" in note]
    assert rate.startswith("rank 0 printed 1,000 tokens/s")
    said = re.search(r"measured: ([\d.]+) steps/s, which is ([\d.]+) \w+ per step", rate)
    assert said is not None
    assert float(said[1]) * float(said[2]) == pytest.approx(1000, rel=0.01)
    death = verdict.death
    assert death is not None
    assert [(each.kind, each.rank) for each in death.witnesses] == [("loss", 0), ("nccl", 0)]
    assert not death.certain
    assert death.fates[0].printed[-1] == NCCL
    shown = run_command(["verdict", str(job.logs)], folder=tmp_path).stdout
    assert "rank 0 printed" in shown
    assert "NCCL WARN" in shown


def test_rank_of_a_shared_file_is_not_guessed(tmp_path: Path) -> None:
    ranks = REPOSITORY / "tests/process/ranks.py"
    job = trained(tmp_path / "job", f"exec {{python}} {ranks} 2 {{script}} 1 catch > both.txt 2>&1")
    verdict = verdict_of(job)
    (finding,) = [f for f in verdict.findings if f.rule == "loss_not_finite"]
    assert finding.title.startswith("the loss that a rank printed")
    assert finding.rank is None
    assert "which rank printed it" in finding.missing
    (errors,) = [note for note in verdict.notes if "errors were printed" in note]
    assert "KeyError: 'label' (train.py:17)" in errors


@pytest.mark.proof
def test_what_is_printed_into_a_pipe_is_not_read_and_said_so(tmp_path: Path) -> None:
    job = trained(tmp_path / "job", "exec {python} {script} 0")
    assert "step 60 loss nan" in job.stdout
    assert dict(verdict_of(job).abstained)["loss_not_finite"] == "the job prints into no file"
