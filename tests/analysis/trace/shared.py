"""Real traces, HTA's answers to them, and small traces written by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof.traces.trace import Trace

REPOSITORY = Path(__file__).parents[3]


def traces(name: str) -> Path:
    """The folder of a real trace; the test is skipped where it is absent."""
    root = Path(os.environ.get("HAIPROF_TRACES") or REPOSITORY.parent / "shared" / "traces")
    path = root / name
    if not path.exists():
        pytest.skip(f"no {path}: point HAIPROF_TRACES at the folder of real traces")
    return path


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
