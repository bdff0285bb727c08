"""The counter tables of a node, one file per source: each column's unit, kind and origin.

Their columns are data, in tables.json: name, kind, meaning, and a unit that no name shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from haiprof.base.version import read_data
from haiprof.run_format.schema import Column, Table

_UNITS = {
    "bytes_per_s": ("bytes/s", "f64"),
    **{name: (name, "i64") for name in ("ns", "bytes", "ticks", "hz")},
    **{name: (name, "f64") for name in ("ratio", "watts", "joules", "celsius", "cores")},
}
"""Unit and type by the end of a column's name; what ends otherwise is a count."""


def _table(name: str, rows: Iterable[Sequence[str]]) -> Table:
    columns = [
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
    ]
    for column, kind, meaning, *unit in rows:
        known = (both for end, both in _UNITS.items() if column.endswith(f"_{end}"))
        by_name, type_ = next(known, ("count", "i64"))
        columns.append(Column(column, type_, unit[0] if unit else by_name, kind, meaning))
    return Table(name, tuple(columns))


COUNTER_TABLES = tuple(_table(*each) for each in read_data("run_format/tables.json").items())
# A record of `dcgm` is one collection of the exporter (each 30 s by default), at the time it was
# read: the figures are of that collection, which was made since the read before. No new one, no
# record. The four data counters of an `infiniband` port are in words of 4 bytes and are stored in
# bytes. Ports with extended counters have 64 bits there, others stop at 32: `sticky32` is right for
# both, since a counter that goes on passes that one value.
(
    HOST, CGROUP, PROCESS, PLACEMENT, GPU, GPU_HEALTH, DCGM, INFINIBAND, INFINIBAND_HEALTH,
    ETHERNET, FILESYSTEM, NUMA, MEMORY_BANDWIDTH, REMOTE_MEMORY,
) = COUNTER_TABLES  # fmt: skip
