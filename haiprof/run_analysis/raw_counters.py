"""Counters as they were read, nothing derived: one series per entity and metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from haiprof.base.intervals import Ints
from haiprof.run_analysis.counters import (
    Samples,
    counter_records,
    entities_of,
    ranks_of,
    samples_of,
)
from haiprof.run_analysis.run_files import NodeFiles, RunFiles
from haiprof.run_format.entities import Key
from haiprof.run_format.reader import RecordFile
from haiprof.run_format.schema import NULL_I64, Column, counter_end
from haiprof.run_format.tables import COUNTER_TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSeries:
    """One metric of one entity, at the samples that have a value."""

    host: str
    source: str
    """The table, such as `host` or `gpu`."""
    keys: tuple[str, ...]
    """Names of the table's key columns."""
    key: Key
    """Their values; empty for the node."""
    entity: Mapping[str, Any]
    """What the recording says of it: `name`, and details such as a `uuid`."""
    rank: int | None
    """Of a process; of a GPU that one rank uses."""
    column: Column
    time_ns: Ints
    """Unix time."""
    values: npt.NDArray[Any]
    """As stored, integers or floats: of a counter, its count so far."""
    start_ns: Ints
    """Of a counter: the first sample since it was last seen to go back; Unix time."""


def raw_counters(run: RunFiles) -> tuple[list[RawSeries], tuple[str, ...]]:
    """Every series of every node, and notes on files that could not be read.

    A counter keeps its own count, also where it wrapped, was set back or has stopped at its end.
    """
    found, notes = counter_records(run)
    return [series for node, records in found for series in _of_source(run, node, records)], notes


def _of_source(run: RunFiles, node: NodeFiles, records: RecordFile) -> Iterator[RawSeries]:
    samples = samples_of(records)
    entities = entities_of(node, records)
    ranks = ranks_of(run, node, records, entities)
    offset_ns = records.clock.wall_ns - records.clock.mono_ns
    table = next(table for table in COUNTER_TABLES if table.name == records.table)
    for key, at in _slices(samples):
        for column in table.metrics:
            values = samples.columns[column.name][at]
            known = _is_known(values, column)
            if not known.any():
                continue
            time_ns = samples.time_ns[at][known] + offset_ns
            yield RawSeries(
                host=node.host,
                source=table.name,
                keys=table.keys,
                key=key,
                entity=entities.get(key, {}),
                rank=ranks.get(key),
                column=column,
                time_ns=time_ns,
                values=values[known],
                start_ns=_starts(time_ns, values[known]),
            )


def _slices(samples: Samples) -> Iterator[tuple[Key, slice]]:
    """Each entity's place among the samples, which are sorted by entity and time."""
    ends = np.searchsorted(samples.owner, np.arange(len(samples.keys)), side="right").tolist()
    for key, start, end in zip(samples.keys, [0, *ends], ends, strict=False):
        yield key, slice(start, end)


def _is_known(values: npt.NDArray[Any], column: Column) -> npt.NDArray[np.bool_]:
    """Where there is a value; a count below 0 is damage."""
    whole = values.dtype.kind == "i"
    known: npt.NDArray[np.bool_] = values != NULL_I64 if whole else np.isfinite(values)
    return known & (values >= 0) if counter_end(column.kind) is not None else known


def _starts(time_ns: Ints, values: npt.NDArray[Any]) -> Ints:
    back = np.append(False, values[1:] < values[:-1])
    since = np.maximum.accumulate(np.where(back, np.arange(len(values)), 0))
    return time_ns[since]
