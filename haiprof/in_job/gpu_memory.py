"""GPU memory: from step to step, and what it held when an allocation failed.

From step to step all of it is read on the training thread where a step begins, never from the
device: the caching allocator's own counts, at each of the first steps, then once a second, later
every ten. On a torch without CUDA nothing of it runs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from traceback import walk_stack
from typing import Any

from haiprof.base.code_places import Frame, own_frame
from haiprof.base.safe_files import make_folder, write_file
from haiprof.in_job.frames import frame_lines, read_stacks, why_not_safe
from haiprof.in_job.identity import named_rank, restart
from haiprof.in_job.threads import call_within
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import SCHEMA_VERSION

HISTORY_RATIO = 0.9  # share of its limit that the peak must reach before `auto` records it
HISTORY_ENTRIES = 20_000  # allocations and releases that are kept, of some hundred bytes each
HISTORY_NS = 2_000  # what recording the stack of one allocation costs, as PyTorch tells
HISTORY_COST_RATIO = 0.01  # where it would take more of the time, `auto` leaves the history out
_OFTEN_NS, _SELDOM_NS = 1_000_000_000, 10_000_000_000
_FIRST_COUNT, _OFTEN_COUNT = 16, 80  # so many readings of every step, and then of one a second
_TENSOR_LIMIT = 8
_CONTAINERS = (list, tuple, dict)
WRITE_WAIT_S = 1.0
SNAPSHOT_WAIT_S = 10.0
_KEPT = 8
_MANY, _MANY_APART_NS = 32, 1_000_000_000
"""After so many (cuDNN tries algorithms, a job searches its batch size) at most one a second."""
_SNAPSHOTS = 3
_FRAME_LIMIT = 64
_COUNTED_TENSORS = 50_000
_STATS = {
    "allocated_bytes": "allocated_bytes.all.current", "peak_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "retry_count": "num_alloc_retries",
}  # fmt: skip
_SMALL_BYTES = 2 << 20  # kSmallBuffer, c10/core/AllocatorConfig.h: a segment of the small pool
_MODULE_FILE, _OPTIMIZER_FILE = "/torch/nn/modules/module.py", "/torch/optim/optimizer.py"

Shapes = tuple[tuple[int, ...], ...]  # of the tensors that a root module was called with
_now = time.perf_counter_ns


class GpuMemory:
    """Counts of this process's own device."""

    def __init__(self, torch: Any, lines: list[dict[str, Any]], *, history: str) -> None:
        self._torch, self._lines, self._history = torch, lines, history
        self.device: int | None = None
        self.limit_bytes = 0
        self.recorded = False  # whether the allocator's history is recorded, by us
        self.batch: Shapes = ()  # of the step under way
        self.step = 0
        self.largest: dict[str, Any] | None = None
        """The largest batch of training that went through: `shapes`, `step`, `start_bytes` where
        its step began, and `peak_bytes` when it was over, since the job's start or its own reset.
        """
        self._count = self._largest_count = 0  # numbers in the tensors of a batch
        self._trying = False  # the step under way has a larger one than any before
        self._start_bytes: int | None = None  # of the step under way, where it was read
        self._read_ns = self._read_count = 0
        self._made = 0  # allocations until then

    def start_history(self) -> None:
        """Where it is asked for from the start: once the job has started CUDA."""
        if self._history == "on" and not self.recorded:
            self._record_history()

    def begin_step(self, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A root module is called for training."""
        if self.device is None:  # only here: by now the job has chosen its device
            self.device = int(self._torch.cuda.current_device())
            total = int(self._torch.cuda.get_device_properties(self.device).total_memory)
            share = 1.0  # what the job may take; torch tells a smaller one from 2.7 on
            with contextlib.suppress(Exception):
                share = float(self._torch.cuda.get_per_process_memory_fraction(self.device))
            self.limit_bytes = int(total * share)
        shapes, count = input_shapes(args, kwargs, self._torch.Tensor)
        now = _now()
        larger = count > self._largest_count
        pause_ns = _OFTEN_NS if self._read_count < _OFTEN_COUNT else _SELDOM_NS
        due = self._read_count < _FIRST_COUNT or now - self._read_ns >= pause_ns
        if self._trying or larger or due:
            self._read(now, step, due=due)
        else:
            self._start_bytes = None
        self._largest_count = max(count, self._largest_count)
        self._trying, self._count = larger, count
        self.batch, self.step = shapes, step

    def _read(self, now_ns: int, step: int, *, due: bool) -> None:
        stats = self._torch.cuda.memory_stats(self.device)
        allocated, peak = stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"]
        if self._start_bytes is not None and self._count >= self._largest_count:
            self.largest = {
                "shapes": plain_shapes(self.batch), "step": self.step,
                "start_bytes": self._start_bytes, "peak_bytes": peak,
            }  # fmt: skip
        self._start_bytes = allocated
        if not due:
            return
        made = stats.get("allocation.all.allocated", 0)
        cost_ratio = HISTORY_NS * (made - self._made) / max(now_ns - self._read_ns, 1)
        self._made = made
        self._read_ns, self._read_count = now_ns, self._read_count + 1
        self._lines.append({
            "type": "gpu_memory", "time_ns": now_ns, "step": step, "allocated_bytes": allocated,
            "peak_bytes": peak, "reserved_bytes": stats["reserved_bytes.all.current"],
            "limit_bytes": self.limit_bytes,
        })  # fmt: skip
        full = self.limit_bytes and peak >= HISTORY_RATIO * self.limit_bytes
        if full and self._history == "auto" and not self.recorded and self._read_count > 1:
            if cost_ratio <= HISTORY_COST_RATIO:
                self._record_history()
            else:
                self._leave_history(
                    "left", f"it would take about {cost_ratio:.0%} of the time at this job's rate "
                    "of allocations; --memory-history on records it",
                )  # fmt: skip

    def history_is_the_jobs(self) -> bool:
        """Whether the job records the allocator's history itself: it may be of any length."""
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return not self.recorded and enabled is not None and bool(enabled())

    def _record_history(self) -> None:
        """Begins, unless the job has; one that the job begins later takes the place of ours."""
        # Stacks of Python alone, and of allocations alone: the rest costs more (PyTorch tells 2 us
        # for each stack).
        if self.history_is_the_jobs():
            self._leave_history("left", "the job records it itself")
            return
        self.recorded = True
        try:
            self._torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=HISTORY_ENTRIES
            )
        except Exception as error:
            self.recorded = False
            self._leave_history("failed", f"{type(error).__name__}: {error}")
            return
        self._note_history(state="recorded", entries=HISTORY_ENTRIES)

    def _leave_history(self, state: str, reason: str) -> None:
        """There is none of ours from here on."""
        self._history = "off"
        self._note_history(state=state, reason=reason)

    def _note_history(self, **fields: Any) -> None:
        line = {"type": "memory_history", "time_ns": _now(), "step": self.step}
        self._lines.append({**line, **fields})


def plain_shapes(shapes: Shapes) -> list[list[int]]:
    """Shapes as plain JSON values; torch's own are tuples, some with symbols in them."""
    return [[size for size in shape if type(size) is int] for shape in shapes]


def input_shapes(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensor: type
) -> tuple[Shapes, int]:
    """Shapes of the tensors among a call's arguments, and how many numbers are in them."""
    shapes: list[tuple[int, ...]] = []
    count = 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, tensor):
            parts: Any = (value,)
        elif isinstance(value, _CONTAINERS):
            parts = [*(value.values() if isinstance(value, dict) else value)][:_TENSOR_LIMIT]
        else:
            continue
        for part in parts:
            if not isinstance(part, tensor):
                continue
            try:
                shape: Any = part.shape  # type: ignore[attr-defined]
                size = part.numel()  # type: ignore[attr-defined]
            except RuntimeError:  # a nested tensor has no shape
                continue
            if type(size) is int:  # a jagged one has symbols
                shapes.append(shape)
                count += size
            if len(shapes) == _TENSOR_LIMIT:
                return tuple(shapes), count
    return tuple(shapes), count


_observed = False
_current: OutOfMemory | None = None


@dataclass
class OutOfMemory:
    """Describes each allocation that fails, in one file per process, before torch raises.

    Torch calls its observers once all its own remedies have failed, on the thread that allocates
    and without the allocator's lock (c10/cuda/CUDACachingAllocator.cpp, `malloc`). They are added
    to the job's own ones. Whatever fails here, torch goes on to raise what it raises.
    """

    torch: Any
    run: RunPaths
    memory: GpuMemory
    _: KW_ONLY
    describe: Callable[[], Mapping[str, Any]]
    phase: Callable[[], str | None]
    training_thread: Callable[[], int]
    modules: Callable[[], list[Any]]
    optimizers: Callable[[], list[Any]]
    is_foreign: Callable[[BaseException], bool]
    _entries: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _count: int = 0
    _snapshots: int = 0
    _last_ns: int = 0

    def watch(self) -> None:
        """Registers this observer: torch takes one per process, and never removes it."""
        global _current, _observed
        _current = self
        if not _observed:
            self.torch._C._cuda_attach_out_of_memory_observer(_observe)
            _observed = True

    def note(self, device: int, requested: int, limit: int, free: int) -> None:
        """One allocation failed."""
        self._count += 1
        now = time.perf_counter_ns()
        if self._count > _MANY and now - self._last_ns < _MANY_APART_NS:
            return
        self._last_ns = now
        entry: dict[str, Any] = {
            "wall_ns": time.time_ns(), "device": device, "requested_bytes": requested,
            "limit_bytes": limit, "device_free_bytes": free,
            "step": self.describe().get("step") if self.memory.batch else None,
            "batch": plain_shapes(self.memory.batch),
            "largest": self.memory.largest,
        }  # fmt: skip
        for name, part in (
            ("stats", lambda: self._counts(device)),
            ("place", self._describe_position),
            ("held", lambda: {"held": self._owned_bytes(device)}),
            ("segments", lambda: self._free_blocks(device, requested)),
        ):
            self._add(entry, name, part)
        self._entries.append(entry)
        self._write()
        if self.memory.recorded and self._snapshots < _SNAPSHOTS:
            self._snapshots += 1
            self._add(entry, "snapshot", self._keep_snapshot)
            self._write()

    def _add(self, entry: dict[str, Any], name: str, part: Callable[[], Mapping[str, Any]]) -> None:
        """One part of what is noted; why it is missing, where it cannot be had."""
        try:
            entry.update(part())
        except Exception as error:
            if self.is_foreign(error):
                raise
            entry.setdefault("missing", {})[name] = f"{type(error).__name__}: {error}"[:200]

    def _counts(self, device: int) -> dict[str, int]:
        stats = self.torch.cuda.memory_stats(device)
        found = {name: int(stats[key]) for name, key in _STATS.items()}
        properties = self.torch.cuda.get_device_properties(device)
        return {**found, "device_total_bytes": int(properties.total_memory)}

    def _describe_position(self) -> dict[str, Any]:
        frames, module = _own_stack()
        stack = frames
        if not frames and not why_not_safe():  # C++ threads of the autograd engine have no frames
            thread = self.training_thread()
            stack = frame_lines(read_stacks({thread}, limit=_FRAME_LIMIT).get(thread, []))
        phase = self.phase()
        if phase is None and any(f[0].endswith(_OPTIMIZER_FILE) for f in stack):
            phase = "optimizer"
        own = own_frame(stack)
        return {
            "phase": phase, "module": self._module_name(module), "frames": stack[-_FRAME_LIMIT:],
            "line": list(own) if own else None,
        }  # fmt: skip

    def _module_name(self, module: Any) -> str | None:
        """`blocks.3.mlp (MLP)`: the innermost module under way, as its root names it."""
        if module is None:
            return None
        kind = type(module).__name__
        for root in self.modules():
            for name, each in self.torch.nn.Module.named_modules(root):
                if each is module:
                    return f"{name} ({kind})" if name else kind
        return kind

    def _owned_bytes(self, device: int) -> dict[str, int]:
        """Bytes of the device in parameters, their gradients, buffers and optimizer state."""
        seen: set[int] = set()
        sums = dict.fromkeys(("parameters", "gradients", "buffers", "optimizer_state"), 0)
        for kind, tensor in self._known_tensors():
            sums[kind] += _storage_bytes(tensor, device, seen)
            if len(seen) > _COUNTED_TENSORS:
                break
        return sums

    def _known_tensors(self) -> Iterator[tuple[str, Any]]:
        module = self.torch.nn.Module
        for root in self.modules():
            for parameter in module.parameters(root):
                yield "parameters", parameter
                yield "gradients", parameter.grad
            for buffer in module.buffers(root):
                yield "buffers", buffer
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield "parameters", parameter
                    yield "gradients", parameter.grad
            for state in list(optimizer.state.values()):
                for value in list(state.values()) if isinstance(state, dict) else ():
                    yield "optimizer_state", value

    def _free_blocks(self, device: int, requested: int) -> dict[str, Any]:
        """What is reserved and free on the stream that asked: in how many pieces, how large."""
        # Pools of CUDA graphs and of the other size are left out, which could not serve the
        # request.
        if self.memory.history_is_the_jobs():
            raise ValueError("the job records the allocator's history itself, of any length")
        if self.torch.cuda.is_current_stream_capturing():
            raise ValueError("a CUDA graph is captured, whose memory is a pool of its own")
        stream = self.torch._C._cuda_getCurrentRawStream(device)
        pool = "small" if requested <= _SMALL_BYTES else "large"
        free: list[int] = []
        private = count = 0
        for segment in self.torch.cuda.memory_snapshot():
            if segment["device"] != device:
                continue
            count += 1
            if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
                private += segment["total_size"]
            elif (segment["stream"], segment["segment_type"]) == (stream, pool):
                free += [b["size"] for b in segment["blocks"] if b["state"] == "inactive"]
        return {
            "free_cached_bytes": sum(free), "largest_free_bytes": max(free, default=0),
            "free_block_count": len(free), "segment_count": count, "private_pool_bytes": private,
        }  # fmt: skip

    def _keep_snapshot(self) -> dict[str, str]:
        """The allocator's state and history as torch writes it, for its own viewer; the newest."""
        path = self.run.memory_snapshot(socket.gethostname(), os.getpid())
        content = pickle.dumps(self.torch.cuda.memory._snapshot())
        return {"snapshot": path.name} if self._keep(path, content, SNAPSHOT_WAIT_S) else {}

    def _write(self) -> None:
        import json

        host, pid = socket.gethostname(), os.getpid()
        content = {
            "version": SCHEMA_VERSION, "host": host, "pid": pid, "rank": named_rank(),
            "restart": restart(), **self.describe(), "count": self._count,
            "failed": list(self._entries),
        }  # fmt: skip
        path = self.run.out_of_memory_file(host, pid)
        self._keep(path, json.dumps(content).encode(), WRITE_WAIT_S)

    def _keep(self, path: Path, content: bytes, limit_s: float) -> bool:
        """Writes a file; whether that is done within the time."""
        written: list[bool] = []

        def write() -> None:
            with contextlib.suppress(Exception):
                make_folder(path.parent, below=self.run.root)
                write_file(path, content, below=self.run.root)
                written.append(True)

        call_within(limit_s, write)
        return bool(written)


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    ours = _current
    if ours is None:
        return
    try:
        ours.note(device, requested, limit, free)
    except Exception as error:
        if ours.is_foreign(error):
            raise


def _own_stack() -> tuple[list[Frame], Any]:
    """Frames of this thread outside this module, outermost first, and the innermost module."""
    frames: list[Frame] = []
    module = None
    for frame, line in walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_filename != __file__:
            frames.append((code.co_filename, line or 0, code.co_name))
            if module is None and code.co_filename.endswith(_MODULE_FILE):
                module = frame.f_locals.get("self")
    return frames[::-1], module


def _storage_bytes(tensor: Any, device: int, seen: set[int]) -> int:
    """Bytes of a tensor's storage on the device; 0 for one that was counted, or is none."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor: this rank's shard
    try:
        place = local.device
        if place.type != "cuda" or (place.index or 0) != device:
            return 0
        storage = local.untyped_storage()
        address = storage.data_ptr()
        if not address or address in seen:
            return 0
        seen.add(address)
        return int(storage.nbytes())
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return 0
