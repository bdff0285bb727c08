from __future__ import annotations

import os
from pathlib import Path

import pytest

from haiprof.agent.samplers.registry import Permission, find_permissions, find_tools, software

ALL_CAPABILITIES, NO_CAPABILITIES = "000001fffeffffff", "0000000000000000"
WHOLE = "         0          0 4294967295\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def write(root: Path, **files: str) -> None:
    """Files below root/proc by name; `__` stands for a slash."""
    for name, content in files.items():
        path = root / "proc" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def status(capabilities: str, *, seccomp: int = 0) -> str:
    return f"Name:\thaiprof\nCapEff:\t{capabilities}\nSeccomp:\t{seccomp}\n"


def permission(root: Path, name: str) -> Permission:
    return {each.name: each for each in find_permissions(root, load=_no_library)}[name]


def _no_library(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


def test_tools_are_found_in_path_and_beside_the_interpreter(tmp_path: Path) -> None:
    for folder, name in (("site", "srun"), ("python", "torchrun"), ("site", "nsys")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text("#!/bin/sh\n")
        (tmp_path / folder / name).chmod(0o755)
    (tmp_path / "site" / "perf").write_text("not a program")
    tools = {t.name: t for t in find_tools(str(tmp_path / "site"), scripts=tmp_path / "python")}
    assert tools["srun"].path == str(tmp_path / "site/srun")
    assert tools["torchrun"].path == str(tmp_path / "python/torchrun")
    assert (tools["torchrun"].kind, tools["nsys"].kind) == ("launcher", "tool")
    assert (tools["perf"].status, tools["perf"].path) == ("absent", None)
    (known,) = [t for t in find_tools("", known={"nsys": "/opt/nsys"}) if t.name == "nsys"]
    assert (known.status, known.path) == ("available", "/opt/nsys")


@pytest.mark.parametrize(("scope", "capabilities", "found"), [
    ("0\n", NO_CAPABILITIES, "available"),
    ("1\n", NO_CAPABILITIES, "denied"),
    ("1\n", ALL_CAPABILITIES, "available"),
    ("2\n", ALL_CAPABILITIES, "available"),
    ("3\n", ALL_CAPABILITIES, "denied"),
])  # fmt: skip
def test_ptrace_follows_yama(root: Path, scope: str, capabilities: str, found: str) -> None:
    write(root, sys__kernel__yama__ptrace_scope=scope, self__status=status(capabilities))
    ptrace = permission(root, "ptrace")
    assert (ptrace.status, ptrace.value) == (found, int(scope))
    assert bool(ptrace.remedy) is (found == "denied")


def test_ptrace_without_yama_is_free_but_says_so(root: Path) -> None:
    ptrace = permission(root, "ptrace")
    assert (ptrace.status, ptrace.value) == ("available", None)
    assert "no Yama" in ptrace.reason
    own = permission(root, "perf_own_processes")
    assert (own.status, own.value) == ("unsupported", None)
    assert permission(root, "psi").status == "unsupported"
    write(root, pressure__cpu="some avg10=0.00 total=7\n")
    assert permission(root, "psi").status == "available"


@pytest.mark.parametrize(("level", "capabilities", "own", "whole"), [
    ("-1", NO_CAPABILITIES, "available", "available"),
    ("2", NO_CAPABILITIES, "available", "denied"),
    ("4", NO_CAPABILITIES, "denied", "denied"),
    ("4", ALL_CAPABILITIES, "available", "available"),
])  # fmt: skip
def test_perf_follows_paranoid_and_capabilities(
    root: Path, level: str, capabilities: str, own: str, whole: str
) -> None:
    write(
        root, sys__kernel__perf_event_paranoid=level, self__status=status(capabilities),
        self__uid_map=WHOLE,
    )  # fmt: skip
    assert permission(root, "perf_own_processes").status == own
    assert permission(root, "perf_whole_node").status == whole
    assert permission(root, "perf_whole_node").value == int(level)


def test_root_of_another_user_namespace_has_no_perf_rights(root: Path) -> None:
    write(
        root, sys__kernel__perf_event_paranoid="2", self__status=status(ALL_CAPABILITIES),
        self__uid_map="0 100000 65536\n",
    )  # fmt: skip
    assert permission(root, "perf_whole_node").status == "denied"
    assert permission(root, "cap_perfmon").status == "denied"
    assert permission(root, "cap_perfmon").reason == "held in this user namespace only"
    assert permission(root, "cap_sys_ptrace").status == "available"


def test_seccomp_filter_is_named_beside_what_it_may_deny(root: Path) -> None:
    write(
        root, sys__kernel__perf_event_paranoid="1", self__status=status(NO_CAPABILITIES, seccomp=2)
    )
    own = permission(root, "perf_own_processes")
    assert own.status == "available"
    assert "seccomp" in own.reason


@pytest.mark.parametrize(("params", "capabilities", "found", "value"), [
    ("EnableMSI: 1\nRmProfilingAdminOnly: 1\n", NO_CAPABILITIES, "denied", 1),
    ("EnableMSI: 1\nRmProfilingAdminOnly: 1\n", ALL_CAPABILITIES, "available", 1),
    ("RmProfilingAdminOnly: 0\n", NO_CAPABILITIES, "available", 0),
    ("EnableMSI: 1\n", NO_CAPABILITIES, "absent", None),
])  # fmt: skip
def test_gpu_profiling_follows_the_driver(
    root: Path, params: str, capabilities: str, found: str, value: int | None
) -> None:
    write(root, driver__nvidia__params=params, self__status=status(capabilities))
    profiling = permission(root, "gpu_profiling")
    assert (profiling.status, profiling.value) == (found, value)
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in profiling.remedy) is (found == "denied")


def test_nvml_that_loads_is_available(root: Path) -> None:
    loaded: list[str] = []
    found = {p.name: p for p in find_permissions(root, load=lambda name: loaded.append(name))}
    assert found["nvml"].status == "available"
    assert loaded == ["libnvidia-ml.so.1"]
    assert permission(root, "nvml").status == "absent"


@pytest.mark.parametrize(("content", "version"), [
    ("0::/user.slice\n", "v2"),
    ("9:memory:/\n1:cpu,cpuacct:/\n", "v1"),
    ("9:memory:/\n0::/\n", "v1 + v2"),
    (None, None),
])  # fmt: skip
def test_cgroup_version_is_told_from_the_process(
    root: Path, content: str | None, version: str | None
) -> None:
    if content is not None:
        write(root, self__cgroup=content)
    assert software(root).cgroup == version


@pytest.mark.parametrize("line", [
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.90.07  Release Build\n",
])  # fmt: skip
def test_driver_version_is_read_without_the_library(root: Path, line: str) -> None:
    write(root, driver__nvidia__version=line + "GCC version:  gcc version 12.3.0\n")
    assert software(root).nvidia_driver == "550.90.07"


def test_permissions_of_this_machine_are_its_own() -> None:
    found = {each.name: each for each in find_permissions()}
    assert (found["psi"].status == "available") is os.path.exists("/proc/pressure/cpu")
    for each in found.values():
        assert each.status == "available" or each.reason, each
