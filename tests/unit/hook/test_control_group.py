"""Limits of a process's own control group, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.in_job.settings import cpu_limit_cores, memory_limit_bytes


def write(root: Path, files: dict[str, str], membership: str) -> dict[str, Path]:
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (root / "self").write_text(membership)
    return {"proc": root / "self", "mount": root / "cgroup"}


def test_tightest_limit_of_version_2_counts(tmp_path: Path) -> None:
    files = {
        "pod/cpu.max": "150000 100000\n", "pod/job/cpu.max": "max 100000\n",
        "pod/memory.max": "max\n", "pod/job/memory.max": "1073741824\n",
    }  # fmt: skip
    where = write(tmp_path, files, "0::/pod/job\n")
    assert cpu_limit_cores(**where) == 1.5
    assert memory_limit_bytes(**where) == 1 << 30


def test_limits_of_version_1_are_read(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/job/cpu.cfs_quota_us": "200000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "memory/job/memory.limit_in_bytes": "9223372036854771712\n",
    }
    where = write(tmp_path, files, "3:cpu,cpuacct:/job\n2:memory:/job\n")
    assert cpu_limit_cores(**where) == 2.0
    assert memory_limit_bytes(**where) is None


@pytest.mark.parametrize("membership", ["", "0::/gone\n", "nonsense\n"])
def test_no_limit_is_none(tmp_path: Path, membership: str) -> None:
    where = write(tmp_path, {"cpu.stat": ""}, membership)
    assert cpu_limit_cores(**where) is None
    assert memory_limit_bytes(**where) is None


def test_group_of_a_container_is_the_mount_itself(tmp_path: Path) -> None:
    files = {"cpu.max": "50000 100000\n"}
    where = write(tmp_path, files, "0::/../../kubepods/pod7/job\n")
    assert cpu_limit_cores(**where) == 0.5
