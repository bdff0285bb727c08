from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from haiprof.show.figures.style import PHASES
from haiprof.show.terminal import SplitBar, block_lengths, shows_colors
from haiprof.show.views.jobs import split_text


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


@pytest.mark.parametrize("colors", [None, "standard"])
def test_phases_stay_apart_in_a_pipe_and_with_16_colours(colors: Any) -> None:
    console = Console(file=io.StringIO(), width=20, color_system=colors, force_terminal=True)
    assert not shows_colors(console)
    console.print(SplitBar({"forward": 1.0, "backward": 1.0}))
    assert {"█", "▓"} <= set(console.file.getvalue())  # type: ignore[attr-defined]


def test_bar_of_a_running_job_has_fillings_in_a_pipe() -> None:
    job = SimpleNamespace(split={"forward": 0.5, "backward": 0.5})
    assert set(split_text(job.split, width=12).plain) == {"█", "▓"}
