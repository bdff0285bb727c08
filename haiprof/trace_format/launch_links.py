"""Joins GPU events with their calls in traces that have no correlations, by other numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import polars as pl

from haiprof.trace_format.kineto.columns import exact_ns
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.events import TEXTS
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.launch_checks import LAUNCHES, Finding, count_text
from haiprof.trace_format.nsight import is_nsight_export

_STARTS_WORK = r"Launch|Memcpy|Memset"
_TOLERANCE_NS = 1_000
_ARROW = b"ac2g"


class _Arrow(msgspec.Struct):
    """One end of an arrow from a call to a GPU event."""

    ph: str = ""
    id: int = -1
    pid: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tid: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    ts: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"0"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedLaunches:
    """GPU events and calls with `correlation` from whatever number joins them."""

    gpu: pl.DataFrame
    runtime: pl.DataFrame
    findings: tuple[Finding, ...] = ()


def link_launches(gpu: pl.DataFrame, runtime: pl.DataFrame, path: Path) -> LinkedLaunches:
    """Joins GPU events with calls by correlation, else by External id, else by the file's arrows.

    One kind of number counts for the whole trace: numbers of two kinds meet by chance. Correlations
    do where they join half of the events, or more than External ids do. Another number is taken
    where the GPU event begins after the call that it names; it is of no use where that fails for
    half of the events.

    Source: Kineto of 2022 and 2023 wrote the correlation as External id; TraceLens
    (trace_to_tree.py) reads such traces by External id and by arrows.
    """
    unchanged = LinkedLaunches(gpu=gpu, runtime=runtime)
    if gpu.is_empty():
        return unchanged
    known = runtime.filter(pl.col("correlation") > 0)
    joined = len(gpu.join(known, on="correlation", how="semi"))
    if 2 * joined >= len(gpu):
        return unchanged
    works = runtime.filter(pl.col("name").cast(pl.String).str.contains(_STARTS_WORK))
    calls = works.select("event", "ts_ns", id="external_id")
    events = gpu.select("event", "ts_ns", id="external_id")
    by = "External id"
    pairs, refused = _in_time(_pairs(events, calls))
    if joined >= len(pairs) and joined:
        return unchanged
    if pairs.is_empty() and len(works) and not is_nsight_export(path):
        pairs, refused = _in_time(_pairs(*_by_arrows(gpu, works, path)))
        by = "the arrows between them"
    found = []
    if len(pairs):
        found.append(Finding(
            check="linked_without_correlation",
            count=len(pairs),
            text=f"correlations do not join kernels with their launches; {len(pairs):,} of "
            f"{len(gpu):,} were joined by {by}",
            effect="launches and operators are known of these",
            answers=LAUNCHES,
            is_fault=False,
        ))  # fmt: skip
    alone = len(gpu) - len(pairs)
    if alone:
        why = f", {refused:,} of them before the call that their number names" if refused else ""
        found.append(Finding(
            check="no_launch_known",
            count=alone,
            text=f"{count_text(alone, 'GPU event')} of {len(gpu):,} cannot be joined to a launch"
            f"{why}",
            effect="their launches, operators and steps are unknown: no launch delay, no cause of "
            "idle time and no operator's GPU time rests on them",
            answers=(*LAUNCHES, "steps", "efficiency"),
        ))  # fmt: skip
    if pairs.is_empty():
        return LinkedLaunches(gpu=gpu, runtime=runtime, findings=tuple(found))
    number = pairs.with_columns(link=pl.col("call").rank("dense").cast(pl.Int64))
    return LinkedLaunches(
        gpu=_with_number(gpu, number.select("event", "link")),
        runtime=_with_number(runtime, number.select("link", event="call").unique("event")),
        findings=tuple(found),
    )


def _with_number(table: pl.DataFrame, numbers: pl.DataFrame) -> pl.DataFrame:
    joined = table.join(numbers, on="event", how="left", maintain_order="left")
    return joined.with_columns(correlation="link").select(table.columns)


def _pairs(events: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """`event`, `ts_ns`, `call`, `call_ns` of what has one number.

    An operator's number is that of all its calls and kernels: then the nth belongs to the nth,
    where there are as many of both. All nodes of a graph belong to its one call.
    """
    size, nth = pl.len().over("id").alias("size"), pl.int_range(pl.len()).over("id").alias("nth")
    own = events.drop_nulls("id").sort("ts_ns", "event").select("event", "ts_ns", "id", size, nth)
    known = calls.drop_nulls("id").sort("ts_ns", "event").select(
        "id", size, nth, call="event", call_ns="ts_ns"
    )  # fmt: skip
    alone = own.join(known.filter(size=1).drop("size", "nth"), on="id")
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
    """GPU events and calls with the number of the arrow that ends or begins at each.

    The arrows are read from the file: only traces without any other number need them.
    """
    found = []
    for piece in event_texts(TraceText(path)):
        for raw in TEXTS.decode(b"[" + piece + b"]"):
            text = bytes(raw)
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
