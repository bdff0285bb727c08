from __future__ import annotations

import io

import pytest
from rich.console import Console

from haiprof.show.terminal import Sparkline, fit_width, sparkline


def test_sparkline_missing_value_is_a_gap() -> None:
    assert sparkline([0.0, None, 1.0]) == "▁ ▇"


def test_sparkline_zero_is_the_lowest_block() -> None:
    assert sparkline([0.0, 0.0]) == "▁▁"


def test_sparkline_scale_begins_at_zero() -> None:
    assert sparkline([98.0, 100.0]) == "▇▇"


def test_sparkline_top_is_shared_between_lines() -> None:
    assert sparkline([0.5], top=1.0) == "▄"


def test_sparkline_nothing_is_empty() -> None:
    assert sparkline([]) == ""
    assert sparkline([None, None]) == "  "


@pytest.mark.parametrize("width", [1, 7, 40, 200])
def test_fitted_has_the_width_and_keeps_gaps(width: int) -> None:
    values = [1.0] * 20 + [None] * 20 + [2.0] * 20
    cells = fit_width(values, width)
    assert len(cells) == width
    assert all(cell is None or 1.0 <= cell <= 2.0 for cell in cells)
    if width >= 7:
        assert cells[width // 2] is None


def test_fitted_nothing_is_all_gaps() -> None:
    assert fit_width([], 3) == [None, None, None]


def test_sparkline_takes_the_width_it_is_given() -> None:
    console = Console(file=io.StringIO(), width=20, color_system=None)
    with console.capture() as capture:
        console.print(Sparkline([1.0, 2.0, 3.0, 4.0]))
    assert len(capture.get().rstrip("\n")) == 20
