"""`haiprof verdict` of traces: what it prints, its JSON, and what it leaves to runs."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.ledger import PROBLEM_RATIO
from haiprof.cli import main
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    launch,
    rank_file,
    step,
    traces,
    write_trace,
)

LEDGER_FIELDS = {
    "ranks", "position", "activity", "package", "file", "line", "function", "expression", "callees",
    "callers", "ns_per_step", "low_ns", "high_ns", "needed", "gain_ns", "gain_low_ns",
    "gain_high_ns", "when", "explanation", "elsewhere",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main([str(word) for word in words])
    output = capsys.readouterr()
    return status, output.out, output.err


def data(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    status, out, _ = run(capsys, "verdict", path, "--json")
    assert status == 0
    found: dict[str, Any] = json.loads(out)
    return found


def steps_with_item(ms: int = 3) -> list[Event]:
    """Steps of 100 us, of which the GPU idles 30 us since .item() waited for it."""
    found: list[Event] = [event("train.py(4): main", "python_function", 0, 100 * ms)]
    for at in range(0, 100 * ms, 100):
        first, second = 3 * at + 1, 3 * at + 2
        found += [
            step(at // 100, at, 100),
            launch(first, at, 2), kernel("gemm", at + 2, 58, correlation=first),
            event("aten::item", "cpu_op", at + 5, 60),
            launch(second, at + 6, 58, name="cudaStreamSynchronize"),
            launch(second + 1, at + 88, 2), kernel("gemm", at + 90, 10, correlation=second + 1),
        ]  # fmt: skip
    return found


def test_verdict_of_a_trace_names_the_largest_opportunity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.json", steps_with_item())
    status, out, err = run(capsys, "verdict", path)
    text = " ".join(out.split())
    assert status == 0
    assert text.startswith(
        "forward: the GPU is idle after a call that waits for it (train.py:4 main <aten::item>): "
        "30.0 µs of 100 µs a step"
    )
    assert "a trace, 3 steps; 6 of 6 GPU events linked to their launch (100 %)" in text
    assert "computing 68.0 µs, 68 % (gemm 100 %)" in text
    assert "1 forward: idle after a call that waits for it (train.py:4 main <aten::item>)" in text
    assert "30.0 µs, 30 % of the step, each step → without it 70.0 µs" in text
    assert "do: keep the value on the device" in text
    assert "haiprof trace report" in err


def test_json_has_the_ledger_under_fixed_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = data(capsys, write_trace(tmp_path / "trace.json", steps_with_item()))
    assert {"mean_ns", "median_ns", "count", "residual_ns"} <= found["step"].keys()
    assert all(account.keys() == LEDGER_FIELDS for account in found["ledger"])
    whole = sum(account["ns_per_step"] for account in found["ledger"])
    assert whole + found["step"]["residual_ns"] == found["step"]["mean_ns"] == 100_000
    first = found["ledger"][found["opportunities"][0]]
    assert first["explanation"] == "synchronising_call"
    assert found["explanations"][first["explanation"]].startswith("keep the value on the device")
    sure = [found["ledger"][at]["gain_low_ns"] for at in found["opportunities"]]
    assert found["problem_count"] == sum(ns >= PROBLEM_RATIO * 100_000 for ns in sure) == 1


def test_nothing_stands_out_where_the_gpu_is_busy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.json", [
        step(1, 0, 100), launch(1, 0, 1), kernel("gemm", 1, 98, correlation=1),
    ])  # fmt: skip
    out = run(capsys, "verdict", path)[1]
    assert " ".join(out.split()).startswith(
        "The GPU computes 98 % of the step, most of it gemm, whose FLOPs and bytes are not known; "
        "whether that is slow is not known; largest opportunity: "
    )
    assert data(capsys, path)["problem_count"] == 0


def slow_product(kernel_us: float = 1000) -> list[Event]:
    """A product of 2 * 4096**3 FLOPs and 101 MB."""
    shape, types = [[4096, 4096]] * 2, ["c10::BFloat16"] * 2
    return [
        event("aten::mm", "cpu_op", 0, 10, **{"Input Dims": shape, "Input type": types}),
        launch(1, 2), kernel("Cijk_MT16x16", 10, kernel_us, correlation=1),
    ]  # fmt: skip


def test_an_operator_far_from_the_roofline_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.json", slow_product())
    out = " ".join(run(capsys, "verdict", path, "--peak", "MI300X")[1].split())
    assert out.startswith(
        "aten::mm [4096,4096] x2 bf16 at 137 TFLOP/s, 11 % of the bf16 peak: 1.00 ms of 1.01 ms"
    )
    assert "at what such operators usually reach" in out
    peak = "bf16=1307.4,memory=5.3"
    found = json.loads(run(capsys, "verdict", path, "--peak", peak, "--json")[1])
    (operator,) = found["operators"]
    assert operator["bound"] == "compute"
    assert operator["roofline_ratio"] == pytest.approx(2 * 4096**3 / 1307.4e12 / 1e-3)
    assert operator["gain_low_ns"] < operator["gain_ns"] < operator["gain_high_ns"] < 1e6
    assert found["problem_count"] == 1


def test_no_operator_is_slow_where_it_does_what_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.json", slow_product(kernel_us=180))
    out = run(capsys, "verdict", path, "--peak", "MI300X")[1]
    assert out.startswith("Nothing stands out: the GPU computes 96 % of the step")


def test_without_a_known_gpu_nothing_is_said_of_distances(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.json", slow_product())
    out = " ".join(run(capsys, "verdict", path)[1].split())
    assert "most of it aten::mm [4096,4096] x2 bf16 at 137 TFLOP/s and 0.101 TB/s" in out
    assert "no peak is known of the GPU, which the trace does not name; --peak NAME" in out
    assert "peak:" not in out


def test_what_is_faster_than_the_gpu_is_called_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.json", slow_product(kernel_us=50))
    out = " ".join(run(capsys, "verdict", path, "--peak", "MI300X")[1].split())
    assert "more than the GPU can do: shapes, times or peak are wrong" in out


def test_a_folder_of_ranks_is_one_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        rank_file(tmp_path, rank, steps_with_item())
    out = run(capsys, "verdict", tmp_path)[1]
    assert "traces of 2 ranks, 3 steps; 12 of 12 GPU events" in " ".join(out.split())


@pytest.mark.parametrize("option", [["--save"], ["--last", "5"], ["--svg", "card.svg"]])
def test_what_needs_a_run_is_refused_for_traces(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace.json", steps_with_item())
    status, _, err = run(capsys, "verdict", path, *option)
    assert status == 2
    assert "traces, and no run" in err


def test_a_folder_of_neither_says_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "verdict", tmp_path)
    assert status != 0
    assert f"{tmp_path}: neither a run directory nor a log directory with runs" in err


@pytest.mark.parametrize("name", ["tl_h100_qwen05_mem_stack", "dlrm_v100_8ranks"])
def test_verdict_of_real_traces(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, traces(name))
    whole = sum(account["ns_per_step"] for account in found["ledger"])
    assert whole == pytest.approx(found["step"]["mean_ns"], abs=1e-3)
    assert found["step"]["residual_ns"] == 0
    assert found["opportunities"]


def side(top: str, kernels: list[tuple[str, str, float]]) -> list[Event]:
    """One step of 1 ms whose operators, inside of one, launch a kernel each."""
    events = [step(1, 0, 1000), event(top, "cpu_op", 5, 100)]
    at = 20.0
    for number, (operator, name, us) in enumerate(kernels, start=1):
        events += [
            event(operator, "cpu_op", 10 * number, 8), launch(number, 10 * number + 1, 2),
            kernel(name, 100 + at, us, correlation=number),
        ]  # fmt: skip
        at += us
    return events


@pytest.mark.parametrize(("after", "said"), [
    (side("conv", [("aten::convolution", "cudnn", 40)]),
     "GPU busy 0.40 to 0.04 ms: aten::convolution"),
    (side("conv", [("aten::convolution", "Cijk", 400)]), "GPU equally busy: 0.40 ms"),
    (side("conv", [("aten::unfold", "im2col", 100), ("aten::mm", "gemm", 600)]),
     "GPU busy 0.40 to 0.70 ms: conv (aten::convolution to aten::mm, aten::unfold)"),
])  # fmt: skip
def test_compare_of_traces_says_what_changed_on_the_device(
    after: list[Event], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = side("conv", [("aten::convolution", "miopenConv", 400)])
    paths = [write_trace(tmp_path / f"{name}.json", events)
             for name, events in (("a", before), ("b", after))]  # fmt: skip
    status, out, _ = run(capsys, "compare", *paths)
    assert status == 0
    assert out.startswith(said + "\n")
    found = json.loads(run(capsys, "compare", *paths, "--json")[1])
    assert found["headline"] == said


def test_report_of_a_trace_is_the_page_of_that_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rank_file(tmp_path, 0, steps_with_item())
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, "report", path)
    assert (status, err.count("error")) == (0, 0)
    written = path.name.partition(".json")[0] + ".html"
    assert written in err
    page, found = html.unescape((tmp_path / written).read_text()), data(capsys, path)
    assert found["headline"] in page.replace("\N{NO-BREAK SPACE}", " ")
    assert found["explanations"]["synchronising_call"] in page
    assert "Operators by GPU time" in page
    assert "The longest idle times" in page
    longest = {name: found["gaps"][0][name] for name in ("idle_ns", "activity", "kernel")}
    assert longest == {"idle_ns": 30_000, "activity": "idle: wait: device", "kernel": "gemm"}
    assert "gemm" in page
    assert run(capsys, "report", path)[0] == 2, "a file of the user is not replaced"


def test_compare_of_two_traces_with_a_limit_compares_their_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = rank_file(tmp_path / "a", 0, steps_with_item())
    second = rank_file(tmp_path / "b", 0, steps_with_item())
    status, out, err = run(capsys, "compare", first, second, "--json", "--fail-if-slower", "5%")
    assert status in (0, 5), err
    assert "verdict" in json.loads(out)


def test_compare_of_a_trace_and_a_run_says_which_is_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rank_file(tmp_path, 0, steps_with_item())
    other = tmp_path / "empty"
    other.mkdir()
    status, _, err = run(capsys, "compare", path, other)
    assert status == 2
    assert f"{path} is a trace" in err


def test_command_on_runs_names_what_reads_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rank_file(tmp_path, 0, steps_with_item())
    for command in ("overview", "rank", "lines", "view"):
        status, _, err = run(capsys, command, path)
        assert status != 0
        assert f"haiprof verdict {path}" in err, command


def test_headline_and_row_of_ranks_that_differ_say_one_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [
        {**each, "dur": 38} if (each.get("name"), each.get("dur")) == ("gemm", 58) else each
        for each in steps_with_item()
    ]
    for rank, events in enumerate((steps_with_item(), late)):
        rank_file(tmp_path, rank, events)
    account = data(capsys, tmp_path)["ledger"][0]
    assert account["gain_ns"] < account["ns_per_step"], "the step ends with the slowest rank"
    _, out, _ = run(capsys, "verdict", tmp_path)
    text = " ".join(out.split())
    assert "): 40.0 µs of 100 µs a step" in text
    assert "40.0 µs, 40 % of the step, each step, the mean of 2 ranks →" in text


def test_compare_of_traces_without_a_gpu_speaks_of_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = []
    for name, us in (("a", 400), ("b", 600)):
        (tmp_path / name).mkdir()
        events = [step(1, 0, 1000), event("aten::mm", "cpu_op", 10, us)]
        paths.append(rank_file(tmp_path / name, 0, events, world_size=1))
    _, same, _ = run(capsys, "compare", paths[0], paths[0])
    _, other, _ = run(capsys, "compare", *paths)
    assert same.startswith("the host's operators take equally long: 0.40 ms\n")
    assert other.startswith("the host's operators take 0.40 to 0.60 ms\n")
    assert "What the host did" in same
    assert "GPU" not in same + other
