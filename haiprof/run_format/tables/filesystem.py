"""Counters of network file systems by mount: what was read and written, and how long it took."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

FILESYSTEM = Table(
    "filesystem",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("mount_index", "i64", "count", "key", "running number; name in header and events"),
        Column("read_bytes", "i64", "bytes", "counter", "read calls, also those that a cache met"),
        Column("write_bytes", "i64", "bytes", "counter", "write calls"),
        Column("server_read_bytes", "i64", "bytes", "counter", "NFS: from the server"),
        Column("server_write_bytes", "i64", "bytes", "counter", "NFS: to the server"),
        Column("server_read_count", "i64", "count", "counter", "NFS: READ requests"),
        Column("server_write_count", "i64", "count", "counter", "NFS: WRITE requests"),
        Column("metadata_count", "i64", "count", "counter", "opens, lookups, attributes, listings"),
        Column("server_read_rtt_ns", "i64", "ns", "counter", "READ: from sending to the reply"),
        Column("server_read_execute_ns", "i64", "ns", "counter", "READ: with waiting to be sent"),
        Column("server_write_rtt_ns", "i64", "ns", "counter", "WRITE: from sending to the reply"),
        Column("server_write_execute_ns", "i64", "ns", "counter", "WRITE: with waiting to be sent"),
        Column("metadata_execute_ns", "i64", "ns", "counter", "NFS: time of metadata requests"),
        Column("retransmission_count", "i64", "count", "counter", "NFS: requests sent again"),
        Column("timeout_count", "i64", "count", "counter", "NFS: requests not answered in time"),
    ),
)
