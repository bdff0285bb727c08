"""FLOPs of models that are traced here, against arithmetic by hand and torch's own counter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from haiprof import TraceAnalysis

pytestmark = pytest.mark.slow

JOB = """
import json, sys, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.after = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (y.view(4, 32, 4, 16).transpose(1, 2) for y in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(4, 32, 64))
        return x + self.mlp(self.after(x))

class Transformer(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.embed, self.head, self.again = nn.Embedding(500, 64), nn.Linear(64, 500), again
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.again else block(x)
        return self.head(x)

class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.two, self.three = nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.one(x)))
        x = torch.relu(self.three(torch.relu(self.two(x) + x)))
        return self.head(x.mean((2, 3)))

def ids():
    return torch.randint(500, (4, 32)), torch.randint(500, (4, 32))

MODELS = {
    "transformer": (lambda: Transformer(False), ids),
    "checkpointed": (lambda: Transformer(True), ids),
    "resnet": (ResNet, lambda: (torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))),
    "mlp": (lambda: nn.Sequential(nn.Linear(50, 70), nn.ReLU(), nn.Linear(70, 10)),
            lambda: (torch.randn(8, 50), torch.randint(10, (8,)))),
}

def trace(name):
    make, batch = MODELS[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        x, y = batch()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with FlopCounterMode(display=False) as counter:
        step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(f"{sys.argv[1]}/{name}.json"),
    ) as profiler:
        for _ in range(2):
            step()
            profiler.step()
    return counter.get_total_flops()

print(json.dumps({name: trace(name) for name in MODELS}))
"""

TOKENS, WIDTH, VOCABULARY = 4 * 32, 64, 500
LINEAR = 2 * TOKENS * (12 * WIDTH * WIDTH)  # a block's four matrices, forward
HEAD = 2 * TOKENS * WIDTH * VOCABULARY
SCORES = 2 * 4 * 4 * 32 * 32 * 16  # one of attention's two products
FORWARD = 2 * (LINEAR + 2 * SCORES) + HEAD
CONVOLUTIONS = [2 * 4 * 16 * 16 * 16 * 3 * 49, 2 * 4 * 16 * 16 * 16 * 16 * 9,
                2 * 4 * 8 * 8 * 32 * 16 * 9]  # fmt: skip
MODEL_FLOPS = {
    "transformer": 3 * FORWARD,
    "checkpointed": 3 * FORWARD,
    # The gradient of the first one's input is not needed.
    "resnet": 3 * sum(CONVOLUTIONS) - CONVOLUTIONS[0] + 3 * (2 * 4 * 32 * 10),
    "mlp": 3 * (2 * 8 * 70 * 10) + 2 * (2 * 8 * 50 * 70),
}
RECOMPUTED = {"transformer": 2 * SCORES, "checkpointed": 2 * SCORES + FORWARD - HEAD}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A folder with the trace of each model, and the FLOPs that torch's own counter saw."""
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, "-c", JOB, str(folder)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    return folder, json.loads(said.stdout)


@pytest.mark.parametrize("name", MODEL_FLOPS)
def test_flops_of_a_traced_model_are_the_analytic_ones(
    name: str, traced: tuple[Path, dict[str, int]]
) -> None:
    folder, counted = traced
    analysis = TraceAnalysis(folder / f"{name}.json")
    row = analysis.step_efficiency(peaks={"fp32": 1e12, "memory": 1e11}).row(0, named=True)
    assert row["model_flops"] == pytest.approx(MODEL_FLOPS[name], rel=0.01)
    assert row["recomputed_flops"] == pytest.approx(RECOMPUTED.get(name, 0), rel=0.01)
    assert row["mfu_ratio"] == pytest.approx(row["model_flops"] / 1e3 / row["wall_ns"])
    operators = analysis.efficiency()
    kinds = set(operators["kind"])
    assert {"gemm", "optimizer"} <= kinds
    # torch's counter does not know the attention of CPUs.
    matrix = operators.filter(pl.col("kind").is_in(["gemm", "convolution"]))["flops"].sum()
    assert matrix == pytest.approx(counted[name], rel=0.01)
