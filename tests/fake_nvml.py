"""A stand-in for an NVIDIA driver: a module like pynvml, with GPUs that change and vanish."""

from __future__ import annotations

import ctypes
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As in pynvml: one subclass per return code, the code in `value`."""

    value = 999

    def __str__(self) -> str:
        return _NVML_TEXTS.get(type(self).__name__, "Unknown Error")


class NVMLError_Uninitialized(NVMLError):  # noqa: N801, N818
    value = 1


class NVMLError_InvalidArgument(NVMLError):  # noqa: N801, N818
    value = 2


class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
    value = 3


class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818
    value = 4


class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818
    value = 9


class NVMLError_Timeout(NVMLError):  # noqa: N801, N818
    value = 10


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818
    value = 12


class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801, N818
    value = 13


class NVMLError_GpuIsLost(NVMLError):  # noqa: N801, N818
    value = 15


class NVMLError_ResetRequired(NVMLError):  # noqa: N801, N818
    value = 16


class NVMLError_LibRmVersionMismatch(NVMLError):  # noqa: N801, N818
    value = 18


class NVMLError_Unknown(NVMLError):  # noqa: N801, N818
    value = 999


_NVML_TEXTS = {
    "NVMLError_Uninitialized": "Uninitialized",
    "NVMLError_InvalidArgument": "Invalid Argument",
    "NVMLError_NotSupported": "Not Supported",
    "NVMLError_NoPermission": "Insufficient Permissions",
    "NVMLError_DriverNotLoaded": "Driver Not Loaded",
    "NVMLError_Timeout": "Timeout",
    "NVMLError_LibraryNotFound": "NVML Shared Library Not Found",
    "NVMLError_FunctionNotFound": "Function Not Found",
    "NVMLError_GpuIsLost": "GPU is lost",
    "NVMLError_ResetRequired": "GPU requires restart",
    "NVMLError_LibRmVersionMismatch": "RM has detected an NVML/RM version mismatch.",
}
NVML_ERRORS = (
    NVMLError_Uninitialized,
    NVMLError_InvalidArgument,
    NVMLError_NotSupported,
    NVMLError_NoPermission,
    NVMLError_DriverNotLoaded,
    NVMLError_Timeout,
    NVMLError_LibraryNotFound,
    NVMLError_FunctionNotFound,
    NVMLError_GpuIsLost,
    NVMLError_ResetRequired,
    NVMLError_LibRmVersionMismatch,
    NVMLError_Unknown,
)

DOUBLE, UINT, ULONG, ULONGLONG, SLONGLONG, INT = range(6)  # nvmlValueType_t
_MEMBER = {DOUBLE: "dVal", UINT: "uiVal", ULONG: "ulVal", ULONGLONG: "ullVal", INT: "siVal"}
ALL_LINKS = 0xFFFFFFFF
XID_EVENTS = 0x8

FieldAnswer = tuple[int, float | int] | type[NVMLError]
"""Value type and value, or what the field's own return code says."""


def h200_fields() -> dict[tuple[int, int], FieldAnswer]:
    """Fields by id and scope as an H200 answers them; the others are not supported."""
    plain: dict[int, FieldAnswer] = {
        186: (UINT, 251_000),
        83: (ULONGLONG, 5_000_500),
        82: (UINT, 51),
        74: (ULONGLONG, 1_000),
        75: (ULONGLONG, 2_000),
        76: (ULONGLONG, 3_000),
        77: (ULONGLONG, 4_000),
        79: (ULONGLONG, 5_000),
        197: (UINT, 77),
        198: (UINT, 88),
        251: (ULONGLONG, 1),  # power smoothing on this driver: never a time
        269: (ULONGLONG, 6_000),
        270: (ULONGLONG, 7_000),
        271: (ULONGLONG, 8_000),
    }
    health: dict[int, FieldAnswer] = {
        number: (ULONGLONG, at) for at, number in enumerate((3, 4, 5, 6, 142, 143, 144, 145))
    }
    health |= {94: (UINT, 11), 173: (UINT, 12), 179: (UINT, 13), 180: (UINT, 14)}
    answers = {(number, 0): answer for number, answer in (plain | health).items()}
    answers[138, ALL_LINKS] = (ULONGLONG, 1 << 30)
    answers[139, ALL_LINKS] = (ULONGLONG, 1 << 31)
    return answers


def hopper_metrics() -> dict[int, float]:
    """GPM metrics by id: percent, and MiB/s of traffic."""
    return {2: 80.0, 3: 40.0, 5: 60.0, 10: 30.0, 11: 0.0, 12: 12.5, 13: 1.0, 20: 100.0, 21: 200.0,
            60: 3.0, 61: 4.0}  # fmt: skip


@dataclass
class FakeGpu:
    """What one GPU of `FakeNvml` shows; change a field between two samples."""

    utilization_percent: int = 30
    memory_used_bytes: int = 2 << 30
    memory_reserved_bytes: int = 600 << 20
    memory_total_bytes: int = 80 << 30
    power_milliwatts: int = 250_500
    sm_clock_mhz: int = 1980
    memory_clock_mhz: int = 3201
    temperature: int = 41
    throttle_reasons: int = 0x4
    architecture: int = 9
    mig: int = 0
    fields: dict[tuple[int, int], FieldAnswer] = field(default_factory=h200_fields)
    gpm: dict[int, float] = field(default_factory=hopper_metrics)
    gpm_supported: int = 1
    failures: dict[str, type[NVMLError]] = field(default_factory=dict)
    """Errors by function name; `*` stands for all of them."""


class _Handle(ctypes.Structure):
    """What an opaque pointer of NVML points to."""

    _fields_ = (("gpu", ctypes.c_int), ("time", ctypes.c_int))


def _handle(gpu: int) -> Any:
    return ctypes.pointer(_Handle(gpu, 0))


class FakeNvml(ModuleType):
    """A module like pynvml, with handles, errors and start-up rules like the real one's."""

    def __init__(
        self,
        gpus: Sequence[FakeGpu] = (),
        *,
        init_error: type[NVMLError] | None = None,
        driver: str = "580.159.04",
    ) -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus)
        self.calls: list[str] = []
        self.queries: list[list[tuple[int, int]]] = []
        """Fields asked for, call by call."""
        self.allocated = 0
        """GPM samples and event sets not given back."""
        self.NVMLError = NVMLError
        self._init_error = init_error
        self._driver = driver
        self._users = 0
        self._handles = [_handle(gpu) for gpu in range(len(self.gpus))]
        self._registered: set[int] = set()
        self._events: queue.Queue[SimpleNamespace | type[NVMLError]] = queue.Queue()
        self._time = 0

    # -- what a test does ---------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether somebody has not shut it down yet."""
        return self._users > 0

    def is_let_go_of(self) -> bool:
        """Whether everybody shuts it down soon: the thread that waits for events is not joined."""
        end = time.monotonic() + 10
        while (self.is_open or self.allocated) and time.monotonic() < end:
            time.sleep(0.01)
        return not self.is_open and not self.allocated

    def xid(self, gpu: int, code: int) -> None:
        """The driver reports an error; without registration nobody hears of it."""
        if gpu in self._registered:
            self.event(gpu, XID_EVENTS, code)

    def event(self, gpu: int, kind: int, code: int) -> None:
        """An event of any kind."""
        handle = ctypes.cast(self._handles[gpu], ctypes.POINTER(_Handle))  # another object
        self._events.put(SimpleNamespace(device=handle, eventType=kind, eventData=code))

    def break_events(self, error: type[NVMLError]) -> None:
        """The wait for events fails."""
        self._events.put(error)

    # -- what the samplers call ---------------------------------------------------------------

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("nvmlInit")
        if self._init_error is not None:
            raise self._init_error
        self._users += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._called("nvmlShutdown")
        self._users -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        self._called("nvmlSystemGetDriverVersion")
        return self._driver.encode()

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._called("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        self._gpu("nvmlDeviceGetHandleByIndex", self._handles[index])
        return self._handles[index]

    def nvmlDeviceGetUUID(self, handle: Any) -> str:  # noqa: N802
        self._gpu("nvmlDeviceGetUUID", handle)
        return f"GPU-00000000-0000-0000-0000-{handle.contents.gpu:012d}"

    def nvmlDeviceGetName(self, handle: Any) -> str:  # noqa: N802
        self._gpu("nvmlDeviceGetName", handle)
        return "NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, handle: Any) -> SimpleNamespace:  # noqa: N802
        self._gpu("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(busId=f"00000000:{0x1F + handle.contents.gpu:02X}:00.0".encode())

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:  # noqa: N802
        gpu = self._gpu("nvmlDeviceGetMigMode", device)
        return [gpu.mig, gpu.mig]

    def nvmlDeviceGetArchitecture(self, device: Any) -> int:  # noqa: N802
        return self._gpu("nvmlDeviceGetArchitecture", device).architecture

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> SimpleNamespace:  # noqa: N802
        gpu = self._gpu("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=gpu.utilization_percent, memory=5)

    def nvmlDeviceGetMemoryInfo(  # noqa: N802
        self, handle: Any, version: int | None = None
    ) -> SimpleNamespace:
        gpu = self._gpu(f"nvmlDeviceGetMemoryInfo{'_v2' if version else ''}", handle)
        used, reserved = gpu.memory_used_bytes, gpu.memory_reserved_bytes
        if version is None:
            return SimpleNamespace(total=gpu.memory_total_bytes, used=used + reserved)
        if version != 0x02000028:
            raise NVMLError_InvalidArgument
        return SimpleNamespace(total=gpu.memory_total_bytes, reserved=reserved, used=used)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:  # noqa: N802
        return self._gpu("nvmlDeviceGetPowerUsage", handle).power_milliwatts

    def nvmlDeviceGetClockInfo(self, handle: Any, type: int) -> int:  # noqa: N802
        gpu = self._gpu("nvmlDeviceGetClockInfo", handle)
        return {1: gpu.sm_clock_mhz, 2: gpu.memory_clock_mhz}[type]

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, type: int) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetMaxClockInfo", handle)
        return {1: 1980, 2: 3201}[type]

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:  # noqa: N802
        return self._gpu("nvmlDeviceGetTemperature", handle).temperature + sensor

    def nvmlDeviceGetTemperatureV(self, handle: Any, sensor: int) -> int:  # noqa: N802
        return self._gpu("nvmlDeviceGetTemperatureV", handle).temperature + sensor

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, threshold: int) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetTemperatureThreshold", handle)
        return {0: 92, 1: 89}[threshold]

    def nvmlDeviceGetMarginTemperature(self, handle: Any) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetMarginTemperature", handle)
        return 45

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:  # noqa: N802
        return self._gpu("nvmlDeviceGetCurrentClocksEventReasons", handle).throttle_reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:  # noqa: N802
        return self._gpu("nvmlDeviceGetCurrentClocksThrottleReasons", handle).throttle_reasons

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        return 4

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetCurrPcieLinkWidth", handle)
        return 8

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetMaxPcieLinkWidth", handle)
        return 16

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:  # noqa: N802
        self._gpu("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 700_000

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self,
        handle: Any,
        fieldIds: list[tuple[int, int]],  # noqa: N803
    ) -> list[SimpleNamespace]:
        gpu = self._gpu("nvmlDeviceGetFieldValues", handle)
        self.queries.append(list(fieldIds))
        return [_field_value(gpu.fields.get(query, NVMLError_NotSupported)) for query in fieldIds]

    def nvmlGpmQueryDeviceSupport(self, device: Any) -> SimpleNamespace:  # noqa: N802
        gpu = self._gpu("nvmlGpmQueryDeviceSupport", device)
        return SimpleNamespace(isSupportedDevice=gpu.gpm_supported)

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        self._called("nvmlGpmSampleAlloc")
        self.allocated += 1
        return _handle(-1)

    def nvmlGpmSampleFree(self, gpmSample: Any) -> None:  # noqa: N802, N803
        self._called("nvmlGpmSampleFree")
        self.allocated -= 1

    def nvmlGpmSampleGet(self, device: Any, gpmSample: Any) -> Any:  # noqa: N802, N803
        self._gpu("nvmlGpmSampleGet", device)
        self._time += 1
        gpmSample.contents.gpu, gpmSample.contents.time = device.contents.gpu, self._time
        return gpmSample

    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:  # noqa: N802, N803
        pointers = (metricsGet.sample1, metricsGet.sample2)
        first, second = (ctypes.cast(p, ctypes.POINTER(_Handle)).contents for p in pointers)
        gpu = self._gpu("nvmlGpmMetricsGet", ctypes.pointer(second))
        if metricsGet.version != 1 or first.gpu != second.gpu or not 0 < first.time < second.time:
            raise NVMLError_InvalidArgument
        for metric in metricsGet.metrics[: metricsGet.numMetrics]:
            metric.nvmlReturn = 0 if metric.metricId in gpu.gpm else 3
            metric.value = gpu.gpm.get(metric.metricId, 0.0)
        return metricsGet

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        self._called("nvmlEventSetCreate")
        self.allocated += 1
        return object()

    def nvmlDeviceRegisterEvents(  # noqa: N802
        self,
        handle: Any,
        eventTypes: int,  # noqa: N803
        eventSet: object,  # noqa: N803
    ) -> None:
        self._gpu("nvmlDeviceRegisterEvents", handle)
        if eventTypes & XID_EVENTS:
            self._registered.add(handle.contents.gpu)

    def nvmlEventSetWait_v2(self, eventSet: object, timeoutms: int) -> Any:  # noqa: N802, N803
        self._called("nvmlEventSetWait_v2")
        try:
            event = self._events.get(timeout=timeoutms / 1000)
        except queue.Empty:
            raise NVMLError_Timeout from None
        if isinstance(event, SimpleNamespace):
            return event
        raise event

    def nvmlEventSetFree(self, eventSet: object) -> None:  # noqa: N802, N803
        self._called("nvmlEventSetFree")
        self.allocated -= 1

    def _called(self, function: str) -> None:
        self.calls.append(function)
        if not self._users:
            raise NVMLError_Uninitialized

    def _gpu(self, function: str, handle: Any) -> FakeGpu:
        self._called(function)
        gpu: FakeGpu = self.gpus[handle.contents.gpu]
        error = gpu.failures.get(function) or gpu.failures.get("*")
        if error is not None:
            raise error
        return gpu


def _field_value(answer: FieldAnswer) -> SimpleNamespace:
    if isinstance(answer, type):
        return SimpleNamespace(nvmlReturn=answer.value, valueType=0, value=SimpleNamespace())
    kind, value = answer
    union = SimpleNamespace(**{_MEMBER[kind]: value})
    return SimpleNamespace(nvmlReturn=0, valueType=kind, value=union)
