"""A trace's device events and calls as they can be believed, with what was found on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from haiprof.trace_format.checks.finding import EVERYTHING, Finding
from haiprof.trace_format.checks.launches import check_launches
from haiprof.trace_format.checks.streams import check_streams
from haiprof.trace_format.checks.timestamps import (
    duplicate_finding,
    far_finding,
    unit_finding,
    without_duplicates,
    without_far,
    without_far_from_host,
)

_IDS = {"gpu": "correlation", "runtime": "correlation", "ops": "external_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTable:
    """A table without events that are far from all others or recorded twice."""

    name: str
    events: pl.DataFrame
    far_count: int
    duplicate_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDevice:
    """GPU events that were corrected, and what was found of them and their launches."""

    gpu: pl.DataFrame
    findings: tuple[Finding, ...]
    far_count: int
    """GPU events that were left out as far from all calls of the host."""


def check_table(name: str, events: pl.DataFrame) -> CheckedTable:
    """A table without events that are far from all others or recorded twice."""
    near = without_far(events)
    once = without_duplicates(near, _IDS[name]) if name in _IDS and len(near) else near
    return CheckedTable(
        name=name,
        events=once,
        far_count=len(events) - len(near),
        duplicate_count=len(near) - len(once),
    )


def check_device(gpu: pl.DataFrame, runtime: pl.DataFrame) -> CheckedDevice:
    """GPU events as they can be believed."""
    host = None
    if len(runtime):
        ends = runtime.select((pl.col("ts_ns") + pl.col("dur_ns")).max()).item()
        host = int(runtime["ts_ns"][0]), int(ends)
    near = without_far_from_host(gpu, host)
    cut, of_streams = check_streams(near, host)
    moved, of_launches = check_launches(cut, runtime)
    unit = unit_finding(near, runtime)
    found = (*of_streams, *of_launches, *([unit] if unit else []))
    return CheckedDevice(gpu=moved, findings=found, far_count=len(gpu) - len(near))


def all_findings(
    tables: Sequence[CheckedTable], device: CheckedDevice, notes: Sequence[str]
) -> tuple[Finding, ...]:
    """What was found of one trace."""
    counts = {table.name: table.far_count for table in tables}
    far = far_finding(counts | {"gpu": counts.get("gpu", 0) + device.far_count})
    twice = duplicate_finding({table.name: table.duplicate_count for table in tables})
    read = [
        Finding(
            check="damaged_file",
            count=1,
            text=note.partition(": ")[2] or note,
            effect="what could not be read is in no answer",
            answers=EVERYTHING,
        )
        for note in notes
    ]
    return (*read, *(each for each in (far, twice) if each), *device.findings)
