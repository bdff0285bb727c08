"""Errors, links and limits of a GPU, once in ten intervals."""

from __future__ import annotations

from haiprof.run_format.schema import Column, Table

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
