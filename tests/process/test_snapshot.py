"""A job of three real ranks stands still: the snapshot names the rank that the others wait for.

One job for all faults: rank 1 does what the file `fault` names until the file `release` is there.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import ranks_training
from tests.process.live import START_S, LiveJob, plain_ranks, within
from tests.sampling import variants

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("snapshot")]

LAST = "other_collective"  # nothing ends it
SCRIPT = ranks_training(before="""
import threading, socket, signal
def at_release(act):
    def wait():
        while not os.path.exists("release"):
            time.sleep(0.05)
        act()
    threading.Thread(target=wait, daemon=True).start()

def spin():
    over = []
    at_release(lambda: over.append(True))
    while not over:
        pass

def wait_for_lock():
    lock = threading.Lock()
    lock.acquire()
    at_release(lock.release)
    lock.acquire()

def receive():
    here, there = socket.socketpair()
    at_release(lambda: there.send(b"1"))
    here.recv(1)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def other_collective():
    dist.broadcast(torch.ones(7), 1)

def fail():
    name = open("fault").read()
    os.unlink("fault")
    print("FAULT", flush=True)
    globals()[name]()
    print("RELEASED", flush=True)
""", first='if rank == 1 and os.path.exists("fault"): fail()')  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    folder = tmp_path_factory.mktemp("snapshot")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with LiveJob(folder, plain_ranks(3, str(script)), "--quiet") as live:
        live.reported(3)
        within(START_S, lambda: live.listed()["step"])
        yield live


@pytest.fixture
def hanging_job(job: LiveJob, request: pytest.FixtureRequest) -> Iterator[LiveJob]:
    """Stands still for a second because of what rank 1 does; then it goes on."""
    (job.folder / "release").unlink(missing_ok=True)
    (job.folder / "draft").write_text(request.param)
    (job.folder / "draft").rename(job.folder / "fault")
    assert job.said() == "FAULT"
    within(START_S, lambda: (job.listed()["idle_ns"] or 0) > 1e9)
    yield job
    (job.folder / "release").touch()
    job.signal(signal.SIGCONT, 1)
    if request.param != LAST:
        assert job.said() == "RELEASED"


def snapshot(job: LiveJob) -> dict[str, Any]:
    found = job.ask("snapshot", job.pid)
    kept = json.loads(Path(found["path"]).read_text())
    assert kept == {name: found[name] for name in kept}
    return found


def test_healthy_job_has_no_suspect_and_goes_on(job: LiveJob) -> None:
    found = snapshot(job)
    assert found["moves"] is True
    assert found["suspects"] == []
    assert all(rank["answered"] and rank["stack"] for rank in found["ranks"])
    dumps = list(job.logs.glob("*/ranks/*/collectives-*.json.gz"))
    assert dumps == [], "a job that moves is not asked for its collectives"
    assert snapshot(job)["moves"] is True


@pytest.mark.parametrize(
    ("hanging_job", "said"),
    [
        ("spin", "spin"),
        *variants(("wait_for_lock", "wait_for_lock"), ("receive", "receive"),
                  ("stop", "stopped by a signal")),
        (LAST, "broadcast"),
    ],
    indirect=["hanging_job"],
)  # fmt: skip
def test_rank_that_holds_the_others_up_is_named(hanging_job: LiveJob, said: str) -> None:
    found = snapshot(hanging_job)
    assert found["moves"] is False
    assert [suspect["rank"] for suspect in found["suspects"]] == [1]
    (suspect,) = found["suspects"]
    assert suspect["certain"]
    assert said in suspect["reason"] + suspect["doing"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert hanging_job.process.poll() is None, "looking at a job does not end it"
