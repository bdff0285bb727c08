from __future__ import annotations

import sys

import pytest

from haiprof.rundir.tables.gpu import GPU
from haiprof.samplers import gpu
from haiprof.samplers.base import ALL_METRICS, Missing
from haiprof.samplers.gpu import GpuSampler
from tests.fakes import (
    FakeGpu,
    FakeNvml,
    NVMLError,
    NVMLError_DriverNotLoaded,
    NVMLError_GpuIsLost,
    NVMLError_LibraryNotFound,
    NVMLError_NotSupported,
    NVMLError_Unknown,
)
from tests.samplers.records import rows


def test_gpu_sample_has_base_units_and_the_header_identity() -> None:
    clock = iter(range(0, 1000, 10))
    sampler = GpuSampler(nvml=FakeNvml([FakeGpu(), FakeGpu(70)]), clock=lambda: next(clock))
    assert sampler.open() == []
    uuids = [f"GPU-00000000-0000-0000-0000-{n:012d}" for n in (0, 1)]
    assert sampler.header() == {
        "entities": [
            {"key": [n], "name": f"gpu {n}", "uuid": uuids[n], "model": "NVIDIA H200"}
            for n in (0, 1)
        ]
    }
    first, second = rows(GPU, sampler.sample())
    assert first == {
        "time_ns": 40,
        "read_ns": 10,
        "gpu": 0,
        "utilization_ratio": 0.3,
        "memory_used_bytes": 2 << 30,
        "memory_total_bytes": 80 << 30,
        "power_watts": 250.5,
    }
    assert (second["gpu"], second["utilization_ratio"]) == (1, 0.7)


def words(missing: list[Missing]) -> list[tuple[str, str]]:
    return [(each.metric, each.reason) for each in missing]


@pytest.mark.parametrize("error", [NVMLError_LibraryNotFound, NVMLError_DriverNotLoaded])
def test_gpu_without_a_driver_says_so_and_gives_no_records(error: type[NVMLError]) -> None:
    nvml = FakeNvml([FakeGpu()], init_error=error)
    sampler = GpuSampler(nvml=nvml)
    (missing,) = sampler.open()
    assert missing.metric == ALL_METRICS
    assert "driver" in missing.reason.lower()
    assert sampler.sample() == b""
    sampler.close()
    assert "nvmlShutdown" not in nvml.calls


def test_gpu_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", "libnvidia-ml-is-not-here.so.1")
    (missing,) = GpuSampler().open()
    assert missing.metric == ALL_METRICS
    assert "no NVIDIA driver here" in missing.reason


def test_gpu_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", "libc.so.6")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (missing,) = GpuSampler().open()
    assert missing.metric == ALL_METRICS
    assert "nvidia-ml-py" in missing.reason


def test_gpu_driver_without_a_gpu_says_so() -> None:
    (missing,) = GpuSampler(nvml=FakeNvml()).open()
    assert missing == Missing(ALL_METRICS, "NVML: the driver shows no usable GPU")


def test_gpu_unsupported_metric_is_null_said_once_and_not_asked_again() -> None:
    mig = FakeGpu(failures={"nvmlDeviceGetUtilizationRates": NVMLError_NotSupported})
    nvml = FakeNvml([mig, FakeGpu()])
    sampler = GpuSampler(nvml=nvml)
    assert words(sampler.open()) == [("utilization_ratio", "gpu 0: NVML: Not Supported")]
    nvml.calls.clear()
    first, second = rows(GPU, sampler.sample())
    assert first["utilization_ratio"] is None
    assert first["power_watts"] == 250.5
    assert second["utilization_ratio"] == 0.3
    assert nvml.calls.count("nvmlDeviceGetUtilizationRates") == 1
    assert sampler.drain_missing() == []


def test_gpu_passing_failure_is_null_and_tried_again() -> None:
    gpu = FakeGpu()
    sampler = GpuSampler(nvml=FakeNvml([gpu]))
    assert sampler.open() == []
    gpu.failures["nvmlDeviceGetMemoryInfo"] = NVMLError_Unknown
    (row,) = rows(GPU, sampler.sample())
    assert row["memory_used_bytes"] is None
    assert [m.metric for m in sampler.drain_missing()] == [
        "memory_used_bytes",
        "memory_total_bytes",
    ]
    gpu.failures.clear()
    (row,) = rows(GPU, sampler.sample())
    assert row["memory_used_bytes"] == 2 << 30


def test_gpu_lost_in_the_run_is_null_from_then_on() -> None:
    gpu = FakeGpu()
    nvml = FakeNvml([gpu, FakeGpu()])
    sampler = GpuSampler(nvml=nvml)
    sampler.open()
    gpu.failures["*"] = NVMLError_GpuIsLost
    for _ in range(2):
        lost, healthy = rows(GPU, sampler.sample())
        assert [lost[name] for name in ("utilization_ratio", "memory_used_bytes")] == [None, None]
        assert lost["power_watts"] is None
        assert healthy["power_watts"] == 250.5
    assert words(sampler.drain_missing()) == [("gpu 0", "NVML: GPU is lost; no further values")]
    nvml.calls.clear()
    sampler.sample()
    assert len(nvml.calls) == 3  # those of the healthy one


def test_gpu_that_gives_no_handle_is_named_and_the_others_are_read() -> None:
    denied = FakeGpu(failures={"nvmlDeviceGetHandleByIndex": NVMLError_Unknown})
    sampler = GpuSampler(nvml=FakeNvml([denied, FakeGpu()]))
    assert [m.metric for m in sampler.open()] == ["gpu 0"]
    (row,) = rows(GPU, sampler.sample())
    assert row["gpu"] == 1


def test_gpu_close_lets_go_of_the_driver_and_never_lists_processes() -> None:
    nvml = FakeNvml([FakeGpu()])
    sampler = GpuSampler(nvml=nvml)
    sampler.open()
    assert nvml.is_open
    sampler.close()
    sampler.close()
    assert not nvml.is_open
    assert not [call for call in nvml.calls if "Process" in call]
