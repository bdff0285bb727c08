"""Nsight Systems' command: where it is, whether it may sample the GPUs, what its output means.

Source: Nsight Systems user guide, "CLI Profile Command Switch Options", "Launching GPU Metrics from
the CLI" and "Limitations". Taken from there, and not tried on a GPU by us: `--gpu-metrics-devices`
(`--gpu-metrics-device` before 2024), its value `help` and what that prints, one user of the
counters at a time, temporary files in TMPDIR or NSYS_TMPDIR.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from haiprof.base.options import ENV_NSYS

PROBE_TIMEOUT_S = 10.0
_PLACES = (
    "opt/nvidia/nsight-systems*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
)
_DEVICE_OPTIONS = ("--gpu-metrics-devices", "--gpu-metrics-device")
_DEVICE = re.compile(r"^\s*\d+\s*:\s*\S", re.MULTILINE)
_NOT_SUPPORTED = re.compile(r"Some GPUs are not supported|None of the installed GPUs")


class Refusal(NamedTuple):
    """Why there is no burst, and what to set for one."""

    reason: str
    remedy: str


# Output of nsys, its meaning, and the remedy. The first match counts.
_WORDS = (
    ("Insufficient privilege", "this user may not read the GPU's performance counters",
     "an administrator sets NVreg_RestrictProfilingToAdminUsers=0 for the NVIDIA driver and "
     "reloads it (developer.nvidia.com/ERR_NVGPUCTRPERM)"),
    ("ERR_NVGPUCTRPERM", "this user may not read the GPU's performance counters",
     "an administrator sets NVreg_RestrictProfilingToAdminUsers=0 for the NVIDIA driver and "
     "reloads it (developer.nvidia.com/ERR_NVGPUCTRPERM)"),
    ("Already under profiling", "another tool holds the GPU's performance counters",
     "end the other profiler, or pause DCGM's: dcgmi profile --pause, afterwards --resume"),
    ("Unsupported architecture", "Nsight Systems cannot sample this GPU",
     "Turing or newer; a newer Nsight Systems knows newer GPUs"),
    ("None of the installed GPUs are supported", "Nsight Systems can sample none of the GPUs here",
     "a newer Nsight Systems knows newer GPUs"),
    ("No space left on device", "the disk is full", "free space below the log directory"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Nsys:
    """Nsight Systems, allowed to sample the GPUs of this machine."""

    path: str
    device_option: str
    """As this version calls it."""
    devices: str
    """`cuda-visible` where CUDA_VISIBLE_DEVICES chooses, otherwise `all`."""
    gpu_count: int
    """GPUs that it can sample."""

    def profile(self, *, hz: int, seconds: float, report: Path) -> list[str]:
        """The command that samples the GPUs for a time; it launches nothing but a `sleep`."""
        return [
            self.path, "profile", "--trace=none", "--sample=none", "--cpuctxsw=none",
            f"{self.device_option}={self.devices}", f"--gpu-metrics-frequency={hz}",
            "--force-overwrite=true", f"--output={report.with_suffix('')}", "sleep", f"{seconds:g}",
        ]  # fmt: skip

    def export(self, report: Path, export: Path) -> list[str]:
        """The command that turns a report into SQLite."""
        options = ["--type=sqlite", "--force-overwrite=true", f"--output={export}"]
        return [self.path, "export", *options, str(report)]


def find_nsys(environ: Mapping[str, str], *, root: Path = Path("/")) -> str | Refusal:
    """The command: HAIPROF_NSYS, or on PATH, or the newest in /opt/nvidia."""
    named = environ.get(ENV_NSYS)
    if named:
        found = shutil.which(named, path=environ.get("PATH", ""))
        return found or Refusal(f"{ENV_NSYS}={named}: no such program", f"correct {ENV_NSYS}")
    found = shutil.which("nsys", path=environ.get("PATH", ""))
    installed = [path for pattern in _PLACES for path in root.glob(pattern)]
    runnable = sorted((p for p in installed if os.access(p, os.X_OK)), key=_version)
    if found or runnable:
        return found or str(runnable[-1])
    return Refusal(
        f"no nsys on PATH or in {root / 'opt/nvidia/nsight-systems*'}",
        f"install Nsight Systems (its CLI is enough), or set {ENV_NSYS} to its nsys",
    )


def probe_nsys(
    path: str,
    environ: Mapping[str, str],
    *,
    in_child: Callable[[], None] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Nsys | Refusal:
    """Asks nsys which GPUs it may sample; it takes about a second."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return Refusal("CUDA_VISIBLE_DEVICES leaves the job no GPU", "let the job see a GPU")
    output = ""
    for option in _DEVICE_OPTIONS:
        try:
            output = _ask([path, "profile", f"{option}=help"], environ, in_child, timeout_s)
        except subprocess.TimeoutExpired:
            return Refusal(f"{path} gave no answer within {timeout_s:g} s", f"run {path} --version")
        except OSError as error:
            return Refusal(f"{path}: {error.strerror or error}", f"run {path} --version")
        supported = _NOT_SUPPORTED.split(output)[0]
        count = len(_DEVICE.findall(supported))
        if count:
            devices = "cuda-visible" if environ.get("CUDA_VISIBLE_DEVICES") else "all"
            return Nsys(path=path, device_option=option, devices=devices, gpu_count=count)
        if "unrecogni" not in output.lower():
            break
    return meaning(output, f"{path} names no GPU that it can sample")


def meaning(output: str, otherwise: str) -> Refusal:
    """Why nsys failed, from its output, with its last line."""
    for words, reason, remedy in _WORDS:
        if words in output:
            line = next(line.strip() for line in output.splitlines() if words in line)
            return Refusal(f"{reason} (nsys: {line})", remedy)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = f" (nsys: {lines[-1]})" if lines else ""
    return Refusal(f"{otherwise}{last}", "run nsys profile --gpu-metrics-devices=help")


def _ask(
    words: list[str],
    environ: Mapping[str, str],
    in_child: Callable[[], None] | None,
    timeout_s: float,
) -> str:
    """What a command prints; whatever it started ends with it."""
    with subprocess.Popen(
        words,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=in_child,
    ) as asked:
        try:
            return asked.communicate(timeout=timeout_s)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            kill_group(asked)
            raise


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended, without reaping it: `kill_group` must not hit a reused pid."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, how) is not None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, with everything in that group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]
