"""A GPU that is simulated: torch.cuda's functions over a device whose clock is the CPU's.

Operators run on the CPU, at once. What a stream was told to do on its own (`_sleep`) runs beside
them on that stream's own timeline, so events, queries and two streams behave as on a device:
a query is false until the stream has come so far, elapsed times of unfinished events raise, and
whatever is not allowed while a graph is captured raises. Profiles get GPU events from
`tests.simulated.trace`. Nothing here is a measurement of anything but our own code.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tests.simulated import trace as synthetic
from tests.simulated.allocator import MIB, Allocator, Block

UUID = "00000000-0000-0000-0000-000000000000"  # as the first GPU of tests/nvml_stub has it
TOTAL_BYTES = 80 << 30
LAG_NS = 50_000  # what a mark takes to be reached

_now = time.perf_counter_ns


class SimulatedStream:
    """A stream: what it still has to do ends at `busy_until_ns`."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.busy_until_ns = 0
        self.cuda_stream = id(self)

    def busy(self, ns: int) -> None:
        """Queues work of so long."""
        self.busy_until_ns = max(_now(), self.busy_until_ns) + ns

    def reached_ns(self) -> int:
        """When it will have done all that is queued now."""
        return max(_now(), self.busy_until_ns)

    def synchronize(self) -> None:
        """Waits for that."""
        _refuse_in_capture()
        _sleep_until(self.busy_until_ns)

    def wait_stream(self, other: SimulatedStream) -> None:
        """Goes on after what the other has queued now."""
        self.busy_until_ns = max(self.busy_until_ns, other.busy_until_ns)

    def wait_event(self, event: SimulatedEvent) -> None:
        """Goes on after a mark."""
        self.busy_until_ns = max(self.busy_until_ns, event.at_ns or 0)

    def query(self) -> bool:
        """Whether all is done."""
        return _now() >= self.busy_until_ns


class SimulatedEvent:
    """A mark in a stream."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.timing = enable_timing
        self.at_ns: int | None = None
        self._captured = False

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Takes the time at which the stream comes here."""
        self._captured = _STATE.capturing is not None
        self.at_ns = (stream or _STATE.stream).reached_ns()

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """The stream goes on after it."""
        (stream or _STATE.stream).wait_event(self)

    def query(self) -> bool:
        """Whether the stream has come here."""
        _refuse_in_capture()
        if self._captured:
            raise RuntimeError("CUDA error: operation not permitted on an event last recorded in "
                               "a capturing stream")  # fmt: skip
        return self.at_ns is None or _now() >= self.at_ns + LAG_NS

    def synchronize(self) -> None:
        """Waits for that."""
        _refuse_in_capture()
        if self.at_ns is not None:
            _sleep_until(self.at_ns + LAG_NS)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds between two marks."""
        if not self.timing or not end.timing or self.at_ns is None or end.at_ns is None:
            raise RuntimeError("CUDA error: invalid resource handle")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end.at_ns - self.at_ns) / 1e6


class SimulatedGraph:
    """A graph: the operators that ran in its capture, which a replay runs again."""

    def __init__(self, *_: object, **__: object) -> None:
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def replay(self) -> None:
        """Runs them, into the same outputs."""
        import torch

        if not self._calls:
            raise RuntimeError("called CUDAGraph::replay without a preceding successful capture")
        with torch.no_grad(), torch.profiler.record_function(synthetic.GRAPH_LAUNCH):
            for function, arguments, named, outcome in self._calls:
                again = function(*arguments, **named)
                if isinstance(outcome, torch.Tensor) and again is not outcome:
                    with contextlib.suppress(RuntimeError):
                        outcome.detach().copy_(again)

    def reset(self) -> None:
        """Forgets them."""
        self._calls.clear()

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Everything that runs inside is kept; nothing may be asked of the device meanwhile."""
        from torch.utils._python_dispatch import TorchDispatchMode

        calls = self._calls

        class Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                outcome = func(*args, **(kwargs or {}))
                calls.append((func, args, kwargs or {}, outcome))
                return outcome

        _STATE.capturing = self
        try:
            with Keep():  # type: ignore[no-untyped-call]
                yield
        finally:
            _STATE.capturing = None


class _State:
    def __init__(self) -> None:
        self.default = SimulatedStream()
        self.stream = self.default
        self.streams = [self.default]
        self.capturing: SimulatedGraph | None = None


_STATE = _State()
ALLOCATOR = Allocator(TOTAL_BYTES)


def install(torch: Any) -> None:
    """Puts the simulated device in the place of torch.cuda's, in this process."""
    cuda = torch.cuda
    properties = SimpleNamespace(
        name="NVIDIA Stub", major=9, minor=0, total_memory=TOTAL_BYTES, multi_processor_count=132,
        uuid=UUID, L2_cache_size=60 << 20,
    )  # fmt: skip
    replaced: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None,
        "_lazy_init": lambda: None, "device_count": lambda: 1, "current_device": lambda: 0,
        "set_device": lambda *_: None, "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (9, 0), "manual_seed_all": lambda *_: None,
        "manual_seed": lambda *_: None, "Event": SimulatedEvent, "Stream": _new_stream,
        "stream": _on_stream, "current_stream": lambda *_: _STATE.stream,
        "default_stream": lambda *_: _STATE.default, "synchronize": _synchronize,
        "is_current_stream_capturing": lambda: _STATE.capturing is not None,
        "CUDAGraph": SimulatedGraph, "graph": _graph, "_sleep": _sleep, "empty_cache": lambda: None,
        "memory_stats": lambda *_: ALLOCATOR.stats(),
        "memory_allocated": lambda *_: ALLOCATOR.allocated,
        "max_memory_allocated": lambda *_: ALLOCATOR.peak,
        "memory_snapshot": lambda *_: ALLOCATOR.segment_list(),
        "reset_peak_memory_stats": lambda *_: None,
        "mem_get_info": lambda *_: (ALLOCATOR.device_free, TOTAL_BYTES),
        "set_per_process_memory_fraction": _limit, "set_rng_state": lambda *_: None,
        "get_per_process_memory_fraction": lambda *_: ALLOCATOR.limit_bytes / TOTAL_BYTES,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, function in replaced.items():
        setattr(cuda, name, function)
    # A build with CUDA, here without a driver: Dynamo asks for the accelerator's own stream.
    if hasattr(torch, "accelerator"):
        torch.accelerator.is_available = lambda: False
    # What a build without CUDA has not; the first one Dynamo asks.
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    torch._C._cuda_isHistoryEnabled = lambda: ALLOCATOR.history is not None
    torch._C._cuda_attach_out_of_memory_observer = ALLOCATOR.observers.append
    cuda.memory._record_memory_history = ALLOCATOR.record_history
    cuda.memory._snapshot = ALLOCATOR.snapshot
    cuda.memory._dump_snapshot = _dump_snapshot
    synthetic.install(torch)
    for call, _ in list(cuda._queued_calls):  # as torch.cuda does when it starts the device
        with contextlib.suppress(Exception):
            call()


def allocate(size_bytes: int) -> object:
    """Takes memory of the device; refused beyond its limit, in torch's words."""
    import torch

    block = ALLOCATOR.malloc(size_bytes)
    if block is None:
        gib = 1 << 30
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size_bytes / MIB:.2f} MiB. GPU 0 has a total"
            f" capacity of {TOTAL_BYTES / gib:.2f} GiB of which {ALLOCATOR.device_free / gib:.2f} "
            "GiB is free. (simulated)"
        )
    return _Memory(block)


class _Memory:
    """Memory of the device, given back when nothing refers to it any more."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __del__(self) -> None:
        ALLOCATOR.free(self._block)


def _dump_snapshot(filename: str | os.PathLike[str] = "dump_snapshot.pickle") -> None:
    with open(filename, "wb") as file:
        pickle.dump(ALLOCATOR.snapshot(), file)


def _limit(share: float, *_: object) -> None:
    ALLOCATOR.limit_bytes = int(share * TOTAL_BYTES)


def _new_stream(*_: object, **__: object) -> SimulatedStream:
    stream = SimulatedStream()
    _STATE.streams.append(stream)
    return stream


@contextlib.contextmanager
def _on_stream(stream: SimulatedStream | None) -> Iterator[None]:
    before, _STATE.stream = _STATE.stream, stream or _STATE.stream
    try:
        yield
    finally:
        _STATE.stream = before


@contextlib.contextmanager
def _graph(graph: SimulatedGraph, *_: object, **__: object) -> Iterator[None]:
    _synchronize()
    with graph.captured():
        yield


def _synchronize(*_: object) -> None:
    _refuse_in_capture()
    _sleep_until(max(stream.busy_until_ns for stream in _STATE.streams))


def _sleep(cycles: int) -> None:
    """A kernel that spins; a cycle is a ns here."""
    _STATE.stream.busy(int(cycles))


def _refuse_in_capture() -> None:
    if _STATE.capturing is not None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _sleep_until(at_ns: int) -> None:
    while (left_ns := at_ns - _now()) > 0:
        time.sleep(left_ns / 1e9)
