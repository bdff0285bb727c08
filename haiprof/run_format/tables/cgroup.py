"""Counters of the launcher's control group and of the ancestors that limit it."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

CGROUP = Table(
    "cgroup",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("cgroup_index", "i64", "count", "key", "a new one where the launcher was moved"),
        Column("cpu_ns", "i64", "ns", "counter", "v2 cpu.stat usage_usec, v1 cpuacct.usage"),
        Column("cpu_period_count", "i64", "count", "counter", "cpu.stat nr_periods of its quota"),
        Column("cpu_throttled_period_count", "i64", "count", "counter", "cpu.stat nr_throttled"),
        Column("cpu_throttled_ns", "i64", "ns", "counter", "cpu.stat, summed over CPUs"),
        Column("cpu_limit_cores", "f64", "cores", "gauge", "least quota here and above; null=none"),
        Column("memory_used_bytes", "i64", "bytes", "gauge", "memory.current, with its page cache"),
        Column("memory_peak_bytes", "i64", "bytes", "gauge", "memory.peak, max_usage_in_bytes"),
        Column("memory_anonymous_bytes", "i64", "bytes", "gauge", "memory.stat anon, total_rss"),
        Column("memory_file_bytes", "i64", "bytes", "gauge", "memory.stat file: cache, /dev/shm"),
        Column("memory_swap_bytes", "i64", "bytes", "gauge", "memory.swap.current, total_swap"),
        Column("memory_limit_bytes", "i64", "bytes", "gauge", "least here and above; null=none"),
        Column("memory_limit_hit_count", "i64", "count", "counter", "memory.events max, failcnt"),
        Column("memory_oom_count", "i64", "count", "counter", "oom_kill; v1: of this cgroup alone"),
        Column("pressure_cpu_some_ns", "i64", "ns", "counter", "v2 cpu.pressure some total"),
        Column("pressure_cpu_full_ns", "i64", "ns", "counter", "v2 cpu.pressure full total"),
        Column("pressure_memory_some_ns", "i64", "ns", "counter", "v2 memory.pressure some"),
        Column("pressure_memory_full_ns", "i64", "ns", "counter", "v2 memory.pressure full"),
        Column("pressure_io_some_ns", "i64", "ns", "counter", "v2 io.pressure some total"),
        Column("pressure_io_full_ns", "i64", "ns", "counter", "v2 io.pressure full total"),
    ),
)
