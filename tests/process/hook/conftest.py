"""A hook installed in this process, and proof that none is left behind."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data.dataloader as loaders

from haiprof.in_job import recorder as recorder_module
from haiprof.in_job.installer import Installer
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.spans import SpanBuffer, make_spans
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import read_records
from haiprof.run_format.schema import KIND_NAMES, TAG_BITS, TAG_MASK


@dataclass
class Hook:
    """An installed hook and what it wrote."""

    run: RunPaths
    recorder: Recorder
    installer: Installer

    def finish(self) -> None:
        """As at exit: the files are complete afterwards."""
        self.recorder.finish()

    def kinds(self, attempt: int = 0) -> list[str]:
        """The spans' kinds in the order of their ends, without garbage collections."""
        return [name for name in self.all_kinds(attempt) if name != "gc"]

    def all_kinds(self, attempt: int = 0) -> list[str]:
        """The spans' kinds in the order of their ends."""
        data = memoryview(read_records(self.run.rank(0, attempt).phases).data).cast("q")
        return [KIND_NAMES[word & TAG_MASK] for word in data[::2]]

    def spans(self) -> list[tuple[int, int]]:
        data = memoryview(read_records(self.run.rank(0).phases).data).cast("q")
        return [(a >> TAG_BITS, b >> TAG_BITS) for a, b in zip(data[::2], data[1::2], strict=True)]

    def events(self) -> list[dict[str, Any]]:
        text = self.run.rank(0).events.read_text()
        return [json.loads(line) for line in text.splitlines()]


def _originals() -> tuple[Any, ...]:
    return (
        torch.nn.Module.__call__,
        vars(torch.autograd)["_engine_run_backward"],
        torch.autograd.graph._engine_run_backward,
        loaders._BaseDataLoaderIter.__next__,
        loaders.DataLoader.__iter__,
        torch.amp.grad_scaler.GradScaler.step,
        len(gc.callbacks),
    )


@pytest.fixture(params=["compiled", "plain"])
def make_hook(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    if request.param == "plain":
        monkeypatch.setattr(recorder_module, "make_spans", SpanBuffer)
    elif isinstance(make_spans(), SpanBuffer):
        pytest.skip("haiprof.in_job._spans is not built here")
    before = _originals()
    made: list[Hook] = []

    def make(time_s: float = 0.0, warmup_s: float = 0.0) -> Hook:
        (tmp_path / "ranks").mkdir(exist_ok=True)
        run = RunPaths(tmp_path)
        recorder = Recorder(run, time_s=time_s, warmup_s=warmup_s)
        installer = Installer(recorder)
        installer.install()
        made.append(Hook(run, recorder, installer))
        return made[-1]

    yield make
    for hook in made:
        hook.finish()
    assert _originals() == before, "a hook was left installed"


@pytest.fixture
def hook(make_hook: Any) -> Hook:
    return make_hook()  # type: ignore[no-any-return]


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One plain step; returns the loss."""
    optimizer.zero_grad()
    loss = model(torch.ones(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def small_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
