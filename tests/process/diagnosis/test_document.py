"""diagnosis.json and `haiprof verdict`: the form that docs/diagnosis.md describes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from haiprof.diagnosis.verdict import FIELDS, FINDING_FIELDS, SCHEMA
from tests.unit.diagnosis.stories import write_story

ROOT = Path(__file__).parents[3]


def run_haiprof(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "haiprof", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        line, capture_output=True, text=True, check=False, cwd=cwd, env=environment
    )


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write_story(tmp_path / "run", lambda *_: (30.0, 5.0, 10.0, 2.0))


def test_diagnose_prints_and_keeps_the_documented_form(slow: Path) -> None:
    done = run_haiprof("diagnose", str(slow), "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert list(content) == list(FIELDS)
    assert content["schema"] == SCHEMA
    finding = content["findings"][0]
    assert list(finding) == list(FINDING_FIELDS)
    assert (finding["slug"], finding["ranks"]) == ("dataloader_bound", [])
    account = content["ledger"][content["opportunities"][0]]
    assert (account["position"], account["gain_ns"]) == ("input", pytest.approx(30e6, rel=0.05))
    assert content["problem_count"] == 1
    assert {"slug": "allocator_retries", "why": "no counts of a GPU's allocator"} in content[
        "abstained"
    ]
    assert "first_batch" in content["checked"]
    assert json.loads((slow / "report" / "diagnosis.json").read_text()) == content


def test_diagnose_shows_the_card(slow: Path) -> None:
    done = run_haiprof("diagnose", str(slow))
    assert "dataloader-bound" in done.stdout
    assert str(slow / "report" / "diagnosis.json") in done.stderr


def test_verdict_still_works(slow: Path) -> None:
    content = json.loads(run_haiprof("verdict", str(slow), "--json").stdout)
    assert content["findings"][0]["slug"] == "dataloader_bound"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-job"], "no running job 'no-such-job'"),
        (["no-such-job", "--collect"], "no running job 'no-such-job'"),
        (["--save-traces"], "--save-traces needs --collect"),
        (["--collect", "--time", "0"], "expected more than 0 seconds"),
    ],
)
def test_what_cannot_be_judged_is_one_clear_line(
    tmp_path: Path, words: list[str], message: str
) -> None:
    done = run_haiprof("diagnose", *words, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_collect_on_a_job_that_has_ended_says_so(slow: Path) -> None:
    manifest = json.loads((slow / "run.json").read_text())
    (slow / "run.json").write_text(json.dumps({**manifest, "end_wall_ns": 1}))
    done = run_haiprof("diagnose", str(slow), "--collect", "--time", "1")
    assert done.returncode != 0
    assert "does not run any more" in done.stderr


SLEEPS = """
import time, torch

class Net(torch.nn.Linear):
    def forward(self, batch):
        time.sleep(0.03)
        return super().forward(batch)

net = Net(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
while True:
    net(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_next_seconds_of_a_running_job_are_judged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    line = [sys.executable, "-m", "haiprof", "run", "--quiet", "--log-dir", str(tmp_path / "logs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    whole = [*line, "--", sys.executable, str(tmp_path / "train.py")]
    process = subprocess.Popen(whole, env=environment, stdout=subprocess.DEVNULL)
    try:
        run = _reported(tmp_path / "logs", process)
        folder = tmp_path / "diagnosis"
        words = ("--collect", "--time", "6", "--json", "--folder", str(folder))
        done = run_haiprof("diagnose", str(run), *words)
        assert done.returncode == 0, done.stderr
        content = json.loads(done.stdout)
        assert "forward_bound" in [finding["slug"] for finding in content["findings"]]
        assert content["since_ns"] > 0
        assert content["step_count"] > 0
        assert json.loads((folder / "diagnosis.json").read_text()) == content
        assert (folder / "functions.txt").exists(), (
            done.stderr + (folder / "README.txt").read_text()
        )
        assert " by call stack" in (folder / "functions.txt").read_text()
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait()


def _reported(logs: Path, process: subprocess.Popen[bytes]) -> Path:
    """The run directory, once its rank has written steps."""
    while process.poll() is None:
        found = list(logs.glob("*/ranks/0/phases.rec"))
        if found:
            return found[0].parents[2]
    raise AssertionError("the job ended before it trained")
