"""The GPU sampler on a real driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from haiprof.rundir.tables.gpu import GPU
from haiprof.samplers.base import ALL_METRICS
from haiprof.samplers.gpu import GpuSampler
from tests.samplers.records import rows

pytestmark = pytest.mark.gpu


@pytest.fixture
def sampler() -> Iterator[GpuSampler]:
    sampler = GpuSampler()
    for missing in sampler.open():
        if missing.metric == ALL_METRICS:
            pytest.skip(missing.reason)
    yield sampler
    sampler.close()


def test_gpu_sampler_reads_a_real_gpu(sampler: GpuSampler) -> None:
    gpus = sampler.header()["entities"]
    assert isinstance(gpus, list)
    assert gpus[0]["uuid"].startswith("GPU-")
    assert gpus[0]["name"]
    samples = rows(GPU, sampler.sample())
    assert [row["gpu"] for row in samples] == [gpu["index"] for gpu in gpus]
    for row in samples:
        utilization, power = row["utilization_ratio"], row["power_watts"]
        used, total = row["memory_used_bytes"], row["memory_total_bytes"]
        assert utilization is None or 0 <= utilization <= 1
        assert power is None or 1 < power < 3000
        assert used is None or total is None or 0 < used <= total
        assert total is None or total > 1 << 30


def test_gpu_sampler_stays_below_its_limit(sampler: GpuSampler) -> None:
    reads = sorted(
        sum(row["read_ns"] or 0 for row in rows(GPU, sampler.sample())) for _ in range(50)
    )
    print(f"NVML sample: p50 {reads[25] / 1e3:.0f} us, max {reads[-1] / 1e3:.0f} us")
    assert reads[25] < sampler.read_limit_ns


def test_gpu_sampler_sees_memory_that_torch_takes(sampler: GpuSampler) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    index = [gpu["uuid"] for gpu in _gpus(sampler)].index(_torch_uuid(torch))
    before = rows(GPU, sampler.sample())[index]["memory_used_bytes"]
    block = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = rows(GPU, sampler.sample())[index]["memory_used_bytes"]
    del block
    assert before is not None
    assert after is not None
    assert after - before >= 500 << 20


def _gpus(sampler: GpuSampler) -> list[dict[str, str]]:
    gpus = sampler.header()["entities"]
    assert isinstance(gpus, list)
    return gpus


def _torch_uuid(torch: object) -> str:
    properties = torch.cuda.get_device_properties(0)  # type: ignore[attr-defined]
    return f"GPU-{properties.uuid}"
