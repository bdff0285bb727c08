"""Calls of a job that trains already: the compiled wrappers and those in Python record the same."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from haiprof.in_job import spans
from tests.process.hook.conftest import Hook, small_model, train_step

STEP = ["forward", "backward", "optimizer"]


@pytest.fixture
def trained(hook: Hook) -> tuple[Hook, nn.Module, torch.optim.Optimizer]:
    """A hook that has seen a step: from here on a call is usual."""
    model, optimizer = small_model()
    train_step(model, optimizer)
    return hook, model, optimizer


def numbers(values: list[int]) -> Any:
    """As a data set: torch takes any sequence, its types do not."""
    return values


def fail(number: Any) -> Any:
    raise ZeroDivisionError(number)


def kinds_after_first_step(hook: Hook) -> list[str]:
    hook.finish()
    kinds = hook.kinds()
    assert kinds[:3] == STEP
    assert not any(line["type"] == "hook_error" for line in hook.events())
    return kinds[3:]


def test_replaced_functions_are_what_functions_are_to_others(trained: Any) -> None:
    """They may be referred to weakly, pickled and copied, alone and bound to a model."""
    hook, model, _ = trained
    call, backward = nn.Module.__call__, torch.autograd.graph._engine_run_backward
    is_plain = isinstance(hook.recorder.spans, spans.SpanBuffer)
    assert type(call).__name__ == ("function" if is_plain else "TimedCall")
    assert weakref.ref(call)() is call
    assert weakref.WeakMethod(model.__call__)() == model.__call__
    assert copy.deepcopy(call) is call
    assert pickle.loads(pickle.dumps(call)) is call
    assert pickle.loads(pickle.dumps(backward)) is backward
    assert backward.__code__.co_name == "_engine_run_backward"
    assert hook.installer.state.busy == 0
    ones = torch.ones(2, 3)
    assert torch.equal(pickle.loads(pickle.dumps(model.__call__))(ones), model(ones))


def test_exceptions_reach_the_job_and_end_their_spans(trained: Any) -> None:
    hook, model, optimizer = trained
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    with pytest.raises(ZeroDivisionError):
        next(iter(DataLoader(numbers([0]), batch_size=None, collate_fn=fail)))
    train_step(model, optimizer)
    failed = ["forward", "backward", "backward", "forward", "dataloader_iter", "dataloader"]
    assert kinds_after_first_step(hook) == [*failed, *STEP]


def test_module_is_told_by_its_mode_and_by_gradients(trained: Any) -> None:
    hook, model, _ = trained
    model(input=torch.ones(2, 3))
    nn.Module.__call__(model, torch.ones(2, 3))
    with torch.no_grad():
        model(torch.ones(2, 3))
        model.eval()(torch.ones(2, 3))
    model(torch.ones(2, 3))
    nn.MSELoss()(torch.ones(2), torch.ones(2))
    kinds = ["forward", "forward", "nograd_forward", "eval", "forward_eval_mode"]
    assert kinds_after_first_step(hook) == kinds


def test_spans_inside_a_forward_are_as_in_the_first_step(hook: Hook) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            weight = self.inner(x).sum()
            torch.autograd.grad(weight, [self.inner.weight])
            return self.inner(x)

    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, optimizer)
    hook.finish()
    assert hook.kinds() == ["backward", *STEP] * 3


def test_optimizer_and_thread_that_come_later_are_as_in_python(trained: Any) -> None:
    hook, model, optimizer = trained
    second = torch.optim.AdamW(model.parameters())
    train_step(model, second)
    train_step(model, optimizer)
    thread = threading.Thread(target=train_step, args=small_model())
    thread.start()
    thread.join()
    train_step(model, second)
    assert kinds_after_first_step(hook) == STEP * 3
    names = [line["name"] for line in hook.events() if line["type"] == "optimizer"]
    assert names == ["SGD", "AdamW"]
    assert hook.installer.state.optimizer_count == 4


def test_watch_that_begins_inside_a_call_is_met_by_its_end(hook: Hook) -> None:
    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            hook.installer.state.slow = True  # as another thread does for a trace window
            return super().forward(x)

    model = Watched(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, optimizer)
    hook.finish()
    assert hook.kinds() == STEP * 3
