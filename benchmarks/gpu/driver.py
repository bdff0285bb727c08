"""The NVIDIA driver as items ask it; what its calls cost, alone and beside a job."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
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
    from haiprof.agent.samplers.table import Node

    found = {"gpu": GpuSampler, "gpu_health": GpuHealthSampler}[name](Node())
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
    except Exception as error:  # noqa: BLE001
        return repr(error)


# -- prices ----------------------------------------------------------------------------------------


def prices(bench: Bench) -> None:
    """What a call of NVML takes, idle and under load; and a sample as the agent takes it."""
    of = machine()
    tables = {"idle": price_table(of, bench)}
    with load(seconds=120):
        tables["loaded"] = price_table(of, bench)
    for figure, price in tables["loaded"].items():
        if isinstance(price, str):
            bench.skip(figure, price)
        else:
            bench.tell(figure, price)
    bench.keep_json("nvml-prices.json", tables)
    bench.note("prices", tables)


def price_table(of: Machine, bench: Bench) -> dict[str, float | str]:
    """Medians in us, or why a call cannot be made."""
    p, h, count = of.pynvml, of.handle, bench.scale(200, 5)
    table: dict[str, float | str] = {
        "utilization_us": median_us(lambda: p.nvmlDeviceGetUtilizationRates(h), count),
        "memory_us": median_us(lambda: p.nvmlDeviceGetMemoryInfo(h, 0x02000028), count),
        "processes_us": median_us(lambda: p.nvmlDeviceGetComputeRunningProcesses(h), 5),
    }
    reads = []
    with sampler() as found:
        for _ in range(bench.scale(30, 4)):
            time.sleep(0.11)  # GPM wants 0.1 s between two samples
            reads.append((row_of(found)["read_ns"] or 0) / 1e3)
    return {**table, "sample_us": statistics.median(reads), "sample_p99_us": max(reads)}


def median_us(call: Callable[[], object], count: int) -> float | str:
    """Of a call's time, or the error that it raises."""
    took = []
    try:
        for _ in range(count):
            began = time.perf_counter_ns()
            call()
            took.append((time.perf_counter_ns() - began) / 1e3)
            time.sleep(0.001)
    except Exception as error:  # noqa: BLE001
        return repr(error)
    return statistics.median(took)


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


MIB = 1 << 20

SMI = (
    ("gpu", "utilization_ratio", "utilization.gpu", 0.01, 0.15),
    ("gpu", "memory_used_bytes", "memory.used", MIB, 4 * MIB),
    ("gpu", "memory_total_bytes", "memory.total", MIB, MIB),
    ("gpu", "power_watts", "power.draw.average", 1.0, 20.0),
    ("gpu", "power_instant_watts", "power.draw.instant", 1.0, 40.0),
    ("gpu", "sm_clock_hz", "clocks.sm", 1e6, 60e6),
    ("gpu", "memory_clock_hz", "clocks.mem", 1e6, 10e6),
    ("gpu", "temperature_celsius", "temperature.gpu", 1.0, 3.0),
    ("gpu", "memory_temperature_celsius", "temperature.memory", 1.0, 3.0),
    ("gpu_health", "pcie_generation", "pcie.link.gen.current", 1.0, 0.01),
    ("gpu_health", "pcie_lane_count", "pcie.link.width.current", 1.0, 0.01),
    ("gpu_health", "power_limit_watts", "enforced.power.limit", 1.0, 0.6),
    ("gpu_health", "sm_clock_max_hz", "clocks.max.sm", 1e6, 1e6),
    ("gpu_health", "ecc_volatile_uncorrected_count", "ecc.errors.uncorrected.volatile.total", 1.0,
     0.01),
)  # fmt: skip
"""Sampler, column, nvidia-smi's name, its unit in ours, and how far apart two reads may be."""
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


def smi(name: str) -> str | None:
    """One figure of the first GPU as nvidia-smi prints it; None where it has none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, f"--query-gpu={name}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    told = done.stdout.strip()
    return None if done.returncode or told.strip("[]") in ("N/A", "Not Supported") else told


def beside_smi(bench: Bench) -> None:
    """Every figure that nvidia-smi has too, between two reads of ours; idle and under load."""
    if shutil.which("nvidia-smi") is None:
        bench.skip("differing", "no nvidia-smi here")
        return
    answers = {"idle": smi_rows()}
    with load(seconds=60):
        time.sleep(bench.scale(2.5, 0.1))  # the driver's average of power is of the last second
        answers["loaded"] = smi_rows()
    rows = [row for part in answers.values() for row in part]
    bench.tell("compared", sum(row["agrees"] is not None for row in rows))
    bench.tell("differing", sum(row["agrees"] is False for row in rows))
    bench.note("differing", [row for row in rows if row["agrees"] is False])
    bench.keep_json("nvidia-smi.json", answers)


def smi_rows() -> list[dict[str, Any]]:
    """One row per figure: ours before, theirs, ours after, and whether they agree."""
    found = []
    for name in ("gpu", "gpu_health"):
        with sampler(name) as ours:
            for source, column, theirs_name, unit, slack in SMI:
                if source == name:
                    found.append(smi_row(ours, column, theirs_name, unit, slack))
            if name == "gpu":
                found.append(reasons_row(ours))
    return found


def smi_row(ours: Any, column: str, name: str, unit: float, slack: float) -> dict[str, Any]:
    """Whether nvidia-smi's figure lies between ours before and after it, or as far off as slack."""
    before, told, after = row_of(ours).get(column), smi(name), row_of(ours).get(column)
    row = {"column": column, "before": before, "smi": told, "after": after, "agrees": None}
    if before is None or after is None or told is None:
        why = ours.told.get(column)
        return {**row, "reason": why.reason if why else "nvidia-smi has none"}
    low, high = sorted((before, after))
    return {**row, "agrees": low - slack <= float(told) * unit <= high + slack}


def reasons_row(ours: Any) -> dict[str, Any]:
    """Throttle reasons are bits, the same in both."""
    before = row_of(ours)["throttle_reasons"]
    told = next((t for name in REASONS if (t := smi(name)) is not None), None)
    after = row_of(ours)["throttle_reasons"]
    agrees = None if told is None or before is None else int(told, 16) in (before, after)
    return {"column": "throttle_reasons", "before": before, "smi": told, "after": after,
            "agrees": agrees}  # fmt: skip


def energy(bench: Bench) -> None:
    """Energy grows by the power; throttle times by no more than the time that passes."""
    with sampler() as found, load(seconds=60):
        time.sleep(bench.scale(2.5, 0.1))
        rows = [row_of(found)]
        for _ in range(bench.scale(10, 3)):
            time.sleep(bench.scale(0.5, 0.12))
            rows.append(row_of(found))
    seconds = (rows[-1]["time_ns"] - rows[0]["time_ns"]) / 1e9
    power = [row["power_instant_watts"] or row["power_watts"] for row in rows]
    if None in power or rows[0]["energy_joules"] is None:
        bench.skip("energy_by_power_ratio", "the driver gives no power or no energy")
    else:
        joules = rows[-1]["energy_joules"] - rows[0]["energy_joules"]
        bench.tell("energy_by_power_ratio", joules / seconds / statistics.fmean(power))
    shares = {name: (rows[-1][name] - rows[0][name]) / 1e9 / seconds for name in rows[0]
              if name.startswith("throttle_") and name.endswith("_ns")
              and rows[0][name] is not None}  # fmt: skip
    bench.note("throttled, of the time", shares)
    bench.tell("largest_throttle_ratio", max(shares.values(), default=0.0))
    bench.keep_json("gpu-rows-under-load.json", rows)


def copied_bytes(bench: Bench) -> None:
    """PCIe bytes as counted, against those that were copied."""
    gib = bench.scale(12, 1)
    of = machine()
    counters = ((197, 0), (198, 0), (138, ALL_LINKS), (139, ALL_LINKS))
    with sampler() as found, load("--copy", str(gib)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        row_of(found)
        time.sleep(0.3)
        before, fields_before = row_of(found), [of.field(*each) for each in counters]
        print("", file=process.stdin, flush=True)
        copied = int(process.stdout.readline())
        time.sleep(0.3)
        after, fields_after = row_of(found), [of.field(*each) for each in counters]
        reasons = {name: why.reason for name, why in found.told.items()}
    bench.note("fields 197, 198, 138, 139 before and after", [fields_before, fields_after])
    for column, figure in (("pcie_receive_bytes", "received_ratio"),
                           ("nvlink_receive_bytes", "nvlink_received_bytes")):  # fmt: skip
        if before[column] is None or after[column] is None:
            bench.skip(figure, reasons.get(column, "the driver gave no value"))
        else:
            grown = after[column] - before[column]
            bench.tell(figure, grown / copied if figure == "received_ratio" else grown)
