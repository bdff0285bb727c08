"""The frame of counters: one row per sample and metric, counters turned into rates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.analysis.device import Floats
from haiprof.analysis.nesting import Ints
from haiprof.analysis.records import read_table, record_columns
from haiprof.analysis.run import NodeFiles, RunFiles
from haiprof.errors import RunFormatError
from haiprof.rundir import schema
from haiprof.rundir.owners import Key, entities_by_key, entity_name, ranks_by_key
from haiprof.rundir.reader import RecordFile
from haiprof.rundir.tables import COUNTER_TABLES
from haiprof.units import NS_PER_S

COUNTER_SCHEMA = {
    "time_ns": pl.Int64,
    "host": pl.String,
    "source": pl.String,
    "entity": pl.String,
    "rank": pl.Int64,
    "gpu": pl.Int64,
    "metric": pl.String,
    "unit": pl.String,
    "value": pl.Float64,
    "flag": pl.String,
}
FLAGS = (None, "wrap", "reset", "saturated")
_WRAP, _RESET, _SATURATED = 1, 2, 3
_TIME_LIMIT_NS = 1 << 61  # a sample's time beyond this is damage, and would overflow as Unix time

# What a counter of ns per ns is called; others of its kind become ratios under their own name.
_RATES_OF_NS = {
    "cpu_ns": ("cpu_cores", "cores"),
    "cpu_main_ns": ("cpu_main_cores", "cores"),
    "cpu_throttled_ns": ("cpu_throttled_cores", "cores"),
    "disk_busy_ns": ("disk_busy_count", "count"),
    "receive_pause_ns": ("receive_paused_priority_count", "count"),
    "transmit_pause_ns": ("transmit_paused_priority_count", "count"),
}
# Counters of ns that events took, with the counter of those events: shown as the mean of one event.
_NS_OF_EVENTS = {
    "server_read_rtt_ns": "server_read_count",
    "server_read_execute_ns": "server_read_count",
    "server_write_rtt_ns": "server_write_count",
    "server_write_execute_ns": "server_write_count",
    "metadata_execute_ns": "metadata_count",
}
# Shares of one count in another.
_RATIOS = {"cpu_throttled_ratio": ("cpu_throttled_period_count", "cpu_period_count")}
_CPU_BUSY = ("cpu_user_ns", "cpu_nice_ns", "cpu_system_ns", "cpu_irq_ns", "cpu_softirq_ns")
_CPU_STATES = (*_CPU_BUSY, "cpu_idle_ns", "cpu_iowait_ns", "cpu_steal_ns")

Flags = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Records of one source, by key and time."""

    time_ns: Ints
    """On the records' own clock."""
    keys: Sequence[Key]
    """Each entity's key."""
    owner: Ints
    """Place in `keys`, of each record."""
    columns: Mapping[str, npt.NDArray[Any]]
    follows: npt.NDArray[np.bool_]
    """Whether the record before is an earlier sample of the same entity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    """One metric at every record."""

    name: str
    unit: str
    values: Floats
    """NaN where there is none."""
    flags: Flags
    """Places in `FLAGS`."""


def counter_frame(run: RunFiles) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Counters of all nodes by time, and notes on files that could not be read.

    Returns:
        `time_ns` (Unix time), `host`, `source` (the record file's name, such as `host`, `process`
        or `gpu`), `entity` (what of it, such as a port; null for the node), `rank` (of a process;
        of a GPU that one rank uses), `gpu` (NVML index), `metric`, `unit`, `value`, `flag`. Gauges
        are as stored. Counters are rates since the sample before, at the later time:
        `..._per_s`, `cpu_utilization_ratio` (of all CPUs, work of any kind), `cpu_cores` (of a
        process with its children), `..._ratio`; times of requests (`server_read_rtt_ns`) are the
        mean of those since the sample before. No row where a value is missing.

        `flag` is null but for counters at which something happened: `wrap` (it went on at 0 after
        its last bit; the rate is right), `reset` (it was set back: `value` is null), `saturated`
        (it has stopped at its highest value: `value` is null).
    """
    found, notes = counter_records(run)
    frames = [pl.DataFrame(schema=COUNTER_SCHEMA)]
    with np.errstate(all="ignore"):  # damaged values end as NaN, and those are left out
        frames += [_of_source(run, node, records) for node, records in found]
    return pl.concat(frames).sort("time_ns", maintain_order=True), notes


def counter_records(
    run: RunFiles,
) -> tuple[list[tuple[NodeFiles, RecordFile]], tuple[str, ...]]:
    """Every record file of every node that can be read, and notes on what could not."""
    found, notes = [], []
    for node in run.nodes:
        for table in COUNTER_TABLES:
            path = node.paths.records(table.name)
            if not os.path.lexists(path):
                continue
            try:
                records = read_table(path, table)
            except RunFormatError as error:
                notes.append(str(error))
                continue
            notes += records.notes
            found.append((node, records))
    return found, tuple(notes)


def _of_source(run: RunFiles, node: NodeFiles, records: RecordFile) -> pl.DataFrame:
    """One source of one node, one row per value."""
    samples = samples_of(records)
    entities = entities_of(node, records)
    names = {key: entity_name(entity) or None for key, entity in entities.items()}
    ranks = ranks_of(run, node, records, entities)
    gpu = _column_names(records, "key") == ["gpu"]
    metrics = list(_metrics(records, samples))
    shown = [np.flatnonzero(np.isfinite(m.values) | (m.flags > _WRAP)) for m in metrics]
    if not metrics or not sum(map(len, shown)):
        return pl.DataFrame(schema=COUNTER_SCHEMA)
    rows = np.concatenate(shown)
    owner = samples.owner[rows]
    which = np.repeat(np.arange(len(metrics)), [len(rows) for rows in shown])
    values = np.concatenate([m.values[at] for m, at in zip(metrics, shown, strict=True)])
    flags = np.concatenate([m.flags[at] for m, at in zip(metrics, shown, strict=True)])
    taken = partial(_taken, dtype=pl.String)
    return pl.DataFrame(
        {
            "time_ns": samples.time_ns[rows] + (records.clock.wall_ns - records.clock.mono_ns),
            "host": pl.repeat(node.host, len(rows), eager=True),
            "source": pl.repeat(records.table, len(rows), eager=True),
            "entity": taken([names.get(key) for key in samples.keys], owner),
            "rank": _taken([ranks.get(key) for key in samples.keys], owner, dtype=pl.Int64),
            "gpu": _taken([key[0] if gpu else None for key in samples.keys], owner, dtype=pl.Int64),
            "metric": taken([m.name for m in metrics], which),
            "unit": taken([m.unit for m in metrics], which),
            "value": pl.Series(values, dtype=pl.Float64).fill_nan(None),
            "flag": taken(FLAGS, flags),
        },
        schema=COUNTER_SCHEMA,
    )


def _taken(words: Sequence[Any], places: npt.NDArray[Any], *, dtype: Any) -> pl.Series:  # noqa: ANN401
    return pl.Series(words, dtype=dtype).gather(pl.Series(places, dtype=pl.UInt32))


def _column_names(records: RecordFile, kind: str) -> list[str]:
    return [name for name, _, _, own in records.columns if own == kind]


def samples_of(records: RecordFile) -> Samples:
    """Sorted by key and time; damaged times left out."""
    columns = record_columns(records)
    time = columns["time_ns"]
    keys = [columns[name].astype(np.int64) for name in _column_names(records, "key")]
    order = np.lexsort((time, *reversed(keys)))
    order = order[(time[order] >= 0) & (time[order] < _TIME_LIMIT_NS)]
    time = time[order]
    same = np.ones(max(0, len(order) - 1), dtype=bool)
    for key in keys:
        same &= np.diff(key[order]) == 0
    first = np.append(True, ~same)[: len(order)]
    heads = order[first]
    return Samples(
        time_ns=time,
        keys=[tuple(int(key[at]) for key in keys) for at in heads],
        owner=np.cumsum(first) - 1,
        columns={name: values[order] for name, values in columns.items()},
        follows=np.append(False, same & (np.diff(time) > 0))[: len(order)],
    )


def _as_numbers(values: npt.NDArray[Any]) -> Floats:
    """As floats, NaN where missing."""
    numbers = values.astype(np.float64)
    if values.dtype.kind == "i":
        numbers[values == schema.NULL_I64] = np.nan
    return numbers


def _metrics(records: RecordFile, samples: Samples) -> Iterator[_Metric]:
    """Every column that is one."""
    elapsed = np.append(np.nan, np.diff(samples.time_ns))[: len(samples.time_ns)]
    none = np.zeros(len(samples.time_ns), dtype=np.int8)
    for name, _, unit, kind in records.columns:
        values = samples.columns[name]
        end = schema.counter_end(kind)
        if kind == "gauge":
            yield _Metric(name=name, unit=unit, values=_as_numbers(values), flags=none)
        elif end is not None and name not in _CPU_STATES:
            growth, flags = _growth(values, samples.follows, *end)
            events = samples.columns.get(_NS_OF_EVENTS.get(name, ""))
            if events is None:
                yield replace(_rate(name, unit, growth, elapsed), flags=flags)
            else:
                count, _ = _growth(events, samples.follows, 64, False)
                yield _Metric(name=name, unit=unit, values=growth / count, flags=flags)
    for name, (part, whole) in _RATIOS.items():
        if part in samples.columns and whole in samples.columns:
            part_growth, flags = _growth(samples.columns[part], samples.follows, 64, False)
            whole_growth, _ = _growth(samples.columns[whole], samples.follows, 64, False)
            yield _Metric(name=name, unit="ratio", values=part_growth / whole_growth, flags=flags)
    if all(name in samples.columns for name in _CPU_STATES):
        yield from _cpu_shares(samples)


def _growth(
    values: npt.NDArray[Any],
    follows: npt.NDArray[np.bool_],
    bits: int,
    sticks: bool,
    scale: int = 1,
) -> tuple[Floats, Flags]:
    """Since the sample before, with flags; NaN where there is none or it cannot be known.

    A counter of 32 bits that goes back has wrapped if it grew by less than half its range; more
    is a counter that was set back (serial number arithmetic, RFC 1982). One of 64 bits that goes
    back was set back. One that sticks at its highest value has grown by an unknown amount.
    """
    flags = np.zeros(len(values), dtype=np.int8)
    whole = values.dtype.kind == "i"
    known = values != schema.NULL_I64 if whole else np.isfinite(values)
    growth = np.zeros(len(values), dtype=np.int64 if whole else np.float64)
    growth[1:] = np.diff(values)
    known_both = follows & known & np.append(False, known[:-1])[: len(known)]
    back = known_both & (growth < 0)
    flags[back] = _RESET
    if sticks:
        full = known & (values == scale * ((1 << bits) - 1))
        flags[known_both & full & ~back] = _SATURATED
    elif scale << bits < 1 << 63:
        wrapped = growth + (scale << bits)
        fits = back & (wrapped >= 0) & (wrapped < scale << (bits - 1))
        growth[fits] = wrapped[fits]
        flags[fits] = _WRAP
    numbers = growth.astype(np.float64)
    numbers[~known_both | (flags > _WRAP)] = np.nan
    return numbers, flags


def _rate(name: str, unit: str, growth: Floats, elapsed_ns: Floats) -> _Metric:
    flags = np.zeros(len(growth), dtype=np.int8)
    if unit == "ns":
        metric, rate_unit = _RATES_OF_NS.get(name, (f"{name.removesuffix('_ns')}_ratio", "ratio"))
        return _Metric(name=metric, unit=rate_unit, values=growth / elapsed_ns, flags=flags)
    rates = growth / (elapsed_ns / NS_PER_S)
    return _Metric(name=f"{name}_per_s", unit=f"{unit}/s", values=rates, flags=flags)


def _cpu_shares(samples: Samples) -> Iterator[_Metric]:
    """Shares of all CPUs' time: of each state, and of those at work together.

    No share is known where one of the states was set back.
    """
    grown = {name: _growth(samples.columns[name], samples.follows, 64, False)
             for name in _CPU_STATES}  # fmt: skip
    flags = np.max([flags for _, flags in grown.values()], axis=0)
    growth = {name: values for name, (values, _) in grown.items()}
    whole = np.nansum(list(growth.values()), axis=0)  # not every state is there everywhere
    whole[(whole <= 0) | (flags > 0)] = np.nan
    share = partial(_Metric, unit="ratio", flags=flags)
    for name, values in growth.items():
        yield share(name=f"{name.removesuffix('_ns')}_ratio", values=values / whole)
    busy = np.nansum([growth[name] for name in _CPU_BUSY], axis=0)
    yield share(name="cpu_utilization_ratio", values=busy / whole)


def entities_of(node: NodeFiles, records: RecordFile) -> dict[Key, Mapping[str, Any]]:
    """What is known of each entity, from the header and from what came up later."""
    first = records.header.get("entities")
    later = [line for line in node.of_type("entity") if line.get("source") == records.table]
    return entities_by_key([*(first if isinstance(first, list) else []), *later])


def ranks_of(
    run: RunFiles, node: NodeFiles, records: RecordFile, entities: Mapping[Key, Mapping[str, Any]]
) -> dict[Key, int]:
    """Rank by process, or by GPU where exactly one rank uses that GPU."""
    here = [rank for rank in run.ranks if rank.report.get("host") == node.host]
    if not here and len(run.nodes) == 1:
        here = list(run.ranks)
    reports = [(rank.rank, rank.report) for rank in here]
    return ranks_by_key(reports, _column_names(records, "key"), entities)
