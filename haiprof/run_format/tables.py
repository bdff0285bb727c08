"""The counter tables of a node, one file per source: each column's unit, kind and origin."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

_UNITS = {
    "bytes_per_s": ("bytes/s", "f64"),
    **{name: (name, "i64") for name in ("ns", "bytes", "ticks", "hz")},
    **{name: (name, "f64") for name in ("ratio", "watts", "joules", "celsius", "cores")},
}
"""Unit and type by the end of a column's name; what ends otherwise is a count."""


def _counters(name: str, *rows: tuple[str, ...]) -> Table:
    """The table of a source: name, kind, meaning of each column, and a unit that no name shows."""
    columns = [
        Column("time_ns", "i64", "ns", "time", "CLOCK_MONOTONIC before the read"),
        Column("read_ns", "i64", "ns", "gauge", "duration of the read"),
    ]
    for column, kind, meaning, *unit in rows:
        known = (both for end, both in _UNITS.items() if column.endswith(f"_{end}"))
        by_name, type_ = next(known, ("count", "i64"))
        columns.append(Column(column, type_, unit[0] if unit else by_name, kind, meaning))
    return Table(name, tuple(columns))


CGROUP = _counters(
    "cgroup",
    ("cgroup_index", "key", "a new one where the launcher was moved"),
    ("cpu_ns", "counter", "v2 cpu.stat usage_usec, v1 cpuacct.usage"),
    ("cpu_period_count", "counter", "cpu.stat nr_periods of its quota"),
    ("cpu_throttled_period_count", "counter", "cpu.stat nr_throttled"),
    ("cpu_throttled_ns", "counter", "cpu.stat, summed over CPUs"),
    ("cpu_limit_cores", "gauge", "least quota here and above; null=none"),
    ("memory_used_bytes", "gauge", "memory.current, with its page cache"),
    ("memory_peak_bytes", "gauge", "memory.peak, max_usage_in_bytes"),
    ("memory_anonymous_bytes", "gauge", "memory.stat anon, total_rss"),
    ("memory_file_bytes", "gauge", "memory.stat file: cache, /dev/shm"),
    ("memory_swap_bytes", "gauge", "memory.swap.current, total_swap"),
    ("memory_limit_bytes", "gauge", "least here and above; null=none"),
    ("memory_limit_hit_count", "counter", "memory.events max, failcnt"),
    ("memory_oom_count", "counter", "oom_kill; v1: of this cgroup alone"),
    ("pressure_cpu_some_ns", "counter", "v2 cpu.pressure some total"),
    ("pressure_cpu_full_ns", "counter", "v2 cpu.pressure full total"),
    ("pressure_memory_some_ns", "counter", "v2 memory.pressure some"),
    ("pressure_memory_full_ns", "counter", "v2 memory.pressure full"),
    ("pressure_io_some_ns", "counter", "v2 io.pressure some total"),
    ("pressure_io_full_ns", "counter", "v2 io.pressure full total"),
)

# A record is one collection of the exporter (each 30 s by default), at the time it was read: the
# figures are of that collection, which was made since the read before. No new one, no record.
DCGM = _counters(
    "dcgm",
    ("gpu", "key", "NVML index of the UUID; the exporter's without NVML"),
    ("engine_active_ratio", "gauge", "DCGM 1001: any engine busy"),
    ("sm_active_ratio", "gauge", "DCGM 1002: SMs with a warp"),
    ("sm_occupancy_ratio", "gauge", "DCGM 1003: warps, of what fits"),
    ("tensor_active_ratio", "gauge", "DCGM 1004: any tensor operation"),
    ("dram_active_ratio", "gauge", "DCGM 1005: memory interface busy"),
    ("fp64_active_ratio", "gauge", "DCGM 1006"),
    ("fp32_active_ratio", "gauge", "DCGM 1007"),
    ("fp16_active_ratio", "gauge", "DCGM 1008: without tensor cores"),
    ("pcie_transmit_bytes_per_s", "gauge", "DCGM 1009: a rate"),
    ("pcie_receive_bytes_per_s", "gauge", "DCGM 1010: a rate"),
    ("nvlink_transmit_bytes_per_s", "gauge", "DCGM 1011: a rate"),
    ("nvlink_receive_bytes_per_s", "gauge", "DCGM 1012: a rate"),
    ("last_xid", "gauge", "DCGM 230: last XID ever seen; 0 is none", "packed"),
)

ETHERNET = _counters(
    "ethernet",
    ("interface_index", "key", "the kernel's; another device has another"),
    ("receive_pause_count", "counter", "pause frames, all priorities"),
    ("transmit_pause_count", "counter", "pause frames, all priorities"),
    ("receive_pause_ns", "counter", "held back by the other side, all priorities"),
    ("transmit_pause_ns", "counter", "held back by this side, all priorities"),
    ("pause_storm_warning_count", "counter", "long stalls of receiving"),
    ("pause_storm_error_count", "counter", "... that ended in no pauses"),
    ("receive_discard_count", "counter", "packets: no buffer in the port"),
    ("transmit_discard_count", "counter", "packets dropped by the port"),
    ("out_of_buffer_count", "counter", "packets: no buffer of the host"),
    ("receive_crc_error_count", "counter", "packets damaged on the wire"),
    ("receive_symbol_error_count", "counter", "symbols damaged"),
    ("rdma_receive_bytes", "counter", "rx_vport_rdma_unicast_bytes"),
    ("rdma_transmit_bytes", "counter", "tx_vport_rdma_unicast_bytes"),
)

FILESYSTEM = _counters(
    "filesystem",
    ("mount_index", "key", "running number; name in header and events"),
    ("read_bytes", "counter", "read calls, also those that a cache met"),
    ("write_bytes", "counter", "write calls"),
    ("server_read_bytes", "counter", "NFS: from the server"),
    ("server_write_bytes", "counter", "NFS: to the server"),
    ("server_read_count", "counter", "NFS: READ requests"),
    ("server_write_count", "counter", "NFS: WRITE requests"),
    ("metadata_count", "counter", "opens, lookups, attributes, listings"),
    ("server_read_rtt_ns", "counter", "READ: from sending to the reply"),
    ("server_read_execute_ns", "counter", "READ: with waiting to be sent"),
    ("server_write_rtt_ns", "counter", "WRITE: from sending to the reply"),
    ("server_write_execute_ns", "counter", "WRITE: with waiting to be sent"),
    ("metadata_execute_ns", "counter", "NFS: time of metadata requests"),
    ("retransmission_count", "counter", "NFS: requests sent again"),
    ("timeout_count", "counter", "NFS: requests not answered in time"),
    ("server_read_queue_ns", "counter", "READ: waiting on this client to be sent"),
    ("server_write_queue_ns", "counter", "WRITE: waiting on this client to be sent"),
    ("metadata_rtt_ns", "counter", "NFS, metadata: from sending to the reply"),
    ("metadata_queue_ns", "counter", "NFS, metadata: waiting on this client to be sent"),
)

GPU = _counters(
    "gpu",
    ("gpu", "key", "NVML index; its UUID is in the file header"),
    ("utilization_ratio", "gauge", "NVML: share with any kernel running"),
    ("memory_busy_ratio", "gauge", "NVML: share with memory traffic"),
    ("memory_used_bytes", "gauge", "NVML v2: without what is reserved"),
    ("memory_reserved_bytes", "gauge", "NVML v2: kept by the driver"),
    ("memory_total_bytes", "gauge", "NVML memory total"),
    ("power_watts", "gauge", "NVML; mean of 1 s from Ampere on"),
    ("power_instant_watts", "gauge", "NVML field 186"),
    ("energy_joules", "counter", "NVML field 83: since driver load"),
    ("sm_clock_hz", "gauge", "NVML clock info, SM"),
    ("memory_clock_hz", "gauge", "NVML clock info, memory"),
    ("temperature_celsius", "gauge", "NVML GPU temperature"),
    ("memory_temperature_celsius", "gauge", "NVML field 82"),
    ("throttle_reasons", "gauge", "NVML clocks event reasons, bits", "packed"),
    ("throttle_power_ns", "counter", "field 74: by the power cap"),
    ("throttle_thermal_ns", "counter", "field 75: by temperature"),
    ("throttle_sync_boost_ns", "counter", "field 76: by the sync group"),
    ("throttle_board_limit_ns", "counter", "field 77: by the board limit"),
    ("throttle_reliability_ns", "counter", "field 79: by reliability"),
    ("throttle_sw_thermal_ns", "counter", "slowed by software for heat"),
    ("throttle_hw_thermal_ns", "counter", "slowed by hardware for heat"),
    ("throttle_power_brake_ns", "counter", "slowed by a power brake"),
    ("pcie_transmit_bytes", "counter", "from the GPU; GPM or field 197"),
    ("pcie_receive_bytes", "counter", "to the GPU; GPM or field 198"),
    ("nvlink_transmit_bytes", "counter", "all links; field 138, 202"),
    ("nvlink_receive_bytes", "counter", "all links; field 139, 204"),
    ("sm_active_ratio", "gauge", "GPM 2 since the sample before"),
    ("sm_occupancy_ratio", "gauge", "GPM 3: warps, of what fits"),
    ("tensor_active_ratio", "gauge", "GPM 5: any tensor operation"),
    ("dram_active_ratio", "gauge", "GPM 10: of memory bandwidth"),
    ("fp64_active_ratio", "gauge", "GPM 11: without tensor cores"),
    ("fp32_active_ratio", "gauge", "GPM 12: without tensor cores"),
    ("fp16_active_ratio", "gauge", "GPM 13: without tensor cores"),
)

GPU_HEALTH = _counters(
    "gpu_health",
    ("gpu", "key", "NVML index; its UUID is in the file header"),
    ("ecc_volatile_corrected_count", "counter", "field 3: since load"),
    ("ecc_volatile_uncorrected_count", "counter", "field 4: since load"),
    ("ecc_aggregate_corrected_count", "counter", "field 5: for good"),
    ("ecc_aggregate_uncorrected_count", "counter", "field 6: for good"),
    ("remapped_corrected_row_count", "gauge", "field 142"),
    ("remapped_uncorrected_row_count", "gauge", "field 143"),
    ("remap_pending_count", "gauge", "field 144: waits for a reset"),
    ("remap_failure_count", "gauge", "field 145: no spare row was left"),
    ("retired_corrected_page_count", "gauge", "field 29"),
    ("retired_uncorrected_page_count", "gauge", "field 30"),
    ("retired_pending_count", "gauge", "field 31: waits for a reboot"),
    ("pcie_replay_count", "counter", "field 94: packets sent again"),
    ("pcie_correctable_count", "counter", "field 173"),
    ("pcie_non_fatal_count", "counter", "field 179"),
    ("pcie_fatal_count", "counter", "field 180"),
    ("pcie_generation", "gauge", "link as it is now: less when idle"),
    ("pcie_generation_max", "gauge", "of GPU and slot together"),
    ("pcie_lane_count", "gauge", "link as it is now"),
    ("pcie_lane_max_count", "gauge", "of GPU and slot together"),
    ("power_limit_watts", "gauge", "the enforced one"),
    ("sm_clock_max_hz", "gauge", "NVML max clock info, SM"),
    ("temperature_margin_celsius", "gauge", "left until it slows down"),
    ("temperature_slowdown_celsius", "gauge", "NVML threshold"),
    ("temperature_shutdown_celsius", "gauge", "NVML threshold"),
)

HOST = _counters(
    "host",
    ("cpu_user_ns", "counter", "/proc/stat user, all CPUs; guests are in"),
    ("cpu_nice_ns", "counter", "/proc/stat nice; guests are in"),
    ("cpu_system_ns", "counter", "/proc/stat system"),
    ("cpu_idle_ns", "counter", "/proc/stat idle"),
    ("cpu_iowait_ns", "counter", "/proc/stat iowait"),
    ("cpu_irq_ns", "counter", "/proc/stat irq"),
    ("cpu_softirq_ns", "counter", "/proc/stat softirq"),
    ("cpu_steal_ns", "counter", "/proc/stat steal"),
    ("cpu_count", "gauge", "CPUs online"),
    ("context_switch_count", "counter", "/proc/stat ctxt"),
    ("task_running_count", "gauge", "/proc/stat procs_running: runnable"),
    ("task_blocked_count", "gauge", "/proc/stat procs_blocked: on I/O"),
    ("memory_total_bytes", "gauge", "/proc/meminfo MemTotal"),
    ("memory_available_bytes", "gauge", "/proc/meminfo MemAvailable"),
    ("memory_free_bytes", "gauge", "/proc/meminfo MemFree"),
    ("memory_cached_bytes", "gauge", "/proc/meminfo Cached: files, shm"),
    ("memory_shared_bytes", "gauge", "/proc/meminfo Shmem: /dev/shm too"),
    ("memory_dirty_bytes", "gauge", "/proc/meminfo Dirty: to be written"),
    ("memory_huge_bytes", "gauge", "/proc/meminfo AnonHugePages"),
    ("swap_total_bytes", "gauge", "/proc/meminfo SwapTotal"),
    ("swap_used_bytes", "gauge", "/proc/meminfo SwapTotal - SwapFree"),
    ("huge_page_total_bytes", "gauge", "reserved, of the default size"),
    ("huge_page_free_bytes", "gauge", "of those, the unused ones"),
    ("page_fault_count", "counter", "/proc/vmstat pgfault"),
    ("major_page_fault_count", "counter", "/proc/vmstat pgmajfault"),
    ("oom_kill_count", "counter", "/proc/vmstat oom_kill: processes"),
    ("compaction_stall_count", "counter", "/proc/vmstat compact_stall"),
    ("numa_hint_fault_count", "counter", "/proc/vmstat numa_hint_faults"),
    ("numa_page_migration_count", "counter", "... numa_pages_migrated"),
    ("swap_in_bytes", "counter", "/proc/vmstat pswpin"),
    ("swap_out_bytes", "counter", "/proc/vmstat pswpout"),
    ("disk_read_bytes", "counter", "/proc/diskstats, whole devices"),
    ("disk_write_bytes", "counter", "/proc/diskstats, whole devices"),
    ("disk_read_count", "counter", "... reads completed"),
    ("disk_write_count", "counter", "... writes completed"),
    ("disk_busy_ns", "counter", "... time with I/O in flight, summed"),
    ("disk_count", "gauge", "disks in those sums"),
    ("network_receive_bytes", "counter", "/proc/net/dev without lo"),
    ("network_transmit_bytes", "counter", "/proc/net/dev without lo"),
    ("network_receive_packet_count", "counter", "... packets"),
    ("network_transmit_packet_count", "counter", "... packets"),
    ("network_receive_error_count", "counter", "... errs"),
    ("network_transmit_error_count", "counter", "... errs"),
    ("network_receive_drop_count", "counter", "... drop"),
    ("network_transmit_drop_count", "counter", "... drop"),
    ("tcp_transmit_segment_count", "counter", "/proc/net/snmp OutSegs"),
    ("tcp_retransmit_segment_count", "counter", "... RetransSegs"),
    ("tcp_timeout_count", "counter", "/proc/net/netstat TCPTimeouts"),
    ("tcp_listen_drop_count", "counter", "... ListenDrops"),
    ("pressure_cpu_some_ns", "counter", "/proc/pressure/cpu some total"),
    ("pressure_memory_some_ns", "counter", "/proc/pressure/memory some"),
    ("pressure_memory_full_ns", "counter", "/proc/pressure/memory full"),
    ("pressure_io_some_ns", "counter", "/proc/pressure/io some total"),
    ("pressure_io_full_ns", "counter", "/proc/pressure/io full total"),
    ("cpu_energy_joules", "counter", "RAPL package-N, all CPU packages"),
    ("memory_energy_joules", "counter", "RAPL dram, of all packages"),
)

# The four data counters of the port are in words of 4 bytes and are stored in bytes. Ports with
# extended counters have 64 bits there, others stop at 32: `sticky32` is right for both, since a
# counter that goes on passes that one value.
INFINIBAND = _counters(
    "infiniband",
    ("port_index", "key", "running number; name in header and events"),
    ("transmit_bytes", "sticky32x4", "port_xmit_data x 4"),
    ("receive_bytes", "sticky32x4", "port_rcv_data x 4"),
    ("transmit_wait_count", "sticky32",
     "port_xmit_wait: ticks without credit, of the adapter's own"),
    ("ecn_marked_count", "counter32", "RoCE packets received ECN-marked"),
    ("cnp_sent_count", "counter32", "congestion notifications sent"),
    ("cnp_handled_count", "counter32", "... received, sender slowed down"),
    ("cnp_ignored_count", "counter32", "... received and ignored"),
    ("out_of_sequence_count", "counter32", "packets out of sequence"),
    ("packet_sequence_error_count", "counter32", "sequence error NAKs"),
    ("ack_timeout_count", "counter32", "requests without ACK in time"),
    ("rnr_nak_count", "counter32", "receiver-not-ready NAKs received"),
    ("implied_nak_count", "counter32", "responses lost, seen by an ACK"),
    ("out_of_buffer_count", "counter32", "drops: no receive buffer"),
    ("duplicate_request_count", "counter32", "requests received twice"),
    ("adaptive_retransmission_count", "counter32", "roce_adp_retrans"),
    ("slow_restart_count", "counter32", "roce_slow_restart"),
    ("retransmission_count", "counter32", "EFA: packets sent again"),
)  # fmt: skip

INFINIBAND_HEALTH = _counters(
    "infiniband_health",
    ("port_index", "key", "running number; name in header and events"),
    ("link_up_ratio", "gauge", "1 where the port's state is ACTIVE"),
    ("link_rate_bytes_per_s", "gauge", "signal rate of an active port"),
    ("transmit_packet_count", "sticky32", "port_xmit_packets"),
    ("receive_packet_count", "sticky32", "port_rcv_packets"),
    ("symbol_error_count", "sticky16", "symbol_error"),
    ("link_recovery_count", "sticky8", "link_error_recovery: retrained"),
    ("link_down_count", "sticky8", "link_downed: retraining failed"),
    ("receive_error_count", "sticky16", "port_rcv_errors"),
    ("receive_remote_error_count", "sticky16", "packets that a switch had marked bad"),
    ("transmit_discard_count", "sticky16", "port_xmit_discards"),
    ("transmit_constraint_count", "sticky8", "..xmit_constraint_errors"),
    ("receive_constraint_count", "sticky8", "..rcv_constraint_errors"),
    ("link_integrity_count", "sticky4", "local_link_integrity_errors"),
    ("buffer_overrun_count", "sticky4", "excessive_buffer_overrun_errors"),
    ("vl15_drop_count", "sticky16", "VL15_dropped: management packets"),
)

MEMORY_BANDWIDTH = _counters(
    "memory_bandwidth",
    ("domain", "key", "socket; the header names the source of its figures (resctrl, uncore)"),
    ("read_bytes", "counter", "uncore: read from the socket's DRAM"),
    ("write_bytes", "counter", "uncore: written to the socket's DRAM"),
    ("total_bytes", "counter", "uncore: both; resctrl: mbm_total_bytes of its CPUs"),
    ("remote_bytes", "counter", "uncore: between sockets; resctrl: total - mbm_local_bytes"),
    ("counted_ratio", "gauge", "share of the time counted; below 1 all is scaled up"),
)

NUMA = _counters(
    "numa",
    ("node", "key", "number of the NUMA node"),
    ("memory_total_bytes", "gauge", "node meminfo MemTotal"),
    ("memory_free_bytes", "gauge", "node meminfo MemFree"),
    ("hit_page_count", "counter", "numa_hit: allocated here as intended"),
    ("miss_page_count", "counter", "numa_miss: allocated here, meant for another node"),
    ("foreign_page_count", "counter", "numa_foreign: meant for this node, allocated on another"),
    ("local_page_count", "counter", "local_node: pages allocated here by a process that ran here"),
    ("other_page_count", "counter", "other_node: allocated here from another node"),
)

PLACEMENT = _counters(
    "placement",
    ("pid", "key", "process of a rank, without its children"),
    ("start_ticks", "key", "stat field 22: a reused pid is another one"),
    ("last_cpu", "gauge", "stat field 39: CPU of the main thread"),
    ("cpu_node", "gauge", "NUMA node of that CPU"),
    ("allowed_cpu_count", "gauge", "status Cpus_allowed_list"),
    ("cpu_frequency_hz", "gauge", "scaling_cur_freq of last_cpu alone"),
    ("sampled_page_count", "gauge", "pages in memory, of 512 that were drawn (move_pages)"),
    ("local_page_ratio", "gauge", "share of those on NUMA nodes of the allowed CPUs"),
)

PROCESS = _counters(
    "process",
    ("pid", "key", "process of a rank; children are included below"),
    ("start_ticks", "key", "stat field 22: a reused pid is another one"),
    ("process_count", "gauge", "the process and its live descendants"),
    ("cpu_ns", "counter", "utime + stime of the process and descendants"),
    ("cpu_main_ns", "counter", "utime + stime of the process alone"),
    ("cpu_main_system_ns", "counter", "stime of the process alone: what the kernel does for it"),
    ("memory_rss_bytes", "gauge", "statm resident, summed"),
    ("read_bytes", "counter", "io rchar: read calls, of cached files, pipes and sockets too"),
    ("write_bytes", "counter", "io wchar: write calls, to pipes and sockets too"),
    ("storage_read_bytes", "counter", "io read_bytes: storage layer"),
    ("storage_write_bytes", "counter", "io write_bytes: storage layer"),
    ("thread_count", "gauge", "threads, summed"),
    ("page_fault_count", "counter", "stat minflt + majflt, summed"),
    ("major_page_fault_count", "counter", "stat majflt: from storage"),
    ("run_queue_wait_ns", "counter", "main thread's schedstat: able to run, no CPU free"),
    ("context_switch_count", "counter", "status of the main thread alone"),
    ("involuntary_context_switch_count", "counter",
     "those of them in which the kernel took the CPU away"),
)  # fmt: skip

REMOTE_MEMORY = _counters(
    "remote_memory",
    ("pid", "key", "process of a rank; children are included below"),
    ("start_ticks", "key", "stat field 22: a reused pid is another one"),
    ("instruction_count", "counter", "instructions in user mode since the rank was first seen"),
    ("cycle_count", "counter", "core cycles, the same"),
    ("local_dram_bytes", "counter", "64 B x cache fills from near DRAM: not all traffic"),
    ("remote_dram_bytes", "counter", "64 B x cache fills from far DRAM"),
    ("counted_ratio", "gauge", "share of the time counted; below 1 all is scaled up"),
    ("cache_miss_count", "counter", "accesses that the last cache did not have, in user mode"),
    ("tlb_miss_count", "counter", "loads whose address the data TLB did not have, likewise"),
)

COUNTER_TABLES = (
    HOST, CGROUP, PROCESS, PLACEMENT, GPU, GPU_HEALTH, DCGM, INFINIBAND, INFINIBAND_HEALTH,
    ETHERNET, FILESYSTEM, NUMA, MEMORY_BANDWIDTH, REMOTE_MEMORY,
)  # fmt: skip
