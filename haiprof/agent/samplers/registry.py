"""Every sampler, each counter read once; a node's launchers, tools, permissions and versions."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from haiprof.agent.samplers import network
from haiprof.agent.samplers.filesystem import FilesystemSampler
from haiprof.agent.samplers.gpu import DcgmSampler, GpuHealthSampler, GpuSampler, profiling_setting
from haiprof.agent.samplers.host import CgroupSampler, HostSampler, NumaSampler
from haiprof.agent.samplers.memory_traffic import MemoryBandwidthSampler, RemoteMemorySampler
from haiprof.agent.samplers.nvml import LIBRARY, NO_LIBRARY, NO_LIBRARY_REMEDY
from haiprof.agent.samplers.ranks import PlacementSampler, ProcessSampler
from haiprof.agent.samplers.table import ALL_METRICS, CounterState, Missing, Node, TableSampler
from haiprof.base.version import read_data
from haiprof.linux.process_files import status_fields
from haiprof.linux.procfs import read_int, read_text
from haiprof.linux.readings import Status, Unavailable, os_status
from haiprof.run_format.schema import Column

SAMPLERS = (
    HostSampler, CgroupSampler, ProcessSampler, PlacementSampler, GpuSampler, GpuHealthSampler,
    DcgmSampler, network.InfinibandSampler, network.InfinibandHealthSampler,
    network.EthernetSampler, FilesystemSampler, NumaSampler, MemoryBandwidthSampler,
    RemoteMemorySampler,
)  # fmt: skip

_NOTHING = "nothing of this source is here"


def survey(node: Node, kinds: Iterable[type[TableSampler]] = SAMPLERS) -> list[CounterState]:
    """Opens every sampler, reads each of its sources once, and closes it."""
    return [state for kind in kinds for state in _of_kind(kind, node)]


def counter_row(state: CounterState) -> dict[str, Any]:
    """One counter as `haiprof doctor --json` prints it; `name` is `<sampler>.<metric>`."""
    return {
        "name": f"{state.source}.{state.metric}", "entity": state.entity, "status": state.status,
        "value": state.value, "unit": state.unit, "source": state.origin, "read_ns": state.read_ns,
        "reason": state.reason, "remedy": state.remedy,
    }  # fmt: skip


def _of_kind(kind: type[TableSampler], node: Node) -> list[CounterState]:
    missing: list[Missing] = []
    states: list[CounterState] = []
    try:
        sampler = kind(node)
        try:
            missing = sampler.open()
            if all(each.metric != ALL_METRICS for each in missing):
                states = sampler.states()
                missing = [*missing, *sampler.missing.drain()]
        finally:
            sampler.close()
    except Exception as error:  # noqa: BLE001  one sampler must not stop the others
        why = f"the sampler failed, please report it: {type(error).__name__}: {error}"
        missing, states = [Missing(ALL_METRICS, why, "unsupported")], []
    columns = {column.name: column for column in kind.table.metrics}
    whole = [each for each in missing if each.metric == ALL_METRICS]
    if whole and not states:
        return _none_of(kind.table.name, columns.values(), whole[0])
    return [*states, *_unread(kind.table.name, columns, states=states, missing=missing)]


def _unread(
    name: str, columns: Mapping[str, Column], *, states: Sequence[CounterState],
    missing: Sequence[Missing],
) -> Iterator[CounterState]:  # fmt: skip
    """Columns and entities without a state, with the reasons that the sampler gave."""
    entities = {state.entity for state in states}
    for each in missing:
        if each.metric not in columns and each.metric not in entities:
            entities.add(each.metric)
            yield from _none_of(name, columns.values(), each, entity=each.metric)
    spoken = {state.metric for state in states}
    if not states and entities:
        return
    reasons = {each.metric: each for each in reversed(missing)}
    general = next(iter(missing), Missing(ALL_METRICS, _NOTHING)) if not states else None
    for column in columns.values():
        if column.name not in spoken:
            why = reasons.get(column.name) or general or Missing(column.name, "not read here")
            yield from _none_of(name, [column], why)


def _none_of(
    name: str, columns: Iterable[Column], why: Missing, *, entity: str = ""
) -> list[CounterState]:
    """Rows without a value; where nothing was read, the column's meaning names the source."""
    status: Status = "absent" if why.status == "available" else why.status
    refusal = Unavailable(why.reason, status=status, remedy=why.remedy)
    return [CounterState.of(name, entity, c, refusal, origin=c.meaning) for c in columns]


Kind = Literal["launcher", "tool"]

_PROGRAMS = read_data("agent/samplers/programs.json")

# Bits of /proc/PID/status CapEff; source: include/uapi/linux/capability.h.
_CAPABILITIES = {"SYS_PTRACE": 19, "SYS_ADMIN": 21, "PERFMON": 38}
_WHOLE_UID_MAP = ["0", "0", "4294967295"]  # of the first user namespace
_DRIVER_VERSION = re.compile(r"Kernel Module.*?\s(\d+\.[\d.]+)")
_MASK = re.compile(r"[0-9a-f]{1,16}")  # of capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program that starts jobs or looks at them."""

    name: str
    kind: Kind
    status: Status  # `available` or `absent`
    path: str | None
    purpose: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """Something that this user may or may not do here."""

    name: str
    status: Status = "available"
    value: int | None = None  # what the source says; None where it is not there or holds no number
    source: str  # file or call
    allows: str  # what needs it
    reason: str = ""  # why not, or what else may stand in the way
    remedy: str = ""  # what an administrator would have to set


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What runs here; None where it is not installed or does not say."""

    host: str
    kernel: str
    cgroup: str | None  # `v1`, `v2` or `v1 + v2`
    python: str
    executable: str
    torch: str | None  # of this interpreter; the job's may be another
    nvidia_driver: str | None
    nvidia_ml_py: str | None


def find_tools(
    path: str | None = None, *, scripts: Path | None = None,
    known: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Tool, ...]:  # fmt: skip
    """Looks up every launcher and tool; starts none."""
    folder = scripts or Path(sys.executable).parent
    folders = os.pathsep.join([os.environ.get("PATH", "") if path is None else path, str(folder)])
    found = []
    for each in _PROGRAMS:
        place = known.get(each["name"]) or shutil.which(each["name"], path=folders)
        status: Status = "absent" if place is None else "available"
        found.append(Tool(**each, status=status, path=place))
    return tuple(found)


def software(root: Path = Path("/")) -> Software:
    """Versions, without importing what they are of."""
    driver = _DRIVER_VERSION.search(read_text(root / "proc/driver/nvidia/version") or "")
    lines = (read_text(root / "proc/self/cgroup") or "").splitlines()
    versions = {"v2" if line.startswith("0:") else "v1" for line in lines}
    return Software(
        host=socket.gethostname(), kernel=f"{platform.system()} {platform.release()}",
        cgroup=" + ".join(sorted(versions)) or None, python=platform.python_version(),
        executable=sys.executable, torch=_version("torch"),
        nvidia_driver=driver.group(1) if driver else None, nvidia_ml_py=_version("nvidia-ml-py"),
    )  # fmt: skip


def _version(package: str) -> str | None:
    from importlib import metadata  # slow, and the sampling thread has no use for it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def find_permissions(
    root: Path = Path("/"), load: Callable[[str], object] = ctypes.CDLL
) -> tuple[Permission, ...]:
    """The permissions of this process; tries nothing that would affect another process."""
    caps = _Capabilities(root)
    uncore = "memory bandwidth and cross-socket traffic (uncore counters)"
    return (
        _ptrace(root, caps), _capability(root, caps, "SYS_PTRACE"),
        _capability(root, caps, "PERFMON"),
        _perf(root, caps, limit=2, name="perf_own_processes", allows="CPU counters of the ranks"),
        _perf(root, caps, limit=0, name="perf_whole_node", allows=uncore),
        _nvml(load), _gpm(root, caps), _psi(root),
    )  # fmt: skip


class _Capabilities:
    """Of this process; those for perf and the driver count in the first user namespace alone."""

    def __init__(self, root: Path) -> None:
        fields = status_fields(f"{root}/proc/self")
        effective = fields.get("CapEff", "")
        self.known = _MASK.fullmatch(effective) is not None
        self._mask = int(effective, 16) if self.known else 0
        self.filtered = fields.get("Seccomp") == "2"
        uid_map = read_text(root / "proc/self/uid_map")
        self.first_namespace = uid_map is None or uid_map.split() == _WHOLE_UID_MAP

    def has(self, name: str) -> bool:
        return bool(self._mask >> _CAPABILITIES[name] & 1)

    def counts(self, *names: str) -> bool:
        """Whether one of them is effective in the first user namespace."""
        return self.first_namespace and any(self.has(name) for name in names)


def _capability(root: Path, caps: _Capabilities, name: str) -> Permission:
    allows = {
        "SYS_PTRACE": "looking into processes of other users",
        "PERFMON": "perf counters whatever perf_event_paranoid says",
    }[name]
    has = caps.has(name) if name == "SYS_PTRACE" else caps.counts(name)
    found = Permission(
        name=f"cap_{name.lower()}", source=f"{root / 'proc/self/status'} CapEff", allows=allows,
        value=int(has) if caps.known else None,
    )  # fmt: skip
    return found if has else replace(
        found, status="denied" if caps.known else "absent",
        reason="held in this user namespace only" if caps.has(name) else "not held",
        remedy=f"docker run --cap-add {name}, or run as root",
    )  # fmt: skip


def _ptrace(root: Path, caps: _Capabilities) -> Permission:
    """Source: Linux Documentation/admin-guide/LSM/Yama.rst."""
    path = root / "proc/sys/kernel/yama/ptrace_scope"
    scope = read_int(path)
    found = Permission(
        name="ptrace", source=str(path), allows="stacks of a running rank (py-spy)", value=scope
    )
    if scope is None:
        return replace(found, reason="the kernel has no Yama: same user suffices")
    reasons = {1: "only descendants may be attached to",
               2: "only processes with CAP_SYS_PTRACE may attach",
               3: "no process may attach until the next boot"}  # fmt: skip
    is_free = scope == 0 or (scope < 3 and caps.has("SYS_PTRACE"))
    return found if is_free else replace(
        found, status="denied", reason=reasons.get(scope, f"unknown scope {scope}"),
        remedy="sysctl -w kernel.yama.ptrace_scope=0, or grant CAP_SYS_PTRACE",
    )  # fmt: skip


def _perf(root: Path, caps: _Capabilities, *, limit: int, name: str, allows: str) -> Permission:
    """Source: Linux Documentation/admin-guide/sysctl/kernel.rst, perf_event_paranoid."""
    path = root / "proc/sys/kernel/perf_event_paranoid"
    level = read_int(path)
    found = Permission(name=name, source=str(path), allows=allows, value=level)
    if level is None:
        return replace(
            found, status="unsupported", reason="the kernel has no perf events",
            remedy="boot a kernel with CONFIG_PERF_EVENTS",
        )  # fmt: skip
    if level > limit and not caps.counts("PERFMON", "SYS_ADMIN"):
        return replace(
            found, status="denied", reason=f"perf_event_paranoid is {level}, above {limit}",
            remedy=f"sysctl -w kernel.perf_event_paranoid={limit}, or grant CAP_PERFMON",
        )  # fmt: skip
    note = "a seccomp filter is in force and may deny it all the same" if caps.filtered else ""
    return replace(found, reason=note)


def _nvml(load: Callable[[str], object]) -> Permission:
    found = Permission(name="nvml", source=LIBRARY, allows="GPU counters")
    try:
        load(LIBRARY)
    except OSError:
        return replace(found, status="absent", reason=NO_LIBRARY, remedy=NO_LIBRARY_REMEDY)
    return found


def _gpm(root: Path, caps: _Capabilities) -> Permission:
    """Source: NVIDIA, ERR_NVGPUCTRPERM: permission issue with performance counters."""
    path = root / "proc/driver/nvidia/params"
    allows = "SM, tensor and DRAM activity of GPUs (GPM), nsys GPU metrics"
    found = Permission(name="gpu_profiling", source=str(path), allows=allows)
    setting = profiling_setting(root).partition(":")[2].strip()
    if not setting.isdecimal():
        reason = "no RmProfilingAdminOnly: no NVIDIA driver here"
        return replace(found, status="absent", reason=reason)
    found = replace(found, source=f"{path} RmProfilingAdminOnly", value=int(setting))
    return found if setting == "0" or caps.counts("SYS_ADMIN") else replace(
        found, status="denied", reason="the driver keeps performance counters to administrators",
        remedy="set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module and reload it",
    )  # fmt: skip


def _psi(root: Path) -> Permission:
    path = root / "proc/pressure/cpu"
    allows = "pressure: time in which tasks waited for CPU, memory, I/O"
    found = Permission(name="psi", source=str(path.parent), allows=allows)
    try:
        with open(path, "rb", buffering=0) as file:
            file.read(1)  # with psi=0 the file opens and its read fails
    except OSError as error:
        return replace(
            found, status="unsupported" if os_status(error) == "absent" else os_status(error),
            reason=f"{error.strerror}: the kernel has no pressure stall information, or it is off",
            remedy="boot a kernel with CONFIG_PSI, with psi=1",
        )  # fmt: skip
    return found
