"""Asks a real NVIDIA driver what its documentation does not say; the answers as JSON.

    python benchmarks/gpu_questions.py

Needs a GPU, nvidia-ml-py and a torch with CUDA, and about six minutes; root, for the questions on
users. Without a GPU it says so and writes nothing. It changes no setting of the GPU.
`--provoke-xid` makes a program of its own fail on the GPU, to see whether the event comes.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from haiprof.samplers.base import ALL_METRICS  # noqa: E402
from haiprof.samplers.gpm import RATIOS, TRAFFIC, Gpm, profiling_setting  # noqa: E402
from haiprof.samplers.gpu import GpuSampler  # noqa: E402
from haiprof.samplers.nvml import Device, Nvml  # noqa: E402

RESULT = REPOSITORY / "benchmarks" / "results" / "gpu_questions.json"
LOAD = [sys.executable, str(REPOSITORY / "benchmarks" / "gpu_load.py")]
NOBODY = 65534
ALL_LINKS = 0xFFFFFFFF
XID_EVENTS = 8
WINDOW_S = 6.0


class Machine:
    """The first GPU, through nvidia-ml-py itself and through haiprof."""

    def __init__(self, pynvml: ModuleType) -> None:
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


@contextmanager
def load(*words: str, seconds: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """The training loop beside; ended at the end."""
    process = subprocess.Popen(
        [*LOAD, str(seconds), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "running\n":
            raise RuntimeError(f"the load does not run: {' '.join(LOAD)}")
        yield process
    finally:
        process.kill()
        process.communicate()


# -- 1: prices ------------------------------------------------------------------------------------


def timed(call: Callable[[], object], count: int = 200) -> dict[str, object]:
    """Percentiles of a call's time in us, or why it cannot be called."""
    took = []
    try:
        for _ in range(count):
            began = time.perf_counter_ns()
            call()
            took.append((time.perf_counter_ns() - began) / 1e3)
            time.sleep(0.002)
    except Exception as error:  # noqa: BLE001  the answer is that it fails
        return {"error": repr(error)}
    took.sort()
    return {"p50_us": took[count // 2], "p99_us": took[int(count * 0.99)], "max_us": took[-1]}


def calls(machine: Machine) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed, and how often."""
    p, h = machine.pynvml, machine.handle
    fields = {n: ALL_LINKS if n in (138, 139) else 0 for n in
              (74, 75, 82, 83, 94, 138, 139, 142, 185, 186, 197, 198, 269, 270, 271)}  # fmt: skip
    gpm = Gpm(machine.device, tuple(RATIOS | TRAFFIC), clock=time.perf_counter_ns)
    sampler = GpuSampler(nvml=p)
    sampler.open()
    found: dict[str, tuple[Callable[[], object], int]] = {
        "UtilizationRates": (lambda: p.nvmlDeviceGetUtilizationRates(h), 200),
        "MemoryInfo_v2": (lambda: p.nvmlDeviceGetMemoryInfo(h, 0x02000028), 200),
        "PowerUsage": (lambda: p.nvmlDeviceGetPowerUsage(h), 200),
        "ClockInfo SM": (lambda: p.nvmlDeviceGetClockInfo(h, 1), 200),
        "ClockInfo memory": (lambda: p.nvmlDeviceGetClockInfo(h, 2), 200),
        "Temperature": (lambda: p.nvmlDeviceGetTemperature(h, 0), 200),
        "TemperatureV": (lambda: p.nvmlDeviceGetTemperatureV(h, 0), 200),
        "ClocksEventReasons": (lambda: p.nvmlDeviceGetCurrentClocksEventReasons(h), 200),
        "PcieLinkGeneration": (lambda: p.nvmlDeviceGetCurrPcieLinkGeneration(h), 200),
        "PcieThroughput": (lambda: p.nvmlDeviceGetPcieThroughput(h, 0), 5),
        "ComputeRunningProcesses": (lambda: p.nvmlDeviceGetComputeRunningProcesses(h), 20),
        "GPM sample and metrics": (gpm_pair(gpm), 30),
        "haiprof sample": (lambda: (time.sleep(0.1), sampler.sample()), 30),
    }
    for number, scope in fields.items():
        query = [(number, scope)]
        found[f"field {number}"] = (lambda q=query: p.nvmlDeviceGetFieldValues(h, q), 200)
    every = list(fields.items())
    found["all fields in one call"] = (lambda: p.nvmlDeviceGetFieldValues(h, every), 200)
    return found


def gpm_pair(gpm: Gpm) -> Callable[[], object]:
    """One read of GPM, 0.1 s after the one before (which is in the time)."""
    opened: list[bool] = []

    def read() -> object:
        if not opened:
            gpm.open()
            opened.append(True)
        time.sleep(0.1)
        return gpm.read()

    return read


def prices(machine: Machine) -> dict[str, object]:
    """Question 1, first half: what each call takes, idle and under load."""
    table = calls(machine)
    idle = {name: timed(call, count) for name, (call, count) in table.items()}
    with load():
        loaded = {name: timed(call, count) for name, (call, count) in table.items()}
    return {"idle": idle, "under load": loaded,
            "note": "GPM and haiprof sample include 0.1 s of sleep per call"}  # fmt: skip


def step_times(machine: Machine) -> dict[str, object]:
    """Question 1, second half: steps and cudaMallocs of a job beside a sampler."""
    sampler = GpuSampler(nvml=machine.pynvml)
    sampler.open()
    windows: list[tuple[str, int, int]] = []
    rates = [0, 1, 0, 10, 0, 2, 0, 10, 0, 1, 0]
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "steps"
        with load("--steps", str(told), seconds=len(rates) * WINDOW_S + 5):
            for rate in rates:
                begin = time.perf_counter_ns()
                sample_for(sampler, rate)
                windows.append((f"{rate} Hz", begin, time.perf_counter_ns()))
        lines = told.read_text().splitlines()
    sampler.close()
    steps = [json.loads(line) for line in lines if line.endswith("]")]
    return {"windows": [in_window(steps, *window) for window in windows]}


def sample_for(sampler: GpuSampler, rate_hz: int) -> None:
    """Samples so often through one window."""
    end = time.monotonic() + WINDOW_S
    while time.monotonic() < end:
        if rate_hz:
            sampler.sample()
        time.sleep(1 / rate_hz if rate_hz else 0.5)


def in_window(steps: list[list[int]], name: str, begin: int, end: int) -> dict[str, object]:
    """Medians and 99th percentiles of what ended in a window, in us."""
    inside = [step for step in steps if begin <= step[0] < end]
    answer: dict[str, object] = {"sampler": name, "step_count": len(inside)}
    for column, word in ((1, "step"), (2, "malloc")):
        took = sorted(step[column] / 1e3 for step in inside) or [0.0]
        answer[f"{word}_p50_us"] = statistics.median(took)
        answer[f"{word}_p99_us"] = took[int(len(took) * 0.99)]
    return answer


# -- 2 to 5: GPM, widths, rings, ids --------------------------------------------------------------

GPM_AS_USER = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import pynvml
pynvml.nvmlInit()
h = pynvml.nvmlDeviceGetHandleByIndex(0)
told = {"uid": __import__("os").getuid()}
try:
    told["supported"] = pynvml.nvmlGpmQueryDeviceSupport(h).isSupportedDevice
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    pynvml.nvmlGpmSampleGet(h, samples[0])
    time.sleep(0.3)
    pynvml.nvmlGpmSampleGet(h, samples[1])
    request = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=3)
    request.sample1, request.sample2 = samples
    for at, number in enumerate((2, 5, 10)):
        request.metrics[at].metricId = number
    pynvml.nvmlGpmMetricsGet(request)
    told["metrics"] = [[m.metricId, m.nvmlReturn, m.value] for m in request.metrics[:3]]
except Exception as error:
    told["error"] = repr(error)
try:
    answers = pynvml.nvmlDeviceGetFieldValues(h, [(138, 0xFFFFFFFF), (197, 0), (83, 0)])
    told["fields 138, 197, 83"] = [a.nvmlReturn for a in answers]
except Exception as error:
    told["fields"] = repr(error)
print(json.dumps(told))
"""
EVENTS_AS_USER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import pynvml
pynvml.nvmlInit()
h = pynvml.nvmlDeviceGetHandleByIndex(0)
told = {"uid": __import__("os").getuid()}
try:
    told["supported_types"] = pynvml.nvmlDeviceGetSupportedEventTypes(h)
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(h, 8, events)
    told["registered"] = True
    pynvml.nvmlEventSetWait_v2(events, 100)
    told["event"] = True
except Exception as error:
    told["ended_with"] = repr(error)
print(json.dumps(told))
"""


def as_users(machine: Machine, code: str) -> list[object]:
    """What a script tells as this user, and as nobody where this is root."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copy(machine.pynvml.__file__, folder)
        os.chmod(Path(folder) / "pynvml.py", 0o644)
        users = (None, NOBODY) if os.geteuid() == 0 else (None,)
        return [as_user(user, [code, folder]) for user in users]


def as_user(user: int | None, words: list[str]) -> object:
    """What a script tells as one user; nobody may not read a virtual environment of ours."""
    python = sys.executable if user is None else "/usr/bin/python3"
    try:
        done = subprocess.run(
            [python, "-c", *words], capture_output=True, text=True, timeout=30, cwd="/",
            check=False, user=user, extra_groups=None if user is None else [],
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"uid": user, "failed": repr(error)}
    told = done.stdout.strip()
    return json.loads(told) if told else {"uid": user, "failed": done.stderr[-400:]}


def gpm_permission(machine: Machine) -> dict[str, object]:
    """Question 2: GPM by user, and by the time between two samples."""
    answer: dict[str, object] = {"setting": profiling_setting(Path("/"))}
    with load():
        time.sleep(1)
        answer["users"] = as_users(machine, GPM_AS_USER)
        answer["by_spacing"] = {
            f"{apart_s} s": gpm_at(machine, apart_s)
            for apart_s in (0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
        }
    return answer


def gpm_at(machine: Machine, apart_s: float) -> object:
    """Three reads of GPM so far apart, without our own lower limit."""
    gpm = Gpm(machine.device, tuple(RATIOS), clock=lambda: next(ticks))
    ticks = iter(range(0, 10**12, 10**9))
    try:
        gpm.open()
        found = []
        for _ in range(3):
            time.sleep(apart_s)
            found.append([str(v) if isinstance(v, Exception) else v for v in gpm.read()])
        return dict(zip(RATIOS, zip(*found, strict=True), strict=True))
    except Exception as error:  # noqa: BLE001  the answer is that it fails
        return repr(error)
    finally:
        gpm.close()


def widths(machine: Machine) -> dict[str, object]:
    """Question 3: types of fields, and PCIe bytes against those that were copied."""
    ids = [(n, 0) for n in (197, 198, 251, 252, 253, 269, 270, 271, 74, 75, 83, 185, 186)]
    ids += [(n, ALL_LINKS) for n in (138, 139, 140, 141, 202, 204)]
    answer: dict[str, object] = {"fields": {f"{n} scope {s}": machine.field(n, s) for n, s in ids}}
    gpm = Gpm(machine.device, ("pcie_transmit_bytes", "pcie_receive_bytes"),
              clock=time.perf_counter_ns)  # fmt: skip
    try:
        gpm.open()
    except Exception as error:  # noqa: BLE001  the answer is that it fails
        return {**answer, "gpm": repr(error)}
    with load("--copy", "12") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        time.sleep(0.2)
        before = (machine.field(197), machine.field(198), gpm.read())
        print("", file=process.stdin, flush=True)
        told = process.stdout.readline()
        time.sleep(0.2)
        after = (machine.field(197), machine.field(198), gpm.read())
    gpm.close()
    answer["copies"] = {"told": told, "before": before[:2], "after": after[:2],
                        "gpm_before": list(map(str, before[2])),
                        "gpm_after": list(map(str, after[2]))}  # fmt: skip
    return answer


def rings(machine: Machine) -> dict[str, object]:
    """Question 4: how many samples the driver keeps of each kind, and how far apart."""
    answer: dict[str, object] = {}
    names = {0: "power", 1: "gpu", 2: "memory", 3: "encoder", 5: "sm clock", 6: "memory clock",
             7: "module power"}  # fmt: skip
    for kind, name in names.items():
        try:
            value_type, samples = machine.pynvml.nvmlDeviceGetSamples(machine.handle, kind, 0)
        except Exception as error:  # noqa: BLE001  the answer is that it fails
            answer[name] = repr(error)
            continue
        times = [sample.timeStamp for sample in samples]
        apart = [b - a for a, b in itertools.pairwise(times)]
        answer[name] = {"type": value_type, "count": len(times),
                        "median_us": statistics.median(apart) if apart else None,
                        "span_us": times[-1] - times[0] if times else None}  # fmt: skip
    return answer


def present_ids(machine: Machine) -> dict[str, object]:
    """Question 5: which newer fields this driver answers, and which GPM metrics."""
    found = {n: machine.field(n) for n in range(199, 341)}
    links = {n: machine.field(n, ALL_LINKS) for n in range(199, 341)}
    codes: dict[str, list[int]] = {}
    for number, told in found.items():
        codes.setdefault(f"return {told['return']}", []).append(number)
    return {
        "by_return": codes,
        "answered": {n: told for n, told in found.items() if told["return"] == 0},
        "with_all_links": {n: told for n, told in links.items() if told["return"] == 0},
        "gpm": gpm_ids(machine),
    }


def gpm_ids(machine: Machine) -> object:
    """Return code and value of every GPM metric id."""
    p = machine.pynvml
    try:
        samples = [p.nvmlGpmSampleAlloc() for _ in range(2)]
        for sample in samples:
            p.nvmlGpmSampleGet(machine.handle, sample)
            time.sleep(0.2)
        answer = {}
        for number in range(1, p.NVML_GPM_METRIC_MAX):
            request = p.c_nvmlGpmMetricsGet_t(version=1, numMetrics=1)
            request.sample1, request.sample2 = samples
            request.metrics[0].metricId = number
            p.nvmlGpmMetricsGet(request)
            if request.metrics[0].nvmlReturn == 0:
                answer[number] = request.metrics[0].value
        return answer
    except Exception as error:  # noqa: BLE001  the answer is that it fails
        return repr(error)


# -- 6 to 10: other profilers, processes, events --------------------------------------------------


def together(machine: Machine) -> dict[str, object]:
    """Question 6: GPM beside torch's profiler (CUPTI activity) and beside nsys."""
    answer: dict[str, object] = {}
    with load("--profile", seconds=15):
        time.sleep(2)
        answer["torch.profiler"] = gpm_at(machine, 0.5)
    nsys = shutil.which("nsys")
    answer["nsys"] = "not on PATH" if nsys is None else beside_nsys(machine, nsys)
    return answer


def beside_nsys(machine: Machine, nsys: str) -> object:
    """GPM while nsys samples GPU metrics."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [nsys, "profile", "--gpu-metrics-devices=0", "--duration=8", "-o", f"{folder}/report",
             *LOAD, "12"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        time.sleep(6)
        gpm = gpm_at(machine, 0.5)
        try:
            words = process.communicate(timeout=40)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            words = "did not end"
        return {"gpm": gpm, "rc": process.returncode, "stderr": (words or "")[-600:],
                "reports": [path.name for path in Path(folder).iterdir()]}  # fmt: skip


PM_SAMPLING = """
from cupti import pm_sampling
collector = pm_sampling.Collector(0)
collector.enable(["sm__cycles_active.avg"])
collector.configure()
collector.start()
__import__("time").sleep(1)
collector.stop()
print(repr(collector.decode())[:400])
"""


def pm_sampling(machine: Machine) -> object:
    """Question 7: CUPTI PM sampling in a process of its own, beside the job."""
    with load(seconds=40):
        done = subprocess.run(
            [sys.executable, "-c", PM_SAMPLING], capture_output=True, text=True, timeout=30,
            check=False,
        )  # fmt: skip
        return {"rc": done.returncode, "stdout": done.stdout[-400:], "stderr": done.stderr[-600:],
                "gpm_after": gpm_at(machine, 0.2)}  # fmt: skip


def forked(machine: Machine) -> dict[str, object]:
    """Question 8: NVML in a forked child, as it is and after an nvmlInit of its own."""
    return {
        "as it is": in_child(lambda: machine.pynvml.nvmlDeviceGetPowerUsage(machine.handle)),
        "after nvmlInit": in_child(
            lambda: (machine.pynvml.nvmlInit(),
                     machine.pynvml.nvmlDeviceGetPowerUsage(machine.handle))
        ),
        "parent afterwards": machine.pynvml.nvmlDeviceGetPowerUsage(machine.handle),
    }  # fmt: skip


def in_child(call: Callable[[], object]) -> str:
    """What a call gives in a forked child; killed after ten seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            words = repr(call())
        except Exception as error:  # noqa: BLE001  the answer is that it fails
            words = repr(error)
        os.write(writer, words.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return told or f"ended with status {status}"


def process_ids(machine: Machine) -> dict[str, object]:
    """Question 9: the job's pid as NVML tells it, and as this container does."""
    p = machine.pynvml
    with load() as process:
        time.sleep(1)
        status = Path(f"/proc/{process.pid}/status").read_text()
        answer: dict[str, object] = {
            "pid": process.pid,
            "NSpid": [line for line in status.splitlines() if line.startswith("NSpid")],
        }
        for name in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetProcessUtilization"):
            arguments = (0,) if name.endswith("Utilization") else ()
            try:
                found = getattr(p, name)(machine.handle, *arguments)
                answer[name] = [each.pid for each in found]
            except Exception as error:  # noqa: BLE001  the answer is that it fails
                answer[name] = repr(error)
    return answer


XID_SCRIPT = "import torch; x = torch.zeros(4, device='cuda'); x[torch.tensor([9], device='cuda')];"
XID_SCRIPT += "torch.cuda.synchronize()"


def xid_events(machine: Machine, provoke: bool) -> dict[str, object]:
    """Question 10: who may wait for XID events, and whether one comes."""
    answer: dict[str, object] = {"users": as_users(machine, EVENTS_AS_USER)}
    if not provoke:
        return answer
    sampler = GpuSampler(nvml=machine.pynvml)
    sampler.open()
    subprocess.run([sys.executable, "-c", XID_SCRIPT], capture_output=True, check=False)
    time.sleep(2)
    sampler.sample()
    answer["after an index out of bounds"] = [dict(line) for line in sampler.drain_lines()]
    sampler.close()
    return answer


def about(machine: Machine) -> dict[str, object]:
    """Which machine answered."""
    sampler = GpuSampler(nvml=machine.pynvml)
    missing = [each._asdict() for each in sampler.open()]
    states = [(s.metric, s.status, s.value, s.read_ns) for s in sampler.states()]
    header = sampler.header()
    sampler.close()
    return {"header": header, "missing": missing, "states": states,
            "binding": ctypes.sizeof(machine.pynvml.c_nvmlGpmMetricsGet_t),
            "driver": machine.nvml.version, "kernel": os.uname().release,
            "uid": os.geteuid()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--provoke-xid", action="store_true")
    options = parser.parse_args()
    missing = [each for each in GpuSampler().open() if each.metric == ALL_METRICS]
    if missing:
        print(f"No GPU to ask here: {missing[0].reason}. Nothing was written.")
        return
    import pynvml

    machine = Machine(pynvml)
    questions: dict[str, Callable[[], object]] = {
        "0 machine": lambda: about(machine),
        "1 prices of calls": lambda: prices(machine),
        "1 step time beside a sampler": lambda: step_times(machine),
        "2 GPM by user and spacing": lambda: gpm_permission(machine),
        "3 widths of fields": lambda: widths(machine),
        "4 rings of samples": lambda: rings(machine),
        "5 ids of this driver": lambda: present_ids(machine),
        "6 GPM beside other profilers": lambda: together(machine),
        "7 CUPTI PM sampling from outside": lambda: pm_sampling(machine),
        "8 NVML after fork": lambda: forked(machine),
        "9 pids in this container": lambda: process_ids(machine),
        "10 XID events by user": lambda: xid_events(machine, options.provoke_xid),
    }
    answers: dict[str, object] = {}
    for name, ask in questions.items():
        began = time.monotonic()
        try:
            answers[name] = ask()
        except Exception as error:  # noqa: BLE001  one question must not cost the others
            answers[name] = {"error": repr(error)}
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(answers, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
