"""`haiprof verdict` of traces: what it prints, its JSON, and what it leaves to runs."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.ledger import PROBLEM_RATIO
from tests.commands import Run
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    launch,
    rank_file,
    step,
    write_trace,
)

LEDGER_FIELDS = {
    "ranks", "slowest_rank", "position", "activity", "package", "file", "line", "function",
    "expression", "expression_ratio", "also", "callees", "callers", "ns_per_step", "low_ns",
    "high_ns", "needed", "gain_ns", "gain_low_ns", "gain_high_ns", "when", "explanation",
    "elsewhere",
}  # fmt: skip


def data(run: Run, path: Path) -> Any:
    ran = run("verdict", path, "--json")
    return ran.data


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


def test_verdict_of_a_trace_names_the_largest_opportunity(tmp_path: Path, run: Run) -> None:
    path = write_trace(tmp_path / "trace.json", steps_with_item())
    ran = run("verdict", path)
    text = ran.said
    assert "haiprof trace report" in ran.err
    assert text.startswith(
        "forward: the GPU is idle after a call that waits for it (train.py:4 main <aten::item>): "
        "30.0 µs of 100 µs a step"
    )
    assert "a trace, 3 steps; 6 of 6 GPU events linked to their launch (100 %)" in text
    assert "computing 68.0 µs, 68 % (gemm 100 %)" in text
    assert "1 forward: idle after a call that waits for it (train.py:4 main <aten::item>)" in text
    assert "30.0 µs, 30 % of the step, each step → without it 70.0 µs" in text
    assert "do: keep the value on the device" in text


def test_json_has_the_ledger_under_fixed_names(tmp_path: Path, run: Run) -> None:
    found = data(run, write_trace(tmp_path / "trace.json", steps_with_item()))
    assert {"mean_ns", "median_ns", "count", "residual_ns"} <= found["step"].keys()
    assert all(account.keys() == LEDGER_FIELDS for account in found["ledger"])
    whole = sum(account["ns_per_step"] for account in found["ledger"])
    assert whole + found["step"]["residual_ns"] == found["step"]["mean_ns"] == 100_000
    first = found["ledger"][found["opportunities"][0]]
    assert first["explanation"] == "synchronising_call"
    assert found["explanations"][first["explanation"]].startswith("keep the value on the device")
    sure = [found["ledger"][at]["gain_low_ns"] for at in found["opportunities"]]
    assert found["problem_count"] == sum(ns >= PROBLEM_RATIO * 100_000 for ns in sure) == 1


def slow_product(kernel_us: float = 1000) -> list[Event]:
    """A product of 2 * 4096**3 FLOPs and 101 MB."""
    shape, types = [[4096, 4096]] * 2, ["c10::BFloat16"] * 2
    return [
        event("aten::mm", "cpu_op", 0, 10, **{"Input Dims": shape, "Input type": types}),
        launch(1, 2), kernel("Cijk_MT16x16", 10, kernel_us, correlation=1),
    ]  # fmt: skip


def test_an_operator_far_from_the_roofline_comes_first(tmp_path: Path, run: Run) -> None:
    path = write_trace(tmp_path / "trace.json", slow_product())
    out = run("verdict", path, "--peak", "MI300X").said
    assert out.startswith(
        "aten::mm [4096,4096] x2 bf16 at 137 TFLOP/s, 11 % of the bf16 peak: 1.00 ms of 1.01 ms"
    )
    assert "at what such operators usually reach" in out
    peak = "bf16=1307.4,memory=5.3"
    found = run("verdict", path, "--peak", peak, "--json").data
    (operator,) = found["operators"]
    assert operator["bound"] == "compute"
    assert operator["roofline_ratio"] == pytest.approx(2 * 4096**3 / 1307.4e12 / 1e-3)
    assert operator["gain_low_ns"] < operator["gain_ns"] < operator["gain_high_ns"] < 1e6
    assert found["problem_count"] == 1


@pytest.mark.parametrize("kernel_us", [90, 200, 1000])
def test_a_gain_lies_in_its_interval_where_tf32_would_be_faster(
    tmp_path: Path, run: Run, kernel_us: float
) -> None:
    shapes = {"Input Dims": [[4096, 512], [512, 4096]], "Input type": ["float", "float"]}
    events = [
        event("aten::mm", "cpu_op", 0, 10, **shapes),
        launch(1, 2), kernel("Cijk_SB_MT16x16", 10, kernel_us, correlation=1),
    ]  # fmt: skip
    path = write_trace(tmp_path / "trace.json", events)
    (operator,) = run("verdict", path, "--peak", "MI300X", "--json").data["operators"]
    assert operator["precision"] == "fp32"
    assert 0 <= operator["gain_low_ns"] <= operator["gain_ns"] <= operator["gain_high_ns"]


def kernels_in_turn(short_us: float, gap_us: float, long_us: float) -> list[Event]:
    """Ten short and ten long kernels in turn, with gaps in which the host launches the next."""
    found, at = [], 0.0
    for number in range(10):
        for correlation, us in ((2 * number + 1, short_us), (2 * number + 2, long_us)):
            found += [
                event("aten::mul", "cpu_op", at, gap_us), launch(correlation, at, gap_us),
                kernel("elementwise", at + gap_us, us, correlation=correlation),
            ]  # fmt: skip
            at += gap_us + us
    return found


@pytest.mark.parametrize(("short_us", "gap_us", "long_us", "said"), [
    (4, 1, 1000, None),
    (4, 1, 40, "they and the gaps for launches take 13 % of the step: torch.compile fuses"),
    (4, 60, 1000, "they and the gaps for launches take 11 % of the step: torch.compile fuses"),
])  # fmt: skip
def test_short_kernels_are_named_where_they_take_time(
    tmp_path: Path, run: Run, short_us: float, gap_us: float, long_us: float, said: str | None
) -> None:
    path = write_trace(tmp_path / "trace.json", kernels_in_turn(short_us, gap_us, long_us))
    text = run("verdict", path).said
    assert said in text if said else "shorter than" not in text


def fused_experts(tokens: int, kernel_us: float) -> list[Event]:
    """A mixture of 64 experts of 71 MB each, of which a token goes to two."""
    shapes = [[tokens, 4096], [64, 5632, 4096], [64, 4096, 2816], [tokens, 2]]
    types = ["c10::BFloat16"] * 3 + ["float"]
    return [
        event("vllm::fused_moe", "user_annotation", 0, 10),
        event("vllm::outplace_fused_experts", "cpu_op", 0, 10,
              **{"Input Dims": shapes, "Input type": types}),
        launch(1, 2), kernel("fused_moe_kernel", 10, kernel_us, correlation=1),
    ]  # fmt: skip


BUSY = [step(1, 0, 100), launch(1, 0, 1), kernel("gemm", 1, 98, correlation=1)]
LATE = [event("aten::mul_", "cpu_op", 500, 100), launch(2, 590),
        kernel("elementwise", 600, 10, correlation=2)]  # fmt: skip
UNKNOWN = [
    event("aten::topk", "cpu_op", 0, 9), launch(1, 2), kernel("topk", 10, 990, correlation=1),
    event("aten::mul", "cpu_op", 1000, 70), event("aten::mul", "cpu_op", 1000, 9),
    launch(2, 1060, 8), kernel("elementwise", 1070, 10, correlation=2),
]  # fmt: skip
EXPERTS = "vllm::outplace_fused_experts [16,4096]"


@pytest.mark.parametrize(("events", "peak", "begins", "says", "problems"), [
    (BUSY, "", "The GPU computes 98 % of the step, most of it gemm, whose FLOPs and bytes are not "
     "known; whether that is slow is not known; largest opportunity: ", "", 0),
    (slow_product(180), "MI300X", "aten::mm [4096,4096] x2 bf16 at 764 TFLOP/s, 58 % of the bf16 "
     "peak: 180 µs of 188 µs a step, as fast as such operators usually are: nothing stands out; ",
     "", 0),
    # 25.5 experts of 69 MB are read where tokens are routed evenly: 1.77 GB.
    (fused_experts(16, 2000), "MI300X", EXPERTS, "about 17 % of the memory's bandwidth, a small "
     "batch of 16: 2.00 ms of 2.01 ms a step", None),
    (fused_experts(16, 400), "MI300X", EXPERTS, "about 83 % of the memory's bandwidth: 400 µs of "
     "408 µs a step: a small batch", None),
    # 250 us do not suffice for them: it is known of two alone that they were read.
    (fused_experts(16, 250), "MI300X", EXPERTS, "at least 10 % of the memory's bandwidth, a small "
     "batch of 16: 250 µs of 258 µs a step", None),
    # A small batch comes before the idle time that it leaves.
    ([*fused_experts(16, 340), *LATE], "MI300X", EXPERTS, "bf16 works on 16 rows a call, a small "
     "batch: 340 µs of 608 µs a step; forward: ", None),
    # What is most of the step comes before small problems, though its work is not known.
    (UNKNOWN, "MI300X", "aten::topk, whose FLOPs and bytes are not known: 990 µs of 1.08 ms", "",
     None),
    (slow_product(), "", "", "most of it aten::mm [4096,4096] x2 bf16 at 137 TFLOP/s and 0.101 "
     "TB/s", None),
    (slow_product(), "", "", "no peak is known of the GPU, which the trace does not name; --peak "
     "NAME", None),
    (slow_product(50), "MI300X", "", "more than the GPU can do: shapes, times or peak are wrong",
     None),
], ids=["busy", "fast", "experts", "few experts", "two experts", "small batch", "unknown",
        "no peak", "no peak said", "impossible"])  # fmt: skip
def test_what_verdict_says_first_of_a_trace(
    tmp_path: Path, run: Run, events: list[Event], peak: str, begins: str, says: str,
    problems: int | None,
) -> None:  # fmt: skip
    option = ("--peak", peak) if peak else ()
    words = ("verdict", write_trace(tmp_path / "trace.json", events), *option)
    said = run(*words).said
    assert said.startswith(begins)
    assert says in said
    assert ("peak:" in said) <= bool(peak)
    if problems is not None:
        assert run(*words, "--json").data["problem_count"] == problems


def test_gaps_between_queued_kernels_are_a_problem_beyond_what_a_device_needs(
    tmp_path: Path, run: Run
) -> None:
    """The second kernel waits 100 us in the queue, of which a device needs ten."""
    path = write_trace(tmp_path / "trace.json", [
        launch(1, 0), kernel("gemm", 1, 200, correlation=1),
        launch(2, 5), kernel("gemm", 301, 199, correlation=2),
    ])  # fmt: skip
    out = run("verdict", path).said
    assert "idle for more than 10 µs each between kernels that are queued" in out
    found = {each["activity"]: each for each in data(run, path)["ledger"]}
    assert found["idle: between kernels, long"]["gain_low_ns"] == pytest.approx(90_000)
    assert found["idle: between kernels"]["gain_low_ns"] == 0


def test_a_folder_of_ranks_is_one_verdict(tmp_path: Path, run: Run) -> None:
    for rank in (0, 1):
        rank_file(tmp_path, rank, steps_with_item())
    assert "traces of 2 ranks, 3 steps; 12 of 12 GPU events" in run("verdict", tmp_path).said


@pytest.mark.parametrize(("line", "status", "said"), [
    *((f"verdict {{trace}} {option}", 2, "traces, and no run")
      for option in ("--save", "--last 5", "--svg card.svg")),
    *((f"{command} {{trace}}", 3, "haiprof verdict {trace}")
      for command in ("overview", "rank", "lines", "view")),
    ("compare {trace} {empty}", 2, "{trace} is a trace"),
    ("verdict {empty}", 3, "{empty}: neither a run directory nor a log directory with runs"),
    ("verdict {still}", 5, "no event of a GPU, and no operator or Python function of the host"),
])  # fmt: skip
def test_what_is_no_run_or_says_nothing_is_refused(
    tmp_path: Path, run: Run, line: str, status: int, said: str
) -> None:
    trace = rank_file(tmp_path, 0, steps_with_item())
    still = write_trace(tmp_path / "still.json", [event("f", "python_function", 0, 0)])
    (tmp_path / "empty").mkdir()
    paths = {"trace": trace, "still": still, "empty": tmp_path / "empty"}
    ran = run(*(word.format(**paths) for word in line.split()), status=status)
    assert said.format(**paths) in ran.err


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
    (side("conv", [("aten::convolution", "Cijk", 400)]), "GPU busy time: equally long: 0.40 ms"),
    (side("conv", [("aten::unfold", "im2col", 100), ("aten::mm", "gemm", 600)]),
     "GPU busy 0.40 to 0.70 ms: conv (aten::convolution to aten::mm, aten::unfold)"),
])  # fmt: skip
def test_compare_of_traces_says_what_changed_on_the_device(
    after: list[Event], said: str, tmp_path: Path, run: Run
) -> None:
    before = side("conv", [("aten::convolution", "miopenConv", 400)])
    paths = [write_trace(tmp_path / f"{name}.json", events)
             for name, events in (("a", before), ("b", after))]  # fmt: skip
    assert run("compare", *paths).out.startswith(said + "\n")
    assert run("compare", *paths, "--json").data["headline"] == said


def test_compare_of_traces_names_branch_of_call_tree_that_changed(tmp_path: Path, run: Run) -> None:
    """Two layers launch a kernel each; that of one is slower, whose line has moved."""
    paths = []
    for name, line, us in (("a", 7, 50), ("b", 9, 350)):
        paths.append(write_trace(tmp_path / f"{name}.json", [
            step(1, 0, 1000), event("train.py(1): main", "python_function", 5, 100),
            event("model.py(3): encoder", "python_function", 10, 20),
            event("aten::mm", "cpu_op", 11, 8), launch(1, 12, 2),
            event(f"model.py({line}): decoder", "python_function", 40, 20),
            event("aten::mm", "cpu_op", 41, 8), launch(2, 42, 2),
            kernel("gemm", 100, 200, correlation=1), kernel("gemm", 300, us, correlation=2),
        ]))  # fmt: skip
    out = run("compare", *paths).said
    where = "where: train.py: main > model.py: decoder > aten::mm: 0.05 to 0.35 ms"
    assert f"GPU busy 0.25 to 0.55 ms: aten::mm {where} per step" in out
    branch = run("compare", *paths, "--json").data["branch"]
    assert branch == {"path": ["train.py: main", "model.py: decoder", "aten::mm"],
                      "before_ns": 50_000, "after_ns": 350_000}  # fmt: skip


def products(rank: int, us: float, dims: str, types: str, name: str = "gemm") -> list[Event]:
    """Steps of 1 ms with a product of matrices, and an all-reduce until the last rank has come."""
    found: list[Event] = []
    for at in range(0, 3000, 1000):
        number, begun = at + 1, at + 10 + us
        found += [
            step(at // 1000, at, 1000),
            event("aten::mm", "cpu_op", at, 8,
                  **{"Input Dims": json.loads(dims), "Input type": json.loads(types)}),
            launch(number, at + 2), kernel(name, at + 10, us, correlation=number),
            launch(number + 1, at + 12),
            kernel("ncclDevKernel_AllReduce_Sum", begun, 980 - begun + at, correlation=number + 1,
                   **{"Collective name": "allreduce", "In msg nelems": 1024, "Group size": 2,
                      "dtype": "Float", "Process Group Ranks": "[0, 1]",
                      "Process Group Name": "0", "Seq": at // 1000}),
        ]  # fmt: skip
    return found


@pytest.mark.parametrize(("rows", "why"), [(4096, "for the same calls"), (8192, "larger calls")])
def test_rank_whose_operator_takes_longer_is_named_first(
    tmp_path: Path, run: Run, rows: int, why: str
) -> None:
    for rank, us in enumerate((300, 900)):
        dims = f"[[{rows if rank else 4096}, 4096], [4096, 4096]]"
        types = '["c10::BFloat16", "c10::BFloat16"]'
        rank_file(tmp_path, rank, products(rank, us, dims, types))
    out = run("verdict", tmp_path).said
    assert out.startswith("rank 1 is waited for: aten::mm takes 900 µs there")
    assert why in out.partition(": 600 µs of")[0]
    assert "300 µs elsewhere" in out
    assert ("clocks" in out) == (rows == 4096)


def gpu_trace(path: Path, kernels: list[tuple[str, Event, float]], name: str = "H100") -> Path:
    """Three steps of operators with a kernel each that follow each other on the GPU."""
    found: list[Event] = []
    for number in range(3):
        at, begun = 10_000 * number, 10_000.0 * number
        found.append(step(number, at, 10_000))
        for place, (what, args, us) in enumerate(kernels):
            call = 100 * number + place + 1
            host = at + 20 * place
            found += [
                event(str(args.get("op", "aten::op")), "cpu_op", host, 10,
                      **{key: value for key, value in args.items() if key != "op"}),
                launch(call, host + 2), kernel(what, begun + 5, us, correlation=call),
            ]  # fmt: skip
            begun += us + 1
    return write_trace(path, found, {"deviceProperties": [{"id": 0, "name": name}]})


FLOATS = {"op": "aten::mm", "Input Dims": [[4096, 8192], [8192, 8192]],
          "Input type": ["float", "float"]}  # fmt: skip
HALVES = {"Input Dims": [[64, 1 << 20]] * 2, "Input type": ["c10::Half"] * 2}


NCHW = "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half, float>"
COPY = "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>"


@pytest.mark.parametrize(("kernels", "says", "do"), [
    ([("sm80_xmma_gemm_f32f32_ffma", FLOATS, 9000.0)],
     "aten::mm [4096,8192] [8192,8192] fp32 at 61.1 TFLOP/s, 91 % of the fp32 peak, 12 % of the "
     "tf32 peak: 9.00 ms", "allow TF32"),
    ([("triton_poi_fused_add_3", {"op": "triton_poi_fused_add_3", **HALVES}, 2000.0),
      ("gemm", {}, 7000.0)],
     "triton_poi_fused_add_3 [64,1048576] x2 at 0.134 TB/s, about 4.0 % of the memory's", "fuse"),
    ([("indexing_backward_kernel", {"op": "aten::_index_put_impl_", "Input Dims": [[9999, 512], [],
       [65536, 512]], "Input type": ["float", "", "float"]}, 3000.0), ("gemm", {}, 6900.0)],
     "_index_put_impl_ [9999,512] [65536,512] at 0.134 TB/s, 4.0 % of the memory's", "fuse"),
    ([(NCHW, {"op": "aten::cudnn_convolution"}, 3000.0), ("conv_fprop", {}, 6000.0)],
     "forward: the GPU converts between memory layouts (<aten::cudnn_convolution>): 3.00 ms",
     "channels_last"),
    ([(COPY, {"op": "aten::copy_"}, 4000.0), ("gemm", {"op": "a"}, 3000.0), ("gemm", {}, 2990.0)],
     "may be: forward: copies or casts tensors (<aten::copy_>), 40 %", "cast weights once"),
], ids=["fp32", "triton", "index", "layout", "copies"])  # fmt: skip
def test_faults_of_computing_are_said_first(
    tmp_path: Path, run: Run,
    kernels: list[tuple[str, Event, float]], says: str, do: str,
) -> None:  # fmt: skip
    out = run("verdict", gpu_trace(tmp_path / "t.json", kernels)).said
    assert says in out.partition(" t.json: ledger")[0]
    assert do in out


def test_report_of_a_trace_is_the_page_of_that_trace(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rank_file(tmp_path, 0, steps_with_item())
    monkeypatch.chdir(tmp_path)
    err = run("report", path).err
    assert "error" not in err
    written = path.name.partition(".json")[0] + ".html"
    assert written in err
    page, found = html.unescape((tmp_path / written).read_text()), data(run, path)
    assert found["headline"] in page.replace("\N{NO-BREAK SPACE}", " ")
    assert found["explanations"]["synchronising_call"] in page
    assert "Operators by GPU time" in page
    assert "The longest idle times" in page
    longest = {name: found["gaps"][0][name] for name in ("idle_ns", "activity", "kernel")}
    assert longest == {"idle_ns": 30_000, "activity": "idle: wait: device", "kernel": "gemm"}
    assert "gemm" in page
    run("report", path, status=2)  # a file of the user is not replaced


def test_compare_of_two_traces_with_a_limit_compares_their_steps(tmp_path: Path, run: Run) -> None:
    paths = [write_trace(tmp_path / f"{name}.json", steps_with_item()) for name in "ab"]
    ran = run("compare", *paths, "--json", "--fail-if-slower", "5%", status=None)
    assert ran.status in (0, 5), ran.err
    assert "verdict" in ran.data


def test_headline_and_row_of_ranks_that_differ_say_one_number(tmp_path: Path, run: Run) -> None:
    late = [
        {**each, "dur": 38} if (each.get("name"), each.get("dur")) == ("gemm", 58) else each
        for each in steps_with_item()
    ]
    for rank, events in enumerate((steps_with_item(), late)):
        rank_file(tmp_path, rank, events)
    account = data(run, tmp_path)["ledger"][0]
    assert account["gain_ns"] < account["ns_per_step"], "the step ends with the slowest rank"
    text = run("verdict", tmp_path).said
    assert "): 40.0 µs of 100 µs a step" in text
    assert "40.0 µs, 40 % of the step, each step, the mean of 2 ranks →" in text


def test_compare_of_traces_without_a_gpu_speaks_of_the_host(tmp_path: Path, run: Run) -> None:
    paths = [
        write_trace(
            tmp_path / f"{us}.json", [step(1, 0, 1000), event("aten::mm", "cpu_op", 10, us)]
        )
        for us in (400, 600)
    ]
    same, other = run("compare", paths[0], paths[0]).out, run("compare", *paths).out
    assert same.startswith("the host's operators: equally long: 0.40 ms\n")
    assert other.startswith("host operators 0.40 to 0.60 ms\n")
    assert "What the host did" in other
    assert "What the host did" not in same, "nothing changed"
    assert "GPU" not in same + other


@pytest.mark.parametrize(("blocks", "fill", "says"), [
    (0.25, 2, "1 kernel a step, blocks for 25 % of the multiprocessors →"),
    (4.5, 50, "1 kernel a step, 1.1 waves of blocks, the last one 12 % full →"),
    (40.0, 12.5, "1 kernel a step, occupancy 12 % →"),
    (40.0, 0, "1 kernel a step →"),
])  # fmt: skip
def test_a_slow_operator_says_how_its_launch_fills_the_gpu(
    tmp_path: Path, run: Run, blocks: float, fill: float, says: str
) -> None:
    """Blocks of eight warps on multiprocessors with room for 64."""
    events = slow_product()
    events[-1]["args"] |= {"blocks per SM": blocks, "warps per SM": 8 * blocks,
                           "est. achieved occupancy %": fill}  # fmt: skip
    gpu = {"id": 0, "name": "H100", "maxThreadsPerMultiprocessor": 2048, "warpSize": 32}
    path = write_trace(tmp_path / "trace.json", events, {"deviceProperties": [gpu]})
    assert says in run("verdict", path).said


def cpu_steps(outside: list[Event], *, stacks: bool = False) -> list[Event]:
    """Three steps of 100 us on a CPU: 30 us of matrix products, then 60 us of something else."""
    found: list[Event] = []
    if stacks:
        found += [event("train.py(4): main", "python_function", 0, 300)]
    for at in range(0, 300, 100):
        found += [step(at // 100, at, 100), event("aten::mm", "cpu_op", at + 5, 30)]
        found += [each | {"ts": each["ts"] + at} for each in outside]
    return found


@pytest.mark.parametrize(("outside", "stacks", "says", "do"), [
    ([], False, "the host runs Python, or waits, outside of operators: 70.0 µs of 100 µs a step",
     "haiprof --trace --trace-stacks"),
    ([event("train.py(9): augment", "python_function", 38, 60)], True,
     "the host runs Python (train.py:9 augment): 60.0 µs of 100 µs a step", "vectorise it"),
    ([event("<built-in function sleep>", "python_function", 38, 60)], True,
     "the host sleeps, or waits for a lock, a process or a socket (train.py main "
     "<built-in function sleep>): 60.0 µs", "remove the sleep"),
    ([event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "user_annotation",
            38, 60)], False, "the host waits for input", "DataLoader workers"),
    # DDP waits below autograd, while gloo's own thread exchanges what backward has made.
    ([event("<built-in method run_backward of X object at 0x7f>", "python_function", 38, 60),
      event("autograd::engine::evaluate_function: X", "cpu_op", 38, 10, **{"Fwd thread id": 1}),
      event("gloo:all_reduce", "user_annotation", 43, 50, tid=2)], True,
     "the host waits in a collective (train.py main): 45.0 µs of 100 µs a step",
     "the rank that comes last"),
])  # fmt: skip
def test_verdict_of_a_cpu_job_says_what_its_host_does(
    tmp_path: Path, run: Run, outside: list[Event], stacks: bool,
    says: str, do: str,
) -> None:  # fmt: skip
    (tmp_path / "run.json").touch()
    path = write_trace(tmp_path / "trace.json", cpu_steps(outside, stacks=stacks))
    ran = run("verdict", path)
    out = ran.said
    assert says in out
    assert do in out
    assert f"haiprof verdict {tmp_path}: the whole run" in ran.err
    place = (" (train.py:4 main)" if not outside else " (train.py main)") if stacks else ""
    assert f"operators aten::mm{place} 30.0 µs, 30 %" in out
    assert "kernel" not in out
    assert "GPU is" not in out


def test_a_cpu_job_of_operators_names_the_longest_and_no_small_change(
    tmp_path: Path, run: Run
) -> None:
    events = [step(1, 0, 1000), event("aten::mm", "cpu_op", 3, 600),
              event("aten::add", "cpu_op", 603, 395)]  # fmt: skip
    out = run("verdict", write_trace(tmp_path / "trace.json", events)).said
    assert out.startswith(
        "Nothing stands out: the host runs operators for 100 % of the step, the longest "
        "aten::mm 600 µs, 60 % trace.json"
    )
    assert "torch.get_num_threads()" in out
    assert "record with_stack" not in out


def cut_in_its_third_step(tmp_path: Path) -> tuple[Path, Path]:
    """A trace of four equal steps of the host, and the same without all behind 2.2 steps."""
    events = []
    for number in range(4):
        at = 100 * number
        events += [step(number, at, 100), event("aten::mm", "cpu_op", at + 5, 40),
                   event("aten::add", "cpu_op", at + 50, 45)]  # fmt: skip
    whole, cut = write_trace(tmp_path / "whole.json", events), tmp_path / "cut.json"
    text = whole.read_text()
    cut.write_text(text[: text.rindex("aten::add", 0, text.index("ProfilerStep#3"))])
    return whole, cut


def test_verdict_of_a_trace_that_is_cut_off_says_so_first_and_judges_whole_steps(
    tmp_path: Path, run: Run
) -> None:
    whole, cut = cut_in_its_third_step(tmp_path)
    said = run("verdict", cut).said
    told = "cut.json: the file is cut off in step 2: what follows step 1, its last whole one, is"
    assert said.index(told) < said.index("ledger of the host's time, a trace")
    assert "2 steps" in said
    assert "operators 85.0 µs, 85 %" in said
    assert "cut off" not in run("verdict", whole)[1]
    assert data(run, cut)["damage"][0].endswith("its last whole one, is left out")


@pytest.mark.parametrize("end", ["train.py(2)", "aten::add"])
def test_verdict_of_a_trace_that_is_cut_off_in_its_first_step_says_so_and_what_to_do(
    tmp_path: Path, run: Run, end: str
) -> None:
    whole = write_trace(tmp_path / "whole.json", [
        step(7, 10, 100), event("aten::mm", "cpu_op", 15, 40), event("aten::add", "cpu_op", 56, 9),
        event("t.py(1): main", "python_function", 0, 200, tid=2),
        event("train.py(2): step", "python_function", 20, 80),
    ])  # fmt: skip
    cut = tmp_path / "cut.json"
    cut.write_text(whole.read_text().partition(end)[0])
    said = run("verdict", cut, status=5).err
    assert "cut.json: no verdict: the file is cut off in its first step, 7; no step" in said
    assert "copy the file again, or record again" in said
    assert "ProfilerActivity" not in said


def test_compare_of_a_trace_that_is_cut_off_says_so_below_its_headline(
    tmp_path: Path, run: Run
) -> None:
    out = run("compare", *cut_in_its_third_step(tmp_path))[1].splitlines()
    assert out[0] == "the host's operators: equally long: 85.00 µs"
    assert "cut.json: the file is cut off in step 2" in " ".join(" ".join(out[1:3]).split())
    assert out[-1] == "per step; step 0.10 ms"


@pytest.mark.parametrize("command", ["report", "critical-path", "what-if", "functions"])
def test_each_view_of_a_trace_that_is_cut_off_says_so_and_leaves_its_last_step_out(
    tmp_path: Path, run: Run, command: str
) -> None:
    _, cut = cut_in_its_third_step(tmp_path)
    _, out, err = run("trace", command, cut)
    assert "the file is cut off in step 2" in " ".join((out + err).split())
    assert out.count("the file is cut off in") <= 1
    if command == "what-if":
        assert "step 100 µs measured" in out
