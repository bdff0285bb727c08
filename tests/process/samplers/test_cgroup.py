"""A real control group with a quota, and what is counted in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.samplers.records import Row

V1_CPU = Path("/sys/fs/cgroup/cpu")


_BURN = """
import json, os, sys, time
from haiprof.agent.samplers.host import CgroupSampler
from haiprof.agent.samplers.table import Node
from haiprof.run_format.tables import CGROUP
from tests.unit.samplers.records import rows
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
sampler = CgroupSampler(Node())
sampler.open()
first = rows(CGROUP, sampler.sample())
end = time.monotonic() + 1.5
while time.monotonic() < end:
    pass
second = rows(CGROUP, sampler.sample())
names = [entity.name for entity in sampler.entities]
print(json.dumps([names, first, second]))
"""


@pytest.fixture
def quota() -> Iterator[Path]:
    """A child cgroup of version 1 with 20 % of a CPU, and one inside it without a quota."""
    folder = V1_CPU / f"haiprof_test_{os.getpid()}"
    try:
        (folder / "inner").mkdir(parents=True)
        (folder / "cpu.cfs_quota_us").write_text("20000")
        (folder / "cpu.cfs_period_us").write_text("100000")
    except OSError as error:
        pytest.skip(f"no cgroup of version 1 with a quota can be made here: {error}")
    yield folder
    (folder / "inner").rmdir()
    folder.rmdir()


def burn(folder: Path) -> tuple[list[str], list[Row], list[Row]]:
    """Samples of a process that works in that cgroup for 1.5 s: entities, before, after."""
    command = [sys.executable, "-c", _BURN, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names, first, second = json.loads(done.stdout)
    return names, first, second


def test_cgroup_on_this_machine_sees_a_process_being_throttled(quota: Path) -> None:
    names, (first,), (second,) = burn(quota)
    assert names == ["own"]
    assert second["cpu_limit_cores"] == 0.2
    periods, throttled, held = (
        (second[name] or 0) - (first[name] or 0)
        for name in ("cpu_period_count", "cpu_throttled_period_count", "cpu_throttled_ns")
    )
    assert 0 < throttled <= periods
    assert held > 0
    stat = dict(line.split() for line in (quota / "cpu.stat").read_text().splitlines())
    assert (second["cpu_throttled_ns"] or 0) <= int(stat["throttled_time"])
    assert (second["cpu_throttled_period_count"] or 0) <= int(stat["nr_throttled"])


def test_cgroup_on_this_machine_sees_the_quota_above(quota: Path) -> None:
    names, (_, _), (own, above) = burn(quota / "inner")
    assert names == ["own", quota.name]
    assert (own["cpu_limit_cores"], above["cpu_limit_cores"]) == (0.2, 0.2)
    assert own["cpu_throttled_period_count"] == 0
    assert (above["cpu_throttled_period_count"] or 0) > 0
