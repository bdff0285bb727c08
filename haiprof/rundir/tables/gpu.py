"""Counters of a GPU."""

from __future__ import annotations

from haiprof.rundir.schema import Column, Table

GPU = Table(
    "gpu",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("gpu", "i64", "count", "key", "NVML index; its UUID is in the file header"),
        Column("utilization_ratio", "f64", "ratio", "gauge", "NVML: share with any kernel running"),
        Column("memory_used_bytes", "i64", "bytes", "gauge", "NVML memory used"),
        Column("memory_total_bytes", "i64", "bytes", "gauge", "NVML memory total"),
        Column("power_watts", "f64", "watts", "gauge", "NVML power usage"),
    ),
)
