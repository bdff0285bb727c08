"""The scored benchmark: the scripts it writes, what it calls right, a drawn job under haiprof."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FAULTS = Path(__file__).parents[3] / "benchmarks" / "faults"
MODULES = ("run", "draw", "kinds", "measure", "score", "foreign")


@pytest.fixture
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(FAULTS))
    try:
        import run  # type: ignore[import-not-found]

        yield run
    finally:
        sys.path.remove(str(FAULTS))
        for name in MODULES:
            sys.modules.pop(name, None)


def test_every_kind_is_a_whole_script_with_its_fault_and_without(
    bench: Any, tmp_path: Path
) -> None:
    from draw import FAULTS as KINDS  # type: ignore[import-not-found]
    from draw import HEALTHY, Work

    path, seen = tmp_path / "train.py", set()
    for seed in range(2 * max(len(KINDS), len(HEALTHY))):
        case = bench.draw(seed)
        kind, texts = case.kind, []
        seen.add(kind.name)
        for faulty in (True, False):
            bench.write_job(case, path, Work(1, 0.02, 10**5, 2e7), faulty=faulty)
            texts.append(path.read_text())
            compile(texts[-1], str(path), "exec")
            if faulty:
                lines = bench.faulty_lines(path)
        if kind.healthy:
            assert not lines, f"{kind.name}: a healthy job has no line at fault"
        else:
            assert texts[0] != texts[1] or kind.beside or kind.under, kind.name
            assert any((kind.positions, kind.activities, kind.said, lines)), kind.name
        assert case == bench.draw(seed)
    assert seen == {kind.name for kind in (*KINDS, *HEALTHY)}


def account(line: int, gain: float, **given: Any) -> dict[str, Any]:
    return {
        "ranks": [], "position": "after_step", "activity": "python", "file": "/a/train.py",
        "line": line, "function": "f", "callers": [], "gain_ns": gain, "explanation": None, **given,
    }  # fmt: skip


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": {"mean_ns": 100.0, "count": 90}, "ledger": list(rows), "problem_count": 1,
        "opportunities": list(range(len(rows))),
        "findings": [{"slug": "x", "code_lines": [], "account": 0, "severity": "warning"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "first", "line", "listed", "promised"),
    [
        ([account(7, 20.0)], True, True, True, 0.2),
        ([account(8, 20.0, callers=["train.py:7 main"])], True, True, True, 0.2),
        ([account(9, 20.0)], True, False, False, 0.2),
        ([account(9, 20.0, position="input"), account(7, 10.0)], False, False, True, 0.1),
        ([account(7, 20.0, ranks=[1])], False, True, True, 0.0),
        ([], False, False, False, 0.0),
    ],
)
def test_a_verdict_is_held_to_line_place_rank_and_gain(
    bench: Any, rows: list[Any], first: bool, line: bool, listed: bool, promised: float
) -> None:
    rank = 0 if rows and rows[0]["ranks"] else None
    truth = bench.Truth(
        lines=(("train.py", 7),), positions=("after_step",), activities=("python",), rank=rank
    )
    said = document(*rows)
    row = bench.score.judged(truth, said, bench.score.opportunities(said))
    assert row == {"first": first, "line": line, "listed": listed, "promised": promised}
    assert bench.score.outcome({**row, "truth": {"gain": 0.2}}) == (
        "right" if first else "listed" if listed else "missed"
    )


def test_a_promise_is_kept_within_three_points_or_a_fifth(bench: Any) -> None:
    assert bench.score.is_kept(0.06, 0.03)
    assert bench.score.is_kept(0.50, 0.41)
    assert not bench.score.is_kept(0.0, 0.04)
    said = document(account(7, 20.0, activity="no core"), account(8, 10.0))
    assert [a["line"] for a in bench.score.opportunities(said, alone=False)] == [8]
    assert bench.score.lacks({"findings": []}) == list(bench.score.NEEDED)


def test_foreign_programs_are_edited_and_not_copied(bench: Any) -> None:
    import foreign  # type: ignore[import-not-found]

    found = foreign.programs(Path("nowhere"), loaded=False)
    assert sum(program.healthy for program in found) >= 15
    assert sum(not program.healthy for program in found) >= 10
    assert all(len(p.read_text()) < 3000 for p in foreign.RECIPES.glob("*.yaml"))


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.parametrize("name", ["wait in forward", "accumulation"])
def test_drawn_job_is_run(bench: Any, tmp_path: Path, name: str) -> None:
    seeds = (seed for seed in range(400) if bench.draw(seed).kind.name == name)
    case = next(c for c in map(bench.draw, seeds) if c.style == "plain")
    job = bench.Drawn(case=case)
    ran = bench.measure.run(job, tmp_path / "case", bench.AS_DRAWN, recorded=True)
    assert not ran.status
    assert ran.steps > 0
    assert "findings" in bench.measure.verdict(tmp_path / "case")
