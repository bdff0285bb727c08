"""The Analyzer as Python code uses it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.errors import MissingDataError, MissingExtraError, UsageError
from tests.unit.cli.test_kept_answers import STEPS, ended_run


@pytest.fixture
def run(tmp_path: Path) -> Analyzer:
    return Analyzer(ended_run(tmp_path / "job-1").root)


def test_repr_says_which_run_and_how_it_ended(run: Analyzer, tmp_path: Path) -> None:
    assert "1 rank, ended" in repr(run)
    assert str(tmp_path / "job-1") in repr(run)
    assert "nowhere" in repr(Analyzer("/nowhere"))


def test_steps_can_be_chosen(run: Analyzer) -> None:
    assert run.steps().height == STEPS
    assert run.steps(rank=0, since=10, traced=False)["step"].to_list() == list(range(10, STEPS))
    assert run.steps(traced=True).is_empty()
    with pytest.raises(MissingDataError, match="no rank 7"):
        run.steps(rank=7)


def test_describe_explains_every_column(run: Analyzer) -> None:
    for name in ("steps", "phases", "counters", "ranks", "windows", "reactions"):
        frame = run.describe(name)
        assert frame["name"].to_list() == getattr(run, name)().columns
        assert all(frame["meaning"])
        text = str(frame) + frame._repr_html_().replace("&hellip;", "…")
        assert "…" not in text, "rows and meanings are whole"
    with pytest.raises(UsageError, match="stepz"):
        run.describe("stepz")


def test_to_pandas_without_pyarrow_names_the_extra(
    run: Analyzer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for frame in (run.steps(), run.counters(), run.describe("steps")):
        with pytest.raises(MissingExtraError, match="pyarrow") as raised:
            frame.to_pandas()
        assert "haiprof[pandas]" in raised.value.hint


def test_verdict_is_a_line_a_card_and_html(run: Analyzer) -> None:
    verdict = run.verdict()
    assert repr(verdict) == f"<verdict on {verdict.name}: {verdict.headline}>"
    assert verdict.headline in " ".join(str(verdict).replace("│", " ").split())
    assert verdict._repr_html_().startswith("<pre")
    assert run.findings() == verdict.findings
