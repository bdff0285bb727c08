from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.base.statistics import adjust_p_values, compare_samples
from haiprof.trace_analysis.diff import EVERYTHING, TraceDiff, compare_traces, step_samples, verdict
from haiprof.trace_analysis.kernel_names import (
    generic_kernel_name,
    name_normalizer,
    short_kernel_name,
)
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.sampling import examples
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    launch,
    rank_file,
    step,
    trace_of,
    trace_path,
)

CONTROL, TEST = "hta_diff_control_a100_r3of8", "hta_diff_test_v100_r1of2"


@cache
def samples(name: str) -> pl.DataFrame:
    found = step_samples(Trace(trace_path(name)), of=EVERYTHING)
    return found.with_columns(rank=pl.lit(0, pl.Int64))


# TraceDiff.compare_traces of traceinsight 0.6.1 over all six steps of these traces, us.
HTA = {
    CONTROL: {"kernel": (9450, 501_567), "rest": (65_461, 2_164_149)},
    TEST: {"kernel": (15_018, 907_245), "rest": (52_666, 3_999_529)},
}


@pytest.mark.parametrize("name", [CONTROL, TEST])
def test_counts_and_times_of_all_steps_are_those_of_hta(name: str) -> None:
    found = samples(name).filter(pl.col("of") != "unlaunched")
    gpu = found.filter(of="kernel").select("count", "total_ns").sum()
    assert gpu.row(0) == (HTA[name]["kernel"][0], HTA[name]["kernel"][1] * 1000)
    rest = found.filter(pl.col("of") != "kernel").select("count", "total_ns").sum()
    assert rest.row(0) == (HTA[name]["rest"][0], HTA[name]["rest"][1] * 1000)


def test_changes_of_kernels_are_those_of_hta() -> None:
    found = compare_traces(samples(CONTROL), samples(TEST)).names.filter(of="kernel")
    counts = Counter(found["change"].drop_nulls())
    assert counts == {
        "added": 27, "deleted": 66, "increased": 15, "decreased": 9, "unchanged": 84,
    }  # fmt: skip
    copies = found.filter(name="Memcpy DtoD (Device -> Device)").row(0, named=True)
    assert (copies["control_count"] * 6, copies["test_count"] * 6) == (18, 4608)
    assert copies["difference_ns"] * 6 == pytest.approx(89_890_000)


def test_real_shares_explain_the_whole_difference() -> None:
    diff = compare_traces(samples(CONTROL), samples(TEST))
    for kind in ("kernel", "operator"):
        own = diff.names.filter(of=kind)
        assert own["explained_ratio"].sum() == pytest.approx(1, abs=1e-9)
        assert own["explained_ns"].sum() == pytest.approx(diff.step_time.difference_ns, abs=1)
    assert diff.names.filter(of="runtime")["explained_ns"].null_count() > 0
    assert verdict(diff).is_slower
    assert verdict(diff).text == "60.1 % more time (p = 0.0022, 6 and 6 steps)"
    assert any("614 GPU events of the test" in note for note in diff.notes)


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=6)
WINDOWS = [(2, 12), (14, 9)]  # start and length of two steps; a gap of 0 to 2 and 12 to 14


@settings(max_examples=examples(40), deadline=None)
@given(SPANS)
def test_shares_of_kernels_agree_with_every_ns_on_its_own(spans: list[tuple[int, int]]) -> None:
    events = [kernel(f"k{i % 3}", at / 1000, long / 1000) for i, (at, long) in enumerate(spans)]
    found = shares(events)
    for number, (start, length) in enumerate(WINDOWS):
        expected: Counter[str] = Counter()
        for ns in range(start, start + length):
            active = [i % 3 for i, (at, long) in enumerate(spans) if at <= ns < at + long]
            for which in active:
                expected[f"k{which}"] += Fraction(1, len(active))  # type: ignore[assignment]
            expected["(GPU idle)"] += not active
        assert_shares(found, number, expected)


THREADED = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 2)),
                    max_size=6)  # fmt: skip


@settings(max_examples=examples(40), deadline=None)
@given(THREADED)
def test_shares_of_operators_go_to_the_innermost_of_each_thread(
    spans: list[tuple[int, int, int]],
) -> None:
    nested: list[tuple[int, int, int]] = []
    for at, long, tid in spans:  # those that would cross another one are left out
        crosses = any(
            tid == other[2] and (at < other[0] < at + long < other[0] + other[1]
                                 or other[0] < at < other[0] + other[1] < at + long)
            for other in nested
        )  # fmt: skip
        same = any(tid == other[2] and (at, long) == other[:2] for other in nested)
        if not crosses and not same:
            nested.append((at, long, tid))
    events = [event(f"op{i}", "cpu_op", at / 1000, long / 1000, tid=tid)
              for i, (at, long, tid) in enumerate(nested)]  # fmt: skip
    found = shares(events)
    for number, (start, length) in enumerate(WINDOWS):
        expected: Counter[str] = Counter()
        for ns in range(start, start + length):
            inner: dict[int, int] = {}
            for i, (at, long, tid) in enumerate(nested):
                if at <= ns < at + long and (tid not in inner or long < nested[inner[tid]][1]):
                    inner[tid] = i
            for i in inner.values():
                expected[f"op{i}"] += Fraction(1, len(inner))  # type: ignore[assignment]
            expected["(no operator)"] += not inner
        assert_shares(found, number, expected)


def shares(events: list[Event]) -> pl.DataFrame:
    marks = [step(i, at / 1000, long / 1000) for i, (at, long) in enumerate(WINDOWS)]
    with TemporaryDirectory() as folder:
        return step_samples(trace_of(Path(folder), marks + events))


def assert_shares(found: pl.DataFrame, number: int, expected: Counter[str]) -> None:
    ours = dict(found.filter(step=number).select("name", "share_ns").drop_nulls().iter_rows())
    for name, value in expected.items():
        assert ours.get(name, 0) == pytest.approx(float(value), abs=1e-9)


def steps_of(lengths: list[float], kernels: dict[str, float], first: int = 1) -> list[Event]:
    """Steps of these lengths in us, each with one kernel of each name."""
    events, at = [], 0.0
    for number, length in enumerate(lengths):
        events.append(step(first + number, at, length))
        for place, (name, takes) in enumerate(kernels.items()):
            correlation = 10 * number + place + 1
            events.append(launch(correlation, at + 1 + place))
            events.append(kernel(name, at + 3 + 10 * place, takes, correlation=correlation))
        at += length
    return events


def diff_of(folder: Path, before: list[Event], after: list[Event], **options: Any) -> TraceDiff:
    paths = []
    for word, events in (("before", before), ("after", after)):
        (folder / word).mkdir(parents=True)
        paths.append(rank_file(folder / word, 0, events).parent)
    return TraceAnalysis(paths[0]).diff(TraceAnalysis(paths[1]), **options)


def test_diff_by_hand(tmp_path: Path) -> None:
    before = steps_of([100, 100, 101, 101], {"a": 5, "gone": 4})
    after = steps_of([120, 121, 122, 123], {"a": 9, "new": 8}, first=7)
    diff = diff_of(tmp_path, before, after)
    rows = {row["name"]: row for row in diff.names.iter_rows(named=True)}
    assert {name: row["change"] for name, row in rows.items() if row["of"] == "kernel"} == {
        "a": "unchanged", "gone": "deleted", "new": "added", "(GPU idle)": None,
    }  # fmt: skip
    a = rows["a"]
    assert (a["control_ns"], a["test_ns"]) == (5000, 9000)
    assert (a["difference_ns"], a["ratio"]) == (4000, 1.8)
    assert a["explained_ratio"] == pytest.approx(4 / 21)
    assert (a["control_step_std_ns"], a["control_rank_std_ns"]) == (0, None)
    assert a["p_value"] == pytest.approx(2 / 70)
    assert a["slower_probability"] == 1
    assert rows["new"]["ratio"] is None
    assert rows["(GPU idle)"]["difference_ns"] == 21_000 - 4000 - 8000 + 4000
    assert diff.steps["control_step"].to_list() == [1, 2, 3, 4]
    assert diff.steps["test_step"].to_list() == [7, 8, 9, 10]
    assert diff.step_time.change_ratio == pytest.approx(21 / 100.5)
    assert verdict(diff).is_slower
    assert verdict(diff, tolerance_ratio=0.3).is_slower is False


def test_steps_of_the_same_number_stand_side_by_side(tmp_path: Path) -> None:
    diff = diff_of(
        tmp_path, steps_of([10] * 2, {}), steps_of([10] * 2, {}, first=2), of=("runtime",)
    )
    assert diff.steps.select("control_step", "test_step").rows() == [(1, None), (2, 2), (None, 3)]


def test_few_steps_have_no_significance_but_a_reason(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, steps_of([50] * 3, {"a": 5}), steps_of([80] * 9, {"a": 5}))
    row = diff.names.filter(name="a").row(0, named=True)
    assert row["p_value"] is row["slower_probability"] is None
    assert row["no_p_value_reason"] == "3 and 9 steps; at least 4 each are needed"
    judged = verdict(diff)
    assert judged.is_slower is None
    assert judged.text.startswith(
        "60.0 % more time; too few measurements to tell a difference from chance: 3 and 9 steps"
    )


def test_one_slow_step_is_no_regression(tmp_path: Path) -> None:
    diff = diff_of(tmp_path, steps_of([50, 51, 52, 53], {}), steps_of([40, 41, 42, 900], {}))
    assert diff.step_time.difference_ns > 0
    assert verdict(diff, significance=1).is_slower is False


def test_ranks_are_averaged_and_spread_over_them_is_told(tmp_path: Path) -> None:
    for word, times in (("before", (5, 7)), ("after", (6, 10))):
        (tmp_path / word).mkdir()
        for rank, takes in enumerate(times):
            rank_file(tmp_path / word, rank, steps_of([50] * 4, {"a": takes}))
    analysis = TraceAnalysis(tmp_path / "before")
    row = analysis.diff(TraceAnalysis(tmp_path / "after")).names.filter(name="a").row(0, named=True)
    assert (row["control_ns"], row["test_ns"]) == (6000, 8000)
    assert row["control_rank_std_ns"] == pytest.approx(2000 / 2**0.5)
    assert row["control_count"] == 1


def test_without_steps_whole_traces_are_compared(tmp_path: Path) -> None:
    plain = [kernel("a", 10, 5), kernel("a", 20, 5, correlation=9), launch(9, 0)]
    diff = diff_of(tmp_path, plain, [*plain, kernel("a", 30, 5)])
    row = diff.names.filter(name="a").row(0, named=True)
    assert (row["control_count"], row["test_count"], row["change"]) == (2, 3, "increased")
    assert "no profiler steps" in diff.notes[0]
    assert verdict(diff).is_slower is None


def test_steps_on_one_side_only_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="the test has no profiler steps"):
        diff_of(tmp_path, steps_of([50] * 4, {"a": 5}), [kernel("a", 10, 5)])
    diff_of(tmp_path / "again", steps_of([50] * 4, {"a": 5}), [kernel("a", 1, 5)], by_step=False)


def test_steps_can_be_chosen(tmp_path: Path) -> None:
    events = steps_of([50, 60, 70, 80], {"a": 5})
    diff = diff_of(tmp_path, events, events, steps=(1, 3), other_steps=(3, 5))
    assert (diff.step_time.control_ns, diff.step_time.test_ns) == (55_000, 75_000)


def test_wrong_kinds_and_names_are_errors(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, steps_of([5], {}))
    with pytest.raises(ValueError, match="kernels"):
        step_samples(trace, of=("kernels",))
    with pytest.raises(ValueError, match="tiny"):
        step_samples(trace, names="tiny")


@given(st.lists(st.integers(0, 6), min_size=4, max_size=6),
       st.lists(st.integers(0, 6), min_size=4, max_size=6))  # fmt: skip
def test_rank_sum_test_agrees_with_all_permutations(first: list[int], second: list[int]) -> None:
    found = compare_samples(np.array(first, dtype=float), np.array(second, dtype=float))
    pooled = first + second

    def wins(chosen: tuple[int, ...]) -> Fraction:
        others = [v for i, v in enumerate(pooled) if i not in chosen]
        pairs = [(pooled[i], other) for i in chosen for other in others]
        return Fraction(sum(2 * (a > b) + (a == b) for a, b in pairs), 2 * len(pairs))

    middle = Fraction(1, 2)
    observed = wins(tuple(range(len(first), len(pooled))))
    every = [wins(chosen) for chosen in combinations(range(len(pooled)), len(second))]
    extreme = sum(abs(value - middle) >= abs(observed - middle) for value in every)
    assert found.p_value == pytest.approx(extreme / len(every))
    assert found.greater_probability == pytest.approx(float(observed))


def test_many_measurements_take_the_normal_approximation() -> None:
    random = np.random.default_rng(1)
    first, second = random.normal(0, 1, 20), random.normal(0.6, 1, 20)
    exact = compare_samples(first, second).p_value
    near = compare_samples(np.append(first, first.mean()), second).p_value
    assert exact is not None
    assert near is not None
    assert near == pytest.approx(exact, rel=0.5)
    assert compare_samples(np.ones(30), np.ones(30)).p_value == 1


def test_adjusted_p_values_are_those_of_benjamini_and_hochberg() -> None:
    assert adjust_p_values([0.01, None, 0.04, 0.03, 0.005]) == [0.02, None, 0.04, 0.04, 0.02]


def test_short_names_drop_arguments_and_types() -> None:
    full = "void at::native::(anonymous namespace)::k<4, f<int (*)(int)> >(int, float*) "
    assert short_kernel_name(full) == "at::native::k"
    clone = "void at::native::vectorized<4, f<float>, std::array<char*, 3ul> >(int) [clone .kd]"
    assert short_kernel_name(clone) == "at::native::vectorized"
    compared = "std::enable_if<(((8)>(0)))&&x<c10::BFloat16>::y, void>::type vllm::norm<8>(long)"
    assert short_kernel_name(compared) == "vllm::norm"
    assert short_kernel_name("Memcpy DtoH (Device -> Pinned)") == "Memcpy DtoH (Device -> Pinned)"
    assert short_kernel_name("triton_poi_fused_0d1d") == "triton_poi_fused_0d1d"
    assert short_kernel_name("broken<int") == "broken<int"
    assert (
        name_normalizer("short", is_kernel=False)("CppNode<float>: Back (1)") == "CppNode: Back (1)"
    )


def test_generic_names_are_the_same_on_any_gpu() -> None:
    pairs = [
        ("volta_sgemm_128x64_nn", "ampere_sgemm_64x64_nn"),
        ("sm80_xmma_gemm_f16_tilesize128x128", "sm90_xmma_gemm_f16_tilesize128x128"),
        ("void cutlass::Kernel<cutlass_80_tensorop>(x)", "void cutlass::Kernel<cutlass_75_x>(y)"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
         "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        *(("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", name)
          for name in ("ncclSymkDevKernel_AllReduce_AGxLL_R(ncclSymkDevWorkArgs4K)",
                       "void ncclSymDevKernel_AllReduce_RSxLD_AGxST(ncclSymDevArgs)",
                       "void ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevArgs) [clone .kd]")),
    ]  # fmt: skip
    for old, new in pairs:
        assert generic_kernel_name(old) == generic_kernel_name(new) != ""
