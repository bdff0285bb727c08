from __future__ import annotations

from collections import Counter
from pathlib import Path

import polars as pl

from haiprof.trace_analysis.attribution import (
    kernel_operators,
    kernel_sequences,
    operator_sequences,
)
from haiprof.trace_analysis.call_tree import call_tree
from tests.unit.analysis.trace.shared import Event, event, kernel, launch, ranks_of, trace_of


def block(at: float, first: int, kernels: str, name: str = "aten::block") -> list[Event]:
    """A call of 50 us that launches kernels, the inner ones through an operator of their own."""
    found = [event(name, "cpu_op", at, 50), event("aten::block_inner", "cpu_op", at + 2, 40)]
    for number, letter in enumerate(kernels):
        found += [
            launch(first + number, at + 3 + number, 0.5),
            kernel(letter, at + 100 + number * 2, 1, correlation=first + number),
        ]
    return found


def test_sequences_are_counted_whole(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path,
        [
            *block(0, 1, "abc"),
            *block(1000, 11, "abc"),
            *block(2000, 21, "abcd"),
            *block(3000, 31, "ab"),
            event("aten::outer", "cpu_op", 4000, 90),
            *block(4010, 41, "xyz"),
        ],
    )
    found = kernel_sequences(trace, operator="aten::block")
    assert found.rows() == [
        ("aten::block|a|b|c", 2, 3, 6000, 100_000),
        ("aten::block|a|b|c|d", 1, 4, 4000, 50_000),
        ("aten::block|x|y|z", 1, 3, 3000, 50_000),
    ]
    assert len(kernel_sequences(trace, operator="aten::block", top_k=1)) == 1
    short = kernel_sequences(trace, operator="aten::block", min_pattern_length=2)
    assert short.filter(pl.col("kernel_count") == 2)["count"].to_list() == [1]
    assert kernel_sequences(trace, operator="no such").is_empty()


def test_a_range_of_the_user_counts_as_an_operator(tmp_path: Path) -> None:
    events = [event("Optimizer.step#SGD.step", "user_annotation", 0, 60), *block(1, 1, "abc")]
    found = kernel_sequences(trace_of(tmp_path, events), operator="Optimizer.step")
    assert found["pattern"].to_list() == ["Optimizer.step#SGD.step|a|b|c"]


def test_sequences_of_a_real_operator_equal_brute_force() -> None:
    trace = ranks_of("tl_h100_qwen05_mem_stack")[0]
    found = kernel_sequences(trace, operator="aten::linear", min_pattern_length=1, top_k=100)
    parents = {
        row[0]: row[1:] for row in call_tree(trace).select("event", "parent_event", "name").rows()
    }
    sequences: dict[int, list[str]] = {}
    for name, at in kernel_operators(trace).select("name", "operator_event").rows():
        top = None
        while at is not None:
            above, operator = parents[at]
            top = at if "aten::linear" in operator else top
            at = above
        if top is not None:
            sequences.setdefault(top, []).append(name)
    counted = Counter("|".join(("aten::linear", *names)) for names in sequences.values())
    assert dict(found.select("pattern", "count").rows()) == counted


def test_operators_say_what_they_launch_and_when(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [*block(0, 1, "ab"), *block(1000, 11, "ab"), *block(2000, 21, "a")])
    assert operator_sequences(trace).rows() == [
        ("aten::block_inner", "a -> b", 2, 1000.0, 97_000.0),
        ("aten::block_inner", "a", 1, 1000.0, 97_000.0),
    ]


def test_a_trace_of_the_cpu_alone_has_no_sequences(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [event("aten::relu", "cpu_op", 0, 1)])
    assert kernel_sequences(trace, operator="aten").is_empty()
    assert operator_sequences(trace).is_empty()
