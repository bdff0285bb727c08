"""A stand-in for Nsight Systems' command: its flags, its words, its files and its failures.

Run as a program it is nsys; `install` puts it somewhere under that name. What it prints is what
real ones print (2024.5 on V100, 2025.3 on GB10 and RTX 5090); the tables of its export are those of
the export schema in the user guide.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_DEVICES = """\
Possible --gpu-metrics-devices values are:
\t0: Hopper GH100 | NVIDIA H200 PCI[0000:0f:00.0]
\t1: Hopper GH100 | NVIDIA H200 PCI[0000:2d:00.0]
\tall: Select all supported GPUs
\tcuda-visible: Select GPUs that match CUDA_VISIBLE_DEVICES
\tnone: Disable GPU Metrics [Default]
Some GPUs are not supported:
\t2: Volta GV100 | Quadro GV100 PCI[0000:17:00.0]
See the user guide: https://docs.nvidia.com/nsight-systems/UserGuide/index.html#gpu-metrics
"""
_NONE = "GPU Metrics: None of the installed GPUs are supported:\n\tHopper GH100 | NVIDIA H200 "
_REFUSALS = {
    "denied": "- Insufficient privilege, see https://developer.nvidia.com/ERR_NVGPUCTRPERM",
    "busy": "- Already under profiling",
    "volta": "- Unsupported architecture",
}
# Both GPUs of the listing above, in the order of PerfWorks, which is not that of NVML.
GPUS = (
    (0, "GPU-00000000-0000-0000-0000-000000000001", "0000:0f:00.0"),
    (1, "GPU-00000000-0000-0000-0000-000000000000", "0000:2d:00.0"),
)
TYPE_BASE = 0x1000100000000
_TAKEN = {
    "profile": {"--trace", "--sample", "--cpuctxsw", "--gpu-metrics-frequency",
                "--force-overwrite", "--output"},
    "export": {"--type", "--force-overwrite", "--output"},
}  # fmt: skip

Sample = tuple[int, int, str, float]
"""(ns since the start of the session, nsys's GPU, metric's name, value)."""


def install(folder: Path, behaviour: str = "works") -> Path:
    """Puts an `nsys` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nsys"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {behaviour} "$@"\n')
    program.chmod(0o755)
    return program


def write_export(
    path: Path,
    samples: Iterable[Sample],
    *,
    epoch_ns: int,
    gpus: Sequence[tuple[int, str, str]] = GPUS,
    leave_out: Sequence[str] = (),
) -> None:
    """An export of GPU metrics."""
    rows = list(samples)
    names = sorted({name for _, _, name, _ in rows})
    types = sorted({gpu for _, gpu, _, _ in rows})
    described = [
        (TYPE_BASE + gpu, TYPE_BASE, "GPU Metrics", at, n)
        for gpu in types
        for at, n in enumerate(names)
    ]
    values = [(t, t, TYPE_BASE + gpu, names.index(name), v) for t, gpu, name, v in rows]
    tables: dict[str, tuple[str, Sequence[tuple[object, ...]]]] = {
        "TARGET_INFO_SESSION_START_TIME": (
            "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
            [(epoch_ns, "", "")],
        ),
        "TARGET_INFO_GPU": (
            "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, "
            "pwGpuId INTEGER, uuid TEXT",
            [(TYPE_BASE, gpu, "NVIDIA H200", bus, gpu, uuid) for gpu, uuid, bus in gpus],
        ),
        "TARGET_INFO_GPU_METRICS": (
            "typeId INTEGER NOT NULL, sourceId INTEGER NOT NULL, typeName TEXT NOT NULL, "
            "metricId INTEGER NOT NULL, metricName TEXT NOT NULL",
            described,
        ),
        "GPU_METRICS": (
            "rawTimestamp INTEGER, timestamp INTEGER, typeId INTEGER NOT NULL, "
            "metricId INTEGER NOT NULL, value INTEGER NOT NULL",
            values,
        ),
    }
    with sqlite3.connect(path) as database:
        for name, (columns, content) in tables.items():
            if name not in leave_out:
                database.execute(f"CREATE TABLE {name} ({columns})")
                marks = ",".join("?" * (columns.count(",") + 1))
                for row in content:
                    database.execute(f"INSERT INTO {name} VALUES ({marks})", row)
    database.close()


def steady_load(hz: int, seconds: float) -> Iterable[Sample]:
    """GPU 0 busy in every other millisecond, GPU 1 idle."""
    step_ns = 1_000_000_000 // hz
    for t in range(0, int(seconds * 1_000_000_000), step_ns):
        busy = (t // 1_000_000) % 2
        yield t, 0, "SMs Active [Throughput %]", 95 * busy
        yield t, 0, "Tensor Active [Throughput %]", 60 * busy
        yield t, 1, "SMs Active [Throughput %]", 0
        yield t, 0, "GPC Clock Frequency [MHz]", 1_980_000_000


def _options(command: str, words: list[str], behaviour: str) -> tuple[dict[str, str], list[str]]:
    """Options and the rest; refuses what this version does not know."""
    devices = "--gpu-metrics-device" if behaviour == "old" else "--gpu-metrics-devices"
    taken = _TAKEN[command] | ({devices} if command == "profile" else set())
    given: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        if name not in taken:
            print(f"unrecognised option '{name}'\n\nusage: nsys {command} [<args>]")
            raise SystemExit(1)
        given[name.replace("-device=", "-devices=")] = value
    if devices in given:
        given["devices"] = given.pop(devices)
    return given, words


def _list_devices(behaviour: str) -> int:
    if behaviour == "mute":
        time.sleep(600)
    if behaviour in _REFUSALS:
        print(_NONE + _REFUSALS[behaviour])
    else:
        print(_DEVICES)
    return 0


def _profile(behaviour: str, words: list[str]) -> int:
    given, application = _options("profile", words, behaviour)
    if given.get("devices") == "help":
        return _list_devices(behaviour)
    hz = int(given["--gpu-metrics-frequency"])
    assert 10 <= hz <= 200_000
    assert given["--trace"] == given["--sample"] == given["--cpuctxsw"] == "none"
    scratch = Path(os.environ["TMPDIR"]) / "nvidia" / "nsight_systems"
    scratch.mkdir(parents=True)
    (scratch / "events").write_bytes(b"x" * 1000)
    # As an application that holds on to its terminal would show: there must be none.
    facts = {"pid": os.getpid(), "session": os.getsid(0), "terminal": _has_terminal()}
    Path(f"{given['--output']}.seen").write_text(json.dumps({**facts, "argv": sys.argv[2:]}))
    print("Collecting data...", flush=True)
    if behaviour == "hangs":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        subprocess.run(["sleep", "600"], check=False)
    started_ns = time.time_ns()
    if behaviour == "fills":
        with (scratch / "more").open("wb") as file:
            file.truncate(1 << 40)
        time.sleep(600)
    subprocess.run(application, check=True)
    if behaviour == "crashes":
        print("FATAL ERROR: the daemon went away")
        return 1
    report = {"hz": hz, "seconds": float(application[1]), "epoch_ns": started_ns}
    if behaviour != "no-report":
        Path(f"{given['--output']}.nsys-rep").write_text(json.dumps(report))
    return 0


def _export(behaviour: str, words: list[str]) -> int:
    given, (report,) = _options("export", words, behaviour)
    assert given["--type"] == "sqlite"
    facts = json.loads(Path(report).read_text())
    if behaviour == "no-export":
        Path(given["--output"]).write_bytes(b"SQLite format 3\0half")
        print("Failed to export: No space left on device")
        return 1
    load = steady_load(facts["hz"], facts["seconds"])
    write_export(Path(given["--output"]), load, epoch_ns=facts["epoch_ns"])
    return 0


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    _behaviour, _command, *_words = sys.argv[1:]
    raise SystemExit({"profile": _profile, "export": _export}[_command](_behaviour, _words))
