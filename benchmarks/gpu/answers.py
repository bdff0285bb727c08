"""What NVML's documentation leaves open, asked of this driver: no expectation, only answers."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.driver import ALL_LINKS, Machine, attempt, machine, sampler
from benchmarks.gpu.load import load


def answers(bench: Bench) -> None:
    """Rings of samples, ids of this driver, NVML in a forked child, process ids, XID by user."""
    of = machine()
    found: dict[str, object] = {"about": about(of)}
    found["rings"] = rings(of)
    found["fields"] = {
        f"{n} scope {s}": of.field(n, s)
        for n, s in [*((n, 0) for n in (197, 198, 251, 252, 253, 269, 270, 271, 74, 75, 83, 185)),
                     *((n, ALL_LINKS) for n in (138, 139, 140, 141, 202, 204))]
    }  # fmt: skip
    ids = {n: of.field(n) for n in range(199, bench.scale(341, 205))}
    found["newer ids"] = {n: told for n, told in ids.items() if told["return"] == 0}
    found["gpm ids"] = attempt(lambda: gpm_ids(of))
    found["forked"] = forked(of)
    with load(seconds=30) as process:
        time.sleep(bench.scale(1.0, 0.1))
        found["process ids"] = process_ids(of, process.pid)
    bench.note("answers", found)
    bench.tell("answered", len(found))
    bench.keep_json("nvml-answers.json", found)


def about(of: Machine) -> dict[str, object]:
    """Which driver answered, and what of it haiprof cannot read."""
    with sampler() as found:
        states = [(s.metric, s.status, s.value, s.reason) for s in found.states()]
        return {"header": found.header(), "states": states, "driver": of.nvml.version,
                "missing": [list(map(str, each)) for each in found.told.values()],
                "kernel": os.uname().release, "uid": os.geteuid()}  # fmt: skip


def rings(of: Machine) -> dict[str, object]:
    """How many samples the driver keeps of each kind, and how far apart."""
    answer: dict[str, object] = {}
    names = {0: "power", 1: "gpu", 2: "memory", 3: "encoder", 5: "sm clock", 6: "memory clock",
             7: "module power"}  # fmt: skip
    for kind, name in names.items():
        try:
            value_type, samples = of.pynvml.nvmlDeviceGetSamples(of.handle, kind, 0)
        except Exception as error:  # noqa: BLE001  the answer is that it fails
            answer[name] = repr(error)
            continue
        times = [sample.timeStamp for sample in samples]
        apart = [b - a for a, b in itertools.pairwise(times)]
        answer[name] = {"type": value_type, "count": len(times),
                        "median_us": statistics.median(apart) if apart else None,
                        "span_us": times[-1] - times[0] if times else None}  # fmt: skip
    return answer


def gpm_ids(of: Machine) -> dict[int, float]:
    """The value of every GPM metric id that this driver knows."""
    p = of.pynvml
    samples = [p.nvmlGpmSampleAlloc() for _ in range(2)]
    for sample in samples:
        p.nvmlGpmSampleGet(of.handle, sample)
        time.sleep(0.15)
    answer = {}
    for number in range(1, p.NVML_GPM_METRIC_MAX):
        request = p.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1)
        request.sample1, request.sample2 = samples
        request.metrics[0].metricId = number
        p.nvmlGpmMetricsGet(request)
        if request.metrics[0].nvmlReturn == 0:
            answer[number] = request.metrics[0].value
    return answer


def forked(of: Machine) -> dict[str, object]:
    """NVML in a forked child, as it is and after an nvmlInit of its own."""
    power = of.pynvml.nvmlDeviceGetPowerUsage
    return {
        "as it is": in_child(lambda: power(of.handle)),
        "after nvmlInit": in_child(lambda: (of.pynvml.nvmlInit(), power(of.handle))),
        "parent afterwards": attempt(lambda: power(of.handle)),
    }


def in_child(call: Callable[[], object]) -> str:
    """What a call gives in a forked child; killed after ten seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os.write(writer, repr(attempt(call)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return told or f"ended with status {status}"


def process_ids(of: Machine, pid: int) -> dict[str, object]:
    """A job's pid as NVML tells it, and as this container does."""
    status = Path(f"/proc/{pid}/status").read_text()
    names = [line for line in status.splitlines() if line.startswith("NSpid")]
    answer: dict[str, object] = {"pid": pid, "NSpid": names}
    for name, more in (("nvmlDeviceGetComputeRunningProcesses", ()),
                       ("nvmlDeviceGetProcessUtilization", (0,))):  # fmt: skip
        answer[name] = attempt(
            lambda n=name, m=more: [each.pid for each in getattr(of.pynvml, n)(of.handle, *m)]
        )
    return answer
