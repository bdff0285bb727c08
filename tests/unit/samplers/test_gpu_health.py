from __future__ import annotations

from haiprof.agent.samplers.gpu import GpuHealthSampler
from haiprof.agent.samplers.table import Node
from haiprof.run_format.tables import GPU_HEALTH
from tests.fake_nvml import (
    UINT,
    FakeGpu,
    FakeNvml,
    NVMLError_FunctionNotFound,
    NVMLError_NotSupported,
)
from tests.unit.samplers.records import opened, rows


def test_gpu_health_has_errors_links_and_limits_of_each_gpu() -> None:
    gpu = FakeGpu()
    gpu.fields |= {(number, 0): (UINT, 20 + number) for number in (29, 30, 31)}
    nvml = FakeNvml([gpu, FakeGpu()])
    sampler = opened(GpuHealthSampler(Node(nvml=nvml, clock=lambda: 7)))
    nvml.queries.clear()
    first, second = rows(GPU_HEALTH, sampler.sample())
    assert first == {
        "time_ns": 7, "read_ns": 0, "gpu": 0, "ecc_volatile_corrected_count": 0,
        "ecc_volatile_uncorrected_count": 1, "ecc_aggregate_corrected_count": 2,
        "ecc_aggregate_uncorrected_count": 3, "remapped_corrected_row_count": 4,
        "remapped_uncorrected_row_count": 5, "remap_pending_count": 6, "remap_failure_count": 7,
        "retired_corrected_page_count": 49, "retired_uncorrected_page_count": 50,
        "retired_pending_count": 51, "pcie_replay_count": 11, "pcie_correctable_count": 12,
        "pcie_non_fatal_count": 13, "pcie_fatal_count": 14, "pcie_generation": 4,
        "pcie_generation_max": 5, "pcie_lane_count": 8, "pcie_lane_max_count": 16,
        "power_limit_watts": 700.0, "sm_clock_max_hz": 1_980_000_000,
        "temperature_margin_celsius": 45.0, "temperature_slowdown_celsius": 89.0,
        "temperature_shutdown_celsius": 92.0,
    }  # fmt: skip
    assert second["gpu"] == 1
    assert len(nvml.queries) == 2  # one call per GPU
    sampler.close()
    assert not nvml.is_open


def test_gpu_health_that_a_gpu_or_driver_lacks_is_named() -> None:
    nvml = FakeNvml([
        FakeGpu(
            failures={
                "nvmlDeviceGetMarginTemperature": NVMLError_FunctionNotFound,
                "nvmlDeviceGetTemperatureThreshold": NVMLError_NotSupported,
            }
        )
    ])  # fmt: skip
    sampler = GpuHealthSampler(Node(nvml=nvml))
    missing = {each.metric: each for each in sampler.open()}
    retired = {
        f"retired_{word}_count" for word in ("corrected_page", "uncorrected_page", "pending")
    }
    limits = {f"temperature_{word}_celsius" for word in ("margin", "slowdown", "shutdown")}
    assert set(missing) == retired | limits
    assert {each.status for each in missing.values()} == {"unsupported"}
    assert missing["temperature_margin_celsius"].remedy == "a newer NVIDIA driver"
    (row,) = rows(GPU_HEALTH, sampler.sample())
    assert row["temperature_margin_celsius"] is None
    assert row["remap_failure_count"] == 7
