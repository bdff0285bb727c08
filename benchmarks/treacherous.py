"""Treacherous traces: each kind made on purpose, with what `haiprof trace check` says of it.

    python benchmarks/treacherous.py

Each is a sound trace of 40 launches and kernels with one thing wrong, as it has been seen in public
traces. Beside what is said stand the busy time of the GPU as it is recorded (what a sum over the
file's own numbers gives) and as haiprof answers it; the sound trace has 2.00 ms. The tests of the
checks use the same traces: tests/unit/analysis/trace/test_trace_check.py.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "treacherous.md"
COUNT, KERNEL_US, STEP_US = 40, 50.0, 60.0
SOUND_MS = COUNT * KERNEL_US / 1e3

Event = dict[str, Any]


def event(name: str, category: str, ts: float, dur: float, **args: Any) -> Event:
    """A complete event of thread 1."""
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "pid": 1, "tid": 1,
            "args": args}  # fmt: skip


def call(number: int, ts: float, name: str = "cudaLaunchKernel", dur: float = 5.0) -> Event:
    """A call of the runtime."""
    return event(name, "cuda_runtime", ts, dur, correlation=number)


def kernel(number: int, ts: float, dur: float = KERNEL_US, **args: Any) -> Event:
    """A kernel on stream 7."""
    own = {"device": 0, "stream": 7, "correlation": number, **args}
    found = event("gemm" if number % 2 else "relu", "kernel", ts, dur, **own)
    return {**found, "pid": 0, "tid": own["stream"]}


def sound(at: float = 1000.0) -> list[Event]:
    """Forty launches 60 us apart, each with a kernel of 50 us, and a wait for the device."""
    events = []
    for n in range(COUNT):
        ts = at + n * STEP_US
        events += [event("aten::mm", "cpu_op", ts - 2, 9, **{"External id": n + 1})]
        events += [call(n + 1, ts), kernel(n + 1, ts + 8)]
    last = at + COUNT * STEP_US
    return [*events, call(COUNT + 1, last, "cudaDeviceSynchronize", 20)]


def clock_ahead(at: float = 1000.0) -> list[Event]:
    """All GPU times 5 ms too late."""
    events = sound(at)
    return [{**e, "ts": e["ts"] + 5000} if e["cat"] == "kernel" else e for e in events]


def unlinked(at: float = 1000.0) -> list[Event]:
    """All correlations 0."""
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
    """All correlations 0; an arrow leads from each launch to its kernel."""
    found = unlinked(at)
    ends = [e for e in found if e["cat"] == "kernel" or e["name"] == "cudaLaunchKernel"]
    return found + [
        {"ph": "f" if e["cat"] == "kernel" else "s", "id": at_ // 2 + 7, "cat": "ac2g",
         "name": "ac2g", "pid": e["pid"], "tid": e["tid"], "ts": e["ts"]}
        for at_, e in enumerate(ends)
    ]  # fmt: skip


def calls_of(events: list[Event]) -> list[Event]:
    """Launch calls."""
    return [each for each in events if each["name"] == "cudaLaunchKernel"]


def kernels_of(events: list[Event]) -> list[Event]:
    """Kernels."""
    return [each for each in events if each["cat"] == "kernel"]


def without(events: list[Event], gone: list[Event]) -> list[Event]:
    """All but some."""
    ids = {id(each) for each in gone}
    return [each for each in events if id(each) not in ids]


def covering() -> list[Event]:
    """A kernel whose recorded end covers ten others of its stream."""
    events = sound()
    kernels_of(events)[10]["dur"] = 10 * STEP_US + 20
    return events


def longer_than_window() -> list[Event]:
    """The last kernel of its stream, recorded as a minute long."""
    events = sound()
    kernels_of(events)[-1]["dur"] = 60e6
    return events


def dependent_launch() -> list[Event]:
    """Every second kernel begins 3 us before the one before it ends."""
    events = sound()
    for each in kernels_of(events)[1::2]:
        each["ts"] -= STEP_US - KERNEL_US + 3
    for each in calls_of(events)[1::2]:
        each["ts"] -= STEP_US - KERNEL_US + 3
    return events


def graph_branches() -> list[Event]:
    """One graph launch whose nodes run side by side, all on the stream of the launch."""
    events = sound()
    branches = [kernel(1, 1008 + 3 * n, 5, **{"graph node id": n}) for n in range(12)]
    events[1]["name"] = "cudaGraphLaunch"
    return [*without(events, kernels_of(events)[:1]), *branches]


def early_clock() -> list[Event]:
    """The GPU's clock is 40 us behind the host's."""
    events = sound()
    for each in kernels_of(events):
        each["ts"] -= 48
    return events


def contradicting_clock() -> list[Event]:
    """Kernels before their launch, and others that end after the host has waited for them."""
    events = sound()
    for each in kernels_of(events)[:20]:
        each["ts"] -= 48
    for each in kernels_of(events)[20:]:
        each["ts"] += 100
    return events


def one_early_stamp() -> list[Event]:
    """A single kernel with a stamp from before its launch."""
    events = sound()
    kernels_of(events)[20]["ts"] -= 9.5
    return events


def lost_gpu_records() -> list[Event]:
    """Ten launches in the middle whose kernels are not in the file."""
    events = sound()
    return without(events, kernels_of(events)[15:25])


def ended_early() -> list[Event]:
    """The last eight launches have no kernel."""
    events = sound()
    return without(events, kernels_of(events)[-8:])


def lost_host_records() -> list[Event]:
    """Ten kernels in the middle whose launch calls are not in the file."""
    events = sound()
    return without(events, calls_of(events)[15:25])


def queued_before() -> list[Event]:
    """The first eight kernels were launched before the window began."""
    events = sound()
    return without(events, calls_of(events)[:8])


def duplicates() -> list[Event]:
    """Five kernels and their launches are in the file twice."""
    events = sound()
    again = kernels_of(events)[5:10] + calls_of(events)[5:10]
    return [*events, *(dict(each) for each in again)]


def far_stamp() -> list[Event]:
    """One kernel an hour before all others."""
    events = sound(4e9)
    kernels_of(events)[3]["ts"] -= 3.6e9
    return events


def far_from_launch(seconds: float) -> Callable[[], list[Event]]:
    """One kernel some seconds after its launch, and after all that the host did."""

    def made() -> list[Event]:
        """One kernel that far away."""
        events = sound(40e6)
        kernels_of(events)[3]["ts"] += seconds * 1e6
        return events

    return made


def works_on() -> list[Event]:
    """Kernels queued in 2.4 ms that take 160 ms; the host does not wait for them."""
    events = sound()[:-1]
    for place, each in enumerate(kernels_of(events)):
        each["ts"], each["dur"] = 1008 + 4000 * place, 3990
    return events


def scaled(factor: float) -> Callable[[], list[Event]]:
    """All times in another unit."""

    def made() -> list[Event]:
        """All times in another unit."""
        events = sound()
        for each in events:
            each["ts"], each["dur"] = each["ts"] * factor, each["dur"] * factor
        return events

    return made


def halves() -> list[Event]:
    """Kernels written as begin and end; read as whole events."""
    found = []
    for each in sound():
        if each["cat"] != "kernel":
            found.append(each)
            continue
        end = {"ph": "E", "pid": each["pid"], "tid": each["tid"], "ts": each["ts"] + each["dur"]}
        begin = {key: value for key, value in each.items() if key != "dur"} | {"ph": "B"}
        found += [begin, end]
    return found


def captured() -> list[Event]:
    """The window opened while a graph was being captured: launches that ran nothing."""
    start = [call(900 + n, 100 + 10 * n) for n in range(30)]
    end = call(990, 500, "cudaStreamEndCapture", 50)
    return [*start, end, *sound()]


def captured_whole() -> list[Event]:
    """A graph that was captured in the window from its beginning on."""
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


def one(make: Callable[[], list[Event]]) -> Callable[[Path], Path]:
    """A single file."""

    def write(folder: Path) -> Path:
        path = folder / "trace.json"
        path.write_text(json.dumps({"traceEvents": make()}))
        return path

    return write


def ranks(*made: tuple[int, float, int], size: int) -> Callable[[Path], Path]:
    """A folder with a file per rank: rank, start of its window in us, number of its step."""

    def write(folder: Path) -> Path:
        for rank, at, number in made:
            step = event(f"ProfilerStep#{number}", "user_annotation", at - 10, 2600)
            info = {"distributedInfo": {"rank": rank, "world_size": size}}
            text = json.dumps({**info, "traceEvents": [step, *sound(at)]})
            (folder / f"rank{rank}.json").write_text(text)
        return folder

    return write


def clocks_apart(folder: Path) -> Path:
    """Two ranks whose clocks are 0.5 ms apart, as the ends of their collectives tell."""
    for rank in range(2):
        events = sound(1000.0 + 500 * rank)
        for number, each in enumerate(kernels_of(events)[::4]):
            each["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
            each["args"] |= {
                "Collective name": "allreduce",
                "Group size": 2,
                "Seq": number,
                "Process Group Name": "0",
                "Process Group Ranks": "[0, 1]",
            }
        info = {"distributedInfo": {"rank": rank, "world_size": 2}}
        (folder / f"rank{rank}.json").write_text(json.dumps({**info, "traceEvents": events}))
    return folder


def cut_off(folder: Path) -> Path:
    """A file whose end is missing."""
    path = one(sound)(folder)
    path.write_text(path.read_text()[:-300])
    return path


def damaged(folder: Path) -> Path:
    """A value that is no JSON in the middle of an event."""
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
         write=one(longer_than_window)),
    Kind(name="programmatic dependent launch", check="overlap_by_design", is_fault=False,
         write=one(dependent_launch), busy_ms=1.94),
    Kind(name="branches of a CUDA graph on one stream", check="overlap_by_design", is_fault=False,
         write=one(graph_branches), busy_ms=1.988),
    Kind(name="GPU clock ahead of the host's", check="kernel_after_wait", is_fault=True,
         write=one(clock_ahead)),
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
         write=one(one_early_stamp)),
    Kind(name="GPU records lost in the middle", check="launches_without_kernel", is_fault=True,
         write=one(lost_gpu_records), busy_ms=None),
    Kind(name="window ended before the GPU's records", check="window_ended_early", is_fault=True,
         write=one(ended_early), busy_ms=None),
    Kind(name="host records lost in the middle", check="kernels_without_launch", is_fault=True,
         write=one(lost_host_records)),
    Kind(name="kernels queued before the window", check="queued_before_window", is_fault=False,
         write=one(queued_before)),
    Kind(name="events recorded twice", check="duplicate_events", is_fault=True,
         write=one(duplicates)),
    Kind(name="one timestamp an hour off", check="far_timestamps", is_fault=True,
         write=one(far_stamp), busy_ms=1.95),
    Kind(name="one kernel 20 s after its launch", check="far_timestamps", is_fault=True,
         write=one(far_from_launch(20)), busy_ms=1.95),
    Kind(name="one kernel 20 s before its launch", check="far_timestamps", is_fault=True,
         write=one(far_from_launch(-20)), busy_ms=1.95),
    Kind(name="GPU that works on after the host", check="", is_fault=False,
         write=one(works_on), busy_ms=159.6),
    Kind(name="nanoseconds written as us", check="wrong_unit", is_fault=True,
         write=one(scaled(1000)), busy_ms=None),
    Kind(name="milliseconds written as us", check="wrong_unit", is_fault=True,
         write=one(scaled(0.001)), busy_ms=None),
    Kind(name="B/E pairs", check="", is_fault=False, write=one(halves)),
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


def recorded_busy_ms(path: Path) -> float | None:
    """What a naive reader makes of one file: the union of all X kernels as they are written."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except ValueError:
        return None
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                   if e.get("cat") == "kernel" and e["ph"] == "X")  # fmt: skip
    busy, reach = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return busy / 1e3


def row_of(kind: Kind, folder: Path) -> str:
    """One line of the table."""
    from haiprof import TraceAnalysis

    path = kind.write(folder)
    analysis = TraceAnalysis(path)
    checks = analysis.trace_check()
    busy = analysis.temporal_breakdown().select((_col("compute_ns")).sum()).item() or 0
    naive = recorded_busy_ms(path) if path.is_file() else None
    said = "; ".join(
        f"{'**' if r['is_fault'] else ''}{r['check']}{'**' if r['is_fault'] else ' (by design)'}: "
        f"{r['text']}: {r['effect']}"
        for r in checks.iter_rows(named=True)
    ).replace("|", "/")
    recorded = "-" if naive is None else f"{naive:,.3f}"
    return (
        f"| {kind.name} | {said or '(nothing)'} | {recorded} | {busy / 1e6 / _files(path):,.3f} |"
    )


def _col(name: str) -> Any:
    import polars as pl

    return pl.col(name)


def _files(path: Path) -> int:
    return 1 if path.is_file() else len(list(path.iterdir()))


def main() -> None:
    """Writes the table."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        rows = []
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row_of(kind, Path(folder)))
    head = [
        "# Treacherous traces", "",
        "Made by `benchmarks/treacherous.py`: what `haiprof trace check` says, and the GPU's",
        "busy time in ms as the file's own numbers give it and as haiprof answers it (per rank).",
        f"Of the sound trace it is {SOUND_MS:.3f}.", "",
        "| kind | what is said | as recorded | as answered |", "|---|---|---|---|",
    ]  # fmt: skip
    RESULT.write_text("\n".join([*head, *rows, ""]))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
