"""Patterns that are cached: a second verdict computes none, and reads what the first one did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from haiprof import TraceAnalysis
from haiprof.trace_analysis.function_patterns import RankFunctions, cached_patterns, worker_pattern
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import (
    ONE_TRACE,
    event,
    kernel,
    launch,
    rank_file,
    step,
    traces,
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, pl.DataFrame):
        assert_frame_equal(found, expected, check_exact=True)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for each, other in zip(found, expected, strict=True):
            assert_same(each, other)
    else:
        assert found == expected


@pytest.mark.parametrize("name", ONE_TRACE)
def test_pattern_is_the_same_when_it_comes_from_the_cache(name: str) -> None:
    path = next(iter(TraceAnalysis(traces(name)).files.values())).path
    pattern = worker_pattern(Trace(path))
    assert_same(cached_patterns([path], {}, lambda _: [pattern]), [pattern])
    (again,) = cached_patterns([path], {}, lambda _: [])
    assert again is not pattern
    assert_same(again, pattern)


def test_only_traces_that_are_new_are_computed(tmp_path: Path, empty_cache: Path) -> None:
    paths = [rank_file(tmp_path, rank, [
        step(1, 0, 100), event("train.py(4): main", "python_function", 0, 90),
        launch(1, 5), kernel("gemm", 10, 20 + rank, correlation=1),
    ]) for rank in (0, 1)]  # fmt: skip
    computed: list[Path] = []

    def compute(left: Sequence[Path]) -> list[RankFunctions]:
        computed.extend(left)
        return [worker_pattern(Trace(path)) for path in left]

    first = cached_patterns(paths, {"steps": None}, compute)
    assert computed == paths
    assert_same(cached_patterns(paths, {"steps": None}, compute), first)
    assert computed == paths
    cached_patterns(paths, {"steps": (0, 1)}, compute)
    assert computed == [*paths, *paths], "of other steps"
    for entry in empty_cache.rglob("*.answers"):
        entry.write_bytes(entry.read_bytes()[:-1])
    cached_patterns(paths, {"steps": None}, compute)
    assert computed == [*paths, *paths, *paths], "a damaged entry is computed again"
