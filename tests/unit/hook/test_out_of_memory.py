"""What is noted of GPU memory beside the steps, and where an allocation fails; on a fake device."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from haiprof.in_job import gpu_memory
from haiprof.in_job.gpu_memory import GpuMemory, OutOfMemory, input_shapes
from haiprof.run_format.layout import RunPaths
from tests.simulated.allocator import MIB, Allocator, Block

LIMIT = 100 * MIB


class Tensor:
    """Of a shape, or of a storage: as much of one as is looked at."""

    is_nested = False

    def __init__(self, *shape: int, size: int = 0, address: int = 0, device: str = "cuda") -> None:
        self.shape, self.grad = shape, None
        self.device = SimpleNamespace(type=device, index=None)
        self._size, self._address = size, address or id(self)

    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self._address, nbytes=lambda: self._size)


class Module:
    """A root with a parameter, a gradient and a buffer, or one inside."""

    def __init__(self, **inside: Module) -> None:
        self.inside = inside
        self.weight = Tensor(size=6 * MIB)

    def parameters(self) -> Iterator[Any]:
        return iter([self.weight])

    def buffers(self) -> Iterator[Any]:
        return iter([Tensor(size=2 * MIB)])

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        yield from [("", self), *self.inside.items()]


class Device:
    """torch, as far as it is asked, over a simulated allocator."""

    def __init__(self) -> None:
        self.allocator = Allocator(2 * LIMIT)
        self.allocator.limit_bytes = LIMIT
        self.capturing = False
        own = self.allocator
        self.torch = SimpleNamespace(
            Tensor=Tensor,
            nn=SimpleNamespace(Module=Module),
            _C=SimpleNamespace(
                _cuda_attach_out_of_memory_observer=own.observers.append,
                _cuda_isHistoryEnabled=lambda: own.history is not None,
                _cuda_getCurrentRawStream=lambda _: 0,
            ),
            cuda=SimpleNamespace(
                current_device=lambda: 0,
                get_device_properties=lambda _: SimpleNamespace(total_memory=2 * LIMIT),
                get_per_process_memory_fraction=lambda _: 0.5,
                is_current_stream_capturing=lambda: self.capturing,
                memory_stats=lambda _: own.stats(),
                memory_snapshot=own.segment_list,
                memory=SimpleNamespace(
                    _record_memory_history=own.record_history, _snapshot=own.snapshot
                ),
            ),
        )
        self.lines: list[dict[str, Any]] = []

    def memory(self, history: str = "off") -> GpuMemory:
        return GpuMemory(self.torch, self.lines, history=history)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(gpu_memory, "_observed", False)
    monkeypatch.setattr(gpu_memory, "_current", None)
    return Device()


def watch(
    device: Device, root: Path, memory: GpuMemory, *, phase: str | None = None, **more: Any
) -> Callable[[], dict[str, Any]]:
    """Watches; the returned function reads what was noted of the last failure."""
    run = RunPaths(root)
    given: dict[str, Any] = {"modules": list, "optimizers": list, **more}
    OutOfMemory(
        device.torch, run, memory, describe=lambda: {"step": 7}, phase=lambda: phase,
        training_thread=threading.get_ident, is_foreign=lambda error: isinstance(error, OSError),
        **given,
    ).watch()  # fmt: skip

    def read() -> dict[str, Any]:
        (path,) = run.out_of_memory_files()
        content: dict[str, Any] = json.loads(path.read_text())
        return {**content["failed"][-1], "count": content["count"], "kept": len(content["failed"])}

    return read


def take(device: Device, size: int) -> Block:
    block = device.allocator.malloc(size)
    assert block is not None
    return block


def test_steps_are_noted_with_what_they_begin_with(device: Device) -> None:
    memory = device.memory()
    for step in range(3):
        take(device, 3 * MIB)
        memory.begin_step(step, (Tensor(4, 8),), {})
    assert [(line["step"], line["allocated_bytes"] // MIB) for line in device.lines] == [
        (0, 3), (1, 6), (2, 9),
    ]  # fmt: skip
    assert {line["limit_bytes"] for line in device.lines} == {LIMIT}


def test_largest_batch_is_one_that_went_through(device: Device) -> None:
    memory = device.memory()
    sizes = (8, 8, 64, 8, 8, 256)
    for step, size in enumerate(sizes):
        memory.begin_step(step, ([Tensor(size, 2)],), {"mask": Tensor(size), "scale": 2.0})
        device.allocator.free(take(device, size * MIB // 8))
    assert memory.batch == ((256, 2), (256,))
    assert memory.largest is not None
    assert (memory.largest["shapes"], memory.largest["step"]) == ([[64, 2], [64]], 2)
    assert memory.largest["peak_bytes"] == 8 * MIB


def test_steps_that_go_on_and_on_are_read_seldom(device: Device) -> None:
    memory = device.memory()
    for step in range(500):
        memory.begin_step(step, (Tensor(4),), {})
    assert 16 <= len(device.lines) < 40


@pytest.mark.parametrize("history", ["off", "auto", "on"])
def test_history_begins_when_it_is_asked_for(
    device: Device, history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "_now", itertools.count(10**12, 10**7).__next__)
    memory = device.memory(history)
    memory.start_history()
    assert memory.recorded is (history == "on")
    for step in range(4):
        take(device, 24 * MIB)
        memory.begin_step(step, (), {})
        assert memory.recorded is (history == "on" or (history == "auto" and step == 3))
    assert (device.allocator.history is not None) is (history != "off")


def test_history_that_would_cost_much_is_left_out_unless_it_is_asked_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stack is 2 us: at 10,000 allocations a second that is 2 % of the time."""
    monkeypatch.setattr(gpu_memory, "_now", itertools.count(10**12, 10**8).__next__)
    memory = device.memory("auto")
    take(device, 95 * MIB)
    for step in range(3):
        for _ in range(1000):
            device.allocator.free(take(device, MIB))
        memory.begin_step(step, (), {})
    assert not memory.recorded
    (left,) = (line for line in device.lines if line["type"] == "memory_history")
    assert left["state"] == "left"
    assert left["reason"].startswith("it would take about 2% of the time")


def test_history_of_the_job_is_left_alone(device: Device) -> None:
    device.allocator.record_history(max_entries=3)
    before = device.allocator.history
    memory = device.memory("on")
    memory.start_history()
    assert device.allocator.history is before
    assert [(line["type"], line["state"]) for line in device.lines] == [("memory_history", "left")]


def test_shapes_are_bounded() -> None:
    many = [Tensor(2, 3)] * 100
    assert input_shapes((many, {"a": many}), {}, Tensor) == (((2, 3),) * 8, 48)
    assert input_shapes((1, None, "x", object()), {}, Tensor) == ((), 0)


def test_failure_is_noted_with_counts_place_and_batch(device: Device, tmp_path: Path) -> None:
    memory = device.memory()
    read = watch(device, tmp_path, memory, phase="backward")
    memory.begin_step(7, (Tensor(64, 8),), {})
    take(device, 60 * MIB)
    assert device.allocator.malloc(50 * MIB) is None
    found = read()
    assert (found["requested_bytes"], found["limit_bytes"]) == (50 * MIB, LIMIT)
    assert (found["allocated_bytes"], found["reserved_bytes"]) == (60 * MIB, 60 * MIB)
    assert (found["phase"], found["step"], found["batch"]) == ("backward", 7, [[64, 8]])
    assert found["device_total_bytes"] == 2 * LIMIT
    assert "missing" not in found


def test_free_pieces_are_of_the_pool_that_was_asked(device: Device, tmp_path: Path) -> None:
    read = watch(device, tmp_path, device.memory())
    pieces = [take(device, 3 * MIB) for _ in range(18)]  # 60 MiB of segments
    for piece in pieces[::2]:
        device.allocator.free(piece)
    take(device, 100)
    own = device.allocator.segment_list()
    device.torch.cuda.memory_snapshot = lambda: [
        *own,
        {**own[0], "segment_pool_id": (1, 0)},
        {**own[0], "stream": 99},
        {**own[0], "device": 1},
    ]
    assert device.allocator.malloc(50 * MIB) is None
    found = read()
    assert found["free_cached_bytes"] == (9 * 3 + 3 * 2) * MIB
    assert found["largest_free_bytes"] < 6 * MIB
    assert found["private_pool_bytes"] == 20 * MIB


@pytest.mark.parametrize("why", ["capture", "history"])
def test_pieces_are_missing_where_they_would_mislead(
    device: Device, tmp_path: Path, why: str
) -> None:
    read = watch(device, tmp_path, device.memory())
    device.capturing = why == "capture"
    if why == "history":
        device.allocator.record_history()
    assert device.allocator.malloc(2 * LIMIT) is None
    found = read()
    assert "largest_free_bytes" not in found
    assert why in found["missing"]["segments"]
    assert found["allocated_bytes"] == 0


def test_holders_are_counted_once_and_of_this_device_alone(device: Device, tmp_path: Path) -> None:
    root = Module()
    root.weight.grad = Tensor(size=5 * MIB)  # type: ignore[assignment]
    shared = Tensor(size=8 * MIB)
    states = {0: {"exp_avg": shared, "exp_avg_sq": shared, "step": 3, "cpu":
              Tensor(size=MIB, device="cpu")}, 1: "odd"}  # fmt: skip
    optimizer = SimpleNamespace(param_groups=[{"params": [root.weight]}], state=states)
    read = watch(
        device, tmp_path, device.memory(), modules=lambda: [root], optimizers=lambda: [optimizer]
    )
    assert device.allocator.malloc(2 * LIMIT) is None
    assert read()["held"] == {
        "parameters": 6 * MIB, "gradients": 5 * MIB, "buffers": 2 * MIB, "optimizer_state": 8 * MIB,
    }  # fmt: skip


def test_module_under_way_is_named_as_its_root_names_it(device: Device, tmp_path: Path) -> None:
    inner = Module()
    root = Module(**{"blocks.3.mlp": inner})
    read = watch(device, tmp_path, device.memory(), modules=lambda: [root])
    text = "def _call_impl(self, size):\n    return malloc(size)\n"
    names: dict[str, Any] = {"malloc": device.allocator.malloc}
    exec(compile(text, "/x/site-packages/torch/nn/modules/module.py", "exec"), names)
    assert names["_call_impl"](inner, 2 * LIMIT) is None
    assert read()["module"] == "blocks.3.mlp (Module)"


def test_snapshot_is_kept_where_the_history_is_ours(device: Device, tmp_path: Path) -> None:
    memory = device.memory("on")
    memory.start_history()
    read = watch(device, tmp_path, memory)
    take(device, 8 * MIB)
    for _ in range(9):
        assert device.allocator.malloc(2 * LIMIT) is None
    found = read()
    assert (found["count"], found["kept"]) == (9, 8)
    assert len([*(tmp_path / "memory").glob("*.pickle")]) == 1


def test_many_failures_are_counted_and_seldom_described(device: Device, tmp_path: Path) -> None:
    asked: list[int] = []

    def modules() -> list[Any]:
        asked.append(1)
        return []

    watch(device, tmp_path, device.memory(), modules=modules)
    for _ in range(200):
        assert device.allocator.malloc(2 * LIMIT) is None
    assert 32 <= len(asked) < 64


def test_whatever_breaks_here_leaves_torchs_own_error_alone(device: Device, tmp_path: Path) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("no counts")

    device.torch.cuda.memory_stats = device.torch.cuda.memory_snapshot = broken
    read = watch(device, tmp_path, device.memory(), modules=broken)
    assert device.allocator.malloc(2 * LIMIT) is None
    found = read()
    assert found["requested_bytes"] == 2 * LIMIT
    assert {"stats", "held", "segments"} <= set(found["missing"])
    (tmp_path / "memory").rename(tmp_path / "away")
    (tmp_path / "memory").write_text("in the way")
    assert device.allocator.malloc(2 * LIMIT) is None, "nor does a folder that cannot be made"


def test_what_the_jobs_own_signal_handler_raises_is_the_jobs(
    device: Device, tmp_path: Path
) -> None:
    def interrupted() -> Any:
        raise OSError("from a handler")

    watch(device, tmp_path, device.memory(), modules=interrupted)
    with pytest.raises(OSError, match="from a handler"):
        device.allocator.malloc(2 * LIMIT)


def test_one_observer_serves_every_installation(device: Device, tmp_path: Path) -> None:
    watch(device, tmp_path / "first", device.memory())
    (tmp_path / "second").mkdir()
    read = watch(device, tmp_path / "second", device.memory())
    assert len(device.allocator.observers) == 1
    assert device.allocator.malloc(2 * LIMIT) is None
    assert read()["count"] == 1
    assert not (tmp_path / "first").exists()
