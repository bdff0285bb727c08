"""One session of the GPU samplers on the stub driver, in a process of its own: JSON to stdout."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from haiprof.agent.samplers.gpu import GpuHealthSampler, GpuSampler
from haiprof.agent.samplers.loop import SamplingLoop
from haiprof.agent.samplers.table import Node
from haiprof.base.options import Options
from haiprof.run_format.layout import RunPaths
from tests.unit.samplers.records import rows

SAMPLE_COUNT = 4
APART_S = 0.15


def main() -> None:
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]), float(sys.argv[2]))
        return
    json.dump(
        {kind.table.name: session(kind(Node())) for kind in (GpuSampler, GpuHealthSampler)},
        sys.stdout,
    )


def session(sampler: GpuSampler | GpuHealthSampler) -> dict[str, Any]:
    missing = sampler.open()
    header = sampler.header()
    samples, lines = [], []
    for _ in range(SAMPLE_COUNT):
        samples.append(rows(sampler.table, sampler.sample()))
        missing += sampler.missing.drain()
        lines += sampler.drain_lines()
        time.sleep(APART_S)
    states = [(state.metric, state.status, state.value) for state in sampler.states()]
    sampler.close()
    return {"header": header, "missing": missing, "samples": samples, "lines": lines,
            "states": states}  # fmt: skip


def record(run: Path, seconds: float) -> None:
    """As the launcher's side thread does it, ten times a second."""
    stop = threading.Event()
    options = Options(recorder=("gpu",), interval_s={"gpu": 0.1})
    loop = SamplingLoop(RunPaths(run), "node1", options, samplers=[GpuSampler(Node())])
    threading.Timer(seconds, stop.set).start()
    loop.run(stop)


if __name__ == "__main__":
    main()
