"""Modules by their place in the tree, forward and backward, against what was recorded."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from tests.commands import Run
from tests.unit.analysis.trace.shared import (
    FEW_TRACES,
    event,
    kernel,
    launch,
    rank_file,
    step,
    traces,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One layer in a model, its backward pass on another thread, and an optimizer."""
    forward = {"Sequence number": 7, "Fwd thread id": 0}
    backward = {"Sequence number": 7, "Fwd thread id": 1}
    rank_file(tmp_path, 0, [
        step(4, 0, 400),
        event("nn.Module: Model_0", "python_function", 10, 90),
        event("nn.Module: Linear_0", "python_function", 20, 50),
        event("aten::mm", "cpu_op", 25, 20, **forward),
        launch(1, 30), kernel("gemm", 60, 11, correlation=1),
        launch(2, 80), kernel("loss", 90, 5, correlation=2),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 120, 40, tid=9,
              **backward),
        launch(3, 130, tid=9), kernel("gemm_backward", 140, 23, correlation=3),
        event("Optimizer.step#SGD.step", "user_annotation", 200, 60),
        launch(4, 210), kernel("sgd", 220, 7, correlation=4),
        launch(5, 300), kernel("other", 310, 3, correlation=5),
    ])  # fmt: skip
    return tmp_path


def test_modules_have_self_and_total_time_forward_and_backward(model: Path) -> None:
    found = TraceAnalysis(model).module_times()
    rows = {row["path"]: row for row in found.iter_rows(named=True)}
    assert list(rows) == ["Model_0", "Model_0/Linear_0", "Optimizer.step#SGD.step", None]
    times = ("host_self_ns", "host_ns", "device_self_ns", "device_ns", "backward_device_self_ns",
             "backward_device_ns", "backward_host_ns")  # fmt: skip
    us = {path: tuple(row[name] // 1000 for name in times) for path, row in rows.items()}
    assert us["Model_0"] == (40, 90, 5, 16, 0, 23, 40)
    assert us["Model_0/Linear_0"] == (50, 50, 11, 11, 23, 23, 40)
    assert us["Optimizer.step#SGD.step"] == (60, 60, 7, 7, 0, 0, 0)
    assert us[None] == (0, 0, 3, 3, 0, 0, 0)


def test_the_stop_of_the_profiler_is_no_time_of_what_ran_when_it_stopped(tmp_path: Path) -> None:
    optimizer = "Optimizer.step#SGD.step"
    rank_file(tmp_path, 0, [
        step(4, 0, 100),
        event(optimizer, "user_annotation", 90, 11),  # its hook ends the step
        event("elsewhere", "user_annotation", 180, 1000, tid=9),
        step(5, 100, 100),
        event(optimizer, "user_annotation", 190, 1000),
        event("optimizer", "gpu_user_annotation", 195, 30, pid=0, tid=1),
        event("stop", "user_annotation", 300, 600),
    ])  # fmt: skip
    analysis = TraceAnalysis(tmp_path)
    ranges = analysis.traces[0].annotations.filter(~pl.col("name").cast(str).str.contains("#4|#5"))
    assert ranges.select(pl.col("name").cast(str), pl.col("dur_ns") // 1000).rows() == [
        (optimizer, 11), ("elsewhere", 1000), (optimizer, 10), ("optimizer", 30), ("stop", 600),
    ]  # fmt: skip
    of_modules = analysis.module_times().filter(pl.col("path") == optimizer)
    assert of_modules["host_ns"].to_list() == [21_000]


@pytest.mark.parametrize("name", FEW_TRACES)
def test_self_times_add_up_to_all_gpu_time(name: str) -> None:
    analysis = TraceAnalysis(traces(name))
    if name == "tb_resnet50_nw0_v100":  # it has neither modules nor ranges
        with pytest.raises(MissingDataError, match="no module"):
            analysis.module_times()
        return
    found = analysis.module_times()
    own = found.group_by("rank").agg(
        (pl.col("device_self_ns") + pl.col("backward_device_self_ns")).sum()
    )
    for rank, sum_ns in own.iter_rows():
        assert sum_ns == analysis.traces[rank].gpu["dur_ns"].sum()


def test_backward_kernels_of_a_real_model_stand_under_their_layers() -> None:
    found = TraceAnalysis(traces("tl_mi300_ddp_resnet18")).module_times()
    model = found.filter(pl.col("path") == "ResNet_0").row(0, named=True)
    outside = found.filter(pl.col("path").is_null()).row(0, named=True)
    assert model["backward_device_ns"] > model["device_ns"] > 0
    assert outside["backward_device_self_ns"] < 0.001 * model["backward_device_ns"]


def test_the_command_shows_the_tree_and_its_classes(model: Path, run: Run) -> None:
    shown = run("modules", model).out
    assert "· Linear_0" in shown
    assert "By class, self time" in shown
    assert "6.1 % of GPU time was launched outside" in shown
    found = run("modules", model, "--depth", "1", "--json").data
    assert found["modules"][1]["path"] == "Model_0/Linear_0"


def test_shares_on_the_host_are_of_all_the_time_that_was_traced(tmp_path: Path, run: Run) -> None:
    """A job that sleeps for two thirds of its step is not one that spends it in its model."""
    events = [
        step(1, 0, 1000),
        event("nn.Module: Linear_0", "python_function", 50, 300, **{"Python id": 1}),
        event("aten::mm", "cpu_op", 60, 200, **{"Sequence number": 7}),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 400, 100,
              **{"Sequence number": 7, "Fwd thread id": 1}),
    ]  # fmt: skip
    rank_file(tmp_path, 0, events, world_size=1)
    out = run("modules", tmp_path).out
    (row,) = (line.split() for line in out.splitlines() if line.split()[:1] == ["Linear_0"])
    assert row[1:] == ["1", "300", "µs", "100", "µs", "300", "µs", "40", "%"]
    assert "60 % of the traced time is in none of these" in out


def test_a_trace_without_modules_says_what_to_record(tmp_path: Path, run: Run) -> None:
    rank_file(tmp_path, 0, [event("aten::mm", "cpu_op", 0, 20)])
    assert "with_modules=True" in run("modules", tmp_path, status=5).err
    assert (
        "5046 kernels, is of CUDA graphs" in run("modules", traces("hta_diff_test_v100_r1of2")).said
    )


def test_memory_at_peak_by_module_adds_up_to_the_peak(run: Run) -> None:
    folder = traces("tl_h100_qwen05_mem_stack")
    found = TraceAnalysis(folder).memory_at_peak_by_module()
    gpu = found.filter(pl.col("device_type") == "cuda")
    assert gpu["size_bytes"].sum() == gpu["peak_bytes"][0]
    assert gpu["module"].str.starts_with("Linear_").any()
    shown = run("memory-timeline", folder).out
    assert "Alive at the peak of rank 0, cuda 0, by class of module" in shown
    assert "Linear " in shown.partition("by class of module")[2]


def test_kernels_of_a_cuda_graph_count_for_the_part_that_launched_it(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [
        event("nn.Module: Model_0", "python_function", 10, 90),
        event("cudaGraphLaunch", "cuda_runtime", 30, 5, correlation=1),
        kernel("gemm", 60, 11, correlation=1), kernel("relu", 72, 2, correlation=1),
        launch(2, 80), kernel("loss", 90, 5, correlation=2),
    ])  # fmt: skip
    (row,) = TraceAnalysis(tmp_path).module_times().rows(named=True)
    assert (row["path"], row["device_self_ns"]) == ("Model_0", 18_000)
    assert (row["graph_kernel_count"], row["graph_device_self_ns"]) == (2, 13_000)
