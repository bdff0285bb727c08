"""GPUs through NVML: load, memory, power, clocks, throttling, links, errors and limits."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from haiprof.agent.samplers.gpu_activity import GPM_ORIGIN, MIN_APART_NS, PCIE, RATIOS, open_gpm
from haiprof.agent.samplers.nvml import (
    FUNCTION_NOT_FOUND,
    HEALTH_FIELDS,
    NVLINK,
    PCIE_FIELDS,
    TIMEOUT,
    Call,
    Device,
    Nvml,
    NvmlSampler,
    Refusal,
    call_reading,
    field_readings,
    gpu_fields,
    is_denied,
    nvlink_fields,
)
from haiprof.agent.samplers.table import CounterState
from haiprof.base.units import NS_PER_S
from haiprof.linux.readings import Clock, Entity, EntityGone, Reading, Unavailable, refused_reading
from haiprof.run_format.schema import Column
from haiprof.run_format.tables import GPU, GPU_HEALTH

_SM, _MEMORY = 1, 2  # nvmlClockType_t
_SHUTDOWN, _SLOWDOWN = 0, 1  # nvmlTemperatureThresholds_t


def _watts(milliwatts: int) -> tuple[float]:
    return (milliwatts / 1000,)


def _hertz(megahertz: int) -> tuple[int]:
    return (megahertz * 1_000_000,)


_THRESHOLD = "nvmlDeviceGetTemperatureThreshold"

HEALTH_CALLS = (
    Call("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    Call("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    Call("pcie_lane_count", "nvmlDeviceGetCurrPcieLinkWidth"),
    Call("pcie_lane_max_count", "nvmlDeviceGetMaxPcieLinkWidth"),
    Call("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", values=_watts),
    Call("sm_clock_max_hz", "nvmlDeviceGetMaxClockInfo", (_SM,), values=_hertz),
    Call("temperature_margin_celsius", "nvmlDeviceGetMarginTemperature"),
    Call("temperature_slowdown_celsius", _THRESHOLD, (_SLOWDOWN,)),
    Call("temperature_shutdown_celsius", _THRESHOLD, (_SHUTDOWN,)),
)


class GpuHealthSampler(NvmlSampler):
    """One record per GPU that the driver shows."""

    name = "gpu_health"
    every = 10
    table = GPU_HEALTH

    def readings(self, device: Device) -> Iterator[Reading]:
        """One batch of fields, and a call for each thing that has no field."""
        yield from field_readings(device, HEALTH_FIELDS)
        for call in HEALTH_CALLS:
            yield call_reading(device, call)


XID = "xid"
_XID_COLUMN = Column(XID, "i64", "count", "counter", "critical errors that the driver reported")
_XID_EVENTS = 0x8  # nvmlEventTypeXidCriticalError, nvml.h
_WAIT_MS = 500
_WAIT = "nvmlEventSetWait_v2"


class XidWatch:
    """Waits for XID errors of all GPUs, only those from now on.

    The thread has its own handle of the library and closes it itself, so that `stop` never waits
    for the driver.
    """

    def __init__(self, nvml: Nvml, devices: Sequence[Device], *, clock: Clock) -> None:
        self._nvml = Nvml(nvml.module)
        self._devices = devices
        self._clock = clock
        self._stop = threading.Event()
        self._news: queue.SimpleQueue[Mapping[str, object] | Unavailable] = queue.SimpleQueue()
        self._counts: dict[int, int] = {}
        self._refused: dict[int, Unavailable] = {}

    def start(self) -> None:
        """Registers for the events and starts to wait; refusals are among the news."""
        try:
            self._nvml.open()
            events = self._nvml.call("nvmlEventSetCreate")
        except Unavailable as why:
            self._nvml.close()
            self._refuse(self._devices, why)
            return
        for device in self._devices:
            self._register(device, events)
        if not self._counts:
            self._leave(events)
            return
        threading.Thread(target=self._run, args=(events,), name="haiprof-xid", daemon=True).start()

    def news(self) -> list[Mapping[str, object] | Unavailable]:
        """Events since the last call, and why there will be none."""
        found = []
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return found

    def states(self, source: str) -> list[CounterState]:
        """One row per GPU for `haiprof doctor`: the errors seen so far."""
        values = [self._refused.get(d.index) or self._counts.get(d.index, 0) for d in self._devices]
        return [
            CounterState.of(source, device.name, _XID_COLUMN, value, origin=_WAIT)
            for device, value in zip(self._devices, values, strict=True)
        ]

    def stop(self) -> None:
        """Ends the wait; the thread ends within half a second and is not joined."""
        self._stop.set()

    def _register(self, device: Device, events: object) -> None:
        with contextlib.suppress(EntityGone):  # it has reported that itself
            try:
                device.call("nvmlDeviceRegisterEvents", _XID_EVENTS, events)
                self._counts[device.index] = 0
            except Unavailable as why:
                self._refuse([device], why)

    def _run(self, events: object) -> None:
        try:
            while not self._stop.is_set():
                self._wait(events)
        except Unavailable as why:
            self._refuse([d for d in self._devices if d.index in self._counts], why)
        finally:
            self._leave(events)

    def _wait(self, events: object) -> None:
        try:
            event = self._nvml.call(_WAIT, events, _WAIT_MS)
        except Refusal as why:
            if why.code == TIMEOUT:
                return
            raise
        if not event.eventType & _XID_EVENTS:
            return
        wanted = _address(event.device)
        gpu = next((d.index for d in self._devices if _address(d.handle) == wanted), None)
        if gpu is not None:
            self._counts[gpu] += 1
        line = {"type": XID, "gpu": gpu, "xid": int(event.eventData), "time_ns": self._clock()}
        self._news.put(line)

    def _leave(self, events: object) -> None:
        with contextlib.suppress(Unavailable):  # it cannot be handled
            self._nvml.call("nvmlEventSetFree", events)
        self._nvml.close()

    def _refuse(self, devices: Sequence[Device], why: Unavailable) -> None:
        for device in devices:
            self._refused[device.index] = why
            reason = f"{device.name}: {why.reason}"
            self._news.put(Unavailable(reason, status=why.status, remedy=why.remedy))


def _address(handle: Any) -> int | None:  # noqa: ANN401  a pointer of the binding
    return ctypes.cast(handle, ctypes.c_void_p).value


_MEMORY_V2 = 0x02000028  # nvmlMemory_v2_t: version 2, 40 bytes
_RESERVED_UNKNOWN = Unavailable(
    "driver without nvmlDeviceGetMemoryInfo_v2: counted in memory_used_bytes",
    status="unsupported",
    remedy="driver 510 or newer",
)
_MEMORY_COLUMNS = GPU.names("memory_used_bytes", "memory_total_bytes")

CALLS = (
    Call("power_watts", "nvmlDeviceGetPowerUsage", values=_watts),
    Call("sm_clock_hz", "nvmlDeviceGetClockInfo", (_SM,), values=_hertz),
    Call("memory_clock_hz", "nvmlDeviceGetClockInfo", (_MEMORY,), values=_hertz),
    Call("temperature_celsius", "nvmlDeviceGetTemperatureV nvmlDeviceGetTemperature", (0,)),
    Call(
        "throttle_reasons",
        "nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons",
    ),
)


class GpuSampler(NvmlSampler):
    """One record per GPU that the driver shows, and XID errors as event lines.

    Processes are never listed: that call takes milliseconds and holds the driver's global lock
    (MangoHud pull request 2104). Neither is PCIe throughput asked for by the call of that name,
    which measures for 20 ms.

    An event line is `{"type": "xid", "gpu": index, "xid": code, "time_ns": time}`.
    """

    name = "gpu"
    table = GPU
    _watch: XidWatch | None = None

    def find(self) -> list[Entity]:
        """The GPUs; from here on their XID errors are noted."""
        found = super().find()
        self._watch = XidWatch(self.nvml, self.devices, clock=self._clock)
        self._watch.start()
        return found

    def readings(self, device: Device) -> Iterator[Reading]:
        """Cheap calls, one batch of fields, one pair of GPM samples.

        Traffic over PCIe is GPM's where there is GPM, since the fields cost a call of up to 4 ms;
        traffic over NVLink is the fields', unless this user may not read them.
        """
        yield _utilization(device)
        yield _memory(device)
        for call in CALLS:
            yield call_reading(device, call)
        fields, links = gpu_fields(device.nvml.driver), nvlink_fields(device)
        by_gpm = (*PCIE, *NVLINK) if is_denied(device, links) else PCIE
        try:
            gpm = open_gpm(device, (*RATIOS, *by_gpm), root=self.root, clock=self._clock)
        except Unavailable as why:
            yield refused_reading(RATIOS, GPM_ORIGIN, why)
            yield from field_readings(device, (*fields, *PCIE_FIELDS, *links))
            return
        yield Reading(columns=gpm.columns, origin=GPM_ORIGIN, read=gpm.read, close=gpm.close)
        yield from field_readings(device, fields if NVLINK[0] in by_gpm else (*fields, *links))

    def refresh(self) -> None:
        """XID errors become event lines."""
        if self._watch is None:
            return
        for news in self._watch.news():
            if isinstance(news, Unavailable):
                self.missing.note(XID, news)
            else:
                self.note_line(news)

    def states(self) -> list[CounterState]:
        """Every column of every GPU, and its XID errors."""
        time.sleep(MIN_APART_NS / NS_PER_S)  # so that GPM has two samples to compare
        return super().states() + (self._watch.states(self.name) if self._watch else [])

    def release(self) -> None:
        """Releases the driver; the XID watch does so for itself."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        super().release()


def _utilization(device: Device) -> Reading:
    call = Call(
        "utilization_ratio memory_busy_ratio",
        "nvmlDeviceGetUtilizationRates",
        values=lambda share: (share.gpu / 100, share.memory / 100),
    )
    if device.has_mig:
        reason = "MIG is on: NVML has no utilization of a GPU cut into instances"
        why = Unavailable(reason, status="unsupported")
        return refused_reading(call.columns.split(), call.functions, why)
    return call_reading(device, call)


def _memory(device: Device) -> Reading:
    """Version 2 of the call keeps apart what the driver reserves; before R510 there is only 1."""
    function = "nvmlDeviceGetMemoryInfo"
    version: tuple[object, ...] = (_MEMORY_V2,)
    try:
        device.call(function, *version)
    except Refusal as why:
        version = () if why.code == FUNCTION_NOT_FOUND else version
    except Unavailable:
        pass  # it is reported again when it is read

    def read() -> tuple[int, int | Unavailable, int]:
        info = device.call(function, *version)
        reserved = int(info.reserved) if version else _RESERVED_UNKNOWN
        return int(info.used), reserved, int(info.total)

    return Reading(columns=_MEMORY_COLUMNS, origin=function, read=read)
