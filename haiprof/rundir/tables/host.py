"""Counters of a node: CPU, memory, disks, network, pressure."""

from __future__ import annotations

from haiprof.rundir.schema import Column, Table

HOST = Table(
    "host",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("cpu_user_ns", "i64", "ns", "counter", "/proc/stat user + nice, all CPUs"),
        Column("cpu_system_ns", "i64", "ns", "counter", "/proc/stat system + irq + softirq"),
        Column("cpu_idle_ns", "i64", "ns", "counter", "/proc/stat idle"),
        Column("cpu_iowait_ns", "i64", "ns", "counter", "/proc/stat iowait"),
        Column("cpu_steal_ns", "i64", "ns", "counter", "/proc/stat steal"),
        Column("cpu_count", "i64", "count", "gauge", "CPUs online"),
        Column("memory_total_bytes", "i64", "bytes", "gauge", "/proc/meminfo MemTotal"),
        Column("memory_available_bytes", "i64", "bytes", "gauge", "/proc/meminfo MemAvailable"),
        Column("disk_read_bytes", "i64", "bytes", "counter", "/proc/diskstats, whole devices"),
        Column("disk_write_bytes", "i64", "bytes", "counter", "/proc/diskstats, whole devices"),
        Column("network_receive_bytes", "i64", "bytes", "counter", "/proc/net/dev without lo"),
        Column("network_transmit_bytes", "i64", "bytes", "counter", "/proc/net/dev without lo"),
        Column("pressure_cpu_some_ns", "i64", "ns", "counter", "/proc/pressure/cpu some total"),
        Column("pressure_memory_some_ns", "i64", "ns", "counter", "/proc/pressure/memory some"),
        Column("pressure_io_some_ns", "i64", "ns", "counter", "/proc/pressure/io some total"),
    ),
)
