from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from haiprof.agent.samplers import nvml as nvml_module
from haiprof.agent.samplers.gpu import RATIOS, Gpm, GpuSampler
from haiprof.agent.samplers.loop import SamplingLoop
from haiprof.agent.samplers.nvml import Device, Nvml, sysfs_bus_id
from haiprof.agent.samplers.table import ALL_METRICS, Missing, MissingLog, Node
from haiprof.base.options import Options
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import read_lines, read_records
from haiprof.run_format.tables import GPU
from tests.fake_nvml import (
    ALL_LINKS,
    UINT,
    ULONGLONG,
    FakeGpu,
    FakeNvml,
    FieldAnswer,
    NVMLError,
    NVMLError_DriverNotLoaded,
    NVMLError_FunctionNotFound,
    NVMLError_GpuIsLost,
    NVMLError_InvalidArgument,
    NVMLError_LibraryNotFound,
    NVMLError_LibRmVersionMismatch,
    NVMLError_NoPermission,
    NVMLError_NotSupported,
    NVMLError_ResetRequired,
    NVMLError_Unknown,
)
from tests.unit.samplers.records import Row, SimulatedTime, rows

SECOND = 1_000_000_000


class Driver:
    """A fake driver with its sampler, at a time that the test moves."""

    def __init__(self, *gpus: FakeGpu, driver: str = "580.159.04", root: Path = Path("/none")):
        self.now = 5 * SECOND
        self.nvml = FakeNvml(gpus, driver=driver)
        self.sampler = GpuSampler(Node(nvml=self.nvml, root=root, clock=lambda: self.now))

    def open(self) -> list[Missing]:
        return self.sampler.open()

    def after(self, elapsed_ns: int) -> Row:
        """The first GPU's record, so much later."""
        self.now += elapsed_ns
        return rows(GPU, self.sampler.sample())[0]


@pytest.fixture
def one() -> Iterator[Driver]:
    driver = Driver(FakeGpu())
    yield driver
    driver.sampler.close()


def reasons(missing: list[Missing]) -> dict[str, str]:
    return {each.metric: each.reason for each in missing}


def test_gpu_sample_has_every_column_in_base_units(one: Driver) -> None:
    assert one.open() == []
    one.after(0)
    row = one.after(SECOND)
    assert row == {
        "time_ns": 6 * SECOND, "read_ns": 0, "gpu": 0, "utilization_ratio": 0.3,
        "memory_busy_ratio": 0.05, "memory_used_bytes": 2 << 30, "memory_reserved_bytes": 600 << 20,
        "memory_total_bytes": 80 << 30, "power_watts": 250.5, "power_instant_watts": 251.0,
        "energy_joules": 5000.5, "sm_clock_hz": 1_980_000_000, "memory_clock_hz": 3_201_000_000,
        "temperature_celsius": 41.0, "memory_temperature_celsius": 51.0, "throttle_reasons": 4,
        "throttle_power_ns": 1_000, "throttle_thermal_ns": 2_000, "throttle_sync_boost_ns": 3_000,
        "throttle_board_limit_ns": 4_000, "throttle_reliability_ns": 5_000,
        "throttle_sw_thermal_ns": 6_000, "throttle_hw_thermal_ns": 7_000,
        "throttle_power_brake_ns": 8_000, "pcie_transmit_bytes": 100 << 20,
        "pcie_receive_bytes": 200 << 20, "nvlink_transmit_bytes": 1 << 40,
        "nvlink_receive_bytes": 1 << 41, "sm_active_ratio": 0.8, "sm_occupancy_ratio": 0.4,
        "tensor_active_ratio": 0.6, "dram_active_ratio": 0.3, "fp64_active_ratio": 0.0,
        "fp32_active_ratio": 0.125, "fp16_active_ratio": 0.01,
    }  # fmt: skip


def test_gpu_sample_asks_for_all_fields_in_one_call_and_never_for_what_blocks(one: Driver) -> None:
    one.open()
    one.nvml.calls.clear()
    one.nvml.queries.clear()
    one.after(SECOND)
    assert one.nvml.calls.count("nvmlDeviceGetFieldValues") == 1
    (asked,) = one.nvml.queries
    assert len(asked) == len(set(asked)) == 13
    assert "nvmlDeviceGetPcieThroughput" not in one.nvml.calls
    assert not [call for call in one.nvml.calls if "Process" in call]


def test_gpu_header_says_who_each_gpu_is_and_which_driver(tmp_path: Path) -> None:
    for bus_id, node in (("0000:1f:00.0", "1\n"), ("0000:20:00.0", "-1\n")):  # -1: not said
        device = tmp_path / "sys/bus/pci/devices" / bus_id
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node)
    driver = Driver(FakeGpu(), FakeGpu(), root=tmp_path)
    driver.open()
    header = driver.sampler.header()
    uuids = [f"GPU-00000000-0000-0000-0000-{n:012d}" for n in (0, 1)]
    shared = {"model": "NVIDIA H200", "mig": False}
    assert header["entities"] == [
        {"key": [0], "name": "gpu 0", "uuid": uuids[0], **shared,
         "bus_id": "0000:1f:00.0", "numa_node": 1},
        {"key": [1], "name": "gpu 1", "uuid": uuids[1], **shared,
         "bus_id": "0000:20:00.0", "numa_node": None},
    ]  # fmt: skip
    assert header["driver"] == "580.159.04"


@pytest.mark.parametrize(("error", "word", "remedy"), [
    (NVMLError_LibraryNotFound, "no libnvidia-ml.so.1", "NVIDIA_DRIVER_CAPABILITIES"),
    (NVMLError_DriverNotLoaded, "Driver Not Loaded", ""),
    (NVMLError_LibRmVersionMismatch, "mismatch", "reboot"),
])  # fmt: skip
def test_gpu_driver_that_does_not_start_is_said_with_a_remedy(
    error: type[NVMLError], word: str, remedy: str
) -> None:
    nvml = FakeNvml([FakeGpu()], init_error=error)
    sampler = GpuSampler(Node(nvml=nvml))
    (missing,) = sampler.open()
    assert missing.metric == ALL_METRICS
    assert word in missing.reason
    assert remedy in missing.remedy
    assert sampler.sample() == b""
    sampler.close()
    assert "nvmlShutdown" not in nvml.calls


@pytest.mark.parametrize(("library", "word"), [
    ("libnvidia-ml-is-not-here.so.1", "no NVIDIA driver here"),
    ("libc.so.6", "nvidia-ml-py"),  # the driver is there, the binding is not
])  # fmt: skip
def test_gpu_without_the_driver_or_the_binding_says_so(
    monkeypatch: pytest.MonkeyPatch, library: str, word: str
) -> None:
    monkeypatch.setattr(nvml_module, "LIBRARY", library)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (missing,) = GpuSampler(Node()).open()
    assert missing.metric == ALL_METRICS
    assert word in missing.reason


def test_gpu_driver_without_a_gpu_says_so() -> None:
    (missing,) = GpuSampler(Node(nvml=FakeNvml())).open()
    assert missing == Missing(ALL_METRICS, "NVML: the driver shows no usable GPU")
    assert sysfs_bus_id("00000000:0F:00.0") == "0000:0f:00.0"
    assert sysfs_bus_id("00010000:0F:00.0") == "10000:0f:00.0"
    assert sysfs_bus_id("0000:0F:00.0") == "0000:0f:00.0"


def test_gpu_function_that_the_binding_lacks_is_unsupported(
    one: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlGpmQueryDeviceSupport")
    missing = {each.metric: each for each in one.open()}
    why = missing["sm_active_ratio"]
    assert why.reason == "gpu 0: nvidia-ml-py has no nvmlGpmQueryDeviceSupport"
    assert (why.status, why.remedy) == ("unsupported", "pip install --upgrade nvidia-ml-py")


def test_gpu_functions_under_their_old_names_are_used_on_an_old_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetTemperatureV")
    gone = {"nvmlDeviceGetCurrentClocksEventReasons": NVMLError_FunctionNotFound}
    driver = Driver(FakeGpu(failures=dict(gone)))
    assert driver.open() == []
    row = driver.after(SECOND)
    assert (row["temperature_celsius"], row["throttle_reasons"]) == (41.0, 4)


def test_gpu_memory_of_a_driver_before_510_says_that_it_counts_what_is_reserved() -> None:
    driver = Driver(FakeGpu(failures={"nvmlDeviceGetMemoryInfo_v2": NVMLError_FunctionNotFound}))
    missing = reasons(driver.open())
    assert list(missing) == ["memory_reserved_bytes"]
    assert "counted in memory_used_bytes" in missing["memory_reserved_bytes"]
    row = driver.after(SECOND)
    assert row["memory_used_bytes"] == (2 << 30) + (600 << 20)
    assert row["memory_reserved_bytes"] is None


def test_gpu_unsupported_metric_is_null_said_once_and_not_asked_again() -> None:
    odd = FakeGpu(failures={"nvmlDeviceGetPowerUsage": NVMLError_NotSupported})
    driver = Driver(odd, FakeGpu())
    (missing,) = driver.open()
    assert missing == Missing(
        "power_watts", "gpu 0: nvmlDeviceGetPowerUsage: Not Supported", "unsupported"
    )
    driver.nvml.calls.clear()
    first, second = rows(GPU, driver.sampler.sample())
    assert first["power_watts"] is None
    assert second["power_watts"] == 250.5
    assert driver.nvml.calls.count("nvmlDeviceGetPowerUsage") == 1
    assert driver.sampler.missing.drain() == []


def test_gpu_passing_failure_is_null_and_tried_again(one: Driver) -> None:
    assert one.open() == []
    gpu = one.nvml.gpus[0]
    gpu.failures["nvmlDeviceGetUtilizationRates"] = NVMLError_Unknown
    assert one.after(SECOND)["utilization_ratio"] is None
    assert list(reasons(one.sampler.missing.drain())) == ["utilization_ratio", "memory_busy_ratio"]
    gpu.failures.clear()
    assert one.after(SECOND)["utilization_ratio"] == 0.3


def test_gpu_field_that_is_refused_leaves_the_others(one: Driver) -> None:
    gpu = one.nvml.gpus[0]
    del gpu.fields[82, 0]
    gpu.fields[83, 0] = NVMLError_Unknown
    missing = reasons(one.open())
    assert missing == {
        "memory_temperature_celsius": "gpu 0: NVML field 82: Not Supported",
        "energy_joules": "gpu 0: NVML field 83: NVML error 999",
    }
    one.nvml.queries.clear()
    gpu.fields[83, 0] = (ULONGLONG, 7_000)
    row = one.after(SECOND)
    assert row["memory_temperature_celsius"] is None
    assert row["energy_joules"] == 7.0
    assert row["throttle_power_ns"] == 1_000
    assert (82, 0) not in one.nvml.queries[0]


@pytest.mark.parametrize(
    "answer", [(ULONGLONG, (1 << 64) - 1), (UINT, (1 << 32) - 1), NVMLError_InvalidArgument]
)
def test_gpu_field_that_says_not_available_is_null(answer: FieldAnswer, one: Driver) -> None:
    one.nvml.gpus[0].fields[74, 0] = answer
    assert list(reasons(one.open())) == ["throttle_power_ns"]
    assert one.after(SECOND)["throttle_power_ns"] is None


@pytest.mark.parametrize(("driver", "ids"), [
    ("570.124.06", None),
    ("575.51.03", (251, 252, 253)),
    ("580.65.06", (251, 252, 253)),
    ("580.70", None),
    ("580.82.07", (269, 270, 271)),
    ("615.10", (269, 270, 271)),
    ("unknown", None),
])  # fmt: skip
def test_gpu_thermal_slowdown_is_asked_by_the_id_of_the_running_driver(
    driver: str, ids: tuple[int, int, int] | None
) -> None:
    gpu = FakeGpu()
    gpu.fields |= {(252, 0): (ULONGLONG, 2), (253, 0): (ULONGLONG, 3)}
    fake = Driver(gpu, driver=driver)
    missing = {each.metric: each for each in fake.open()}
    row = fake.after(SECOND)
    columns = ("throttle_sw_thermal_ns", "throttle_hw_thermal_ns", "throttle_power_brake_ns")
    asked = {number for query in fake.nvml.queries for number, _ in query}
    assert asked & {251, 252, 253, 269, 270, 271} == set(ids or ())
    if ids is None:
        assert [row[name] for name in columns] == [None] * 3
        assert "not known" in missing[columns[0]].reason
        assert missing[columns[0]].status == "unsupported"
    else:
        expected = {251: [1, 2, 3], 269: [6_000, 7_000, 8_000]}
        assert [row[name] for name in columns] == expected[ids[0]]
    fake.sampler.close()


@pytest.mark.parametrize("error", [NVMLError_GpuIsLost, NVMLError_ResetRequired])
def test_gpu_lost_in_run_is_said_once_and_ends_only_its_own_records(error: type[NVMLError]) -> None:
    lost, healthy = FakeGpu(), FakeGpu()
    driver = Driver(lost, healthy)
    assert driver.open() == []
    lost.failures["*"] = error
    for _ in range(2):
        driver.now += SECOND
        (row,) = rows(GPU, driver.sampler.sample())
        assert row["gpu"] == 1
        assert row["power_watts"] == 250.5
    (missing,) = driver.sampler.missing.drain()
    assert missing.metric == "gpu 0"
    assert missing.reason.endswith("; no further values")


def test_gpu_lost_by_the_code_of_one_field_ends_its_records(one: Driver) -> None:
    one.open()
    one.nvml.gpus[0].fields[74, 0] = NVMLError_GpuIsLost
    one.now += SECOND
    assert one.sampler.sample() == b""
    assert [each.metric for each in one.sampler.missing.drain()] == ["gpu 0"]


def test_gpu_that_gives_no_handle_is_named_and_the_others_are_read() -> None:
    denied = FakeGpu(failures={"nvmlDeviceGetHandleByIndex": NVMLError_NoPermission})
    driver = Driver(denied, FakeGpu())
    (missing,) = driver.open()
    assert (missing.metric, missing.status) == ("gpu 0", "denied")
    (row,) = rows(GPU, driver.sampler.sample())
    assert row["gpu"] == 1


def test_gpu_pcie_without_gpm_is_only_given_by_counters_known_to_be_wide() -> None:
    gpu = FakeGpu(gpm_supported=0)
    driver = Driver(gpu)
    missing = reasons(driver.open())
    assert "32 bits" in missing["pcie_transmit_bytes"]
    assert driver.after(SECOND)["pcie_transmit_bytes"] is None
    driver.sampler.close()

    gpu.fields |= {(197, 0): (ULONGLONG, 1 << 31), (198, 0): (ULONGLONG, 1 << 33)}
    driver = Driver(gpu)
    missing = reasons(driver.open())
    assert "below 2^32" in missing["pcie_transmit_bytes"]
    row = driver.after(SECOND)
    assert (row["pcie_transmit_bytes"], row["pcie_receive_bytes"]) == (None, 1 << 33)
    gpu.fields[197, 0] = (ULONGLONG, 1 << 34)
    assert driver.after(SECOND)["pcie_transmit_bytes"] == 1 << 34


def test_gpu_nvlink_that_is_denied_as_a_field_comes_from_gpm() -> None:
    gpu = FakeGpu()
    gpu.fields |= {(number, ALL_LINKS): NVMLError_NoPermission for number in (138, 139)}
    driver = Driver(gpu)
    assert driver.open() == []
    driver.after(0)
    row = driver.after(2 * SECOND)
    assert row["nvlink_receive_bytes"] == 2 * 3 << 20
    assert row["nvlink_transmit_bytes"] == 2 * 4 << 20


def test_gpu_without_nvlink_says_so(one: Driver) -> None:
    for number in (138, 139):
        del one.nvml.gpus[0].fields[number, ALL_LINKS]
    missing = reasons(one.open())
    assert missing["nvlink_transmit_bytes"] == "gpu 0: NVML field 138: Not Supported"
    assert one.after(SECOND)["nvlink_transmit_bytes"] is None
    gpu = FakeGpu(architecture=10)
    gpu.fields[202, ALL_LINKS] = (ULONGLONG, 70 << 30)
    gpu.fields[204, ALL_LINKS] = (ULONGLONG, 71 << 30)
    driver = Driver(gpu)
    assert driver.open() == []
    row = driver.after(SECOND)
    assert row["nvlink_transmit_bytes"] == 70 << 30
    assert row["nvlink_receive_bytes"] == 71 << 30


def test_gpm_ratio_is_that_of_two_samples_far_enough_apart(one: Driver) -> None:
    assert one.open() == []
    assert one.after(0)["sm_active_ratio"] is None  # a new beginning: nothing to compare with yet
    assert one.after(99_000_000)["sm_active_ratio"] is None
    assert one.after(100_000_000)["sm_active_ratio"] == 0.8
    assert one.after(50_000_000)["sm_active_ratio"] is None
    assert one.after(50_000_000)["sm_active_ratio"] == 0.8
    assert one.sampler.missing.drain() == []


def test_gpm_at_ten_hertz_has_a_value_at_each_sample_though_some_come_a_little_early() -> None:
    nvml = Nvml(FakeNvml([FakeGpu()]))
    nvml.open()
    device = Device(nvml, 0, nvml.call("nvmlDeviceGetHandleByIndex", 0), MissingLog())
    now, tick = [0], 100_000_000

    def pause(seconds: float) -> None:
        now[0] += round(seconds * SECOND)

    columns = ("sm_active_ratio", "pcie_transmit_bytes")
    gpm = Gpm(device, columns, clock=lambda: now[0], pause=pause)
    gpm.open()
    read = []
    for number, late in enumerate((0, 300_000, 0, 900_000, 100_000, 1_200_000, 200_000), start=1):
        now[0] = max(now[0], number * tick + late)
        read.append(gpm.read())
    gpm.close()
    assert [ratio for ratio, _ in read[1:]] == [0.8] * 6
    sent = [total for _, total in read[1:]]
    assert all(isinstance(b, int) and isinstance(a, int) and b > a for a, b in pairwise(sent))


def test_gpm_traffic_adds_up_over_the_time_between_samples(one: Driver) -> None:
    one.open()
    sent = [one.after(elapsed)["pcie_transmit_bytes"] for elapsed in (0, SECOND, SECOND // 2)]
    assert sent == [0, 100 << 20, 150 << 20]


@pytest.mark.parametrize(("function", "error"), [
    ("nvmlGpmSampleGet", NVMLError_Unknown),
    ("nvmlGpmMetricsGet", NVMLError_InvalidArgument),  # the samples were too close
])  # fmt: skip
def test_gpm_that_failed_leaves_a_gap_and_a_new_beginning(
    one: Driver, function: str, error: type[NVMLError]
) -> None:
    one.open()
    one.after(0)
    one.after(SECOND)
    gpu = one.nvml.gpus[0]
    gpu.failures[function] = error
    gone = one.after(SECOND)
    assert (gone["sm_active_ratio"], gone["pcie_transmit_bytes"]) == (None, None)
    gpu.failures.clear()
    back = one.after(SECOND)
    assert (back["sm_active_ratio"], back["pcie_transmit_bytes"]) == (None, 0)
    again = one.after(SECOND)
    assert (again["sm_active_ratio"], again["pcie_transmit_bytes"]) == (0.8, 100 << 20)


@pytest.mark.parametrize("traffic", [float("inf"), -8.0])
def test_gpm_metric_that_cannot_be_is_missing_with_the_reason(one: Driver, traffic: float) -> None:
    one.open()
    one.after(0)
    gpm = one.nvml.gpus[0].gpm
    gpm |= {2: -1.0, 3: float("nan"), 5: 4294967295.0, 10: 100.4, 20: traffic}
    del gpm[13]
    row = one.after(SECOND)
    assert {name for name in (*RATIOS, "pcie_transmit_bytes") if row[name] is None} == {
        "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "fp16_active_ratio",
        "pcie_transmit_bytes",
    }  # fmt: skip
    assert row["dram_active_ratio"] == pytest.approx(1.004)
    missing = reasons(one.sampler.missing.drain())
    assert missing["tensor_active_ratio"] == "gpu 0: GPM metric 5: a value that it cannot have"
    assert missing["fp16_active_ratio"] == "gpu 0: GPM metric 13: Not Supported"


def test_gpm_without_permission_names_the_drivers_setting_and_the_remedy(tmp_path: Path) -> None:
    params = tmp_path / "proc/driver/nvidia/params"
    params.parent.mkdir(parents=True)
    params.write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")
    gpu = FakeGpu(failures={"nvmlGpmSampleGet": NVMLError_NoPermission})
    driver = Driver(gpu, root=tmp_path)
    missing = {each.metric: each for each in driver.open()}
    assert set(RATIOS) <= set(missing)
    why = missing["tensor_active_ratio"]
    assert why.status == "denied"
    assert "RmProfilingAdminOnly: 1" in why.reason
    assert "NVreg_RestrictProfilingToAdminUsers=0" in why.remedy


def test_gpm_of_an_older_gpu_is_unsupported() -> None:
    driver = Driver(FakeGpu(gpm_supported=0, architecture=7))
    missing = {each.metric: each for each in driver.open()}
    assert missing["sm_active_ratio"].status == "unsupported"
    assert "Hopper" in missing["sm_active_ratio"].reason
    driver.nvml.calls.clear()
    driver.after(SECOND)
    assert not [call for call in driver.nvml.calls if "Gpm" in call]


def test_gpu_with_mig_names_what_cannot_be_measured_of_the_whole() -> None:
    driver = Driver(FakeGpu(mig=1))
    missing = {each.metric: each for each in driver.open()}
    for metric in ("utilization_ratio", "sm_active_ratio"):
        assert missing[metric].status == "unsupported"
        assert "MIG is on" in missing[metric].reason
    row = driver.after(SECOND)
    assert row["utilization_ratio"] is None
    assert row["memory_used_bytes"] == 2 << 30
    assert driver.sampler.header()["entities"][0]["mig"] is True  # type: ignore[index]


def test_gpu_states_give_every_column_with_value_or_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    del gpu.fields[82, 0]
    driver = Driver(gpu)

    def sleep(seconds: float) -> None:
        driver.now += int(seconds * SECOND)

    monkeypatch.setattr(time, "sleep", sleep)
    driver.open()
    states = {state.metric: state for state in driver.sampler.states()}
    assert set(states) == {column.name for column in GPU.metrics} | {"xid"}
    assert states["sm_active_ratio"].value == 0.8
    assert states["memory_temperature_celsius"].status == "unsupported"
    assert states["xid"].value == 0
    assert {state.entity for state in states.values()} == {"gpu 0"}


def test_gpu_close_gives_everything_back_without_waiting_for_the_driver() -> None:
    driver = Driver(FakeGpu(), FakeGpu())
    driver.open()
    assert driver.nvml.is_open
    driver.sampler.close()
    driver.sampler.close()
    assert driver.nvml.is_let_go_of()


def event_lines(driver: Driver) -> list[dict[str, object]]:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        driver.sampler.sample()
        if lines := driver.sampler.drain_lines():
            return [dict(line) for line in lines]
        time.sleep(0.01)
    return []


def test_xid_is_an_event_line_with_its_gpu_and_time() -> None:
    driver = Driver(FakeGpu(), FakeGpu())
    driver.open()
    driver.nvml.event(0, 0x1, 31)  # an ECC event: not an XID
    driver.nvml.xid(1, 79)
    (line,) = event_lines(driver)
    assert line == {"type": "xid", "gpu": 1, "xid": 79, "time_ns": driver.now}


def test_xid_that_cannot_be_registered_is_said_for_that_gpu() -> None:
    odd = FakeGpu(failures={"nvmlDeviceRegisterEvents": NVMLError_NotSupported})
    driver = Driver(odd, FakeGpu())
    (missing,) = driver.open()
    assert (missing.metric, missing.status) == ("xid", "unsupported")
    assert missing.reason.startswith("gpu 0: nvmlDeviceRegisterEvents")
    driver.nvml.xid(1, 13)
    assert event_lines(driver)[0]["gpu"] == 1


def test_xid_wait_that_fails_is_said_and_leaves_the_samples(one: Driver) -> None:
    one.open()
    one.nvml.break_events(NVMLError_Unknown)
    end = time.monotonic() + 10
    missing: list[Missing] = []
    while not missing and time.monotonic() < end:
        assert one.after(SECOND)["power_watts"] == 250.5
        missing = one.sampler.missing.drain()
        time.sleep(0.01)
    assert [each.metric for each in missing] == ["xid"]
    assert "nvmlEventSetWait_v2" in missing[0].reason


def test_xid_reaches_the_events_file_with_its_own_time(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    driver = Driver(FakeGpu())
    options = Options(interval_s={"gpu": 0.1})
    loop = SamplingLoop(run, "node1", options, samplers=[driver.sampler])
    stop = threading.Event()
    thread = threading.Thread(target=loop.run, args=(stop,))
    thread.start()
    try:
        end = time.monotonic() + 10
        while "nvmlEventSetWait_v2" not in driver.nvml.calls and time.monotonic() < end:
            time.sleep(0.01)
        driver.nvml.xid(0, 48)
        while time.monotonic() < end:
            if any(line["type"] == "xid" for line in read_lines(run.node("node1").events)[0]):
                break
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    found = [line for line in read_lines(run.node("node1").events)[0] if line["type"] == "xid"]
    expected = {"type": "xid", "gpu": 0, "xid": 48, "time_ns": driver.now, "source": "gpu"}
    assert found == [expected]


class SlowNvml(FakeNvml):
    """A driver whose utilisation call takes 20 ms."""

    def __init__(self, stop: SimulatedTime) -> None:
        super().__init__([FakeGpu()])
        self.stop = stop

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> object:  # type: ignore[override]  # noqa: N802
        self.stop.now += SECOND // 50
        return super().nvmlDeviceGetUtilizationRates(handle)


def test_gpu_calls_that_get_slow_are_made_less_often(tmp_path: Path) -> None:
    run, stop = RunPaths(tmp_path), SimulatedTime(1)
    clock, options = stop.clock, Options(interval_s={"gpu": 0.1})
    sampler = GpuSampler(Node(nvml=SlowNvml(stop), clock=clock))
    loop = SamplingLoop(run, "node1", options, clock=clock, boot_clock=clock, samplers=[sampler])
    loop.run(stop)
    records = read_records(run.node("node1").records("gpu"))
    cost = [x for x in read_lines(run.node("node1").events)[0] if x["type"] == "cost"][-1]
    assert cost["slowed"]["gpu"] > 1
    assert records.count <= 6  # 0.1, 0.3, 0.7 s after the first, and at the end; else eleven


def test_gpu_limit_grows_with_the_gpus_that_one_sample_reads() -> None:
    few, many = Driver(FakeGpu()), Driver(*[FakeGpu() for _ in range(8)])
    few.open()
    many.open()
    assert few.sampler.read_limit_ns == 5_000_000
    assert many.sampler.read_limit_ns == 16_000_000
    few.sampler.close()
    many.sampler.close()
