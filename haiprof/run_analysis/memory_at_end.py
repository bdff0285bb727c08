"""Memory when a rank died: what it held, how fast that grew, and what limit there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from haiprof.base.units import NS_PER_S, bytes_text, duration_text
from haiprof.run_analysis.counters import counter_frame
from haiprof.run_analysis.deaths import Death
from haiprof.run_analysis.process_ends import ProcessEnd
from haiprof.run_analysis.run_files import RunFiles, integer

CAUSES = ("out_of_memory", "killed", "shared_memory_full", "crash", "gone")
"""Deaths of which memory may be the reason."""
LAST_NS = 60 * NS_PER_S
_LEAST_SAMPLES = 3
_METRICS = (
    ("process", "memory_rss_bytes"), ("cgroup", "memory_used_bytes"),
    ("cgroup", "memory_limit_bytes"), ("host", "memory_available_bytes"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtEnd:
    """Memory of one rank before it died."""

    rank: int
    rss_bytes: int | None
    """Resident, with its children: the last sample."""
    sampled_before_ns: int | None
    """How long before the death that was."""
    killed_with_bytes: int | None
    """Resident at the kill, as the kernel's log has it."""
    growth_bytes_per_s: float | None
    """Over the last minute; None where it did not grow, or too few samples are there."""
    limit_bytes: int | None
    """Of its control group."""
    available_bytes: int | None
    """Of the node, at the last sample."""
    shm_used_bytes: int | None
    shm_bytes: int | None
    """Of /dev/shm, after its end."""

    @property
    def text(self) -> str:
        """For people."""
        parts = []
        if self.killed_with_bytes:
            parts.append(f"{bytes_text(self.killed_with_bytes)} resident at the kill")
        if self.rss_bytes is not None:
            parts.append(f"{bytes_text(self.rss_bytes)} with its workers "
                         f"{duration_text(self.sampled_before_ns)} before")  # fmt: skip
        if self.growth_bytes_per_s:
            parts.append(f"growing by {bytes_text(round(self.growth_bytes_per_s))}/s")
        if self.limit_bytes:
            parts.append(f"limit of its control group {bytes_text(self.limit_bytes)}")
        if self.available_bytes is not None:
            parts.append(f"{bytes_text(self.available_bytes)} available on the node")
        if self.shm_bytes and self.shm_used_bytes is not None:
            parts.append(
                f"/dev/shm {bytes_text(self.shm_used_bytes)} of {bytes_text(self.shm_bytes)}"
            )
        return f"memory of rank {self.rank}: {', '.join(parts)}" if parts else ""


def memory_at_end(
    files: RunFiles, death: Death | None, ends: Sequence[ProcessEnd]
) -> tuple[MemoryAtEnd, ...]:
    """Memory of the ranks that a death began with, where memory may be its reason."""
    if death is None or death.cause not in CAUSES or death.died_ns is None:
        return ()
    own = {e.rank: e for e in ends if not e.helper and e.generation == death.generation}
    hosts = sorted({end.host for rank, end in own.items() if rank in death.ranks})
    between = (death.died_ns - LAST_NS, death.died_ns + NS_PER_S)
    frame, _ = counter_frame(files, between=between, hosts=hosts, metrics=list(_METRICS))
    found = [
        _of_rank(rank, end, frame, death.died_ns)
        for rank in death.ranks[:8]
        if (end := own.get(rank)) is not None
    ]
    return tuple(each for each in found if each.text)


def _of_rank(rank: int, end: ProcessEnd, frame: pl.DataFrame, died_ns: int) -> MemoryAtEnd:
    node = frame.filter(pl.col("host") == end.host)
    rss = _series(node.filter(pl.col("rank") == rank), "memory_rss_bytes")
    oom = end.oom or {}
    limit = integer(oom.get("limit_bytes"))
    limits = _series(node, "memory_limit_bytes")
    available = _series(node, "memory_available_bytes")
    shm = end.shm or {}
    return MemoryAtEnd(
        rank=rank,
        rss_bytes=round(rss[-1][1]) if rss else None,
        sampled_before_ns=max(0, died_ns - rss[-1][0]) if rss else None,
        killed_with_bytes=_killed_with(oom),
        growth_bytes_per_s=_growth(rss),
        limit_bytes=limit if limit is not None else (round(limits[-1][1]) if limits else None),
        available_bytes=round(available[-1][1]) if available else None,
        shm_used_bytes=integer(shm.get("used_bytes")),
        shm_bytes=integer(shm.get("total_bytes")),
    )


def _series(frame: pl.DataFrame, metric: str) -> list[tuple[int, float]]:
    rows = frame.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    return [(time, value) for time, value in rows.sort("time_ns").select("time_ns", "value").rows()]


def _growth(series: Sequence[tuple[int, float]]) -> float | None:
    """Bytes per second between the first and the last sample; None where it is no growth."""
    if len(series) < _LEAST_SAMPLES:
        return None
    (first, before), (last, after) = series[0], series[-1]
    rate = (after - before) * NS_PER_S / max(last - first, 1)
    return rate if rate > 0 else None


def _killed_with(oom: Mapping[str, Any]) -> int | None:
    sizes = [integer(oom.get(f"{name}_bytes")) for name in ("anonymous", "file", "shared")]
    known = [size for size in sizes if size is not None and size >= 0]
    return sum(known) if known else None
