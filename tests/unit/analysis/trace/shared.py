"""Real traces, HTA's answers to them, and small traces written by hand."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.trace_analysis.device_time import with_launch
from haiprof.trace_analysis.pool import Progress, Question, Serial
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.sampling import first_of

REAL_TRACES = (
    "dlrm_v100_8ranks", "hta_cp_simple_add_a100", "hta_diff_control_a100_r3of8",
    "hta_diff_test_v100_r1of2", "hta_nsres_v100_r0of1", "hta_sampled_2ranks_ws128",
    "tb_resnet50_nw0_v100", "tl_b200_r0of8_nccl", "tl_h100_qwen05_mem_stack",
    "tl_mi300_ddp_resnet18",
)  # fmt: skip
FEW_TRACES = first_of(
    REAL_TRACES, "hta_sampled_2ranks_ws128", "tl_h100_qwen05_mem_stack", "tl_mi300_ddp_resnet18"
)
"""Of several ranks, with stacks and memory, of another maker; the others as proofs."""
ONE_TRACE = first_of(REAL_TRACES, "tl_h100_qwen05_mem_stack")
"""For what each trace shows alike: one, the others as proofs."""
# HTA counts waits (alexnet's cuda_sync) and an operator with a stream (B200) as GPU events.
WITHOUT_D11 = tuple(name for name in REAL_TRACES if "simple_add" not in name and "b200" not in name)
GPU_CATEGORIES = {"kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset"}
REPOSITORY = Path(__file__).parents[4]


class Counting(Serial):
    """A pool that says which files it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Path] = []

    def map(
        self,
        question: Question[Any],
        paths: Sequence[Path],
        options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[Any]:
        self.asked += paths
        return super().map(question, paths, options, progress)


def traces(name: str) -> Path:
    """The folder of a real trace; the test is skipped where it is absent."""
    root = Path(os.environ.get("HAIPROF_TRACES") or REPOSITORY.parent / "shared" / "traces")
    path = root / name
    if not path.exists():
        pytest.skip(f"no {path}: point HAIPROF_TRACES at the folder of real traces")
    return path


def trace_path(name: str) -> Path:
    """The first file of a real trace."""
    return trace_files(traces(name))[0]


def raw_events(path: Path) -> list[dict[str, Any]]:
    """The events of a file by the standard library, times as they are written."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return list(json.loads(text.decode("utf-8", "replace"), parse_float=Decimal)["traceEvents"])


def reference(name: str) -> Path:
    """What HTA said of a trace: a folder, or a file below it such as `dlrm.../get_....csv`."""
    return traces("reference") / name


def reference_frame(name: str, table: str) -> pl.DataFrame:
    """One of HTA's tables, without its index."""
    found = pl.read_csv(reference(name) / f"{table}.csv")
    return found.drop(found.columns[0])


def exact_intervals(name: str) -> dict[int, dict[str, float]]:
    """Span, busy, idle ... of a trace's ranks in us, from arithmetic that is not ours."""
    found = json.loads(reference("exact_intervals.json").read_text())[name]
    return {int(rank): values for rank, values in found.items()}


class GpuEvent(NamedTuple):
    """One GPU event as the file has it, in exact ns."""

    name: str
    category: str
    start: int
    end: int


@cache
def events_of(path: Path) -> tuple[GpuEvent, ...]:
    """The GPU events of a file by the standard library's JSON and decimals: no code of ours."""
    return tuple(
        GpuEvent(each["name"], each["cat"], int(each["ts"] * 1000),
                 int((each["ts"] + each["dur"]) * 1000))
        for each in raw_events(path)
        if each.get("ph") == "X" and each.get("cat") in GPU_CATEGORIES
    )  # fmt: skip


def covered_by_hand(events: Iterable[GpuEvent]) -> int:
    """The time in ns that any of them covers, one after the other."""
    reach, found = -(1 << 62), 0
    for event_ in sorted(events, key=lambda each: each.start):
        found += max(0, event_.end - max(event_.start, reach))
        reach = max(reach, event_.end)
    return found


def ranks_of(name: str) -> dict[int, Trace]:
    """The traces of a folder by rank; 0 where the file does not say."""
    return {trace.rank or 0: trace for trace in map(Trace, trace_files(traces(name)))}


def as_hta_sees(trace: Trace) -> Trace:
    """With the GPU events that HTA keeps: launched before the last of several steps (D20)."""
    last = trace.steps["start_ns"].max()
    if trace.steps.height > 1:
        known = with_launch(trace.gpu, trace.runtime)
        trace.__dict__["gpu"] = known.filter(pl.col("launch_ns") < last).drop("launch_ns")
        trace.__dict__["annotations"] = trace.annotations.filter(pl.col("ts_ns") < last)
    return trace


Event = dict[str, Any]


def event(name: str, category: str, ts_us: float, dur_us: float, **more: Any) -> Event:
    """A complete event; `pid` and `tid` are 1 unless given, the rest are its args."""
    pid, tid = more.pop("pid", 1), more.pop("tid", 1)
    return {
        "ph": "X", "name": name, "cat": category, "ts": ts_us, "dur": dur_us,
        "pid": pid, "tid": tid, "args": more,
    }  # fmt: skip


def kernel(name: str, ts_us: float, dur_us: float, **more: Any) -> Event:
    """A GPU event of device 0, stream 7; a kernel unless `category` says otherwise."""
    category = more.pop("category", "kernel")
    args = {"device": 0, "stream": 7, **more}
    ids = {"pid": args["device"], "tid": args["stream"]}
    return event(name, category, ts_us, dur_us, **ids, **args)


def launch(correlation: int, ts_us: float, dur_us: float = 1, **more: Any) -> Event:
    """The call that launched a kernel."""
    name = more.pop("name", "cudaLaunchKernel")
    return event(name, "cuda_runtime", ts_us, dur_us, correlation=correlation, **more)


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def all_reduce(ts_us: float, end_us: float, **more: Any) -> Event:
    """An all-reduce of 4 MB among `ranks` (2); `seq` and the rest are its metadata."""
    seq, ranks = more.pop("seq", None), more.pop("ranks", 2)
    said = {
        "Collective name": "allreduce", "In msg nelems": 1_000_000, "Out msg nelems": 1_000_000,
        "Group size": ranks, "dtype": "Float", "Process Group Name": "0",
        "Process Group Ranks": str(list(range(ranks))), **({} if seq is None else {"Seq": seq}),
    }  # fmt: skip
    return kernel(ALL_REDUCE, ts_us, end_us - ts_us, **said | more)


def step(number: int, ts_us: float, dur_us: float) -> Event:
    """The mark of a profiler step."""
    return event(f"ProfilerStep#{number}", "user_annotation", ts_us, dur_us)


def write_trace(path: Path, events: Iterable[Event], metadata: Mapping[str, Any] = {}) -> Path:
    """A trace file; `.json` plain."""
    path.write_text(json.dumps({**metadata, "traceEvents": list(events)}))
    return path


def trace_of(folder: Path, events: Iterable[Event], **metadata: Any) -> Trace:
    """A trace of these events, written to a folder and read back."""
    return Trace(write_trace(folder / "trace.json", events, metadata))


def rank_file(folder: Path, rank: int, events: Iterable[Event], world_size: int = 2) -> Path:
    """One rank's trace file in a folder of ranks."""
    metadata = {"distributedInfo": {"rank": rank, "world_size": world_size}}
    return write_trace(folder / f"rank{rank}.json", events, metadata)


def analysis_of(folder: Path, ranks: Sequence[Iterable[Event]]) -> TraceAnalysis:
    """The traces of a job of these ranks."""
    for rank, events in enumerate(ranks):
        rank_file(folder, rank, events, len(ranks))
    return TraceAnalysis(folder)
