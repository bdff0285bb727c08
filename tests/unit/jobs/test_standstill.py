"""Who holds a job up: told from what ranks answered, and from what one did not."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from haiprof.agent.reactions import _of_snapshot
from haiprof.live import snapshot
from haiprof.live.find import Answers, Member
from haiprof.live.snapshot import Snapshot
from haiprof.live.standstill import Node, RankState, other_threads, suspects
from haiprof.run_analysis.process_ends import workers_last_at
from haiprof.run_format.control import Request
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.show.views.requests import snapshot_view
from tests.unit.analysis.recorded import write_run
from tests.unit.analysis.sampled import write_stacks

WAITS = (("train.py", 9, "main"), ("/x/torch/autograd/graph.py", 800, "_engine_run_backward"))
LOADS = (("train.py", 4, "read"),)
COMPUTES = (("train.py", 7, "metric"),)


def state(rank: int, **known: object) -> RankState:
    empty = {
        "host": "node0", "pid": 1, "answered": True, "process_state": "S", "stack": WAITS,
        "collectives": {"0": [9, 9, 9]}, "before": {"0": [9, 9, 9]},
    }  # fmt: skip
    return RankState(rank=rank, **{**empty, **known})  # type: ignore[arg-type]


def mute(rank: int, **known: object) -> RankState:
    silent: dict[str, object] = {"answered": False, "stack": None, "collectives": {}, "before": {}}
    return state(rank, **{**silent, **known})


def thread_of(stack: Sequence[tuple[str, int, str]]) -> list[object]:
    return [{"name": "MainThread", "main": True, "frames": [list(frame) for frame in stack]}]


def test_rank_whose_interpreter_does_not_answer_is_named_where_others_wait() -> None:
    (suspect,) = suspects([state(0), mute(1, stack=COMPUTES), state(2)], [])
    assert (suspect.rank, suspect.certain, suspect.doing) == (1, True, "train.py:7 in metric")
    assert "holds the interpreter lock" in suspect.reason


def test_rank_that_does_not_answer_is_not_named_where_nobody_waits() -> None:
    assert suspects([state(0, stack=LOADS, collectives={}, before={}), mute(1)], []) == []


@pytest.mark.parametrize("silent", [{"process_state": "T"}, {"process_state": "R"}])
def test_rank_that_waits_for_a_stopped_one_in_an_earlier_collective_is_not_named(
    silent: dict[str, Any],
) -> None:
    earlier: dict[str, Any] = {"collectives": {"0": [8, 8, 7]}, "before": {"0": [8, 8, 7]}}
    found = suspects([state(0), state(1), state(2, **earlier), mute(3, **silent)], [])
    assert [suspect.rank for suspect in found] == [3]
    found = suspects([state(0), state(1), state(2, stack=LOADS, **earlier), mute(3, **silent)], [])
    assert [suspect.rank for suspect in found] == [2, 3], "this one does not wait"


def test_backend_without_a_recorder_is_compared_by_stacks() -> None:
    unknown: dict[str, Any] = {"collectives": {}, "before": {}}
    (suspect,) = suspects([state(0, **unknown), state(1, stack=LOADS, **unknown)], [])
    assert (suspect.rank, suspect.certain) == (1, False)


def test_tie_of_two_is_said_as_such() -> None:
    unknown: dict[str, Any] = {"collectives": {}, "before": {}}
    states = [state(0, stack=LOADS, **unknown), state(1, stack=COMPUTES, **unknown)]
    found = suspects(states, [])
    assert [suspect.rank for suspect in found] == [0, 1]
    assert all("do different things" in suspect.reason for suspect in found)


def test_thread_that_may_hold_what_a_rank_waits_for_is_named_with_its_line() -> None:
    library = ["/x/lib/python3.11/site-packages/tensorboard/writer.py", 5, "run"]
    threads = [
        {"name": "MainThread", "main": True, "frames": [["train.py", 4, "read"]]},
        {"name": "writer", "main": False, "frames": [library]},
        {"name": "?", "main": False, "frames": [["/haiprof/in_job/recorder.py", 9, "loop"]]},
        {"name": "keeper", "main": False, "frames": [["train.py", 11, "keep"], library]},
        {"name": 5, "main": False, "frames": "damaged"}, "damaged",
    ]  # fmt: skip
    beside = other_threads(threads)
    assert beside == "its thread keeper is at train.py:11 in keep"
    (suspect,) = suspects([state(0), state(1, stack=LOADS, beside=beside)], [])
    assert suspect.doing == f"train.py:4 in read; {beside}"


@pytest.mark.parametrize("worker", ["", "its DataLoader worker (pid 9) is at data.py:3 in read"])
def test_only_rank_that_stands_still_is_named_with_its_line(worker: str) -> None:
    stack = [["train.py", 4, "main"], ["/x/site-packages/torch/data.py", 8, "poll"]]
    ranks = [{"rank": 0, "stack": stack, "process_state": "S", "worker": worker}]
    (suspect,) = _of_snapshot({"suspects": [], "ranks": ranks})["suspects"]
    assert suspect["doing"].startswith("train.py:4 in main")
    assert suspect["doing"].endswith(worker)


def test_ranks_that_all_stand_at_the_same_line_are_said_with_it() -> None:
    stack = [["train.py", 4, "main"], ["/x/site-packages/torch/c10d.py", 8, "init_process_group"]]
    ranks = [{"rank": rank, "stack": stack} for rank in (0, 1)]
    found = _of_snapshot({"suspects": [], "ranks": ranks})
    assert found["all_at"] == "train.py:4 in main → c10d.py:8 in init_process_group"
    ranks[1] = {"rank": 1, "stack": stack[:1]}
    assert _of_snapshot({"suspects": [], "ranks": ranks})["all_at"] is None


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ([mute(0)], "No rank answered"),
        ([state(0, collectives={}, before={})], "One rank, nothing to compare it with"),
        ([state(0, collectives={}), state(1, collectives={})], "no rank's stack differs"),
    ],
)
def test_headline_says_what_could_not_be_compared(states: list[RankState], says: str) -> None:
    found = Snapshot(
        wall_ns=1, run="run", states=tuple(states), moves=None, suspended=False, suspects=(),
        mismatches=(), threads={}, saving=(), details=(), tree=Node(frame=None), notes=(), path="",
    )  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=100).print(snapshot_view(found))
    assert says in out.getvalue().splitlines()[0]


def test_a_worker_that_a_rank_waits_for_is_where_it_was_sampled_last(tmp_path: Path) -> None:
    rank = RankPaths(tmp_path)
    fetch = ("/v/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
    work, stuck = (fetch, ("/me/data.py", 3, "read")), (fetch, ("/me/data.py", 9, "open_shard"))
    write_stacks(rank.worker_stacks(0), [(1000, work), (9000, stuck)], worker=0, pid=21)
    write_stacks(rank.worker_stacks(1), [(1000, stuck), (9000, work)], worker=1, pid=22)
    rank.worker_stacks(2).write_text("no line of ours\n")
    assert workers_last_at(rank) == {21: stuck, 22: work}


def test_ranks_that_ended_while_they_were_asked_are_told_with_what_they_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody interrupts a job that hangs while it is looked at."""
    run = write_run(tmp_path / "run")
    there = [Member(name=str(rank), rank=rank, host="node0", pid=None) for rank in (0, 1)]
    replies: list[list[Member]] = [there, [], []]
    monkeypatch.setattr(snapshot, "members", lambda _: replies.pop(0) if replies else [])
    monkeypatch.setattr(snapshot, "BETWEEN_LOOKS_S", 0)

    def ask(_: RunPaths, kind: str, *__: object, **___: object) -> Answers:
        request = Request(id="1", kind=kind, arguments={}, expires_wall_ns=0)
        groups = {"0": {"groups": {"0": [6, 0, 5]}}, "1": {"groups": {"0": [5, 0, 5]}}}
        stacks = {"0": {"threads": thread_of(WAITS)}, "1": {"threads": thread_of(LOADS)}}
        known: dict[str, Any] = {"stacks": stacks, "collectives": groups if replies else {}}
        done = {name: {"state": "done", **reply} for name, reply in known[kind].items()}
        return Answers(request=request, replies=done, silent=())

    monkeypatch.setattr(snapshot, "ask", ask)
    taken = snapshot.take_snapshot(run)
    assert [s.rank for s in taken.states] == [0, 1]
    assert taken.suspects[0].doing == "train.py:4 in read"
    replies = [[], [], []]
    assert _of_snapshot(snapshot.take_snapshot(run).as_json()) == {
        "state": "failed", "reason": "the ranks had ended before they were asked",
    }  # fmt: skip
