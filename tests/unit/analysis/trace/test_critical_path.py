from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.critical_path import CriticalPath, critical_path, write_overlay
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import (
    FEW_TRACES,
    Event,
    event,
    kernel,
    launch,
    step,
    trace_of,
    trace_path,
    traces,
    write_trace,
)


def mark(name: str, ts_us: float, dur_us: float, **more: Any) -> Event:
    return event(name, "user_annotation", ts_us, dur_us, **more)


def op(name: str, ts_us: float, dur_us: float, **more: Any) -> Event:
    return event(name, "cpu_op", ts_us, dur_us, **more)


def call(name: str, ts_us: float, dur_us: float, **more: Any) -> Event:
    return event(name, "cuda_runtime", ts_us, dur_us, **more)


def causes(path: CriticalPath) -> dict[str, int]:
    """Microseconds by cause, without the causes that there are none of."""
    rows = path.summary().filter(pl.col("duration_ns") > 0)
    return {name: ns // 1000 for name, ns in rows.select("bound_by", "duration_ns").iter_rows()}


def names(path: CriticalPath) -> list[str | None]:
    return path.segments()["name"].to_list()


def check_covers(path: CriticalPath) -> None:
    """Segments touch, cover the window, and add up to it."""
    rows = path.segments()
    ends = rows["start_ns"] + rows["duration_ns"]
    assert rows["start_ns"][0] == path.start_ns
    assert ends[-1] == path.end_ns
    assert ends[:-1].to_list() == rows["start_ns"][1:].to_list()
    assert (rows["duration_ns"] > 0).all()
    assert rows["duration_ns"].sum() == path.length_ns == path.summary()["duration_ns"].sum()


def path_of(folder: Path, events: list[Event]) -> CriticalPath:
    """The path of what is marked as `window`."""
    path = critical_path(trace_of(folder, events), annotation="window")
    check_covers(path)
    return path


def test_host_bound_window_is_the_hosts(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 100), op("a", 10, 40), launch(1, 20, 5), op("b", 60, 30),
        launch(2, 70, 5), kernel("k1", 27, 3, correlation=1), kernel("k2", 77, 3, correlation=2),
    ])  # fmt: skip
    assert causes(path) == {"cpu_bound": 100}
    assert path.confidence == "recorded"
    assert names(path) == ["window", "a", "cudaLaunchKernel", "a", "window", "b",
                           "cudaLaunchKernel", "b", "window"]  # fmt: skip


def test_gpu_bound_window_ends_with_the_gpu(tmp_path: Path) -> None:
    """D18: the host runs ahead, and nothing in the trace waits."""
    path = path_of(tmp_path, [
        mark("window", 0, 30), launch(1, 10, 2), launch(2, 13, 2), launch(3, 16, 2),
        kernel("k1", 18, 50, correlation=1), kernel("ncclDevKernel_AllReduce", 70, 20,
                                                    correlation=2),
        kernel("Memcpy DtoD", 91, 9, correlation=3, category="gpu_memcpy"),
    ])  # fmt: skip
    assert path.end_ns - path.start_ns == 100_000
    assert causes(path) == {
        "cpu_bound": 10, "gpu_compute_bound": 50, "gpu_communication_bound": 20,
        "gpu_memory_bound": 9, "gpu_kernel_kernel_overhead": 3, "gpu_kernel_launch_overhead": 8,
    }  # fmt: skip
    assert any("longer than the window" in caveat for caveat in path.caveats)
    assert any("other ranks" in caveat for caveat in path.caveats)


@pytest.mark.parametrize("name", ["cudaDeviceSynchronize", "cudaStreamSynchronize",
                                  "hipDeviceSynchronize", "cudaEventSynchronize",
                                  "cudaMemcpy2D", "hipMemcpyWithStream"])  # fmt: skip
def test_sync_bound_window_goes_through_the_kernel_it_waits_for(tmp_path: Path, name: str) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 100), launch(1, 10, 5), kernel("k1", 18, 60, correlation=1),
        call(name, 16, 65), op("after", 85, 10),
    ])  # fmt: skip
    assert causes(path) == {"cpu_bound": 29, "gpu_compute_bound": 60, "synchronisation": 3,
                            "gpu_kernel_launch_overhead": 8}  # fmt: skip
    assert (path.confidence == "recorded") == ("Device" in name)


def test_sync_that_waits_for_nothing_is_its_own_time(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 50), launch(1, 5, 2), kernel("k", 10, 5, correlation=1),
        call("cudaDeviceSynchronize", 30, 10),
    ])  # fmt: skip
    assert causes(path) == {"cpu_bound": 40, "synchronisation": 10}


def test_copy_to_pageable_memory_blocks_its_call(tmp_path: Path) -> None:
    """cudaMemcpyAsync that returned after its copy waited; one that did not, did not."""
    path = path_of(tmp_path, [
        mark("window", 0, 100), launch(1, 5, 5), kernel("k1", 15, 60, correlation=1),
        launch(2, 12, 70, name="cudaMemcpyAsync"),
        kernel("Memcpy DtoH (Device -> Pageable)", 77, 2, correlation=2, category="gpu_memcpy"),
    ])  # fmt: skip
    assert causes(path) == {
        "cpu_bound": 23, "gpu_compute_bound": 60, "gpu_memory_bound": 2, "synchronisation": 3,
        "gpu_kernel_kernel_overhead": 2, "gpu_kernel_launch_overhead": 10,
    }  # fmt: skip


def two_streams(*, recorded: bool) -> list[Event]:
    wait = event("Stream Wait Event", "cuda_sync", 20, 1, pid=0, tid=20, correlation=9, device=0,
                 stream=20, cuda_sync_kind="Stream Wait Event", wait_on_stream=7)  # fmt: skip
    return [
        mark("window", 0, 40), launch(1, 5, 5), kernel("k1", 12, 80, correlation=1, stream=7),
        call("cudaStreamWaitEvent", 20, 1, correlation=9), launch(2, 25, 5),
        kernel("k2", 95, 30, correlation=2, stream=20), *([wait] if recorded else []),
    ]  # fmt: skip


@pytest.mark.parametrize("recorded", [True, False])
def test_stream_waits_for_an_event_of_another(tmp_path: Path, recorded: bool) -> None:
    path = path_of(tmp_path, two_streams(recorded=recorded))
    assert causes(path) == {"cpu_bound": 5, "gpu_compute_bound": 110, "synchronisation": 3,
                            "gpu_kernel_launch_overhead": 7}  # fmt: skip
    assert path.confidence == ("recorded" if recorded else "assumed")
    assert any("enable_cuda_sync_events" in caveat for caveat in path.caveats) is not recorded


def test_kernel_that_waits_for_nothing_recorded_is_unexplained(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 40), launch(1, 5, 5), launch(2, 11, 5),
        kernel("k1", 15, 10, correlation=1), kernel("k2", 1025, 30, correlation=2),
    ])  # fmt: skip
    assert causes(path)["unexplained"] == 1000
    assert path.confidence == "assumed"
    assert any("not in the trace" in caveat for caveat in path.caveats)


def test_backward_thread_is_followed(tmp_path: Path) -> None:
    forward = {"Sequence number": 3, "Fwd thread id": 0}
    gradient = {"Sequence number": 3, "Fwd thread id": 1}
    path = path_of(tmp_path, [
        mark("window", 0, 100), op("mul", 10, 20, **forward),
        op("MulBackward0", 40, 35, tid=2, **gradient), op("aten::mul", 45, 20, tid=2),
        op("step", 80, 15),
    ])  # fmt: skip
    rows = path.segments().select("name", "tid", "duration_ns").rows()
    assert rows == [
        ("window", 1, 10_000), ("mul", 1, 20_000), (None, 2, 10_000), ("MulBackward0", 2, 5000),
        ("aten::mul", 2, 20_000), ("MulBackward0", 2, 10_000), (None, 1, 5000),
        ("step", 1, 15_000), ("window", 1, 5000),
    ]  # fmt: skip
    assert path.confidence == "recorded"


def test_gradient_on_the_main_thread_starts_nothing_that_already_ran(tmp_path: Path) -> None:
    """A parameter on the CPU: its gradient is added by the caller of backward(), in between."""
    gradient = {"Sequence number": 3, "Fwd thread id": 1}
    path = path_of(tmp_path, [
        mark("window", 0, 100), op("mul", 10, 20, **{"Sequence number": 3, "Fwd thread id": 0}),
        op("MulBackward0", 40, 10, tid=2, **gradient), op("AccumulateGrad", 55, 3),
        op("ReluBackward0", 52, 8, tid=2), op("AddmmBackward0", 62, 10, tid=2), op("step", 80, 15),
    ])  # fmt: skip
    assert [name for name in names(path) if name] == [
        "window", "mul", "MulBackward0", "ReluBackward0", "AddmmBackward0", "step", "window"
    ]  # fmt: skip


def test_backward_thread_is_known_by_names_where_nothing_else_tells(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 100), op("mul", 10, 20), op("MulBackward0", 40, 35, tid=2),
        op("step", 80, 15),
    ])  # fmt: skip
    assert [name for name in names(path) if name] == [
        "window", "mul", "MulBackward0", "step", "window"
    ]  # fmt: skip
    assert path.confidence == "recorded"


def test_graph_launch_leads_to_all_its_kernels(tmp_path: Path) -> None:
    """D17: one launch, many kernels, on two streams."""
    path = path_of(tmp_path, [
        mark("window", 0, 30), launch(1, 10, 10, name="cudaGraphLaunch"),
        kernel("a", 22, 10, correlation=1), kernel("b", 33, 20, correlation=1),
        kernel("side", 55, 40, correlation=1, stream=8), kernel("c", 54, 10, correlation=1),
    ])  # fmt: skip
    gpu = path.segments().filter(pl.col("kind") == "kernel")["name"].to_list()
    assert gpu == ["a", "b", "side"]
    assert causes(path)["gpu_compute_bound"] == 70


def test_data_loading_is_told_apart(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 100),
        mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 50),
        op("aten::stack", 20, 10), op("model", 70, 20),
    ])  # fmt: skip
    assert causes(path) == {"cpu_bound": 50, "data_loading": 50}
    assert path.caveats == ("no GPU events in the trace: the path is the host's",)


def test_work_from_before_the_window_counts_from_its_start(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        launch(1, 5, 2), kernel("before", 10, 50, correlation=1), mark("window", 30, 20),
        launch(2, 32, 2), kernel("within", 61, 10, correlation=2),
    ])  # fmt: skip
    assert names(path) == ["before", "within", "within"]
    assert any("30.0 µs are GPU work" in caveat for caveat in path.caveats)


def test_kernel_before_its_launch_is_reported(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 20), launch(1, 10, 5), kernel("k", 8, 40, correlation=1),
    ])  # fmt: skip
    assert any("clocks" in caveat for caveat in path.caveats)


def test_launches_that_are_not_recorded_lead_to_the_main_thread(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [op("a", 0, 1000), kernel("k", 500, 700)])
    path = critical_path(trace)
    check_covers(path)
    assert causes(path) == {"cpu_bound": 500, "gpu_compute_bound": 700}
    assert path.confidence == "assumed"


def test_helper_thread_is_woken_by_the_main_one(tmp_path: Path) -> None:
    path = path_of(tmp_path, [
        mark("window", 0, 5000), op("main", 0, 5000), op("helper", 3000, 100, tid=9),
        launch(1, 3050, 5, tid=9), kernel("k", 3060, 4000, correlation=1),
    ])  # fmt: skip
    assert path.segments()["name"].to_list()[0] == "main"
    assert path.confidence == "assumed"


def test_steps_and_instances_select_windows(tmp_path: Path) -> None:
    marks = [mark(f"ProfilerStep#{n}", 100 * n, 90) for n in (3, 4, 5)]
    analysis = TraceAnalysis(write_trace(tmp_path / "rank0.json", [*marks, op("a", 310, 10)]))
    assert analysis.critical_path(steps=(3, 5)).length_ns == 190_000
    assert analysis.critical_path(annotation="ProfilerStep", instance=2).start_ns == 500_000
    assert analysis.critical_path(0, steps=(5, 6)).window == "profiler steps 5 to 5"
    with pytest.raises(MissingDataError, match="no step from 7 to before 9; it has 3 to 5"):
        analysis.critical_path(steps=(7, 9))
    with pytest.raises(MissingDataError, match="instance 3"):
        analysis.critical_path(annotation="ProfilerStep", instance=3)
    with pytest.raises(MissingDataError, match="rank 4"):
        analysis.critical_path(4)
    with pytest.raises(ValueError, match="not both"):
        analysis.critical_path(steps=(3, 5), annotation="x")


def test_mark_of_a_step_is_no_cause(tmp_path: Path) -> None:
    """It wraps all that a step does: what it alone covers is time outside of events."""
    trace = trace_of(tmp_path, [
        step(2, 0, 100), mark("forward", 10, 40), launch(1, 20, 5),
        kernel("k1", 30, 3, correlation=1), step(3, 100, 50),
    ])  # fmt: skip
    path = critical_path(trace, steps=(2, 3))
    check_covers(path)
    assert causes(path) == {"cpu_bound": 100}
    assert names(path) == [None, "forward", "cudaLaunchKernel", "forward", None]
    assert path.top().select("name", "kind", "duration_ns").row(0) == (None, None, 60_000)
    content = json.loads(gzip.decompress(write_overlay(trace, path).read_bytes()))["traceEvents"]
    marked = [each["name"] for each in content if each.get("args", {}).get("critical")]
    assert marked == ["forward", "cudaLaunchKernel"]


def test_empty_trace_has_no_path(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="no operators"):
        critical_path(trace_of(tmp_path, []))


def test_overlay_holds_every_event_and_the_path(tmp_path: Path) -> None:
    events = two_streams(recorded=True)
    events[0]["ts"] = 0.123456789012  # more digits than ns, to be kept as they are
    trace = trace_of(tmp_path, events, displayTimeUnit="ms")
    path = critical_path(trace, annotation="window")
    written = write_overlay(trace, path)
    content = json.loads(gzip.decompress(written.read_bytes()))
    count = len(events)
    assert content["displayTimeUnit"] == "ms"
    kept = content["traceEvents"][:count]
    marked = {one["name"] for one in kept if one["args"].pop("critical", None)}
    assert marked == {"window", "k1", "k2"}
    assert kept == events
    arrows = content["traceEvents"][count:]
    assert [(one["ph"], one["cat"], one["tid"], one["ts"]) for one in arrows] == [
        ("s", "critical_path", 1, 0.123), ("s", "critical_path", 7, 12.0),
        ("f", "critical_path", 7, 12.0), ("f", "critical_path", 20, 95.0),
    ]  # fmt: skip
    assert len({one["id"] for one in arrows}) == 2
    assert not list(tmp_path.glob(".*critical*"))
    assert trace_files(tmp_path) == [trace.path]
    again = critical_path(Trace(written), annotation="window")
    assert again.segments().equals(path.segments())


@pytest.mark.parametrize("folder", FEW_TRACES)
def test_path_covers_real_traces(folder: str) -> None:
    trace = Trace(trace_path(folder))
    check_covers(critical_path(trace))
    for start, end in trace.steps.select("step", after=pl.col("step") + 1).iter_rows():
        check_covers(critical_path(trace, steps=(start, end)))


def shares(path: CriticalPath) -> dict[str, float]:
    return dict(path.summary().select("bound_by", "share_ratio").iter_rows())


def hta(folder: str) -> dict[str, float]:
    """HTA's summary as ratios."""
    frame = pl.read_csv(traces("reference") / folder / "critical_path_summary.csv")
    return {name or "": share / 100 for name, share in frame.iter_rows()}


def within(path: CriticalPath, first_us: float, last_us: float, origin_ns: int) -> dict[str, float]:
    """Microseconds by cause between two times of HTA's clock, which begins with the trace."""
    low, high = origin_ns + round(first_us * 1000), origin_ns + round(last_us * 1000)
    end = pl.col("start_ns") + pl.col("duration_ns")
    cut = pl.min_horizontal(end, pl.lit(high)) - pl.max_horizontal("start_ns", pl.lit(low))
    rows = path.segments().with_columns(cut=cut).filter(pl.col("cut") > 0)
    sums = rows.group_by("bound_by").agg(pl.col("cut").sum())
    return {cause: ns / 1000 for cause, ns in sums.iter_rows()}


def begin_ns(trace: Trace) -> int:
    tables = (trace.ops, trace.runtime, trace.gpu, trace.annotations)
    return int(min(table["ts_ns"].to_numpy().min() for table in tables if table.height))


def test_gpu_bound_ns_trace_agrees_with_hta() -> None:
    """HTA's summary is of the second step; its path begins with that step's first kernel."""
    trace = Trace(trace_path("hta_nsres_v100_r0of1"))
    path = critical_path(trace, annotation="ProfilerStep", instance=1)
    ours = within(path, 101152.25, 196888.337, begin_ns(trace))
    theirs = hta("hta_nsres_v100_r0of1")
    total = sum(ours.values())
    on_gpu = ours["gpu_compute_bound"] + ours["gpu_memory_bound"]
    assert set(ours) == {"gpu_compute_bound", "gpu_memory_bound", "gpu_kernel_kernel_overhead"}
    assert on_gpu / total == pytest.approx(theirs["gpu_compute_bound"], abs=1e-6)
    assert ours["gpu_kernel_kernel_overhead"] / total == pytest.approx(
        theirs["gpu_kernel_kernel_overhead"], abs=1e-6
    )


def test_simple_add_agrees_with_hta_where_syncs_are_recorded() -> None:
    """Copies are gpu_compute_bound in HTA, with 506 us of kernels that nobody waited for."""
    trace = Trace(trace_path("hta_cp_simple_add_a100"))
    path = critical_path(trace, annotation="[param|cuda]")
    ours, theirs = shares(path), hta("hta_cp_simple_add_a100")
    assert path.confidence == "recorded"
    assert causes(path)["gpu_memory_bound"] == pytest.approx(39588 - 506, abs=2)
    assert "gpu_compute_bound" not in causes(path)
    assert ours["cpu_bound"] == pytest.approx(theirs["cpu_bound"], abs=1e-4)


def test_near_tie_of_host_and_gpu_is_told() -> None:
    trace = Trace(trace_path("hta_diff_control_a100_r3of8"))
    path = critical_path(trace, annotation="ProfilerStep", instance=1)
    assert "the GPU was done only 14.0 µs before the host: its work is almost as critical" in (
        path.caveats
    )


def test_v100_is_not_cpu_bound_as_hta_says() -> None:
    """D18: the GPU is busy 92.5 % of the time; HTA says 100 % cpu_bound."""
    trace = Trace(trace_path("hta_diff_test_v100_r1of2"))
    assert hta("hta_diff_test_v100_r1of2")["cpu_bound"] == 1
    path = critical_path(trace, steps=(1009, 1015))
    ours = shares(path)
    assert ours["cpu_bound"] < 0.075  # no more than the GPU is idle
    assert path.confidence == "assumed"
    assert any("enable_cuda_sync_events" in caveat for caveat in path.caveats)
