"""XID errors of GPUs as they happen: one thread that waits for the driver's events."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from haiprof.agent.samplers.nvml import TIMEOUT, Device, Nvml, Refusal
from haiprof.agent.samplers.sampler import CounterState, Missing
from haiprof.linux.readings import Clock, EntityGone, Unavailable

XID = "xid"
_XID_EVENTS = 0x8  # nvmlEventTypeXidCriticalError, nvml.h
_WAIT_MS = 500
_ORIGIN = "nvmlEventSetWait_v2"


class XidWatch:
    """Waits for XID errors of all GPUs, only those from now on.

    The thread has its own handle of the library and closes it itself, so that `stop` never waits
    for the driver.
    """

    def __init__(self, nvml: Nvml, devices: Sequence[Device], *, clock: Clock) -> None:
        self._nvml = nvml.sibling()
        self._devices = devices
        self._clock = clock
        self._stop = threading.Event()
        self._news: queue.SimpleQueue[Mapping[str, object] | Missing] = queue.SimpleQueue()
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

    def news(self) -> list[Mapping[str, object] | Missing]:
        """Events since the last call, and why there will be none."""
        found = []
        while not self._news.empty():
            found.append(self._news.get_nowait())
        return found

    def states(self, source: str) -> list[CounterState]:
        """One row per GPU for `haiprof doctor`: the errors seen so far."""
        return [self._state(source, device) for device in self._devices]

    def stop(self) -> None:
        """Ends the wait; the thread ends within half a second and is not joined."""
        self._stop.set()

    def _register(self, device: Device, events: object) -> None:
        try:
            device.call("nvmlDeviceRegisterEvents", _XID_EVENTS, events)
        except Unavailable as why:
            self._refuse([device], why)
        except EntityGone:
            return  # it has reported that itself
        else:
            self._counts[device.index] = 0

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
            event = self._nvml.call("nvmlEventSetWait_v2", events, _WAIT_MS)
        except Refusal as why:
            if why.code == TIMEOUT:
                return
            raise
        if not event.eventType & _XID_EVENTS:
            return
        gpu = self._index(event.device)
        if gpu is not None:
            self._counts[gpu] += 1
        line = {"type": XID, "gpu": gpu, "xid": int(event.eventData), "time_ns": self._clock()}
        self._news.put(line)

    def _leave(self, events: object) -> None:
        try:
            self._nvml.call("nvmlEventSetFree", events)
        except Unavailable:
            pass  # it cannot be handled
        finally:
            self._nvml.close()

    def _index(self, handle: object) -> int | None:
        """The GPU of a handle; None for one that was not registered."""
        wanted = _address(handle)
        return next((d.index for d in self._devices if _address(d.handle) == wanted), None)

    def _refuse(self, devices: Sequence[Device], why: Unavailable) -> None:
        for device in devices:
            self._refused[device.index] = why
            reason = f"{device.name}: {why.reason}"
            self._news.put(Missing(XID, reason, why.status, why.remedy))

    def _state(self, source: str, device: Device) -> CounterState:
        why = self._refused.get(device.index)
        return CounterState(
            source=source,
            entity=device.name,
            metric=XID,
            unit="count",
            status="available" if why is None else why.status,
            value=self._counts.get(device.index, 0) if why is None else None,
            origin=_ORIGIN,
            read_ns=None,
            reason="" if why is None else why.reason,
            remedy="" if why is None else why.remedy,
        )


def _address(handle: Any) -> int | None:  # noqa: ANN401  a pointer of the binding
    return ctypes.cast(handle, ctypes.c_void_p).value
