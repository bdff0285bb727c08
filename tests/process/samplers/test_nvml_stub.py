"""The GPU samplers over the unmodified nvidia-ml-py, on a driver library compiled here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "tests" / "nvml_stub" / "nvml_stub.c"
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler (cc, gcc or clang)")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libnvidia-ml.so.1."""
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    words = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(target), str(SOURCE)]
    subprocess.run([str(COMPILER), *words], check=True, timeout=60)
    return folder


@cache
def session(library: Path, **behaviour: object) -> dict[str, Any]:
    """What one told; two tests may look at the same one."""
    environ = {**os.environ, **{f"STUB_{k.upper()}": str(v) for k, v in behaviour.items()}}
    environ["LD_LIBRARY_PATH"] = str(library)
    command = [sys.executable, "-m", "tests.nvml_stub.session"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, check=True, capture_output=True, text=True, timeout=60
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def why(told: dict[str, Any]) -> dict[str, list[str]]:
    """Reason, status and remedy by metric."""
    return {metric: rest for metric, *rest in told["missing"]}


def test_stub_values_come_through_the_binding_in_base_units(library: Path) -> None:
    told = session(library, gpus=2, xid=79)["gpu"]
    assert [entity["key"] for entity in told["header"]["entities"]] == [[0], [1]]
    entity = told["header"]["entities"][1]
    assert entity["uuid"] == "GPU-00000000-0000-0000-0000-000000000001"
    assert (entity["model"], entity["bus_id"]) == ("NVIDIA Stub", "0000:1b:00.0")
    assert told["header"]["driver"] == "580.159.04"
    first, last = told["samples"][0][1], told["samples"][-1][1]
    expected = {
        "utilization_ratio": 0.41, "memory_busy_ratio": 0.07, "memory_used_bytes": 5 << 30,
        "memory_reserved_bytes": 1 << 30, "memory_total_bytes": 80 << 30, "power_watts": 500.0,
        "power_instant_watts": 510.0, "sm_clock_hz": 1_755_000_000,
        "memory_clock_hz": 2_619_000_000, "temperature_celsius": 50.0,
        "memory_temperature_celsius": 60.0, "throttle_reasons": 0x24, "throttle_hw_thermal_ns": 0,
        "sm_active_ratio": 0.02, "dram_active_ratio": 0.1, "fp16_active_ratio": None,
    }  # fmt: skip
    assert {name: last[name] for name in expected} == pytest.approx(expected)
    assert why(told)["fp16_active_ratio"][0] == "gpu 1: GPM metric 13: Not Supported"
    seconds = (last["time_ns"] - first["time_ns"]) / 1e9
    growth = {
        "energy_joules": 500, "throttle_power_ns": 0.25e9, "nvlink_transmit_bytes": 1 << 30,
        "nvlink_receive_bytes": 2 << 30, "pcie_transmit_bytes": (64 * 20) << 20,
        "pcie_receive_bytes": (64 * 21) << 20,
    }  # fmt: skip
    for name, per_second in growth.items():
        assert (last[name] - first[name]) / seconds == pytest.approx(per_second, rel=0.2), name


def test_stub_health_comes_through_the_binding(library: Path) -> None:
    told = session(library)["gpu_health"]
    (row,) = told["samples"][-1]
    expected = {
        "ecc_volatile_corrected_count": 3, "ecc_aggregate_uncorrected_count": 6,
        "pcie_replay_count": 94, "remap_failure_count": None, "pcie_generation": 5,
        "pcie_lane_max_count": 16, "power_limit_watts": 700.0, "temperature_shutdown_celsius": 92.0,
        "temperature_margin_celsius": None,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert why(told)["remap_failure_count"][1] == "unsupported"
    reason, status, remedy = why(told)["temperature_margin_celsius"]
    assert reason == "gpu 0: nvmlDeviceGetMarginTemperature: Function Not Found"
    assert (status, remedy) == ("unsupported", "a newer NVIDIA driver")


def test_stub_doctor_shows_values_of_the_moment(library: Path) -> None:
    states = {
        metric: (status, value) for metric, status, value in session(library)["gpu"]["states"]
    }
    assert states["sm_active_ratio"] == ("available", 0.02)
    assert states["fp16_active_ratio"] == ("unsupported", None)
    assert states["xid"] == ("available", 0)


def test_stub_gpu_that_is_lost_stops_and_the_other_goes_on(library: Path) -> None:
    told = session(library, gpus=2, lost_after=3)["gpu"]
    assert [[row["gpu"] for row in sample] for sample in told["samples"]][-1] == [1]
    assert why(told)["gpu 0"][0] == "nvmlDeviceGetUtilizationRates: GPU is lost; no further values"
    assert "gpu 1" not in why(told)


def test_stub_xid_is_told_with_its_gpu(library: Path) -> None:
    (line,) = session(library, gpus=2, xid=79)["gpu"]["lines"]
    assert (line["type"], line["gpu"], line["xid"]) == ("xid", 1, 79)
    assert line["time_ns"] > 0


def test_stub_with_mig_has_memory_but_no_utilization(library: Path) -> None:
    told = session(library, mig=1)["gpu"]
    (row,) = told["samples"][-1]
    assert (row["utilization_ratio"], row["sm_active_ratio"]) == (None, None)
    assert row["memory_used_bytes"] == 5 << 30
    assert "MIG is on" in why(told)["sm_active_ratio"][0]


def test_stub_gpm_that_is_denied_has_a_remedy(library: Path) -> None:
    told = session(library, gpm="denied")["gpu"]
    reason, status, remedy = why(told)["tensor_active_ratio"]
    assert reason.startswith("gpu 0: nvmlGpmSampleGet: Insufficient Permissions")
    assert status == "denied"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in remedy


def test_stub_of_an_old_driver_counts_reserved_memory_as_used(library: Path) -> None:
    told = session(library, no_memory_v2=1, driver="470.57.02")["gpu"]
    (row,) = told["samples"][-1]
    assert (row["memory_used_bytes"], row["memory_reserved_bytes"]) == (6 << 30, None)
    assert "not known" in why(told)["throttle_sw_thermal_ns"][0]
