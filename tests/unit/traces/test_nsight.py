"""Exports of Nsight Systems and traces of the CUPTI collector: in the columns of Kineto."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import TraceFormatError
from haiprof.trace_analysis.attribution import kernel_operators
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.commands import Run

ACTIVITY = "CUPTI_ACTIVITY_KIND_"
PROCESS = 281476838981632
KERNEL = "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName, " \
         "gridX, gridY, gridZ, blockX, blockY, blockZ, graphNodeId"  # fmt: skip
TABLES = {
    "StringIds": "id, value",
    f"{ACTIVITY}KERNEL": KERNEL,
    f"{ACTIVITY}MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, bytes, "
                         "copyKind, srcKind, dstKind",
    f"{ACTIVITY}RUNTIME": "start, end, globalTid, correlationId, nameId",
    "NVTX_EVENTS": "start, end, eventType, text, globalTid, textId",
    "OSRT_API": "start, end, globalTid, nameId",
    "GPU_METRICS": "timestamp, typeId, metricId, value",
    "TARGET_INFO_GPU_METRICS": "typeId, metricId, metricName",
    "CUDNN_EVENTS": "start, end",
    "TARGET_INFO_GPU": "id, name, cuDevice",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs, systemClockNs",
}  # fmt: skip
GEMM = "void <unnamed>::gemm<(int)4, float>(float *, int)"
ROWS: dict[str, list[tuple[Any, ...]]] = {
    "StringIds": [(1, GEMM), (2, "gemm"), (3, "cudaLaunchKernel_v7000"),
                  (4, "cudaMemcpyAsync_v3020"), (5, "poll"), (6, "forward")],
    f"{ACTIVITY}KERNEL": [
        (2000, 5000, 0, 7, 11, PROCESS, 1, 2, 8, 1, 1, 128, 1, 1, 0),
        (6000, 9000, 1, 7, 11, PROCESS + (1 << 24), 1, 2, 8, 1, 1, 128, 1, 1, 0),
    ],
    f"{ACTIVITY}MEMCPY": [(9500, 9600, 0, 7, 12, PROCESS, 400, 1, 0, 2)],
    f"{ACTIVITY}RUNTIME": [
        (1000, 1500, PROCESS + 111, 11, 3), (3000, 3500, PROCESS + (1 << 24) + 9, 11, 3),
        (9100, 9200, PROCESS + 111, 12, 4),
    ],
    "NVTX_EVENTS": [
        (900, 1600, 59, "aten::mm, seq = 5, op_id = 9, sizes = [[64, 64], [64, 64]]",
         PROCESS + 111, None),
        (800, 9300, 59, "step 3", PROCESS + 111, None),
        (850, 1700, 60, None, PROCESS + 111, 6),
        (870, None, 34, "a mark", PROCESS + 111, None),
    ],
    "OSRT_API": [(1600, 1900, PROCESS + 111, 5), (10, 20, PROCESS + 7, 5)],
    "GPU_METRICS": [(2000, 1 << 44, 3, 40.0), (3000, 1 << 44, 3, 60.0)],
    "TARGET_INFO_GPU_METRICS": [(1 << 44, 3, "SM Active")],
    "CUDNN_EVENTS": [(1, 2)],
    "TARGET_INFO_GPU": [(0, "NVIDIA H100 80GB HBM3", 0)],
    "TARGET_INFO_SESSION_START_TIME": [(1_000_000_000, 500)],
}  # fmt: skip


def as_sqlite(path: Path) -> Path:
    file = sqlite3.connect(path)
    for name, columns in TABLES.items():
        quoted = columns.replace("end,", '"end",').replace(" end", ' "end"')
        file.execute(f"CREATE TABLE {name} ({quoted})")
        marks = ", ".join("?" * len(columns.split(",")))
        file.executemany(f"INSERT INTO {name} VALUES ({marks})", ROWS[name])
    file.commit()
    file.close()
    return path


def as_parquet(path: Path) -> Path:
    path.mkdir()
    for name, columns in TABLES.items():
        names = columns.split(", ")
        frame = pl.DataFrame(ROWS[name], schema=names, orient="row")
        frame.write_parquet(path / f"{name}.parquet")
    return path


FORMS = {"report.sqlite": as_sqlite, "report_pqtdir": as_parquet}


@pytest.fixture(params=FORMS)
def export(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FORMS[request.param](tmp_path / request.param)


def test_an_export_has_the_columns_of_a_trace(export: Path) -> None:
    trace = Trace(export)
    gpu = trace.gpu.select("name", "category", "ts_ns", "dur_ns", "device", "stream", "grid")
    assert gpu.rows() == [
        ("void (anonymous namespace)::gemm<(int)4, float>(float *, int)", "kernel", 2000, 3000,
         0, 7, "[8, 1, 1]"),
        ("void (anonymous namespace)::gemm<(int)4, float>(float *, int)", "kernel", 6000, 3000,
         1, 7, "[8, 1, 1]"),
        ("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 9500, 100, 0, 7, None),
    ]  # fmt: skip
    assert trace.gpu["bandwidth_bytes_per_s"].to_list() == [None, None, 4e9]
    names = trace.runtime.select("name", "tid").rows()
    assert names == [("cudaLaunchKernel", 111), ("cudaLaunchKernel", 9), ("cudaMemcpyAsync", 111)]
    assert trace.ops.select("name", "sequence_number", "input_dims").rows() == [
        ("aten::mm", 5, "[[64, 64], [64, 64]]")
    ]
    assert trace.annotations["name"].cast(str).to_list() == ["ProfilerStep#3", "forward"]
    assert trace.steps["step"].to_list() == [3]
    assert trace.metadata["baseTimeNanoseconds"] == 1_000_000_000 - 500
    assert trace.report.not_used == {"CUDNN_EVENTS": 1}
    calls = trace.os_calls.select("name", "ts_ns", "dur_ns", "tid").rows()
    assert calls == [("poll", 10, 10, 7), ("poll", 1600, 300, 111)]
    counters = trace.gpu_counters.select("name", "ts_ns", "device", "value").rows()
    assert counters == [("SM Active", 2000, 0, 40.0), ("SM Active", 3000, 0, 60.0)]


def test_correlations_of_processes_are_told_apart(export: Path) -> None:
    """Both processes launch their kernel as number 11: the second one in no operator."""
    found = kernel_operators(Trace(export)).select("operator", "call", "launch_delay_ns")
    assert found.rows() == [
        ("aten::mm", "cudaLaunchKernel", 500), (None, "cudaLaunchKernel", 2500),
        (None, "cudaMemcpyAsync", 300),
    ]  # fmt: skip


def test_the_questions_of_traces_answer_of_an_export(export: Path, run: Run) -> None:
    temporal = TraceAnalysis(export).temporal_breakdown()
    assert temporal.select("device", "compute_ns").rows() == [(0, 3000), (1, 3000)]
    found = run("verdict", export, "--json").data
    assert found["device_name"] == "NVIDIA H100 80GB HBM3"
    assert found["linked_count"] == found["gpu_event_count"] == 3
    for command in ("trace-report", "trace-check", "critical-path"):
        assert run(command, export, status=None).status == 0, command


def test_another_database_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE things (id)")
    with pytest.raises(TraceFormatError, match="an export without CUDA activity"):
        _ = Trace(path).gpu


@pytest.mark.parametrize(("name", "content", "said"), [
    ("report.nsys-rep", b"\x00\x01binary", "nsys export --type sqlite"),
    ("host.xplane.pb", b"\x0a\x93\x02/host:CPU", "XPlane of JAX"),
    ("results.json", b'{"rocprofiler-sdk-tool": [{}]}', "rocprofv3"),
    ("snapshot.pickle", b"\x80\x04\x95", "trace memory"),
    ("jax.trace.json", json.dumps({"traceEvents": [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "X", "pid": 1, "tid": 2, "ts": 1.0, "dur": 2.0, "name": "fusion.3"},
    ]}).encode(), "JAX"),
])  # fmt: skip
def test_what_is_not_read_is_refused_by_the_name_of_its_format(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceFormatError) as caught:
        _ = Trace(path).gpu
    assert said in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("name", FORMS)
def test_damaged_export_is_one_error_that_names_it(name: str, tmp_path: Path, run: Run) -> None:
    path = FORMS[name](tmp_path / name)
    files = [path] if path.is_file() else [path / f"{ACTIVITY}KERNEL.parquet"]
    whole = files[0].read_bytes()
    for content in (whole[: len(whole) // 2], whole[:200], b""):
        files[0].write_bytes(content)
        error = run("trace-report", path, status=4).err
        assert str(path) in error
        assert "internal error" not in error


def test_folder_with_an_export_in_parquet_is_read(tmp_path: Path) -> None:
    as_parquet(tmp_path / "report_pqtdir")
    assert TraceAnalysis(tmp_path).os_calls()["name"].to_list() == ["poll", "poll"]


@pytest.mark.parametrize("columns", ["start, correlationId", "start, end, name"])
def test_tables_without_their_columns_are_one_error(tmp_path: Path, columns: str) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE StringIds (id, value)")
        quoted = columns.replace("end", '"end"')
        file.execute(f"CREATE TABLE {ACTIVITY}KERNEL ({quoted})")
        file.execute(
            f"INSERT INTO {ACTIVITY}KERNEL VALUES ({', '.join('1' * (columns.count(',') + 1))})"
        )
    with pytest.raises(TraceFormatError, match="not an export of Nsight Systems"):
        _ = Trace(path).gpu


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


def test_report_shows_counters_and_graph_nodes(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "trace.json")
    said = run("trace", "report", path).said
    assert "SM Active (%) 2 50.0 40.0 60.0" in said
    assert "HostNode: log 1 15.0 µs" in said
    assert "512.5" in run("trace", "query", path, "select max(value) from gpu_counters").out


@pytest.mark.parametrize("odd", [
    counter("a", 1.0, {}), counter("a", 1.0, {"x": 1, "y": 2}), counter("a", 1.0, {"": "x"}),
    counter("a", 1.0, {"": None}), counter("a", 1.0, [1]), counter("a", 1.0, {"": 1}, "CPU"),
    counter("a", 1.0, {"": 1}, "GPU 99999999 Counters"), counter("a", 1.0, None),
])  # fmt: skip
def test_other_counters_are_counted_and_not_read(tmp_path: Path, odd: Event) -> None:
    trace = Trace(write(tmp_path / "trace.json", odd))
    assert trace.gpu_counters.height == 3
    assert trace.report.not_used == {"C": 1}
