"""Real jobs that die and hang, and a local server that is told, or that never answers."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from haiprof.agent.notifications import Notifier
from tests.process.jobs import REPOSITORY, TORCHRUN, run_job, run_script, training
from tests.process.live import LiveJob, within
from tests.webhook import Webhook

pytestmark = pytest.mark.slow

JOB = str(REPOSITORY / "tests" / "process" / "faulty_job.py")
DIES = training(
    "for number in range(5):", each="",
    after='raise RuntimeError("no label in sample 9, api_key=abc123def456ghi789")',
)  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="verdict"),
        pytest.param(("--quiet",), id="quiet", marks=pytest.mark.proof),
    ],
)
def test_death_and_end_with_its_cause_are_told(tmp_path: Path, options: tuple[str, ...]) -> None:
    with Webhook() as server:
        extra = {"HAIPROF_NOTIFY": server.url}
        job = run_script(tmp_path, DIES, options=options, extra_environment=extra)
    assert job.returncode == 1
    assert server.events() == ["death", "end"]
    death, end = server.bodies
    assert (death["rank"], death["status"]) == (0, 1)
    assert (end["exit_status"], end["job"]) == (1, "train")
    assert "RuntimeError" in end["text"]
    assert "no label in sample 9" in end["text"]
    assert "abc123def456ghi789" not in json.dumps(server.bodies)
    if options:
        assert [line for line in job.stderr.splitlines() if line.startswith("haiprof")] == []
    recorded = [path.read_text() for path in (tmp_path / "job" / "logs").rglob("*.json")]
    assert not any(server.url in text for text in recorded), "the address may be a secret"


def test_server_that_never_answers_changes_neither_exit_status_nor_output(tmp_path: Path) -> None:
    with Webhook(answers=False) as server:
        job = run_script(tmp_path, DIES, options=("--quiet", "--notify", server.url))
        assert server.events()[0] == "death"
    assert (job.returncode, job.stdout) == (1, "")
    assert "notifications were not delivered" in job.stderr


@pytest.mark.proof
def test_hang_is_told_once_with_the_rank_that_blocks_and_when_it_ends(tmp_path: Path) -> None:
    command = [*TORCHRUN, JOB, "stop", "--at", "25", "--steps", "100000"]
    with Webhook() as server:
        # Five times as long before the first step, which takes long on a machine with other load.
        options = ("--hang-limit", "10", "--notify", server.url)
        with LiveJob(tmp_path, command, *options, said="FAULT") as job:
            within(90, lambda: "hang" in server.events(), "a hang is told")
            job.signal(signal.SIGCONT, 1)
            within(60, lambda: "hang_end" in server.events(), "the end of the hang is told")
        told = [body for body in server.bodies if body["event"].startswith("hang")]
    hang, end = told
    assert "rank 1 holds the job up" in hang["text"]
    assert hang["snapshot"].endswith(".json")
    assert end["steps_go_on"] is True


@pytest.mark.proof
def test_slower_steps_are_told_with_the_accounts_that_grew(tmp_path: Path) -> None:
    command = [*TORCHRUN, JOB, "slow:1.6", "--at", "90", "--steps", "200"]
    with Webhook() as server:
        run_job(command, folder=tmp_path / "job", haiprof=True,
                options=("--notify", server.url, "--react", "off"))  # fmt: skip
    slow = next(body for body in server.bodies if body["event"] == "slow")
    assert "slower" in slow["text"]
    assert server.events()[-1] == "end"
    if slow["accounts"] is None:
        assert "not known: " in slow["text"], "other load on this machine: said, not guessed"
    else:
        assert "rank 1" in slow["text"]
        assert any("faulty_job.py" in account["title"] for account in slow["accounts"])


def test_command_gets_the_event_on_its_input(tmp_path: Path) -> None:
    sender = Notifier(f"cat > {tmp_path / 'event'}; echo never seen", {"job": "train"})
    sender.send("slow", "step 412 on is slower", lambda: ("a.py:3: 1 ms to 9 ms", {"n": 1}))
    sender.close(lambda: False)
    body = json.loads((tmp_path / "event").read_text())
    assert body["text"].splitlines()[1:] == ["a.py:3: 1 ms to 9 ms"]
    assert (body["event"], body["n"]) == ("slow", 1)


def test_command_that_fails_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    sender = Notifier("exit 3", {"job": "train"}, retry_s=0.01)
    sender.send("hang", "no step")
    sender.send("end", "over")
    sender.close(lambda: False)
    assert capfd.readouterr().err.count("the command ended with status 3") == 1
