"""diagnosis.json and `haiprof verdict`: the form that docs/diagnosis.md describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haiprof.diagnosis.verdict import FIELDS, FINDING_FIELDS, SCHEMA
from tests.process.jobs import run_command
from tests.process.live import LiveJob
from tests.unit.diagnosis.stories import write_story


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write_story(tmp_path / "run", lambda *_: (30.0, 5.0, 10.0, 2.0))


def test_diagnose_prints_and_keeps_the_documented_form(slow: Path) -> None:
    done = run_command(["diagnose", str(slow), "--json"], folder=slow)
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
    card = run_command(["diagnose", str(slow)], folder=slow)
    assert "dataloader-bound" in card.stdout
    assert str(slow / "report" / "diagnosis.json") in card.stderr


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
    done = run_command(["diagnose", *words], folder=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_collect_on_a_job_that_has_ended_says_so(slow: Path) -> None:
    manifest = json.loads((slow / "run.json").read_text())
    (slow / "run.json").write_text(json.dumps({**manifest, "end_wall_ns": 1}))
    done = run_command(["diagnose", str(slow), "--collect", "--time", "1"], folder=slow)
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
print("TRAINS", flush=True)
while True:
    net(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_next_seconds_of_a_running_job_are_judged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPS)
    folder = tmp_path / "diagnosis"
    with LiveJob(tmp_path, ["python", "train.py"], "--quiet") as job:
        job.reported(1)
        words = ("--collect", "--time", "4", "--folder", str(folder))
        content = job.ask("diagnose", str(job.run.root), *words)
        assert job.process.poll() is None
    assert "forward_bound" in [finding["slug"] for finding in content["findings"]]
    assert content["since_ns"] > 0
    assert content["step_count"] > 0
    kept = json.loads((folder / "diagnosis.json").read_text())
    assert kept == {name: content[name] for name in kept}
    assert " by call stack" in (folder / "functions.txt").read_text(), content["talk"]
