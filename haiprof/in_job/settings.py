"""Settings of this process that change how fast it is: read once, and looked at again each second.

All of it is read on the drain thread: nothing is imported for it, no tensor's values are read, and
what belongs to one thread alone (autocast, Python's own hooks) is looked at by that one.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import CodeType, FrameType
from typing import Any

from haiprof.base.code_places import is_library
from haiprof.base.control_group_limits import parse_cpu_limit, parse_memory_limit
from haiprof.in_job.identity import has_process_group
from haiprof.in_job.object_settings import CallHooks, model_settings, optimizer_settings
from haiprof.in_job.recorder import Recorder
from haiprof.run_format.schema import GC, TAG_BITS
from haiprof.run_format.secrets import mask_text
from haiprof.run_format.setting_lines import SEEN, SETTINGS

SETTLED_STEPS = 3  # so many optimizer steps, and what is set once has been set
SEEN_EVERY_LOOKS = 10
_OBJECT_LIMIT = 8
PAUSE_MIN_NS = 200_000  # shorter pauses are part of normal allocation
_WHOLE = 2  # what gc.collect() collects by default
_SLACK = 64
_PROC = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_now = time.perf_counter_ns


@dataclass
class Settings:
    """The line `settings`, and the counts of what is switched on and off."""

    models: Callable[[], Iterable[Any]]
    optimizers: Callable[[], Iterable[Any]]
    _: KW_ONLY
    own_profiler: Callable[[], bool]
    kept_graphs: Callable[[], int]
    masks: Callable[[], Mapping[str, int]]
    hooks: CallHooks
    pauses: CollectorPauses

    def __post_init__(self) -> None:
        """Begins with nothing seen."""
        self._is_over = False
        self.restart()

    def restart(self) -> None:
        """In a forked child, which has settings of its own."""
        self._counts = dict.fromkeys(("look", "anomaly", "profiler", "no_sync"), 0)
        self._is_noted = False

    def take_lines(self, step: int, *, last: bool) -> list[dict[str, Any]]:
        """Looks at what is on, and gives what is to be written now; nothing more after an error."""
        if self._is_over:
            return []
        try:
            return list(self._due_lines(step, last=last))
        except Exception as error:
            self._is_over = True
            reason = mask_text(f"{type(error).__name__}: {error}")
            return [{"type": "settings_failed", "time_ns": _now(), "reason": reason}]

    def _due_lines(self, step: int, *, last: bool) -> Iterator[dict[str, Any]]:
        if not self._is_noted and (last or step >= SETTLED_STEPS):
            self._is_noted = True
            yield self.line()
        if last or self._counts["look"] % SEEN_EVERY_LOOKS == SEEN_EVERY_LOOKS - 1:
            yield self.seen_line()
        if not last:
            self.look()

    def line(self) -> dict[str, Any]:
        """All of `run_format.setting_lines.SETTINGS_FIELDS`; what fails is named in `problems`."""
        began, problems = _now(), []

        def read(name: str, function: Callable[[], Any]) -> Any:
            try:
                return function()
            except Exception as error:  # the job may change it meanwhile; another torch has none
                problems.append(mask_text(f"{name}: {type(error).__name__}: {error}")[:200])
                return None

        models = list(self.models())[:_OBJECT_LIMIT]
        optimizers = list(self.optimizers())[:_OBJECT_LIMIT]
        parts = {
            "flags": {name: read(name, flag) for name, flag in _FLAGS.items()},
            "gc": read("gc", _collector),
            "cores": read("cores", lambda: len(os.sched_getaffinity(os.getpid()))),
            "cpu_limit_cores": read("cpu_limit_cores", cpu_limit_cores),
            "memory_limit_bytes": read("memory_limit_bytes", memory_limit_bytes),
            "models": [read("model", partial(model_settings, each)) for each in models],
            "optimizers": [read("optimizer", partial(optimizer_settings, o)) for o in optimizers],
        }
        parts["flags"]["profiler"] = self._profiles()
        head = {"type": SETTINGS, "time_ns": began, "cost_ns": _now() - began}
        return {**head, **parts, "problems": problems}

    def look(self) -> None:
        """Counts what is on now: some microseconds, of flags that all threads share."""
        counts = self._counts
        counts["look"] += 1
        # torch.compile has it on while it traces, without the check for NaN.
        is_on = _flag("is_anomaly_enabled")() is True
        counts["anomaly"] += is_on and _flag("is_anomaly_check_nan_enabled")() is not False
        counts["profiler"] += self._profiles()
        if has_process_group():  # else the job's objects are left alone
            counts["no_sync"] += any(_is_unsynchronised(model) for model in self.models())

    def seen_line(self) -> dict[str, Any]:
        """The counts so far; see `run_format.setting_lines.SEEN_FIELDS`."""
        file, line, function = self.pauses.asked_at()
        return {
            "type": SEEN, "time_ns": _now(),
            **{f"{name}_count": n for name, n in {**self._counts, **self.masks()}.items()},
            "hook_look_count": self.hooks.look_count, "hooks": self.hooks.entries(),
            "kept_graph_count": self.kept_graphs(), "collect_count": self.pauses.asked_count,
            "collect_ns": sum(self.pauses.asked_ns.copy().values()), "collect_file": file,
            "collect_line": line, "collect_function": function,
        }  # fmt: skip

    def _profiles(self) -> bool:
        """torch.profiler and torch.autograd.profiler say so in the same place."""
        is_on = _value("torch.autograd.profiler", "_is_profiler_enabled")
        return is_on is True and not self.own_profiler()


def _is_unsynchronised(model: Any) -> bool:
    """Whether a DistributedDataParallel, also within what torch.compile returns, is in no_sync."""
    inner = (vars(model).get("_modules") or {}).get("_orig_mod", model)
    return vars(inner).get("require_backward_grad_sync") is False


def _value(module: str, name: str) -> Any:
    """What a module has under a name; None where the job has not loaded the module."""
    return getattr(sys.modules.get(module), name, None)


def _flag(name: str) -> Callable[[], Any]:
    """A function of torch, or of a module in it that the job has loaded."""
    module, _, function = f"torch.{name}".rpartition(".")

    def read() -> Any:
        found = _value(module, function)
        return found() if found is not None else None

    return read


def _tf32_matmul() -> str | None:
    """Asked where no warning comes from: `allow_tf32` complains of jobs that use the newer name."""
    getter = _value("torch._C", "_get_fp32_precision_getter")
    if getter is None:
        return {True: "tf32", False: "ieee"}.get(_flag("_C._get_cublas_allow_tf32")())
    return str(getter("cuda", "matmul"))


def _precision() -> str | None:
    try:
        return str(_flag("_C._get_float32_matmul_precision")())
    except RuntimeError:  # set by backend: `tf32_matmul` tells
        return None


def _capability() -> str | None:
    """Only where the job has started CUDA itself."""
    module: Any = sys.modules.get("torch.cuda")
    if module is None or not module.is_initialized():
        return None
    return ".".join(map(str, module.get_device_capability()))


def _cpu_half() -> str | None:
    """Only the first CPU's lines are read: a machine may have hundreds."""
    with open("/proc/cpuinfo", "rb", buffering=0) as file:
        text = file.read(_CPU_BYTES).decode("ascii", "replace").partition("\n\n")[0]
    line = next((x for x in text.splitlines() if x.startswith(("flags", "Features"))), None)
    if line is None:
        return None
    flags = set(line.split())
    return " ".join(dtype for dtype, names in _HALF_FLAGS.items() if flags & names) or "neither"


def _collector() -> Mapping[str, Any]:
    counts = {"thresholds": list(gc.get_threshold()), "frozen_count": gc.get_freeze_count()}
    return {"enabled": gc.isenabled(), **counts}


_CPU_BYTES = 8192
_HALF_FLAGS = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Flags of /proc/cpuinfo (x86, then ARM) by the format that they have arithmetic for."""
_FLAGS: Mapping[str, Callable[[], Any]] = {
    "anomaly": _flag("is_anomaly_enabled"),
    "deterministic": _flag("are_deterministic_algorithms_enabled"),
    "deterministic_fill": lambda: _value("torch.utils.deterministic", "fill_uninitialized_memory"),
    "cudnn_enabled": _flag("_C._get_cudnn_enabled"),
    "cudnn_benchmark": _flag("_C._get_cudnn_benchmark"),
    "cudnn_deterministic": _flag("_C._get_cudnn_deterministic"),
    "mkldnn": _flag("_C._get_mkldnn_enabled"),
    "matmul_precision": _precision,
    "tf32_matmul": _tf32_matmul,
    "compute_capability": _capability,
    "cpu_half": _cpu_half,
    "default_dtype": lambda: str(_flag("get_default_dtype")()).removeprefix("torch."),
    "interop_threads": _flag("get_num_interop_threads"),
    "tracemalloc": lambda: bool((_value("tracemalloc", "is_tracing") or bool)()),
    "developer_mode": lambda: sys.flags.dev_mode,
    "backend": lambda: str(_flag("distributed.get_backend")()) if has_process_group() else None,
    "distributed_debug": lambda: getattr(_flag("distributed.get_debug_level")(), "name", None)
    if has_process_group() else None,
}  # fmt: skip
"""Every switch but `profiler`, by its name in `run_format.setting_lines.FLAGS`."""


class CollectorPauses:
    """Puts a span per pause of the garbage collector, and counts what gc.collect() took."""

    def __init__(self, recorder: Recorder) -> None:
        self.asked_count = 0  # whole collections that the job asked for so far
        self.asked_ns: dict[tuple[CodeType, int], int] = {}  # their time, by the line that called
        self._recorder = recorder
        self._put = recorder.spans.put
        self._start = 0
        self._asks: tuple[CodeType, int] | None = None

    def on_collection(self, phase: str, info: dict[str, int]) -> None:
        """What gc.callbacks calls before and after each collection."""
        recorder = self._recorder
        if not recorder.armed or recorder.closed:
            return
        try:
            if phase == "start":
                asked = info["generation"] == _WHOLE and _is_asked()
                self._asks = _calling_line(sys._getframe(1)) if asked else None
                self._start = _now()
                return
            start, end, self._start = self._start, _now(), 0
            if not start:
                return
            if self._asks is not None:
                self.asked_count += 1
                self.asked_ns[self._asks] = self.asked_ns.get(self._asks, 0) + end - start
                self._asks = None
            if end - start > PAUSE_MIN_NS:
                self._put(start, end, GC | info["generation"] << TAG_BITS)
        except Exception as error:
            recorder.fault("gc", error)

    def asked_at(self) -> tuple[str, int, str] | tuple[None, None, None]:
        """File, line and function that asked for most of it; None each where none did."""
        found = self.asked_ns.copy()
        if not found:
            return None, None, None
        code, line = max(found, key=lambda at: found[at])
        return code.co_filename, line, getattr(code, "co_qualname", code.co_name)


def _calling_line(frame: FrameType) -> tuple[CodeType, int]:
    """The innermost line of the job's own code; the outermost one where there is none."""
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def _is_asked() -> bool:
    """Whether the collector would not have begun by itself."""
    # It begins when more objects were made than the first threshold; CPython 3.12 does so at the
    # next safe place, when some may be gone again (`_PyObject_GC_Del`).
    threshold = gc.get_threshold()[0]
    return not gc.isenabled() or gc.get_count()[0] <= threshold - min(threshold // 8, _SLACK)


def cpu_limit_cores(*, proc: Path = _PROC, mount: Path = _MOUNT) -> float | None:
    """The tightest CPU quota of this control group and those above it; None without one."""
    return min(_limits(_cores, "cpu", proc=proc, mount=mount), default=None)


def memory_limit_bytes(*, proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """The tightest memory limit; None without one."""
    found = min(_limits(_bytes, "memory", proc=proc, mount=mount), default=None)
    return None if found is None else int(found)


def _limits(
    read: Callable[[Path], float | None], controller: str, *, proc: Path, mount: Path
) -> Iterator[float]:
    """Limits of the control group and of all above it."""
    # Inside a container the path is the host's where the namespace is shared, and not below the
    # mount: then the mount itself is the container's.
    for line in proc.read_text(encoding="utf-8", errors="replace").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = mount
        elif controller in controllers.split(","):
            top = mount / controllers
            top = top if top.is_dir() else mount / controller
        else:
            continue
        own = PurePosixPath("/", path)
        for folder in (own, *own.parents):
            try:
                limit = read(top / folder.relative_to("/"))
            except (OSError, ValueError):
                continue  # the top of a tree has no such file
            if limit is not None:
                yield limit


def _cores(folder: Path) -> float | None:
    if (folder / "cpu.max").exists():
        return parse_cpu_limit((folder / "cpu.max").read_bytes().split())
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return parse_cpu_limit([(folder / name).read_bytes() for name in names])


def _bytes(folder: Path) -> float | None:
    name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
    return parse_memory_limit((folder / name).read_bytes().strip())
