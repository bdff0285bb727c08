"""Lines of two runs: what changed is named with an interval that holds it, and nothing else is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.compare.comparison import Comparison
from haiprof.run_format.layout import RunPaths
from haiprof.show.views.compare import compare_data, headline, line_table
from tests.sampling import first_of
from tests.unit.analysis.recorded import WALL_OFFSET_NS
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.analysis.test_compare import compared, write

SITE = "/opt/venv/lib/python3.11/site-packages"
MAIN = ("/job/train.py", 88, "main")
FETCH = (f"{SITE}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
OPEN = (f"{SITE}/PIL/Image.py", 3000, "open")
EVERY_NS = 20 * NS_PER_MS


def write_sampled(
    log_dir: Path, name: str, *, seed: int, data_ms: float = 8.0, decode: float = 0.5,
    line: int = 12, step_count: int = 400,
) -> Path:  # fmt: skip
    """A run sampled at 50 Hz, of whose loading so much is in `decode`."""
    root = write(log_dir, name, seed=seed, data_ms=data_ms, step_count=step_count, second=seed)
    chance = random.Random(seed)
    loading, augment = ("/job/data.py", line, "decode"), ("/job/data.py", 40, "augment")
    steps = Analyzer(root).phases().filter(rank=0).sort("start_ns")
    spans = steps.select("phase", "start_ns", "duration_ns").rows()
    end_ns = spans[-1][1] + spans[-1][2]
    samples: list[tuple[int, Stack]] = []
    time_ns, at = spans[0][1] + chance.randint(0, EVERY_NS), 0
    while time_ns < end_ns:
        while spans[at][1] + spans[at][2] <= time_ns:
            at += 1
        inside = spans[at][0] == "dataloader" and spans[at][1] <= time_ns
        inner = loading if chance.random() < decode else augment
        stack: Stack = (MAIN, FETCH, inner, OPEN) if inside else (MAIN,)
        samples.append(((time_ns - WALL_OFFSET_NS) // 1000 * 1000, stack))
        time_ns += chance.randint(EVERY_NS // 2, 3 * EVERY_NS // 2)
    write_stacks(RunPaths(root).rank(0).stacks, samples, per_line=50)
    return root


def pair(log_dir: Path, *, seed: int = 1, **after: float) -> Comparison:
    old = write_sampled(log_dir, "before", seed=seed)
    return compared(old, write_sampled(log_dir, "after", seed=seed + 100, **after))  # type: ignore[arg-type]


def test_line_that_grew_is_named_with_its_time(tmp_path: Path) -> None:
    # 8 ms of loading, half of it in decode; then 12 ms, two thirds of it: 4 ms before, 8 ms after.
    found = pair(tmp_path, data_ms=12.0, decode=2 / 3, line=15)
    assert [(one.function, one.phase) for one in found.lines] == [("decode", "dataloader")]
    (grown,) = found.lines
    assert grown.low_ns <= 4 * NS_PER_MS <= grown.high_ns
    assert (grown.before_line, grown.after_line) == (12, 15)
    assert headline(found).endswith("of it, at data.py:15 decode")
    assert line_table(found).rows[0][:2] == ("data.py:15 decode", "dataloader")
    assert compare_data(found)["lines"][0]["function"] == "decode"


def test_time_that_moved_from_one_line_to_another_is_found_in_equal_steps(tmp_path: Path) -> None:
    found = pair(tmp_path, decode=0.9)
    assert found.state == "same"
    signs = {one.function: one.difference_ns > 0 for one in found.lines}
    assert signs == {"decode": True, "augment": False}


@pytest.mark.parametrize("seed", first_of(range(2, 10), 2, 5, 8))
def test_equal_runs_name_no_line(tmp_path: Path, seed: int) -> None:
    assert pair(tmp_path, seed=seed).lines == ()


def test_runs_without_stacks_say_why_no_line_is_named(tmp_path: Path) -> None:
    found = compared(write(tmp_path, "a", seed=1), write(tmp_path, "b", seed=2))
    assert found.lines == ()
    assert "no stacks were sampled" in found.no_lines
