"""The verdict card as a picture, in a real browser: it holds today's card and asks nobody."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.cli.app import run_command
from tests.browser import Page, chromium
from tests.unit.report.many_ranks import write_many

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("report page"),
    pytest.mark.skipif(chromium is None, reason="no Chromium"),
]
PUBLISHED = Path(__file__).parents[3] / "docs" / "verdict.svg"


def fresh(folder: Path) -> Path:
    root = write_many(folder / "run", ranks=2, steps=60)
    assert run_command(["verdict", str(root), "--svg", str(folder / "card.svg")]) == 0
    return folder / "card.svg"


@pytest.mark.parametrize("make", [fresh, lambda _: PUBLISHED], ids=["fresh", "published"])
def test_card_asks_no_network_and_is_todays(
    browser: Callable[[str], Page], tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path)
    page = browser(path.as_uri())
    assert page.requests == [path.as_uri()]
    assert page.failed == []
    assert page.errors == []
    assert not re.search(r"@font-face|@import|url\((?!#)|href=", path.read_text(encoding="utf-8"))
    shown = page.run("document.documentElement.textContent").replace("\xa0", " ")
    assert "haiprof verdict with --all" in shown
    assert page.run("document.documentElement.getBoundingClientRect().width") > 500
