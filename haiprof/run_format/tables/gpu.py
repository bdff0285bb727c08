"""Counters of a GPU, once an interval."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

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
