"""What the hook records of a loop in this process, and what it does when it breaks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from haiprof.in_job import activation, patches, spans
from haiprof.in_job.installer import Installer
from tests.process.hook.conftest import Hook, small_model, train_step
from tests.process.live import within


def raise_in_forward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5))
    train_step(model, optimizer)


def interrupt(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """In the middle of a span."""

    class Interrupting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupting()(torch.ones(1, 3))
    train_step(model, optimizer)


def raise_in_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure)
    train_step(model, optimizer)


def module_without_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.MSELoss()(model(torch.ones(2, 3)), torch.zeros(2, 1)).backward()
    optimizer.step()


def epochs(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=2)
    for _ in range(2):
        for _ in loader:
            train_step(model, optimizer)


STEP = ["forward", "backward", "optimizer"]
BATCHES = ["dataloader", *STEP] * 2


@pytest.mark.parametrize(
    ("loop", "kinds"),
    [
        (raise_in_forward, ["forward", *STEP]),
        (interrupt, ["forward", *STEP]),
        (raise_in_optimizer, STEP),
        (module_without_parameters, STEP),
        (epochs, ["dataloader_iter", *BATCHES, "dataloader_end"] * 2),
    ],
)
def test_spans_of_a_loop_are_recorded_in_order(hook: Hook, loop: Any, kinds: list[str]) -> None:
    loop(*small_model())
    hook.finish()
    assert hook.kinds() == kinds


def test_garbage_collections_and_saves_are_noted(hook: Hook, tmp_path: Any) -> None:
    model, optimizer = small_model()
    train_step(model, optimizer)
    garbage: list[Any] = [[] for _ in range(200_000)]
    gc.collect()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    del garbage
    hook.finish()
    kinds = hook.all_kinds()
    assert kinds[-1] == "save"
    assert "gc" in kinds


class Grouped(torch.nn.Sequential):
    """Whose own `parameters` means something else."""

    def parameters(self, recurse: bool = True) -> Any:
        return [{"params": list(super().parameters(recurse)), "lr": 0.1}]


@pytest.mark.parametrize("root", [torch.nn.Sequential, Grouped])
def test_roots_and_optimizers_are_named(hook: Hook, root: type[torch.nn.Sequential]) -> None:
    model = root(*small_model()[0].children())
    train_step(model, torch.optim.SGD(torch.nn.Module.parameters(model), lr=0.1))
    hook.finish()
    assert hook.kinds() == STEP
    lines = {line["type"]: line for line in hook.events()}
    assert lines["root"]["name"] == root.__name__
    assert (lines["root"]["parameter_count"], lines["root"]["module_count"]) == (41, 4)
    assert lines["optimizer"]["name"] == "SGD"
    assert lines["record_end"]["reason"] == "exit"


def test_time_from_the_first_training_step_ends_on_a_whole_one_and_takes_the_hooks_out(
    make_hook: Any,
) -> None:
    untouched = torch.nn.Module.__call__
    hook = make_hook(time_s=0.3)
    model, optimizer = small_model()
    model.eval()
    with torch.no_grad():
        for _ in range(8):
            model(torch.ones(2, 3))
            time.sleep(0.05)
    model.train()
    end = time.monotonic() + 30
    while not hook.recorder.closed:
        train_step(model, optimizer)
        assert time.monotonic() < end, "the recording did not end"
    assert torch.nn.Module.__call__ is untouched
    train_step(model, optimizer)
    hook.finish()
    kinds, spans = hook.kinds(), hook.spans()
    assert (kinds.count("eval"), kinds[-1]) == (8, "optimizer")
    assert 0.3e9 <= spans[-1][1] - spans[kinds.index("forward")][0] < 5e9
    assert [e["reason"] for e in hook.events() if e["type"] == "record_end"] == ["time"]


def test_warmup_is_left_out_and_counted(make_hook: Any) -> None:
    hook = make_hook(warmup_s=0.3)
    model, optimizer = small_model()
    begin = time.perf_counter_ns()
    steps = 0
    while time.perf_counter_ns() - begin < 0.8e9:
        train_step(model, optimizer)
        steps += 1
        time.sleep(0.01)
    hook.finish()
    start = next(e for e in hook.events() if e["type"] == "record_start")
    kinds = hook.kinds()
    assert kinds[0] == "forward"
    assert start["time_ns"] - begin >= 0.3e9
    assert start["optimizer_steps_before"] + kinds.count("optimizer") == steps


def wait_for_report(hook: Hook) -> None:
    """The thread has reported in: the rank's files are there."""
    within(60, hook.run.rank(0).report.exists)
    time.sleep(0.1)


class _BrokenError(Exception):
    pass


@pytest.mark.parametrize("make_hook", ["plain"], indirect=True)
@pytest.mark.parametrize("after", range(1, 9))
def test_broken_clock_switches_the_hook_off_and_changes_nothing(
    make_hook: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    expected = [train_step(*pair) for pair in [small_model()] for _ in range(4)]
    untouched = torch.nn.Module.__call__
    hook = make_hook()
    model, optimizer = small_model()
    losses = [train_step(model, optimizer)]
    wait_for_report(hook)
    calls = 0

    def broken() -> int:
        nonlocal calls
        calls += 1
        if calls >= after:
            raise _BrokenError("no clock today")
        return time.perf_counter_ns()

    monkeypatch.setattr(spans, "_now", broken)
    losses += [train_step(model, optimizer) for _ in range(3)]
    assert losses == expected
    assert hook.recorder.closed
    assert torch.nn.Module.__call__ is untouched
    hook.finish()
    faults = [e for e in hook.events() if e["type"] == "hook_error"]
    assert [f["reason"] for f in faults] == ["_BrokenError: no clock today"]


def test_patch_that_cannot_be_installed_leaves_the_others(
    make_hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    hook = make_hook()
    monkeypatch.undo()
    model, optimizer = small_model()
    train_step(model, optimizer)
    hook.finish()
    assert hook.kinds() == ["forward", "optimizer"]
    failed = [e for e in hook.events() if e["type"] == "patch_failed"]
    assert [f["phase"] for f in failed] == ["backward"]


def test_wrapper_that_somebody_wrapped_again_stays_inert(make_hook: Any) -> None:
    before = torch.nn.Module.__call__
    hook = make_hook()
    ours = torch.nn.Module.__call__

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    torch.nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        model, optimizer = small_model()
        train_step(model, optimizer)
        hook.finish()
        count = len(hook.kinds())
        train_step(model, optimizer)
        assert torch.nn.Module.__call__ is theirs
        assert len(hook.recorder.spans) == 0
        assert count == 3
    finally:
        torch.nn.Module.__call__ = before  # type: ignore[method-assign]


def test_run_directory_that_is_gone_switches_the_hook_off(make_hook: Any, tmp_path: Any) -> None:
    hook = make_hook()
    (tmp_path / "ranks").rmdir()
    tmp_path.rename(tmp_path.with_name("gone"))
    model, optimizer = small_model()
    train_step(model, optimizer)
    end = time.monotonic() + 30
    while not hook.recorder.closed and time.monotonic() < end:
        train_step(model, optimizer)
    assert hook.recorder.closed


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_writes_nothing_of_its_parent(hook: Hook) -> None:
    model, optimizer = small_model()
    train_step(model, optimizer)
    wait_for_report(hook)
    pid = os.fork()
    if pid == 0:
        model(torch.ones(2, 3))
        hook.recorder.finish()
        os._exit(0)
    os.waitpid(pid, 0)
    train_step(model, optimizer)
    hook.finish()
    assert hook.kinds() == ["forward", "backward", "optimizer"] * 2
    assert [rank for rank, _, _ in hook.run.rank_folders()] == [0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_that_trains_is_a_process_of_its_own(hook: Hook) -> None:
    model, optimizer = small_model()
    train_step(model, optimizer)
    wait_for_report(hook)
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        for _ in range(2):
            optimizer.step()
        hook.recorder.finish()
        os._exit(0)
    os.waitpid(pid, 0)
    hook.finish()
    assert hook.kinds() == ["forward", "backward", "optimizer"]
    assert hook.kinds(attempt=1) == ["optimizer"] * 2


class _TimeoutOfTheJobError(Exception):
    pass


def test_exception_of_the_jobs_signal_handler_reaches_the_job(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that raises may run while one of our lines does."""

    def handler(number: int, frame: object) -> None:
        raise _TimeoutOfTheJobError

    def interrupted() -> int:
        if threading.current_thread() is threading.main_thread():  # where handlers run
            handler(signal.SIGALRM, None)
        return threading.get_ident()

    before = signal.signal(signal.SIGALRM, handler)
    model, optimizer = small_model()
    train_step(model, optimizer)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(patches, "_ident", interrupted)
            with pytest.raises(_TimeoutOfTheJobError):
                model(torch.ones(2, 3))
        train_step(model, optimizer)
    finally:
        signal.signal(signal.SIGALRM, before)
    hook.finish()
    assert hook.kinds() == ["forward", "backward", "optimizer"] * 2


def test_rank_reports_in_once_all_wrappers_are_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that trains already makes steps while they are put in, and may be asked at once."""
    model, optimizer = small_model()
    last_part = Installer._step

    def install_slowly(installer: Installer) -> None:
        train_step(model, optimizer)
        time.sleep(0.3)
        last_part(installer)

    monkeypatch.setattr(Installer, "_step", install_slowly)
    (tmp_path / "ranks").mkdir()
    config = {"run_dir": str(tmp_path), "time": 0, "warmup": 0, "recorder": ["phases"]}
    activation._record(config, late=False)
    recorder = activation._recorder
    assert recorder is not None
    recorder.finish()
    assert recorder.commands is not None
    assert {"trace", "activate"} <= set(recorder.commands.handlers)
