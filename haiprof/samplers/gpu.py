"""GPU utilisation, memory and power through NVML, three cheap calls per GPU."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from haiprof.rundir.schema import NULL_I64
from haiprof.rundir.tables.gpu import GPU
from haiprof.samplers.base import ALL_METRICS, Clock, CounterState, Missing, MissingLog, Node

LIBRARY = "libnvidia-ml.so.1"
NO_LIBRARY = f"no {LIBRARY}: no NVIDIA driver here, or not in this container"

# Names of NVML's errors after which the same call will not work either.
_NEVER = ("NVMLError_NotSupported", "NVMLError_FunctionNotFound", "NVMLError_NoPermission")
_LOST = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")


@dataclass(frozen=True, slots=True)
class Metric:
    """One NVML call and the columns that it fills."""

    columns: tuple[str, ...]
    read: Callable[[ModuleType, object], tuple[float | int, ...]]
    """From (module, device handle)."""
    null: tuple[float | int, ...]


def _memory(nvml: ModuleType, gpu: object) -> tuple[int, int]:
    info = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return int(info.used), int(info.total)


METRICS = (
    Metric(
        ("utilization_ratio",),
        lambda nvml, gpu: (nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,),
        (math.nan,),
    ),
    Metric(
        ("memory_used_bytes", "memory_total_bytes"),
        _memory,
        (NULL_I64, NULL_I64),
    ),
    Metric(
        ("power_watts",),
        lambda nvml, gpu: (nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,),
        (math.nan,),
    ),
)


@dataclass(frozen=True, slots=True)
class _Device:
    index: int
    handle: object
    unsupported: set[Metric]


class GpuSampler:
    """One record per GPU that the driver shows.

    Processes are never listed: that call takes milliseconds and holds the driver's global lock
    (MangoHud pull request 2104), which the job's own allocations wait for. For the same reason a
    sample that takes longer than `read_limit_ns` makes the loop sample less often.

    Args:
        nvml: A module like pynvml; None imports nvidia-ml-py's.
        clock: CLOCK_MONOTONIC in ns.
    """

    name = "gpu"
    recorder = "gpu"
    every = 1
    table = GPU
    read_limit_ns = 5_000_000

    def __init__(
        self, *, nvml: ModuleType | None = None, clock: Clock = time.perf_counter_ns
    ) -> None:
        self._nvml: Any = nvml
        self._clock = clock
        self._record = GPU.struct
        self._missing = MissingLog()
        self._started = False
        self._devices: list[_Device] = []
        self._lost: set[int] = set()
        self._names: list[dict[str, object]] = []

    @classmethod
    def for_node(cls, node: Node) -> GpuSampler:
        """The sampler of a node."""
        return cls(nvml=node.nvml, clock=node.clock)

    def open(self) -> list[Missing]:
        """Starts NVML, finds the GPUs and tries every metric once."""
        if self._nvml is None:
            try:
                ctypes.CDLL(LIBRARY)  # as pynvml will, but before the 10 ms that its import takes
            except OSError:
                return [Missing(ALL_METRICS, NO_LIBRARY)]
            try:
                import pynvml
            except ImportError as error:
                return [Missing(ALL_METRICS, f"nvidia-ml-py cannot be imported: {error}")]
            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            self._started = True
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            return [Missing(ALL_METRICS, _reason(error))]
        for index in range(count):
            self._find_device(index)
        if not self._devices:
            self._missing.note(ALL_METRICS, "NVML: the driver shows no usable GPU")
        self.sample()
        return self.drain_missing()

    def header(self) -> dict[str, object]:
        """`entities`: index, UUID and model of each GPU."""
        return {"entities": self._names}

    def urgent(self) -> bool:
        """Never: GPUs do not come and go."""
        return False

    def sample(self) -> bytes:
        """One record per GPU, with nulls for what could not be read."""
        return b"".join([self._sample_device(device) for device in self._devices])

    def drain_missing(self) -> list[Missing]:
        """What could not be read since the last call."""
        return self._missing.drain()

    def drain_lines(self) -> list[Mapping[str, object]]:
        """Nothing."""
        return []

    def states(self) -> list[CounterState]:
        """Nothing yet."""
        return []

    def close(self) -> None:
        """Lets go of the driver."""
        self._devices = []
        if self._started:
            self._started = False
            # Nothing is left to do about a driver that cannot be let go of.
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _find_device(self, index: int) -> None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
            name = _text(self._nvml.nvmlDeviceGetName(handle))
        except self._nvml.NVMLError as error:
            self._missing.note(f"gpu {index}", _reason(error))
            return
        self._devices.append(_Device(index, handle, set()))
        self._names.append({"key": [index], "name": f"gpu {index}", "uuid": uuid, "model": name})

    def _sample_device(self, device: _Device) -> bytes:
        before = self._clock()
        values = [value for metric in METRICS for value in self._read(device, metric)]
        return self._record.pack(before, self._clock() - before, device.index, *values)

    def _read(self, device: _Device, metric: Metric) -> tuple[float | int, ...]:
        if device.index in self._lost or metric in device.unsupported:
            return metric.null
        try:
            return metric.read(self._nvml, device.handle)
        except self._nvml.NVMLError as error:
            self._note_failure(device, metric, error)
            return metric.null

    def _note_failure(self, device: _Device, metric: Metric, error: Exception) -> None:
        kind = type(error).__name__
        if kind in _LOST:
            self._lost.add(device.index)
            self._missing.note(f"gpu {device.index}", f"{_reason(error)}; no further values")
            return
        if kind in _NEVER:
            device.unsupported.add(metric)
        for column in metric.columns:
            self._missing.note(column, f"gpu {device.index}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """NVML's own words; for a library that is not there, also where to look."""
    if type(error).__name__ == "NVMLError_LibraryNotFound":
        return NO_LIBRARY
    return f"NVML: {error}"


def _text(name: str | bytes) -> str:
    """NVML names are bytes in older bindings."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name
