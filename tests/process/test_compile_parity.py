"""torch.compile sees the same program: as many graphs and breaks, no frame compiled again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import Job, rank_events, run_script, succeeded

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch
from torch import nn
import torch._dynamo
from torch._dynamo.utils import counters

torch.set_num_threads(1)
ROUNDS = 4
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

def compiled(what, **how):
    return torch.compile(what, backend=backend, **how)

def stepping(call, model):
    return eager_step(call, torch.optim.SGD(model.parameters(), lr=0.1))

def whole():
    return stepping(compiled(model := made()), model)

def in_place():
    (model := made()).compile(backend=backend)
    return stepping(model, model)

def full_graph():
    return stepping(compiled(model := made(), fullgraph=True), model)

def odd_calls():
    return stepping(compiled(model := made("OddCalls"), fullgraph=True), model)

def broken():
    return stepping(compiled(model := made("Broken")), model)

def blocks():
    model = made()
    for block in model.blocks:
        block.compile(backend=backend)
    return stepping(model, model)

def wrapped_blocks():
    model = made()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = compiled(block)
    return stepping(model, model)

def train_step():
    return compiled(stepping(model := made(), model))

def optimizer_step():
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = compiled(optimizer.step)
    return eager_step(model, optimizer)

def loss_function():
    model = made()
    return stepping(compiled(lambda x: model(x) + 1), model)

def no_grad():
    model = compiled(made().eval())
    def step(x):
        with torch.no_grad():
            return model(x)
    return step

def fallback():
    inner = stepping(model := made(), model)
    def step(x):
        for _ in range(2):
            torch._dynamo.graph_break()  # in a loop: this frame runs eagerly, those below compile
        return inner(x)
    return compiled(step)

def eager():
    return stepping(model := made(), model)

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
counters.clear()
graphs = 0
for step in steps.values():
    step(torch.randn(4, 8))
results["afterwards"] = summary()
json.dump(results, open(sys.argv[1], "w"))
"""


def run_scenarios(folder: Path, *, haiprof: bool) -> tuple[Job, dict[str, Any]]:
    result = folder / f"{haiprof}.json"
    job = succeeded(run_script(folder, SCRIPT, str(result), haiprof=haiprof))
    return job, json.loads(result.read_text())


def test_compile_is_the_same_under_haiprof(tmp_path: Path) -> None:
    _, bare = run_scenarios(tmp_path, haiprof=False)
    for name in ("whole", "in_place", "full_graph", "train_step", "no_grad", "blocks"):
        assert bare[name]["graphs"] >= 1, name
    assert bare["broken"]["breaks"] >= 1
    assert bare["eager"]["graphs"] == bare["afterwards"]["graphs"] == 0
    job, recorded = run_scenarios(tmp_path, haiprof=True)
    assert rank_events(job, "hook_error") == rank_events(job, "patch_failed") == []
    assert recorded.pop("hooked")
    assert not bare.pop("hooked")
    assert recorded.keys() == bare.keys()
    for name in bare:
        frames, usual = recorded[name].pop("frames"), bare[name].pop("frames")
        assert recorded[name] == bare[name], name
        for count in ("total", "ok"):  # a wrapper that Dynamo skips hides a frame: fewer is fine
            assert frames.get(count, 0) <= usual.get(count, 0), name
