"""DRAM traffic of a socket, and what of it crosses to other sockets."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

MEMORY_BANDWIDTH = Table(
    "memory_bandwidth",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("domain", "i64", "count", "key",
               "socket; the header names the source of its figures (resctrl, uncore)"),
        Column("read_bytes", "i64", "bytes", "counter", "uncore: read from the socket's DRAM"),
        Column("write_bytes", "i64", "bytes", "counter", "uncore: written to the socket's DRAM"),
        Column("total_bytes", "i64", "bytes", "counter",
               "uncore: both; resctrl: memory traffic of the socket's CPUs (mbm_total_bytes)"),
        Column("remote_bytes", "i64", "bytes", "counter",
               "uncore: data over the links between sockets; resctrl: total - mbm_local_bytes"),
        Column("counted_ratio", "f64", "ratio", "gauge",
               "share of the time in which counters ran; below 1 the figures are scaled estimates"),
    ),
)  # fmt: skip
