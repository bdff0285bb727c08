"""GPM: what it shows of a load, who may read it and how often; and a GPU that MIG cuts up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.driver import Machine, attempt, machine, row_of, sampler
from benchmarks.gpu.load import load

NOBODY = 65534

AS_USER = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
import pynvml
pynvml.nvmlInit()
h = pynvml.nvmlDeviceGetHandleByIndex(0)
told = {"uid": __import__("os").getuid()}
def ask(name, call):
    try:
        told[name] = call()
    except Exception as error:
        told[name] = repr(error)
def gpm():
    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    pynvml.nvmlGpmSampleGet(h, samples[0])
    time.sleep(0.3)
    pynvml.nvmlGpmSampleGet(h, samples[1])
    request = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=3)
    request.sample1, request.sample2 = samples
    for at, number in enumerate((2, 5, 10)):
        request.metrics[at].metricId = number
    pynvml.nvmlGpmMetricsGet(request)
    return [[m.metricId, m.nvmlReturn, m.value] for m in request.metrics[:3]]
def fields():
    answers = pynvml.nvmlDeviceGetFieldValues(h, [(138, 0xFFFFFFFF), (197, 0), (83, 0)])
    return [a.nvmlReturn for a in answers]
def events():
    found = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(h, 8, found)
    try:
        pynvml.nvmlEventSetWait_v2(found, 100)
    except Exception as error:
        return "registered; " + repr(error)
    return "registered; an event"
ask("gpm", gpm)
ask("fields 138, 197, 83", fields)
ask("xid events", events)
print(json.dumps(told))
"""


def as_users(of: Machine) -> list[object]:
    """What a script tells as this user, and as nobody where this is root."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copy(of.pynvml.__file__, folder)
        os.chmod(Path(folder) / "pynvml.py", 0o644)
        users = (None, NOBODY) if os.geteuid() == 0 else (None,)
        return [as_user(user, [AS_USER, folder]) for user in users]


def as_user(user: int | None, words: list[str]) -> object:
    """What a script tells as one user; nobody may not read a virtual environment of ours."""
    system = "/usr/bin/python3"
    python = sys.executable if user is None or not os.path.exists(system) else system
    try:
        done = subprocess.run(
            [python, "-c", *words], capture_output=True, text=True, timeout=30, cwd="/",
            check=False, user=user, extra_groups=None if user is None else [],
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"uid": user, "failed": repr(error)}
    told = done.stdout.strip()
    return json.loads(told) if told else {"uid": user, "failed": done.stderr[-400:]}


def gpm(bench: Bench) -> None:
    """GPM by user and by the time between two samples; what a matrix product shows."""
    from haiprof.agent.samplers.gpu_activity import profiling_setting

    of = machine()
    bench.note("setting of the driver", profiling_setting(Path("/")))
    with load(seconds=60):
        time.sleep(bench.scale(1.0, 0.1))
        users = as_users(of)
        bench.note("by user", users)
        spacing = {
            apart: gpm_at(of, apart) for apart in bench.scale((0.02, 0.05, 0.1, 0.5), (0.1,))
        }
        bench.note("by s between samples", spacing)
        with sampler() as found:
            row_of(found)
            time.sleep(bench.scale(2.0, 0.15))
            busy = row_of(found)
            bench.note("missing", {name: why.reason for name, why in found.told.items()})
    bench.tell("users_asked", len(users))
    for figure in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        if busy[figure] is None:
            why = found.told.get(figure)
            bench.skip(figure, why.reason if why else "the driver gave no value")
        else:
            bench.tell(figure, busy[figure])
    bench.keep_json("gpm.json", {"users": users, "spacing": spacing, "busy": busy})


def gpm_at(of: Machine, apart_s: float) -> object:
    """Three reads of GPM so far apart, without our own lower limit."""
    from haiprof.agent.samplers.gpu_activity import RATIOS, Gpm

    ticks = iter(range(0, 10**12, 10**9))
    found = Gpm(of.device, tuple(RATIOS), clock=lambda: next(ticks))

    def read() -> object:
        found.open()
        rows = []
        for _ in range(3):
            time.sleep(apart_s)
            rows.append([str(v) if isinstance(v, Exception) else v for v in found.read()])
        return dict(zip(RATIOS, zip(*rows, strict=True), strict=True))

    try:
        return attempt(read)
    finally:
        found.close()


def mig(bench: Bench) -> None:
    """A GPU that is cut into instances has no utilisation: said in words, not as 0.

    MIG is never switched on here. Where it is on, the driver itself answers; else a library that
    stands before the driver's says that it is.
    """
    words = {"on this GPU": mig_reason({})}
    if "stub" in os.environ.get("GPU_CHECK_STUB", ""):
        words["on a stub"] = mig_reason({"STUB_MIG": "1"})
    bench.note("reasons", words)
    on = [w for w in words.values() if w and "MIG is on" in w]
    if not any(words.values()):
        bench.skip("refused_in_words", "MIG is off on this GPU, and no setting is changed")
    else:
        bench.tell("refused_in_words", bool(on))


def mig_reason(environment: dict[str, str]) -> str | None:
    """Why there is no utilisation, as a fresh process is told; None where there is one."""
    code = (
        "from haiprof.agent.samplers.gpu import GpuSampler\n"
        "s = GpuSampler()\n"
        "told = {m.metric: m.reason for m in s.open()}\n"
        "s.sample()\n"
        "told.update({m.metric: m.reason for m in s.drain_missing()})\n"
        "print(told.get('utilization_ratio') or told.get('sm_active_ratio') or '')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.stdout.strip() or None
