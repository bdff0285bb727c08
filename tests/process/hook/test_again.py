"""The hook goes into a process that trains already, again and again, and changes nothing in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.base.options import Options
from haiprof.launch.run_directories import create_run
from haiprof.run_format.layout import RunPaths
from tests.process.jobs import environment

SCRIPT = """
import hashlib, json, os, pickle, sys, threading, time
import torch
from torch.utils.data import DataLoader

runs, compiled = sys.argv[2:], sys.argv[1] == "compiled"
if compiled:
    from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(100)], torch.nn.Linear(8, 1))
call = torch.compile(model, backend="eager") if compiled else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
digest, count = hashlib.sha256(), 0

def step(batch):
    optimizer.zero_grad()
    loss = call(batch).square().mean()
    loss.backward()
    optimizer.step()
    global count
    count += 1
    if count <= 60:  # runs differ in length
        digest.update(loss.detach().numpy().tobytes())

def train():
    for batch in DataLoader(torch.randn(40, 8), batch_size=4):
        step(batch)
    torch.save({}, "weights.pt")

def put_in(run):
    from haiprof.in_job.activation import activate_into
    from haiprof.run_format.layout import RunPaths
    from pathlib import Path
    print("ANSWER", json.dumps(activate_into(RunPaths(Path(run)), owner=os.getuid())), flush=True)

train()
graphs = (dict(counters["stats"]), dict(counters["frames"])) if compiled else None
for run in runs:
    held = pickle.dumps(torch.save)
    thread = threading.Thread(target=put_in, args=(run,))
    thread.start()
    while thread.is_alive():
        train()
    if run == runs[0]:
        put_in(run)  # once more while it records
    import haiprof.in_job
    while not haiprof.in_job.activation._recorder.closed:
        train()
    train()
    assert pickle.loads(held) is torch.save
    assert torch.nn.Module.__call__.__module__ == "torch.nn.modules.module"
    assert not hasattr(torch.nn.Module.__call__, "__wrapped__")
if compiled:
    after = dict(counters["stats"]), dict(counters["frames"])
    print("GRAPHS", graphs == after, len(counters["graph_break"]), flush=True)
while count < 60:
    train()
print("DIGEST", digest.hexdigest(), flush=True)
print("HOOKS", len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks), flush=True)
"""


def run_dirs(folder: Path, count: int) -> list[RunPaths]:
    options = Options(time_s=2.0, log_dir=folder / "logs", recorder=("phases",))
    made = [
        create_run(options, command=["train.py"], name=f"attach-{i}", environ={})
        for i in range(count)
    ]
    return [run for run, _, _ in made]


def train(folder: Path, mode: str, runs: list[RunPaths]) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), mode, *(str(run.root) for run in runs)],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return {
        "answers": [json.loads(rest) for word, rest in lines if word == "ANSWER"],
        **{word: rest for word, rest in lines if word != "ANSWER"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled", marks=pytest.mark.proof)])
def test_hook_goes_in_twice_between_two_steps(tmp_path: Path, mode: str) -> None:
    runs = run_dirs(tmp_path, 2)
    said = train(tmp_path, mode, runs)
    done, busy = {"state": "done"}, {"state": "refused", "reason": "it is recorded already"}
    assert said["answers"] == [done, busy, done]
    assert said["DIGEST"] == train(tmp_path, mode, [])["DIGEST"]
    assert said["HOOKS"] == "1"
    if mode == "compiled":
        assert said["GRAPHS"] == "True 0"
    for run in runs:
        analyzer = Analyzer(run.root)
        steps = analyzer.steps()
        assert steps.height
        assert steps["dataloader_host_ns"].null_count() == 0
        names = {
            rank.names("root")[tag] for rank in analyzer.files.ranks for tag in rank.names("root")
        }
        assert names == {"OptimizedModule" if mode == "compiled" else "Sequential"}
        assert analyzer.ranks()["recording_ended"].to_list() == ["time"]
        assert "save" in analyzer.pauses()["phase"].to_list()
