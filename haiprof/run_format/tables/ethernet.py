"""Counters of Ethernet interfaces that RDMA depends on: pauses, discards, errors of the link."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

ETHERNET = Table(
    "ethernet",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column(
            "interface_index", "i64", "count", "key", "the kernel's; a new device has a new one"
        ),
        Column("receive_pause_count", "i64", "count", "counter", "pause frames, all priorities"),
        Column("transmit_pause_count", "i64", "count", "counter", "pause frames, all priorities"),
        Column(
            "receive_pause_ns",
            "i64",
            "ns",
            "counter",
            "time that the other side held a priority back, summed over the priorities",
        ),
        Column(
            "transmit_pause_ns",
            "i64",
            "ns",
            "counter",
            "time that this side held a priority back, summed over the priorities",
        ),
        Column("pause_storm_warning_count", "i64", "count", "counter", "long stalls of receiving"),
        Column("pause_storm_error_count", "i64", "count", "counter", "... that ended in no pauses"),
        Column(
            "receive_discard_count", "i64", "count", "counter", "packets: no buffer in the port"
        ),
        Column("transmit_discard_count", "i64", "count", "counter", "packets dropped by the port"),
        Column("out_of_buffer_count", "i64", "count", "counter", "packets: no buffer of the host"),
        Column("receive_crc_error_count", "i64", "count", "counter", "packets damaged on the wire"),
        Column("receive_symbol_error_count", "i64", "count", "counter", "symbols damaged"),
        Column("rdma_receive_bytes", "i64", "bytes", "counter", "rx_vport_rdma_unicast_bytes"),
        Column("rdma_transmit_bytes", "i64", "bytes", "counter", "tx_vport_rdma_unicast_bytes"),
    ),
)
