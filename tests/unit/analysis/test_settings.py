"""Recorded settings as they are read: differences between ranks, and lines that hold anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.run_analysis.ranks import compile_intervals
from haiprof.run_analysis.settings import differences, read_settings
from haiprof.run_format.setting_lines import SEEN_FIELDS, SETTINGS_FIELDS
from tests.sampling import examples
from tests.unit.analysis.recorded import spans_of, write_rank, write_run

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def analyzer(root: Path, *ranks: list[dict[str, Any]]) -> Analyzer:
    run = write_run(root)
    for rank, lines in enumerate(ranks):
        write_rank(run, spans_of("D F B O"), rank=rank, lines=lines)
    return Analyzer(root)


@pytest.mark.sampled
@effort(max_examples=examples(60), suppress_health_check=list(HealthCheck), deadline=None)
@given(
    line=st.dictionaries(st.sampled_from(sorted(SETTINGS_FIELDS)), anything),
    seen=st.dictionaries(st.sampled_from(sorted(SEEN_FIELDS)), anything),
    spans=anything,
)
def test_lines_that_hold_anything_are_read(
    tmp_path_factory: pytest.TempPathFactory, line: Any, seen: Any, spans: Any
) -> None:
    lines = [
        {**line, "type": "settings"},
        {**seen, "type": "settings_seen"},
        {"type": "compile", "time_ns": 5, "count": 1, "spent_ns": 1, "spans": spans},
    ]
    found = analyzer(tmp_path_factory.mktemp("run") / "run", lines)
    settings = read_settings(found.files)[0]
    assert settings.as_json()["rank"] == 0
    assert 0.0 <= settings.on_ratio("anomaly") <= 1.0
    assert differences({0: settings, 1: settings}) == []
    compile_intervals(found.files.ranks[0])


def test_rank_without_the_line_is_left_out(tmp_path: Path) -> None:
    found = analyzer(tmp_path / "run", [{"type": "settings", "cores": 2}], [])
    assert found.settings().keys() == {0}


@pytest.mark.parametrize(
    ("values", "odd"), [((2, 2, 2), {}), ((2, 2, 4), {2: 4}), ((2, 2, 4, 4), {}), ((2, 4), {0: 2})]
)
def test_few_ranks_with_another_value_differ(
    tmp_path: Path, values: tuple[int, ...], odd: dict[int, int]
) -> None:
    lines = [[{"type": "settings", "cpu_limit_cores": value}] for value in values]
    found = differences(analyzer(tmp_path / "run", *lines).settings())
    assert [dict(difference.others) for difference in found] == ([odd] if odd else [])


def test_switch_that_could_not_be_read_differs_from_nothing(tmp_path: Path) -> None:
    """As that of a rank which had ended its process group."""
    lines = [
        [{"type": "settings", "flags": {"distributed_debug": level}}]
        for level in ("OFF", None, "OFF", "DETAIL")
    ]
    (found,) = differences(analyzer(tmp_path / "run", *lines).settings())
    assert (found.usual, dict(found.others)) == ("OFF", {3: "DETAIL"})


def test_compilations_count_once_where_they_overlap(tmp_path: Path) -> None:
    line = {"type": "compile", "spans": [[1_000, 500], [1_200, 100], [3_000, 100], ["x", 1], 7]}
    row = analyzer(tmp_path / "run", [line]).ranks().row(0, named=True)
    assert (row["compile_ns"], row["eval_compile_ns"]) == (600_000, 0)


def test_compilations_of_an_older_recording_are_not_known(tmp_path: Path) -> None:
    line = {"type": "compile", "time_ns": 5, "count": 1, "spent_ns": 9}
    row = analyzer(tmp_path / "run", [line]).ranks().row(0, named=True)
    assert (row["compile_ns"], row["eval_compile_ns"]) == (None, None)
    assert any("the time of compilations is not known" in note for note in row["notes"])
