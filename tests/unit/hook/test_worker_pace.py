"""At which pace workers of later epochs are sampled: by the age of the first ones."""

from __future__ import annotations

import time
from pathlib import Path

from haiprof.base.units import NS_PER_S
from haiprof.in_job.stack_sampler import PACE
from haiprof.in_job.worker_stacks import _age_s
from tests.unit.analysis.sampled import write_stacks

STACK = (("/job/data.py", 9, "load"),)


def test_workers_of_later_epochs_are_as_old_as_the_first_ones(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    assert _age_s(path) == 0.0
    began = time.perf_counter_ns() - 90 * NS_PER_S
    write_stacks(path, [(began, STACK)], worker=0)
    text = path.read_text()
    path.write_text(text.replace('"time_ns": 0', f'"time_ns": {began}'))
    assert 90.0 <= _age_s(path) < 3600.0


def test_where_the_first_ones_were_folded_it_is_the_lasting_pace(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    for text in (b"\0" * 5000, b"[]\n", b'{"time_ns": null}\n', b"{}\n"):
        path.write_bytes(text)
        assert _age_s(path) == PACE[-2][0]
