"""The counter tables of a node, one file per source: each column's unit, kind and origin."""

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


GPU = Table(
    "gpu",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("gpu", "i64", "count", "key", "NVML index; its UUID is in the file header"),
        Column("utilization_ratio", "f64", "ratio", "gauge", "NVML: share with any kernel running"),
        Column("memory_busy_ratio", "f64", "ratio", "gauge", "NVML: share with memory traffic"),
        Column("memory_used_bytes", "i64", "bytes", "gauge", "NVML v2: without what is reserved"),
        Column("memory_reserved_bytes", "i64", "bytes", "gauge", "NVML v2: kept by the driver"),
        Column("memory_total_bytes", "i64", "bytes", "gauge", "NVML memory total"),
        Column("power_watts", "f64", "watts", "gauge", "NVML; mean of 1 s from Ampere on"),
        Column("power_instant_watts", "f64", "watts", "gauge", "NVML field 186"),
        Column("energy_joules", "f64", "joules", "counter", "NVML field 83: since driver load"),
        Column("sm_clock_hz", "i64", "hz", "gauge", "NVML clock info, SM"),
        Column("memory_clock_hz", "i64", "hz", "gauge", "NVML clock info, memory"),
        Column("temperature_celsius", "f64", "celsius", "gauge", "NVML GPU temperature"),
        Column("memory_temperature_celsius", "f64", "celsius", "gauge", "NVML field 82"),
        Column("throttle_reasons", "i64", "packed", "gauge", "NVML clocks event reasons, bits"),
        Column("throttle_power_ns", "i64", "ns", "counter", "field 74: by the power cap"),
        Column("throttle_thermal_ns", "i64", "ns", "counter", "field 75: by temperature"),
        Column("throttle_sync_boost_ns", "i64", "ns", "counter", "field 76: by the sync group"),
        Column("throttle_board_limit_ns", "i64", "ns", "counter", "field 77: by the board limit"),
        Column("throttle_reliability_ns", "i64", "ns", "counter", "field 79: by reliability"),
        Column("throttle_sw_thermal_ns", "i64", "ns", "counter", "slowed by software for heat"),
        Column("throttle_hw_thermal_ns", "i64", "ns", "counter", "slowed by hardware for heat"),
        Column("throttle_power_brake_ns", "i64", "ns", "counter", "slowed by a power brake"),
        Column("pcie_transmit_bytes", "i64", "bytes", "counter", "from the GPU; GPM or field 197"),
        Column("pcie_receive_bytes", "i64", "bytes", "counter", "to the GPU; GPM or field 198"),
        Column("nvlink_transmit_bytes", "i64", "bytes", "counter", "all links; field 138, 202"),
        Column("nvlink_receive_bytes", "i64", "bytes", "counter", "all links; field 139, 204"),
        Column("sm_active_ratio", "f64", "ratio", "gauge", "GPM 2 since the sample before"),
        Column("sm_occupancy_ratio", "f64", "ratio", "gauge", "GPM 3: warps, of what fits"),
        Column("tensor_active_ratio", "f64", "ratio", "gauge", "GPM 5: any tensor operation"),
        Column("dram_active_ratio", "f64", "ratio", "gauge", "GPM 10: of memory bandwidth"),
        Column("fp64_active_ratio", "f64", "ratio", "gauge", "GPM 11: without tensor cores"),
        Column("fp32_active_ratio", "f64", "ratio", "gauge", "GPM 12: without tensor cores"),
        Column("fp16_active_ratio", "f64", "ratio", "gauge", "GPM 13: without tensor cores"),
    ),
)


GPU_HEALTH = Table(
    "gpu_health",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("gpu", "i64", "count", "key", "NVML index; its UUID is in the file header"),
        Column("ecc_volatile_corrected_count", "i64", "count", "counter", "field 3: since load"),
        Column("ecc_volatile_uncorrected_count", "i64", "count", "counter", "field 4: since load"),
        Column("ecc_aggregate_corrected_count", "i64", "count", "counter", "field 5: for good"),
        Column("ecc_aggregate_uncorrected_count", "i64", "count", "counter", "field 6: for good"),
        Column("remapped_corrected_row_count", "i64", "count", "gauge", "field 142"),
        Column("remapped_uncorrected_row_count", "i64", "count", "gauge", "field 143"),
        Column("remap_pending_count", "i64", "count", "gauge", "field 144: waits for a reset"),
        Column("remap_failure_count", "i64", "count", "gauge", "field 145: no spare row was left"),
        Column("retired_corrected_page_count", "i64", "count", "gauge", "field 29"),
        Column("retired_uncorrected_page_count", "i64", "count", "gauge", "field 30"),
        Column("retired_pending_count", "i64", "count", "gauge", "field 31: waits for a reboot"),
        Column("pcie_replay_count", "i64", "count", "counter", "field 94: packets sent again"),
        Column("pcie_correctable_count", "i64", "count", "counter", "field 173"),
        Column("pcie_non_fatal_count", "i64", "count", "counter", "field 179"),
        Column("pcie_fatal_count", "i64", "count", "counter", "field 180"),
        Column("pcie_generation", "i64", "count", "gauge", "link as it is now: less when idle"),
        Column("pcie_generation_max", "i64", "count", "gauge", "of GPU and slot together"),
        Column("pcie_lane_count", "i64", "count", "gauge", "link as it is now"),
        Column("pcie_lane_max_count", "i64", "count", "gauge", "of GPU and slot together"),
        Column("power_limit_watts", "f64", "watts", "gauge", "the enforced one"),
        Column("sm_clock_max_hz", "i64", "hz", "gauge", "NVML max clock info, SM"),
        Column("temperature_margin_celsius", "f64", "celsius", "gauge", "left until it slows down"),
        Column("temperature_slowdown_celsius", "f64", "celsius", "gauge", "NVML threshold"),
        Column("temperature_shutdown_celsius", "f64", "celsius", "gauge", "NVML threshold"),
    ),
)


HOST = Table(
    "host",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("cpu_user_ns", "i64", "ns", "counter", "/proc/stat user, all CPUs; guests are in"),
        Column("cpu_nice_ns", "i64", "ns", "counter", "/proc/stat nice; guests are in"),
        Column("cpu_system_ns", "i64", "ns", "counter", "/proc/stat system"),
        Column("cpu_idle_ns", "i64", "ns", "counter", "/proc/stat idle"),
        Column("cpu_iowait_ns", "i64", "ns", "counter", "/proc/stat iowait"),
        Column("cpu_irq_ns", "i64", "ns", "counter", "/proc/stat irq"),
        Column("cpu_softirq_ns", "i64", "ns", "counter", "/proc/stat softirq"),
        Column("cpu_steal_ns", "i64", "ns", "counter", "/proc/stat steal"),
        Column("cpu_count", "i64", "count", "gauge", "CPUs online"),
        Column("context_switch_count", "i64", "count", "counter", "/proc/stat ctxt"),
        Column("task_running_count", "i64", "count", "gauge", "/proc/stat procs_running: runnable"),
        Column("task_blocked_count", "i64", "count", "gauge", "/proc/stat procs_blocked: on I/O"),
        Column("memory_total_bytes", "i64", "bytes", "gauge", "/proc/meminfo MemTotal"),
        Column("memory_available_bytes", "i64", "bytes", "gauge", "/proc/meminfo MemAvailable"),
        Column("memory_free_bytes", "i64", "bytes", "gauge", "/proc/meminfo MemFree"),
        Column("memory_cached_bytes", "i64", "bytes", "gauge", "/proc/meminfo Cached: files, shm"),
        Column("memory_shared_bytes", "i64", "bytes", "gauge", "/proc/meminfo Shmem: /dev/shm too"),
        Column("memory_dirty_bytes", "i64", "bytes", "gauge", "/proc/meminfo Dirty: to be written"),
        Column("memory_huge_bytes", "i64", "bytes", "gauge", "/proc/meminfo AnonHugePages"),
        Column("swap_total_bytes", "i64", "bytes", "gauge", "/proc/meminfo SwapTotal"),
        Column("swap_used_bytes", "i64", "bytes", "gauge", "/proc/meminfo SwapTotal - SwapFree"),
        Column("huge_page_total_bytes", "i64", "bytes", "gauge", "reserved, of the default size"),
        Column("huge_page_free_bytes", "i64", "bytes", "gauge", "of those, the unused ones"),
        Column("page_fault_count", "i64", "count", "counter", "/proc/vmstat pgfault"),
        Column("major_page_fault_count", "i64", "count", "counter", "/proc/vmstat pgmajfault"),
        Column("oom_kill_count", "i64", "count", "counter", "/proc/vmstat oom_kill: processes"),
        Column("compaction_stall_count", "i64", "count", "counter", "/proc/vmstat compact_stall"),
        Column("numa_hint_fault_count", "i64", "count", "counter", "/proc/vmstat numa_hint_faults"),
        Column("numa_page_migration_count", "i64", "count", "counter", "... numa_pages_migrated"),
        Column("swap_in_bytes", "i64", "bytes", "counter", "/proc/vmstat pswpin"),
        Column("swap_out_bytes", "i64", "bytes", "counter", "/proc/vmstat pswpout"),
        Column("disk_read_bytes", "i64", "bytes", "counter", "/proc/diskstats, whole devices"),
        Column("disk_write_bytes", "i64", "bytes", "counter", "/proc/diskstats, whole devices"),
        Column("disk_read_count", "i64", "count", "counter", "... reads completed"),
        Column("disk_write_count", "i64", "count", "counter", "... writes completed"),
        Column("disk_busy_ns", "i64", "ns", "counter", "... time with I/O in flight, summed"),
        Column("disk_count", "i64", "count", "gauge", "disks in those sums"),
        Column("network_receive_bytes", "i64", "bytes", "counter", "/proc/net/dev without lo"),
        Column("network_transmit_bytes", "i64", "bytes", "counter", "/proc/net/dev without lo"),
        Column("network_receive_packet_count", "i64", "count", "counter", "... packets"),
        Column("network_transmit_packet_count", "i64", "count", "counter", "... packets"),
        Column("network_receive_error_count", "i64", "count", "counter", "... errs"),
        Column("network_transmit_error_count", "i64", "count", "counter", "... errs"),
        Column("network_receive_drop_count", "i64", "count", "counter", "... drop"),
        Column("network_transmit_drop_count", "i64", "count", "counter", "... drop"),
        Column("tcp_transmit_segment_count", "i64", "count", "counter", "/proc/net/snmp OutSegs"),
        Column("tcp_retransmit_segment_count", "i64", "count", "counter", "... RetransSegs"),
        Column("tcp_timeout_count", "i64", "count", "counter", "/proc/net/netstat TCPTimeouts"),
        Column("tcp_listen_drop_count", "i64", "count", "counter", "... ListenDrops"),
        Column("pressure_cpu_some_ns", "i64", "ns", "counter", "/proc/pressure/cpu some total"),
        Column("pressure_memory_some_ns", "i64", "ns", "counter", "/proc/pressure/memory some"),
        Column("pressure_memory_full_ns", "i64", "ns", "counter", "/proc/pressure/memory full"),
        Column("pressure_io_some_ns", "i64", "ns", "counter", "/proc/pressure/io some total"),
        Column("pressure_io_full_ns", "i64", "ns", "counter", "/proc/pressure/io full total"),
    ),
)


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


PLACEMENT = Table(
    "placement",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("pid", "i64", "count", "key", "process of a rank, without its children"),
        Column("start_ticks", "i64", "ticks", "key", "stat field 22: a reused pid is another one"),
        Column("last_cpu", "i64", "count", "gauge", "stat field 39: CPU of the main thread"),
        Column("cpu_node", "i64", "count", "gauge", "NUMA node of that CPU"),
        Column("allowed_cpu_count", "i64", "count", "gauge", "status Cpus_allowed_list"),
        Column("cpu_frequency_hz", "i64", "hz", "gauge", "scaling_cur_freq of last_cpu alone"),
        Column(
            "sampled_page_count",
            "i64",
            "count",
            "gauge",
            "move_pages: pages in memory, of at most 512 drawn from private writable memory",
        ),
        Column(
            "local_page_ratio",
            "f64",
            "ratio",
            "gauge",
            "share of those on NUMA nodes of the allowed CPUs",
        ),
    ),
)


PROCESS = Table(
    "process",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("pid", "i64", "count", "key", "process of a rank; children are included below"),
        Column("start_ticks", "i64", "ticks", "key", "stat field 22: a reused pid is another one"),
        Column("process_count", "i64", "count", "gauge", "the process and its live descendants"),
        Column("cpu_ns", "i64", "ns", "counter", "utime + stime of the process and descendants"),
        Column("cpu_main_ns", "i64", "ns", "counter", "utime + stime of the process alone"),
        Column("memory_rss_bytes", "i64", "bytes", "gauge", "statm resident, summed"),
        Column("read_bytes", "i64", "bytes", "counter", "io rchar: read calls, cache hits too"),
        Column("write_bytes", "i64", "bytes", "counter", "io wchar: write calls"),
        Column("storage_read_bytes", "i64", "bytes", "counter", "io read_bytes: storage layer"),
        Column("storage_write_bytes", "i64", "bytes", "counter", "io write_bytes: storage layer"),
        Column("thread_count", "i64", "count", "gauge", "threads, summed"),
        Column("page_fault_count", "i64", "count", "counter", "stat minflt + majflt, summed"),
        Column("major_page_fault_count", "i64", "count", "counter", "stat majflt: from storage"),
        Column(
            "run_queue_wait_ns",
            "i64",
            "ns",
            "counter",
            "schedstat of the main thread alone: able to run, and no CPU free",
        ),
        Column(
            "context_switch_count", "i64", "count", "counter", "status of the main thread alone"
        ),
        Column(
            "involuntary_context_switch_count",
            "i64",
            "count",
            "counter",
            "those of them in which the kernel took the CPU away",
        ),
    ),
)


REMOTE_MEMORY = Table(
    "remote_memory",
    (
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
        Column("pid", "i64", "count", "key", "process of a rank; children are included below"),
        Column("start_ticks", "i64", "ticks", "key", "stat field 22: a reused pid is another one"),
        Column("instruction_count", "i64", "count", "counter",
               "instructions in user mode since the rank was first seen"),
        Column("cycle_count", "i64", "count", "counter", "core cycles, the same"),
        Column("local_dram_bytes", "i64", "bytes", "counter",
               "64 B x cache fills from near DRAM (the header names the event): no full traffic"),
        Column("remote_dram_bytes", "i64", "bytes", "counter",
               "64 B x cache fills from far DRAM: compare with local_dram_bytes"),
        Column("counted_ratio", "f64", "ratio", "gauge",
               "share of the time in which counters ran; below 1 the figures are scaled estimates"),
    ),
)  # fmt: skip


COUNTER_TABLES = (
    HOST,
    CGROUP,
    PROCESS,
    PLACEMENT,
    GPU,
    GPU_HEALTH,
    DCGM,
    INFINIBAND,
    INFINIBAND_HEALTH,
    ETHERNET,
    FILESYSTEM,
    NUMA,
    MEMORY_BANDWIDTH,
    REMOTE_MEMORY,
)
