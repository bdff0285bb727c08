"""The generator of the scored benchmark: what it writes, and two drawn jobs under haiprof."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FAULTS = Path(__file__).parents[3] / "benchmarks" / "faults"


@pytest.fixture
def generator() -> Iterator[Any]:
    sys.path.insert(0, str(FAULTS))
    try:
        import run  # type: ignore[import-not-found]

        yield run
    finally:
        sys.path.remove(str(FAULTS))
        for name in ("run", "draw", "kinds"):
            sys.modules.pop(name, None)


def test_every_kind_is_a_whole_script_whose_fault_has_a_line(
    generator: Any, tmp_path: Path
) -> None:
    path, kinds, with_line = tmp_path / "train.py", {}, set()
    for seed in range(2 * 90):
        case = generator.draw(seed)
        kinds[case.kind.name] = case.kind
        generator.write_job(case, path)
        compile(path.read_text(), str(path), "exec")
        if generator.faulty_lines(path):
            with_line.add(case.kind.name)
        assert case == generator.draw(seed)
    assert sum(bool(kind.accepted) for kind in kinds.values()) >= 60
    assert sum(not kind.accepted for kind in kinds.values()) >= 40
    assert all(kinds[name].accepted for name in with_line), "a healthy job has no line at fault"
    assert len(with_line) >= 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["wait in forward", pytest.param("accumulation", marks=pytest.mark.proof)]
)
def test_drawn_job_is_judged(generator: Any, tmp_path: Path, name: str) -> None:
    """What else runs on the machine is a cause of its own, which a verdict then names rightly."""
    seeds = (seed for seed in range(400) if generator.draw(seed).kind.name == name)
    case = next(c for c in map(generator.draw, seeds) if c.style == "plain")
    row = generator.run_case(case, tmp_path / "case")
    assert row["steps"] > 15
    if case.is_healthy:
        assert row["outcome"] in ("silent", "note", "false finding"), row
    else:
        assert any(case.kind.accepted[0] in found for found in row["findings"]), row
