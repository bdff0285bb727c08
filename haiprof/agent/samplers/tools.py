"""A node's profiling environment: launchers, tools, permissions, versions."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from haiprof.agent.samplers.nvml import LIBRARY, NO_LIBRARY, NO_LIBRARY_REMEDY
from haiprof.linux.process_files import status_fields
from haiprof.linux.procfs import read_int, read_text
from haiprof.linux.readings import Status, Unavailable, os_status

Kind = Literal["launcher", "tool"]

_PROGRAMS: tuple[tuple[Kind, str, str], ...] = (
    ("launcher", "torchrun", "PyTorch's own launcher"),
    ("launcher", "accelerate", "Hugging Face Accelerate"),
    ("launcher", "deepspeed", "DeepSpeed"),
    ("launcher", "fabric", "Lightning Fabric"),
    ("launcher", "composer", "MosaicML Composer"),
    ("launcher", "colossalai", "Colossal-AI"),
    ("launcher", "horovodrun", "Horovod"),
    ("launcher", "srun", "Slurm"),
    ("launcher", "mpirun", "MPI"),
    ("launcher", "mpiexec", "MPI"),
    ("tool", "nsys", "Nsight Systems: GPU metrics down to 100 µs"),
    ("tool", "ncu", "Nsight Compute: one kernel in depth"),
    ("tool", "nvidia-smi", "NVIDIA driver state"),
    ("tool", "dcgmi", "DCGM: GPU metrics where NVML GPM has none"),
    ("tool", "py-spy", "Python stacks of a running rank"),
    ("tool", "perf", "CPU profiles"),
    ("tool", "numactl", "binds ranks to NUMA nodes"),
    ("tool", "perfquery", "InfiniBand counters, also of switches"),
    ("tool", "lctl", "Lustre client counters"),
)

# Bits of /proc/PID/status CapEff; source: include/uapi/linux/capability.h.
_CAPABILITIES = {"SYS_PTRACE": 19, "SYS_ADMIN": 21, "PERFMON": 38}
_WHOLE_UID_MAP = ["0", "0", "4294967295"]  # of the first user namespace
_DRIVER_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.[\d.]+)")
_MASK = re.compile(r"[0-9a-f]{1,16}")  # of capabilities
_ADMIN_ONLY = re.compile(r"^RmProfilingAdminOnly:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program that starts jobs or looks at them."""

    name: str
    kind: Kind
    status: Status
    """`available` or `absent`."""
    path: str | None
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """Something that this user may or may not do here."""

    name: str
    status: Status
    value: int | None
    """What the source says; None where it is not there or holds no number."""
    source: str
    """File or call."""
    allows: str
    """What needs it."""
    reason: str = ""
    """Why not, or what else may stand in the way."""
    remedy: str = ""
    """What an administrator would have to set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What runs here; None where it is not installed or does not say."""

    host: str
    kernel: str
    cgroup: str | None
    """`v1`, `v2` or `v1 + v2`."""
    python: str
    executable: str
    torch: str | None
    """Of this interpreter; the job's may be another."""
    nvidia_driver: str | None
    nvidia_ml_py: str | None


def find_tools(
    path: str | None = None,
    *,
    scripts: Path | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Tool, ...]:
    """Looks up every launcher and tool; starts none."""
    folder = scripts or Path(sys.executable).parent
    folders = os.pathsep.join([os.environ.get("PATH", "") if path is None else path, str(folder)])
    found = []
    for kind, name, purpose in _PROGRAMS:
        place = known.get(name) or shutil.which(name, path=folders)
        status: Status = "absent" if place is None else "available"
        found.append(Tool(name=name, kind=kind, status=status, path=place, purpose=purpose))
    return tuple(found)


def software(root: Path = Path("/")) -> Software:
    """Versions, without importing what they are of."""
    driver = _DRIVER_VERSION.search(read_text(root / "proc/driver/nvidia/version") or "")
    lines = (read_text(root / "proc/self/cgroup") or "").splitlines()
    versions = {"v2" if line.startswith("0:") else "v1" for line in lines}
    return Software(
        host=socket.gethostname(),
        kernel=f"{platform.system()} {platform.release()}",
        cgroup=" + ".join(sorted(versions)) or None,
        python=platform.python_version(),
        executable=sys.executable,
        torch=_version("torch"),
        nvidia_driver=driver.group(1) if driver else None,
        nvidia_ml_py=_version("nvidia-ml-py"),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_permissions(
    root: Path = Path("/"), load: Callable[[str], object] = ctypes.CDLL
) -> tuple[Permission, ...]:
    """The permissions of this process; tries nothing that would affect another process."""
    caps, uncore = (
        _Capabilities(root),
        "memory bandwidth and cross-socket traffic (uncore counters)",
    )
    return (
        _ptrace(root, caps),
        *(_capability(root, caps, name) for name in ("SYS_PTRACE", "PERFMON")),
        _perf(root, caps, limit=2, name="perf_own_processes", allows="CPU counters of the ranks"),
        _perf(root, caps, limit=0, name="perf_whole_node", allows=uncore),
        _nvml(load),
        _gpm(root, caps),
        _psi(root),
    )


class _Capabilities:
    """The capabilities of this process.

    Those for perf and the driver count in the first user namespace alone: root in a container
    with its own has them by name only.
    """

    def __init__(self, root: Path) -> None:
        fields = status_fields(f"{root}/proc/self")
        effective = fields.get("CapEff", "")
        self.known = _MASK.fullmatch(effective) is not None
        self._mask = int(effective, 16) if self.known else 0
        self.filtered = fields.get("Seccomp") == "2"
        uid_map = read_text(root / "proc/self/uid_map")
        self.first_namespace = uid_map is None or uid_map.split() == _WHOLE_UID_MAP

    def has(self, name: str) -> bool:
        """By name."""
        return bool(self._mask >> _CAPABILITIES[name] & 1)

    def counts(self, *names: str) -> bool:
        """Whether one of them is effective in the first user namespace."""
        return self.first_namespace and any(self.has(name) for name in names)


def _permission(
    name: str,
    source: str,
    allows: str,
    why: Unavailable | None,
    *,
    value: int | None = None,
    note: str = "",
) -> Permission:
    """A permission that is there unless a reason is given; `note` says what else may deny it."""
    return Permission(
        name=name,
        status="available" if why is None else why.status,
        value=value,
        source=source,
        allows=allows,
        reason=note if why is None else why.reason,
        remedy="" if why is None else why.remedy,
    )


def _capability(root: Path, caps: _Capabilities, name: str) -> Permission:
    has = caps.has(name) if name == "SYS_PTRACE" else caps.counts(name)
    why = Unavailable(
        "held in this user namespace only" if caps.has(name) else "not held",
        status="denied" if caps.known else "absent",
        remedy=f"docker run --cap-add {name}, or run as root",
    )
    allows = {
        "SYS_PTRACE": "looking into processes of other users",
        "PERFMON": "perf counters whatever perf_event_paranoid says",
    }[name]
    source, value = f"{root / 'proc/self/status'} CapEff", int(has) if caps.known else None
    return _permission(f"cap_{name.lower()}", source, allows, None if has else why, value=value)


def _ptrace(root: Path, caps: _Capabilities) -> Permission:
    """Source: Linux Documentation/admin-guide/LSM/Yama.rst."""
    path = root / "proc/sys/kernel/yama/ptrace_scope"
    scope = read_int(path)
    free = scope is None or scope == 0 or (scope < 3 and caps.has("SYS_PTRACE"))
    reasons = {
        1: "only descendants may be attached to",
        2: "only processes with CAP_SYS_PTRACE may attach",
        3: "no process may attach until the next boot",
    }
    why = Unavailable(
        reasons.get(scope or 0, f"unknown scope {scope}"),
        status="denied",
        remedy="sysctl -w kernel.yama.ptrace_scope=0, or grant CAP_SYS_PTRACE",
    )
    return _permission(
        "ptrace", str(path), "stacks of a running rank (py-spy)", None if free else why,
        value=scope, note="the kernel has no Yama: same user suffices" if scope is None else "",
    )  # fmt: skip


def _perf(root: Path, caps: _Capabilities, *, limit: int, name: str, allows: str) -> Permission:
    """Source: Linux Documentation/admin-guide/sysctl/kernel.rst, perf_event_paranoid."""
    path = root / "proc/sys/kernel/perf_event_paranoid"
    level = read_int(path)
    why: Unavailable | None = None
    if level is None:
        remedy = "boot a kernel with CONFIG_PERF_EVENTS"
        why = Unavailable("the kernel has no perf events", status="unsupported", remedy=remedy)
    elif level > limit and not caps.counts("PERFMON", "SYS_ADMIN"):
        reason = f"perf_event_paranoid is {level}, above {limit}"
        remedy = f"sysctl -w kernel.perf_event_paranoid={limit}, or grant CAP_PERFMON"
        why = Unavailable(reason, status="denied", remedy=remedy)
    filtered = "a seccomp filter is in force and may deny it all the same" if caps.filtered else ""
    return _permission(name, str(path), allows, why, value=level, note=filtered)


def _nvml(load: Callable[[str], object]) -> Permission:
    why = None
    try:
        load(LIBRARY)
    except OSError:
        why = Unavailable(NO_LIBRARY, remedy=NO_LIBRARY_REMEDY)
    return _permission("nvml", LIBRARY, "GPU counters", why)


def _gpm(root: Path, caps: _Capabilities) -> Permission:
    """Source: NVIDIA, ERR_NVGPUCTRPERM: permission issue with performance counters."""
    path = root / "proc/driver/nvidia/params"
    name, allows = "gpu_profiling", "SM, tensor and DRAM activity of GPUs (GPM), nsys GPU metrics"
    found = _ADMIN_ONLY.search(read_text(path) or "")
    if found is None:
        nothing = Unavailable("no RmProfilingAdminOnly: no NVIDIA driver here")
        return _permission(name, str(path), allows, nothing)
    why = Unavailable(
        "the driver keeps performance counters to administrators",
        status="denied",
        remedy="set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module and reload it",
    )
    free = found.group(1) == "0" or caps.counts("SYS_ADMIN")
    source, value = f"{path} RmProfilingAdminOnly", int(found.group(1))
    return _permission(name, source, allows, None if free else why, value=value)


def _psi(root: Path) -> Permission:
    path = root / "proc/pressure/cpu"
    why = None
    try:
        with open(path, "rb", buffering=0) as file:
            file.read(1)  # with psi=0 the file opens and its read fails
    except OSError as error:
        why = Unavailable(
            f"{error.strerror}: the kernel has no pressure stall information, or it is off",
            status="unsupported" if os_status(error) == "absent" else os_status(error),
            remedy="boot a kernel with CONFIG_PSI, with psi=1",
        )
    allows = "pressure: time in which tasks waited for CPU, memory, I/O"
    return _permission("psi", str(path.parent), allows, why)
