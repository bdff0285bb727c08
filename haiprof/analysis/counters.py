"""The frame of counters: one row per sample and metric, counters turned into rates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.analysis.device import Floats
from haiprof.analysis.nesting import Ints
from haiprof.analysis.records import integer, read_table, record_columns, text
from haiprof.analysis.run import NodeFiles, RunFiles
from haiprof.errors import RunFormatError
from haiprof.rundir import schema
from haiprof.rundir.reader import RecordFile
from haiprof.units import NS_PER_S

COUNTER_SCHEMA = {
    "time_ns": pl.Int64,
    "host": pl.String,
    "source": pl.String,
    "rank": pl.Int64,
    "gpu": pl.Int64,
    "metric": pl.String,
    "unit": pl.String,
    "value": pl.Float64,
}
SOURCES = (schema.HOST, schema.PROCESS, schema.GPU)
_TIME_LIMIT_NS = 1 << 61  # a sample's time beyond this is damage, and would overflow as Unix time

# What a counter of ns per ns is called; others of its kind become ratios under their own name.
_RATES_OF_NS = {
    "cpu_ns": ("cpu_cores", "cores"),
    "cpu_main_ns": ("cpu_main_cores", "cores"),
}
_CPU_STATES = ("cpu_user_ns", "cpu_system_ns", "cpu_idle_ns", "cpu_iowait_ns", "cpu_steal_ns")
_CPU_BUSY = ("cpu_user_ns", "cpu_system_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Samples:
    """Records of one source, by key and time."""

    time_ns: Ints
    """On the records' own clock."""
    key: Ints | None
    """Process or GPU; null where the source is the node."""
    columns: Mapping[str, Floats]
    """NaN where missing."""
    follows: npt.NDArray[np.bool_]
    """Whether the row before is an earlier sample of the same key."""


def counter_frame(run: RunFiles) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Counters of all nodes by time, and notes on files that could not be read.

    Returns:
        `time_ns` (Unix time), `host`, `source` (`host`, `process` or `gpu`), `rank` (of a process;
        of a GPU that one rank uses), `gpu` (NVML index), `metric`, `unit`, `value`. Gauges are as
        stored. Counters are rates since the sample before, at the later time: `..._per_s`,
        `cpu_utilization_ratio` (user and system of all CPUs), `cpu_cores` (of a process with its
        children), `..._ratio`. No row where a value is missing, or a counter went backwards.
    """
    frames, notes = [pl.DataFrame(schema=COUNTER_SCHEMA)], []
    for node in run.nodes:
        for table in SOURCES:
            path = node.paths.records(table.name)
            if not os.path.lexists(path):
                continue
            try:
                records = read_table(path, table)
            except RunFormatError as error:
                notes.append(str(error))
                continue
            notes += records.notes
            with np.errstate(all="ignore"):  # damaged values end as NaN, and those are left out
                ranks = _ranks_by_key(run, node, records)
                frames.append(_of_source(records, node.host, ranks))
    joined = pl.concat(frames)
    return joined.sort("time_ns", maintain_order=True), tuple(notes)


def _of_source(records: RecordFile, host: str, ranks: Mapping[int, int]) -> pl.DataFrame:
    """One source of one node, from one column per metric to one row per value."""
    samples = _samples(records)
    rank = gpu = None
    if samples.key is not None:
        rank = [ranks.get(key) for key in samples.key.tolist()]
        gpu = samples.key if records.table == schema.GPU.name else None
    keys = {
        "time_ns": samples.time_ns + (records.clock.wall_ns - records.clock.mono_ns),
        "rank": rank,
        "gpu": gpu,
    }
    metrics = list(_metrics(records, samples))
    wide = pl.DataFrame(
        {**keys, **{metric: value for metric, _, value in metrics}},
        schema_overrides=dict.fromkeys(keys, pl.Int64),
    )
    units = {metric: unit for metric, unit, _ in metrics}
    return (
        wide.unpivot(index=list(keys), variable_name="metric", value_name="value")
        .filter(pl.col("value").is_finite())
        .with_columns(
            host=pl.lit(host),
            source=pl.lit(records.table),
            unit=pl.col("metric").replace_strict(units, return_dtype=pl.String),
        )
        .select(*COUNTER_SCHEMA)
        .cast({"gpu": pl.Int64, "rank": pl.Int64})
    )


def _samples(records: RecordFile) -> _Samples:
    """Sorted by key and time; null values as NaN, damaged times left out."""
    columns = record_columns(records)
    time = columns["time_ns"]
    keys = [name for name, _, _, kind in records.columns if kind == "key"]
    key = np.asarray(columns[keys[0]], dtype=np.int64) if keys else np.zeros(len(time), np.int64)
    order = np.lexsort((time, key))
    order = order[(time[order] >= 0) & (time[order] < _TIME_LIMIT_NS)]
    time, key = time[order], key[order]
    follows = np.append(False, (np.diff(key) == 0) & (np.diff(time) > 0))[: len(time)]
    return _Samples(
        time_ns=time,
        key=key if keys else None,
        columns={name: _with_nan(values[order]) for name, values in columns.items()},
        follows=follows,
    )


def _with_nan(values: npt.NDArray[Any]) -> Floats:
    numbers = values.astype(np.float64)
    if values.dtype.kind == "i":
        numbers[values == schema.NULL_I64] = np.nan
    return numbers


def _metrics(records: RecordFile, samples: _Samples) -> Iterator[tuple[str, str, Floats]]:
    """(metric, unit, value per sample) of every column that is one."""
    elapsed = _growth(samples, samples.time_ns.astype(np.float64))
    for name, _, unit, kind in records.columns:
        values = samples.columns[name]
        if kind == "gauge":
            yield name, unit, values
        elif kind == "counter" and name not in _CPU_STATES:
            yield _rate(name, unit, _growth(samples, values), elapsed)
    if all(name in samples.columns for name in _CPU_STATES):
        yield from _cpu_shares(samples)


def _growth(samples: _Samples, values: Floats) -> Floats:
    """Since the sample before; NaN where there is none or the counter was set back."""
    growth = np.full(len(values), np.nan)
    growth[1:] = np.diff(values)
    growth[~samples.follows | (growth < 0)] = np.nan
    return growth


def _rate(name: str, unit: str, growth: Floats, elapsed_ns: Floats) -> tuple[str, str, Floats]:
    if unit == "ns":
        metric, rate_unit = _RATES_OF_NS.get(name, (f"{name.removesuffix('_ns')}_ratio", "ratio"))
        return metric, rate_unit, growth / elapsed_ns
    return f"{name}_per_s", f"{unit}/s", growth * NS_PER_S / elapsed_ns


def _cpu_shares(samples: _Samples) -> Iterator[tuple[str, str, Floats]]:
    """Shares of all CPUs' time: of each state, and of user and system together."""
    growth = {name: _growth(samples, samples.columns[name]) for name in _CPU_STATES}
    whole = np.nansum(list(growth.values()), axis=0)  # steal and iowait are not there everywhere
    whole[whole <= 0] = np.nan
    for name, grown in growth.items():
        yield f"{name.removesuffix('_ns')}_ratio", "ratio", grown / whole
    yield "cpu_utilization_ratio", "ratio", sum(growth[name] for name in _CPU_BUSY) / whole


def _ranks_by_key(run: RunFiles, node: NodeFiles, records: RecordFile) -> dict[int, int]:
    """Rank by process id, or by GPU index where exactly one rank uses that GPU."""
    here = [rank for rank in run.ranks if rank.report.get("host") == node.host]
    if not here and len(run.nodes) == 1:
        here = list(run.ranks)
    if records.table == schema.PROCESS.name:
        pids = ((integer(rank.report.get("pid")), rank.rank) for rank in here)
        return {pid: rank for pid, rank in pids if pid is not None}
    users: dict[str, set[int]] = {}
    for rank in here:
        uuid = _uuid(rank.report.get("gpu_uuid"))
        if uuid:
            users.setdefault(uuid, set()).add(rank.rank)
    found = ((index, users.get(uuid, set())) for index, uuid in _gpu_uuids(records))
    return {index: min(ranks) for index, ranks in found if len(ranks) == 1}


def _gpu_uuids(records: RecordFile) -> Sequence[tuple[int, str]]:
    """(NVML index, UUID) from the header."""
    gpus = records.header.get("gpus")
    entries = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    found = ((integer(gpu.get("index")), _uuid(gpu.get("uuid"))) for gpu in entries)
    return [(index, uuid) for index, uuid in found if index is not None and uuid]


def _uuid(value: object) -> str:
    return (text(value) or "").lower().removeprefix("gpu-")
