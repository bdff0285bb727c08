"""haiprof's own frames in recorded stacks: the job's own remain, with all of their time."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof import TraceAnalysis
from tests.unit.analysis.trace.shared import Event, event, rank_file


@pytest.mark.parametrize("with_ids", [True, False])
def test_own_frames_and_threads_are_left_out(tmp_path: Path, with_ids: bool) -> None:
    """A wrapper between train() and step(), and a thread of haiprof's beside the job's own."""

    def call(number: int, parent: int, name: str, ts: int, dur: int, tid: int = 1) -> Event:
        ids = {"Python id": number, "Python parent id": parent} if with_ids else {}
        return event(name, "python_function", ts, dur, tid=tid, **ids)

    rank_file(tmp_path, 0, [
        call(1, 0, "train.py(3): train", 0, 100),
        call(2, 1, "haiprof/in_job/patches.py(303): __call__", 10, 60),
        call(3, 2, "haiprof/in_job/patches.py(40): original", 15, 50),
        call(4, 3, "torch/optim/sgd.py(9): step", 20, 40),
        call(5, 0, "threading.py(1002): _bootstrap", 0, 100, tid=2),
        call(6, 5, "haiprof/in_job/recorder.py(264): _loop", 0, 100, tid=2),
        call(7, 0, "threading.py(1002): _bootstrap", 0, 100, tid=3),
        call(8, 7, "loader.py(5): fill", 0, 90, tid=3),
    ])  # fmt: skip
    found = TraceAnalysis(tmp_path).python_stacks().sort("tid", "depth")
    rows = found.select("stack", "total_ns", "self_ns").rows()
    assert rows == [
        ("train.py(3): train", 100_000, 60_000),
        ("train.py(3): train;torch/optim/sgd.py(9): step", 40_000, 40_000),
        ("threading.py(1002): _bootstrap", 100_000, 10_000),
        ("threading.py(1002): _bootstrap;loader.py(5): fill", 90_000, 90_000),
    ]
