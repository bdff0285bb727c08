"""Who sees the jobs of others: root and the configured group, and they only read.

pytest tests/security/test_administrators.py -v
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import training
from tests.process.live import within
from tests.security.several_users import Machine, several_users

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("administrators")]

OWNER, ADMINISTRATOR, STRANGER = "hp-alice", "hp-ann", "hp-bob"
GROUP = "hp-admins"
SCRIPT = training('while not os.path.exists("end"):', each="time.sleep(0.02)")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with several_users({OWNER: (), ADMINISTRATOR: (GROUP,), STRANGER: ()}) as found:
        found.configure(f'admin-group = "{GROUP}"\nlog-dir = "{found.shared}"\n')
        yield found


@pytest.fixture(scope="module")
def run(machine: Machine) -> Iterator[Path]:
    """The run directory of a job of one user, which runs on."""
    home = machine.home(OWNER)
    (home / "train.py").write_text(SCRIPT)
    job = machine.start(OWNER, sys.executable, "-m", "haiprof", "--quiet", "train.py")
    try:
        found = within(60, lambda: next(machine.shared.glob("train-*/ranks/0/phases.rec"), None),
                       "a run").parents[2]  # fmt: skip
        within(60, lambda: (found.name, None) in jobs(machine, OWNER), "the owner sees it")
        yield found
    finally:
        (home / "end").touch()
        said = job.communicate(timeout=120)
        assert job.returncode == 0, said


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


LIVE = ("ls", "--live", "--json")


def jobs(machine: Machine, user: str) -> list[tuple[str, str | None]]:
    return jobs_in(machine.haiprof(user, *LIVE))


def jobs_in(done: subprocess.CompletedProcess[str]) -> list[tuple[str, str | None]]:
    return [(job["id"], job["user"]) for job in answer(done)["jobs"]]


def test_root_and_the_group_see_the_job_that_runs_and_nobody_else(
    machine: Machine, run: Path
) -> None:
    every, named, shown = machine.haiprof_each(
        ADMINISTRATOR, LIVE, (*LIVE, run.name), ("ls", "--live", "--once")
    )
    assert jobs_in(every) == jobs_in(named) == [(run.name, OWNER)]
    assert OWNER in shown.stdout
    assert (run.name, OWNER) in jobs(machine, "root")
    assert jobs(machine, STRANGER) == []


def test_root_sees_it_wherever_it_writes(machine: Machine, run: Path) -> None:
    haiprof = ("env", "HAIPROF_LOG_DIR=/nowhere", sys.executable, "-m", "haiprof")
    assert (run.name, OWNER) in jobs_in(machine.run("root", *haiprof, *LIVE))


@pytest.mark.parametrize("user", [ADMINISTRATOR, "root"])
def test_list_and_verdict_are_of_others_too(machine: Machine, run: Path, user: str) -> None:
    verdicts = [("verdict", name, "--json") for name in (run.name, str(run))]
    listed, shown, *judged = machine.haiprof_each(user, ("ls", "--json"), ("ls",), *verdicts)
    runs = answer(listed)["runs"]
    assert [(each["user"], Path(each["path"]).name) for each in runs] == [(OWNER, run.name)]
    assert OWNER in shown.stdout
    assert all(answer(verdict)["headline"] for verdict in judged)


def test_stranger_reads_nothing(machine: Machine, run: Path) -> None:
    listed, verdict = machine.haiprof_each(STRANGER, ("ls", "--json"), ("verdict", str(run)))
    assert answer(listed)["runs"] == []
    assert verdict.returncode != 0
    haiprof = ("env", f"HAIPROF_ADMIN_GROUP={STRANGER}", sys.executable, "-m", "haiprof")
    claimed = machine.run(STRANGER, *haiprof, *LIVE)
    assert jobs_in(claimed) == [], "who says so is no administrator of others' files"
    assert machine.run(STRANGER, "ls", str(run)).returncode != 0


@pytest.mark.parametrize("user", [ADMINISTRATOR, "root"])
def test_what_changes_a_job_is_its_users_alone(machine: Machine, run: Path, user: str) -> None:
    for done in machine.haiprof_each(user, *(words for name in (run.name, str(run)) for words in (
        ("snapshot", name), ("trace", "now", name), ("attach", name, "--time", "1"),
        ("verdict", name, "--collect", "--time", "1"),
    ))):  # fmt: skip
        assert done.returncode != 0, done.args
        said = done.stderr.strip().splitlines()
        assert len([line for line in said if "error:" in line]) == 1, said
        assert f"a job of another user ({OWNER})" in " ".join(done.stderr.split())
    assert list((run / "control" / "requests").iterdir()) == []
    assert owners_of(run) == {run.stat().st_uid}


def test_page_of_anothers_run_is_written_where_its_reader_is(machine: Machine, run: Path) -> None:
    for user in (ADMINISTRATOR, "root"):
        done = machine.haiprof(user, "report", str(run), "--no-traces")
        assert done.returncode == 0, done.stderr
        assert (machine.home(user) / f"{run.name}.html").is_file()
    assert not (run / "report" / "report.html").exists()
    assert owners_of(run) == {run.stat().st_uid}


def owners_of(run: Path) -> set[int]:
    return {uid for _, uid, _ in files_of(run)}


def files_of(run: Path) -> set[tuple[str, int, int]]:
    """Every file with its owner and mode; what is in the middle of being written is left out."""
    found = set()
    for path in (run, *run.rglob("*")):
        if not any(part.startswith(".") for part in path.relative_to(run).parts):
            with contextlib.suppress(FileNotFoundError):  # the job goes on meanwhile
                state = path.lstat()
                found.add((str(path), state.st_uid, state.st_mode))
    return found


def test_rights_of_a_run_are_no_wider_than_configured(machine: Machine, run: Path) -> None:
    for path, _, mode in files_of(run):
        assert not mode & 0o027, path
    for denied in ("control", "boot/x", "ranks/0/x", "x"):
        reach = ("ls", str(run / denied)) if denied == "control" else ("touch", str(run / denied))
        assert machine.run(ADMINISTRATOR, *reach).returncode != 0, denied
    assert machine.run(ADMINISTRATOR, "cat", str(run / "run.json")).returncode == 0


def test_without_the_configuration_a_run_is_its_owners_alone(machine: Machine) -> None:
    logs = machine.home(OWNER) / "own"
    words = ["--admin-group", "hp-nobody-has-this", "--log-dir", str(logs)]
    done = machine.haiprof(OWNER, *words, "--", sys.executable, "-c", "")
    assert done.returncode == 0, done.stderr
    assert "no such group" in done.stderr
    (own,) = logs.iterdir()
    assert {mode & 0o077 for _, _, mode in files_of(own)} == {0}
