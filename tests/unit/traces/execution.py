"""Execution traces for tests: recorded by torch 2.13 on the spot, or written by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROFILED = """
import os, sys, time, torch, torch.nn as nn, torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule
distributed = "RANK" in os.environ
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
if distributed:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for folder in sys.argv[1:]:
    observer = ExecutionTraceObserver().register_callback(f"{folder}/rank{rank}.et.json")
    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan,
                 execution_trace_observer=observer) as profiler:
        for _ in range(4):
            loss = model(torch.randn(4, 64)).pow(2).sum()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            if distributed:
                numbers = torch.ones(5)
                dist.send(numbers, 1, tag=7) if rank == 0 else dist.recv(numbers, 0, tag=7)
                dist.barrier()
                dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
                dist.broadcast(torch.ones(7), 0)
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.pt.trace.json")
if distributed:
    dist.barrier()
    time.sleep(0.2)  # tests/process/loops.py says why
    dist.destroy_process_group()
"""
_RANKS = Path(__file__).parents[2] / "process" / "ranks.py"


def record(folder: Path, *more: Path, ranks: int = 1) -> Path:
    """A small model trained for two profiled steps, each rank's timeline and execution trace.

    The same process records it again into each of the other folders.
    """
    for each in (folder, *more):
        each.mkdir(parents=True, exist_ok=True)
    script = folder / "train.py"
    script.write_text(PROFILED)
    command = [str(script), str(folder), *map(str, more)]
    if ranks > 1:
        command = [str(_RANKS), str(ranks), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, timeout=240, env=environment
    )
    return folder


def record_pair(folder: Path) -> Path:
    """Two ranks; again where torch's observer lost its place.

    Under load it now and then notes an operator that has ended as the parent of all that follows.
    """
    for attempt in range(6):
        tries = [folder / f"{attempt}-{number}" for number in range(4)]
        record(*tries, ranks=2)
        whole = [found for found in tries if _is_whole(found)]
        if whole:
            return whole[0]
    return tries[0]


def _is_whole(folder: Path) -> bool:
    return all(_has_own_parents(folder / f"rank{rank}.et.json") for rank in (0, 1))


def _has_own_parents(path: Path) -> bool:
    nodes = {each["id"]: each for each in json.loads(path.read_text())["nodes"]}
    talks = [each for each in nodes.values() if each["name"] in ("gloo:send", "gloo:recv")]
    return all(nodes[each["ctrl_deps"]]["name"].startswith("c10d::") for each in talks)


Node = dict[str, Any]


def node(number: object, name: str = "aten::add", parent: object = 1, **attrs: Any) -> Node:
    """A node of today's schema; `rf_id` and `tid` unless given are its number and 1."""
    values = {"rf_id": number, "tid": 1, "seq_id": -1, "scope": 0, **attrs}
    empty: dict[str, Any] = {"values": [], "shapes": [], "types": [], "strides": []}
    said = [{"name": key, "type": "uint64", "value": value} for key, value in values.items()]
    return {"id": number, "name": name, "ctrl_deps": parent, "inputs": empty, "outputs": empty,
            "attrs": said}  # fmt: skip


def write_execution(path: Path, nodes: list[Any], **around: Any) -> Path:
    """An execution trace of these nodes."""
    head = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "", "start_ts": 0, "finish_ts": 1}
    path.write_text(json.dumps({**head, **around, "nodes": nodes}))
    return path
