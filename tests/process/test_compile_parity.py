"""torch.compile sees the same program: as many graphs and breaks, no frame compiled again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Once
from tests.process.jobs import Job, rank_events, run_job, succeeded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compile parity")]

SCENARIOS = (
    "whole", "in_place", "full_graph", "odd_calls", "broken", "blocks", "wrapped_blocks",
    "train_step", "optimizer_step", "loss_function", "no_grad", "fallback", "eager", "afterwards",
)  # fmt: skip

SCRIPT = """
import json, sys, time
import torch
from torch import nn
import torch._dynamo
from torch._dynamo.utils import counters

torch.set_num_threads(1)
ROUNDS, WAIT = 4, sys.argv[2] == "wait"
graphs = 0

def backend(module, inputs):
    global graphs
    graphs += 1
    return module.forward

MODELS = '''
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return self.linear(x).relu()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(8, 1)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()

class OwnCall(Block):
    def __call__(self, *args, **kwargs):  # as checkpointing layers of transformers
        return super().__call__(*args, **kwargs)

class OddCalls(Model):
    def __init__(self):
        super().__init__()
        hooked, patched = Block(), Block()
        hooked.register_forward_hook(lambda module, inputs, output: output * 2)
        forward = patched.forward
        patched.forward = lambda x: forward(x) + 1
        self.blocks = nn.ModuleList([OwnCall(), hooked, patched])
    def forward(self, x):
        return self.last.__call__(self.blocks[2](self.blocks[1](self.blocks[0](x)))).mean()

class Broken(Model):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)
'''

def made(name="Model"):
    # classes of its own each time: compiled code is kept per code object
    names = {"torch": torch, "nn": nn, "__name__": "__main__"}
    exec(MODELS, names)
    return names[name]()

def eager_step(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss
    return step

def whole():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eager_step(torch.compile(model, backend=backend), optimizer)

def in_place():
    model = made()
    model.compile(backend=backend)
    return eager_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

def full_graph():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eager_step(torch.compile(model, backend=backend, fullgraph=True), optimizer)

def odd_calls():
    model = made("OddCalls")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eager_step(torch.compile(model, backend=backend, fullgraph=True), optimizer)

def broken():
    model = made("Broken")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eager_step(torch.compile(model, backend=backend), optimizer)

def blocks():
    model = made()
    for block in model.blocks:
        block.compile(backend=backend)
    return eager_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

def wrapped_blocks():
    model = made()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)
    return eager_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

def train_step():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.compile(eager_step(model, optimizer), backend=backend)

def optimizer_step():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend=backend)
    return eager_step(model, optimizer)

def loss_function():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return eager_step(torch.compile(lambda x: model(x) + 1, backend=backend), optimizer)

def no_grad():
    model = torch.compile(made().eval(), backend=backend)
    def step(x):
        with torch.no_grad():
            return model(x)
    return step

def fallback():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x):
        for _ in range(2):
            torch._dynamo.graph_break()  # in a loop: this frame runs eagerly, those below compile
        return eager_step(model, optimizer)(x)
    return torch.compile(step, backend=backend)

def eager():
    model = made()
    return eager_step(model, torch.optim.SGD(model.parameters(), lr=0.1))

def summary():
    return {
        "graphs": graphs,
        "stats": dict(counters["stats"]),
        "frames": dict(counters["frames"]),
        "breaks": sum(counters["graph_break"].values()),
        "break_reasons": sorted(reason.split("\\n")[0] for reason in counters["graph_break"]),
        "recompile_limit": dict(counters["recompile_limit"]),
    }

SCENARIOS = (whole, in_place, full_graph, odd_calls, broken, blocks, wrapped_blocks, train_step,
             optimizer_step, loss_function, no_grad, fallback, eager)
results, steps = {}, {}
for scenario in SCENARIOS:
    torch.manual_seed(0)
    counters.clear()
    graphs = 0
    step = scenario()
    values = [step(torch.randn(4, 8)).item() for _ in range(ROUNDS)]
    results[scenario.__name__] = {**summary(), "losses": values}
    steps[scenario.__name__] = step

def hooked():
    call = torch.autograd._engine_run_backward  # compiled, or a function
    return "haiprof" in type(call).__module__ + call.__code__.co_filename

results["hooked"] = hooked()
deadline = time.monotonic() + 90
while WAIT and hooked() and time.monotonic() < deadline:
    steps["eager"](torch.randn(4, 8))  # a recording ends with the end of a step
    time.sleep(0.1)
results["hooked_afterwards"] = hooked()
counters.clear()
graphs = 0
for step in steps.values():
    step(torch.randn(4, 8))
results["afterwards"] = summary()
json.dump(results, open(sys.argv[1], "w"))
"""


def run_scenarios(
    folder: Path, *, haiprof: bool, options: tuple[str, ...] = (), wait: bool = False
) -> tuple[Job, dict[str, Any]]:
    folder.mkdir()
    script, result = folder / "train.py", folder / "result.json"
    script.write_text(SCRIPT)
    command = ["python", str(script), str(result), "wait" if wait else "run"]
    options = ("--quiet", *options) if haiprof else ()
    job = succeeded(run_job(command, folder=folder / "job", haiprof=haiprof, options=options))
    return job, json.loads(result.read_text())


@pytest.fixture(scope="module")
def bare(once: Once) -> dict[str, Any]:
    found: tuple[Job, dict[str, Any]] = once(
        ("compile parity", "bare"), lambda folder: run_scenarios(folder, haiprof=False)
    )
    return found[1]


@pytest.fixture(scope="module")
def recorded(once: Once) -> dict[str, Any]:
    found: tuple[Job, dict[str, Any]] = once(
        ("compile parity", "recorded"), lambda folder: run_scenarios(folder, haiprof=True)
    )
    job, result = found
    assert rank_events(job, "hook_error") == []
    assert rank_events(job, "patch_failed") == []
    assert result["hooked"]
    return result


def without_frames(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "frames"}


def test_bare_program_compiles_as_expected(bare: dict[str, Any]) -> None:
    """The comparisons below would hold of a script that compiles nothing."""
    for name in ("whole", "in_place", "full_graph", "train_step", "no_grad"):
        assert bare[name]["graphs"] >= 1, name
    assert bare["broken"]["breaks"] >= 1
    assert bare["blocks"]["graphs"] >= 1
    assert bare["eager"]["graphs"] == 0
    assert bare["afterwards"]["graphs"] == 0


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_compile_is_the_same_under_haiprof(
    scenario: str, bare: dict[str, Any], recorded: dict[str, Any]
) -> None:
    assert without_frames(recorded[scenario]) == without_frames(bare[scenario])
    for count in ("total", "ok"):  # a wrapper that Dynamo skips hides a frame: fewer is fine
        assert recorded[scenario]["frames"].get(count, 0) <= bare[scenario]["frames"].get(count, 0)
