"""Findings about a trace; launches and kernels: joined, too early, or one without the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Ints
from haiprof.base.units import ratio_text
from haiprof.trace_format.kineto.columns import exact_ns, has_name
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.nsight import is_nsight_export

# Source: CUDA runtime API, "API synchronization behavior", and the HIP runtime's likewise.
# cudaEventQuery and cudaStreamQuery, which HTA counts among these, return at once; so do copies
# and sets with Async in their name, unless the memory is pageable, which only their times tell.
DEVICE_SYNC = r"^(?:(?:cuda|hip)DeviceSynchronize|cudaThreadSynchronize|(?:cu|hip)CtxSynchronize)$"
"""They wait for all streams of the device."""
STREAM_SYNC = r"^(?:cuda|cu|hip)(?:Stream|Event)Synchronize"
"""They wait for a stream, or for what was launched to one before an event was recorded."""
COPY_SYNC = (
    r"^(?:cuda|hip)Memcpy(?:2D|3D)?(?:(?:To|From)(?:Array|Symbol))?$|^hipMemcpyWithStream$"
    r"|^(?:cu|hip)Memcpy(?:2D|3D|(?:HtoD|DtoH|DtoD)(?:_v2)?)$"
)
"""They wait for the copy that they make."""
FREE = r"^(?:cuda|hip)Free(?:Host)?$|^cuMemFree(?:_v2)?$"
"""They wait for the device where the memory may be in use, and do much work of their own."""
BLOCKING = f"{DEVICE_SYNC}|{STREAM_SYNC}|{COPY_SYNC}"  # all that always wait


GPU_TIME = ("temporal", "overlap", "kernel_types", "kernels", "idle", "steps")
LAUNCHES = ("launches", "queue", "idle", "critical-path", "what-if")
ALL_RANKS = ("process_groups", "lateness", "stragglers", "clock_offsets")
OF_EACH_RANK = (*GPU_TIME, *LAUNCHES)  # what the events of each rank answer by themselves
EVERYTHING = tuple(dict.fromkeys((*GPU_TIME, *LAUNCHES, *ALL_RANKS, "efficiency")))


_ANSWERS: dict[str, tuple[str, ...]] = {
    "kernel_before_launch": LAUNCHES,
    "kernel_after_wait": LAUNCHES,
    "linked_without_correlation": LAUNCHES,
    "queued_before_window": ("launches", "efficiency"),
    "kernels_without_launch": (*LAUNCHES, "steps", "efficiency"),
    "no_launch_known": (*LAUNCHES, "steps", "efficiency"),
    "window_during_capture": ("launches", "queue", "efficiency"),
    "window_ended_early": (*GPU_TIME, *LAUNCHES, "efficiency"),
    "launches_without_kernel": (*GPU_TIME, *LAUNCHES, "efficiency"),
    "covering_kernels": (*GPU_TIME, "critical-path", "what-if", "process_groups", "efficiency"),
    "overlap_by_design": ("kernels",),
    "missing_ranks": ALL_RANKS,
    "different_steps": (*ALL_RANKS, "temporal", "steps", "kernels"),
    "two_clocks": ALL_RANKS,
}
"""Tables of the report, and commands, that rest on what a check found; of any other, all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is odd about a trace."""

    check: str  # name of the check, such as `covering_kernels`
    count: int  # of events, ranks or whatever was counted
    text: str  # what was seen, with its numbers
    effect: str
    """What becomes of the answers: what was corrected or left out, or what they cannot say."""
    is_fault: bool = True  # False where it is so by design, and nothing is wrong

    @property
    def answers(self) -> tuple[str, ...]:
        """Tables of the report, and commands, that rest on it."""
        return _ANSWERS.get(self.check, EVERYTHING)

    @property
    def line(self) -> str:
        """Both texts, for people."""
        return f"{self.text}: {self.effect}"


def milliseconds(ns: float) -> str:
    """A duration or an offset for a sentence."""
    us = ns / 1e3
    return f"{us:,.1f} µs" if abs(us) < 1000 else f"{us / 1e3:,.3f} ms"


def count_text(count: int, noun: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# Calls that start kernels. Copies and sets are not among them: one of no bytes starts nothing.
_LAUNCH = r"LaunchKernel|LaunchCooperativeKernel|GraphLaunch"
BEGIN_CAPTURE, END_CAPTURE = "StreamBeginCapture", "StreamEndCapture"
_TOLERANCE_NS = 1_000  # some traces have whole microseconds
_AHEAD_LEAST_NS = 5_000
"""In sound traces the last kernel ends 4 us and more before the call that waits for it."""
TO_HOST = "DtoH|DeviceToHost"
_OFFSET_SHARE, _OFFSET_LEAST = 0.01, 3
"""So many kernels before their launch are a clock that is off, and not a wrong stamp or two."""


def check_launches(gpu: pl.DataFrame, runtime: pl.DataFrame) -> tuple[pl.DataFrame, list[Finding]]:
    """GPU events on the host's clock, and what was found."""
    if gpu.is_empty() or runtime.is_empty():
        return gpu, []
    called = _call_starts(gpu, runtime)
    if called.null_count() == len(called):
        return gpu, []
    moved, offset = _clock(gpu, called, runtime)
    found = [offset, *_without_launch(gpu, called), *_without_kernel(gpu, runtime)]
    return moved, [each for each in found if each is not None]


def _call_starts(gpu: pl.DataFrame, runtime: pl.DataFrame) -> pl.Series:
    """Start of the first call with each event's correlation; null where there is none."""
    calls = runtime.select("correlation", "ts_ns").filter(pl.col("correlation") > 0)
    if calls.is_empty():
        return pl.repeat(None, len(gpu), dtype=pl.Int64, eager=True)
    # Numbers rise with time, nearly: faster than a join.
    ids, first = np.unique(calls["correlation"].to_numpy(), return_index=True)
    own: Ints = gpu["correlation"].fill_null(0).to_numpy()
    at = np.searchsorted(ids, own).clip(0, len(ids) - 1)
    found, lacks = calls["ts_ns"].gather(first[at]), ids[at] != own
    return found.set(pl.Series(lacks), None) if lacks.any() else found


def _clock(
    gpu: pl.DataFrame, called: pl.Series, runtime: pl.DataFrame
) -> tuple[pl.DataFrame, Finding | None]:
    """Kernels before their launch, or after the host has waited: wrong stamps or clocks."""
    delay = gpu["ts_ns"] - called
    early = delay < -_TOLERANCE_NS
    count, known = int(early.sum()), len(delay) - delay.null_count()
    # The largest offset by which all kernels end before the host has waited for them.
    syncs = runtime.filter(has_name(runtime, DEVICE_SYNC))
    end = (gpu["ts_ns"] + gpu["dur_ns"]).filter(called.is_not_null()).to_numpy()
    call: Ints = called.drop_nulls().to_numpy()
    order = np.argsort(call, kind="stable")
    latest = np.maximum.accumulate(end[order])
    before = np.searchsorted(call[order], syncs["ts_ns"].to_numpy()) - 1
    waited = (syncs["ts_ns"] + syncs["dur_ns"]).to_numpy()[before >= 0]
    left = np.append(waited - latest[before[before >= 0]], _after_stream_waits(gpu, runtime))
    most = int(left.min()) if len(left) else None
    if not count:
        return _clock_ahead(gpu, delay, most) if most is not None else (gpu, None)
    least = -int(delay.min())  # type: ignore[arg-type] # some are negative
    text = f"{count_text(count, 'kernel')} of {known:,} before their launch"
    text += f", by up to {milliseconds(least)}"
    moved = gpu
    if count < max(_OFFSET_LEAST, _OFFSET_SHARE * known):
        effect = "single wrong stamps: their launch delay counts as 0, all else stands"
    elif most is None or most >= least - _TOLERANCE_NS:
        moved = gpu.with_columns(pl.col("ts_ns") + least)
        reach = "" if most is None else f" and at most {milliseconds(most)}"
        effect = (
            f"the GPU's clock is at least {milliseconds(least)}{reach} behind the host's: GPU "
            f"times moved by {milliseconds(least)}, launch delays are a lower bound"
        )
    else:
        moved = gpu.with_columns(pl.when(~early.fill_null(value=False)).then("correlation"))
        effect = (
            "no single clock offset explains it, times stay as recorded and these are joined to no "
            "launch: do not rely on launch delays, queues and what the GPU waited for"
        )
    return moved, Finding("kernel_before_launch", count, text, effect)


def _clock_ahead(
    gpu: pl.DataFrame, delay: pl.Series, most: int
) -> tuple[pl.DataFrame, Finding | None]:
    """Kernels that end after the host has waited for them, which cannot be."""
    if most >= -_AHEAD_LEAST_NS:
        return gpu, None
    text = f"kernels end up to {milliseconds(-most)} after the host has waited for them"
    fits = int(delay.min()) >= -most  # type: ignore[arg-type] # some are known
    effect = (
        f"the GPU's clock is at least {milliseconds(-most)} ahead of the host's: GPU times moved "
        f"by {milliseconds(most)}, launch delays are an upper bound"
        if fits
        else "no single clock offset explains it, times stay as recorded: do not rely on launch "
        "delays, queues and what the GPU waited for"
    )
    moved = gpu.with_columns(pl.col("ts_ns") + most) if fits else gpu
    return moved, Finding("kernel_after_wait", 1, text, effect)


def _after_stream_waits(gpu: pl.DataFrame, runtime: pl.DataFrame) -> Ints:
    """From the end of what a wait for a stream or an event was for to the end of that wait.

    Which stream that was is not in the trace. It is that of a copy to the host which the thread
    started just before, as `.item()` does; on a device with one stream also that of any work, for
    an event if it was recorded after it. Two waits that contradict that may be for other streams:
    then nothing is said.
    """
    syncs = runtime.filter(has_name(runtime, STREAM_SYNC)).select("ts_ns", "dur_ns", "tid", "name")
    if syncs.is_empty():
        return np.empty(0, dtype=np.int64)
    events = gpu.filter(pl.col("correlation") > 0).select(
        "correlation", "stream", end=pl.col("ts_ns") + pl.col("dur_ns"),
        to_host=pl.col("name").cast(pl.String).str.contains(TO_HOST),
    ).unique("correlation", keep="last")  # fmt: skip
    started = runtime.select("correlation", "ts_ns", "tid", begun="ts_ns").join(
        events, on="correlation"
    )  # fmt: skip
    marks = runtime.filter(has_name(runtime, "EventRecord")).select("ts_ns", "tid", marked="ts_ns")
    waits = syncs.sort("ts_ns")
    for calls in (started, marks):
        waits = waits.join_asof(calls.sort("ts_ns"), on="ts_ns", by="tid", check_sortedness=False)
    is_event = pl.col("name").cast(pl.String).str.contains("Event")
    is_known = pl.col("to_host") & ~is_event
    if gpu["stream"].n_unique() == 1:
        is_known |= ~is_event | (pl.col("marked") > pl.col("begun"))
    sure = waits.filter(is_known).drop_nulls("end")
    left: Ints = (sure["ts_ns"] + sure["dur_ns"] - sure["end"]).to_numpy()
    late = int((left < -_AHEAD_LEAST_NS).sum())
    return left if late in (0, len(left)) or late > 2 else left[:0]


def _without_launch(gpu: pl.DataFrame, called: pl.Series) -> Iterator[Finding]:
    """Kernels without a launch: queued before the window, or calls that were lost."""
    alone = called.is_null()
    if not alone.any():
        return
    places = gpu.select("ts_ns", pl.coalesce("stream", "tid").alias("stream"), alone=alone)
    first = places.filter(~pl.col("alone")).group_by("stream").agg(first=pl.col("ts_ns").min())
    joined = places.filter("alone").join(first, on="stream", how="left")
    later = joined.filter(pl.col("ts_ns") > pl.col("first"))["ts_ns"]
    queued = int(alone.sum()) - len(later)
    if queued:
        yield Finding(
            "queued_before_window", queued,
            text=f"{count_text(queued, 'kernel')} of {len(gpu):,} launched before the window began",
            effect="they count as GPU time; no launch, step or operator is known of them",
            is_fault=False,
        )  # fmt: skip
    if len(later):
        yield Finding(
            "kernels_without_launch", len(later),
            text=f"{count_text(len(later), 'kernel')} of {len(gpu):,} without a launch call, "
            f"{_when(later, gpu)}",
            effect="records of the host were lost: their launches, operators and steps are unknown",
        )  # fmt: skip


def _without_kernel(gpu: pl.DataFrame, runtime: pl.DataFrame) -> Iterator[Finding]:
    """Launches without a kernel: captured into a graph, after the last record, or lost."""
    runtime = runtime.select("correlation", "ts_ns", "dur_ns", "tid", "name")
    launches = runtime.filter(has_name(runtime, _LAUNCH)).filter(pl.col("correlation") > 0)
    alone = launches.join(gpu.select("correlation"), on="correlation", how="anti")
    if alone.is_empty():
        return
    # A runtime call may have the driver's inside it with an id of its own, which has no kernel.
    ends = (launches["ts_ns"] + launches["dur_ns"]).to_numpy()
    starts, threads = launches["ts_ns"].to_numpy(), launches["tid"].fill_null(-1).to_numpy()
    at = np.searchsorted(starts, alone["ts_ns"].to_numpy(), side="right") - 1
    before = np.maximum(at - 1, 0)
    within = (ends[before] >= (alone["ts_ns"] + alone["dur_ns"]).to_numpy()) & (before < at)
    within &= threads[before] == alone["tid"].fill_null(-1).to_numpy()
    within &= starts[before] <= alone["ts_ns"].to_numpy()
    alone = alone.filter(~pl.Series(within))
    inside, begun = _in_capture(alone, runtime)
    captured, rest = int(inside.sum()), alone.filter(~pl.Series(inside))
    with_kernel = launches.join(gpu.select("correlation"), on="correlation", how="semi")
    last = with_kernel["ts_ns"].max() if len(with_kernel) else None
    late = pl.lit(False) if last is None else pl.col("ts_ns") > last
    tail, lost = rest.filter(late), rest.filter(~late)
    if captured:
        is_whole = bool(begun[inside].all())  # every capture is in the trace from its beginning
        yield Finding(
            "window_during_capture", captured,
            text=f"{count_text(captured, 'launch call')} while a CUDA graph was being captured: "
            "nothing ran",
            effect="not launches; the graph's kernels name the operators of these calls where it "
            "can be told which graph it was" if is_whole else "not launches; the window opened "
            "within the capture, so that the graph's kernels name no operator",
            is_fault=not is_whole,
        )  # fmt: skip
    if len(tail):
        yield Finding(
            "window_ended_early", len(tail),
            text=f"{count_text(len(tail), 'last launch call')} of {len(launches):,} without a "
            "kernel: the window ended before the GPU's records of them",
            effect="the last step's GPU time is too low; leave it out with --steps",
        )  # fmt: skip
    if len(lost):
        yield Finding(
            "launches_without_kernel", len(lost),
            text=f"{count_text(len(lost), 'launch call')} of {len(launches):,} without a kernel, "
            f"{_when(lost['ts_ns'], launches)}",
            effect="records of the GPU were lost (buffers): GPU time there is too low by up to "
            f"{ratio_text(len(lost) / len(launches))}, and counted as idle",
        )  # fmt: skip


def _in_capture(alone: pl.DataFrame, runtime: pl.DataFrame) -> tuple[Bools, Bools]:
    """Whether a capture of its thread ends after each call, and whether its beginning is known."""
    marks = runtime.filter(has_name(runtime, f"{BEGIN_CAPTURE}|{END_CAPTURE}"))
    is_end = pl.col("name").cast(pl.String).str.contains(END_CAPTURE)
    thread = pl.col("tid").fill_null(-1)
    around = alone.select("ts_ns", thread).join_asof(
        marks.select("ts_ns", thread, following=is_end),
        on="ts_ns", by="tid", strategy="forward", check_sortedness=False,
    ).join_asof(
        marks.select("ts_ns", thread, before=is_end),
        on="ts_ns", by="tid", allow_exact_matches=False, check_sortedness=False,
    )  # fmt: skip
    # Nothing before a call is no beginning either.
    before = around["before"].fill_null(value=True).to_numpy()
    return around["following"].fill_null(value=False).to_numpy(), ~before


def _when(starts: pl.Series, events: pl.DataFrame) -> str:
    """From when to when, in the time of a table."""
    first = int(events["ts_ns"].min())  # type: ignore[arg-type] # a table with rows
    low, high = (int(end) - first for end in (starts.min(), starts.max()))  # type: ignore[arg-type]
    return f"from {milliseconds(low)} to {milliseconds(high)} of the window"


_STARTS_WORK = r"Launch|Memcpy|Memset"
_ARROW = b"ac2g"


class _Arrow(msgspec.Struct):
    """One end of an arrow from a call to a GPU event."""

    ph: str = ""
    id: int = -1
    ts: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"0"))


def link_launches(
    gpu: pl.DataFrame, runtime: pl.DataFrame, path: Path
) -> tuple[pl.DataFrame, pl.DataFrame, list[Finding]]:
    """GPU events and calls with `correlation` from whatever number joins them, and what was found.

    That is their correlation, else the External id, else the number of an arrow of the file.
    One kind of number counts for the whole trace: numbers of two kinds meet by chance. Correlations
    do where they join half of the events, or more than External ids do. Another number is taken
    where the GPU event begins after the call that it names; it is of no use where that fails for
    half of the events.

    Source: Kineto of 2022 and 2023 wrote the correlation as External id; TraceLens
    (trace_to_tree.py) reads such traces by External id and by arrows.
    """
    known = runtime.filter(pl.col("correlation") > 0)
    joined = len(gpu.join(known, on="correlation", how="semi"))
    if 2 * joined >= len(gpu):  # and where there are none
        return gpu, runtime, []
    works = runtime.filter(pl.col("name").cast(pl.String).str.contains(_STARTS_WORK))
    ids = (table.select("event", "ts_ns", id="external_id") for table in (gpu, works))
    (pairs, refused), by = _in_time(_pairs(*ids)), "External id"
    if joined >= len(pairs) and joined:
        return gpu, runtime, []
    if pairs.is_empty() and len(works) and not is_nsight_export(path):
        pairs, refused = _in_time(_pairs(*_by_arrows(gpu, works, path)))
        by = "the arrows between them"
    found = []
    if len(pairs):
        found.append(Finding(
            "linked_without_correlation", len(pairs), is_fault=False,
            text=f"correlations do not join kernels with their launches; {len(pairs):,} of "
            f"{len(gpu):,} were joined by {by}",
            effect="launches and operators are known of these",
        ))  # fmt: skip
    if alone := len(gpu) - len(pairs):
        why = f", {refused:,} of them before the call that their number names" if refused else ""
        found.append(Finding(
            "no_launch_known", alone,
            text=f"{count_text(alone, 'GPU event')} of {len(gpu):,} cannot be joined to a launch"
            f"{why}",
            effect="their launches, operators and steps are unknown: no launch delay, no cause of "
            "idle time and no operator's GPU time rests on them",
        ))  # fmt: skip
    if pairs.is_empty():
        return gpu, runtime, found
    number = pairs.with_columns(link=pl.col("call").rank("dense").cast(pl.Int64))
    calls = number.select("link", event="call").unique("event")
    linked = _with_number(gpu, number.select("event", "link"))
    return linked, _with_number(runtime, calls), found


def _with_number(table: pl.DataFrame, numbers: pl.DataFrame) -> pl.DataFrame:
    joined = table.join(numbers, on="event", how="left", maintain_order="left")
    return joined.with_columns(correlation="link").select(table.columns)


def _pairs(events: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """`event`, `ts_ns`, `call`, `call_ns` of what has one number; of an operator's nth with nth."""
    size, nth = pl.len().over("id"), pl.int_range(pl.len()).over("id")
    own, known = (
        table.drop_nulls("id").sort("ts_ns", "event").with_columns(size=size, nth=nth)
        for table in (events, calls.with_columns(call="event", call_ns="ts_ns"))
    )
    alone = own.join(known.filter(size=1), on="id")
    several = own.join(known.filter(pl.col("size") > 1), on=["id", "size", "nth"])
    columns = ["event", "ts_ns", "call", "call_ns"]
    return pl.concat([alone.select(columns), several.select(columns)])


def _in_time(pairs: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Pairs in which the GPU event begins after its call, and how many do not."""
    after = pairs.filter(pl.col("ts_ns") >= pl.col("call_ns") - _TOLERANCE_NS)
    refused = len(pairs) - len(after)
    return (after.clear(), len(pairs)) if 2 * refused > len(pairs) else (after, refused)


def _by_arrows(
    gpu: pl.DataFrame, calls: pl.DataFrame, path: Path
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """GPU events and calls with the number of the arrow of the file that ends or begins at each."""
    found = []
    for _, texts in event_texts(TraceText(path)):
        for text in texts:
            if _ARROW not in text and b"async_cpu_to_gpu" not in text:
                continue
            try:
                found.append(msgspec.json.decode(text, type=_Arrow, strict=False))
            except msgspec.DecodeError:
                continue
    times, _ = exact_ns([bytes(each.ts) for each in found])
    ends = pl.DataFrame({
        "id": [each.id for each in found], "starts": [each.ph == "s" for each in found],
        "ts_ns": times,
    }, schema={"id": pl.Int64, "starts": pl.Boolean, "ts_ns": pl.Int64}).unique(
        ["ts_ns", "starts"], keep="none"
    )  # fmt: skip
    return tuple(
        table.unique("ts_ns", keep="none")
        .join(ends.filter(starts=is_call), on="ts_ns", how="inner")
        .select("event", "ts_ns", "id")
        for table, is_call in ((gpu, False), (calls, True))
    )  # type: ignore[return-value] # two frames
