"""Memory and page allocations of a NUMA node."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

NUMA = Table(
    "numa",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("node", "i64", "count", "key", "number of the NUMA node"),
        Column("memory_total_bytes", "i64", "bytes", "gauge", "node meminfo MemTotal"),
        Column("memory_free_bytes", "i64", "bytes", "gauge", "node meminfo MemFree"),
        Column("hit_page_count", "i64", "count", "counter",
               "numastat numa_hit: pages allocated here as intended (allocations, not accesses)"),
        Column("miss_page_count", "i64", "count", "counter",
               "numa_miss: pages allocated here that were meant for another node"),
        Column("foreign_page_count", "i64", "count", "counter",
               "numa_foreign: pages meant for this node, allocated on another"),
        Column("local_page_count", "i64", "count", "counter",
               "local_node: pages allocated here by a process that ran here"),
        Column("other_page_count", "i64", "count", "counter",
               "other_node: pages allocated here by a process that ran on another node"),
    ),
)  # fmt: skip
