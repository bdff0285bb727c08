"""A burst: Nsight Systems samples the GPUs beside the job for a few seconds, once (`--burst`)."""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from haiprof.base.errors import RunFormatError
from haiprof.base.options import ENV_NSYS, Options
from haiprof.base.safe_files import MadeFolder, open_to_append, remove_file
from haiprof.base.version import read_data
from haiprof.linux.procfs import read_text
from haiprof.run_format.layout import NodePaths
from haiprof.run_format.reader import read_records
from haiprof.run_format.schema import BACKWARD, OPTIMIZER, TAG_MASK
from haiprof.run_format.writer import note_line

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


_WORDS = read_data("agent/nsys_words.json")
"""Patterns of what nsys prints, its meaning, and the remedy; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nsys:
    """Nsight Systems, allowed to sample the GPUs of this machine."""

    path: str
    device_option: str  # as this version calls it
    devices: str  # `cuda-visible` where CUDA_VISIBLE_DEVICES chooses, otherwise `all`
    gpu_count: int  # GPUs that it can sample

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
    if named := environ.get(ENV_NSYS):
        found = shutil.which(named, path=environ.get("PATH", ""))
        return found or Refusal(f"{ENV_NSYS}={named}: no such program", f"correct {ENV_NSYS}")
    found = shutil.which("nsys", path=environ.get("PATH", ""))
    installed = [str(path) for pattern in _PLACES for path in root.glob(pattern)]
    runnable = [path for path in installed if os.access(path, os.X_OK)]
    newest = max(runnable, key=lambda path: [*map(int, re.findall(r"\d+", path))], default=None)
    return found or newest or Refusal(
        f"no nsys on PATH or in {root / 'opt/nvidia/nsight-systems*'}",
        f"install Nsight Systems (its CLI is enough), or set {ENV_NSYS} to its nsys",
    )  # fmt: skip


def probe_nsys(
    path: str, environ: Mapping[str, str], *, in_child: Callable[[], None] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> Nsys | Refusal:  # fmt: skip
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
        if count := len(_DEVICE.findall(_NOT_SUPPORTED.split(output)[0])):
            devices = "cuda-visible" if environ.get("CUDA_VISIBLE_DEVICES") else "all"
            return Nsys(path=path, device_option=option, devices=devices, gpu_count=count)
        if "unrecogni" not in output.lower():
            break
    return meaning(output, f"{path} names no GPU that it can sample")


def meaning(output: str, otherwise: str) -> Refusal:
    """Why nsys failed, from its output, with its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for each in _WORDS:
        line = next((line for line in lines if re.search(each["words"], line)), None)
        if line is not None:
            return Refusal(f"{each['reason']} (nsys: {line})", each["remedy"])
    last = f" (nsys: {lines[-1]})" if lines else ""
    return Refusal(f"{otherwise}{last}", "run nsys profile --gpu-metrics-devices=help")


def _ask(
    words: list[str], environ: Mapping[str, str], in_child: Callable[[], None] | None,
    timeout_s: float,
) -> str:  # fmt: skip
    """What a command prints; whatever it started ends with it."""
    with subprocess.Popen(
        words, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=in_child,
    ) as asked:  # fmt: skip
        try:
            return asked.communicate(timeout=timeout_s)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            kill_group(asked)
            raise


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended, without reaping it: `kill_group` must not hit a reused pid."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group of its own, with everything in that group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


DELAY_S = 3.0  # from the first training step: it loads libraries and allocates
GRACE_S = 60.0  # for nsys to start and to write its report, beside the window
EXPORT_S = 300.0
FINISH_S = 10.0  # after the job: time to finish what is nearly ready
RESERVE_BYTES = 1 << 30  # of free disk space, left to the job
SCRATCH_BYTES = 300 << 20  # nsys wants 200 MiB for its temporary files
SAMPLE_BYTES = 64 * 40  # about 64 metrics per sample and GPU, 40 bytes each in SQLite
ENDS = ("recorded", "failed", "stopped", "unavailable")
_LATEST_SPANS = 1 << 12
_PR_SET_PDEATHSIG = 1
# Kills its whole group on SIGTERM, which the kernel sends when the launcher dies.
_GUARD = 'trap "kill -KILL 0" TERM; "$@" & wait $!'


def prepare_burst(
    environ: Mapping[str, str], *, log_dir: Path, options: Options,
    in_child: Callable[[], None] | None = None, root: Path = Path("/"),
) -> Nsys | Refusal:  # fmt: skip
    """Checks before the job starts whether a burst is possible here."""
    path = find_nsys(environ, root=root)
    nsys = path if isinstance(path, Refusal) else probe_nsys(path, environ, in_child=in_child)
    if isinstance(nsys, Refusal):
        return nsys
    needed = limit_bytes(options, nsys.gpu_count) + RESERVE_BYTES
    free = shutil.disk_usage(log_dir).free
    if free >= needed:
        return nsys
    return Refusal(
        f"{log_dir} has {free >> 20} MiB free, a burst may need {needed >> 20} MiB",
        "free space, put --log-dir elsewhere, or ask for a shorter or slower burst",
    )


def limit_bytes(options: Options, gpu_count: int) -> int:
    """Maximum size of a burst, with its temporary files and its export."""
    samples = round(options.burst_hz * options.burst_time_s) * gpu_count
    return SCRATCH_BYTES + 2 * samples * SAMPLE_BYTES


@dataclass
class Burst:
    """One burst of one node: waits for training, samples, exports, and reports the result."""

    node: NodePaths
    options: Options
    nsys: Nsys | Refusal
    has_trained: Callable[[], bool]
    in_child: Callable[[], None] | None = None
    limit: int | None = None
    delay_s: float = DELAY_S
    grace_s: float = GRACE_S
    status: str = "waiting"  # `waiting`, `sampling`, `exporting`; then one of `ENDS`
    reason: str = ""
    _begins_s: float | None = None
    _deadline_s: float = 0.0
    _window: dict[str, int] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _scratch: MadeFolder | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status in ENDS

    def tick(self) -> None:
        """Advances the state; called about twice a second, never waits."""
        try:
            if self.status == "waiting":
                if isinstance(self.nsys, Refusal):
                    self._end("unavailable", self.nsys)
                elif self._begins_s is None:
                    if self.has_trained():
                        self._begins_s = time.monotonic() + self.delay_s
                elif time.monotonic() >= self._begins_s:
                    self._sample(self.nsys)
            elif self._process is not None:
                self._watch(self._process)
        except (OSError, subprocess.SubprocessError) as error:
            self._end("failed", Refusal(f"nsys could not be run: {error}", ""))

    def cancel(self, reason: str) -> None:
        """Cancels it, unless it has begun."""
        if self.status != "waiting":
            return
        if isinstance(self.nsys, Refusal):
            self._end("unavailable", self.nsys)
        else:
            self._end("stopped", Refusal(reason, "a longer --time, or a job that runs longer"))

    def finish(self, reason: str, asked_to_end: Callable[[], bool]) -> None:
        """Called when the job is over: finishes what is nearly ready, and ends the rest."""
        self.cancel(reason)
        deadline = time.monotonic() + FINISH_S
        began_ns = self._window.get("start_wall_ns", time.time_ns())
        ends_ns = began_ns + self.options.burst_time_s * 1e9
        while not self.over and time.time_ns() > ends_ns and time.monotonic() < deadline:
            self.tick()
            if asked_to_end():
                break
        if not self.over:
            remedy = f"nsys export --type=sqlite {self.node.burst_report}"
            self._end("stopped", Refusal(reason, remedy if self.status == "exporting" else ""))

    def _sample(self, nsys: Nsys) -> None:
        options, node = self.options, self.node
        self._scratch = MadeFolder.make(node.burst_scratch, below=node.run_root)
        if self.limit is None:
            self.limit = limit_bytes(options, nsys.gpu_count)
        words = nsys.profile(
            hz=options.burst_hz, seconds=options.burst_time_s, report=node.burst_report
        )
        self._window["start_wall_ns"] = time.time_ns()
        self._start(words, options.burst_time_s + self.grace_s)
        self.status = "sampling"
        self._note()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Watches nsys, and advances when it has ended."""
        if not has_ended(process):
            self._check_bounds()
            return
        kill_group(process)  # its remaining child processes
        self._process = None
        node = self.node
        said = read_text(node.burst_log) or ""
        if self.status == "sampling":
            self._window["end_wall_ns"] = time.time_ns()
            if process.returncode or not node.burst_report.exists():
                self._end("failed", meaning(said, "nsys wrote no report"))
                return
            self.status = "exporting"
            assert isinstance(self.nsys, Nsys), "only nsys samples"
            self._start(self.nsys.export(node.burst_report, node.burst_export), EXPORT_S)
        elif process.returncode or not node.burst_export.exists():
            self._end("failed", meaning(said, "nsys could not export its report"))
        else:
            self._end("recorded", Refusal("", ""))

    def _check_bounds(self) -> None:
        node = self.node
        written, free = _size(node.bursts), shutil.disk_usage(node.bursts).free
        if time.monotonic() > self._deadline_s:
            why = "nsys did not end in time"
        elif self.limit is not None and written > self.limit:
            why = f"nsys wrote {written >> 20} MiB, more than the {self.limit >> 20} MiB expected"
        elif free < RESERVE_BYTES // 2:
            why = f"only {free >> 20} MiB are left on the disk of {node.bursts}"
        else:
            return
        self._end("failed", Refusal(why, f"see {node.burst_log}; a shorter or slower burst"))

    def _start(self, words: list[str], seconds: float) -> None:
        """Starts nsys in a session of its own, with its signals as the launcher was given them."""
        launcher, in_child = os.getpid(), self.in_child
        prctl = ctypes.CDLL(None).prctl

        def before() -> None:
            if in_child is not None:
                in_child()
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != launcher:
                os._exit(127)

        scratch = str(self.node.burst_scratch)
        with os.fdopen(open_to_append(self.node.burst_log, below=self.node.run_root), "ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "haiprof-burst", *words],
                env={**os.environ, "TMPDIR": scratch, "NSYS_TMPDIR": scratch},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=before,
            )  # fmt: skip
        self._deadline_s = time.monotonic() + seconds

    def _end(self, status: str, why: Refusal) -> None:
        """Ends whatever runs, cleans up, and records the result."""
        if self._process is not None:
            kill_group(self._process)
            self._process = None
        if status != "recorded":
            # an incomplete export is useless
            remove_file(self.node.burst_export, below=self.node.run_root)
        if self._scratch is not None:
            self._scratch.remove()
        self.status, self.reason = status, why.reason
        self._note(reason=why.reason, remedy=why.remedy)

    def _note(self, **more: str) -> None:
        facts: dict[str, object] = {"hz": self.options.burst_hz, **self._window}
        facts |= {name: value for name, value in more.items() if value}
        line = {"type": "burst", "status": self.status, "time_ns": time.perf_counter_ns()}
        note_line(self.node.events, {**line, **facts})


def has_trained(phases: Path) -> bool:
    """Whether one of a rank's latest spans is of a training step (backward, optimizer)."""
    try:
        tail = read_records(phases, first=-_LATEST_SPANS).data
    except RunFormatError:
        return False
    return any(word & TAG_MASK in (BACKWARD, OPTIMIZER) for word in array.array("q", tail)[::2])


def _size(folder: Path) -> int:
    """Bytes below a folder; what vanishes meanwhile does not count."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
