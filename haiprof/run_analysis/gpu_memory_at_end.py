"""GPU memory when a rank ran out of it: who held it, why there was no more, what had fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from haiprof.base.errors import TraceFormatError
from haiprof.base.units import NS_PER_S, bytes_text, ratio_text
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.gpu_memory import GpuMemorySeries, gpu_memory_series, growth_per_step
from haiprof.run_analysis.gpu_out_of_memory import GpuOutOfMemory
from haiprof.run_analysis.process_ends import ProcessEnd
from haiprof.run_analysis.run_files import RunFiles
from haiprof.trace_format.memory_snapshot import read_memory_snapshot, sum_by_line

BEFORE_NS = 60 * NS_PER_S
"""A caught failure so long before a death is worth a word."""
_SNAPSHOT_LIMIT_BYTES = 256 << 20
_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryAtEnd:
    """GPU memory of one rank when an allocation failed for the last time."""

    rank: int
    failed: GpuOutOfMemory
    reasons: tuple[str, ...]
    """Why there was no more, as far as it is known; each follows from numbers."""
    fragmented: bool | None
    """Whether the request would have fitted into what was free, were that in one piece."""
    fits_ratio: float | None
    """How much of the batch would have fitted, by the largest one before; None: not known."""
    growth_bytes_per_step: float | None
    """Of what is allocated where steps begin; None where it did not grow steadily."""
    by_line: tuple[tuple[str | None, int], ...]
    """(line of the job's own code, bytes) of blocks in use, most first; None: from before the
    history. Empty without a snapshot."""
    snapshot: str | None
    """The snapshot's path."""

    @property
    def texts(self) -> Iterator[str]:
        """For people, a line each."""
        failed = self.failed
        parts = [
            f"{bytes_text(size)} {name}"
            for name, size in (
                ("allocated", failed.allocated_bytes),
                ("reserved", failed.reserved_bytes),
                ("free on the device", failed.device_free_bytes),
                ("in other processes", failed.others_bytes),
                ("in pools of CUDA graphs", failed.private_pool_bytes or None),
            )
            if size is not None
        ]
        limit = failed.limit_bytes or failed.device_total_bytes
        of = f"; its limit is {bytes_text(limit)}" if limit is not None else ""
        if parts:
            yield f"GPU memory of rank {self.rank}: {', '.join(parts)}{of}"
        yield from self.reasons
        if self.by_line:
            named = [
                f"{line or 'before the history'} {bytes_text(size)}" for line, size in self.by_line
            ]
            yield f"in use by line: {', '.join(named)}"
        if self.snapshot:
            yield f"snapshot of the allocator: {self.snapshot} (haiprof memory-timeline FILE)"


def gpu_memory_at_end(
    files: RunFiles, death: Death | None, ends: Sequence[ProcessEnd]
) -> tuple[GpuMemoryAtEnd, ...]:
    """GPU memory of the ranks that a death began with, where it ran out shortly before."""
    if death is None:
        return ()
    own = {e.rank: e for e in ends if not e.helper and e.generation == death.generation}
    series = gpu_memory_series(files)
    found = []
    for rank in death.ranks[:8]:
        end = own.get(rank)
        failed = None if end is None else end.gpu_memory
        if failed is None or not _near(failed, death):
            continue
        found.append(_of_rank(files, rank, failed, series.get(rank)))
    return tuple(found)


def _near(failed: GpuOutOfMemory, death: Death) -> bool:
    if failed.wall_ns is None or death.died_ns is None:
        return death.cause == "out_of_memory"
    return death.died_ns - failed.wall_ns < BEFORE_NS


def _of_rank(
    files: RunFiles, rank: int, failed: GpuOutOfMemory, series: GpuMemorySeries | None
) -> GpuMemoryAtEnd:
    growth = None if series is None else growth_per_step(series)
    by_line, path = _by_line(files, failed)
    return GpuMemoryAtEnd(
        rank=rank,
        failed=failed,
        reasons=tuple(_reasons(failed, growth)),
        fragmented=failed.fragmented,
        fits_ratio=failed.fits_ratio,
        growth_bytes_per_step=growth,
        by_line=by_line,
        snapshot=path,
    )


def _reasons(failed: GpuOutOfMemory, growth: float | None) -> Iterator[str]:
    if growth is not None:
        yield (
            f"it grew from step to step: what steps begin with by {bytes_text(growth)} a step; "
            "something is kept from each"
        )
    elif failed.is_larger:
        yield _fitting(failed)
    if failed.fragmented:
        yield (
            f"fragmentation: {bytes_text(failed.free_cached_bytes)} were cached and free, more "
            f"than was asked for, in pieces of at most {bytes_text(failed.largest_free_bytes)}"
        )
    if failed.others_bytes and failed.others_bytes >= (failed.requested_bytes or 1 << 62):
        yield f"other processes on this GPU hold {bytes_text(failed.others_bytes)}"
    if failed.count > 1:
        yield f"it was the last of {failed.count} allocations that failed in this process"


def _fitting(failed: GpuOutOfMemory) -> str:
    said = "one large batch: none of that size had gone through before"
    ratio = failed.fits_ratio
    if ratio is None:
        return said
    return (
        f"{said}; {ratio_text(ratio)} of it would have fitted, if memory is in proportion to the "
        "batch (rests on the peak of the largest one before)"
    )


def _by_line(
    files: RunFiles, failed: GpuOutOfMemory
) -> tuple[tuple[tuple[str | None, int], ...], str | None]:
    if failed.snapshot is None:
        return (), None
    path = files.paths.memory / failed.snapshot
    try:
        if path.stat().st_size > _SNAPSHOT_LIMIT_BYTES:
            return (), str(path)
        held = sum_by_line(read_memory_snapshot(path))
    except (OSError, TraceFormatError):
        return (), None
    own = held.filter(held["device"] == (failed.device or 0)).head(_LINES)
    return tuple(own.select("line", "size_bytes").rows()), str(path)
