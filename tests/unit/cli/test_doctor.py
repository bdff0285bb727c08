from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from haiprof.agent.samplers.registry import Permission, Software, Tool
from haiprof.agent.samplers.table import CounterState
from haiprof.show.views.prepare import doctor_view, now_text, short_name
from tests.commands import Run

NODE = Software(
    host="node7", kernel="Linux 6.8", cgroup="v2", python="3.11.9", executable="/usr/bin/python3",
    torch="2.9.0", nvidia_driver="580.95", nvidia_ml_py="13.580",
)  # fmt: skip
USED = CounterState(
    source="gpu", entity="gpu 0", metric="memory_used_bytes", unit="bytes", status="available",
    value=2 << 30, origin="nvmlDeviceGetMemoryInfo", read_ns=12_000,
)  # fmt: skip
DENIED = CounterState(
    source="gpm", entity="gpu 0", metric="sm_active_ratio", unit="ratio", status="denied",
    value=None, origin="GPM 2", read_ns=None, reason="GPM 2: Insufficient Permissions",
    remedy="RmProfilingAdminOnly=0",
)  # fmt: skip
TOOLS = (
    Tool(name="torchrun", kind="launcher", status="available", path="/bin/torchrun", purpose="x"),
    Tool(name="srun", kind="launcher", status="absent", path=None, purpose="Slurm"),
    Tool(name="nsys", kind="tool", status="absent", path=None, purpose="Nsight Systems"),
)
PERMISSIONS = (
    Permission(
        name="perf_whole_node", status="denied", value=4, source="/proc/sys/kernel/x",
        allows="memory bandwidth", reason="perf_event_paranoid is 4, above 0",
        remedy="sysctl kernel.perf_event_paranoid=0",
    ),
    Permission(
        name="ptrace", status="available", value=None, source="/proc/sys/kernel/yama",
        allows="stacks", reason="the kernel has no Yama",
    ),
)  # fmt: skip


def shown(*counters: CounterState, every_row: bool = False) -> str:
    console = Console(width=120, color_system=None, highlight=False)
    view = doctor_view(counters, TOOLS, PERMISSIONS, node=NODE, every_row=every_row)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_json_lists_every_counter_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    output = run("doctor", "--json")
    assert output.err == ""
    content = output.data
    assert set(content) == {"counters", "tools", "permissions", "node"}
    assert list(tmp_path.iterdir()) == []
    rows = {row["name"]: row for row in content["counters"] if not row["entity"]}
    assert rows["host.cpu_count"]["value"] == os.sysconf("SC_NPROCESSORS_ONLN")
    assert rows["host.cpu_user_ns"]["source"] == "/proc/stat"
    for row in content["counters"]:
        assert row["status"] in ("available", "unsupported", "denied", "absent")
        assert (row["value"] is None) is (row["status"] != "available")
        assert (row["read_ns"] is None) is (row["status"] != "available")


def test_view_for_people_has_all_sections(run: Run) -> None:
    output = run("doctor")
    for word in (
        "sources that can be read",
        "host",
        "/proc/stat",
        "Launchers",
        "Tools",
        "Permissions",
    ):
        assert word in output.out
    assert "haiprof doctor --all" in output.err
    text = run("doctor", "--all").out
    assert "host.cpu_user_ns" in text
    assert "gpu.utilization_ratio" in text


def test_a_source_that_can_be_read_is_one_line_and_its_values_are_in_all() -> None:
    states = [replace(USED, metric=f"memory_{n}_bytes") for n in range(20)]
    other = replace(states[0], entity="gpu 1", value=3 << 30)
    power = replace(USED, metric="power_watts", unit="watts", origin="nvmlDeviceGetPowerUsage")
    text = shown(*states, other, power)
    assert "sources that can be read: gpu\n" in text
    (line,) = (" ".join(line.split()) for line in text.splitlines() if "nvmlDevice" in line)
    assert line == "gpu 21 36.0 µs gpu 0, gpu 1 nvmlDeviceGetMemoryInfo and 1 more"
    assert "memory_" not in text
    every = shown(*states, other, power, every_row=True)
    assert every.count("2.00 GiB") == 20
    assert every.count("3.00 GiB") == 1
    assert max(map(len, text.splitlines())) <= 120


def test_counters_that_lack_for_one_reason_share_a_line() -> None:
    same = [
        replace(DENIED, metric=name, origin=f"GPM {n}", reason=f"GPM {n}: Insufficient Permissions")
        for n, name in enumerate(("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"))
    ]
    text = shown(USED, *same)
    assert text.count("Insufficient Permissions") == 1
    assert "GPM 0 and 2 more: Insufficient Permissions" in text
    assert "gpm (3 counters)" in text
    assert text.count("RmProfilingAdminOnly=0") == 1


def test_tools_and_permissions_say_what_to_set() -> None:
    text = shown(USED)
    assert "/bin/torchrun" in text
    assert "not found: srun" in text
    assert "not found: nsys" in text
    assert "do: sysctl kernel.perf_event_paranoid=0" in text
    assert "torch 2.9.0" in text
    assert "NVIDIA driver 580.95" in text
    text = shown(USED, replace(DENIED, source="gpu"))
    assert "gpu: sm_active" in text
    text = shown(DENIED, replace(DENIED, entity="gpu 1"), every_row=True)
    assert text.count("gpm.sm_active_ratio") == 2
    assert text.count("Insufficient Permissions") == 2
    text = shown(USED, DENIED)
    order = ("Permissions denied or absent", "Not available", "Can be read", "ptrace")
    places = [text.index(word) for word in order]
    assert places == sorted(places)


@pytest.mark.parametrize(("value", "unit", "text"), [
    (1_980_000_000, "hz", "1.98 GHz"),
    (345_000_000.0, "hz", "345 MHz"),
    (5, "packed", "0x5"),
    (0, "count", "0"),
    (0.37, "ratio", "37 %"),
])  # fmt: skip
def test_values_are_shown_with_human_units(value: float, unit: str, text: str) -> None:
    assert now_text(value, unit) == text


def test_short_names_leave_the_unit_to_the_value() -> None:
    assert short_name("cpu_user_ns") == "cpu_user"
    assert short_name("thread_count") == "thread_count"
