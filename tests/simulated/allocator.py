"""The caching allocator of a simulated GPU: segments, blocks, splits, retries, history, observers.

It follows c10/cuda/CUDACachingAllocator.cpp as far as its counts and snapshots show: sizes are
rounded to 512 bytes, small ones live in segments of 2 MiB, others below 10 MiB in segments of
20 MiB, larger ones in segments of their own; a free block is the smallest that fits, is split, and
is joined with its neighbours when freed; segments without a block in use go back to the device
before an allocation fails.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
_ROUND, _SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT = 512, MIB, 2 * MIB, 20 * MIB
_OWN_SEGMENT = 10 * MIB
Observer = Callable[[int, int, int, int], None]


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    requested: int = 0
    used: bool = False
    frames: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Segment:
    """What was taken from the device."""

    address: int
    size: int
    small: bool
    blocks: list[Block]


class Allocator:
    """Of one device."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = self.limit_bytes = total_bytes
        self.foreign_bytes = 0
        """Of other processes."""
        self.segments: list[Segment] = []
        self.observers: list[Observer] = []
        self.history: list[dict[str, Any]] | None = None
        self._entries = 0
        self._next = 0x7F0000000000
        self.peak = self.retries = self.failures = self.made = 0

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return sum(b.size for s in self.segments for b in s.blocks if b.used)

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(s.size for s in self.segments)

    @property
    def device_free(self) -> int:
        """Bytes that nobody has taken."""
        return self.total_bytes - self.foreign_bytes - self.reserved

    def malloc(self, requested: int) -> Block | None:
        """A block; None where no memory is left: the observers were told."""
        size = max(-(-requested // _ROUND) * _ROUND, _ROUND)
        small = size <= _SMALL
        block = self._find(size, small)
        if block is None and not self._grow(size, small):
            self.retries += 1
            self._release()
            if not self._grow(size, small):
                self.failures += 1
                self._note("oom", size, 0, device_free=self.device_free)
                for observer in self.observers:
                    observer(0, _segment_bytes(size, small), self.limit_bytes, self.device_free)
                return None
        block = block or self._find(size, small)
        assert block is not None
        block.used, block.requested, block.frames = True, requested, self._frames()
        self.made += 1
        self._note("alloc", size, block.address)
        self.peak = max(self.peak, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """A block is not used any more."""
        self._note("free_requested", block.size, block.address)
        self._note("free_completed", block.size, block.address)
        block.used, block.frames = False, []
        segment = next(s for s in self.segments if any(b is block for b in s.blocks))
        joined: list[Block] = []
        for each in segment.blocks:
            if joined and not each.used and not joined[-1].used:
                joined[-1].size += each.size
            else:
                joined.append(each)
        segment.blocks = joined

    def _find(self, size: int, small: bool) -> Block | None:
        """The smallest free block that fits, split where enough is left."""
        free = [(b.size, b.address, s, b) for s in self.segments if s.small == small
                for b in s.blocks if not b.used and b.size >= size]  # fmt: skip
        if not free:
            return None
        _, _, segment, block = min(free, key=lambda each: each[:2])
        left = block.size - size
        if left >= _ROUND if small else left > _SMALL:
            block.size = size
            rest = Block(block.address + size, left)
            segment.blocks.insert(segment.blocks.index(block) + 1, rest)
        return block

    def _grow(self, size: int, small: bool) -> bool:
        """Takes a segment; whether there was room."""
        wanted = _segment_bytes(size, small)
        if wanted > self.device_free or self.reserved + wanted > self.limit_bytes:
            return False
        self._note("segment_alloc", wanted, self._next)
        self.segments.append(Segment(self._next, wanted, small, [Block(self._next, wanted)]))
        self._next += wanted
        return True

    def _release(self) -> None:
        """Segments that nobody uses go back to the device."""
        for segment in [s for s in self.segments if not any(b.used for b in s.blocks)]:
            self._note("segment_free", segment.size, segment.address)
            self.segments.remove(segment)

    # -- what torch.cuda tells of it ------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """As `torch.cuda.memory_stats`, the keys that are of use here."""
        split = sum(b.size for s in self.segments for b in s.blocks
                    if not b.used and len(s.blocks) > 1)  # fmt: skip
        return {
            "allocated_bytes.all.current": self.allocated, "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved, "num_alloc_retries": self.retries,
            "inactive_split_bytes.all.current": split, "num_ooms": self.failures,
            "allocation.all.allocated": self.made,
        }  # fmt: skip

    def segment_list(self) -> list[dict[str, Any]]:
        """As `torch.cuda.memory_snapshot`."""
        return [
            {
                "device": 0, "address": s.address, "total_size": s.size, "stream": 0,
                "segment_type": "small" if s.small else "large", "segment_pool_id": (0, 0),
                "allocated_size": sum(b.size for b in s.blocks if b.used),
                "active_size": sum(b.size for b in s.blocks if b.used),
                "requested_size": sum(b.requested for b in s.blocks if b.used),
                "is_expandable": False, "frames": [],
                "blocks": [
                    {"address": b.address, "size": b.size, "requested_size": b.requested,
                     "state": "active_allocated" if b.used else "inactive", "frames": b.frames}
                    for b in s.blocks
                ],
            }
            for s in self.segments
        ]  # fmt: skip

    def snapshot(self, *_: object) -> dict[str, Any]:
        """As `torch.cuda.memory._snapshot`."""
        return {
            "segments": self.segment_list(),
            "device_traces": [list(self.history or [])],
            "allocator_settings": {"expandable_segments": False},
            "external_annotations": [],
        }

    def record_history(
        self, enabled: str | None = "all", *, max_entries: int = sys.maxsize, **_: object
    ) -> None:
        """As `torch.cuda.memory._record_memory_history`."""
        self.history = None if enabled is None else []
        self._entries = max_entries

    def _note(self, action: str, size: int, address: int, **more: int) -> None:
        if self.history is None:
            return
        del self.history[: max(len(self.history) - self._entries + 1, 0)]
        self.history.append(
            {"action": action, "addr": address, "size": size, "stream": 0,
             "time_us": time.time_ns() // 1000, "frames": self._frames(), **more}
        )  # fmt: skip

    def _frames(self) -> list[dict[str, Any]]:
        """The stack of whoever allocates, the innermost first; none without a history."""
        found: list[dict[str, Any]] = []
        frame: Any = sys._getframe(2)
        while frame is not None and self.history is not None:
            code = frame.f_code
            if code.co_filename != __file__:
                place = {"filename": code.co_filename, "line": frame.f_lineno}
                found.append({**place, "name": code.co_name})
            frame = frame.f_back
        return found


def _segment_bytes(size: int, small: bool) -> int:
    """What the device is asked for: `get_allocation_size`."""
    if size < _OWN_SEGMENT:
        return _SMALL_SEGMENT if small else _LARGE_SEGMENT
    return -(-size // (2 * MIB)) * 2 * MIB
