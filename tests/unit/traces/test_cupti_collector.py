"""Traces of PyTorch's own CUPTI collector (cuspy): counters, graph nodes, copies without a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from haiprof import TraceAnalysis
from haiprof.cli import main
from haiprof.trace_format.kineto.rank_trace import Trace

Event = dict[str, Any]


def on_gpu(category: str, name: str, ts: float, dur: float, **args: Any) -> Event:
    """Source of the form: torch/profiler/_cuspy/trace.py, `_trace_window_entries`."""
    own = {"device": 0, "context": 1, "stream": 7, **args}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": own}  # fmt: skip


def counter(name: str, ts: float, args: object, pid: object = "GPU 0 Counters") -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": args}


EVENTS: list[Event] = [
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 9, "tid": 9, "ts": 1.0,
     "dur": 4.0, "args": {"cbid": 1, "correlation": 5}},
    on_gpu("kernel", "gemm", 10.0, 20.0, correlation=5, **{"graph id": 3, "graph node id": 11}),
    on_gpu("graph_host_node", "HostNode: log", 30.0, 15.0, correlation=5,
           **{"graph id": 3, "graph node id": 12}),
    on_gpu("graph_event_node", "EventRecord", 45.0, 0.0, correlation=5, **{"graph node id": 13}),
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 9, "tid": 9, "ts": 46.0,
     "dur": 1.0, "args": {"cbid": 2, "correlation": 6}},
    on_gpu("gpu_memcpy", "Memcpy", 50.0, 2.0, correlation=6, bytes=4000,
           **{"copy kind": "HtoD", "src kind": "pageable", "dst kind": "device"}),
    counter("SM Active (%)", 10.0, {"": 40.0}), counter("SM Active (%)", 20.0, {"": 60}),
    counter("Power (W)", 20.0, {"": 512.5}, "GPU 1 Counters"),
]  # fmt: skip


def write(path: Path, *others: Event) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*EVENTS, *others]}))
    return path


def test_counters_graph_nodes_and_copies_are_columns(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "trace.json"))
    counters = trace.gpu_counters.select("device", "name", "ts_ns", "value").rows()
    assert counters == [
        (0, "SM Active (%)", 10_000, 40.0), (0, "SM Active (%)", 20_000, 60.0),
        (1, "Power (W)", 20_000, 512.5),
    ]  # fmt: skip
    nodes = trace.graph_nodes.select("name", "dur_ns", "stream", "graph", "graph_node").rows()
    assert nodes == [("HostNode: log", 15_000, 7, 3, 12), ("EventRecord", 0, 7, None, 13)]
    assert trace.gpu.select("name", "graph", "graph_node").rows() == [
        ("gemm", 3, 11), ("Memcpy HtoD (Pageable -> Device)", None, None),
    ]  # fmt: skip
    assert trace.gpu["bandwidth_bytes_per_s"].to_list() == [None, 2e9]
    assert trace.report.not_used == {}
    kinds = TraceAnalysis(trace.path).memory_bandwidth_summary()["copy_kind"].to_list()
    assert kinds == ["Memcpy HtoD"]


def test_report_shows_counters_and_graph_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "trace.json")
    assert main(["trace", "report", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "SM Active (%) 2 50.0 40.0 60.0" in said
    assert "HostNode: log 1 15.0 µs" in said
    assert main(["trace", "query", str(path), "select max(value) from gpu_counters"]) == 0
    assert "512.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "odd",
    [
        counter("a", 1.0, {}), counter("a", 1.0, {"x": 1, "y": 2}), counter("a", 1.0, {"": "x"}),
        counter("a", 1.0, {"": None}), counter("a", 1.0, [1]), counter("a", 1.0, {"": 1}, "CPU"),
        counter("a", 1.0, {"": 1}, "GPU 99999999 Counters"), counter("a", 1.0, None),
    ],
)  # fmt: skip
def test_other_counters_are_counted_and_not_read(tmp_path: Path, odd: Event) -> None:
    trace = Trace(write(tmp_path / "trace.json", odd))
    assert trace.gpu_counters.height == 3
    assert trace.report.not_used == {"C": 1}
