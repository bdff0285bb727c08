"""One's own formulas of FLOPs and bytes: read from a file, evaluated, and never run as code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import UsageError
from haiprof.cli import main
from haiprof.trace_analysis.operator_work import FORMULAS, arguments_of, work_of
from haiprof.trace_analysis.own_formulas import formula_of, read_formulas

SHAPES, TYPES = "[[8, 16], [16, 4], []]", '["c10::BFloat16", "c10::BFloat16", "Scalar"]'


def write(folder: Path, text: str) -> Path:
    path = folder / "formulas.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("expression", "number"),
    [
        ("2 * dim(0, 0) * dim(0, -1) * dim(1, 1)", 1024), ("count(0) / 2 + 1", 65),
        ("bytes(0) // 3 % 7", 1), ("min(dims(0), 5) + max(1, value(2))", 5),
        ("ceil(dim(0, 0) / 3) - -1", 4), ("1e3", 1000),
        ("dim(0, 2)", None), ("dim(2, 0)", None), ("value(0)", None), ("1 / 0", None),
        ("-1", None), ("1e30 * dim(0, 0)", None), ("dim(dim(0, 0), 0)", None),
    ],
)  # fmt: skip
def test_expression_over_shapes(tmp_path: Path, expression: str, number: int | None) -> None:
    path = write(tmp_path, f'["a::b"]\nflops = "{expression}"\nbytes = "bytes(1)"\n')
    found = read_formulas(path)
    assert found is not None
    table = {"a::b": formula_of(found["a::b"])}
    work = work_of("a::b", arguments_of(SHAPES, TYPES), ("", "", "3"), table)
    assert (work and work.flops) == number
    if work is not None:
        assert (work.kind, work.bytes, work.precision) == ("gemm", 128, "bf16")


@pytest.mark.parametrize(
    ("text", "said"),
    [
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
    ],
)  # fmt: skip
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


def test_commands_count_by_them_and_not_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator of one's own that calls aten::mm: what is inside is part of it."""

    def host(name: str, ts: float, dur: float, shapes: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur,
                "args": {"External id": int(ts), "Input Dims": shapes,
                         "Input type": ["float", "float"]}}  # fmt: skip

    shapes = [[64, 64], [64, 64]]
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
              "ts": 3.0, "dur": 1.0, "args": {"correlation": 7}}  # fmt: skip
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5.0,
              "dur": 10.0, "args": {"correlation": 7, "device": 0, "stream": 7}}  # fmt: skip
    trace = tmp_path / "trace.json"
    events = [host("my::op", 1, 8, shapes), host("aten::mm", 2, 6, shapes), launch, kernel]
    trace.write_text(json.dumps({"traceEvents": events}))
    path = write(tmp_path, '["my::op"]\nflops = "1000 * dim(0, 0)"\n')
    assert main(["trace", "efficiency", str(trace), "--formulas", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["operator"], row["flops"]) for row in found["operators"]] == [("my::op", 64_000)]
    assert main(["verdict", str(trace), "--formulas", str(path)]) == 0
    assert main(["verdict", str(trace), "--formulas", str(tmp_path / "no")]) != 0


@pytest.mark.parametrize(
    ("name", "dims", "values", "flops"),
    [
        ("aiter::mha_fwd", [[2, 8, 4, 16]] * 3 + [[]] * 4, ["", "", "", "0.0", "1", "False", ""],
         2 * 2 * 2 * 4 * 8 * 8 * 16),
        ("aiter::mha_bwd", [[2, 8, 4, 16]] * 4 + [[]] * 5, [""] * 8 + ["True"],
         5 * 2 * 4 * 8 * 8 * 16),
        ("vllm::gemm_with_dynamic_quant", [[4, 32], [8, 16]], ["", ""], 2 * 4 * 32 * 8),
        ("tex_ts::te_gemm_ts", [[6, 5]] + [[]] * 4 + [[7, 5]] + [[]] * 4 + [[7, 6]],
         ["", "", "", "", "1", "", "", "", "", "0", ""], 2 * 6 * 5 * 7),
        ("trtllm::cublas_scaled_mm", [[4, 32], [32, 8]], ["", ""], 2 * 4 * 32 * 8),
    ],
)  # fmt: skip
def test_operators_of_other_libraries_have_their_flops(
    name: str, dims: list[list[int]], values: list[str], flops: int
) -> None:
    types = ["c10::BFloat16" if shape else "Scalar" for shape in dims]
    work = work_of(name, arguments_of(json.dumps(dims), json.dumps(types)), values)
    assert name in FORMULAS
    assert work is not None
    assert work.flops == flops
