"""Trace windows in one process: which steps they hold, and who has to give way."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler as autograd_profiler
from torch.utils.data import DataLoader, TensorDataset

from haiprof.in_job.installer import Installer
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.windows import driver
from haiprof.in_job.windows.driver import Tracer, attach
from haiprof.in_job.windows.profiler_session import other_tool
from haiprof.in_job.windows.requested_windows import Recording
from haiprof.in_job.windows.slow_steps import SETTLED_STEPS
from haiprof.in_job.windows.step_plan import Agreement, RollingSchedule
from haiprof.run_format.layout import RunPaths
from tests.process.hook.conftest import Hook, small_model, train_step


class Traced:
    """A hook with a window planned, and what came of it."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        (folder / "ranks").mkdir(exist_ok=True)
        self.run = RunPaths(folder)
        self.recorder = Recorder(self.run, time_s=0.0, warmup_s=0.0)
        installer = Installer(self.recorder)
        installer.install()
        self.tracer: Tracer = attach(config, recorder=self.recorder, state=installer.state)

    def lines(self, kind: str = "trace_window") -> list[dict[str, Any]]:
        self.recorder.finish()
        text = self.run.rank(0).events.read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line["type"] == kind]

    def traces(self) -> list[dict[str, Any]]:
        paths = sorted(self.run.trace_parts.glob("rank*.trace.json"))
        return [json.loads(path.read_text()) for path in paths]

    def sidecars(self) -> list[dict[str, Any]]:
        paths = sorted(self.run.trace_parts.glob("*.part.json"))
        return [json.loads(path.read_text()) for path in paths]


def marks(trace: dict[str, Any]) -> list[int]:
    events = [e for e in trace["traceEvents"] if e.get("name", "").startswith("ProfilerStep#")]
    return [int(e["name"].partition("#")[2]) for e in sorted(events, key=lambda e: e["ts"])]


def count(trace: dict[str, Any], name: str) -> int:
    return sum(e.get("name", "").startswith(name) for e in trace["traceEvents"])


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Callable[..., Traced]]:
    methods = {k: vars(autograd_profiler.profile)[k] for k in ("_prepare_trace", "__exit__")}
    made: list[Traced] = []

    def make(**config: Any) -> Traced:
        made.append(Traced(tmp_path, config))
        return made[-1]

    yield make
    for one in made:
        one.recorder.finish()
    assert {k: vars(autograd_profiler.profile)[k] for k in methods} == methods
    assert not torch._C._autograd._profiler_enabled()


def train(count: int, *, model_and_optimizer: Any = None) -> None:
    model, optimizer = model_and_optimizer or small_model()
    for _ in range(count):
        train_step(model, optimizer)


def loader(count: int) -> Any:
    return DataLoader(TensorDataset(torch.ones(count * 4, 3)), batch_size=4)


def train_epoch(batches: Any, model: Any, optimizer: Any, *, accumulate: int = 1) -> None:
    for number, (x,) in enumerate(batches, start=1):
        model(x).square().mean().backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_window_holds_the_steps_asked_for(traced: Callable[..., Traced]) -> None:
    one = traced(steps=[4, 7])
    model, optimizer = small_model()
    for _ in range(3):
        train_epoch(loader(4), model, optimizer)
    [line] = one.lines()
    [trace], [sidecar] = one.traces(), one.sidecars()
    assert (line["state"], line["steps"], line["reason"]) == ("recorded", [4, 7], None)
    assert marks(trace) == [4, 5, 6]
    assert count(trace, "Optimizer.step") == 3
    assert trace["haiprof"]["steps"] == sidecar["steps"] == [4, 7]
    assert trace["distributedInfo"] == {"rank": 0, "world_size": 1, "backend": None}
    assert sidecar["stem"] == line["stem"]
    assert sidecar["start_wall_ns"] == int(line["stem"].rpartition(".")[2])
    assert line["stall_ns"] >= sidecar["stop_ns"] + sidecar["export_ns"] > 0
    assert not list(one.run.trace_parts.glob(".*")), "a draft is left"


def epoch(batches: int, **how: int) -> Callable[[], None]:
    return lambda: train_epoch(loader(batches), *small_model(), **how)


def end_with_the_window() -> None:
    train_epoch(itertools.islice(loader(50), 6), *small_model())


@pytest.mark.parametrize(
    ("config", "loop", "windows"),
    [
        *(({"steps": [first, first + 2]}, epoch(8), [[first, first + 2]]) for first in range(4)),
        ({"steps": [4, 6], "repeat": 3, "repeat_every": 5}, epoch(30), [[4, 6], [9, 11], [14, 16]]),
        ({"steps": None, "count": 2, "warmup_s": 0.0, "time_s": 0.0}, epoch(20), [[10, 12]]),
        ({"steps": [5, 7]}, lambda: train(10), [[5, 7]]),
        ({"steps": [2, 4]}, epoch(18, accumulate=3), [[2, 4]]),
        ({"steps": [4, 6]}, end_with_the_window, [[4, 6]]),
    ],
    ids=["from 0", "from 1", "from 2", "from 3", "one after another", "after ten steps",
         "without a loader", "accumulated", "the job ends with it"],
)  # fmt: skip
def test_each_window_holds_its_steps(
    config: dict[str, Any],
    loop: Callable[[], None],
    windows: list[list[int]],
    traced: Callable[..., Traced],
) -> None:
    one = traced(**config)
    loop()
    assert [(line["state"], line["steps"]) for line in one.lines()] == [
        ("recorded", window) for window in windows
    ]
    for trace, window in zip(one.traces(), windows, strict=True):
        assert marks(trace)[:2] == list(range(*window))
        assert count(trace, "Optimizer.step") == 2


def test_seconds_are_moved_to_whole_steps(traced: Callable[..., Traced]) -> None:
    one = traced(steps=None, count=5, warmup_s=0.01, time_s=0.05)
    train_epoch(loader(2000), *small_model())
    [line] = one.lines()
    first, after = line["steps"]
    assert line["state"] == "recorded"
    assert marks(one.traces()[0]) == list(range(first, after))
    assert count(one.traces()[0], "Optimizer.step") == after - first


def test_size_guard_ends_the_window_early(traced: Callable[..., Traced]) -> None:
    sized = traced(steps=[4, 6])
    train_epoch(loader(10), *small_model())
    size = sized.lines()[0]["raw_bytes"]
    shutil.rmtree(sized.run.root / "ranks")
    one = traced(steps=[4, 30], limit_bytes=size * 2)
    train_epoch(loader(40), *small_model())
    line = one.lines()[0]
    assert line["state"] == "cut"
    assert "--trace-limit" in line["reason"]
    assert 4 < line["steps"][1] < 12


@pytest.mark.parametrize(
    ("config", "fits", "variable", "reason"),
    [
        ({"steps": [50, 55]}, True, "", "before the window"),
        ({"limit_bytes": 1000}, True, "", "one step takes"),
        ({}, False, "", "disk"),
        *(({}, True, name, other_tool({name: "1"})) for name in
          ("KINETO_USE_DAEMON", "CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")),
    ],
    ids=["it never came", "a step is too large", "full disk", "Kineto", "CUPTI", "Nsight Systems"],
)  # fmt: skip
def test_window_that_cannot_be_is_refused_with_the_reason(
    config: dict[str, Any], fits: bool, variable: str, reason: str,
    traced: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not fits:
        full: Any = lambda folder, needed: False  # noqa: E731
        monkeypatch.setattr("haiprof.in_job.windows.requested_windows.fits", full)
    if variable:
        monkeypatch.setenv(variable, "1")
    one = traced(**{"steps": [4, 6], **config})
    train_epoch(loader(10), *small_model())
    [line] = one.lines()
    assert line["state"] == "refused"
    assert reason in line["reason"]
    assert not one.traces()


def test_failed_write_ends_the_windows_and_nothing_else(
    traced: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("haiprof.in_job.windows.requested_windows.WindowFiles.finish", full)
    one = traced(steps=[4, 6], repeat=3)
    train_epoch(loader(20), *small_model())
    [line] = one.lines()
    assert line["state"] == "failed"
    assert "No space left" in line["reason"]
    assert not one.lines("hook_error")
    assert not list(one.run.trace_parts.iterdir())


def user_ops(profiler: Any) -> int:
    return sum(event.name == "aten::addmm" for event in profiler.events())


def test_user_profiler_inside_our_window_wins_and_both_are_whole(
    traced: Callable[..., Traced],
) -> None:
    one = traced(steps=[3, 20])
    pair = small_model()
    train(6, model_and_optimizer=pair)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        train(3, model_and_optimizer=pair)
    assert user_ops(theirs) == 6
    [line] = one.lines()
    assert line["state"] == "cut"
    assert line["reason"] == "the job started a profiler of its own"
    assert line["steps"] == [3, 6]
    assert count(one.traces()[0], "Optimizer.step") == 3


def test_user_profiler_around_our_window_refuses_it(traced: Callable[..., Traced]) -> None:
    one = traced(steps=[3, 5])
    pair = small_model()
    train(2, model_and_optimizer=pair)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        train(5, model_and_optimizer=pair)
    assert user_ops(theirs) == 10
    [line] = one.lines()
    assert line["state"] == "refused"
    assert "own profiler" in line["reason"]


def test_user_schedule_in_warm_up_is_left_alone(traced: Callable[..., Traced]) -> None:
    one = traced(steps=[3, 5])
    pair = small_model()
    seen: list[int] = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=4, active=2, repeat=1),
        on_trace_ready=lambda profiler: seen.append(user_ops(profiler)),
    ) as theirs:
        for _ in range(10):
            train(1, model_and_optimizer=pair)
            theirs.step()
    assert seen == [4]
    assert one.lines()[0]["state"] == "refused"


def test_user_profiler_after_ours_changes_nothing(traced: Callable[..., Traced]) -> None:
    one = traced(steps=[3, 5])
    pair = small_model()
    train(7, model_and_optimizer=pair)
    with autograd_profiler.profile() as theirs:
        train(2, model_and_optimizer=pair)
    assert sum(event.name == "aten::addmm" for event in theirs.function_events) == 4
    assert one.lines()[0]["state"] == "recorded"


def test_what_kineto_says_of_the_jobs_own_profiler_is_said_after_a_window_too(
    traced: Callable[..., Traced], capfd: pytest.CaptureFixture[str]
) -> None:
    def own() -> str:
        capfd.readouterr()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.ones(3).add(1)
        return re.sub(r"[\d:-]+", "", capfd.readouterr().err)

    before = own()
    one = traced(steps=[3, 5])
    train(7)
    os.write(2, b"the job's\n")
    assert capfd.readouterr().err == "the job's\n"
    assert one.lines()[0]["state"] == "recorded"
    assert own() == before


def test_profiler_entered_before_haiprof_looked_is_found(traced: Callable[..., Traced]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        one = traced(steps=[3, 5])
        one.tracer._guard.uninstall()
        one.tracer._guard.install(late=True)
        train(6)
    assert user_ops(theirs) == 12
    assert one.lines()[0]["state"] == "refused"


def test_job_keeps_its_own_sys_profiler(traced: Callable[..., Traced]) -> None:
    one = traced(steps=[3, 5], stacks=True)

    def own(frame: Any, event: str, argument: Any) -> None:
        return None

    sys.setprofile(own)
    try:
        train(7)
        kept = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert kept is own
    [line] = one.lines()
    assert line["state"] == "recorded"
    assert "sys.setprofile" in line["remark"]
    assert one.sidecars()[0]["options"]["stacks"] is False


def test_calibration_beside_a_window_with_modules_harms_nothing(
    traced: Callable[..., Traced],
) -> None:
    one = traced(steps=[50, 55])
    began = threading.Event()
    prices: list[tuple[float, float]] = []

    def drain() -> None:
        began.wait()
        prices.append(one.recorder.installed.calibrate())

    other = threading.Thread(target=drain)
    other.start()
    with torch.profiler.profile(with_stack=True, with_modules=True):  # sees all threads' calls
        began.set()
        other.join()
    assert len(prices) == 1


@pytest.mark.parametrize("on_training_thread", [False, True])
def test_fault_of_ours_inside_a_window_stops_the_profiler(
    on_training_thread: bool, traced: Callable[..., Traced]
) -> None:
    one = traced(steps=[3, 500])
    pair = small_model()
    train(6, model_and_optimizer=pair)
    assert torch._C._autograd._profiler_enabled()
    fault = functools.partial(one.recorder.fault, "drain", OSError("no room"))
    if on_training_thread:
        fault()
    else:
        thread = threading.Thread(target=fault)
        thread.start()
        thread.join()
        train(1, model_and_optimizer=pair)
    assert not torch._C._autograd._profiler_enabled()
    assert not one.tracer.active
    assert marks(one.traces()[0])[:3] == [3, 4, 5]
    call = torch.nn.Module.__call__
    assert "haiprof" not in type(call).__module__ + call.__code__.co_filename


def test_execution_trace_is_whole_and_quiet(
    traced: Callable[..., Traced], capfd: pytest.CaptureFixture[str]
) -> None:
    one = traced(steps=[3, 5], execution_trace=True)
    train(7)
    assert one.lines()[0]["state"] == "recorded"
    [path] = one.run.trace_parts.glob("rank*.et.json")
    nodes = json.loads(path.read_text())["nodes"]
    ids = {a["value"] for n in nodes for a in n["attrs"] if a["name"] == "rf_id"}
    external = {
        e["args"].get("Record function id") for e in one.traces()[0]["traceEvents"] if "args" in e
    }
    assert len(ids & external) > 10
    assert one.sidecars()[0]["et_bytes"] == path.stat().st_size
    captured = capfd.readouterr()
    assert "Execution Trace Observer" not in captured.err
    assert "profiler_st" not in captured.err


def test_ranges_of_the_job_around_its_steps_leave_no_warning(
    traced: Callable[..., Traced], capfd: pytest.CaptureFixture[str]
) -> None:
    one = traced(steps=[5, 8])
    pairs = small_model(), small_model()
    for _ in range(12):
        with torch.profiler.record_function("step"):
            for pair in pairs:
                train(1, model_and_optimizer=pair)
    assert one.lines()[0]["state"] == "recorded"
    assert capfd.readouterr().err == ""


def test_forked_child_is_not_traced(traced: Callable[..., Traced]) -> None:
    one = traced(steps=[2, 8], execution_trace=True)
    pair = small_model()
    train(5, model_and_optimizer=pair)
    child = os.fork()
    if child == 0:
        train(2, model_and_optimizer=pair)
        noted = [line for line in one.recorder.lines if line["type"] == "trace_window"]
        os._exit(1 if noted or one.tracer.active else 0)
    _, status = os.waitpid(child, 0)
    train(5, model_and_optimizer=pair)
    assert status == 0
    assert [line["state"] for line in one.lines()] == ["recorded"]
    assert count(one.traces()[0], "Optimizer.step") == 6
    [path] = one.run.trace_parts.glob("rank*.et.json")
    json.loads(path.read_text())


def test_slow_step_is_kept(traced: Callable[..., Traced]) -> None:
    one = traced(keep_slow=True, count=4, slow_ratio=1.5, repeat=1, steps=None)
    model, optimizer = small_model()
    for (x,) in loader(3000):
        time.sleep(0.001)
        model(x).square().mean().backward()
        windows: Any = one.tracer._windows
        recording = windows._recording
        if windows._step_bytes and recording is not None and recording.marked is not None:
            time.sleep(0.3)  # far above what a busy machine does to a step
        optimizer.step()
        optimizer.zero_grad()
        if not one.tracer.active:
            break
    [line], [summary] = one.lines(), one.lines("keep_slow")
    assert (line["state"], line["reason"]) == ("recorded", "slow")
    assert line["slow_step"] in marks(one.traces()[0])
    assert line["steps"][0] <= line["slow_step"] < line["steps"][1]
    assert summary["slow_kept"] == 1
    assert 0 < summary["watched_ratio"] < 0.5
    assert one.sidecars()[0]["reason"] == "slow"


def test_first_step_of_a_rolling_window_is_judged_without_what_starting_takes(
    traced: Callable[..., Traced], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Recording.start

    def slowly(self: Recording) -> None:
        start(self)
        time.sleep(0.3)

    monkeypatch.setattr(Recording, "start", slowly)
    one = traced(keep_slow=True, count=3, slow_ratio=30.0, repeat=1, steps=None, slow_cost=1.0)
    model, optimizer = small_model()
    for (x,) in loader(60):
        time.sleep(0.006)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    summary = one.lines("keep_slow")[-1]
    assert summary["watched"] > 10
    assert summary["slow_kept"] == 0


def test_windows_follow_each_other_without_a_gap_where_their_cost_is_allowed(
    traced: Callable[..., Traced],
) -> None:
    one = traced(keep_slow=True, count=4, slow_ratio=1000.0, repeat=1, steps=None, slow_cost=1e9)
    train_epoch(loader(200), *small_model())
    summary = one.lines("keep_slow")[-1]
    assert summary["watched"] > 0.8 * (summary["steps"] - SETTLED_STEPS)
    assert summary["slow_kept"] == 0
    assert one.lines() == one.traces() == []


def test_ranks_keep_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    first, second = RollingSchedule(Agreement(tmp_path)), RollingSchedule(Agreement(tmp_path))

    def next_of(rolls: RollingSchedule, number: int, pace: tuple[int, int]) -> int:
        return rolls.next_first(number, pace=lambda: pace, usual_ns=10**8)

    for _ in range(12):
        ours = next_of(first, 100, (5, 20))
        assert next_of(second, 103, (4, 50)) == ours  # who comes first decides
        assert second.length == 5
        for rolls in (first, second):
            rolls.advance()
    assert first.is_kept(ours, slow=True)
    assert second.is_kept(ours, slow=False)
    first.window_count += 1
    last = next_of(first, 100, (5, 20))
    assert first.is_kept(last, slow=True)
    assert not second.is_kept(ours - 5, slow=True)  # not what the others keep
    second.window_count += 1
    assert second.is_kept(last, slow=False)
    assert second.window_count == 1


def test_a_window_that_is_over_at_once_is_answered_last(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread may refuse it before the thread that took the request is back."""
    replies: list[str] = []

    class Replies:
        def reply(self, _: str, content: Mapping[str, Any]) -> bool:
            replies.append(str(content["state"]))
            return True

    def attach_and_train(config: dict[str, Any], **how: Any) -> Tracer:
        tracer = attach(config, **how)
        train(1, model_and_optimizer=pair)  # past the first step that was asked for
        return tracer

    monkeypatch.setenv("WORLD_SIZE", "2")
    pair = small_model()
    train(9, model_and_optimizer=pair)
    while hook.recorder.commands is None:  # it reports in on its own thread
        time.sleep(0.01)
    monkeypatch.setattr(hook.recorder, "commands", Replies())
    monkeypatch.setattr(driver, "attach", attach_and_train)
    arguments = {"count": 3, "first": 4, "window": 0, "ahead_s": 1, "valid_s": 60}
    content = driver.plan_request(
        "1-a", arguments, recorder=hook.recorder, state=hook.installer.state
    )
    assert [*replies, *([] if content is None else [content["state"]])] == ["accepted", "refused"]
