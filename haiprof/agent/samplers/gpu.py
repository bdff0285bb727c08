"""GPUs: activity by GPM or the site's DCGM exporter; load, power, clocks, errors through NVML."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from haiprof.agent.samplers.nvml import (
    FUNCTION_NOT_FOUND,
    HEALTH_FIELDS,
    NO_PERMISSION,
    NVLINK,
    PCIE_FIELDS,
    TIMEOUT,
    Call,
    Device,
    Nvml,
    NvmlSampler,
    Refusal,
    field_readings,
    gpu_fields,
    is_denied,
    nvlink_fields,
    refusal,
    text,
)
from haiprof.agent.samplers.table import CounterState, Missing, Node, TableSampler
from haiprof.base.options import ENV_DCGM_URL
from haiprof.base.units import NS_PER_S
from haiprof.base.version import read_data
from haiprof.linux.procfs import read_text
from haiprof.linux.readings import (
    Clock,
    Entity,
    EntityGone,
    Reading,
    Unavailable,
    Value,
    refused_reading,
)
from haiprof.run_format.entities import plain_uuid
from haiprof.run_format.schema import NULL_I64, Column
from haiprof.run_format.secrets import mask_text
from haiprof.run_format.tables import DCGM, GPU, GPU_HEALTH

# nvmlGpmMetricId_t, nvml.h
RATIOS = dict(
    zip(GPU.names("sm_active_ratio", "fp16_active_ratio"), (2, 3, 5, 10, 11, 12, 13), strict=True)
)
TRAFFIC = {
    "pcie_transmit_bytes": 20, "pcie_receive_bytes": 21, "nvlink_receive_bytes": 60,
    "nvlink_transmit_bytes": 61,
}  # fmt: skip
PCIE = ("pcie_transmit_bytes", "pcie_receive_bytes")
_BYTES_PER_MIB = 1 << 20

MIN_APART_NS = 100_000_000  # closer samples give no metrics (NVML's nvmlGpmMetricsGet)

_HIGHEST_PERCENT = 105.0  # a share is of two samples, a little apart
_WAIT_NS = 2_000_000  # at 10 Hz every other read is some us too early

GPM_ORIGIN = "nvmlGpmMetricsGet"
_ADMIN_PARAMETER = "RmProfilingAdminOnly"
_REMEDY = "option NVreg_RestrictProfilingToAdminUsers=0 of the nvidia module, or CAP_SYS_ADMIN"


@dataclass
class Gpm:
    """Metrics of one GPU over the time since the sample before."""

    device: Device
    columns: tuple[str, ...]
    clock: Clock
    pause: Callable[[float], None] = time.sleep
    _samples: list[Any] = field(default_factory=list)  # the later one first
    _request: Any = None
    _taken_ns: int | None = None
    _has_interval: bool = False
    _totals: dict[str, float] = field(default_factory=dict)

    def open(self) -> None:
        """Allocates the buffers of all reads, and takes a sample."""
        for _ in range(2):
            self._samples.append(self.device.nvml.call("nvmlGpmSampleAlloc"))
        import pynvml

        self._request = pynvml.c_nvmlGpmMetricsGet_t(version=1, numMetrics=len(self.columns))
        for name, metric in zip(self.columns, self._request.metrics, strict=False):
            metric.metricId = (RATIOS | TRAFFIC)[name]
        self._totals = dict.fromkeys(self.columns, 0.0)
        self._take(self.clock())

    def read(self) -> list[Value | Unavailable]:
        """One value per column; one that is not known yet is missing, without a reason."""
        # Traffic is reported as a rate; it is summed up from 0 at the first sample and after every
        # gap, so that a gap reads as a counter reset.
        now, before = self.clock(), self._taken_ns
        left_ns = 0 if before is None else before + MIN_APART_NS - now
        if 0 < left_ns <= _WAIT_NS:  # the previous sample is not quite old enough
            self.pause(left_ns / NS_PER_S)
            now = self.clock()
        if before is None or (not self._has_interval and now - before < MIN_APART_NS):
            self._has_interval = False
            self._totals = dict.fromkeys(self.columns, 0.0)
            self._take(now)
            return self._nothing_yet(0)
        if now - before < MIN_APART_NS:
            return self._nothing_yet(NULL_I64)
        self._take(now)
        self._has_interval = True
        elapsed_ns = now - before
        request = self._request
        request.sample1, request.sample2 = (
            ctypes.cast(sample, type(request.sample1)) for sample in reversed(self._samples)
        )
        try:
            self.device.nvml.call(GPM_ORIGIN, request)
        except Refusal as why:
            self._taken_ns = None
            self.device.check(why.code, why.reason)
            raise
        pairs = zip(self.columns, request.metrics, strict=False)
        return [self._answer(name, metric, elapsed_ns) for name, metric in pairs]

    def close(self) -> None:
        """Frees the samples."""
        samples, self._samples = self._samples, []
        for sample in samples:
            with contextlib.suppress(Unavailable):  # it cannot be handled
                self.device.nvml.call("nvmlGpmSampleFree", sample)

    def _nothing_yet(self, traffic: int) -> list[Value | Unavailable]:
        return [math.nan if name in RATIOS else traffic for name in self.columns]

    def _take(self, now_ns: int) -> None:
        """Puts a new sample in place of the older one; after a failure there is none to compare."""
        self._taken_ns = None
        self._samples.reverse()
        self.device.call("nvmlGpmSampleGet", self._samples[0])
        self._taken_ns = now_ns

    def _answer(self, name: str, metric: Any, elapsed_ns: int) -> Value | Unavailable:  # noqa: ANN401
        what, value = f"GPM metric {metric.metricId}", float(metric.value)
        total, self._totals[name] = self._totals[name], 0.0
        if metric.nvmlReturn:
            return refusal(metric.nvmlReturn, what)
        if not math.isfinite(value):
            return Unavailable(f"{what}: not a number")
        if value < 0 or (name in RATIOS and value > _HIGHEST_PERCENT):
            return Unavailable(f"{what}: a value that it cannot have")
        if name in RATIOS:
            return value / 100
        self._totals[name] = total + value * _BYTES_PER_MIB * elapsed_ns / NS_PER_S
        return int(self._totals[name])


def open_gpm(device: Device, columns: tuple[str, ...], *, root: Path, clock: Clock) -> Gpm:
    """Metrics of one GPU, ready to be read."""
    if device.has_mig:
        reason = "MIG is on: GPM measures each GPU instance, and haiprof reads whole GPUs only"
        raise Unavailable(reason, status="unsupported", lasting=True)
    if not device.call("nvmlGpmQueryDeviceSupport").isSupportedDevice:
        reason = "nvmlGpmQueryDeviceSupport: not this GPU; GPM came with Hopper"
        remedy = "nv-hostengine (DCGM) has the same metrics of older GPUs"
        raise Unavailable(reason, status="unsupported", remedy=remedy, lasting=True)
    gpm = Gpm(device, columns, clock=clock)
    try:
        gpm.open()
    except (Unavailable, EntityGone) as why:
        gpm.close()
        if not isinstance(why, Refusal) or why.code != NO_PERMISSION:
            raise
        setting = profiling_setting(root)
        reason = f"{why.reason} ({setting})" if setting else why.reason
        raise Unavailable(reason, status="denied", remedy=_REMEDY, lasting=True) from None
    return gpm


def profiling_setting(root: Path) -> str:
    """The line of /proc/driver/nvidia/params on who may profile; empty without one."""
    lines = (read_text(root / "proc/driver/nvidia/params") or "").splitlines()
    return next((line for line in lines if line.startswith(_ADMIN_PARAMETER)), "")


DEFAULT_URL = "http://127.0.0.1:9400/metrics"
_ADDRESS = re.compile(r"http://(\[[0-9a-fA-F:.]+\]|[^\s/:@?#]+)(?::(\d{1,5}))?(/\S*)?\Z", re.ASCII)
_HTTP_PORT = 80
CONNECT_S = 0.05
READ_S = 0.5
_PAGE_LIMIT_BYTES = 8 << 20
_RATE_LIMIT = 1e13  # bytes/s; a larger value is DCGM's blank
_DCGM_REMEDY = f"run dcgm-exporter with its profiling fields on this node, or set {ENV_DCGM_URL}"
_FIELDS_REMEDY = "add the field to the exporter's configuration (dcp-metrics-included.csv has all)"

FIELDS = read_data("agent/samplers/dcgm.json")
"""By column, as the exporter names them."""

# NAME{label="value",...} value [timestamp]: Prometheus text format 0.0.4
_LINE = re.compile(r"^(DCGM_FI_\w+)\{(.*)\}\s+(\S+)(?:\s+-?\d+)?\s*$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Page = Mapping[str, Mapping[str, float | None]]  # by UUID and field; None where it has several


class DcgmSampler(TableSampler):
    """One record per GPU and collection of the exporter; HAIPROF_DCGM_URL asks for it."""

    recorder = "gpu"
    every = 10
    table = DCGM
    read_limit_ns = 100_000_000

    def __init__(self, node: Node, *, url: str | None = None) -> None:
        super().__init__(node)
        url = url or os.environ.get(ENV_DCGM_URL)
        self.url = url or DEFAULT_URL
        self._shown = mask_text(self.url)
        self._asked_for = bool(url)
        self._nvml = node.nvml
        self._text: str | None = None
        self._page: Page = {}
        self._failure: Unavailable | None = None
        self._recorded = ""

    def open(self) -> list[Missing]:
        """Looks for the exporter; without one the cost is a refused connection."""
        missing = super().open()
        self._recorded = ""  # the page that `find` read has not been recorded
        return missing

    def find(self) -> list[Entity]:
        """The GPUs of the exporter's page that the driver shows here, too."""
        reach(self.url)
        indices, has_gpm = _gpus_of_driver(self._nvml)
        if has_gpm and not self._asked_for:
            asks = f"{ENV_DCGM_URL}={self._shown} asks for it"
            raise Unavailable(f"not needed: NVML GPM measures the same; {asks}")
        page = parse_page(fetch(self.url))
        numbered = [
            (index, uuid)
            for at, uuid in enumerate(page)
            if (index := indices.get(plain_uuid(uuid)) if indices else at) is not None
        ]
        if not numbered:
            reason = f"{self._shown}: no DCGM figures of a whole GPU that the driver shows here"
            raise Unavailable(reason, remedy=_FIELDS_REMEDY)
        return [self._entity(index, uuid) for index, uuid in sorted(numbered)]

    def refresh(self) -> None:
        """Discards the page: the next read fetches it for all GPUs."""
        self._text = None

    def sample(self) -> bytes:
        """One record per GPU where the exporter has collected since the last; otherwise none."""
        records = super().sample()
        figures = "\n".join(match[0] for match in _LINE.finditer(self._text or ""))
        if not figures or figures == self._recorded:
            return b""
        self._recorded = figures
        return records

    def _entity(self, index: int, uuid: str) -> Entity:
        reading = Reading(
            columns=tuple(FIELDS), origin=self._shown, remedy=_FIELDS_REMEDY,
            read=lambda: self._figures(uuid),
        )  # fmt: skip
        name = f"gpu {index}"
        return Entity(key=(index,), name=name, readings=(reading,), details={"uuid": uuid})

    def _figures(self, uuid: str) -> Sequence[Value | Unavailable]:
        if self._text is None:  # one attempt per sample
            self._text, self._page, self._failure = "", {}, None
            try:
                self._text = fetch(self.url)
            except Unavailable as why:
                self._failure = why
            self._page = parse_page(self._text)
        if self._failure is not None:
            raise self._failure
        if uuid not in self._page:
            raise Unavailable(f"{self._shown}: no such GPU in it this time")
        return [self._figure(column, self._page[uuid]) for column in FIELDS]

    def _figure(self, column: str, figures: Mapping[str, float | None]) -> Value | Unavailable:
        field = FIELDS[column]
        if field not in figures:
            return Unavailable(f"{self._shown}: {field} is not exported", remedy=_FIELDS_REMEDY)
        if (value := figures[field]) is None:
            return Unavailable(f"{self._shown}: {field} has several values for one GPU")
        if column == "last_xid":
            return int(value) if 0 <= value < 1 << 31 else Unavailable(f"{field} is {value:g}")
        if not 0 <= value <= (1.0 if column.endswith("_ratio") else _RATE_LIMIT):
            return Unavailable(f"{self._shown}: {field} is {value:g}, which it cannot be")
        if value == 0 and column.startswith("pcie_"):
            why = f"{self._shown}: {field} is 0, which PCIe of a GPU in use never is"
            remedy = "dcgm-exporter issue 721: another version of DCGM or of the driver"
            return Unavailable(why, status="unsupported", remedy=remedy)
        return value


def reach(url: str) -> None:
    """Tries a connection, for a moment only."""
    host, port, _ = _address(url)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        words = getattr(error, "strerror", None) or str(error)
        reason = f"no DCGM exporter answers at {mask_text(url)}: {words}"
        raise Unavailable(reason, remedy=_DCGM_REMEDY) from None


def fetch(url: str) -> str:
    """The exporter's page."""
    # Requested in HTTP 1.0 without Python's own client: no proxy and no redirect is followed,
    # nothing is imported into the launcher, and the time limit covers the whole answer.
    host, port, path = _address(url)
    shown = mask_text(url)
    request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: text/plain\r\n\r\n"
    answer, deadline = bytearray(), time.monotonic() + READ_S
    try:
        with socket.create_connection((host, port), READ_S) as connection:
            connection.sendall(request.encode())
            while True:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or len(answer) > _PAGE_LIMIT_BYTES:
                    raise TimeoutError
                connection.settimeout(left_s)
                if not (block := connection.recv(1 << 16)):
                    break
                answer += block
    except OSError as error:
        why = error.strerror or error or type(error).__name__
        if isinstance(error, TimeoutError):
            why = "too slow or too large to be an exporter's page"
        raise Unavailable(f"{shown}: {why}", remedy=_DCGM_REMEDY) from None
    head, _, body = answer.partition(b"\r\n\r\n")
    version, _, status = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1."):
        raise Unavailable(f"{shown}: no HTTP server", remedy=_DCGM_REMEDY)
    if status.split(" ")[0] != "200":
        raise Unavailable(f"{shown}: HTTP {status.split(' ')[0]}", remedy=_DCGM_REMEDY)
    return body.decode("utf-8", errors="replace")


def _address(url: str) -> tuple[str, int, str]:
    if (match := _ADDRESS.match(url)) is None:
        raise Unavailable(
            f"{ENV_DCGM_URL}={mask_text(url)}: not an http address", remedy=f"e.g. {DEFAULT_URL}"
        )
    host, port, path = match.groups()
    return host.strip("[]"), int(port or _HTTP_PORT), path or "/"


def parse_page(page: str) -> Page:
    """Figures of whole GPUs by UUID, in the exporter's order; MIG instances are left out."""
    found: dict[str, dict[str, float | None]] = {}
    for match in _LINE.finditer(page):
        labels = dict(_LABEL.findall(match[2]))
        uuid = labels.get("UUID", "")
        if not uuid or labels.get("GPU_I_ID"):
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        figures = found.setdefault(uuid, {})
        known = figures.setdefault(match[1], value)
        if str(known) != str(value):  # the same GPU twice, and they differ (NaN is NaN)
            figures[match[1]] = None
    return found


def _gpus_of_driver(nvml: ModuleType | None) -> tuple[dict[str, int], bool]:
    """NVML index by UUID, and whether every GPU has GPM; empty where there is no NVML."""
    library = Nvml(nvml)
    found: dict[str, int] = {}
    try:
        library.open()
        count = library.call("nvmlDeviceGetCount")
        handles = [library.call("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
        for index, handle in enumerate(handles):
            found[plain_uuid(text(library.call("nvmlDeviceGetUUID", handle)))] = index
        return found, bool(handles) and all(_has_gpm(library, handle) for handle in handles)
    except (Unavailable, EntityGone):
        return {}, False
    finally:
        library.close()


def _has_gpm(library: Nvml, handle: object) -> bool:
    with contextlib.suppress(Unavailable):
        return bool(library.call("nvmlGpmQueryDeviceSupport", handle).isSupportedDevice)
    return False


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

    every = 10
    table = GPU_HEALTH

    def readings(self, device: Device) -> Iterator[Reading]:
        """One batch of fields, and a call for each thing that has no field."""
        yield from field_readings(device, HEALTH_FIELDS)
        for call in HEALTH_CALLS:
            yield call.reading(device)


XID = "xid"
_XID_COLUMN = Column(XID, "i64", "count", "counter", "critical errors that the driver reported")
_XID_EVENTS = 0x8  # nvmlEventTypeXidCriticalError, nvml.h
_WAIT_MS = 500
_WAIT = "nvmlEventSetWait_v2"


class XidWatch:
    """Waits for XID errors of all GPUs, only those from now on."""

    def __init__(self, nvml: Nvml, devices: Sequence[Device], *, clock: Clock) -> None:
        # The thread has its own handle of the library and closes it itself, so that `stop` never
        # waits for the driver.
        self._nvml = Nvml(nvml.module)
        self._devices, self._clock = devices, clock
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
            with contextlib.suppress(EntityGone):  # it has reported that itself
                try:
                    device.call("nvmlDeviceRegisterEvents", _XID_EVENTS, events)
                    self._counts[device.index] = 0
                except Unavailable as why:
                    self._refuse([device], why)
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
        wanted = _pointer(event.device)
        gpu = next((d.index for d in self._devices if _pointer(d.handle) == wanted), None)
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


def _pointer(handle: Any) -> int | None:  # noqa: ANN401  a pointer of the binding
    return ctypes.cast(handle, ctypes.c_void_p).value


_MEMORY_V2 = 0x02000028  # nvmlMemory_v2_t: version 2, 40 bytes
_RESERVED_UNKNOWN = Unavailable(
    "driver without nvmlDeviceGetMemoryInfo_v2: counted in memory_used_bytes",
    status="unsupported", remedy="driver 510 or newer",
)  # fmt: skip
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

    table = GPU
    _watch: XidWatch | None = None

    def find(self) -> list[Entity]:
        """The GPUs; from here on their XID errors are noted."""
        found = super().find()
        self._watch = XidWatch(self.nvml, self.devices, clock=self._clock)
        self._watch.start()
        return found

    def readings(self, device: Device) -> Iterator[Reading]:
        """Cheap calls, one batch of fields, one pair of GPM samples."""
        # Traffic over PCIe is GPM's where there is GPM, since the fields cost a call of up to 4 ms;
        # traffic over NVLink is the fields', unless this user may not read them.
        yield _utilization(device)
        yield _memory(device)
        for call in CALLS:
            yield call.reading(device)
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
        return super().states() + (self._watch.states(self.table.name) if self._watch else [])

    def release(self) -> None:
        """Releases the driver; the XID watch does so for itself."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        super().release()


def _utilization(device: Device) -> Reading:
    call = Call("utilization_ratio memory_busy_ratio", "nvmlDeviceGetUtilizationRates",
                values=lambda share: (share.gpu / 100, share.memory / 100))  # fmt: skip
    if device.has_mig:
        reason = "MIG is on: NVML has no utilization of a GPU cut into instances"
        why = Unavailable(reason, status="unsupported")
        return refused_reading(call.columns.split(), call.functions, why)
    return call.reading(device)


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
