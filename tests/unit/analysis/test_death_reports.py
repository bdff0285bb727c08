"""A death as a ticket, in the list of runs, and from the dumps of PyTorch's own watchdog."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from haiprof.cli import main
from tests.unit.analysis.test_deaths import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "run")


def watchdog_dump(job: Job, rank: int, *kinds: str, dtypes: object = ("Float",)) -> None:
    """As ProcessGroupNCCL's watchdog writes it: a pickle; the last collective is not over."""
    entries = [
        {
            "frames": [{"name": "step", "filename": "train.py", "line": 88}],
            "record_id": place, "pg_id": 0, "process_group": ("0", "default_pg"),
            "collective_seq_id": place, "p2p_seq_id": 0, "op_id": place,
            "profiling_name": f"nccl:{kind}", "time_created_ns": 10**18 + place,
            "input_sizes": [[4, 4]], "input_dtypes": dtypes, "output_sizes": [[4, 4]],
            "output_dtypes": dtypes, "state": "completed" if place < len(kinds) else "started",
            "time_discovered_started_ns": 10**18 + place, "time_discovered_completed_ns": None,
            "retired": place < len(kinds), "timeout_ms": 600000, "is_p2p": False,
        }
        for place, kind in enumerate(kinds, start=1)
    ]  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    dump = {"version": "2.10", "rank": rank, "pg_config": config, "entries": entries}
    job.run.flight.mkdir(exist_ok=True)
    (job.run.flight / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


@pytest.mark.parametrize("dtypes", [["Float"], "float32"], ids=["as C++ writes", "as its tests do"])
def test_dumps_of_the_watchdog_tell_who_issued_another_collective(job: Job, dtypes: object) -> None:
    for rank in range(3):
        last = "broadcast" if rank == 1 else "all_reduce"
        watchdog_dump(job, rank, *["all_reduce"] * 4, last, dtypes=dtypes)
        job.over(rank, 1, number=6)
    death = job.death()
    assert death.cause == "mismatch"
    assert "collective 5" in death.headline
    assert "rank 1 broadcast" in death.headline


def test_rank_behind_is_the_suspect_where_all_ranks_were_aborted(job: Job) -> None:
    for rank, at_s in ((0, 1), (1, 2.2), (2, 1.1)):
        watchdog_dump(job, rank, *["all_reduce"] * (3 if rank == 1 else 5))
        job.over(rank, at_s, number=6)
    death = job.death()
    assert (death.cause, death.ranks, death.certain) == ("hang", (1,), False)
    assert "it never came to all_reduce 5" in death.headline
    assert "ranks 0 and 2 waited in all_reduce 5 and were ended" in death.headline
    assert [fate.role for fate in death.fates] == ["victim", "cause", "victim"]


def test_rank_behind_that_aborted_long_before_the_others_crashed(job: Job) -> None:
    for rank, at_s in ((0, 600), (1, 1), (2, 600.2)):
        watchdog_dump(job, rank, *["all_reduce"] * (3 if rank == 1 else 5))
        job.over(rank, at_s, number=6)
    death = job.death()
    assert (death.cause, death.ranks) == ("crash", (1,))
    assert [fate.role for fate in death.fates] == ["victim", "cause", "victim"]


def test_exit_report_is_markdown_with_cause_line_and_every_rank(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.died(1, 0, "RuntimeError", "shape mismatch")
    for rank in (0, 2):
        job.over(rank, 3, number=15)
    ticket = tmp_path / "ticket.md"
    assert main(["verdict", str(job.run.root), "--exit-report", str(ticket)]) == 0
    text = ticket.read_text()
    assert "rank 1 died first: RuntimeError: shape mismatch (train.py:88" in text
    assert text.startswith("#")
    assert text.count("| ") >= 3, "a row per rank"
    assert str(ticket) in capsys.readouterr().err


def test_list_says_in_a_word_how_each_run_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, killed = Job(tmp_path / "a-failed"), Job(tmp_path / "b-killed")
    failed.died(1, 0, "RuntimeError", "shape mismatch")
    killed.over(1, 0, number=9)
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("a-failed" in line and "exception" in line for line in lines)
    assert any("b-killed" in line and "killed" in line for line in lines)
    assert main(["list", str(tmp_path), "--json"]) == 0
    json.loads(capsys.readouterr().out)
