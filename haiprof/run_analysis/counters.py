"""The frame of counters, one row per sample and metric, and records of theirs, one a minute."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.units import NS_PER_S
from haiprof.run_analysis.run_files import (
    NodeFiles,
    RunFiles,
    entries,
    read_counters,
    record_columns,
    record_rows,
    text,
)
from haiprof.run_format import schema
from haiprof.run_format.entities import Key, entities_by_key, entity_name, ranks_by_key
from haiprof.run_format.folded import read_folded_records, read_of_one_folding
from haiprof.run_format.reader import RecordFile
from haiprof.run_format.schema import NS_OF_EVENTS, Table, rate_of
from haiprof.run_format.tables import COUNTER_TABLES
from haiprof.trace_format.frame_columns import Columns, types_of

COUNTER_COLUMNS: Columns = {
    "time_ns": (pl.Int64, "Unix time of the sample"),  # of a rate that of the later one
    "host": (pl.String, "node"),
    "source": (pl.String, "host, process, gpu, ..."),  # the record file's name
    "entity": (pl.String, "of the source, such as a port; null for the node"),
    "rank": (pl.Int64, "of a process, or of the GPU that one rank uses"),
    "gpu": (pl.Int64, "NVML index"),
    "metric": (pl.String, "with its unit as suffix"),
    "unit": (pl.String, "of value"),
    # gauges as stored; counters as rates (`..._per_s`, `..._ratio`); times: mean per request
    "value": (pl.Float64, "null where it was set back or has stopped"),
    "flag": (pl.String, "wrap, reset or saturated"),
}
COUNTER_SCHEMA = types_of(COUNTER_COLUMNS)
FLAGS = (None, "wrap", "reset", "saturated")
"""What happened at a counter: it went on at 0 after its last bit (the rate is right); it was set
back, or stopped at its highest value (`value` is null)."""
_WRAP, _RESET, _SATURATED = 1, 2, 3
_TIME_LIMIT_NS = 1 << 61  # a sample's time beyond this is damage, and would overflow as Unix time

# Shares of one count in another.
_RATIOS = {"cpu_throttled_ratio": ("cpu_throttled_period_count", "cpu_period_count")}
_CPU_BUSY = ("cpu_user_ns", "cpu_nice_ns", "cpu_system_ns", "cpu_irq_ns", "cpu_softirq_ns")
_CPU_STATES = (*_CPU_BUSY, "cpu_idle_ns", "cpu_iowait_ns", "cpu_steal_ns")

MINUTE_NS = 60 * NS_PER_S
_REASONS = "_reasons"  # ends the names of bit fields; other packed numbers are codes
Flags = npt.NDArray[np.int8]
Rows = npt.NDArray[Any]
ALWAYS = (-(1 << 62), 1 << 62)  # begin and end of all times


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric at every record."""

    name: str
    unit: str
    values: Floats  # NaN where there is none
    flags: Flags  # places in `FLAGS`

    @property
    def shown(self) -> npt.NDArray[np.bool_]:
        """Where there is a value, or something that took it away."""
        return np.isfinite(self.values) | (self.flags > _WRAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSamples:
    """The records of one source of one node: by entity, and then by time; no damaged times."""

    host: str
    source: str
    time_ns: Ints  # Unix time of each record
    owner: Ints  # place of each record's entity in the lists
    keys: Sequence[Key]  # of the entities; empty for the node
    known: Sequence[Mapping[str, Any]]  # what the recording says of them
    entities: Sequence[str | None]  # their names; None for the node
    ranks: Sequence[int | None]  # whose they are, where one rank owns them: by process, or by GPU
    gpus: Sequence[int | None]  # NVML index
    follows: npt.NDArray[np.bool_]  # whether the record before is an earlier one of the same entity
    columns: Mapping[str, npt.NDArray[Any]]  # as in the file
    order: Ints  # place of each sample in these
    metrics: Sequence[Metric] = ()  # those that were asked for

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column in the order of the samples."""
        ordered: npt.NDArray[Any] = self.columns[name][self.order]
        return ordered

    def series(self, metric: Metric) -> Iterator[OwnerSeries]:
        """One of them of each entity."""
        at = np.flatnonzero(np.isfinite(metric.values))
        ends = np.searchsorted(self.owner[at], np.arange(len(self.entities)), "right")
        owners = zip(self.ranks, self.gpus, self.entities, strict=True)
        for owner, start, end in zip(owners, [0, *ends], ends, strict=False):
            time_ns, values = self.time_ns[at[start:end]], metric.values[at[start:end]]
            yield OwnerSeries(owner=(self.host, *owner), time_ns=time_ns, values=values)


def counter_frame(
    run: RunFiles, *, between: tuple[int, int] | None = None, hosts: Collection[str] | None = None,
    metrics: Collection[tuple[str, str]] | None = None, first: int = 0,
) -> pl.DataFrame:  # fmt: skip
    """Counters of all nodes by time."""
    found = read_sources(run, metrics, hosts=hosts, first=first)
    frames = [samples_frame(source, between or ALWAYS) for source in found]
    whole = pl.concat([pl.DataFrame(schema=COUNTER_SCHEMA), *frames])
    return whole.sort("time_ns", maintain_order=True)


Owner = tuple[str | None, int | None, int | None, str | None]  # host, rank, GPU and entity


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSeries:
    """One metric of one owner, at the samples that have a value."""

    owner: Owner
    time_ns: Ints  # Unix time, in order
    values: Floats

    def cut(self, begin_ns: int, end_ns: int) -> OwnerSeries:
        """The samples of a time."""
        part = slice(
            np.searchsorted(self.time_ns, begin_ns), np.searchsorted(self.time_ns, end_ns, "right")
        )
        return replace(self, time_ns=self.time_ns[part], values=self.values[part])


SeriesReader = Callable[[str, str], Sequence[OwnerSeries]]
"""The series of a source's metric that have a value, as `sort_series` sorts them."""


def sort_series(series: Iterable[OwnerSeries]) -> list[OwnerSeries]:
    """By rank, GPU, host and entity, those of the node first; what has one owner is one series."""
    parts: dict[Owner, list[OwnerSeries]] = {}
    for each in series:
        if len(each.time_ns):
            parts.setdefault(each.owner, []).append(each)
    found = []
    for own in sorted(parts, key=lambda own: [(own[i] is not None, own[i]) for i in (1, 2, 0, 3)]):
        time_ns, values = (np.concatenate([getattr(part, name) for part in parts[own]])
                           for name in ("time_ns", "values"))  # fmt: skip
        order = np.argsort(time_ns, kind="stable")
        found.append(OwnerSeries(owner=own, time_ns=time_ns[order], values=values[order]))
    return found


def owner_series(
    run: RunFiles, metrics: Collection[tuple[str, str]], *, between: tuple[int, int] | None = None
) -> dict[tuple[str, str], list[OwnerSeries]]:
    """These metrics (source, name) of all nodes; files are read one by one, and no others."""
    found: dict[tuple[str, str], list[OwnerSeries]] = {metric: [] for metric in metrics}
    for source in read_sources(run, metrics):
        for metric in source.metrics:
            series = (each.cut(*(between or ALWAYS)) for each in source.series(metric))
            found[source.source, metric.name] += series
    return {metric: sort_series(series) for metric, series in found.items()}


def counter_notes(run: RunFiles) -> tuple[str, ...]:
    """Notes on all record files of all nodes, of which only the beginnings are read."""
    return notes_of(one for _, one in record_files(run, limit=0))


def notes_of(found: Iterable[RecordFile | str]) -> tuple[str, ...]:
    """Why record files cannot be read, and what was damaged in the others."""
    return tuple(note for one in found for note in ((one,) if isinstance(one, str) else one.notes))


def record_files(
    run: RunFiles, *, hosts: Collection[str] | None = None, sources: Collection[str] | None = None,
    first: int = 0, limit: int | None = None, coarse: bool = False,
) -> Iterator[tuple[NodeFiles, RecordFile | str]]:  # fmt: skip
    """Record files of these nodes (None: of all) one by one, or why one cannot be read.

    With `coarse` those whose old records were folded have one record a minute throughout, so that
    each counts the same in a mean.
    """
    nodes = [node for node in run.nodes if hosts is None or node.host in hosts]
    tables = [table for table in COUNTER_TABLES if sources is None or table.name in sources]
    for node, table in product(nodes, tables):
        if os.path.lexists(node.paths.records(table.name)):
            try:
                yield node, _read_whole(node, table, first=first, limit=limit, coarse=coarse)
            except RunFormatError as error:
                yield node, str(error)


def read_folded_source(node: NodeFiles, table: Table) -> tuple[RecordFile | None, RecordFile]:
    """A source's records that were folded, and the others."""
    folded = read_folded_records(node.paths.old_records(table.name))
    begin = 0 if folded is None else int(folded.header["folded"]["records"])
    return folded, read_counters(node.paths.records(table.name), table, first=begin)


def _read_whole(
    node: NodeFiles, table: Table, *, first: int, limit: int | None, coarse: bool
) -> RecordFile:
    """A source's records, the folded ones before the others."""
    path, target = node.paths.records(table.name), node.paths.old_records(table.name)
    if first or limit is not None or not os.path.lexists(target):
        return read_counters(path, table, first=first, limit=limit)
    folded, raw = read_of_one_folding(target, partial(read_folded_source, node, table))
    if folded is None:
        return raw
    if folded.columns != raw.columns:
        raise RunFormatError(f"{target}: its columns are not those of {path.name}")
    data = fold_rows(record_rows(raw), raw.columns).tobytes() if coarse else raw.data
    return replace(raw, data=folded.data + data)


def read_sources(
    run: RunFiles, metrics: Collection[tuple[str, str]] | None = None, *,
    hosts: Collection[str] | None = None, first: int = 0, coarse: bool = False,
) -> Iterator[SourceSamples]:  # fmt: skip
    """These metrics (source, name; None: all) of the record files that can be read, one by one."""
    sources = None if metrics is None else {source for source, _ in metrics}
    files = record_files(run, hosts=hosts, sources=sources, first=first, coarse=coarse)
    reports = reports_by_host(run)
    for node, records in files:
        if not isinstance(records, str):
            samples = samples_of(reports, node, records)
            chosen = None if metrics is None else {n for of, n in metrics if of == records.table}
            with np.errstate(all="ignore"):  # damaged values end as NaN, and those are left out
                yield replace(samples, metrics=list(_metrics(records, samples, chosen)))


def samples_frame(found: SourceSamples, between: tuple[int, int]) -> pl.DataFrame:
    """One source of one node, one row per value."""
    wanted = (found.time_ns >= between[0]) & (found.time_ns <= between[1])
    metrics = found.metrics
    shown = [np.flatnonzero(metric.shown & wanted) for metric in metrics]
    if not metrics or not sum(map(len, shown)):
        return pl.DataFrame(schema=COUNTER_SCHEMA)
    rows = np.concatenate(shown)
    owner = found.owner[rows]
    which = np.repeat(np.arange(len(metrics)), [len(rows) for rows in shown])
    values = np.concatenate([m.values[at] for m, at in zip(metrics, shown, strict=True)])
    flags = np.concatenate([m.flags[at] for m, at in zip(metrics, shown, strict=True)])
    words: dict[str, tuple[Sequence[object], npt.NDArray[Any]]] = {
        "entity": (found.entities, owner), "rank": (found.ranks, owner), "gpu": (found.gpus, owner),
        "metric": ([m.name for m in metrics], which), "unit": ([m.unit for m in metrics], which),
        "flag": (FLAGS, flags),
    }  # fmt: skip
    columns = {
        name: pl.Series(known, dtype=COUNTER_SCHEMA[name]).gather(pl.Series(at, dtype=pl.UInt32))
        for name, (known, at) in words.items()
    }
    for name, of_node in (("host", found.host), ("source", found.source)):
        columns[name] = pl.Series([of_node], dtype=pl.String).new_from_index(0, len(rows))
    columns["time_ns"] = pl.Series(found.time_ns[rows])
    columns["value"] = pl.Series(values, dtype=pl.Float64).fill_nan(None)
    return pl.DataFrame(columns).select(*COUNTER_SCHEMA)


def _by_entity(time_ns: Ints, keys: Sequence[Ints]) -> tuple[Ints, Bools]:
    """Order by entity and then time; and of all but the first: whether the one before is of its."""
    order = np.lexsort((time_ns, *reversed(keys)))
    same = np.ones(max(len(order) - 1, 0), dtype=np.bool_)
    for key in keys:
        same &= np.diff(key[order]) == 0
    return order, same


def is_known(values: Rows) -> Bools:
    """Where a stored column has a value."""
    return values != schema.NULL_I64 if values.dtype.kind == "i" else np.isfinite(values)


def samples_of(reports: Reports, node: NodeFiles, records: RecordFile) -> SourceSamples:
    """The records of a file, without metrics."""
    columns = record_columns(records)
    time = columns["time_ns"]
    sound = np.flatnonzero((time >= 0) & (time < _TIME_LIMIT_NS))
    names = [name for name, _, _, kind in records.columns if kind == "key"]
    keys = [columns[name].astype(np.int64) for name in names]
    order, same = _by_entity(time[sound], [key[sound] for key in keys])
    order = sound[order]
    time = time[order]
    first = np.append(True, ~same)[: len(order)]
    owners = [tuple(int(key[at]) for key in keys) for at in order[first]]
    # What is known of entities is in the header, and in lines about those that came up later.
    later = [line for line in node.of_type("entity") if line.get("source") == records.table]
    entities = entities_by_key([*entries(records.header.get("entities")), *later])
    ranks = ranks_by_key(reports.get(node.host, ()), names, entities) if names else {}
    known = [entities.get(key, {}) for key in owners]
    return SourceSamples(
        host=node.host, source=records.table,
        time_ns=time + (records.clock.wall_ns - records.clock.mono_ns), owner=np.cumsum(first) - 1,
        keys=owners, known=known, entities=[entity_name(entity) or None for entity in known],
        ranks=[ranks.get(key) for key in owners],
        gpus=[key[0] if names == ["gpu"] else None for key in owners],
        follows=np.append(False, same & (np.diff(time) > 0))[: len(order)], columns=columns,
        order=order,
    )  # fmt: skip


def _metrics(
    records: RecordFile, samples: SourceSamples, wanted: Collection[str] | None
) -> Iterator[Metric]:
    """Every column that is one, or those of these names."""
    elapsed = np.append(np.nan, np.diff(samples.time_ns))[: len(samples.time_ns)]
    none = np.zeros(len(samples.time_ns), dtype=np.int8)
    for name, _, unit, kind in records.columns:
        end = schema.counter_end(kind)
        if kind == "gauge" and (wanted is None or name in wanted):
            stored = samples.column(name)
            values = np.where(is_known(stored), stored.astype(np.float64), np.nan)
            yield Metric(name=name, unit=unit, values=values, flags=none)
        elif end is not None and name not in _CPU_STATES:
            events = NS_OF_EVENTS.get(name, "")
            has_events = events in samples.columns
            metric, rate_unit = (name, unit) if has_events else rate_of(name, unit)
            if wanted is not None and metric not in wanted:
                continue
            growth, flags = _growth(samples.column(name), samples.follows, *end)
            whole = elapsed if unit == "ns" else elapsed / NS_PER_S
            if has_events:
                whole = _growth(samples.column(events), samples.follows)[0]
            yield Metric(name=metric, unit=rate_unit, values=growth / whole, flags=flags)
    for name, parts in _RATIOS.items():
        if {*parts} <= samples.columns.keys() and (wanted is None or name in wanted):
            (growth, flags), (whole, _) = (
                _growth(samples.column(part), samples.follows) for part in parts
            )
            yield Metric(name=name, unit="ratio", values=growth / whole, flags=flags)
    if all(name in samples.columns for name in _CPU_STATES):
        yield from (m for m in _cpu_shares(samples) if wanted is None or m.name in wanted)


def _growth(
    values: npt.NDArray[Any], follows: npt.NDArray[np.bool_], bits: int = 64, sticks: bool = False,
    scale: int = 1,
) -> tuple[Floats, Flags]:  # fmt: skip
    """Since the sample before, with flags; NaN where there is none or it cannot be known."""
    # A counter of 32 bits that goes back has wrapped if it grew by less than half its range; more
    # is a counter that was set back (serial number arithmetic, RFC 1982). One of 64 bits that goes
    # back was set back. One that sticks at its highest value has grown by an unknown amount.
    flags = np.zeros(len(values), dtype=np.int8)
    whole = values.dtype.kind == "i"
    known = is_known(values)
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


def _cpu_shares(samples: SourceSamples) -> Iterator[Metric]:
    """Shares of all CPUs' time: of each state, and of those at work together."""
    # No share is known where one of the states was set back.
    grown = {name: _growth(samples.column(name), samples.follows) for name in _CPU_STATES}
    flags = np.max([flags for _, flags in grown.values()], axis=0)
    growth = {name: values for name, (values, _) in grown.items()}
    whole = np.nansum(list(growth.values()), axis=0)  # not every state is there everywhere
    whole[(whole <= 0) | (flags > 0)] = np.nan
    share = partial(Metric, unit="ratio", flags=flags)
    for name, values in growth.items():
        yield share(name=f"{name.removesuffix('_ns')}_ratio", values=values / whole)
    busy = np.nansum([growth[name] for name in _CPU_BUSY], axis=0)
    yield share(name="cpu_utilization_ratio", values=busy / whole)


Reports = Mapping[object, Sequence[tuple[int, Mapping[str, Any]]]]
"""By host: its ranks, and what each reported."""


def reports_by_host(run: RunFiles) -> Reports:
    """What all ranks reported; of a run of one node under its name, wherever they say they are."""
    found: dict[object, list[tuple[int, Mapping[str, Any]]]] = {}
    for rank in run.ranks:
        found.setdefault(text(rank.report.get("host")), []).append((rank.rank, rank.report))
    if len(run.nodes) == 1 and run.nodes[0].host not in found:
        return {run.nodes[0].host: [(rank.rank, rank.report) for rank in run.ranks]}
    return found


def fold_rows(
    rows: Rows, columns: Sequence[tuple[str, str, str, str]], whole: Bools | None = None
) -> Rows:
    """The last record of each minute of each entity, by time; gauges are the means of the minute.

    So growth between two of them is that of all between. A counter that went back (a reset, a
    wrap) is kept on both sides, as is a code that changed. Of reasons all that were given are set.
    Those that `whole` marks stay as they are.
    """
    keys = [name for name, _, _, kind in columns if kind == "key"]
    order, same = _by_entity(rows["time_ns"], [rows[key] for key in keys])
    head = np.append(True, ~same)[: len(rows)]
    minute = rows["time_ns"][order] // MINUTE_NS
    alone = head.copy()  # growth counts from the first one on
    head[1:] |= minute[1:] != minute[:-1]
    for name, _, unit, what in columns:
        if schema.counter_end(what) is not None:
            values = rows[name][order]
            known = is_known(values)
            with np.errstate(invalid="ignore"):
                back = same & known[1:] & known[:-1] & (values[1:] < values[:-1])
            alone[1:] |= back
            alone[:-1] |= back
        elif unit == "packed" and what == "gauge" and not name.endswith(_REASONS):
            head[1:] |= np.diff(rows[name][order]) != 0
    if whole is not None:
        alone |= whole[order]
    head |= alone
    head[1:] |= alone[:-1]
    heads = np.flatnonzero(head)
    if not len(heads):
        return rows
    folded = rows[order[np.append(heads[1:], len(rows)) - 1]].copy()
    for name, kind, unit, what in columns:
        if what == "gauge":
            values = rows[name][order]
            folded[name] = _join_groups(values, heads, kind=kind, packed=unit == "packed")
    ordered: Rows = folded[np.argsort(folded["time_ns"], kind="stable")]
    return ordered


def _join_groups(values: Rows, heads: npt.NDArray[np.int64], *, kind: str, packed: bool) -> Rows:
    """Means of the known values of each group; bits that were set in any."""
    known = is_known(values)
    count = np.add.reduceat(known.astype(np.int64), heads)
    if packed and kind == "i64":
        bits: Rows = np.bitwise_or.reduceat(np.where(known, values, 0), heads)
        return np.where(count > 0, bits, schema.NULL_I64)
    total = np.add.reduceat(np.where(known, values, 0).astype(np.float64), heads)
    mean: Rows = np.divide(total, count, out=np.full(len(heads), np.nan), where=count > 0)
    if kind != "i64":
        return mean
    return np.where(count > 0, np.rint(np.nan_to_num(mean)), schema.NULL_I64).astype(np.int64)
