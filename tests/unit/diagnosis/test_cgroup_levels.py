"""A quota above the launcher's cgroup is found, whatever the cgroups beside it counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.rule_inputs import gather_inputs
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import CGROUP, HOST
from tests.unit.analysis.recorded import row_of, write_records
from tests.unit.diagnosis.stories import START_NS, write_story


def cgroup_row(time: int, index: int, cores: float, *, periods: float, share: float) -> list[float]:
    count = int(periods * time / NS_PER_S)
    return row_of(
        CGROUP,
        time_ns=time,
        cgroup_index=index,
        cpu_limit_cores=cores,
        cpu_period_count=count,
        cpu_throttled_period_count=int(share * count),
    )


@pytest.mark.parametrize("own_periods", [0, 10])
def test_the_cgroup_that_stops_the_job_most_is_the_one_that_counts(
    tmp_path: Path, own_periods: int
) -> None:
    root = tmp_path / "run"
    write_story(root, lambda *_: (0.2, 5.0, 10.0, 2.0), steps=900)
    node = RunPaths(root).node("node0")
    times = np.linspace(START_NS, START_NS + 900 * 18_000_000, 40).astype(int).tolist()
    levels = [
        cgroup_row(time, *level, periods=periods, share=share)
        for time in times
        for level, periods, share in (((0, 4.0), own_periods, 0.0), ((1, 4.5), 10, 0.5))
    ]
    entities = [{"key": [0], "name": "own"}, {"key": [1], "name": "job_7"}]
    write_records(node.records("cgroup"), CGROUP, levels, entities=entities)
    hosts = [row_of(HOST, time_ns=time, cpu_count=32) for time in times]
    write_records(node.records("host"), HOST, hosts)
    cpu = gather_inputs(Analyzer(root)).node_cpus["node0"]
    assert cpu.throttled_ratio == pytest.approx(0.5, rel=0.05)
    assert (cpu.core_count, cpu.limit_cores) == (32, 4.5)
