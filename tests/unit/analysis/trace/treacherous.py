"""Treacherous traces: a sound one of 40 launches and kernels with one thing wrong in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.analysis.trace.shared import Event, event, launch
from tests.unit.analysis.trace.shared import kernel as gpu_event

COUNT, KERNEL_US, STEP_US = 40, 50.0, 60.0
SOUND_MS = COUNT * KERNEL_US / 1e3


def call(number: int, ts: float, name: str = "cudaLaunchKernel", dur: float = 5.0) -> Event:
    return launch(number, ts, dur, name=name)


def kernel(number: int, ts: float, dur: float = KERNEL_US, **args: Any) -> Event:
    return gpu_event("gemm" if number % 2 else "relu", ts, dur, correlation=number, **args)


def sound(at: float = 1000.0) -> list[Event]:
    """Forty launches 60 us apart, each with a kernel of 50 us, and a wait for the device."""
    events = []
    for n in range(COUNT):
        ts = at + n * STEP_US
        events += [event("aten::mm", "cpu_op", ts - 2, 9, **{"External id": n + 1})]
        events += [call(n + 1, ts), kernel(n + 1, ts + 8)]
    last = at + COUNT * STEP_US
    return [*events, call(COUNT + 1, last, "cudaDeviceSynchronize", 20)]


def unlinked(at: float = 1000.0) -> list[Event]:
    return [
        {**e, "args": {**e["args"], "correlation": 0}} if "correlation" in e["args"] else e
        for e in sound(at)
    ]


def external_ids(at: float = 1000.0) -> list[Event]:
    """All correlations 0; calls and kernels have the External id of their operator."""
    numbers = [each["args"].get("correlation") for each in sound(at)]
    pairs = zip(unlinked(at), numbers, strict=True)
    return [
        {**e, "args": {**e["args"], "External id": number}} if number else e
        for e, number in pairs
    ]  # fmt: skip


def ids_of_calls(at: float = 1000.0) -> list[Event]:
    """As Kineto of 2022 wrote them: External ids are numbers of calls, and meet operators' own."""
    return [
        {**e, "args": {**e["args"], "External id": 2 * e["args"]["External id"]}}
        if e["cat"] != "cpu_op" and "External id" in e["args"] else e
        for e in external_ids(at)
    ]  # fmt: skip


def arrows(at: float = 1000.0) -> list[Event]:
    found = unlinked(at)
    ends = [e for e in found if e["cat"] == "kernel" or e["name"] == "cudaLaunchKernel"]
    return found + [
        {"ph": "f" if e["cat"] == "kernel" else "s", "id": at_ // 2 + 7, "cat": "ac2g",
         "name": "ac2g", "pid": e["pid"], "tid": e["tid"], "ts": e["ts"]}
        for at_, e in enumerate(ends)
    ]  # fmt: skip


def calls_of(events: list[Event]) -> list[Event]:
    return [each for each in events if each["name"] == "cudaLaunchKernel"]


def kernels_of(events: list[Event]) -> list[Event]:
    return [each for each in events if each["cat"] == "kernel"]


def without(events: list[Event], gone: list[Event]) -> list[Event]:
    ids = {id(each) for each in gone}
    return [each for each in events if id(each) not in ids]


Make = Callable[[], list[Event]]


def moved(*moves: tuple[slice, float], dur: float | None = None, at: float = 1000.0) -> Make:
    """Some kernels so many us later, or with another duration."""

    def made() -> list[Event]:
        events = sound(at)
        for chosen, us in moves:
            for each in kernels_of(events)[chosen]:
                each["ts"] += us
                each["dur"] = each["dur"] if dur is None else dur
        return events

    return made


def lost(*, kernels: slice = slice(0), calls: slice = slice(0)) -> Make:
    def made() -> list[Event]:
        events = sound()
        return without(events, kernels_of(events)[kernels] + calls_of(events)[calls])

    return made


covering = moved((slice(10, 11), 0), dur=10 * STEP_US + 20)
early_clock = moved((slice(None), -48))
contradicting_clock = moved((slice(20), -48), (slice(20, None), 100))


def dependent_launch() -> list[Event]:
    events = sound()
    for each in kernels_of(events)[1::2] + calls_of(events)[1::2]:
        each["ts"] -= STEP_US - KERNEL_US + 3
    return events


def graph_branches() -> list[Event]:
    events = sound()
    branches = [kernel(1, 1008 + 3 * n, 5, **{"graph node id": n}) for n in range(12)]
    events[1]["name"] = "cudaGraphLaunch"
    return [*without(events, kernels_of(events)[:1]), *branches]


def duplicates() -> list[Event]:
    events = sound()
    again = kernels_of(events)[5:10] + calls_of(events)[5:10]
    return [*events, *(dict(each) for each in again)]


def works_on() -> list[Event]:
    events = sound()[:-1]
    for place, each in enumerate(kernels_of(events)):
        each["ts"], each["dur"] = 1008 + 4000 * place, 3990
    return events


def scaled(factor: float) -> Make:

    def made() -> list[Event]:
        events = sound()
        for each in events:
            each["ts"], each["dur"] = each["ts"] * factor, each["dur"] * factor
        return events

    return made


def captured() -> list[Event]:
    start = [call(900 + n, 100 + 10 * n) for n in range(30)]
    end = call(990, 500, "cudaStreamEndCapture", 50)
    return [*start, end, *sound()]


def captured_whole() -> list[Event]:
    return [call(899, 50, "cudaStreamBeginCapture", 40), *captured()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of treacherous trace."""

    name: str
    check: str
    """Of which something is said; empty where nothing is to be said."""
    is_fault: bool
    write: Callable[[Path], Path]
    """Writes it into an empty folder; what trace-check is pointed at."""
    busy_ms: float | None = SOUND_MS
    """The right busy time of the GPU; None where the file cannot tell it."""


def one(make: Make) -> Callable[[Path], Path]:

    def write(folder: Path) -> Path:
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": make()}))
        return path

    return write


def ranks(*made: tuple[int, float, int], size: int) -> Callable[[Path], Path]:

    def write(folder: Path) -> Path:
        for rank, at, number in made:
            step = event(f"ProfilerStep#{number}", "user_annotation", at - 10, 2600)
            info = {"distributedInfo": {"rank": rank, "world_size": size}}
            text = json.dumps({**info, "traceEvents": [step, *sound(at)]})
            (folder / f"rank{rank}.json").write_text(text)
        return folder

    return write


def clocks_apart(folder: Path) -> Path:
    for rank in range(2):
        events = sound(1000.0 + 500 * rank)
        for number, each in enumerate(kernels_of(events)[::4]):
            each["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            each["args"] |= {
                "Collective name": "allreduce", "Group size": 2, "Seq": number,
                "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
            }  # fmt: skip
        info = {"distributedInfo": {"rank": rank, "world_size": 2}}
        (folder / f"rank{rank}.json").write_text(json.dumps({**info, "traceEvents": events}))
    return folder


def cut_off(folder: Path) -> Path:
    path = one(sound)(folder)
    path.write_text(path.read_text()[:-300])
    return path


def damaged(folder: Path) -> Path:
    path = one(sound)(folder)
    path.write_text(
        path.read_text().replace('"stream": 7, "correlation": 9}', '"stream": 7, "c": NaN}')
    )
    return path


KINDS = (
    Kind(name="sound", check="", is_fault=False, write=one(sound)),
    Kind(name="kernel that covers its successors", check="covering_kernels", is_fault=True,
         write=one(covering)),
    Kind(name="kernel longer than the window", check="covering_kernels", is_fault=True,
         write=one(moved((slice(-1, None), 0), dur=60e6))),
    Kind(name="programmatic dependent launch", check="overlap_by_design", is_fault=False,
         write=one(dependent_launch), busy_ms=1.94),
    Kind(name="branches of a CUDA graph on one stream", check="overlap_by_design", is_fault=False,
         write=one(graph_branches), busy_ms=1.988),
    Kind(name="GPU clock ahead of the host's", check="kernel_after_wait", is_fault=True,
         write=one(moved((slice(None), 5000)))),
    Kind(name="no correlation, but operators' External ids", check="linked_without_correlation",
         is_fault=False, write=one(external_ids)),
    Kind(name="no correlation, but the calls' own External ids",
         check="linked_without_correlation", is_fault=False, write=one(ids_of_calls)),
    Kind(name="no correlation, but arrows", check="linked_without_correlation", is_fault=False,
         write=one(arrows)),
    Kind(name="nothing that joins kernels and launches", check="no_launch_known", is_fault=True,
         write=one(unlinked)),
    Kind(name="GPU clock behind the host's", check="kernel_before_launch", is_fault=True,
         write=one(early_clock)),
    Kind(name="clocks that contradict each other", check="kernel_before_launch", is_fault=True,
         write=one(contradicting_clock)),
    Kind(name="one stamp before its launch", check="kernel_before_launch", is_fault=True,
         write=one(moved((slice(20, 21), -9.5)))),
    Kind(name="GPU records lost in the middle", check="launches_without_kernel", is_fault=True,
         write=one(lost(kernels=slice(15, 25))), busy_ms=None),
    Kind(name="window ended before the GPU's records", check="window_ended_early", is_fault=True,
         write=one(lost(kernels=slice(-8, None))), busy_ms=None),
    Kind(name="host records lost in the middle", check="kernels_without_launch", is_fault=True,
         write=one(lost(calls=slice(15, 25)))),
    Kind(name="kernels queued before the window", check="queued_before_window", is_fault=False,
         write=one(lost(calls=slice(8)))),
    Kind(name="events recorded twice", check="duplicate_events", is_fault=True,
         write=one(duplicates)),
    Kind(name="one timestamp an hour off", check="far_timestamps", is_fault=True,
         write=one(moved((slice(3, 4), -3.6e9), at=4e9)), busy_ms=1.95),
    Kind(name="one kernel 20 s after its launch", check="far_timestamps", is_fault=True,
         write=one(moved((slice(3, 4), 20e6), at=40e6)), busy_ms=1.95),
    Kind(name="one kernel 20 s before its launch", check="far_timestamps", is_fault=True,
         write=one(moved((slice(3, 4), -20e6), at=40e6)), busy_ms=1.95),
    Kind(name="GPU that works on after the host", check="", is_fault=False,
         write=one(works_on), busy_ms=159.6),
    Kind(name="nanoseconds written as us", check="wrong_unit", is_fault=True,
         write=one(scaled(1000)), busy_ms=None),
    Kind(name="milliseconds written as us", check="wrong_unit", is_fault=True,
         write=one(scaled(0.001)), busy_ms=None),
    Kind(name="window opened during graph capture", check="window_during_capture", is_fault=True,
         write=one(captured)),
    Kind(name="graph captured within the window", check="window_during_capture", is_fault=False,
         write=one(captured_whole)),
    Kind(name="ranks without a trace", check="missing_ranks", is_fault=True,
         write=ranks((0, 1000, 1), (2, 1000, 1), size=4)),
    Kind(name="ranks with different steps", check="different_steps", is_fault=True,
         write=ranks((0, 1000, 1), (1, 1000, 1), (2, 1000, 5), size=3)),
    Kind(name="ranks on two clocks", check="two_clocks", is_fault=True,
         write=ranks((0, 1000, 1), (1, 9e6, 1), size=2)),
    Kind(name="ranks whose clocks are 0.5 ms apart", check="two_clocks", is_fault=False,
         write=clocks_apart, busy_ms=None),
    Kind(name="file cut off", check="damaged_file", is_fault=True, write=cut_off, busy_ms=None),
    Kind(name="values that are no JSON", check="damaged_file", is_fault=True, write=damaged),
)  # fmt: skip
