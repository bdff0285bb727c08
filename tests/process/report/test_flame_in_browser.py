"""Flame graphs in a real browser: chosen, searched, enlarged, read aloud, printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.cli.app import run_command
from tests.browser import Page, chromium
from tests.process.report.test_page_in_browser import check_quiet, opened, press
from tests.unit.analysis.test_lines import LOAD, MAIN, OPEN, record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("report page"),
    pytest.mark.skipif(chromium is None, reason="no Chromium"),
]
FRAMES = "[...document.querySelectorAll('.flame')]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run whose rank 1 spends twice as long in `load_image`, and one without that."""
    folder = tmp_path_factory.mktemp("flames")
    usual = [(MAIN,), (MAIN, LOAD, OPEN)]
    record(folder / "before", {0: usual, 1: usual})
    record(folder / "after", {0: usual, 1: [(MAIN, LOAD), (MAIN, LOAD, OPEN)]})
    return folder / "before", folder / "after"


def flame_page(
    browser: Callable[[str], Page], run: Path, page: Path, *words: str, width: int = 1280
) -> Page:
    assert run_command(["lines", str(run), "--html", str(page), *words]) == 0
    return opened(browser, page.as_uri(), width=width)


def labels(page: Page) -> list[str]:
    found: list[str] = page.run(f"{FRAMES}.map(e => e.ariaLabel)")
    return found


def choose(page: Page, text: str, value: str) -> None:
    """Chooses an option by its text, in the list so labelled."""
    page.run(
        "(() => { const label = [...document.querySelectorAll('.flame-bar label')].find(e =>"
        f" e.textContent.startsWith('{text} ')); const list = label.querySelector('select');"
        f" list.value = [...list.options].find(o => o.text === '{value}').value;"
        " list.dispatchEvent(new Event('change')); })()"
    )


def test_frames_say_their_time_and_whose_code_they_are(
    browser: Callable[[str], Page], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    page = flame_page(browser, runs[1], tmp_path / "l.html", width=390)
    assert any(label.startswith("main, /home/me/train.py:88: ") for label in labels(page))
    assert any(" per step, " in label and label.startswith("forward") for label in labels(page))
    colours = page.run(
        "['.flame.user', '.flame.library'].map(s =>"
        " getComputedStyle(document.querySelector(s)).backgroundColor)"
    )
    assert len(set(colours)) == 2
    assert page.run("document.documentElement.scrollWidth") <= 390
    rows = page.texts("#lines td")
    assert "load_image" in rows
    check_quiet(page, own=1)


def test_keyboard_moves_a_click_enlarges_and_search_finds(
    browser: Callable[[str], Page], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    page = flame_page(browser, runs[1], tmp_path / "l.html")
    focused = "document.activeElement.ariaLabel"
    page.run("document.querySelector('.flame').focus()")
    whole = len(labels(page))
    press(page, "ArrowDown")
    assert page.run(focused).startswith("input")
    for _ in range(2):  # past the gap before it
        press(page, "ArrowRight")
    assert page.run(focused).startswith("forward")
    press(page, "Enter")
    assert page.run(focused).startswith("forward")
    assert page.run("document.activeElement.style.width") == "100%"
    assert len(labels(page)) < whole
    press(page, "Escape")
    assert page.run(focused).startswith("a training step")
    assert len(labels(page)) == whole
    page.click(".flame.backward")
    page.wait(f"{FRAMES}.find(e => e.matches('.backward')).style.width === '100%'")
    page.click(".flame-bar button", "Whole")
    page.run("(() => { const e = document.querySelector('[type=search]'); e.value = 'LOAD';"
             " e.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert " found: " in page.text(".flame-found")
    matches = page.run(f"{FRAMES}.filter(e => e.matches('.match')).map(e => e.ariaLabel)")
    assert matches
    assert all(label.startswith("load_image") for label in matches)


def test_ranks_and_runs_are_compared(
    browser: Callable[[str], Page], runs: tuple[Path, Path], tmp_path: Path
) -> None:
    page = flame_page(browser, runs[1], tmp_path / "l.html", "--baseline", str(runs[0]))
    longer = f"{FRAMES}.filter(e => e.matches('.more')).map(e => e.ariaLabel)"
    found = page.run(longer)
    assert found
    assert all(label.startswith("load_image") and "against" in label for label in found)
    choose(page, "of", "rank 0")
    choose(page, "compared with", "before, rank 0")
    assert page.run(longer) == []
    choose(page, "compared with", "rank 1")
    shorter = page.run(f"{FRAMES}.filter(e => e.matches('.less')).map(e => e.ariaLabel)")
    assert shorter
    assert all(label.startswith("load_image") for label in shorter)
    choose(page, "Time in", "forward")
    assert labels(page)[0].startswith("forward")
    check_quiet(page, own=1)
