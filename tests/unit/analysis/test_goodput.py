"""Where a job's wall time went: it adds up, and what was lost follows from checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from haiprof.base.intervals import union
from haiprof.base.ledger import POSITIONS
from haiprof.diagnosis.restart_advice import runs_of_job
from haiprof.run_analysis.restarts import (
    ACCOUNTS,
    CHECKPOINT,
    COMPILE,
    EVALUATION,
    WAITING,
    CheckpointCall,
    Goodput,
    RunRecord,
    StartRecord,
    StepTimes,
    goodput,
)
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.show.text import moment_text
from haiprof.show.views.deaths import goodput_text, goodput_view
from tests.commands import Run
from tests.sampling import examples

S = 1_000_000_000
FORWARD, INPUT = POSITIONS.index("forward"), POSITIONS.index("input")


def start(
    at_s: float, steps: int, *, saves: Sequence[CheckpointCall] = (), loads: Sequence[Any] = (),
    dies: bool = True, **more: Any,
) -> StartRecord:  # fmt: skip
    """A start whose process begins 2 s before its first step; each takes 1 s, a quarter of input.

    It dies half a second after its last step.
    """
    begins = round(at_s * S) + np.arange(steps) * S
    edges = np.stack([begins, begins + S // 4], axis=1).reshape(-1)
    end = round(at_s * S) + steps * S
    times = StepTimes(
        start_ns=edges, end_ns=end, position=np.tile([INPUT, FORWARD], steps),
        step=np.repeat(np.arange(steps), 2), trained_ns=begins + S * 9 // 10,
    )  # fmt: skip
    return StartRecord(
        run=more.pop("run", "job-1"), generation=0, process_ns=round((at_s - 2) * S),
        died_ns=end + S // 2 if dies else None, ended_ns=end + S // 2,
        why="killed" if dies else None, is_unfinished=dies,
        times=times if steps else None, saves=tuple(saves), loads=tuple(loads), **more,
    )  # fmt: skip


def call(at_s: float, file: str | None = "last.pt", *, written_s: float | None = None) -> Any:
    return CheckpointCall(
        start_ns=round(at_s * S), end_ns=round(at_s * S) + S // 100, file=file,
        written_ns=None if written_s is None else round(written_s * S),
    )  # fmt: skip


def job(*starts: StartRecord, end_s: float = 100) -> Goodput:
    found = goodput([RunRecord(
        name="job-1", start_ns=0, end_ns=round(end_s * S), has_ended=True, starts=starts,
    )])  # fmt: skip
    assert found.residual_ns == 0
    return found


def seconds(found: Goodput) -> dict[str, float]:
    return {name: ns / S for name, ns in found.accounts.items()}


def test_steps_after_the_checkpoint_that_was_read_are_lost() -> None:
    """Saved under another name than it was read by, as with a rename when it is whole."""
    saved = call(10 + 5.95, "tmp.pt")
    found = job(
        start(10, 8, saves=[saved]),
        start(30, 4, loads=[call(29, "last.pt", written_s=10 + 5.955)], dies=False),
        end_s=40,
    )
    first, second = found.starts
    assert (first.kept_steps, first.lost_steps, first.uncertain_steps) == (6, 2, 0)
    assert (second.kept_steps, second.first_step, second.from_step) == (4, 6, 6)
    assert found.lost_steps == (2, 2)
    assert seconds(found) == {
        "productive_steps": 7.5, "input": 2.5, "lost_steps": 2.5, "init": 12.0,
        "drain": 9.5 + 6,
    }  # fmt: skip
    assert found.ratio == pytest.approx(7.5 / 40)


def test_start_that_went_on_from_an_older_checkpoint_loses_all_between() -> None:
    found = job(
        start(10, 8, saves=[call(12.95, "a"), call(15.95, "b")]),
        start(30, 4, loads=[call(29, "b", written_s=15.955)], saves=[call(31.95, "c")]),
        start(50, 6, loads=[call(49, "a", written_s=12.955)], dies=False),
    )
    assert [s.kept_steps for s in found.starts] == [3, 0, 6]
    assert [s.lost_steps for s in found.starts] == [5, 4, 0]
    assert [s.first_step for s in found.starts] == [0, 6, 3]


def test_no_known_checkpoint_bounds_what_was_lost() -> None:
    weights = call(29, "resnet.pt", written_s=-5000)
    found = job(start(10, 8), start(30, 4, loads=[weights]), start(50, 6, dies=False))
    assert [s.went_on for s in found.starts] == ["first", "not known", "not known"]
    assert found.lost_steps == (0, 12)
    assert found.ratio is not None
    assert found.ratio_high == pytest.approx(found.ratio + 0.12)
    assert "input" in found.accounts, "of the steps that count"


def test_steps_of_a_run_that_ended_well_count_whatever_came_after_it() -> None:
    well = start(10, 8, dies=False, ended_well=True)
    found = job(well, start(30, 4, dies=False, ended_well=True))
    assert [s.kept_steps for s in found.starts] == [8, 4]
    assert found.lost_steps == (0, 0)
    saved = call(12.95)
    found = job(replace(well, saves=(saved,)), start(30, 4, loads=[call(29, written_s=12.955)]))
    assert found.starts[0].kept_steps == 3, "a later one went on from an older checkpoint of it"


@pytest.mark.parametrize(
    ("saves", "kept", "said"),
    [((), 0, "goodput: at most 40 % of 20.0 s; no checkpoint was seen: a restart repeats up to 8"),
     ((call(12.95),), 3,
      "goodput: 11 % to 36 % of 20.0 s; from the last checkpoint that was seen, a restart repeats "
      "up to 5 steps")],
)  # fmt: skip
def test_job_that_died_kept_what_it_saved(
    saves: Sequence[CheckpointCall], kept: int, said: str
) -> None:
    """What it may have written in other ways is not known."""
    found = job(start(10, 8, saves=saves), end_s=20)
    (only,) = found.starts
    assert (only.kept_steps, only.uncertain_steps, only.lost_steps) == (kept, 8 - kept, 0)
    assert found.lost_steps == (0, 8 - kept)
    assert found.ratio == pytest.approx(kept * 0.75 / 20)
    assert goodput_text(found).startswith(said)


def test_batch_that_is_taken_after_the_last_step_of_a_job_that_ends_well_is_no_lost_step() -> None:
    ends = replace(start(10, 8, dies=False), is_unfinished=True)
    assert job(ends, end_s=20).accounts.get("lost_steps") is None


def test_file_that_no_save_seen_has_written_bounds_it_too() -> None:
    """As an asynchronous save, or one by another library, is under way while steps go on."""
    loads = [call(29, "x", written_s=14.5)]
    found = job(start(10, 8, saves=[call(12.95, None)]), start(30, 2, loads=loads))
    first = found.starts[0]
    assert (first.kept_steps, first.uncertain_steps, first.lost_steps) == (3, 1, 4)
    assert found.starts[1].first_step is None
    found = job(start(10, 8), start(30, 2, loads=loads))
    assert (found.starts[0].kept_steps, found.starts[0].uncertain_steps) == (0, 4)


def test_newest_of_the_files_that_were_read_is_the_checkpoint() -> None:
    loads = [call(28, "data.pt", written_s=10.2), call(29, "m.pt", written_s=15.955)]
    found = job(start(10, 8, saves=[call(10.2, "data.pt"), call(15.95, "m.pt")]),
                start(30, 2, loads=loads))  # fmt: skip
    assert found.starts[1].from_step == 6


def test_hang_is_time_from_the_last_sign_of_life() -> None:
    dies = start(10, 3, stood_still=True)
    assert seconds(job(dies))["hang"] == 0.5
    goes_on = start(10, 8, dies=False)
    run = RunRecord(name="a", start_ns=0, end_ns=20 * S, has_ended=True, starts=(goes_on,),
                    hangs=((12 * S, 13 * S + 1),))  # fmt: skip
    found = goodput([run])
    assert (seconds(found)["hang"], found.residual_ns) == (2.0, 0)


def test_what_comes_before_the_first_step_has_accounts() -> None:
    when = {
        WAITING: union(np.array([8 * S]), np.array([9 * S])),
        COMPILE: union(np.array([9 * S]), np.array([9 * S + S // 2])),
        CHECKPOINT: union(np.array([9 * S + S // 2]), np.array([10 * S])),
        EVALUATION: union(np.array([11 * S]), np.array([12 * S])),
    }
    found = job(start(10, 2, apart=when, dies=False), end_s=13)
    assert seconds(found) == {
        "init": 8.0, "waiting_for_ranks": 1.0, "compile": 0.5, "checkpoint": 0.5,
        "productive_steps": 0.75, "input": 0.25, "evaluation": 1.0, "drain": 1.0,
    }  # fmt: skip


def test_queue_lies_between_runs() -> None:
    runs = [
        RunRecord(name=name, start_ns=begin * S, end_ns=(begin + 10) * S, has_ended=True,
                  starts=(start(begin + 3, 4, run=name),))
        for name, begin in (("a", 0), ("b", 70))
    ]  # fmt: skip
    found = goodput(runs)
    assert (seconds(found)["queue"], found.wall_ns, found.residual_ns) == (60.0, 80 * S, 0)


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_accounts_add_up_whatever_the_starts_and_clocks_say(seed: int) -> None:
    dice = Random(seed)
    runs, at = [], dice.randint(0, 1 << 60)
    for number in range(dice.randint(1, 4)):
        starts = []
        for _ in range(dice.randint(0, 4)):
            steps, begin = dice.randint(0, 9), at / S + dice.uniform(-20, 60)
            saves = [call(begin + dice.uniform(-5, 12)) for _ in range(dice.randint(0, 3))]
            loads = [
                call(begin - 1, "last.pt", written_s=begin - dice.uniform(-9, 90))
                for _ in range(dice.randint(0, 2))
            ]
            edges = np.array(sorted(dice.randint(at, at + 90 * S) for _ in range(4)))
            apart = {dice.choice((WAITING, COMPILE, EVALUATION)): union(edges[::2], edges[1::2])}
            starts.append(start(begin, steps, saves=saves, loads=loads, apart=apart,
                                dies=dice.random() < 0.6, run=f"job-{number}"))  # fmt: skip
            at += dice.randint(0, 40 * S)
        end = at + dice.randint(0, 50 * S)
        hangs = tuple((at - dice.randint(0, 30 * S), at) for _ in range(dice.randint(0, 2)))
        runs.append(RunRecord(
            name=f"job-{number}", start_ns=at - dice.randint(0, 90 * S), end_ns=end,
            has_ended=True, starts=tuple(starts), hangs=hangs,
        ))  # fmt: skip
        at = end + dice.randint(-5 * S, 50 * S)
    found = goodput(runs)
    assert found.residual_ns == 0
    assert sum(found.accounts.values()) == found.wall_ns
    assert found.accounts.keys() <= set(ACCOUNTS)
    assert all(ns > 0 for ns in found.accounts.values())
    for one in found.starts:
        assert one.kept_steps >= 0 <= one.uncertain_steps
        assert one.lost_steps >= 0
    low, high = found.lost_steps
    assert 0 <= low <= high


def test_table_of_starts_shows_in_80_columns_when_each_began() -> None:
    noon, name = 43_200, "train-20261128-212746-4335bea176973efd"
    ats = (noon, noon + 3600, noon + 7200)
    runs = (name, name, f"{name}2")
    starts = [start(at, 4, run=run) for at, run in zip(ats, runs, strict=True)]
    lines = _in_80_columns(job(*starts, end_s=60_000))
    assert "starts on 1970-01-01" in lines
    for place, own in enumerate(starts, start=1):
        moment = moment_text(own.process_ns).removeprefix("1970-01-01 ")
        assert any(line.split()[:2] == [str(place), moment] for line in lines), moment
    assert lines[-2:] == [f"  start 1 to 2  {name}", f"  start 3       {name}2"]
    assert not any("…" in line for line in lines)


def test_table_of_starts_has_their_days_where_these_differ() -> None:
    starts = [start(at, 4) for at in (43_200, 43_200 + 86_400)]
    lines = _in_80_columns(job(*starts, end_s=200_000))
    assert "starts" in lines
    for own in starts:
        assert any(f" {moment_text(own.process_ns)} " in line for line in lines)
    assert not any("…" in line for line in lines)


def _in_80_columns(found: Goodput) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(goodput_view(found, joined="the same command"), crop=False)
    return [line.rstrip() for line in captured.get().splitlines()]


# -- which runs are one job ------------------------------------------------------------------------


def write(logs: Path, name: str, at: int, **facts: Any) -> None:
    folder = RunPaths(logs / name)
    folder.root.mkdir(parents=True)
    folder.ranks.mkdir()
    known = {"cwd": "/w", "command": ["python", "a.py"], "start_wall_ns": at * S,
             "end_wall_ns": (at + 5) * S, "exit_status": 1}  # fmt: skip
    write_manifest(folder, Manifest(haiprof_version="1", name="job", **{**known, **facts}))


@pytest.mark.parametrize(("facts", "joined"), [
    ([{}, {}, {}], [0, 1, 2]),
    ([{"exit_status": 0}, {}, {}], [1, 2]),
    ([{"options": {"run_id": "7"}, "exit_status": 0}] * 3, [0, 1, 2]),
    ([{"options": {"run_id": "6"}}, {}, {"options": {"run_id": "6"}}], [0, 2]),
    ([{"environment": {"slurm_job": "9"}}, {}, {"environment": {"slurm_job": "9"}}], [0, 2]),
    ([{"cwd": "/other"}, {}, {}], [1, 2]),
    ([{"command": ["python", "b.py"]}, {}, {}], [1, 2]),
])  # fmt: skip
def test_runs_of_one_job_are_joined(
    tmp_path: Path, facts: list[dict[str, Any]], joined: list[int]
) -> None:
    for place, own in enumerate(facts):
        write(tmp_path, f"job-{place}", 100 + 10 * place, **own)
    found, _ = runs_of_job(RunPaths(tmp_path / "job-2"))
    assert [path.name for path in found] == [f"job-{place}" for place in joined]


def test_command_says_what_it_joined_in_every_form(tmp_path: Path, run: Run) -> None:
    for place in range(3):
        write(tmp_path, f"job-{place}", 100 + 10 * place)
    shown = run("goodput", tmp_path).out
    assert "3 runs joined: the same command in the same folder" in shown
    assert "in none of these: 0 ns" in shown
    data = run("goodput", tmp_path / "job-1", "--json").data
    assert (data["schema"], data["wall_ns"], data["residual_ns"]) == (
        "haiprof.goodput.1", 25 * S, 0,
    )  # fmt: skip
    assert (data["accounts"]["queue"], data["accounts"]["unknown"]) == (10 * S, 15 * S)
    data = run("goodput", tmp_path / "job-0", tmp_path / "job-2", "--json").data
    assert data["accounts"]["queue"] == 15 * S
    assert "| queue | 10.0 s | 40 % |" in run("goodput", tmp_path, "--format", "markdown").out
