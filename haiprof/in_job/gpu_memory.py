"""GPU memory from step to step: what a step begins with, the peak, and the largest batch so far.

All of it is read on the training thread where a step begins, never from the device: the caching
allocator's own counts, at each of the first steps, then once a second, later every ten. On a torch
without CUDA nothing of it runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HISTORY_RATIO = 0.9
"""Share of its limit that the peak must reach before `auto` records the allocator's history."""
HISTORY_ENTRIES = 20_000
"""Allocations and releases that are kept, of some hundred bytes each."""
HISTORY_NS = 2_000
"""What recording the stack of one allocation costs, as PyTorch tells."""
HISTORY_COST_RATIO = 0.01
"""Where it would take more of the time, `auto` leaves the history out."""
_OFTEN_NS, _SELDOM_NS = 1_000_000_000, 10_000_000_000
_FIRST_COUNT, _OFTEN_COUNT = 16, 80
"""So many readings of every step, and then of one a second."""
_TENSOR_LIMIT = 8
_CONTAINERS = (list, tuple, dict)

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors that a root module was called with."""
_now = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class Batch:
    """The largest batch that went through, and what it took."""

    shapes: Shapes
    step: int
    start_bytes: int
    """Allocated where its step began."""
    peak_bytes: int
    """The highest so far when its step was over, since the job's start or its own reset."""


class GpuMemory:
    """Counts of this process's own device."""

    def __init__(self, torch: Any, lines: list[dict[str, Any]], *, history: str) -> None:
        self._torch, self._lines, self._history = torch, lines, history
        self.device: int | None = None
        self.limit_bytes = 0
        self.recorded = False
        """Whether the allocator's history is recorded, by us."""
        self.batch: Shapes = ()
        """Of the step under way."""
        self.step = 0
        self.largest: Batch | None = None
        """That went through; of training alone."""
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
            self.largest = Batch(self.batch, self.step, self._start_bytes, peak)  # it went through
        self._start_bytes = allocated
        if not due:
            return
        made = stats.get("allocation.all.allocated", 0)
        cost_ratio = HISTORY_NS * (made - self._made) / max(now_ns - self._read_ns, 1)
        self._made = made
        self._read_ns, self._read_count = now_ns, self._read_count + 1
        self._lines.append(
            {
                "type": "gpu_memory",
                "time_ns": now_ns,
                "step": step,
                "allocated_bytes": allocated,
                "peak_bytes": peak,
                "reserved_bytes": stats["reserved_bytes.all.current"],
                "limit_bytes": self.limit_bytes,
            }
        )
        full = self.limit_bytes and peak >= HISTORY_RATIO * self.limit_bytes
        if full and self._history == "auto" and not self.recorded and self._read_count > 1:
            if cost_ratio <= HISTORY_COST_RATIO:
                self._record_history()
            else:
                self._leave_history(
                    "left", f"it would take about {cost_ratio:.0%} of the time at this job's rate "
                    "of allocations; --memory-history on records it",
                )  # fmt: skip

    def largest_json(self) -> dict[str, Any] | None:
        """The largest batch that went through, as plain JSON values."""
        found = self.largest
        if found is None:
            return None
        return {
            "shapes": plain_shapes(found.shapes), "step": found.step,
            "start_bytes": found.start_bytes, "peak_bytes": found.peak_bytes,
        }  # fmt: skip

    def history_is_the_jobs(self) -> bool:
        """Whether the job records the allocator's history itself: it may be of any length."""
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return not self.recorded and enabled is not None and bool(enabled())

    def _record_history(self) -> None:
        """Begins, unless the job has; one that the job begins later takes the place of ours.

        Stacks of Python alone, and of allocations alone: the rest costs more (PyTorch tells 2 us
        for each stack).
        """
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
