"""NVML for the samplers: loaded late, its errors as reasons, and field ids by driver version."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from haiprof.agent.samplers.table import MissingLog, Node, TableSampler
from haiprof.linux.readings import (
    Entity,
    EntityGone,
    Reading,
    Status,
    Unavailable,
    Value,
    refused_reading,
)
from haiprof.linux.topology import pci_device
from haiprof.run_format.tables import GPU, GPU_HEALTH

LIBRARY = "libnvidia-ml.so.1"
NO_LIBRARY = f"no {LIBRARY}: no NVIDIA driver here, or not in this container"
NO_LIBRARY_REMEDY = "in a container: NVIDIA_DRIVER_CAPABILITIES=utility,compute"
_OLD_BINDING_REMEDY = "pip install --upgrade nvidia-ml-py"

# nvmlReturn_t, nvml.h
NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 3, 4, 10, 12, 13
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, DEPRECATED = 15, 16, 25, 26
_CODES: Mapping[int, tuple[Status, str, str]] = {
    2: ("unsupported", "Invalid Argument", ""),
    NOT_SUPPORTED: ("unsupported", "Not Supported", ""),
    NO_PERMISSION: ("denied", "Insufficient Permissions",
                    "the right to /dev/nvidia*, in a container with all of this GPU"),
    6: ("absent", "Not Found", ""),
    TIMEOUT: ("absent", "Timeout", ""),
    LIBRARY_NOT_FOUND: ("absent", "", NO_LIBRARY_REMEDY),
    FUNCTION_NOT_FOUND: ("unsupported", "", "a newer NVIDIA driver"),
    GPU_IS_LOST: ("absent", "GPU is lost", ""),
    RESET_REQUIRED: ("absent", "GPU requires restart", ""),
    17: ("absent", "", "the right to /dev/nvidia* (file modes, cgroup device rules)"),  # of the OS
    18: ("absent", "", "a reboot: library and kernel module are of different versions"),
    VERSION_MISMATCH: ("unsupported", "", ""),  # of an argument
    DEPRECATED: ("unsupported", "deprecated, no longer answered", ""),
}  # fmt: skip
"""By code: what it says of a call, NVML's words for it, and what helps."""
# These last as long as the driver runs; an invalid argument may be temporary (two GPM samples too
# close to each other).
_LASTING = (NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, VERSION_MISMATCH,
            DEPRECATED)  # fmt: skip

# NVML holds the driver's global lock, which the job's own allocations wait for (MangoHud pull
# request 2104): longer samples are taken less often. It is the whole sample that is timed.
_LIMIT_NS = 5_000_000
_LIMIT_PER_GPU_NS = 2_000_000

Version = tuple[int, ...]


class Nvml:
    """NVML while it is in use: one nvmlInit, and one nvmlShutdown at the end."""

    def __init__(self, module: ModuleType | None = None) -> None:
        self.module: Any = module  # for another handle of the same library, opened on its own
        self._started = False
        self.version = ""  # the running driver's version; empty where unknown

    def open(self) -> None:
        """Loads the library and starts it."""
        if self.module is None:
            try:
                ctypes.CDLL(LIBRARY)  # as pynvml will, but before the 10 ms that its import takes
            except OSError:
                raise Unavailable(NO_LIBRARY, remedy=NO_LIBRARY_REMEDY) from None
            try:
                import pynvml
            except ImportError as error:
                reason = f"nvidia-ml-py cannot be imported: {error}"
                raise Unavailable(reason, remedy=_OLD_BINDING_REMEDY) from None
            module: ModuleType = pynvml
            self.module = module
        self.call("nvmlInit")
        self._started = True
        with contextlib.suppress(Unavailable):  # what depends on it is then not read
            self.version = text(self.call("nvmlSystemGetDriverVersion"))

    @property
    def driver(self) -> Version:
        """The version as numbers that compare; empty where it is unknown."""
        parts = self.version.split(".")
        return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()

    def close(self) -> None:
        """Releases the driver; may be called again."""
        if not self._started:
            return
        self._started = False
        with contextlib.suppress(Unavailable):  # a driver that cannot be released
            self.call("nvmlShutdown")

    def call(self, function: str, *arguments: object) -> Any:  # noqa: ANN401  as NVML gives it
        """What a function of the binding returns."""
        if (found := getattr(self.module, function, None)) is None:
            raise Unavailable(
                f"nvidia-ml-py has no {function}", status="unsupported", lasting=True,
                remedy=_OLD_BINDING_REMEDY,
            )  # fmt: skip
        try:
            return found(*arguments)
        except self.module.NVMLError as error:
            raise refusal(error.value, function, str(error)) from None


class Refusal(Unavailable):
    """An error of NVML; `code` is its nvmlReturn_t."""

    def __init__(self, code: int, reason: str) -> None:
        status, _, remedy = _CODES.get(code, ("absent", "", ""))
        super().__init__(reason, status=status, remedy=remedy, lasting=code in _LASTING)
        self.code = code


def refusal(code: int, what: str, words: str = "") -> Refusal:
    """An NVML return code as a reason."""
    if code == LIBRARY_NOT_FOUND:
        return Refusal(code, NO_LIBRARY)
    known = _CODES[code][1] if code in _CODES else ""
    return Refusal(code, f"{what}: {words or known or f'NVML error {code}'}")


@dataclass
class Device:
    """One GPU."""

    nvml: Nvml
    index: int
    handle: object
    missing: MissingLog
    is_lost: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"gpu {self.index}"

    def call(self, function: str, *arguments: object) -> Any:  # noqa: ANN401  as NVML gives it
        """A function that takes the device first."""
        if self.is_lost:
            raise EntityGone
        try:
            return self.nvml.call(function, self.handle, *arguments)
        except Refusal as why:
            self.check(why.code, why.reason)
            raise

    def check(self, code: int, reason: str) -> None:
        """Ends the use of a GPU whose return code says that it is lost."""
        if code in (GPU_IS_LOST, RESET_REQUIRED):
            self.is_lost = True
            self.missing.note(self.name, Unavailable(f"{reason}; no further values"))
            raise EntityGone

    def ask(self, function: str, *arguments: object) -> Any:  # noqa: ANN401  as NVML gives it
        """The same, None where there is no answer."""
        with contextlib.suppress(Unavailable):
            return self.call(function, *arguments)
        return None

    @property
    def has_mig(self) -> bool:
        """Whether it is cut into instances now."""
        return bool((self.ask("nvmlDeviceGetMigMode") or (0, 0))[0])

    def details(self, root: Path) -> dict[str, object]:
        """Its UUID, model, PCI bus id as in /sys, NUMA node; None where unknown."""
        info = self.ask("nvmlDeviceGetPciInfo")
        bus_id = None if info is None else sysfs_bus_id(text(info.busId))
        place = None if bus_id is None else pci_device(root, bus_id)
        return {
            "uuid": text(self.call("nvmlDeviceGetUUID")),
            "model": text(self.call("nvmlDeviceGetName")), "bus_id": bus_id,
            "numa_node": None if place is None else place.node, "mig": self.has_mig,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """One NVML function and the columns that it fills."""

    columns: str  # with blanks between them
    functions: str  # names, as they change: the first one that driver and binding have is used
    arguments: tuple[object, ...] = ()
    values: Callable[[Any], Sequence[Value]] = lambda answer: (answer,)  # of NVML's, in base units

    def reading(self, device: Device) -> Reading:
        """Of one GPU."""
        names = self.functions.split()
        function = next((name for name in names[:-1] if self._is_known(device, name)), names[-1])
        return Reading(
            columns=tuple(self.columns.split()), origin=function,
            read=lambda: self.values(device.call(function, *self.arguments)),
        )  # fmt: skip

    def _is_known(self, device: Device, function: str) -> bool:
        """Whether both driver and binding have it, whatever it answers."""
        try:
            device.call(function, *self.arguments)
        except Unavailable as why:
            return isinstance(why, Refusal) and why.code != FUNCTION_NOT_FOUND
        return True


class NvmlSampler(TableSampler):
    """One record per GPU that the driver shows; a subclass says what is read of each."""

    recorder = "gpu"
    read_limit_ns = _LIMIT_NS

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.nvml = Nvml(node.nvml)
        self.devices: list[Device] = []  # those that can be used; after `find`

    def readings(self, device: Device) -> Iterable[Reading]:
        """What is read of one GPU."""
        raise NotImplementedError

    def find(self) -> list[Entity]:
        """The GPUs; one that cannot be used is named with the reason."""
        self.nvml.open()
        count = self.nvml.call("nvmlDeviceGetCount")
        found = [entity for index in range(count) if (entity := self._entity(index))]
        if not found:
            raise Unavailable("NVML: the driver shows no usable GPU")
        self.read_limit_ns = max(_LIMIT_NS, _LIMIT_PER_GPU_NS * len(found))
        return found

    def header(self) -> dict[str, object]:
        """`entities` and the driver's version."""
        return {**super().header(), "driver": self.nvml.version or None}

    def release(self) -> None:
        """Releases the driver."""
        self.nvml.close()

    def _entity(self, index: int) -> Entity | None:
        """One GPU; None for one that cannot be used, with the reason noted."""
        try:
            handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
            device = Device(self.nvml, index, handle, self.missing)
            details = device.details(self.root)
            readings = tuple(self.readings(device))
        except Unavailable as why:
            self.missing.note(f"gpu {index}", why)
            return None
        except EntityGone:
            return None  # it has reported that itself
        self.devices.append(device)
        return Entity(key=(index,), name=device.name, readings=readings, details=details)


def sysfs_bus_id(bus_id: str) -> str:
    """NVML's `00000000:0F:00.0` as /sys has it: `0000:0f:00.0`."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def text(words: str | bytes) -> str:
    """NVML's words are bytes in older bindings."""
    return words.decode(errors="replace") if isinstance(words, bytes) else words


_READ = "nvmlDeviceGetFieldValues"
ALL_LINKS = 0xFFFFFFFF  # the scope of a sum over all NVLinks
_BLACKWELL = 10  # nvmlDeviceArchitecture_t of the first GPUs with NVLink 5

# nvmlValueType_t, nvml.h: the member of the union, and the value that stands for "none"
_MEMBERS = {
    0: ("dVal", None), 1: ("uiVal", (1 << 32) - 1), 2: ("ulVal", (1 << 64) - 1),
    3: ("ullVal", (1 << 64) - 1), 4: ("sllVal", None), 5: ("siVal", None), 6: ("usVal", None),
}  # fmt: skip
_WIDE_TYPES = (2, 3, 4)
_I64_END = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field and the column that it fills."""

    column: str
    id: int | None  # None where the id is not known for this driver
    scale: int | float = 1  # from NVML's unit to the base unit; a float makes the value one
    scope: int = 0
    wide: bool = False  # a count of traffic: 32 bits would wrap unnoticed between two samples
    above: int = 0  # only a value beyond this shows that the counter is wide enough


def gpu_fields(driver: Version) -> tuple[Field, ...]:
    """Power, energy, temperature and throttle times."""
    # The ids below 199 never changed. Those of the thermal slowdowns did: 251 to 253 in the headers
    # of 575.51 and 580.65 (what that driver's nvidia-smi asks for), 269 to 271 from 580.82 on,
    # where 251 is another quantity; so an unknown driver is not asked.
    heat: tuple[int | None, ...] = (None, None, None)
    if driver >= (580, 82):
        heat = (269, 270, 271)
    elif (575, 51) <= driver < (580, 66):
        heat = (251, 252, 253)
    throttles = GPU.names("throttle_power_ns", "throttle_power_brake_ns")
    ids = (74, 75, 76, 77, 79, *heat)
    return (
        Field(column="power_instant_watts", id=186, scale=1e-3),
        Field(column="energy_joules", id=83, scale=1e-3),
        Field(column="memory_temperature_celsius", id=82, scale=1.0),
        *(Field(column=name, id=number) for name, number in zip(throttles, ids, strict=True)),
    )


def nvlink_fields(device: Device) -> tuple[Field, Field]:
    """NVLink traffic, sent and received: bytes of NVLink 5, KiB before it."""
    ids: tuple[int | None, int | None] = (138, 139)
    scale = 1024
    if (device.ask("nvmlDeviceGetArchitecture") or 0) >= _BLACKWELL:
        ids, scale = ((202, 204) if device.nvml.driver >= (560,) else (None, None)), 1
    sent, received = (
        Field(column=column, id=number, scale=scale, scope=ALL_LINKS, wide=True)
        for column, number in zip(NVLINK, ids, strict=True)
    )
    return sent, received


NVLINK = ("nvlink_transmit_bytes", "nvlink_receive_bytes")

# "Value can be wrapped" (nvml.h) without a word on the width: 32 bits would be 0.1 s of PCIe 5.
PCIE_FIELDS = (
    Field(column="pcie_transmit_bytes", id=197, wide=True, above=1 << 32),
    Field(column="pcie_receive_bytes", id=198, wide=True, above=1 << 32),
)

_HEALTH_IDS = (3, 4, 5, 6, 142, 143, 144, 145, 29, 30, 31, 94, 173, 179, 180)
_HEALTH_NAMES = GPU_HEALTH.names("ecc_volatile_corrected_count", "pcie_fatal_count")
HEALTH_FIELDS = tuple(
    Field(column=name, id=number) for name, number in zip(_HEALTH_NAMES, _HEALTH_IDS, strict=True)
)


class FieldReader:
    """Reads fields of one GPU in one call, each with its own return code."""

    def __init__(self, device: Device, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self._device = device
        self._queries = [(field.id, field.scope) for field in fields]
        self._proven: set[Field] = set()

    def read(self) -> list[Value | Unavailable]:
        """One answer per field."""
        answers = self._device.call(_READ, self._queries)
        return [self._answer(*pair) for pair in zip(self.fields, answers, strict=True)]

    def _answer(self, field: Field, answer: Any) -> Value | Unavailable:  # noqa: ANN401  a C struct
        what = f"NVML field {field.id}"
        if answer.nvmlReturn:
            why = refusal(answer.nvmlReturn, what)
            self._device.check(answer.nvmlReturn, why.reason)
            return why
        member, none = _MEMBERS.get(answer.valueType, ("", None))
        value = getattr(answer.value, member, None)
        if value is None or value == none or value >= _I64_END:
            return Unavailable(f"{what}: no value in it", status="unsupported")
        if field.wide and answer.valueType not in _WIDE_TYPES:
            reason = f"{what}: 32 bits, which wrap unseen between two samples"
            return Unavailable(reason, status="unsupported", lasting=True)
        if field.above and value >= field.above:
            self._proven.add(field)
        if field.above and field not in self._proven:
            reason = f"{what}: below 2^32 so far, so it may have 32 bits and wrap unseen"
            return Unavailable(reason, status="unsupported")
        return (int(value) if isinstance(field.scale, int) else float(value)) * field.scale


def field_readings(device: Device, fields: Iterable[Field]) -> Iterator[Reading]:
    """A reading of the fields that the driver answers; refused ones are not read again."""
    known = []
    for field in fields:
        if field.id is None:
            version = device.nvml.version or "of unknown version"
            reason = f"driver {version}: the id of this field is not known for it"
            why = Unavailable(reason, status="unsupported", remedy="a newer NVIDIA driver")
            yield refused_reading([field.column], _READ, why)
        else:
            known.append(field)
    try:
        answers = FieldReader(device, known).read()
    except Unavailable as why:
        yield refused_reading([field.column for field in known], _READ, why)
        return
    asked = []
    for field, answer in zip(known, answers, strict=True):
        if isinstance(answer, Unavailable) and answer.lasting:
            yield refused_reading([field.column], f"{_READ} {field.id}", answer)
        else:
            asked.append(field)
    if asked:
        columns = tuple(field.column for field in asked)
        yield Reading(columns=columns, origin=_READ, read=FieldReader(device, asked).read)


def is_denied(device: Device, fields: Sequence[Field]) -> bool:
    """Whether the driver refuses these fields to this user: no permission, or an unknown id."""
    if any(field.id is None for field in fields):
        return True
    try:
        answers = FieldReader(device, fields).read()
    except Unavailable as why:
        return why.status == "denied"
    return any(isinstance(a, Unavailable) and a.status == "denied" for a in answers)
