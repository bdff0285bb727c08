"""Made traces of others with one named fault each: what `haiprof verdict` and `compare` say first.

    python benchmarks/foreign_traces.py TRACELENS [NSYS_AI]

TRACELENS is a checkout or git directory of AMD-AGI/TraceLens: its 22 cases of one fault and six
pairs, of agent_evals/Analysis/analysis_tests/unit_tests_*.tar.gz, and `what-if` of those that wait
for the GPU against the same trace re-timed. NSYS_AI is one of GindaChen/nsys-ai: its exports of
Nsight Systems, of which two are healthy. What is not there is skipped with the reason.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "foreign_traces.md"
CASES = "agent_evals/Analysis/analysis_tests/unit_tests_standalone.tar.gz"
PAIRS = "agent_evals/Analysis/analysis_tests/unit_tests_comparative.tar.gz"
GPU = "MI300X"
"""Of the 22 cases, as combined_traces_standalone.csv says; most of them do not name it."""


EXPORTS = ("h100_2gpu_1s", "mfu_2gpu_before", "mfu_2gpu_after", "healthy_1pct",
           "healthy_judged_1pct", "mock")  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What must be said first of a case."""

    case: str
    words: tuple[str, ...]
    """All of them; of a single trace the operator, which is the first, begins what is said."""


EXPECTED = (
    Expected("conv_01", ("aten::convolution", "2.7 % of the fp32 peak")),
    Expected("conv_02", ("aten::convolution", "2.5 % of the fp32 peak")),
    Expected("conv_03", ("aten::convolution", "8.8 % of the fp32 peak")),
    Expected("conv_04", ("aten::convolution", "3.6 % of the memory's bandwidth")),
    Expected("conv_05", ("aten::convolution", "13 % of the fp32 peak")),
    Expected("conv_06", ("aten::convolution", "11 % of the fp32 peak")),
    Expected("conv_07", ("aten::convolution", "0.7 % of the fp32 peak")),
    Expected("elem_01", ("aten::add", "36 % of the memory's bandwidth")),
    Expected("gemm_01", ("aten::mm", "31.6 TFLOP/s", "3.5 % of the memory's bandwidth")),
    Expected("gemm_02", ("aten::mm", "12 % of the bf16 peak")),
    Expected("gemm_03", ("aten::mm", "29 % of the bf16 peak")),
    Expected("gemm_04", ("aten::mm", "19.9 TFLOP/s", "23 % of the memory's bandwidth")),
    Expected("moe_01", ("fused_moe", "at least 36 % of the memory's bandwidth")),
    Expected("moe_02", ("fused_moe", "26 % of the bf16 peak")),
    Expected("moe_03", ("fused_moe", "25 % of the bf16 peak")),
    Expected("moe_04", ("fused_moe", "27 % of the bf16 peak")),
    Expected("moe_05", ("fused_moe", "57 % of the bf16 peak")),
    Expected("moe_06", ("fused_moe", "a small batch", "GPU is idle", "launches operators")),
    Expected("sdpa_01", ("scaled_dot_product", "20 % of the bf16 peak")),
    Expected("sdpa_02", ("scaled_dot_product", "18 % of the bf16 peak")),
    Expected("sdpa_03", ("scaled_dot_product", "12 % of the memory's bandwidth", "queued")),
    Expected("sdpa_04", ("scaled_dot_product", "6.4 % of the bf16 peak")),
)
"""The faults by name and by arithmetic of the shapes and times; moe_05 has none: it computes
739 TFLOP/s, and AMD says that an MI300X reaches 708 at most (TraceLens, MI300X.json); moe_06
computes faster than its memory could bring the weights."""
EXPECTED_PAIRS = (
    Expected("test01", ("GPU busy 1.16 to 0.80 ms", "aiter::ck_moe_stage1", "fused_moe_kernel")),
    Expected("test02", ("GPU busy 0.28 to 0.12 ms", "aten::bmm", "aten::softmax")),
    Expected("test03", ("GPU busy 0.35 to 0.78 ms", "_flash_attn_forward to aten::bmm")),
    Expected("test04", ("GPU busy 0.73 to 0.48 ms", "aten::mm to aten::addmm")),
    Expected("test05", ("GPU busy time: equally long: 0.20 ms",)),
    Expected("test06", ("GPU busy 2.00 to 0.04 ms: aten::convolution",)),
)


def stored_file(source: Path, name: str) -> bytes | None:
    """A file of a checkout or of a git directory; None where it is not there."""
    if (source / name).is_file():
        return (source / name).read_bytes()
    command = ["git", f"--git-dir={source}", "show", f"HEAD:{name}"]
    found = subprocess.run(command, capture_output=True, check=False)
    return found.stdout if found.returncode == 0 and found.stdout else None


def unpack(source: Path, archive: str, folder: Path) -> list[Path]:
    """The traces of an archive, by name; exits with the reason where it is not there."""
    data = stored_file(source, archive)
    if data is None or data.startswith(b"version https://git-lfs"):
        print(f"skipped: {source} has no {archive}")
        return []
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        files.extractall(folder, filter="data")
    return sorted(folder.rglob("*.json"))


def first_said(*words: str) -> str:
    """What a command of haiprof prints, up to the first empty line."""
    command = [sys.executable, "-m", "haiprof", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout if done.returncode in (0, 10) else done.stderr
    return " ".join(said.partition("\n\n")[0].split())


def judge(expected: Expected, said: str, *, is_single: bool = False) -> str:
    """A row of the result."""
    head = said.partition(".json: ledger")[0]
    begin = said.partition(" ")[0] if is_single else said
    right = expected.words[0] in begin and all(word in said for word in expected.words)
    return f"| {expected.case} | {'right' if right else '**wrong**'} | {head[:240]} |"


def single_rows(source: Path) -> list[str]:
    """The 22 cases."""
    with tempfile.TemporaryDirectory() as folder:
        paths = unpack(source, CASES, Path(folder))
        by_case = {each.case: each for each in EXPECTED}
        return [
            judge(by_case["_".join(path.stem.split("_")[:2])],
                  first_said("verdict", str(path), "--peak", GPU), is_single=True)
            for path in paths
        ]  # fmt: skip


def pair_rows(source: Path) -> list[str]:
    """The six pairs."""
    with tempfile.TemporaryDirectory() as folder:
        paths = unpack(source, PAIRS, Path(folder))
        by_case = {each.case: each for each in EXPECTED_PAIRS}
        firsts = [path for path in paths if path.stem == "trace1"]
        return [
            judge(by_case[path.parent.name.split("_")[0]],
                  first_said("compare", str(path), str(path.with_name("trace2.json"))))
            for path in firsts
        ]  # fmt: skip


def nsight_rows(source: Path) -> list[str]:
    """What the verdict says first of each export."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in EXPORTS:
            data = stored_file(source, f"tests/fixtures/{name}.sqlite")
            if data is None:
                print(f"skipped: {source} has no tests/fixtures/{name}.sqlite")
                continue
            path = Path(folder) / f"{name}.sqlite"
            path.write_bytes(data)
            head = first_said("verdict", str(path)).partition(".sqlite: ledger")[0]
            rows.append(f"| {name} | {head[:240]} |")
    return rows


def retime(events: list[dict[str, Any]], name: str) -> float:
    """By how many us a trace of one stream is shorter with the kernels of a name in half the time.

    Written without haiprof: a kernel begins when it did, or earlier by as much as the one before it
    ends earlier, and never sooner after its launch than any other; the host's last wait ends
    earlier with the last one, and not before it begins.
    """
    link: dict[str, list[dict[str, Any]]] = {"kernel": [], "cuda_runtime": []}
    for each in events:
        if each.get("cat") in link:
            link[each["cat"]].append(each)
    number = "correlation" if "correlation" in link["kernel"][0]["args"] else "External id"
    calls = {each["args"].get(number): each for each in link["cuda_runtime"]}
    pairs = [(each["ts"], calls[each["args"][number]]) for each in link["kernel"]]
    latency, shift = min(begin - call["ts"] for begin, call in pairs), 0.0
    for each in sorted(link["kernel"], key=lambda kernel: kernel["ts"]):
        call = calls[each["args"][number]]
        begin = max(each["ts"] - shift, min(each["ts"], call["ts"] + latency))
        end = begin + each["dur"] / (2 if each["name"] == name else 1)
        shift = each["ts"] + each["dur"] - end
    waits = [each["dur"] for each in link["cuda_runtime"] if "Synchronize" in each["name"]]
    return float(min(shift, max(waits)))


def what_if_rows(source: Path) -> list[str]:
    """Each kernel halved in turn: what `what-if` says of the trace, and the re-timed trace."""
    from haiprof import TraceAnalysis
    from haiprof.trace_analysis.what_if.replay_parts import faster_kernel

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in unpack(source, CASES, Path(folder)):
            events = json.loads(path.read_text())["traceEvents"]
            if not any("Synchronize" in str(each.get("name")) for each in events):
                continue
            for name in sorted({e["name"] for e in events if e.get("cat") == "kernel"}):
                found = TraceAnalysis(path).what_if(faster_kernel(re.escape(name), 2)).row(
                    0, named=True
                )  # fmt: skip
                measured = found["measured_step_ns"] / 1e3
                said, true = found["predicted_step_ns"] / 1e3, measured - retime(events, name)
                is_right = abs(said - true) <= 0.01 * measured
                rows.append(
                    f"| {path.stem} | {'right' if is_right else '**wrong**'} | `{name[:48]}`: "
                    f"{measured:,.1f} µs, said {said:,.1f}, "
                    f"re-timed {true:,.1f} |"
                )
    return rows


def main() -> None:
    """Writes the tables."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    parts = ["# Made traces of others (AMD-AGI/TraceLens): what is said first", ""]
    for title, rows in (("One fault each", single_rows(Path(sys.argv[1]))),
                        ("Pairs", pair_rows(Path(sys.argv[1]))),
                        ("What-if, each kernel in half the time", what_if_rows(Path(sys.argv[1]))),
                        ):  # fmt: skip
        right = sum("| right |" in row for row in rows)
        parts += [f"## {title}: {right} of {len(rows)}", "", "| case | | said |", "|---|---|---|"]
        parts += [*rows, ""]
    if len(sys.argv) > 2:
        rows = nsight_rows(Path(sys.argv[2]))
        parts += [
            f"## Exports of Nsight Systems: {len(rows)}",
            "",
            "| export | said |",
            "|---|---|",
        ]
        parts += [*rows, ""]
    text = "\n".join(parts)
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
