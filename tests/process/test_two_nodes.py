"""Four real ranks on two nodes, asked from one of them, with a shared disk and without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.process.live import within
from tests.process.nodes_job import HOSTS, REACH, NodesJob, nodes_job

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("two nodes")]

STEP_S, SLOWER_S = 0.03, 0.04


def all_train(job: NodesJob) -> bool:
    """Whether all ranks are seen to be past the first steps, which they say once a second."""
    jobs = job.ask(job.nodes[0], "ps")["jobs"]
    return bool(jobs) and jobs[0]["ranks"] == len(HOSTS) and (jobs[0]["step"] or 0) > 20


@contextmanager
def running(folder: Path, *options: str, apart: bool = False) -> Iterator[NodesJob]:
    """The job, once it trains; what goes wrong in it is told later."""
    words = ["--follow", str(folder / "told"), "--at=20", "--rank=0", "--steps=1000000"]
    words.append(f"--step-s={STEP_S}")
    with nodes_job(folder, options=options, words=words, apart=apart) as job:
        job.wait_for_fault(0)  # step 20
        within(60, lambda: all_train(job))
        yield job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesJob]:
    """With a run directory that both nodes see."""
    with running(tmp_path_factory.mktemp("shared")) as job:
        yield job


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesJob]:
    """With a disk of its own on each node, under the same name."""
    folder = tmp_path_factory.mktemp("apart")
    with running(folder, REACH, f"--reach-token={folder / 'token'}", apart=True) as job:
        yield job


def check_traces(job: NodesJob) -> dict[str, Any]:
    found = job.ask(job.nodes[0], "trace-now", "faulty_job.py", "--steps", "5")
    assert {r["rank"]: (r["state"], r["host"]) for r in found["ranks"]} == {
        rank: ("done", host) for rank, host in HOSTS.items()
    }
    first, *others = job.own_steps(found).values()
    assert len(first) == 5
    assert others == [first] * 3
    return found


def suspects(found: dict[str, Any]) -> list[int]:
    return [suspect["rank"] for suspect in found["suspects"]]


def check_stopped_rank(job: NodesJob) -> None:
    pid = str(job.pid(3))
    job.nodes[1].run("kill", "-STOP", pid)
    try:
        found = job.ask(job.nodes[0], "snapshot", "faulty_job.py")
    finally:
        job.nodes[1].run("kill", "-CONT", pid)
    assert suspects(found) == [3]
    assert "stopped by a signal" in found["suspects"][0]["reason"]
    assert job.ask(job.nodes[0], "snapshot", "faulty_job.py")["moves"] is True


# -- a run directory that both see ----------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.parametrize(
    "phase",
    ["forward", *(pytest.param(p, marks=pytest.mark.proof) for p in ("loader", "backward"))],
)
def test_slow_rank_of_the_other_node_is_named_within_thirty_steps(
    job: NodesJob, phase: str
) -> None:
    job.tell(f"{phase}:{SLOWER_S * 1e3:g}", 3)
    try:
        seconds = str(28 * (STEP_S + SLOWER_S))
        found = job.ask(job.nodes[0], "attach", "faulty_job.py", "--time", seconds)
    finally:
        job.tell("healthy", 0)
    verdict = found["verdict"]
    assert verdict["step_count"] <= 4 * 30, "of all ranks together"
    first = verdict["findings"][0]
    assert first["ranks"] == [3], first
    assert phase in first["title"]


# -- without one ----------------------------------------------------------------------------------


def test_same_five_steps_are_traced_without_a_shared_disk(apart: NodesJob) -> None:
    found = check_traces(apart)
    assert found["aligned"]
    assert [rank["path"].startswith("node-2:/") for rank in found["ranks"]] == [
        False, False, True, True,
    ]  # fmt: skip


def test_every_rank_is_listed_where_the_controller_is(apart: NodesJob) -> None:
    (listed,) = apart.ask(apart.nodes[0], "ps")["jobs"]
    assert (listed["ranks"], listed["world_size"]) == (4, 4)
    (followed,) = apart.ask(apart.nodes[0], "top", "faulty_job.py")["jobs"]
    assert {rank["rank"]: rank["host"] for rank in followed["ranks"]} == HOSTS


def test_stopped_rank_is_named_without_a_shared_disk(apart: NodesJob) -> None:
    check_stopped_rank(apart)


@pytest.mark.proof
def test_stuck_rank_is_named_without_a_shared_disk(apart: NodesJob) -> None:
    apart.tell("other_collective", 3)  # for good, as above
    time.sleep(1)
    found = apart.ask(apart.nodes[0], "snapshot", "faulty_job.py")
    assert (found["moves"], suspects(found)) == (False, [3])
    other = apart.ask(apart.nodes[1], "snapshot", "faulty_job.py")
    assert not {0, 1} & set(suspects(other)), "of them nothing is known there"
    assert "ranks 0 and 1 are not known here" in " ".join(other["notes"])
