"""GPU memory over the steps of each rank, and when it ran out: who held it, who asked for more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from haiprof.base.code_places import Frame, frame_text, own_frame, parse_frames
from haiprof.base.intervals import Ints
from haiprof.base.statistics import growth_p_value
from haiprof.base.units import bytes_text
from haiprof.base.version import read_data
from haiprof.run_analysis import run_files
from haiprof.run_format.layout import RunPaths

REMEDIES: Mapping[str, str] = read_data("run_analysis/remedies.json")
"""What to do, by cause of a death and by what is known more closely."""
LEAK_REMEDY = REMEDIES["gpu_leak"]
LEAST_POINTS = 8
GROWTH_P_VALUE = 0.01
GROWTH_RATIO = 0.05
"""Of the limit: what steps begin with has grown at least so much, or it is no growth of note."""
_COLUMNS = ("time_ns", "step", "allocated_bytes", "peak_bytes", "reserved_bytes", "limit_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemorySeries:
    """Of one rank's last attempt; an entry per reading, in order of time."""

    time_ns: Ints  # on the rank's own clock
    step: Ints
    allocated_bytes: Ints  # where a step began: without its activations
    peak_bytes: Ints  # the highest so far, or since the job's own reset
    reserved_bytes: Ints
    limit_bytes: int  # what the process may take of its device


def gpu_memory_series(files: run_files.RunFiles) -> Mapping[int, GpuMemorySeries]:
    """By rank, where anything was read."""
    found = {}
    for number, rank in files.last_attempts().items():
        rows = [[run_files.integer(line.get(name)) for name in _COLUMNS]
                for line in rank.of_type("gpu_memory")]  # fmt: skip
        rows = [row for row in rows if all(value is not None and value >= 0 for value in row)]
        if rows:
            *columns, limits = np.array(rows, dtype=np.int64).T
            known: dict[str, Any] = dict(zip(_COLUMNS[:-1], columns, strict=True))
            found[number] = GpuMemorySeries(**known, limit_bytes=int(limits[-1]))
    return found


def growth_per_step(series: GpuMemorySeries) -> float | None:
    """Bytes per step by which what steps begin with grew, from the third reading on.

    The first steps allocate what stays: optimizer state, workspaces. None where it did not grow
    beyond chance (Mann-Kendall) by GROWTH_RATIO of the limit, or had come to rest.
    """
    steps, held = series.step[2:], series.allocated_bytes[2:].astype(np.float64)
    if len(held) < LEAST_POINTS or steps[-1] <= steps[0]:
        return None
    grown = float(held[-1] - held[0])
    grew = grown >= GROWTH_RATIO * series.limit_bytes and growth_p_value(held) < GROWTH_P_VALUE
    grows_still = held[-1] - held[len(held) // 2] >= grown / 5
    return grown / float(steps[-1] - steps[0]) if grew and grows_still else None


_FILE_LIMIT = 1 << 21
_SIZE_LIMIT = 1 << 50
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([\d.]{1,20}) (bytes|[KMG]iB)"
_SAID = {
    "requested_bytes": rf"Tried to allocate {_SIZE}",
    "device_total_bytes": rf"total capacity of {_SIZE}",
    "device_free_bytes": rf"of which {_SIZE} is free",
    "limit_bytes": rf"{_SIZE} allowed",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch",
    "cached_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_OTHERS = rf"Process \d{{1,10}} has {_SIZE} memory in use"
_IS_CUDA = re.compile(r"(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate")
_HELD = ("parameters", "gradients", "buffers", "optimizer_state")
_DIMENSIONS, _SHAPES = 12, 8
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch of training that had gone through before."""

    shapes: Shapes
    step: int | None
    start_bytes: int  # allocated where its step began
    peak_bytes: int  # the highest so far when its step was over


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOutOfMemory:
    """One allocation that failed. Sizes are bytes; what is not known is None."""

    wall_ns: int | None = None
    device: int | None = None
    requested_bytes: int | None = None
    limit_bytes: int | None = None
    """What the process may take: the device's memory, or the share that it was given."""
    device_total_bytes: int | None = None
    device_free_bytes: int | None = None
    allocated_bytes: int | None = None  # in tensors
    reserved_bytes: int | None = None  # by the caching allocator: allocated or cached
    peak_bytes: int | None = None  # the highest that was ever allocated, or since the job's reset
    free_cached_bytes: int | None = None
    """Reserved and free, of the pool and the stream that the request was for."""
    largest_free_bytes: int | None = None  # the largest piece of it
    private_pool_bytes: int | None = None  # in pools of their own, as CUDA graphs have them
    others_bytes: int | None = None  # in other processes on the GPU, as far as torch names them
    held: Mapping[str, int] = field(default_factory=dict)
    """In parameters, gradients, buffers and optimizer state; the rest is activations and others."""
    phase: str | None = None
    module: str | None = None
    line: Frame | None = None
    step: int | None = None
    batch: Shapes = ()  # what the step's root module was called with, by shape
    largest: LargestBatch | None = None
    snapshot: str | None = None  # the allocator's snapshot in `memory/` of the run
    count: int = 1  # allocations that failed in this process, of which this is the last

    @property
    def fragmented(self) -> bool | None:
        """Whether the request would have fitted into what was free, were that in one piece."""
        known = (self.requested_bytes, self.free_cached_bytes, self.largest_free_bytes,
                 self.reserved_bytes, self.limit_bytes)  # fmt: skip
        if None in known:
            return None
        wanted, free, largest, reserved, limit = (size or 0 for size in known)
        left = max(limit - reserved, 0)
        device = left if self.device_free_bytes is None else min(left, self.device_free_bytes)
        return largest < wanted <= free + device and device < wanted

    @property
    def other_bytes(self) -> int | None:
        """Allocated, and in nothing that is known: activations, temporary and kept tensors."""
        if self.allocated_bytes is None or not any(self.held.values()):
            return None
        return max(self.allocated_bytes - sum(self.held.values()), 0)

    @property
    def is_larger(self) -> bool | None:
        """Whether the step's batch was larger than any before; None where that is not known."""
        if not self.batch or self.largest is None:
            return None
        return _count(self.batch) > _count(self.largest.shapes)

    @property
    def fits_ratio(self) -> float | None:
        """How much of the batch would have fitted, if what a step adds is in proportion to it.

        It rests on the largest batch before: its peak, and what was allocated as its step began.
        """
        if not self.is_larger or self.largest is None or self.limit_bytes is None:
            return None
        added = self.largest.peak_bytes - self.largest.start_bytes
        limit = self.limit_bytes - (self.others_bytes or 0)
        if added <= 0 or limit <= self.largest.peak_bytes:
            return None
        times = (limit - self.largest.start_bytes) / added
        ratio = times * _count(self.largest.shapes) / _count(self.batch)
        return ratio if ratio < 1 else None

    @property
    def remedy(self) -> str:
        """What to do, by what is known of the reason."""
        known = (("gpu_fragmented", self.fragmented), ("gpu_larger_batch", self.is_larger))
        return REMEDIES[next((name for name, is_so in known if is_so), "gpu_memory")]

    @property
    def text(self) -> str:
        """For people: what happened, without the rank."""
        where = [f" in {self.phase}"] if self.phase else []
        where += [f", in {self.module}"] if self.module else []
        where += [f" at step {self.step}"] if self.step is not None else []
        where += [f" ({frame_text(self.line)})"] if self.line else []
        said = "; ".join(part for part in (self._sizes(), self._batch_text()) if part)
        return f"out of GPU memory{''.join(where)}" + (f": {said}" if said else "")

    def _sizes(self) -> str:
        """`2.00 GiB wanted, 79.0 GiB of 80.0 GiB allocated (optimizer state 24.0 GiB, ...)`."""
        limit = self.limit_bytes or self.device_total_bytes
        of = f" of {bytes_text(limit)}" if limit is not None else ""
        sizes = ((self.requested_bytes, " wanted"), (self.allocated_bytes, f"{of} allocated"))
        parts = [f"{bytes_text(n)}{what}" for n, what in sizes if n is not None]
        known = [(n, name.replace("_", " ")) for name, n in self.held.items() if n]
        known += [] if self.other_bytes is None else [(self.other_bytes, "activations and others")]
        ordered = sorted(known, key=lambda each: -each[0])
        held = ", ".join(f"{name} {bytes_text(size)}" for size, name in ordered)
        return ", ".join(parts) + (f" ({held})" if held else "")

    def _batch_text(self) -> str:
        """`the batch was 64 x 4096, the largest before 64 x 2048 with a peak of 61.0 GiB`."""
        if not self.batch:
            return ""
        said = f"the batch was {shapes_text(self.batch)}"
        if self.largest is None:
            return f"{said}, the first one"
        if not self.is_larger:
            return f"{said}, no larger than one before"
        before, peak = shapes_text(self.largest.shapes), bytes_text(self.largest.peak_bytes)
        return f"{said}, the largest before {before} with a peak of {peak}"


def shapes_text(shapes: Shapes) -> str:
    """`64 x 2048`, and several beside each other."""
    return ", ".join(" x ".join(map(str, shape)) or "one number" for shape in shapes[:3])


def failed_allocations(run: RunPaths) -> Iterator[tuple[str, int, GpuOutOfMemory]]:
    """(host, pid, the last allocation that failed) of each process that noted one."""
    for host, pid, content in run_files.read_of_processes(run.out_of_memory_files(), _FILE_LIMIT):
        for last in run_files.objects(run_files.entries(content.get("failed"))[-1:]):
            count = max(run_files.integer(content.get("count")) or 1, 1)
            yield host, pid, _parse(last, count=count)


def parse_torch_message(message: str) -> GpuOutOfMemory | None:
    """What the text of `torch.OutOfMemoryError` tells; None for another text.

    Source: c10/cuda/CUDACachingAllocator.cpp, where it is put together.
    """
    if not _IS_CUDA.search(message):
        return None
    found = {name: _sum_bytes(re.findall(pattern, message)[:1]) for name, pattern in _SAID.items()}
    cached, allocated = found.pop("cached_bytes"), found["allocated_bytes"]
    if allocated is not None and cached is not None:
        found["reserved_bytes"] = allocated + cached
    found["limit_bytes"] = found["limit_bytes"] or found["device_total_bytes"]
    found["others_bytes"] = _sum_bytes(re.findall(_OTHERS, message))
    return GpuOutOfMemory(**found)  # type: ignore[arg-type]


def _sum_bytes(said: Iterable[tuple[str, str]]) -> int | None:
    """Of numbers with their units; None where none is one."""
    sizes = [float(n) * _UNITS[unit] for n, unit in said if n.replace(".", "", 1).isdigit()]
    known = [round(size) for size in sizes if size < _SIZE_LIMIT]
    return sum(known) if known else None


def _parse(content: Mapping[str, Any], *, count: int) -> GpuOutOfMemory:
    names = ("requested", "limit", "device_total", "device_free", "allocated", "reserved", "peak",
             "free_cached", "largest_free", "private_pool")  # fmt: skip
    held, module = run_files.mapping(content.get("held")), run_files.text(content.get("module"))
    snapshot = run_files.text(content.get("snapshot")) or ""
    # A name in the run's own folder, never a path out of it.
    is_name = re.fullmatch(r"[\w.-]{1,200}\.pickle", snapshot) is not None
    line = parse_frames([content.get("line")])
    return run_files.read_record(
        GpuOutOfMemory, content,
        **{f"{name}_bytes": _size(content.get(f"{name}_bytes")) for name in names},
        others_bytes=None,
        held={n: size for n in _HELD if (size := _size(held.get(n))) is not None},
        module=module and module[:200],
        line=line[0] if line else own_frame(parse_frames(content.get("frames")) or ()),
        batch=_shapes(content.get("batch")), largest=_largest(content.get("largest")),
        snapshot=snapshot if is_name else None, count=count,
    )  # fmt: skip


def _largest(content: object) -> LargestBatch | None:
    said = run_files.mapping(content)
    start, peak = _size(said.get("start_bytes")), _size(said.get("peak_bytes"))
    shapes = _shapes(said.get("shapes"))
    if start is None or peak is None or not shapes:
        return None
    step = run_files.integer(said.get("step"))
    return LargestBatch(shapes=shapes, step=step, start_bytes=start, peak_bytes=peak)


def _shapes(content: object) -> Shapes:
    shapes = [shape for shape in run_files.entries(content)[:_SHAPES] if isinstance(shape, list)]
    sizes = [[_size(size) for size in shape[:_DIMENSIONS]] for shape in shapes]
    return tuple(tuple(size for size in each if size is not None) for each in sizes)


def _count(shapes: Shapes) -> int:
    return max(sum(prod(shape) for shape in shapes), 1)


def _size(value: object) -> int | None:
    size = run_files.integer(value)
    return size if size is not None and 0 <= size < _SIZE_LIMIT else None
