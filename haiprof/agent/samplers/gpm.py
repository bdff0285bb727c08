"""GPU performance monitoring (NVML GPM, Hopper on): ratios and traffic between two samples."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from haiprof.agent.samplers.nvml import NO_PERMISSION, Device, Refusal, refusal
from haiprof.base.units import NS_PER_S
from haiprof.linux.readings import Clock, EntityGone, Unavailable, Value
from haiprof.run_format.schema import NULL_I64

# nvmlGpmMetricId_t, nvml.h
RATIOS = {
    "sm_active_ratio": 2,
    "sm_occupancy_ratio": 3,
    "tensor_active_ratio": 5,
    "dram_active_ratio": 10,
    "fp64_active_ratio": 11,
    "fp32_active_ratio": 12,
    "fp16_active_ratio": 13,
}
TRAFFIC = {
    "pcie_transmit_bytes": 20,
    "pcie_receive_bytes": 21,
    "nvlink_receive_bytes": 60,
    "nvlink_transmit_bytes": 61,
}
PCIE = ("pcie_transmit_bytes", "pcie_receive_bytes")
_BYTES_PER_MIB = 1 << 20
_VERSION = 1

MIN_APART_NS = 100_000_000
"""Two samples closer than this give no metrics (NVML documentation, nvmlGpmMetricsGet)."""

_HIGHEST_PERCENT = 105.0  # a share is of two samples, a little apart
_WAIT_NS = 2_000_000  # at 10 Hz every other read is some us too early

GPM_ORIGIN = "nvmlGpmMetricsGet"
_ADMIN_PARAMETER = "RmProfilingAdminOnly"
_REMEDY = "option NVreg_RestrictProfilingToAdminUsers=0 of the nvidia module, or CAP_SYS_ADMIN"


class _Info(ctypes.Structure):
    _fields_ = (
        ("short_name", ctypes.c_char_p),
        ("long_name", ctypes.c_char_p),
        ("unit", ctypes.c_char_p),
    )


class _Metric(ctypes.Structure):
    """As nvmlGpmMetric_t."""

    _fields_ = (
        ("metricId", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_int),
        ("value", ctypes.c_double),
        ("metricInfo", _Info),
    )


class Gpm:
    """Metrics of one GPU over the time since the sample before.

    Traffic is reported as a rate; it is summed up from 0 at the first sample and after every gap,
    so that a gap reads as a counter reset.
    """

    def __init__(
        self,
        device: Device,
        columns: Sequence[str],
        *,
        clock: Clock,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.columns = tuple(columns)
        self._device = device
        self._clock = clock
        self._pause = pause
        self._samples: list[Any] = []  # the later one first
        self._request: Any = None
        self._taken_ns: int | None = None
        self._has_interval = False
        self._totals = dict.fromkeys(columns, 0.0)

    def open(self) -> None:
        """Allocates the buffers of all reads, and takes a sample."""
        for _ in range(2):
            self._samples.append(self._device.nvml.call("nvmlGpmSampleAlloc"))
        self._request = _request([(RATIOS | TRAFFIC)[name] for name in self.columns])
        self._take(self._clock())

    def read(self) -> list[Value | Unavailable]:
        """One value per column; one that is not known yet is missing, without a reason."""
        now, before = self._soon_enough(), self._taken_ns
        if before is None or (not self._has_interval and now - before < MIN_APART_NS):
            self._has_interval = False
            self._totals = dict.fromkeys(self.columns, 0.0)
            self._take(now)
            return self._nothing_yet(0)
        if now - before < MIN_APART_NS:
            return self._nothing_yet(NULL_I64)
        self._take(now)
        self._has_interval = True
        return self._metrics(now - before)

    def close(self) -> None:
        """Frees the samples."""
        samples, self._samples = self._samples, []
        for sample in samples:
            with contextlib.suppress(Unavailable):  # it cannot be handled
                self._device.nvml.call("nvmlGpmSampleFree", sample)

    def _soon_enough(self) -> int:
        """Waits for a moment where the previous sample is not quite old enough."""
        now = self._clock()
        left_ns = 0 if self._taken_ns is None else self._taken_ns + MIN_APART_NS - now
        if not 0 < left_ns <= _WAIT_NS:
            return now
        self._pause(left_ns / NS_PER_S)
        return self._clock()

    def _nothing_yet(self, traffic: int) -> list[Value | Unavailable]:
        return [math.nan if name in RATIOS else traffic for name in self.columns]

    def _take(self, now_ns: int) -> None:
        """Puts a new sample in place of the older one; after a failure there is none to compare."""
        self._taken_ns = None
        self._samples.reverse()
        self._device.call("nvmlGpmSampleGet", self._samples[0])
        self._taken_ns = now_ns

    def _metrics(self, elapsed_ns: int) -> list[Value | Unavailable]:
        request = self._request
        request.sample1, request.sample2 = (
            ctypes.cast(sample, ctypes.c_void_p) for sample in reversed(self._samples)
        )
        try:
            self._device.nvml.call(GPM_ORIGIN, request)
        except Refusal as why:
            self._taken_ns = None
            self._device.check(why.code, why.reason)
            raise
        pairs = zip(self.columns, request.metrics, strict=True)
        return [self._answer(name, metric, elapsed_ns) for name, metric in pairs]

    def _answer(self, name: str, metric: _Metric, elapsed_ns: int) -> Value | Unavailable:
        what = f"GPM metric {metric.metricId}"
        if metric.nvmlReturn:
            self._totals[name] = 0.0
            return refusal(metric.nvmlReturn, what)
        value = float(metric.value)
        if not math.isfinite(value):
            self._totals[name] = 0.0
            return Unavailable(f"{what}: not a number")
        if value < 0 or (name in RATIOS and value > _HIGHEST_PERCENT):
            self._totals[name] = 0.0
            return Unavailable(f"{what}: a value that it cannot have")
        if name in RATIOS:
            return value / 100
        self._totals[name] += value * _BYTES_PER_MIB * elapsed_ns / NS_PER_S
        return int(self._totals[name])


def open_gpm(device: Device, columns: Sequence[str], *, root: Path, clock: Clock) -> Gpm:
    """Metrics of one GPU, ready to be read."""
    if device.has_mig:
        reason = "MIG is on: GPM measures each GPU instance, and haiprof reads whole GPUs only"
        raise Unavailable(reason, status="unsupported", lasting=True)
    support = device.call("nvmlGpmQueryDeviceSupport")
    if not support.isSupportedDevice:
        reason = "nvmlGpmQueryDeviceSupport: not this GPU; GPM came with Hopper"
        remedy = "nv-hostengine (DCGM) has the same metrics of older GPUs"
        raise Unavailable(reason, status="unsupported", remedy=remedy, lasting=True)
    gpm = Gpm(device, columns, clock=clock)
    try:
        gpm.open()
    except (Unavailable, EntityGone) as why:
        gpm.close()
        raise _with_permission(why, root) from None
    return gpm


def _with_permission(why: Unavailable | EntityGone, root: Path) -> Unavailable | EntityGone:
    """A refusal for lack of permission, with the driver's own setting and what to change."""
    if not isinstance(why, Refusal) or why.code != NO_PERMISSION:
        return why
    setting = profiling_setting(root)
    reason = f"{why.reason} ({setting})" if setting else why.reason
    return Unavailable(reason, status="denied", remedy=_REMEDY, lasting=True)


def profiling_setting(root: Path) -> str:
    """The line of /proc/driver/nvidia/params on who may profile; empty without one."""
    try:
        lines = (root / "proc/driver/nvidia/params").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(_ADMIN_PARAMETER)), "")


def _request(metric_ids: Sequence[int]) -> Any:  # noqa: ANN401  a struct as long as it has to be
    """As nvmlGpmMetricsGet_t, whose own array grew from 98 to 477 metrics without a new version."""
    count = len(metric_ids)
    fields = (
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.c_void_p),
        ("sample2", ctypes.c_void_p),
        ("metrics", _Metric * count),
    )
    request: Any = type("MetricsGet", (ctypes.Structure,), {"_fields_": fields})()
    request.version, request.numMetrics = _VERSION, count
    for metric, metric_id in zip(request.metrics, metric_ids, strict=True):
        metric.metricId = metric_id
    return request
