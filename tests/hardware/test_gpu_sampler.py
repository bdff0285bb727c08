"""The GPU samplers on a real driver, against nvidia-smi in the same seconds and known loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from haiprof.agent.samplers.gpu import GpuHealthSampler, GpuSampler
from haiprof.agent.samplers.gpu_activity import RATIOS
from haiprof.agent.samplers.table import ALL_METRICS, Missing
from haiprof.run_format.tables import GPU, GPU_HEALTH
from tests.unit.samplers.records import Row, rows

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]

MATMUL = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("running", flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
"""
COPIES = """
import sys, torch
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("running", flush=True)
sys.stdin.readline()
for _ in range(20):
    device.copy_(host, non_blocking=True)
torch.cuda.synchronize()
print("copied", flush=True)
sys.stdin.readline()
"""


class Opened:
    """An open sampler of the first GPU, and what it said is missing."""

    def __init__(self, sampler: GpuSampler | GpuHealthSampler, missing: list[Missing]) -> None:
        self.sampler = sampler
        self.missing = {each.metric: each for each in missing}

    def row(self) -> Row:
        """The first GPU's record now."""
        return rows(self.sampler.table, self.sampler.sample())[0]


def opened(sampler: GpuSampler | GpuHealthSampler) -> Iterator[Opened]:
    missing = sampler.open()
    for each in missing:
        print(f"{sampler.name}: {each.metric}: {each.status}: {each.reason}")
        if each.metric == ALL_METRICS:
            pytest.skip(each.reason)
    yield Opened(sampler, missing)
    sampler.close()


@pytest.fixture
def gpu() -> Iterator[Opened]:
    yield from opened(GpuSampler())


@pytest.fixture
def health() -> Iterator[Opened]:
    yield from opened(GpuHealthSampler())


@pytest.fixture
def load() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a script on the GPU and waits until it computes; ends it afterwards."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    started = []

    def start(script: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},  # NVML's order
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def smi(name: str) -> str:
    """One figure of the first GPU as nvidia-smi prints it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        pytest.skip("no nvidia-smi here")
    words = [tool, f"--query-gpu={name}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode or done.stdout.strip() in ("[N/A]", "N/A", "[Not Supported]"):
        pytest.skip(f"nvidia-smi has no {name} here: {done.stdout.strip()}")
    return done.stdout.strip()


def between(opened: Opened, column: str, name: str, unit: float, slack: float) -> None:
    """Asserts nvidia-smi's figure lies between ours before and after it, or as far off as slack."""
    before, theirs, after = opened.row()[column], float(smi(name)) * unit, opened.row()[column]
    if before is None or after is None:
        assert column in opened.missing
        pytest.skip(f"{column}: {opened.missing[column].reason}")
    low, high = sorted((before, after))
    print(f"{column}: {before} / {theirs} / {after}")
    assert low - slack <= theirs <= high + slack


MIB, MHZ = float(1 << 20), 1e6


@pytest.mark.parametrize(
    ("column", "name", "unit", "slack"),
    [
        ("utilization_ratio", "utilization.gpu", 0.01, 0.15),
        ("memory_busy_ratio", "utilization.memory", 0.01, 0.15),
        ("memory_used_bytes", "memory.used", MIB, 2 * MIB),
        ("memory_reserved_bytes", "memory.reserved", MIB, 2 * MIB),
        ("memory_total_bytes", "memory.total", MIB, MIB),
        ("power_watts", "power.draw.average", 1.0, 15.0),
        ("power_instant_watts", "power.draw.instant", 1.0, 30.0),
        ("sm_clock_hz", "clocks.sm", MHZ, 60 * MHZ),
        ("memory_clock_hz", "clocks.mem", MHZ, 10 * MHZ),
        ("temperature_celsius", "temperature.gpu", 1.0, 2.0),
        ("memory_temperature_celsius", "temperature.memory", 1.0, 2.0),
    ],
)
@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "matmul"])
def test_gpu_figure_is_that_of_nvidia_smi(
    gpu: Opened,
    load: Callable[[str], object],
    column: str,
    name: str,
    unit: float,
    slack: float,
    loaded: bool,
) -> None:
    if loaded:
        load(MATMUL)
        time.sleep(2.5)  # the power average of the driver is that of the last second
    between(gpu, column, name, unit, slack)


@pytest.mark.parametrize(
    ("column", "name", "unit"),
    [
        ("pcie_generation_max", "pcie.link.gen.max", 1.0),
        ("pcie_lane_count", "pcie.link.width.current", 1.0),
        ("pcie_lane_max_count", "pcie.link.width.max", 1.0),
        ("power_limit_watts", "enforced.power.limit", 1.0),
        ("sm_clock_max_hz", "clocks.max.sm", MHZ),
        ("ecc_volatile_corrected_count", "ecc.errors.corrected.volatile.total", 1.0),
        ("ecc_volatile_uncorrected_count", "ecc.errors.uncorrected.volatile.total", 1.0),
        ("ecc_aggregate_corrected_count", "ecc.errors.corrected.aggregate.total", 1.0),
        ("ecc_aggregate_uncorrected_count", "ecc.errors.uncorrected.aggregate.total", 1.0),
    ],
)
def test_gpu_health_figure_is_that_of_nvidia_smi(
    health: Opened, column: str, name: str, unit: float
) -> None:
    between(health, column, name, unit, 0.01)


def test_gpu_identity_is_that_of_nvidia_smi(gpu: Opened) -> None:
    header = gpu.sampler.header()
    assert header["driver"] == smi("driver_version")
    entity = header["entities"][0]  # type: ignore[index]
    assert entity["uuid"] == smi("uuid")
    assert entity["model"] == smi("name")
    assert smi("pci.bus_id").lower().endswith(entity["bus_id"])


def test_gpu_reads_what_every_data_centre_gpu_has(gpu: Opened) -> None:
    row = gpu.row()
    needed = ("utilization_ratio", "memory_used_bytes", "memory_reserved_bytes", "power_watts",
              "energy_joules", "sm_clock_hz", "memory_clock_hz", "temperature_celsius",
              "throttle_reasons", "throttle_power_ns")  # fmt: skip
    assert not [name for name in needed if row[name] is None]
    for column in GPU.metrics:
        assert row[column.name] is not None or column.name in (*gpu.missing, *RATIOS)


def test_gpu_states_have_a_value_or_a_reason(gpu: Opened, health: Opened) -> None:
    for opened, table in ((gpu, GPU), (health, GPU_HEALTH)):
        states = [state for state in opened.sampler.states() if state.entity == "gpu 0"]
        assert {column.name for column in table.metrics} <= {state.metric for state in states}
        for state in states:
            print(f"{state.metric}: {state.status} {state.value} {state.read_ns} {state.reason}")
            assert (state.value is None) == (state.status != "available")
            assert state.value is not None or state.reason


def difference(before: Row, after: Row, column: str) -> float:
    """Growth per second; skips where the column is missing."""
    first, last = before[column], after[column]
    if first is None or last is None:
        pytest.skip(f"{column} is not there")
    return (last - first) / seconds_between(before, after)


def seconds_between(before: Row, after: Row) -> float:
    assert before["time_ns"] is not None
    assert after["time_ns"] is not None
    return (after["time_ns"] - before["time_ns"]) / 1e9


def test_gpu_energy_grows_by_the_power_and_throttle_times_by_no_more_than_the_time(
    gpu: Opened, load: Callable[[str], object]
) -> None:
    load(MATMUL)
    time.sleep(2.5)
    taken = [gpu.row()]
    for _ in range(10):
        time.sleep(0.5)
        taken.append(gpu.row())
    power = [row["power_instant_watts"] or row["power_watts"] or 0.0 for row in taken]
    joules_per_s = difference(taken[0], taken[-1], "energy_joules")
    mean = sum(power) / len(power)
    print(f"energy {joules_per_s:.0f} J/s, power {mean:.0f} W")
    assert joules_per_s == pytest.approx(mean, rel=0.15)
    for column in GPU.columns:
        if column.name.startswith("throttle_") and column.unit == "ns" and taken[0][column.name]:
            share = difference(taken[0], taken[-1], column.name) / 1e9
            print(f"{column.name}: {share:.3f} of the time")
            assert 0 <= share <= 1.1, column.name


def test_gpm_shows_a_matmul_as_tensor_work(gpu: Opened, load: Callable[[str], object]) -> None:
    if "sm_active_ratio" in gpu.missing:
        pytest.skip(gpu.missing["sm_active_ratio"].reason)
    time.sleep(1)
    gpu.row()
    time.sleep(1)
    idle = gpu.row()
    load(MATMUL)
    time.sleep(2)
    gpu.row()
    time.sleep(2)
    busy = gpu.row()
    print({name: (idle[name], busy[name]) for name in RATIOS})
    shares = {name: value for name in RATIOS if (value := busy[name]) is not None}
    assert all(0 <= value <= 1.02 for value in shares.values())
    assert shares["sm_active_ratio"] > 0.8
    assert shares["tensor_active_ratio"] > 0.4
    assert 0 < shares["sm_occupancy_ratio"] < shares["sm_active_ratio"]
    assert 0 < shares["dram_active_ratio"] < 0.8
    assert shares["fp64_active_ratio"] < 0.05
    assert (idle["sm_active_ratio"] or 0.0) < 0.5 * shares["sm_active_ratio"]


def test_pcie_received_bytes_are_those_that_were_copied(
    gpu: Opened, load: Callable[[str], subprocess.Popen[str]]
) -> None:
    if "pcie_receive_bytes" in gpu.missing:
        pytest.skip(gpu.missing["pcie_receive_bytes"].reason)
    process = load(COPIES)
    assert process.stdin is not None
    assert process.stdout is not None
    gpu.row()
    time.sleep(0.5)
    before = gpu.row()
    print("", file=process.stdin, flush=True)
    assert process.stdout.readline() == "copied\n"
    time.sleep(0.5)
    after = gpu.row()
    received = difference(before, after, "pcie_receive_bytes") * seconds_between(before, after)
    print(f"{received / (20 << 30):.3f} of the bytes that were copied")
    assert 0.95 <= received / (20 << 30) <= 1.35  # with the protocol's own


def test_gpu_sampler_stays_below_its_limit(gpu: Opened, load: Callable[[str], object]) -> None:
    load(MATMUL)
    reads = []
    for _ in range(30):
        time.sleep(0.11)
        reads.append(gpu.row()["read_ns"] or 0)
    reads.sort()
    print(f"NVML sample: p50 {reads[15] / 1e3:.0f} us, max {reads[-1] / 1e3:.0f} us")
    assert reads[15] < gpu.sampler.read_limit_ns


def test_gpu_sampler_sees_memory_that_torch_takes(gpu: Opened) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    torch.cuda.synchronize()
    entities = gpu.sampler.header()["entities"]
    uuids = [entity["uuid"] for entity in entities]  # type: ignore[attr-defined]
    index = uuids.index(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    before = rows(GPU, gpu.sampler.sample())[index]["memory_used_bytes"]
    block = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    after = rows(GPU, gpu.sampler.sample())[index]["memory_used_bytes"]
    del block
    assert before is not None
    assert after is not None
    assert after - before >= 500 << 20
