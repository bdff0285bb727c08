"""What is wrong with the recording of traces: each kind made on purpose, and sound real ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest

from haiprof import TraceAnalysis
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.commands import Run
from tests.unit.analysis.trace import treacherous as made
from tests.unit.analysis.trace.shared import FEW_TRACES, event, kernel, launch, trace_of, traces


@pytest.mark.parametrize("kind", made.KINDS, ids=lambda kind: kind.name)
def test_each_kind_of_treacherous_trace_is_told(kind: made.Kind, tmp_path: Path) -> None:
    path = kind.write(tmp_path)
    analysis = TraceAnalysis(path)
    checks = analysis.trace_check()
    said = checks.filter(pl.col("check") == kind.check)
    assert len(said) == (1 if kind.check else 0), checks
    assert said["is_fault"].to_list() == [kind.is_fault] * len(said)
    if not kind.is_fault:
        assert not checks["is_fault"].any(), checks
    if kind.busy_ms is not None:
        busy = analysis.temporal_breakdown()["compute_ns"].mean()
        assert busy / 1e6 == pytest.approx(kind.busy_ms, rel=0.02)  # type: ignore[operator]


@pytest.mark.parametrize("name", FEW_TRACES)
def test_real_traces_have_no_fault_but_ranks_that_are_missing(name: str) -> None:
    faults = TraceAnalysis(traces(name)).trace_check().filter("is_fault")
    assert faults["check"].to_list() == (["missing_ranks"] if "sampled" in name else [])


def test_real_overlap_on_one_stream_is_by_design() -> None:
    for name, count in (("tl_b200_r0of8_nccl", 74), ("hta_diff_test_v100_r1of2", 31)):
        found = TraceAnalysis(traces(name)).trace_check()
        overlap = found.filter(pl.col("check") == "overlap_by_design")
        assert overlap.select("is_fault", "count").rows() == [(False, count)]


def test_a_real_trace_with_one_broken_end_gives_the_answer_of_the_sound_one(tmp_path: Path) -> None:
    path = next(traces("hta_nsres_v100_r0of1").iterdir())
    right = TraceAnalysis(path).temporal_breakdown()["compute_ns"].item()
    gpu = Trace(path).gpu
    text = gzip.decompress(path.read_bytes()).decode()
    event = json.loads(text, parse_float=str)["traceEvents"][gpu["event"][100]]
    written = f'"ts": {event["ts"]}, "dur": {event["dur"]}'
    assert text.count(written) == 1
    copy = tmp_path / "broken.json"
    copy.write_text(text.replace(written, f'"ts": {event["ts"]}, "dur": 300000'))
    analysis = TraceAnalysis(copy)
    assert "covering_kernels" in analysis.load_report()["faults"].item()
    assert analysis.temporal_breakdown()["compute_ns"].item() == pytest.approx(right, rel=0.001)


def test_a_slow_kernel_that_covers_nothing_stands(tmp_path: Path) -> None:
    events = [launch(n, 100 * n) for n in range(1, 30)]
    events += [kernel("gemm", 100 * n + 5, 20, correlation=n) for n in range(1, 29)]
    trace = trace_of(tmp_path, [*events, kernel("gemm", 2905, 900, correlation=29)])
    assert trace.checked.findings == ()
    assert trace.gpu["dur_ns"].max() == 900_000


def test_command_lists_faults_and_fails(tmp_path: Path, run: Run) -> None:
    path = made.one(made.covering)(tmp_path)
    assert "covering kernels" in run("trace-check", path, status=1).out
    found = run("trace-check", path, "--json", status=1).data
    assert found["fault_count"] == 1
    assert found["findings"][0]["check"] == "covering_kernels"


def test_command_is_content_with_a_sound_trace(tmp_path: Path, run: Run) -> None:
    assert "no recording errors" in run("trace-check", made.one(made.sound)(tmp_path)).out
    assert run("query", made.one(made.sound)(tmp_path), QUERY, "--json").data["faults"] == []


def test_answers_say_what_they_rest_on(tmp_path: Path, run: Run) -> None:
    path = made.one(made.covering)(tmp_path)
    lines = run("trace-report", path).out.splitlines()
    assert any(line.startswith("Faults of the recording") for line in lines)
    at = lines.index("GPU time")
    assert "rests on a faulty recording: covering kernels" in lines[at + 1]
    launches = lines.index("Launches")
    assert "faulty recording" not in lines[launches + 1]
    assert "warning: covering kernels" in run("critical-path", path).err


FAULT = "covering kernels (rank 0): 1 kernel recorded with an end that cannot be true"
QUERY = "select count(*) from gpu"


@pytest.mark.parametrize(
    "words", [["modules"], ["query", QUERY], ["merge"], ["critical-path"], ["functions"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_line_on_faults_stands_above_every_answer(
    words: list[str],
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    command, *rest = words
    block = event("block", "user_annotation", 900, 3000)
    path = made.one(lambda: [block, *made.covering()])(tmp_path)
    said = run(command, path, *rest).err
    assert f"warning: {FAULT}" in said
    assert ("merged as recorded" in said) == (command == "merge")
    more = ["-f"] if command == "merge" else []
    found = run(command, path, *rest, *more, "--json")
    assert json.loads(found.out)["faults"][0].startswith(FAULT)
    assert "warning" not in found.err


@pytest.mark.proof
def test_page_of_traces_has_their_faults(tmp_path: Path) -> None:
    path = made.one(made.covering)(tmp_path)
    page = TraceAnalysis(path).write_page(tmp_path / "page.html").read_text()
    assert "Faults of the recording" in page
    assert FAULT in page
    sound = TraceAnalysis(made.one(made.sound)(tmp_path)).write_page(tmp_path / "sound.html")
    assert "Faults of the recording" not in sound.read_text()


def test_clock_offset_is_corrected_for_launch_delays(tmp_path: Path) -> None:
    trace = Trace(made.one(made.early_clock)(tmp_path))
    assert trace.gpu["ts_ns"].min() == 1_000_000
    contradiction = Trace(made.one(made.contradicting_clock)(tmp_path))
    assert contradiction.gpu["ts_ns"].min() == 960_000


def test_long_kernels_after_the_last_call_are_no_fault(tmp_path: Path) -> None:
    """The host is done in 60 us and waits for nothing; four kernels of 1.5 ms follow."""
    events = [launch(n, 15 * n, 5) for n in range(1, 5)]
    events += [kernel("gemm", 20 + 1500 * (n - 1), 1500, correlation=n) for n in range(1, 5)]
    trace = trace_of(tmp_path, events)
    assert [each for each in trace.checked.findings if each.is_fault] == []
    assert trace.gpu["dur_ns"].to_list() == [1_500_000] * 4


def waits_for_items(ahead_us: float, *, also: bool = False) -> list[dict[str, object]]:
    """Three times a kernel, a copy of its result to the host, and a wait for their stream."""
    found: list[dict[str, object]] = []
    for at in range(3):
        begin, number = 1000 * at, 10 * at + 1
        found += [
            launch(number, begin), kernel("gemm", begin + 10 + ahead_us, 100, correlation=number),
            launch(number + 1, begin + 5, name="cudaMemcpyAsync"),
            kernel("Memcpy DtoH (Device -> Pageable)", begin + 111 + ahead_us, 2,
                   correlation=number + 1, category="gpu_memcpy"),
            launch(number + 2, begin + 7, 120, name="cudaStreamSynchronize"),
        ]  # fmt: skip
        if also:  # another stream, for which nobody waits
            other = kernel("gemm", begin + 20, 9000, stream=8, correlation=number + 3)
            found += [launch(number + 3, begin + 1), other]
    return found


@pytest.mark.parametrize("also", [False, True])
def test_a_gpu_clock_that_is_ahead_shows_at_waits_for_a_stream(tmp_path: Path, also: bool) -> None:
    sound = trace_of(tmp_path, waits_for_items(0, also=also))
    assert [each.check for each in sound.checked.findings if each.is_fault] == []
    (ahead,) = (
        each for each in trace_of(tmp_path, waits_for_items(5000, also=also)).checked.findings
        if each.is_fault
    )  # fmt: skip
    assert ahead.check == "kernel_after_wait"
    assert ahead.text == "kernels end up to 4.986 ms after the host has waited for them"


def test_one_wait_of_several_that_contradicts_may_be_for_another_stream(tmp_path: Path) -> None:
    events = waits_for_items(0)
    events[3] = {**events[3], "ts": 500}
    assert [
        each.check for each in trace_of(tmp_path, events).checked.findings if each.is_fault
    ] == []


@pytest.mark.parametrize(("recorded_us", "faults"), [(8, ["kernel_after_wait"]), (4, [])])
def test_an_event_waits_for_what_was_launched_before_it(
    tmp_path: Path, recorded_us: int, faults: list[str]
) -> None:
    trace = trace_of(tmp_path, [
        launch(1, 5), kernel("gemm", 5010, 100, correlation=1),
        launch(2, recorded_us, name="cudaEventRecord"),
        launch(3, 10, 110, name="cudaEventSynchronize"),
    ])  # fmt: skip
    assert [each.check for each in trace.checked.findings if each.is_fault] == faults


def test_a_wait_before_anything_was_launched_says_nothing(tmp_path: Path) -> None:
    events = [launch(9, 0, name="cudaStreamSynchronize", tid=5), *waits_for_items(0)]
    assert (
        trace_of(tmp_path, events).checked.findings
        == trace_of(tmp_path, waits_for_items(0)).checked.findings
    )
