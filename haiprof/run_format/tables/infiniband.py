"""Counters of InfiniBand, RoCE and other RDMA ports: traffic each second, health more seldom."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

# The four data counters of the port are in words of 4 bytes and are stored in bytes. Ports with
# extended counters have 64 bits there, others stop at 32: `sticky32` is right for both, since a
# counter that goes on passes that one value.
INFINIBAND = Table(
    "infiniband",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("port_index", "i64", "count", "key", "running number; name in header and events"),
        Column("transmit_bytes", "i64", "bytes", "sticky32x4", "port_xmit_data x 4"),
        Column("receive_bytes", "i64", "bytes", "sticky32x4", "port_rcv_data x 4"),
        Column(
            "transmit_wait_count",
            "i64",
            "count",
            "sticky32",
            "port_xmit_wait: ticks with data to send and no credit; a tick is the adapter's own",
        ),
        Column("ecn_marked_count", "i64", "count", "counter32", "RoCE packets received ECN-marked"),
        Column("cnp_sent_count", "i64", "count", "counter32", "congestion notifications sent"),
        Column(
            "cnp_handled_count", "i64", "count", "counter32", "... received, sender slowed down"
        ),
        Column("cnp_ignored_count", "i64", "count", "counter32", "... received and ignored"),
        Column("out_of_sequence_count", "i64", "count", "counter32", "packets out of sequence"),
        Column("packet_sequence_error_count", "i64", "count", "counter32", "sequence error NAKs"),
        Column("ack_timeout_count", "i64", "count", "counter32", "requests without ACK in time"),
        Column("rnr_nak_count", "i64", "count", "counter32", "receiver-not-ready NAKs received"),
        Column("implied_nak_count", "i64", "count", "counter32", "responses lost, seen by an ACK"),
        Column("out_of_buffer_count", "i64", "count", "counter32", "drops: no receive buffer"),
        Column("duplicate_request_count", "i64", "count", "counter32", "requests received twice"),
        Column("adaptive_retransmission_count", "i64", "count", "counter32", "roce_adp_retrans"),
        Column("slow_restart_count", "i64", "count", "counter32", "roce_slow_restart"),
        Column("retransmission_count", "i64", "count", "counter32", "EFA: packets sent again"),
    ),
)

INFINIBAND_HEALTH = Table(
    "infiniband_health",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("port_index", "i64", "count", "key", "running number; name in header and events"),
        Column("link_up_ratio", "f64", "ratio", "gauge", "1 where the port's state is ACTIVE"),
        Column("link_rate_bytes_per_s", "f64", "bytes/s", "gauge", "signal rate of an active port"),
        Column("transmit_packet_count", "i64", "count", "sticky32", "port_xmit_packets"),
        Column("receive_packet_count", "i64", "count", "sticky32", "port_rcv_packets"),
        Column("symbol_error_count", "i64", "count", "sticky16", "symbol_error"),
        Column("link_recovery_count", "i64", "count", "sticky8", "link_error_recovery: retrained"),
        Column("link_down_count", "i64", "count", "sticky8", "link_downed: retraining failed"),
        Column("receive_error_count", "i64", "count", "sticky16", "port_rcv_errors"),
        Column(
            "receive_remote_error_count",
            "i64",
            "count",
            "sticky16",
            "port_rcv_remote_physical_errors: packets that a switch had marked bad",
        ),
        Column("transmit_discard_count", "i64", "count", "sticky16", "port_xmit_discards"),
        Column("transmit_constraint_count", "i64", "count", "sticky8", "..xmit_constraint_errors"),
        Column("receive_constraint_count", "i64", "count", "sticky8", "..rcv_constraint_errors"),
        Column("link_integrity_count", "i64", "count", "sticky4", "local_link_integrity_errors"),
        Column(
            "buffer_overrun_count", "i64", "count", "sticky4", "excessive_buffer_overrun_errors"
        ),
        Column("vl15_drop_count", "i64", "count", "sticky16", "VL15_dropped: management packets"),
    ),
)
