"""Which CPU this is, and which of its CPUs share a socket and a last-level cache."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from haiprof.linux.sysfs import list_names

_CPU = re.compile(r"cpu\d+\Z")
_NODE = re.compile(r"node\d+\Z")
_CORE_PMU = re.compile(r"cpu(_core|_atom)?\Z|armv[89]_.*|apple_.*")
_CPU_BYTES = 16 * 1024  # one CPU takes 3 KiB
_CPU_LIMIT = 1 << 16  # Linux is built for 8,192 at most
PMU_FOLDER = "sys/bus/event_source/devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A CPU model as /proc/cpuinfo names it."""

    vendor: str
    """`GenuineIntel`, `AuthenticAMD`, or the implementer's code on ARM (`0x41`)."""
    family: int
    model: int
    """On ARM the part number (0xd4f is Neoverse V2, in Grace)."""
    virtual: bool
    """The hypervisor flag is set."""

    def __str__(self) -> str:
        return f"CPU {self.vendor} family {self.family} model {self.model}"


def read_cpu(root: Path) -> Cpu:
    """The first CPU of /proc/cpuinfo; zeros and empty text for what it does not state.

    Only its first entry is read: with hundreds of CPUs the file has hundreds of KiB, and the kernel
    may ask each CPU for its frequency.
    """
    try:
        with open(root / "proc/cpuinfo", "rb", buffering=0) as file:
            text = file.read(_CPU_BYTES).decode("ascii", errors="replace")
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return Cpu(
        vendor=fields.get("vendor_id") or fields.get("CPU implementer", ""),
        family=_number(fields.get("cpu family", "")),
        model=_number(fields.get("model") or fields.get("CPU part", "")),
        virtual="hypervisor" in fields.get("flags", "").split(),
    )


def no_core_pmu(root: Path, cpu: Cpu) -> str:
    """Why there are no hardware counters at all; empty text where there are some."""
    if any(_CORE_PMU.match(name) for name in list_names(root / PMU_FOLDER)):
        return ""
    machine = "this virtual machine" if cpu.virtual else "this machine (a virtual one?)"
    return f"{machine} has no hardware PMU: no core PMU in {root / PMU_FOLDER}"


def parse_cpu_list(text: str) -> list[int]:
    """CPUs of a list as the kernel prints it: `0-3,8`."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), min(int(last or first) + 1, int(first) + _CPU_LIMIT)))
        if len(cpus) >= _CPU_LIMIT:
            raise ValueError("no list of CPUs")
    return cpus


def socket_of_cpu(root: Path) -> dict[int, int]:
    """The socket (physical package) of each CPU that is online."""
    return dict(_cpu_numbers(root, "topology/physical_package_id"))


def socket_of_cache(root: Path, sockets: Mapping[int, int]) -> dict[int, int]:
    """The socket of each last-level cache, by the id that resctrl uses."""
    return {cache: sockets[cpu] for cpu, cache in _cpu_numbers(root, "cache/index3/id")
            if cpu in sockets}  # fmt: skip


def node_count(root: Path) -> int:
    """NUMA nodes of the machine."""
    return sum(
        bool(re.match(r"node\d+\Z", name)) for name in list_names(root / "sys/devices/system/node")
    )


def _cpu_numbers(root: Path, file: str) -> Iterator[tuple[int, int]]:
    folder = root / "sys/devices/system/cpu"
    for name in sorted(list_names(folder)):
        if _CPU.match(name):
            try:
                yield int(name[3:]), int((folder / name / file).read_text())
            except (OSError, ValueError):
                continue  # offline, or the firmware does not say


def _number(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        return 0
