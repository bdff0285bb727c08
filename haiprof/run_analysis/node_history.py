"""Reads what `haiprof node` kept of a node: counters by time, jobs, and GPUs that were held."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.safe_files import file_size
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis.run_files import (
    EventLines,
    entries,
    integer,
    note_damage,
    number,
    read_record,
    record_columns,
)
from haiprof.run_format.entities import entities_by_key, entity_name
from haiprof.run_format.layout import NodePaths
from haiprof.run_format.node_history import STATISTICS, TIERS, Tier, kept_columns, metric_of
from haiprof.run_format.reader import read_lines, read_records
from haiprof.run_format.schema import Table
from haiprof.run_format.tables import COUNTER_TABLES

HISTORY_SCHEMA = {
    "time_ns": pl.Int64,  # Unix time at which it begins
    **dict.fromkeys(("source", "entity", "metric", "unit"), pl.String),  # no entity: the node
    **dict.fromkeys(STATISTICS, pl.Float64),
}
_UNUSED_NS = 600 * NS_PER_S  # a GPU that was held so long, and did nothing in it, is called unused


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenJob:
    """A job that was seen, with or without haiprof."""

    start_wall_ns: int | None
    end_wall_ns: int | None  # None where it runs, or nobody saw its end
    uid: int | None
    pid: int | None
    command: str
    run: str | None  # its run directory; None for a job without haiprof
    process_count: int | None  # processes at the most, once it has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGpu:
    """A GPU in whose memory a process was."""

    gpu: int
    pid: int
    uid: int | None
    command: str
    start_wall_ns: int
    end_wall_ns: int | None  # None where it is held still, or nobody saw the end
    utilization_mean_ratio: float | None
    utilization_max_ratio: float | None
    unused: bool  # whether it did nothing in ten minutes or more


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What was kept of a node."""

    host: str
    is_recording: bool
    counters: pl.DataFrame  # as `HISTORY_SCHEMA` says
    jobs: Sequence[SeenJob]
    held_gpus: Sequence[HeldGpu]
    events: Sequence[Mapping[str, Any]]  # clocks that were set, full disks, agents' starts and ends
    cpu_ratio: float | None  # of a core, that the agent itself took since it was last started
    peak_rss_bytes: int | None  # its resident memory at most
    size_bytes: int
    whole_bytes: int | None  # what it will be once all tiers are full
    notes: Sequence[str]


def read_node(node: NodePaths, *, since_ns: int, until_ns: int, step_ns: int) -> NodeRecord:
    """What was kept of a node between two Unix times; a row of counters stands for a `step_ns`."""
    read = [read_lines(path) for path in (node.earlier(node.seen), node.seen)]
    lines = tuple(line for own, _ in read for line in own)
    events = EventLines(lines=lines, notes=tuple(note for _, damaged in read for note in damaged))
    counters, damaged = read_history(node, since_ns=since_ns, until_ns=until_ns, step_ns=step_ns)
    cost, start = events.last("agent_cost"), events.last("agent_start").get("wall_ns")
    elapsed_ns = (integer(cost.get("wall_ns")) or 0) - (integer(start) or 0)
    cpu_ns = integer(cost.get("cpu_ns"))
    return NodeRecord(
        host=node.root.name, is_recording=_is_locked(node.lock), counters=counters,
        jobs=[job for job in seen_jobs(lines) if (job.end_wall_ns or since_ns) >= since_ns],
        held_gpus=[h for h in held_gpus(node, lines) if (h.end_wall_ns or since_ns) >= since_ns],
        events=[line for line in lines if line.get("type") in _EVENTS],
        cpu_ratio=cpu_ns / elapsed_ns if cpu_ns is not None and elapsed_ns > 0 else None,
        peak_rss_bytes=integer(cost.get("peak_rss_bytes")),
        size_bytes=sum(file_size(path) or 0 for path in node.root.iterdir()),
        whole_bytes=integer(events.last("sizes").get("whole_bytes")),
        notes=[*events.notes, *damaged],
    )  # fmt: skip


_EVENTS = ("agent_start", "agent_end", "clock_set", "disk_full", "disk_again")


def read_history(
    node: NodePaths, *, since_ns: int, until_ns: int, step_ns: int
) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Counters in steps of time, from the coarsest tier that is fine enough, and damage.

    What that one does not have yet, the time that its last row begins, is taken from finer ones.
    A mean is that of the rows' means, each counted by its samples.
    """
    frames, notes = [pl.DataFrame(schema=HISTORY_SCHEMA)], list[str]()
    for table in COUNTER_TABLES:
        first_ns, parts = since_ns, list[pl.DataFrame]()
        for tier in reversed([tier for tier in TIERS if tier.interval_ns <= step_ns] or TIERS[:1]):
            rows, damaged = _read_tier(node, table, tier)
            notes += damaged
            rows = rows.filter(pl.col("time_ns").is_between(first_ns, until_ns))
            last_ns = rows["time_ns"].max()
            if isinstance(last_ns, int) and tier is not TIERS[0]:
                rows, first_ns = rows.filter(pl.col("time_ns") < last_ns), last_ns
            parts.append(rows)
        whole = pl.concat(parts)
        if whole.height:
            frames.append(_in_steps(whole, table, step_ns))
    return pl.concat(frames), tuple(notes)


def _read_tier(node: NodePaths, table: Table, tier: Tier) -> tuple[pl.DataFrame, list[str]]:
    """All rows of a tier, wide: a column for each statistic of each metric."""
    names = [metric_of(column)[0] for column in kept_columns(table)]
    columns = [f"{name}.{statistic}" for name in names for statistic in STATISTICS]
    schema: dict[str, Any] = {"time_ns": pl.Int64, "sample_count": pl.UInt32, "entity": pl.String}
    schema |= dict.fromkeys(columns, pl.Float64)
    frames, notes = [pl.DataFrame(schema=schema)], list[str]()
    for _, path in node.history_files(table.name, tier.name):
        with note_damage(notes):
            records = read_records(path)
            notes += records.notes
            found = record_columns(records)
            known = entities_by_key(entries(records.header.get("entities")))
            entities = [
                entity_name(known.get(tuple(map(int, key)), {})) or " ".join(map(str, key)) or None
                for key in zip(*(found[key] for key in table.keys), strict=True)
            ] if table.keys else [None] * records.count  # fmt: skip
            values = {}
            for name in columns:
                stored = name if name in found else f"{name.rpartition('.')[0]}.value"
                if stored in found:
                    values[name] = pl.Series(found[stored].astype("f8")).fill_nan(None)
            fixed = {name: found[name] for name in ("time_ns", "sample_count")}
            entity = {"entity": pl.Series(entities, dtype=pl.String)}
            frames.append(pl.DataFrame({**fixed, **entity, **values}))
    return pl.concat(frames, how="diagonal_relaxed").select(*schema), notes


def _in_steps(rows: pl.DataFrame, table: Table, step_ns: int) -> pl.DataFrame:
    """One row for each metric of each entity in each step."""
    weight = pl.col("sample_count")
    metrics = dict(metric_of(column) for column in kept_columns(table))
    means = [pl.col(f"{name}.mean") for name in metrics]
    step = (pl.col("time_ns") // step_ns * step_ns).alias("time_ns")
    wide = rows.group_by(step, "entity").agg(
        *((mean * weight).sum() / weight.filter(mean.is_not_null()).sum() for mean in means),
        *(pl.col(f"{name}.min").min() for name in metrics),
        *(pl.col(f"{name}.max").max() for name in metrics),
    ).sort("time_ns", "entity")  # fmt: skip
    long = [
        wide.select(
            "time_ns", pl.lit(table.name).alias("source"), "entity", pl.lit(name).alias("metric"),
            pl.lit(unit).alias("unit"),
            *(pl.col(f"{name}.{each}").fill_nan(None).alias(each) for each in STATISTICS),
        ).filter(pl.col("mean").is_not_null())
        for name, unit in metrics.items()
    ]  # fmt: skip
    return pl.concat(long).cast(HISTORY_SCHEMA)  # type: ignore[arg-type]


def seen_jobs(lines: Iterable[Mapping[str, Any]]) -> list[SeenJob]:
    """Jobs by their start; one that a later agent found again is the same."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line.get("type") == "job_start":
            found.setdefault(str(line.get("job")), {}).update(line)
        elif line.get("type") == "job_end" and str(line.get("job")) in found:
            end = {"end": line.get("wall_ns"), "process_count": line.get("process_count")}
            found[str(line["job"])].update(end)
    jobs = (read_record(SeenJob, x, end_wall_ns=integer(x.get("end"))) for x in found.values())
    return sorted(jobs, key=lambda job: job.start_wall_ns or 0)


def held_gpus(node: NodePaths, lines: Iterable[Mapping[str, Any]]) -> list[HeldGpu]:
    """Who held each GPU, and how busy it was meanwhile."""
    begun: dict[tuple[int, int], Mapping[str, Any]] = {}
    spans: list[tuple[Mapping[str, Any], int | None]] = []
    now_ns = 0
    for line in lines:
        now_ns = integer(line.get("wall_ns")) or now_ns
        key = (integer(line.get("gpu")) or 0, integer(line.get("pid")) or 0)
        if line.get("type") == "gpu_held":
            begun.setdefault(key, line)
        elif line.get("type") == "gpu_released" and key in begun:
            spans.append((begun.pop(key), now_ns))
    spans += [(line, None) for line in begun.values()]
    if not spans:
        return []
    gpu = next(table for table in COUNTER_TABLES if table.name == "gpu")
    tiers = {tier: _read_tier(node, gpu, tier)[0] for tier in TIERS[1:]}
    return [_measure_use(line, end_ns, tiers, now_ns) for line, end_ns in spans]


def _measure_use(
    line: Mapping[str, Any], end_ns: int | None, tiers: Mapping[Tier, pl.DataFrame], now_ns: int
) -> HeldGpu:
    start_ns, gpu = integer(line.get("wall_ns")) or 0, integer(line.get("gpu")) or 0
    last_ns = end_ns or now_ns
    tier = TIERS[1] if last_ns - start_ns < TIERS[1].kept_ns else TIERS[2]
    during = pl.col("time_ns").is_between(start_ns, last_ns)
    names = ["utilization_ratio.mean", "utilization_ratio.max"]
    inside = tiers[tier].filter(during, pl.col("entity") == f"gpu {gpu}").drop_nulls(names)
    (mean, most), weight = map(pl.col, names), pl.col("sample_count").cast(pl.Float64)
    weighted, highest = inside.select((mean * weight).sum() / weight.sum(), most.max()).row(0)
    return read_record(
        HeldGpu, line, gpu=gpu, pid=integer(line.get("pid")) or 0, start_wall_ns=start_ns,
        end_wall_ns=end_ns, utilization_mean_ratio=number(weighted),
        utilization_max_ratio=number(highest),
        unused=highest == 0 and last_ns - start_ns >= _UNUSED_NS,
    )  # fmt: skip


def _is_locked(path: Path) -> bool:
    """Whether an agent of this machine writes there now."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
