"""What `haiprof node` keeps of a node's counters: tiers of time, and the table of each of them."""

from __future__ import annotations

from dataclasses import dataclass

from haiprof.base.units import NS_PER_S
from haiprof.run_format.schema import Column, Table, rate_of

_HOUR_NS = 3600 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One resolution, and how much recorded time is kept in it."""

    name: str
    interval_ns: int
    kept_ns: int

    @property
    def kept_text(self) -> str:
        """`6 h`, `3 days`."""
        hours = self.kept_ns // _HOUR_NS
        return f"{hours} h" if hours < 48 else f"{hours // 24} days"


TIERS = (
    Tier(name="1s", interval_ns=NS_PER_S, kept_ns=6 * _HOUR_NS),
    Tier(name="10s", interval_ns=10 * NS_PER_S, kept_ns=72 * _HOUR_NS),
    Tier(name="5min", interval_ns=300 * NS_PER_S, kept_ns=180 * 24 * _HOUR_NS),
)
"""Finest first; each interval is a multiple of the one before."""
FILES_PER_TIER = 6  # a file holds such a part of what is kept: one more is on the disk at most
STATISTICS = ("mean", "min", "max")
LIMIT_MB = 1500.0  # of all files of a node: what no retention may exceed


def kept_columns(table: Table) -> tuple[Column, ...]:
    """The counters and gauges of a source that are kept; bit fields have no mean."""
    return tuple(column for column in table.metrics if column.unit != "packed")


def history_table(table: Table, tier: Tier) -> Table:
    """What a record of a tier holds: counters as rates, gauges as they are.

    The first tier has every sample; the others mean, least and greatest of the samples of a time.
    """
    keys = tuple(column for column in table.columns if column.kind == "key")
    statistics = ("value",) if tier is TIERS[0] else STATISTICS
    values = [
        Column(f"{name}.{statistic}", "f32", unit, "gauge", column.meaning)
        for column in kept_columns(table)
        for name, unit in [metric_of(column)]
        for statistic in statistics
    ]
    return Table(
        table.name,
        (
            Column("time_ns", "i64", "ns", "time", "Unix time of a sample, or of the begin"),
            Column("sample_count", "u32", "count", "gauge", "samples in it"), *keys, *values,
        ),
    )  # fmt: skip


def metric_of(column: Column) -> tuple[str, str]:
    """What is kept of a column: its name and unit."""
    same = column.name, column.unit
    return same if column.kind == "gauge" else rate_of(*same)
