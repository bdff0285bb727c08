from __future__ import annotations

import io

import pytest
from rich.console import Console

from haiprof.show.figures.style import PHASES
from haiprof.show.terminal import SplitBar, block_lengths


def split(*times: float | None) -> dict[str, float | None]:
    return dict(zip(PHASES, times, strict=True))


@pytest.mark.parametrize("width", [5, 10, 37, 100])
def test_block_lengths_add_up_and_lose_no_phase(width: int) -> None:
    lengths = block_lengths(split(0.001, 50, 30, 10, 9.999), width)
    assert sum(lengths.values()) == width
    assert min(lengths.values()) >= 1
    assert list(lengths) == list(PHASES)


def test_block_lengths_follow_the_times() -> None:
    assert block_lengths(split(25, 50, 25, 0, None), 40) == {
        "dataloader": 10,
        "forward": 20,
        "backward": 10,
    }


def test_block_lengths_no_time_is_no_block() -> None:
    assert block_lengths(split(None, None, 0, 0, None), 40) == {}


def test_bar_without_colour_tells_phases_apart_by_filling() -> None:
    console = Console(file=io.StringIO(), width=10, color_system=None)
    with console.capture() as capture:
        console.print(SplitBar(split(20, 20, 20, 20, 20)))
    assert capture.get().strip() == "▒▒██▓▓░░··"
