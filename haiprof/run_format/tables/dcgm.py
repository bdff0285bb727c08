"""Counters of a GPU from a site's own DCGM exporter: what older GPUs' NVML does not tell."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

# A record is one collection of the exporter (each 30 s by default), at the time it was read: the
# figures are of that collection, which was made since the read before. No new one, no record.
DCGM = Table(
    "dcgm",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read, which serves all GPUs"),
        Column("gpu", "i64", "count", "key", "NVML index of the UUID; the exporter's without NVML"),
        Column("engine_active_ratio", "f64", "ratio", "gauge", "DCGM 1001: any engine busy"),
        Column("sm_active_ratio", "f64", "ratio", "gauge", "DCGM 1002: SMs with a warp"),
        Column("sm_occupancy_ratio", "f64", "ratio", "gauge", "DCGM 1003: warps, of what fits"),
        Column("tensor_active_ratio", "f64", "ratio", "gauge", "DCGM 1004: any tensor operation"),
        Column("dram_active_ratio", "f64", "ratio", "gauge", "DCGM 1005: memory interface busy"),
        Column("fp64_active_ratio", "f64", "ratio", "gauge", "DCGM 1006"),
        Column("fp32_active_ratio", "f64", "ratio", "gauge", "DCGM 1007"),
        Column("fp16_active_ratio", "f64", "ratio", "gauge", "DCGM 1008: without tensor cores"),
        Column("pcie_transmit_bytes_per_s", "f64", "bytes/s", "gauge", "DCGM 1009: a rate"),
        Column("pcie_receive_bytes_per_s", "f64", "bytes/s", "gauge", "DCGM 1010: a rate"),
        Column("nvlink_transmit_bytes_per_s", "f64", "bytes/s", "gauge", "DCGM 1011: a rate"),
        Column("nvlink_receive_bytes_per_s", "f64", "bytes/s", "gauge", "DCGM 1012: a rate"),
        Column("last_xid", "i64", "packed", "gauge", "DCGM 230: last XID ever seen; 0 is none"),
    ),
)
