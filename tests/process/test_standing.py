"""Ranks that are gone, that save, or that are looked at more closely."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from pathlib import Path

import torch.serialization

from haiprof import Analyzer
from haiprof.live.find import lost_members, members
from haiprof.live.snapshot import SuspectDetails, inspect_suspects
from haiprof.live.standstill import GONE, RankState, Suspect, saving, suspects
from haiprof.run_analysis.run_files import open_run
from haiprof.run_format.layout import RunPaths
from tests.unit.diagnosis.stories import write_story


def state(rank: int, **known: object) -> RankState:
    empty = {
        "host": "node0", "pid": 1, "answered": True, "process_state": "S", "stack": None,
        "collectives": {}, "before": {},
    }  # fmt: skip
    return RankState(rank=rank, **{**empty, **known})  # type: ignore[arg-type]


def test_rank_that_saves_is_known_by_its_stack() -> None:
    save = (("train.py", 3, "main"), (str(torch.serialization.__file__), 900, "save"))
    load = (("train.py", 3, "main"), (str(torch.serialization.__file__), 900, "load"))
    own = (("train.py", 3, "save"),)
    states = [state(0, stack=save), state(1, stack=load), state(2, stack=own), state(3)]
    assert saving(states) == (0,)


def test_rank_that_is_gone_holds_the_others_up() -> None:
    (suspect,) = suspects([state(0), state(1, process_state=GONE)], [])
    assert (suspect.rank, suspect.certain) == (1, True)
    assert "killed" in suspect.reason


def test_killed_rank_is_lost_and_one_that_ended_is_not(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    for rank, pid in enumerate((os.getpid(), gone.pid, gone.pid)):
        paths = run.rank(rank)
        paths.root.mkdir(parents=True)
        report = {"rank": rank, "pid": pid, "host": socket.gethostname()}
        paths.report.write_text(json.dumps(report))
    run.rank(2).events.write_text('{"type": "record_end", "reason": "exit"}\n')
    assert [member.rank for member in members(run)] == [0]
    assert [member.rank for member in lost_members(run)] == [1]


def look(root: Path, spy: str | None, **known: object) -> SuspectDetails:
    suspect = Suspect(rank=1, reason="", doing="", certain=True)
    at = last_wall_ns(root)
    states = [state(0), state(1, **known)]
    (found,) = inspect_suspects([suspect], states, open_run(root), wall_ns=at, spy=spy)
    return found


def last_wall_ns(root: Path) -> int:
    latest = Analyzer(root).counters()["time_ns"].max()
    assert isinstance(latest, int)
    return latest


def test_gpu_of_a_suspect_and_its_errors_are_told(tmp_path: Path) -> None:
    root = write_story(tmp_path / "run", lambda rank, step: (0.2, 5.0, 10.0, 2.0), ranks=2, gpu=0.0)
    with (root / "nodes" / "node0" / "events.jsonl").open("a") as file:
        for gpu, code in ((0, 31), (1, 79)):
            file.write(json.dumps({"type": "xid", "gpu": gpu, "xid": code, "time_ns": 1}) + "\n")
    found = look(root, None)
    assert (found.gpu["utilization_ratio"], found.gpu["power_watts"]) == (0.0, 90.0)
    assert found.xids == (79,)
    assert found.native is None
    assert "--hang" in (found.note or "")


def test_native_stack_is_of_own_processes_here_that_run(tmp_path: Path) -> None:
    root = write_story(tmp_path / "run", lambda rank, step: (0.2, 5.0, 10.0, 2.0), ranks=2, gpu=0.5)
    frames = [
        {"name": "recv", "filename": "/lib/libc.so.6", "short_filename": "libc.so.6", "line": 0},
        {"name": "main", "filename": "/a/train.py", "short_filename": "train.py", "line": 7},
    ]
    spy = tmp_path / "spy"
    answer = json.dumps([{"thread_name": "MainThread", "frames": frames}])
    spy.write_text(f"#!/bin/sh\necho '{answer}'\n")
    spy.chmod(stat.S_IRWXU)
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    assert look(root, str(spy), **here).native == ("main (train.py:7)", "recv (libc.so.6)")
    assert look(root, str(spy), **here, process_state="T").note == "its process is stopped"
    assert look(root, str(spy), pid=1).note == "it does not run on this node"
    spy.write_text("#!/bin/sh\necho 'Permission Denied' >&2\nexit 1\n")
    assert look(root, str(spy), **here).note == "py-spy: Permission Denied"
