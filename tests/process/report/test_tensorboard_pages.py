"""torch-tb-profiler under haiprof: our own analysis' numbers, in a browser without network."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import polars as pl
import pytest

from haiprof.compat.torch_profiler.normalize import Exact, normalise_trace
from haiprof.compat.torch_profiler.pages import Pages
from haiprof.compat.torch_profiler.patches import patch_parsing, with_counters
from haiprof.show.servers import new_access
from haiprof.trace_analysis.attribution import operator_kernels
from haiprof.trace_analysis.step_time import CAUSES, step_time_breakdown
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.browser import Page
from tests.process.live import within
from tests.sampling import first_of
from tests.served import served
from tests.unit.analysis.trace.shared import event, kernel, launch, step, traces

pytest.importorskip("torch_tb_profiler", reason="pip install 'haiprof[torch-tb-profiler]'")

PLUGIN = "data/plugin/pytorch_profiler/"
WITH_STEPS = ("tl_h100_qwen05_mem_stack", "hta_nsres_v100_r0of1", "dlrm_v100_8ranks")
ALL = (*WITH_STEPS, "tl_mi300_ddp_resnet18")


def plugin_numbers(path: str) -> dict[str, Any]:
    """What the patched plugin computes of a trace; in a process of its own."""
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    data = RunProfileData.parse("rank0_host", None, path, "")
    profile = RunGenerator("rank0_host", None, data).generate_run_profile()
    return {
        "steps": dict(zip(data.steps_names, (c.costs for c in data.steps_costs), strict=True)),
        "operators": {row["name"]: row for row in profile.operation_table_by_name["data"]},
        "kernels": {row[0]: row for row in profile.kernel_table["data"]["rows"]},
    }


@pytest.mark.parametrize("name", first_of(ALL, "tl_h100_qwen05_mem_stack"))
def test_the_plugins_numbers_are_those_of_our_analysis(name: str) -> None:
    path = trace_files(traces(name))[0]
    with multiprocessing.get_context("spawn").Pool(1, initializer=patch_parsing) as pool:
        numbers, trace = pool.apply(plugin_numbers, (str(path),)), Trace(path)
    check_operators(numbers, trace)
    check_kernels(numbers, trace)
    if name in WITH_STEPS:  # without, the plugin's one step ends with the last operator
        check_steps(numbers, trace)


def check_operators(numbers: dict[str, Any], trace: Trace) -> None:
    """By the time that they have on the device."""
    ours = operator_kernels(trace).drop_nulls("operator")
    assert set(ours["operator"]) == set(numbers["operators"])
    assert ours["gpu_self_ns"].sum() > 1_000_000
    for row in ours.iter_rows(named=True):
        theirs = numbers["operators"][row["operator"]]
        # The table has whole microseconds.
        assert theirs["device_self_duration"] == pytest.approx(row["gpu_self_ns"] / 1e3, abs=0.6)
        assert theirs["calls"] <= row["call_count"]
        # An operator inside one of the same name counts twice there, once here.
        assert theirs["device_total_duration"] >= row["gpu_total_ns"] / 1e3 - 0.6


def check_steps(numbers: dict[str, Any], trace: Trace) -> None:
    ours = {str(row["step"]): row for row in
            step_time_breakdown(trace, gpu_tail=True).iter_rows(named=True)}  # fmt: skip
    assert list(ours) == list(numbers["steps"])
    for number, costs in numbers["steps"].items():
        wanted = [(ours[number][f"{cause}_ns"] or 0) / 1e3 for cause in (*CAUSES, "other")]
        # Ends are rounded to 1/1024 us; a sum over intervals has as many roundings.
        assert costs == pytest.approx([*wanted, ours[number]["wall_ns"] / 1e3], abs=0.05)


def check_kernels(numbers: dict[str, Any], trace: Trace) -> None:
    gpu = trace.gpu.with_columns(pl.col("name", "category").cast(pl.String))
    own = gpu.filter(pl.col("category").str.to_lowercase() == "kernel").group_by("name")
    ours = own.agg(count=pl.len(), sum_us=pl.col("dur_ns").sum() / 1e3)
    assert ours.height == len(numbers["kernels"])
    for row in ours.iter_rows(named=True):
        theirs = numbers["kernels"][row["name"]]
        assert theirs[2] == row["count"]
        assert theirs[3] == pytest.approx(row["sum_us"], abs=0.6)


def loaded(*events: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        json.dumps({**metadata, "traceEvents": events}), parse_float=Exact
    )
    return found


def by_name(trace: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in normalise_trace(trace).trace["traceEvents"]}


def test_a_launch_belongs_to_the_operator_around_it_whatever_its_id_says() -> None:
    found = by_name(
        loaded(
            event("aten::mm", "cpu_op", 10, 20, **{"External id": 5}),
            launch(77, 12, **{"External id": 77}),  # the correlation, as Kineto wrote in 2023
            kernel("gemm", 40, 5, correlation=77),
        )
    )
    operator = found["aten::mm"]["args"]["External id"]
    assert found["cudaLaunchKernel"]["args"]["External id"] == operator
    assert found["gemm"]["args"]["External id"] == operator
    assert found["cudaLaunchKernel"]["cat"] == "Runtime"


def test_a_child_whose_digits_end_after_its_parents_stays_inside() -> None:
    text = (
        '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "parent", "pid": 1, "tid": 1,'
        ' "ts": 1712195495519689.125, "dur": 10.001, "args": {}},'
        ' {"ph": "X", "cat": "cpu_op", "name": "child", "pid": 1, "tid": 1,'
        ' "ts": 1712195495519691.117, "dur": 8.010, "args": {}}]}'
    )
    parent, child = normalise_trace(json.loads(text, parse_float=Exact)).trace["traceEvents"]
    assert child["ts"] + child["dur"] == parent["ts"] + parent["dur"]
    assert child["ts"] - parent["ts"] == pytest.approx(1.992, abs=0.001)


def test_steps_loaders_and_python_functions_are_what_they_are_for_the_plugin() -> None:
    function = event("torch/profiler/profiler.py(1): step", "python_function", 0, 15)
    found = by_name(loaded(function, step(6, 10, 100), event("aten::mm", "cpu_op", 50, 5)))
    assert found["ProfilerStep#6"]["dur"] == 100, "it begins inside a function, and is whole"
    assert list(found) == ["ProfilerStep#6", "aten::mm"]
    wait = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    found = by_name(
        loaded(event(wait, "user_annotation", 0, 5), event("load", "user_annotation", 5, 5))
    )
    assert [found[wait]["cat"], found["load"]["cat"]] == ["Operator", "Python"]
    outer = event("train.py(3): main", "python_function", 0, 100)
    inner = event("model.py(7): forward", "python_function", 10, 50)
    found = by_name(loaded(outer, inner, event("aten::mm", "cpu_op", 20, 5)))
    assert found["aten::mm"]["args"]["Call stack"] == "model.py(7): forward;train.py(3): main"
    gpu = loaded(deviceProperties=[{"id": 0, "name": "<img src=x onerror=alert(1)>"}])
    assert "<" not in normalise_trace(gpu).trace["deviceProperties"][0]["name"]


@pytest.mark.parametrize(
    "odd",
    [
        3, None, "x", {}, {"ph": "X"}, {"ph": "X", "name": 1, "ts": 1},
        {"ph": "i", "name": "[memory]"},
        event("op", "cpu_op", 1, 1, tid="a thread"), kernel("k", 1, 1, device=10**9),
        {**event("op", "cpu_op", 1, 1), "args": 7}, {**event("op", "cpu_op", 1, 1), "ts": 1e300},
        {**event("op", "cpu_op", 1, 1), "dur": "long"},
    ],
)  # fmt: skip
def test_odd_events_cost_nothing_but_themselves(odd: Any) -> None:
    found = by_name({"traceEvents": [odd, event("aten::mm", "cpu_op", 10, 20)]})
    assert found["aten::mm"]["dur"] == 20


@pytest.mark.parametrize("trace", ['{"a": [1], "traceEvents": [%s], "b": [2]}', "[%s]"])
def test_counters_are_put_among_the_events(trace: str) -> None:
    text = (trace % '{"name": "x"}').encode()
    found = json.loads(gzip.decompress(with_counters(text, ['{"name": "util"}'])))
    events = found["traceEvents"] if isinstance(found, dict) else found
    assert "x" in [one["name"] for one in events]
    if isinstance(found, dict):
        assert [one["name"] for one in events] == ["util", "x"]
        assert (found["a"], found["b"]) == ([1], [2])


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:6006", "200"), ("localhost:6006", "200"), ("[::1]:6006", "200"),
     ("evil.example:6006", "403"), ("127.0.0.1.evil.example", "403"), ("", "403")],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(host: str, status: str) -> None:
    answers: list[str] = []

    def start(answer: str, *_: object) -> None:
        answers.append(answer)

    def app(_environ: dict[str, Any], begin: Callable[..., Any]) -> list[bytes]:
        begin("200 OK", [])
        return []

    access = new_access("127.0.0.1", 6006, is_open=True)
    Pages(app, static=None, access=access)({"HTTP_HOST": host, "PATH_INFO": "/"}, start)
    assert answers[0].startswith(status)


def ready(url: str, page: Page) -> None:
    """Waits until the plugin has read the traces; its page asks only once."""
    page.wait(f"fetch('{url}{PLUGIN}runs').then(r => r.json()).then(r => r.runs.length > 0)")


def shown_rows(page: Page) -> list[list[str]]:
    rows: list[list[str]] = page.run(
        "[...document.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    return rows


def go_to(page: Page, current: str, view: str) -> None:
    page.click(".MuiSelect-root", current)
    page.click("li[role=option]", view)


@pytest.mark.proof
@pytest.mark.slow
def test_overview_operator_and_trace_pages_without_network(
    browser: Callable[[str], Page], tmp_path: Path
) -> None:
    path = trace_files(traces("tl_h100_qwen05_mem_stack"))[0]
    shots = Path(os.environ.get("HAIPROF_SCREENSHOTS") or tmp_path)
    with served("tensorboard", path, "--port", "0") as running:
        page = browser(running.url)
        ready(running.url, page)
        page.open(running.url + PLUGIN + "index.html")
        page.wait_text("Step Time Breakdown")
        trace = Trace(path)
        ours = step_time_breakdown(trace, gpu_tail=True).row(0, named=True)
        page.wait("document.querySelectorAll('tr').length > 7")
        summary = {row[0]: row[1] for row in shown_rows(page) if len(row) == 3}
        page.screenshot(shots / "overview.png")
        assert summary["Average Step Time"] == f"{round(ours['wall_ns'] / 1e3):,}"
        assert summary["Kernel"] == f"{round(ours['kernel_ns'] / 1e3):,}"
        assert summary["CPU Exec"] == f"{round(ours['cpu_exec_ns'] / 1e3):,}"
        assert page.run("document.querySelectorAll('svg[data-chart]').length") == 2

        go_to(page, "Overview", "Operator")
        page.wait_text("Device Total Duration (us)")
        page.wait("document.querySelectorAll('tr.ant-table-row').length > 5")
        table = {row[0]: row for row in shown_rows(page)}
        page.screenshot(shots / "operator.png")
        for row in operator_kernels(trace).drop_nulls("operator").head(5).iter_rows(named=True):
            if row["operator"] in table:
                own, total = table[row["operator"]][2:4]
                assert own == str(round(row["gpu_self_ns"] / 1e3))
                assert total == str(round(row["gpu_total_ns"] / 1e3))
        assert "aten::mm" in table

        go_to(page, "Operator", "Trace")
        frame = "document.querySelector('iframe').contentDocument"
        page.wait(f"{frame}.querySelector('tr-ui-timeline-view').model.kernel !== null"
                  f" && {frame}.body.innerText.includes('python3 (pid 25286)')")  # fmt: skip
        page.screenshot(shots / "trace.png")
        assert page.foreign == []
        assert [url for url in page.failed if "favicon" not in url] == []


@pytest.mark.proof
@pytest.mark.slow
def test_all_ranks_of_a_window_are_workers_of_one_run() -> None:
    with served("tensorboard", traces("dlrm_v100_8ranks"), "--port", "0") as running:

        def ask(route: str) -> Any:
            with urlopen(running.url + PLUGIN + route) as answer:
                return json.load(answer)

        within(150, lambda: ask("runs")["runs"] == ["traces/window0"])
        workers = ask("workers?run=traces/window0&view=Overview")
        assert workers == [f"rank{rank}_host" for rank in range(8)]
        shared = "run=traces/window0&span=default"
        overlap = ask(f"distributed/overlap?{shared}")["data"]["all"]
        trace = next(each for each in map(Trace, trace_files(traces("dlrm_v100_8ranks")))
                     if each.rank == 1)  # fmt: skip
        row = step_time_breakdown(trace, gpu_tail=True).row(0, named=True)
        computation, overlapping, communication, _ = overlap["rank1_host"]
        assert computation + overlapping == row["kernel_ns"] / 1e3
        assert communication == row["communication_ns"] / 1e3
        operations = ask(f"distributed/commops?{shared}")["data"]["rank1_host"]["rows"]
        assert {one[0]: one[1] for one in operations} == {
            "nccl:all_to_all": 5,
            "nccl:all_reduce": 3,
        }
