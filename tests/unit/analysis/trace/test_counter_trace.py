from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import HaiprofError
from haiprof.trace_analysis.launches import (
    COUNTERS,
    memory_bandwidth,
    queue_length,
    write_counter_trace,
)
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import event, kernel, launch, trace_of, traces, write_trace


def read_back(path: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(gzip.decompress(Path(path).read_bytes()))
    return content


@pytest.mark.parametrize("name", first_of(
    ["dlrm_v100_8ranks", "hta_nsres_v100_r0of1", "tb_resnet50_nw0_v100", "tl_b200_r0of8_nccl",
     "tl_h100_qwen05_mem_stack", "tl_mi300_ddp_resnet18"], "tl_h100_qwen05_mem_stack",
))  # fmt: skip
def test_a_real_trace_keeps_every_event_and_gains_counters(name: str, tmp_path: Path) -> None:
    trace = Trace(trace_files(traces(name))[0])
    written = write_counter_trace(trace, folder=tmp_path).row(0, named=True)
    new, old = read_back(written["path"]), read_back(trace.path)
    count = len(old["traceEvents"])
    assert new["traceEvents"][:count] == old["traceEvents"]
    assert new | {"traceEvents": 0} == old | {"traceEvents": 0}
    added = new["traceEvents"][count:]
    assert len(added) == written["counter_event_count"] > 0
    assert {each["ph"] for each in added} == {"C"}
    assert all(len(each["args"]) == 1 for each in added)
    assert len(added) == len(queue_length(trace)) + len(memory_bandwidth(trace))


def test_counters_are_in_us_to_the_ns_and_in_the_process_of_their_gpu(tmp_path: Path) -> None:
    events = [
        launch(1, 1.001, name="cudaMemcpyAsync"),
        kernel("Memcpy HtoD", 2.25, 1, correlation=1, device=3, category="gpu_memcpy", bytes=2000),
    ]
    trace = trace_of(tmp_path, events, displayTimeUnit="ms")
    written = write_counter_trace(trace).row(0, named=True)
    assert Path(written["path"]) == tmp_path / "trace_with_counters.json.gz"
    content = read_back(written["path"])
    assert content["displayTimeUnit"] == "ms"
    added = content["traceEvents"][2:]
    assert {(each["ph"], each["pid"]) for each in added} == {("C", 3)}
    assert [(each["name"], each["ts"], each["args"]) for each in added] == [
        ("Queue length, stream 7", 1.001, {"launches": 1}),
        ("Queue length, stream 7", 2.25, {"launches": 0}),
        ("Bandwidth of Memcpy HtoD", 2.25, {"GB/s": 2.0}),
        ("Bandwidth of Memcpy HtoD", 3.25, {"GB/s": 0.0}),
    ]


def test_one_kind_of_counter_alone(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [launch(1, 0), kernel("a", 2, 1, correlation=1)])
    assert write_counter_trace(trace, counters=COUNTERS[:1])["counter_event_count"].item() == 2
    assert write_counter_trace(trace, counters=COUNTERS[1:])["counter_event_count"].item() == 0
    with pytest.raises(ValueError, match="no counters"):
        write_counter_trace(trace, counters=("temperature",))


def test_a_cut_off_trace_is_closed(tmp_path: Path) -> None:
    whole = write_trace(tmp_path / "a.json", [launch(1, 0), kernel("a", 2, 1, correlation=1)])
    text = whole.read_text()
    whole.write_text(text[: text.rindex("}]")] + '}, {"ph": "X", "name": "half')
    written = write_counter_trace(Trace(whole))
    assert len(read_back(written["path"].item())["traceEvents"]) == 4


@pytest.mark.parametrize("text", ['{"traceEvents": []}', '{"a": [{"b": 1}], "traceEvents": [ ]}'])
def test_a_trace_without_events_stays_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    written = write_counter_trace(Trace(path))
    assert read_back(written["path"].item()) == json.loads(text)


def test_values_that_are_no_json_are_taken_out(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.json", [event("op", "cpu_op", 0, 1, loss=1), launch(1, 2)])
    path.write_bytes(
        path.read_bytes().replace(b'"loss": 1', b'"loss": NaN').replace(b"op", b"\xff")
    )
    content = read_back(write_counter_trace(Trace(path))["path"].item())
    assert content["traceEvents"][0]["args"]["loss"] is None


def test_a_folder_of_traces_ignores_those_with_counters(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank0.json", [event("op", "cpu_op", 0, 1)])
    write_counter_trace(Trace(path))
    assert trace_files(tmp_path) == [path]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event("op", "cpu_op", 0, 1)])
    with pytest.raises(HaiprofError, match="missing/trace_with_counters"):
        write_counter_trace(trace, folder=tmp_path / "missing")


def test_objects_in_lists_around_the_events_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    content = {
        "before": [{"a": 1}], "traceEvents": [event("op", "cpu_op", 0, 1, dims=[{"b": 2}], more=3)],
        "deviceProperties": [{"id": 0}, {"id": 1, "name": "H100"}], "nodes": [{"c": [{"d": 4}]}],
    }  # fmt: skip
    path.write_text(json.dumps(content, indent=1))
    assert read_back(write_counter_trace(Trace(path))["path"].item()) == content
