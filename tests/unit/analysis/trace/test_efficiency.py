"""FLOPs, bytes and MFU from recorded shapes: by hand, and against TraceLens' published tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError, UsageError
from haiprof.trace_analysis.operator_efficiency import (
    PEAKS,
    operator_efficiency,
    parse_peak,
    peak_of,
)
from haiprof.trace_analysis.operator_work import (
    FORMULAS,
    Work,
    arguments_of,
    formula_of,
    read_formulas,
    work_of,
)
from tests.commands import Run
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    launch,
    trace_of,
    traces,
    write_trace,
)

# AMD-AGI/TraceLens, tests/traces/h100/Qwen_Qwen1.5-0.5B-Chat__1016005_perf_report_csvs (MIT):
# GEMM.csv and SDPA_fwd.csv: shapes, calls, GFLOPS_first, Data Moved (MB)_first, Kernel Time sum.
# Its addmm counts the addition of the bias as well, which torch.utils.flop_counter does not.
TRACELENS = (
    ("aten::mm", "[[8944,1024],[1024,2816]]", 48, 51.581550592, 71.0078125, 4055.25244140625),
    ("aten::mm", "[[8944,2816],[2816,1024]]", 24, 51.581550592, 71.0078125, 1835.287109375),
    ("aten::mm", "[[8944,1024],[1024,1024]]", 24, 18.756927488, 36.9375, 778.14208984375),
    ("aten::addmm", "[[1024],[8944,1024],[1024,1024],[],[]]", 72,
     18.766086144 - 8944 * 1024 / 1e9, 36.939453125, 2329.075927734375),
    ("aten::bmm", "[[1,32,1],[1,1,559]]", 1, 3.5776e-05, 0.07049179077148438, 3.52001953125),
    ("aten::_scaled_dot_product_flash_attention",
     "[[16,16,559,64],[16,16,559,64],[16,16,559,64],[],[],[],[]]", 24, 10.239377408, 69.875,
     2722.704345703125),
)  # fmt: skip


def work(name: str, dims: list[Any], types: list[str], *values: str) -> Work | None:
    return work_of(name, arguments_of(json.dumps(dims), json.dumps(types)), values)


def test_real_trace_has_the_numbers_of_tracelens() -> None:
    found = TraceAnalysis(traces("tl_h100_qwen05_mem_stack")).efficiency()
    found = found.with_columns(pl.col("shapes").str.replace_all(" ", ""))
    for name, shapes, count, gflops, mbytes, time_us in TRACELENS:
        own = found.filter(operator=name, shapes=shapes).sum()
        assert own["count"].item() == count, shapes
        assert own["flops"].item() / count / 1e9 == pytest.approx(gflops, rel=1e-9)
        assert own["bytes"].item() / count / 2**20 == pytest.approx(mbytes, rel=1e-9)
        assert own["time_ns"].item() / 1e3 == pytest.approx(time_us, rel=1e-5)


def test_resizing_that_calls_itself_counts_once(tmp_path: Path) -> None:
    said = {"Input Dims": [[1, 768, 8], [], []], "Concrete Inputs": ["", "[128]", ""],
            "Input type": ["c10::BFloat16", "ScalarList", ""]}  # fmt: skip
    trace = trace_of(tmp_path, [
        event("aten::upsample_nearest1d", "cpu_op", 0, 80, **said),
        event("aten::upsample_nearest1d", "cpu_op", 4, 76, **said),
        event("aten::copy_", "cpu_op", 10, 5,
              **{"Input Dims": [[8], [8]], "Input type": ["float", "float"]}),
        launch(1, 20), kernel("upsample_nearest1d_out_frame", 100, 2, correlation=1),
    ])  # fmt: skip
    row = operator_efficiency(trace).filter(operator="aten::upsample_nearest1d").row(0, named=True)
    assert (row["count"], row["time_ns"], row["bytes"]) == (1, 2000, 2 * 768 * (8 + 128))


def test_mfu_of_a_real_trace_is_said_with_what_it_rests_on() -> None:
    row = TraceAnalysis(traces("tl_h100_qwen05_mem_stack")).step_efficiency().row(0, named=True)
    assert row["mfu_ratio"] == pytest.approx(row["model_flops"] / 989.4e12 / 47.151395e-3, rel=1e-3)
    assert row["is_lower_bound"]
    assert 0.6 < row["kernel_known_ratio"] < row["matrix_known_ratio"] < 0.8


def test_mfu_is_not_said_where_most_matrix_kernels_are_unknown() -> None:
    """A trace of 2021 does not record strides: its convolutions are unknown."""
    row = TraceAnalysis(traces("tb_resnet50_nw0_v100")).step_efficiency().row(0, named=True)
    assert row["mfu_ratio"] is None
    assert "matrix kernels" in row["reason"]


def test_trace_without_shapes_says_what_to_record() -> None:
    with pytest.raises(MissingDataError, match="no shapes"):
        TraceAnalysis(traces("hta_nsres_v100_r0of1")).efficiency()


HALF, LISTS = "c10::Half", [[[70, 50], [70]]] * 4
CONVOLUTION = ("", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1")
BACKWARD = (*[""] * 7, "False", "[0, 0]", "2")
GRADIENTS = [[4, 32, 8, 8], [4, 16, 16, 16], [32, 8, 3, 3], *[[]] * 8]
PER_GRADIENT, PRODUCT = 2 * 4 * 8 * 8 * 32 * 8 * 9, 2 * 2 * 4 * 64 * 64 * 32


@pytest.mark.parametrize(("name", "dims", "types", "values", "expected"), [
    # What the strides leave.
    ("aten::convolution", [[32, 3, 224, 224], [64, 3, 7, 7], *[[]] * 7], [HALF, HALF], CONVOLUTION,
     {"flops": 2 * 32 * 64 * 112 * 112 * 3 * 7 * 7, "precision": "fp16"}),
    # The gradients that are asked for.
    ("aten::convolution_backward", GRADIENTS, ["float"] * 3, (*BACKWARD, "[True, True, True]"),
     {"flops": 2 * PER_GRADIENT}),
    ("aten::convolution_backward", GRADIENTS, ["float"] * 3, (*BACKWARD, "[False, True, True]"),
     {"flops": PER_GRADIENT}),
    # Recomputation is no work of the model.
    ("aten::_scaled_dot_product_flash_attention_backward", [[2, 4, 64, 32]] * 5 + [[]] * 9,
     ["c10::BFloat16"] * 5, (*[""] * 11, "False"),
     {"flops": 5 * PRODUCT, "model_flops": 4 * PRODUCT}),
    ("flash_attn::_flash_attn_forward", [[2, 512, 16, 64]] * 3, ["c10::BFloat16"] * 3,
     ("", "", "", "0.0", "0.1", "False"), {"flops": 4 * 2 * 16 * 512 * 512 * 64}),
    # Lists are read and written by element.
    ("aten::_fused_adamw_", LISTS, ["TensorList"] * 4, (),
     {"kind": "optimizer", "bytes": 4 * 7 * (3500 + 70)}),
    ("aten::_foreach_addcdiv_", [*LISTS[1:], []], [*["TensorList"] * 3, "ScalarList"], (),
     {"kind": "optimizer", "flops": 3 * 3570, "bytes": 4 * 4 * 3570}),
    ("aten::_foreach_norm", [LISTS[0], [], []], ["TensorList", "Scalar", ""], (),
     {"flops": 2 * 3570, "bytes": 4 * 3570}),
    # TraceLens: facebook_timesformer on H100, UnaryElementwise.csv, 0.19921875 MB moved.
    ("aten::upsample_nearest1d", [[1, 768, 8], [], []], ["c10::BFloat16", "ScalarList", ""],
     ("", "[128]", ""), {"kind": "elementwise", "flops": 0, "bytes": 0.19921875 * 2**20}),
    ("aten::upsample_bilinear2d", [[2, 3, 8, 8], [], [], [], []], ["float"],
     ("", "[16, 16]", "False", "", ""), {"flops": 8 * 2 * 3 * 256, "bytes": 4 * 6 * (64 + 256)}),
    ("aten::upsample_nearest3d_backward", [[1, 2, 4, 4, 4], *[[]] * 5], ["float"],
     ("", "[4, 4, 4]", "[1, 2, 2, 2, 2]", "", "", ""), {"bytes": 4 * 2 * (64 + 8)}),
    # A row for each index.
    ("aten::_embedding_bag", [[50, 64], [40], [10]], ["float", "long int", "long int"], (),
     {"kind": "embedding", "flops": 40 * 64, "bytes": 8 * 50 + 4 * 64 * (40 + 10)}),
    ("aten::embedding_dense_backward", [[5, 8, 64], [5, 8]], ["float", "long int"], (),
     {"flops": 40 * 64, "bytes": 8 * 40 + 4 * 64 * 40 * 3}),
    ("aten::index_select", [[100, 8], [], [5]], ["float", "", "long int"], ("", "0", ""),
     {"bytes": 5 * 8 + 2 * 5 * 8 * 4}),
    ("aten::gather", [[100, 8], [], [4, 8]], ["float", "", "long int"], ("", "0", ""),
     {"bytes": 4 * 8 * 8 + 2 * 4 * 8 * 4}),
    ("aten::amax", [[100, 8]], ["float"], ("",), {"bytes": 100 * 8 * 4}),
    ("aten::cumsum", [[100, 8]], ["float"], ("",), {"bytes": 2 * 100 * 8 * 4}),
])  # fmt: skip
def test_work_is_that_of_the_shapes(
    name: str, dims: list[Any], types: list[str], values: tuple[str, ...], expected: dict[str, Any]
) -> None:
    found = work(name, dims, types + [""] * (len(dims) - len(types)), *values)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize("types", [
    ["float", "float"], ["Float", "Float"], ["torch.float32", "c10::Float"],
    ["float32", "float32"],
])  # fmt: skip
@pytest.mark.parametrize("dims", [
    "[[4, 8], [8, 2]]", "[(4, 8), (8, 2)]", '["[4, 8]", "[8, 2]"]', "[[4, 8,], (8, 2,)]",
])  # fmt: skip
def test_types_and_shapes_are_read_in_every_spelling(types: list[str], dims: str) -> None:
    found = work_of("aten::mm", arguments_of(dims, json.dumps(types)))
    assert found is not None
    assert (found.flops, found.bytes, found.precision) == (128, 4 * (32 + 16 + 8), "fp32")


def test_experts_are_read_as_even_routing_would() -> None:
    """vLLM's operator: as TraceLens counts them (FusedMoE.flops_func, bytes_func, gated)."""
    dims = [[16, 4096], [64, 22016, 4096], [64, 4096, 11008], [16, 2]]
    found = work("vllm::rocm_aiter_fused_moe", dims, ["BFloat16"] * 3 + ["Float"])
    assert found is not None
    expert, ends = 2 * 4096 * 3 * 11008, 2 * 2 * 16 * 4096
    assert found.flops == 2 * 16 * 2 * 4096 * 3 * 11008
    even = 64 * (1 - (62 / 64) ** 16)
    assert found.bytes == pytest.approx(even * expert + ends)
    assert found.least_bytes == 2 * expert + ends
    assert found.rows == 16


@pytest.mark.parametrize(("name", "dims", "types"), [
    ("aten::mm", [[2, 3], [4, 5]], ["float", "float"]),
    ("aten::mm", [[2, -3], [3, 5]], ["float", "float"]),
    ("aten::mm", [[2, 1 << 60], [1 << 60, 5]], ["float", "float"]),
    ("aten::mm", "[[2, 3]", ["float"]),
    ("aten::mm", [[[[]]], {"a": 1}], [1, None]),
    ("aten::mm", [], []),
    ("aten::convolution", [[1, 2, 3, 4], [1, 2, 3, 4]], ["float", "float"]),
    ("aiter::_flash_attn_forward", [[2, 512, 16, 64]] * 3, ["c10::BFloat16"] * 3),  # causal?
    ("my::operator", [[2, 3], [3, 5]], ["float", "float"]),
])  # fmt: skip
def test_unknown_stays_unknown(name: str, dims: Any, types: Any) -> None:
    assert work(name, dims, types) is None


def shaped(name: str, ts: float, dims: list[Any], **more: Any) -> Event:
    types = ["c10::BFloat16"] * len(dims)
    return event(name, "cpu_op", ts, 8, **{"Input Dims": dims, "Input type": types, **more})


def test_recomputation_counts_for_hfu_and_not_for_mfu(tmp_path: Path) -> None:
    dims = [[1000, 1000], [1000, 1000]]
    backward = event("autograd::engine::evaluate_function: Checkpoint", "cpu_op", 100, 100)
    events = [
        shaped("aten::mm", 10, dims, **{"Sequence number": 5}), launch(1, 12),
        kernel("sm90_gemm", 20, 10, correlation=1),
        backward,
        shaped("aten::mm", 110, dims, **{"Sequence number": 9}), launch(2, 112),
        kernel("sm90_gemm", 120, 10, correlation=2),
        shaped("aten::mm", 130, dims), launch(3, 132), kernel("sm90_gemm", 140, 10, correlation=3),
        event("ProfilerStep#1", "user_annotation", 0, 1000),
    ]  # fmt: skip
    info = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    trace_of(tmp_path, events, deviceProperties=info)
    row = TraceAnalysis(tmp_path / "trace.json").step_efficiency().row(0, named=True)
    assert (row["model_flops"], row["executed_flops"]) == (4 * 10**9, 6 * 10**9)
    assert row["hfu_ratio"] == pytest.approx(6e9 / 989.4e12 / 1e-3)
    assert row["mfu_ratio"] == pytest.approx(4e9 / 989.4e12 / 1e-3)
    assert not row["is_lower_bound"]


def test_peaks_are_found_by_name_and_can_be_given() -> None:
    names = {"NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 PCIe": "H100 PCIe",
             "NVIDIA H200": "H200", "NVIDIA B200": "B200", "NVIDIA GB200": "GB200",
             "NVIDIA GB300": "GB300", "NVIDIA H20": "H20", "NVIDIA A100-SXM4-80GB": "A100 80 GB",
             "NVIDIA A100-SXM4-40GB": "A100 40 GB", "Tesla V100-SXM2-32GB": "V100 SXM2",
             "AMD Instinct MI300X": "MI300X", "NVIDIA L40S": "L40S", "NVIDIA L4": "L4",
             "NVIDIA GH200 480GB": "GH200"}  # fmt: skip
    for name, wanted in names.items():
        found = peak_of(name)
        assert found is not None
        assert found.name == wanted
    assert peak_of("Voodoo 2") is None
    given = peak_of("NVIDIA H100 80GB HBM3", parse_peak("bf16=500,memory=2"))
    assert given is not None
    assert (given.flops_per_s["bf16"], given.bytes_per_s) == (500e12, 2e12)
    assert given.flops_per_s["fp8"] == 1978.9e12
    with pytest.raises(UsageError, match="--peak"):
        parse_peak("bf16=fast")


def test_every_peak_names_its_source() -> None:
    for peak in PEAKS:
        assert len(peak.source) > 10


def test_command_shows_mfu_and_operators(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = str(traces("tl_h100_qwen05_mem_stack"))
    out = run("efficiency", path).out
    assert "MFU at least 12 %" in out
    assert "_scaled_dot_product" in out
    assert re.search(r"copy_ .* 2\.33 ms +0 +2\.31 T +memory", out), "2.31 TB/s, not 2 B"
    found = run("efficiency", path, "--json", "--peak", "bf16=1").data
    assert found["steps"][0]["peak"].startswith("as given")
    assert found["faults"] == []


def test_small_rates_of_a_cpu_are_shown_in_their_unit(tmp_path: Path, run: Run) -> None:
    shapes = {"Input Dims": [[40, 80], [80, 20]], "Input type": ["float"] * 2}
    path = trace_of(tmp_path, [event("aten::mm", "cpu_op", 0, 400, **shapes)]).path
    out = run("trace", "efficiency", path).said  # lines break where the terminal ends
    assert "128 kFLOP in 400 µs" in out
    assert re.search(r"mm .* 400 µs +320 M +56\.0 M", out)
    assert "0.00" not in out


def test_a_composed_operator_counts_where_nothing_inside_is_known(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[4, 8], [2, 8], [2]], "Input type": ["float"] * 3}
    inner = {"Input Dims": [[2], [4, 8], [8, 2]], "Input type": ["float"] * 3}
    events = [
        event("aten::linear", "cpu_op", 0, 20, **shapes),
        event("aten::addmm", "cpu_op", 2, 10, **inner), launch(1, 4),
        kernel("gemm", 30, 5, correlation=1),
        event("aten::linear", "cpu_op", 50, 20, **shapes), launch(2, 54),
        kernel("gemm", 80, 10, correlation=2),
        event("aten::softmax", "cpu_op", 100, 20, **shapes), launch(3, 104),
        kernel("softmax", 130, 10, correlation=3),
    ]  # fmt: skip
    found = operator_efficiency(trace_of(tmp_path, events)).sort("operator")
    assert found.select("operator", "flops", "time_ns").rows() == [
        ("aten::addmm", 128, 5000), ("aten::linear", 128, 10_000), ("aten::softmax", 160, 10_000),
    ]  # fmt: skip


SHAPES, TYPES = "[[8, 16], [16, 4], []]", '["c10::BFloat16", "c10::BFloat16", "Scalar"]'


def write(folder: Path, text: str) -> Path:
    path = folder / "formulas.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("expression", "number"), [
    ("2 * dim(0, 0) * dim(0, -1) * dim(1, 1)", 1024), ("count(0) / 2 + 1", 65),
    ("bytes(0) // 3 % 7", 1), ("min(dims(0), 5) + max(1, value(2))", 5),
    ("ceil(dim(0, 0) / 3) - -1", 4), ("1e3", 1000),
    ("dim(0, 2)", None), ("dim(2, 0)", None), ("value(0)", None), ("1 / 0", None),
    ("-1", None), ("1e30 * dim(0, 0)", None), ("dim(dim(0, 0), 0)", None),
])  # fmt: skip
def test_expression_over_shapes(tmp_path: Path, expression: str, number: int | None) -> None:
    path = write(tmp_path, f'["a::b"]\nflops = "{expression}"\nbytes = "bytes(1)"\n')
    found = read_formulas(path)
    assert found is not None
    table = {"a::b": formula_of(found["a::b"])}
    work = work_of("a::b", arguments_of(SHAPES, TYPES), ("", "", "3"), table)
    assert (work and work.flops) == number
    if work is not None:
        assert (work.kind, work.bytes, work.precision) == ("gemm", 128, "bf16")


@pytest.mark.parametrize(("text", "said"), [
    ("x", "TOML|Expected|key"), ("", "no formula"), ("a = 1", "table with flops"),
    ("[a]\nbytes = '1'", "table with flops"), ("[a]\nflops = [1]", "expected texts"),
    ("[a]\nflops = '1'\nflop = '1'", "flop is not one of"),
    ("[a]\nflops = '1'\nkind = 'x'", "kind x"),
    ("[a]\nflops = '1'\nprecision = 'x'", "precision x"),
    ("[a]\nflops = '__import__(\"os\").system(\"true\")'", "is not one of"),
    ("[a]\nflops = 'dim.__class__'", "is not one of"),
    ("[a]\nflops = '9**9**9'", "is not one of"), ("[a]\nflops = 'x'", "is not one of"),
    ("[a]\nflops = '[1 for _ in (1,)]'", "is not one of"),
    ("[a]\nflops = 'dim(0)'", "dim takes 2"), ("[a]\nflops = '1 +'", "no expression"),
    ("[a]\nflops = 'True'", "is not one of"), (f"[a]\nflops = '{'(' * 300}'", "no expression"),
    (f"[a]\nflops = '{'1+' * 300}1'", "longer than"),
])  # fmt: skip
def test_what_is_no_formula_is_refused_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UsageError, match=f"(?s)formulas.toml.*({said})"):
        read_formulas(path)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match=str(path)):
            read_formulas(path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="bytes"):
        read_formulas(tmp_path / "bytes")


def test_commands_count_by_them_and_not_twice(tmp_path: Path, run: Run) -> None:
    """An operator of one's own that calls aten::mm: what is inside is part of it."""

    said = {"Input Dims": [[64, 64], [64, 64]], "Input type": ["float", "float"]}
    trace = write_trace(tmp_path / "trace.json", [
        event("my::op", "cpu_op", 1, 8, **said, **{"External id": 1}),
        event("aten::mm", "cpu_op", 2, 6, **said, **{"External id": 2}),
        launch(7, 3), kernel("gemm", 5, 10, correlation=7),
    ])  # fmt: skip
    path = write(tmp_path, '["my::op"]\nflops = "1000 * dim(0, 0)"\n')
    found = run("trace", "efficiency", trace, "--formulas", path, "--json").data
    assert [(row["operator"], row["flops"]) for row in found["operators"]] == [("my::op", 64_000)]
    run("verdict", trace, "--formulas", path)
    run("verdict", trace, "--formulas", tmp_path / "no", status=2)


@pytest.mark.parametrize(("name", "dims", "values", "flops"), [
    ("aiter::mha_fwd", [[2, 8, 4, 16]] * 3 + [[]] * 4, ["", "", "", "0.0", "1", "False", ""],
     2 * 2 * 2 * 4 * 8 * 8 * 16),
    ("aiter::mha_bwd", [[2, 8, 4, 16]] * 4 + [[]] * 5, [""] * 8 + ["True"],
     5 * 2 * 4 * 8 * 8 * 16),
    ("vllm::gemm_with_dynamic_quant", [[4, 32], [8, 16]], ["", ""], 2 * 4 * 32 * 8),
    ("tex_ts::te_gemm_ts", [[6, 5]] + [[]] * 4 + [[7, 5]] + [[]] * 4 + [[7, 6]],
     ["", "", "", "", "1", "", "", "", "", "0", ""], 2 * 6 * 5 * 7),
    ("trtllm::cublas_scaled_mm", [[4, 32], [32, 8]], ["", ""], 2 * 4 * 32 * 8),
])  # fmt: skip
def test_operators_of_other_libraries_have_their_flops(
    name: str, dims: list[list[int]], values: list[str], flops: int
) -> None:
    types = ["c10::BFloat16" if shape else "Scalar" for shape in dims]
    work = work_of(name, arguments_of(json.dumps(dims), json.dumps(types)), values)
    assert name in FORMULAS
    assert work is not None
    assert work.flops == flops
