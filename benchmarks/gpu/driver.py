"""The NVIDIA driver as items ask it; what its calls cost, alone and beside a job."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.load import load

ALL_LINKS = 0xFFFFFFFF
Row = dict[str, Any]


class Machine:
    """The first GPU, through nvidia-ml-py itself and through haiprof."""

    def __init__(self, pynvml: ModuleType) -> None:
        from haiprof.agent.samplers.nvml import Device, Nvml

        self.pynvml: Any = pynvml
        self.nvml = Nvml(pynvml)
        self.nvml.open()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.device = Device(self.nvml, 0, self.handle, lambda _, why: print(why))

    def field(self, number: int, scope: int = 0) -> dict[str, object]:
        """One field: return code, type, value."""
        (answer,) = self.pynvml.nvmlDeviceGetFieldValues(self.handle, [(number, scope)])
        if answer.nvmlReturn:
            return {"return": answer.nvmlReturn}
        value = answer.value.dVal if answer.valueType == 0 else answer.value.ullVal
        return {"return": 0, "type": answer.valueType, "value": value, "u32": answer.value.uiVal}


def machine() -> Machine:
    """Opens the driver; whatever it raises is the item's end."""
    import pynvml

    return Machine(pynvml)


@contextmanager
def sampler(name: str = "gpu") -> Iterator[Any]:
    """One of haiprof's GPU samplers, open; its first column of reasons in `told`."""
    from haiprof.agent.samplers.gpu import GpuHealthSampler, GpuSampler

    found = {"gpu": GpuSampler, "gpu_health": GpuHealthSampler}[name]()
    found.told = {each.metric: each for each in found.open()}  # type: ignore[attr-defined]
    with closing(found):
        yield found


def row_of(found: Any) -> Row:
    """The first GPU's record now, by column."""
    names = [column.name for column in found.table.columns]
    values = next(found.table.struct.iter_unpack(found.sample()))
    return dict(zip(names, map(known, values), strict=True))


def known(value: Any) -> Any:
    """What a record says, missing values as None."""
    from haiprof.run_format.schema import NULL_I64

    return None if value == NULL_I64 or value != value else value


def attempt(call: Callable[[], object]) -> object:
    """What a call gives, or the error that it raises: both are answers."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  the answer is that it fails
        return repr(error)


# -- prices ----------------------------------------------------------------------------------------


def percentiles(call: Callable[[], object], count: int) -> dict[str, object]:
    """Percentiles of a call's time in us, or why it cannot be called."""
    took = []
    try:
        for _ in range(count):
            began = time.perf_counter_ns()
            call()
            took.append((time.perf_counter_ns() - began) / 1e3)
            time.sleep(0.001)
    except Exception as error:  # noqa: BLE001  the answer is that it fails
        return {"error": repr(error)}
    took.sort()
    return {"p50_us": took[count // 2], "p99_us": took[int(count * 0.99)], "max_us": took[-1]}


def calls(of: Machine, bench: Bench) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed, and how often."""
    p, h, count = of.pynvml, of.handle, bench.scale(200, 5)
    fields = {n: ALL_LINKS if n in (138, 139) else 0 for n in
              (74, 75, 82, 83, 94, 138, 139, 142, 185, 186, 197, 198, 269, 270, 271)}  # fmt: skip
    found: dict[str, tuple[Callable[[], object], int]] = {
        "UtilizationRates": (lambda: p.nvmlDeviceGetUtilizationRates(h), count),
        "MemoryInfo_v2": (lambda: p.nvmlDeviceGetMemoryInfo(h, 0x02000028), count),
        "PowerUsage": (lambda: p.nvmlDeviceGetPowerUsage(h), count),
        "ClockInfo SM": (lambda: p.nvmlDeviceGetClockInfo(h, 1), count),
        "ClockInfo memory": (lambda: p.nvmlDeviceGetClockInfo(h, 2), count),
        "Temperature": (lambda: p.nvmlDeviceGetTemperature(h, 0), count),
        "TemperatureV": (lambda: p.nvmlDeviceGetTemperatureV(h, 0), count),
        "ClocksEventReasons": (lambda: p.nvmlDeviceGetCurrentClocksEventReasons(h), count),
        "PcieLinkGeneration": (lambda: p.nvmlDeviceGetCurrPcieLinkGeneration(h), count),
        "PcieThroughput": (lambda: p.nvmlDeviceGetPcieThroughput(h, 0), 5),
        "ComputeRunningProcesses": (lambda: p.nvmlDeviceGetComputeRunningProcesses(h), 5),
    }
    for number, scope in fields.items():
        query = [(number, scope)]
        found[f"field {number}"] = (lambda q=query: p.nvmlDeviceGetFieldValues(h, q), count)
    every = list(fields.items())
    found["all fields in one call"] = (lambda: p.nvmlDeviceGetFieldValues(h, every), count)
    return found


def prices(bench: Bench) -> None:
    """What each NVML call takes, idle and under load; and a sample of haiprof's."""
    of = machine()
    tables: dict[str, dict[str, dict[str, object]]] = {}
    for state in ("idle", "loaded"):
        if state == "loaded":
            with load(seconds=120):
                tables[state] = price_table(of, bench)
        else:
            tables[state] = price_table(of, bench)
    loaded = tables["loaded"]
    names = {"utilization_us": "UtilizationRates", "memory_us": "MemoryInfo_v2",
             "processes_us": "ComputeRunningProcesses", "sample_us": "haiprof sample"}  # fmt: skip
    for figure, call in names.items():
        if "p50_us" in loaded[call]:
            bench.tell(figure, loaded[call]["p50_us"])  # type: ignore[arg-type]
        else:
            bench.skip(figure, str(loaded[call].get("error")))
    if "p99_us" in loaded["haiprof sample"]:
        bench.tell("sample_p99_us", loaded["haiprof sample"]["p99_us"])  # type: ignore[arg-type]
    bench.keep_json("nvml-prices.json", tables)
    bench.note("prices", tables)


def price_table(of: Machine, bench: Bench) -> dict[str, dict[str, object]]:
    """Percentiles of every call, and of a whole sample as the agent takes it."""
    table = {name: percentiles(call, count) for name, (call, count) in calls(of, bench).items()}
    with sampler() as found:
        reads = []
        for _ in range(bench.scale(30, 4)):
            time.sleep(0.11)  # GPM wants 0.1 s between two samples
            reads.append((row_of(found)["read_ns"] or 0) / 1e3)
    reads.sort()
    table["haiprof sample"] = {
        "p50_us": reads[len(reads) // 2], "p99_us": reads[-1], "max_us": reads[-1]
    }  # fmt: skip
    return table


def beside_a_job(bench: Bench) -> None:
    """Steps and cudaMallocs of a job while a sampler reads at one, two and ten a second."""
    rates = (0, 1, 0, 10, 0, 2, 0, 10, 0, 1, 0)
    seconds = bench.scale(3.0, 0.25)
    told = bench.scratch / "steps"
    windows: list[tuple[int, int, int]] = []
    with sampler() as found, load("--steps", str(told), seconds=len(rates) * seconds + 5):
        for rate in rates:
            begin = time.perf_counter_ns()
            sample_for(found, rate, seconds)
            windows.append((rate, begin, time.perf_counter_ns()))
    steps = [json.loads(line) for line in told.read_text().splitlines() if line.endswith("]")]
    rows = [in_window(steps, *window) for window in windows]
    bench.note("windows", rows)
    idle = [row for row in rows if row["rate_hz"] == 0 and row["step_count"]]
    for rate in (1, 10):
        busy = [row for row in rows if row["rate_hz"] == rate and row["step_count"]]
        if not busy or not idle:
            bench.skip(f"step_ratio_{rate}hz", "no step of the load ended in the window")
            continue
        for word in ("step", "malloc"):
            middle = [statistics.median(r[f"{word}_p50_us"] for r in part) for part in (idle, busy)]
            bench.tell(f"{word}_ratio_{rate}hz", middle[1] / middle[0] if middle[0] else None)


def sample_for(found: Any, rate_hz: int, seconds: float) -> None:
    """Samples so often through one window."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if rate_hz:
            found.sample()
        time.sleep(min(1 / rate_hz if rate_hz else 0.5, max(end - time.monotonic(), 0.001)))


def in_window(steps: list[list[int]], rate_hz: int, begin: int, end: int) -> dict[str, Any]:
    """Medians and 99th percentiles of what ended in a window, in us."""
    inside = [step for step in steps if begin <= step[0] < end]
    answer: dict[str, Any] = {"rate_hz": rate_hz, "step_count": len(inside)}
    for column, word in ((1, "step"), (2, "malloc")):
        took = sorted(step[column] / 1e3 for step in inside) or [0.0]
        answer[f"{word}_p50_us"] = statistics.median(took)
        answer[f"{word}_p99_us"] = took[int(len(took) * 0.99)]
    return answer
