"""What the GPU's memory held when an allocation failed, written down before torch raises.

Torch calls its observers once all its own remedies have failed, on the thread that allocates and
without the allocator's lock (c10/cuda/CUDACachingAllocator.cpp, `malloc`). They are added to the
job's own ones. Whatever fails here, torch goes on to raise what it raises.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import FrameType
from typing import Any

from haiprof.base.safe_files import make_folder, write_file
from haiprof.in_job.frames import frame_lines, read_stacks, why_not_safe
from haiprof.in_job.gpu_memory import GpuMemory, plain_shapes
from haiprof.in_job.identity import named_rank, restart
from haiprof.in_job.threads import call_within
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.stack_frames import Frame, own_frame

WRITE_WAIT_S = 1.0
SNAPSHOT_WAIT_S = 10.0
_KEPT = 8
_MANY, _MANY_APART_NS = 32, 1_000_000_000
"""After so many (cuDNN tries algorithms, a job searches its batch size) at most one a second."""
_SNAPSHOTS = 3
_FRAME_LIMIT = 64
_TENSOR_LIMIT = 50_000
_STATS = {
    "allocated_bytes": "allocated_bytes.all.current", "peak_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "retry_count": "num_alloc_retries",
}  # fmt: skip
_SMALL_BYTES = 2 << 20  # kSmallBuffer, c10/core/AllocatorConfig.h: a segment of the small pool
_MODULE_FILE, _OPTIMIZER_FILE = "/torch/nn/modules/module.py", "/torch/optim/optimizer.py"

_observed = False
_current: OutOfMemory | None = None


@dataclass
class OutOfMemory:
    """Describes each allocation that fails, in one file per process."""

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
            "largest": self.memory.largest_json(),
        }  # fmt: skip
        for name, part in (
            ("stats", lambda: self._counts(device)),
            ("place", self._describe_position),
            ("held", lambda: {"held": self._owned_bytes(device)}),
            ("segments", lambda: self._free_blocks(device, requested)),
        ):
            try:
                entry.update(part())
            except Exception as error:
                if self.is_foreign(error):
                    raise
                entry.setdefault("missing", {})[name] = f"{type(error).__name__}: {error}"[:200]
        self._entries.append(entry)
        self._write()
        if self.memory.recorded and self._snapshots < _SNAPSHOTS:
            self._snapshots += 1
            self._keep_snapshot()
            self._write()

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
            "phase": phase,
            "module": self._module_name(module),
            "frames": stack[-_FRAME_LIMIT:],
            "line": list(own) if own else None,
        }

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
            if len(seen) > _TENSOR_LIMIT:
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
        """What is reserved and free on the stream that asked: in how many pieces, how large.

        Pools of CUDA graphs and of the other size are left out, which could not serve the request.
        """
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

    def _keep_snapshot(self) -> None:
        """The allocator's state and history as torch writes it, for its own viewer; the newest."""
        entry = self._entries[-1]
        path = self.run.memory_snapshot(socket.gethostname(), os.getpid())
        try:
            content = pickle.dumps(self.torch.cuda.memory._snapshot())
        except Exception as error:
            if self.is_foreign(error):
                raise
            entry.setdefault("missing", {})["snapshot"] = f"{type(error).__name__}: {error}"[:200]
            return
        written: list[bool] = []

        def write() -> None:
            with contextlib.suppress(OSError):
                write_file(path, content, below=self.run.root)
                written.append(True)

        call_within(SNAPSHOT_WAIT_S, write)
        if written:
            entry["snapshot"] = path.name

    def _write(self) -> None:
        content = {
            "version": SCHEMA_VERSION, "host": socket.gethostname(), "pid": os.getpid(),
            "rank": named_rank(), "restart": restart(), **self.describe(),
            "count": self._count, "failed": list(self._entries),
        }  # fmt: skip
        call_within(WRITE_WAIT_S, _write_json, self.run, content)


def _write_json(run: RunPaths, content: Mapping[str, Any]) -> None:
    import json

    try:
        path = run.out_of_memory_file(content["host"], content["pid"])
        make_folder(path.parent, below=run.root)
        write_file(path, json.dumps(content).encode(), below=run.root)
    except Exception:
        return


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    """What torch calls."""
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
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename != __file__:
            frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
            if module is None and code.co_filename.endswith(_MODULE_FILE):
                module = frame.f_locals.get("self")
        frame = frame.f_back
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
