"""GPU load, memory, power, clocks, throttling and links through NVML, a few calls per GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from haiprof.agent.samplers.gpm import GPM_ORIGIN, MIN_APART_NS, PCIE, RATIOS, open_gpm
from haiprof.agent.samplers.nvml import (
    FUNCTION_NOT_FOUND,
    Call,
    Device,
    NvmlSampler,
    Refusal,
    call_reading,
)
from haiprof.agent.samplers.nvml_fields import (
    NVLINK,
    PCIE_FIELDS,
    field_readings,
    gpu_fields,
    is_denied,
    nvlink_fields,
)
from haiprof.agent.samplers.sampler import CounterState, Missing, Node
from haiprof.agent.samplers.xid import XidWatch
from haiprof.base.units import NS_PER_S
from haiprof.linux.readings import Entity, Reading, Unavailable, Value, refused_reading
from haiprof.run_format.tables.gpu import GPU

_HZ_PER_MHZ = 1_000_000
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2_t: version 2, 40 bytes
_MEMORY_COLUMNS = ("memory_used_bytes", "memory_reserved_bytes", "memory_total_bytes")
_UTILIZATION = ("utilization_ratio", "memory_busy_ratio")

CALLS = (
    Call(
        columns=("power_watts",),
        functions=("nvmlDeviceGetPowerUsage",),
        values=lambda milliwatts: (milliwatts / 1000,),
    ),
    Call(
        columns=("sm_clock_hz",),
        functions=("nvmlDeviceGetClockInfo",),
        arguments=(_SM,),
        values=lambda megahertz: (megahertz * _HZ_PER_MHZ,),
    ),
    Call(
        columns=("memory_clock_hz",),
        functions=("nvmlDeviceGetClockInfo",),
        arguments=(_MEMORY,),
        values=lambda megahertz: (megahertz * _HZ_PER_MHZ,),
    ),
    Call(
        columns=("temperature_celsius",),
        functions=("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"),
        arguments=(0,),
    ),
    Call(
        columns=("throttle_reasons",),
        functions=(
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        ),
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

    @classmethod
    def for_node(cls, node: Node) -> GpuSampler:
        """The sampler of a node."""
        return cls(nvml=node.nvml, root=node.root, clock=node.clock)

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
            if isinstance(news, Missing):
                self.missing.note(*news)
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
    function = "nvmlDeviceGetUtilizationRates"
    if device.has_mig:
        reason = "MIG is on: NVML has no utilization of a GPU cut into instances"
        why = Unavailable(reason, status="unsupported")
        return refused_reading(_UTILIZATION, function, why)
    return call_reading(
        device,
        Call(
            columns=_UTILIZATION,
            functions=(function,),
            values=lambda share: (share.gpu / 100, share.memory / 100),
        ),
    )


def _memory(device: Device) -> Reading:
    """Version 2 of the call keeps apart what the driver reserves; before R510 there is only 1."""
    function = "nvmlDeviceGetMemoryInfo"
    values: Callable[[Any], Sequence[Value | Unavailable]] = _memory_apart
    arguments: tuple[object, ...] = (_MEMORY_V2,)
    try:
        device.call(function, _MEMORY_V2)
    except Refusal as why:
        if why.code == FUNCTION_NOT_FOUND:
            values, arguments = _memory_together, ()
    except Unavailable:
        pass  # it is reported again when it is read
    return Reading(
        columns=_MEMORY_COLUMNS,
        origin=function,
        read=lambda: values(device.call(function, *arguments)),
    )


def _memory_apart(info: Any) -> tuple[int, int, int]:  # noqa: ANN401  a C struct
    return int(info.used), int(info.reserved), int(info.total)


def _memory_together(info: Any) -> tuple[int, Unavailable, int]:  # noqa: ANN401  a C struct
    why = Unavailable(
        "driver without nvmlDeviceGetMemoryInfo_v2: counted in memory_used_bytes",
        status="unsupported",
        remedy="driver 510 or newer",
    )
    return int(info.used), why, int(info.total)
