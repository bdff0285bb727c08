"""Before a death: what memory each rank held, and what it did in the last seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.errors import RunFormatError, TraceFormatError
from haiprof.base.units import NS_PER_S, bytes_text, duration_text, ratio_text
from haiprof.run_analysis.counters import counter_frame
from haiprof.run_analysis.deaths import Death, Fate
from haiprof.run_analysis.gpu_memory import GpuOutOfMemory, gpu_memory_series, growth_per_step
from haiprof.run_analysis.process_ends import ProcessEnd
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, text
from haiprof.run_analysis.step_frame import read_spans
from haiprof.run_format import schema
from haiprof.trace_format.memory_snapshot import read_memory_snapshot, sum_by_line

CAUSES = ("out_of_memory", "killed", "shared_memory_full", "crash", "gone")
"""Deaths of which memory may be the reason."""
LAST_NS = 60 * NS_PER_S
_SOON_NS = NS_PER_S // 2
_LEAST_SAMPLES = 3
_GROWN_RATIO = 0.02
_WARM_UP_STEPS = 10
_CLOCK_NS = NS_PER_S // 50  # a sample begins so long before its time at the most
_FREED_RATIO = 1.1
OWN_ADDRESS_SPACE = "of that haiprof maps about 250 MiB"
"""With glibc: stacks (24 MiB) and arenas of malloc (192) of three threads, and what is kept for
uncaught errors (32); measured by /proc/PID/maps with and without haiprof."""
_METRICS = (
    ("process", "memory_rss_bytes"), ("process", "process_count"), ("cgroup", "memory_used_bytes"),
    ("cgroup", "memory_limit_bytes"), ("host", "memory_available_bytes"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtEnd:
    """Memory of one rank before it died."""

    rank: int
    rss_bytes: int | None  # resident, with its children: the last sample before the death
    sampled_before_ns: int | None  # how long before the death that was
    most_rss_bytes: int | None
    """The same at most in the last minute: a worker that ran out of memory is gone at its end."""
    most_before_ns: int | None  # how long before the death that was
    process_count: int | None  # the rank and its descendants, when it was most
    killed_with_bytes: int | None  # resident at the kill, as the kernel's log has it
    growth_bytes_per_step: float | None
    """Over the steps of the last minute; None where it did not grow steadily, or is not known."""
    limit_bytes: int | None  # of its control group
    address_limit_bytes: int | None  # of its address space (`ulimit -v`)
    available_bytes: int | None  # of the node, at the last sample
    shm_used_bytes: int | None
    shm_bytes: int | None  # of /dev/shm, after its end

    @property
    def text(self) -> str:
        """For people."""
        size, before = self.rss_bytes, self.sampled_before_ns or 0
        if (self.most_rss_bytes or 0) > _FREED_RATIO * (size or 0):  # it frees what it had, then
            size, before = self.most_rss_bytes, self.most_before_ns or 0
        when = f"{duration_text(before)} before its end" if before >= _SOON_NS else "at its end"
        whose = " with its child processes" if (self.process_count or 0) > 1 else ""
        of_shm = self.shm_used_bytes if self.shm_bytes else None
        sizes = (
            (self.killed_with_bytes or None, "{} resident at the kill"),
            (size, f"{{}} resident{whose} {when}"),
            (self.growth_bytes_per_step or None, "growing by {} a step"),
            (self.limit_bytes or None, "limit of its control group {}"),
            (self.address_limit_bytes or None, "limit of its address space {} (ulimit -v: what it "
             f"has mapped counts, resident or not; {OWN_ADDRESS_SPACE})"),
            (self.available_bytes, "{} available on the node"),
            (of_shm, f"/dev/shm {{}} of {bytes_text(self.shm_bytes)}"),
        )  # fmt: skip
        parts = [said.format(bytes_text(round(n))) for n, said in sizes if n is not None]
        return f"memory of rank {self.rank}: {', '.join(parts)}" if parts else ""


def memory_at_end(
    files: RunFiles, death: Death | None, ends: Sequence[ProcessEnd],
    steps: Callable[[], pl.DataFrame],
) -> tuple[MemoryAtEnd, ...]:  # fmt: skip
    """Memory of the ranks that a death began with, where memory may be its reason."""
    if death is None or death.cause not in CAUSES or death.died_ns is None:
        return ()
    own = {e.rank: e for e in ends if not e.helper and e.generation == death.died_in}
    hosts = sorted({end.host for rank, end in own.items() if rank in death.ranks})
    between = (death.died_ns - LAST_NS, death.died_ns + NS_PER_S)
    frame = counter_frame(files, between=between, hosts=hosts, metrics=list(_METRICS))
    found = [_of_rank(rank, own[rank], frame, death.died_ns, steps())
             for rank in death.ranks[:8] if rank in own]  # fmt: skip
    return tuple(each for each in found if each.text)


def _of_rank(
    rank: int, end: ProcessEnd, frame: pl.DataFrame, died_ns: int, steps: pl.DataFrame
) -> MemoryAtEnd:
    node = frame.filter(pl.col("host") == end.host)
    own = node.filter(pl.col("rank") == rank)
    # What a process frees on its way out says nothing of why it died; without older ones it does.
    rss = _series(own, "memory_rss_bytes")
    rss = [each for each in rss if each[0] <= died_ns + _CLOCK_NS] or rss[:1]
    most_at, most = max(rss, key=lambda each: each[1], default=(None, None))
    counts = dict(_series(own, "process_count"))
    limit = integer((end.oom or {}).get("limit_bytes"))
    shm = end.shm or {}

    def last(series: Sequence[tuple[int, float]]) -> int | None:
        return round(series[-1][1]) if series else None

    return MemoryAtEnd(
        rank=rank, rss_bytes=last(rss),
        sampled_before_ns=max(0, died_ns - rss[-1][0]) if rss else None,
        most_rss_bytes=None if most is None else round(most),
        most_before_ns=None if most_at is None else max(0, died_ns - most_at),
        process_count=None if (n := counts.get(most_at or 0)) is None else round(n),
        killed_with_bytes=end.killed_with_bytes,
        growth_bytes_per_step=_growth(rss, steps.filter(steps["rank"] == rank)),
        limit_bytes=last(_series(node, "memory_limit_bytes")) if limit is None else limit,
        address_limit_bytes=end.address_limit_bytes,
        available_bytes=last(_series(node, "memory_available_bytes")),
        shm_used_bytes=integer(shm.get("used_bytes")), shm_bytes=integer(shm.get("total_bytes")),
    )  # fmt: skip


def _series(frame: pl.DataFrame, metric: str) -> list[tuple[int, float]]:
    rows = frame.filter((pl.col("metric") == metric) & pl.col("value").is_not_null())
    return [(time, value) for time, value in rows.sort("time_ns").select("time_ns", "value").rows()]


def _growth(series: Sequence[tuple[int, float]], steps: pl.DataFrame) -> float | None:
    """Bytes per step over the steps of the last start; None where it did not grow all along."""
    if not steps.height:
        return None
    own = steps.filter(steps["attempt"] == steps["attempt"].max())
    starts = own["start_ns"].sort().to_numpy()
    times = np.array([time for time, _ in series], dtype=np.int64)
    at = np.searchsorted(starts, times)
    until = int((own["start_ns"] + own["step_ns"]).to_numpy().max())
    trained = (at >= min(_WARM_UP_STEPS, len(starts) // 10)) & (times <= until)
    at, values = at[trained], np.array([value for _, value in series])[trained]
    if len(values) < _LEAST_SAMPLES or at[-1] <= at[0]:
        return None
    rate = float((values[-1] - values[0]) / (at[-1] - at[0]))
    halfway = np.interp((at[0] + at[-1]) / 2, at, values)
    late = 2 * float(values[-1] - halfway) / float(at[-1] - at[0])
    return None if values[-1] - values[0] < _GROWN_RATIO * values[0] or late < rate / 2 else rate


BEFORE_NS = 60 * NS_PER_S  # a caught failure so long before a death is worth a word
_SNAPSHOT_LIMIT_BYTES = 256 << 20
_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemoryAtEnd:
    """GPU memory of one rank when an allocation failed for the last time."""

    rank: int
    failed: GpuOutOfMemory
    reasons: tuple[str, ...]  # why there was no more, as far as known; each follows from numbers
    fragmented: bool | None  # as of `failed`
    fits_ratio: float | None  # as of `failed`
    growth_bytes_per_step: float | None
    """Of what is allocated where steps begin; None where it did not grow steadily."""
    by_line: tuple[tuple[str | None, int], ...]
    """(line of the job's own code, bytes) of blocks in use, most first; None: from before the
    history. Empty without a snapshot."""
    snapshot: str | None  # the snapshot's path

    @property
    def texts(self) -> Iterator[str]:
        """For people, a line each."""
        failed = self.failed
        sizes = (
            (failed.allocated_bytes, "allocated"), (failed.reserved_bytes, "reserved"),
            (failed.device_free_bytes, "free on the device"),
            (failed.others_bytes, "in other processes"),
            (failed.private_pool_bytes or None, "in pools of CUDA graphs"),
        )  # fmt: skip
        parts = [f"{bytes_text(size)} {name}" for size, name in sizes if size is not None]
        limit = failed.limit_bytes or failed.device_total_bytes
        of = f"; its limit is {bytes_text(limit)}" if limit is not None else ""
        if parts:
            yield f"GPU memory of rank {self.rank}: {', '.join(parts)}{of}"
        yield from self.reasons
        named = [f"{at or 'before the history'} {bytes_text(size)}" for at, size in self.by_line]
        if named:
            yield f"in use by line: {', '.join(named)}"
        if self.snapshot:
            yield f"snapshot of the allocator: {self.snapshot} (haiprof trace memory FILE)"


def gpu_memory_at_end(
    files: RunFiles, death: Death | None, ends: Sequence[ProcessEnd]
) -> tuple[GpuMemoryAtEnd, ...]:
    """GPU memory of the ranks that a death began with, where it ran out shortly before."""
    if death is None:
        return ()
    own = {e.rank: e for e in ends if not e.helper and e.generation == death.died_in}
    series = gpu_memory_series(files)
    found = []
    for rank in death.ranks[:8]:
        failed = own[rank].gpu_memory if rank in own else None
        if failed is None:
            continue
        is_near = death.cause == "out_of_memory"
        if failed.wall_ns is not None and death.died_ns is not None:
            is_near = death.died_ns - failed.wall_ns < BEFORE_NS
        if is_near:
            growth = growth_per_step(series[rank]) if rank in series else None
            by_line, path = _by_line(files, failed)
            found.append(GpuMemoryAtEnd(
                rank=rank, failed=failed, reasons=tuple(_reasons(failed, growth)),
                fragmented=failed.fragmented, fits_ratio=failed.fits_ratio,
                growth_bytes_per_step=growth, by_line=by_line, snapshot=path,
            ))  # fmt: skip
    return tuple(found)


def _reasons(failed: GpuOutOfMemory, growth: float | None) -> Iterator[str]:
    if growth is not None:
        yield (
            f"it grew from step to step: what steps begin with by {bytes_text(growth)} a step; "
            "something is kept from each"
        )
    elif failed.is_larger:
        fits = "" if failed.fits_ratio is None else (
            f"; {ratio_text(failed.fits_ratio)} of it would have fitted, if memory is in "
            "proportion to the batch (rests on the peak of the largest one before)"
        )  # fmt: skip
        yield f"one large batch: none of that size had gone through before{fits}"
    if failed.fragmented:
        yield (
            f"fragmentation: {bytes_text(failed.free_cached_bytes)} were cached and free, more "
            f"than was asked for, in pieces of at most {bytes_text(failed.largest_free_bytes)}"
        )
    if failed.others_bytes and failed.others_bytes >= (failed.requested_bytes or 1 << 62):
        yield f"other processes on this GPU hold {bytes_text(failed.others_bytes)}"
    if failed.count > 1:
        yield f"it was the last of {failed.count} allocations that failed in this process"


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


SECONDS = 30
AFTER_NS = 2 * NS_PER_S
_TAIL_RECORDS = 20_000
_PIECES = 300  # stretches per rank at most: what is shorter than a part of the picture is joined
_PHASES = {
    schema.DATA: "dataloader", schema.DATA_END: "dataloader", schema.DATA_ITER: "dataloader",
    schema.FORWARD: "forward", schema.FORWARD_EVAL: "forward", schema.BACKWARD: "backward",
    schema.OPTIMIZER: "optimizer", schema.SCALER: "optimizer",
}  # fmt: skip
"""All else is `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One phase, or several of a kind close together."""

    phase: str
    begin_ns: int  # Unix time
    end_ns: int


def time_range(death: Death) -> tuple[int, int] | None:
    """The Unix times between which the ranks are shown; None where the death has no time."""
    ends = [fate.ended_ns for fate in death.fates if fate.ended_ns is not None]
    last = max([*ends, death.died_ns or 0])
    if not last:
        return None
    end = min(last, (death.died_ns or last) + 60 * NS_PER_S) + AFTER_NS
    return (death.died_ns or last) - SECONDS * NS_PER_S, end


def last_seconds(files: RunFiles, death: Death, fate: Fate) -> list[Stretch]:
    """The last seconds of one rank."""
    between, process = time_range(death), (fate.host, fate.pid)
    own = [r for r in files.ranks if process == (text(r.report.get("host")), r.report.get("pid"))]
    return list(_stretches(own[-1], between)) if own and between is not None else []


def _stretches(rank: RankFiles, between: tuple[int, int]) -> Iterator[Stretch]:
    try:
        spans, clock, _ = read_spans(rank.paths.phases, first=-_TAIL_RECORDS)
    except RunFormatError:
        return
    offset = clock.wall_ns - clock.mono_ns
    begin, end = (time - offset for time in between)
    inside = (spans.end_ns > begin) & (spans.start_ns < end) & (spans.kind != schema.GC)
    order = np.argsort(spans.start_ns[inside], kind="stable")
    rows = zip(spans.kind[inside][order].tolist(), spans.start_ns[inside][order].tolist(),
               spans.end_ns[inside][order].tolist(), strict=True)  # fmt: skip
    least = (end - begin) // _PIECES
    phase, since, until = "", 0, 0
    for kind, first, last in rows:
        name = _PHASES.get(kind, "other")
        if phase and (name == phase or until - since < least) and first - until < least:
            if last - first > until - since:
                phase = name  # not that of a moment before it
            until = max(until, last)
            continue
        if phase:
            yield Stretch(phase=phase, begin_ns=since + offset, end_ns=until + offset)
        phase, since, until = name, max(first, begin), last
    if phase:
        yield Stretch(phase=phase, begin_ns=since + offset, end_ns=min(until, end) + offset)
