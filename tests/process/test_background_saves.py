"""Real jobs that save beside their training: what is recorded of it, and what the verdict says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from haiprof.diagnosis.engine import diagnose
from tests.conftest import Once
from tests.process.jobs import Job, run_job

pytestmark = pytest.mark.slow

JOB = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed.checkpoint as dcp
folder, how = sys.argv[1:]
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), lr=.01)
names = {f"sample {n}": [n, str(n)] for n in range(150_000)}  # pickled under the lock
pool, writer = ThreadPoolExecutor(1), None

def save(number):
    state = {"model": {name: value.clone() for name, value in model.state_dict().items()}}
    if how == "async":
        return dcp.async_save(state, checkpoint_id=f"{folder}/{number}", no_dist=True)  # LINE async
    state["names"] = names
    if how == "pool":
        return pool.submit(torch.save, state, f"{folder}/{number}.pt")  # LINE pool
    thread = threading.Thread(target=torch.save, args=(state, f"{folder}/{number}.pt"))
    thread.start()  # LINE thread
    return thread

for number in range(600):
    if number % (75 if how == "thread" else 150) == 60:
        if writer is not None:
            (writer.join if how == "thread" else writer.result)()
        writer = save(number)
    model(torch.ones(64, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
(writer.join if how == "thread" else writer.result)()
"""


Record = Callable[[str], Job]


@pytest.fixture
def record(once: Once) -> Record:
    def run(how: str) -> Job:
        def make(folder: Path) -> Job:
            (folder / "saved").mkdir(parents=True)
            (folder / "job.py").write_text(JOB)
            words = ("python", str(folder / "job.py"), str(folder / "saved"), how)
            return run_job(words, folder=folder / "run", haiprof=True, options=("--quiet",))

        job: Job = once(("background saves", how), make)
        return job

    return run


def saves_of(job: Job) -> list[dict[str, Any]]:
    text = job.analyzer().run.rank(0).events.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if line["type"] == "checkpoint"]


def line_of(how: str) -> int:
    return next(n for n, text in enumerate(JOB.splitlines(), 1) if text.endswith(f"# LINE {how}"))


@pytest.mark.parametrize("how", ["thread", "async", pytest.param("pool", marks=pytest.mark.proof)])
def test_a_save_beside_the_training_leaves_a_line_when_it_is_written(
    record: Record, how: str
) -> None:
    found = saves_of(record(how))
    for save, number in zip(found, range(60, 600, 75 if how == "thread" else 150), strict=True):
        assert save["start_ns"] <= save["beside_ns"] < save["end_ns"]
        assert Path(save["file"]).stem == str(number)
        assert save["written_ns"] is not None
    where = [(save["begun_line"], save["begun_function"]) for save in found]
    if how == "pool":  # its thread is there before: who asked is not seen but for the first time
        assert where[-1] == (None, None)
    else:
        assert where == [(line_of(how), "save")] * len(found)


def test_the_verdict_names_what_such_saves_cost(record: Record) -> None:
    """Of eight saves; of four the interval holds zero where others use the cores."""
    verdict = diagnose(record("thread").analyzer())
    (account,) = (a for a in verdict.ledger.accounts if a.explanation == "background_save")  # type: ignore[union-attr]
    assert (account.line, account.function) == (line_of("thread"), "save")
    assert account.gain_low_ns > 0
    (found,) = (f for f in verdict.findings if f.rule == "background_save")
    assert "while a save is written beside them" in found.title
