"""Every page in a real browser: light, dark, on a narrow screen, on paper, by keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.cli.app import run_command
from tests.browser import Page, chromium
from tests.process.report.test_page_in_browser import check_quiet, opened
from tests.sampling import first_of
from tests.unit.analysis.test_compare import write
from tests.unit.analysis.test_lines import LOAD, MAIN, OPEN, record
from tests.unit.analysis.trace.shared import traces
from tests.unit.report.many_ranks import write_flight, write_many

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("report page"),
    pytest.mark.skipif(chromium is None, reason="no Chromium"),
]
NARROW_PX = 390
FAINT = """(() => {
  const parts = (text) => /^rgba?\\(/.test(text) ? text.match(/[\\d.]+/g).map(Number) : null;
  const light = (c) => [0, 1, 2].map((i) => c[i] / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const found = parts(getComputedStyle(e).backgroundColor);
      if (!found) return null;
      if (found.length < 4 || found[3] === 1) return found;
      if (found[3] > 0) return null;
    }
    return null;
  };
  const seen = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || /^(SCRIPT|STYLE|NOSCRIPT|OPTION)$/.test(e.tagName)) continue;
    if (!e.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const style = getComputedStyle(e), svg = e.closest("svg");
    const ink = parts(svg ? style.fill : style.color), under = ground(svg ? svg.parentElement : e);
    if (!ink || !under) continue;
    const [high, low] = [light(ink), light(under)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < (large ? 3 : 4.5)) seen.set(text.slice(0, 40), ratio.toFixed(2));
  }
  return [...seen];
})()"""
"""Texts of less contrast than WCAG 2.2 (1.4.3, level AA) asks for: 4.5, and 3 of large ones."""
UNNAMED = (
    "[...document.querySelectorAll('main svg, main select, main input, main button')]"
    ".filter(e => !e.closest('[aria-hidden=true], [hidden]') && !e.getAttribute('aria-label')"
    " && !e.labels?.length && !e.textContent.trim()).map(e => e.outerHTML.slice(0, 80))"
)
FIGURES = (
    "[...document.querySelectorAll('figure.plot')].filter(e => !e.hidden && !e.ariaLabel"
    " && !e.querySelector('svg[role=img]')).map(e => e.dataset.figure)"
)
LEFT_OUT = (
    "[...document.querySelectorAll('.plot')].filter(e => !e.hidden && !e.dataset.drawn)"
    ".map(e => e.dataset.figure ?? e.ariaLabel)"
)
HIDDEN_OUTLINE = (
    "(() => { const e = document.activeElement, s = getComputedStyle(e);"
    " const around = e.closest('.plot') && getComputedStyle(e.closest('.plot'));"
    " return e !== document.body && e !== document.documentElement"
    " && [s, around].every(style => !style || style.outlineStyle === 'none')"
    " ? e.outerHTML.slice(0, 80) : null; })()"
)


def run_report(folder: Path) -> list[str]:
    root = write_many(folder / "run", ranks=8, steps=60)
    write_flight(root, ranks=8, late_rank=5, late_ns=12_000_000)
    return ["report", str(root), "-o"]


def comparison(folder: Path) -> list[str]:
    before, after = (write(folder, name, seed=seed, data_ms=ms, second=seed)
                     for name, seed, ms in (("before", 1, 4.0), ("after", 2, 7.0)))  # fmt: skip
    return ["report", str(after), "--baseline", str(before), "-o"]


def flame_graph(folder: Path) -> list[str]:
    usual = [(MAIN,), (MAIN, LOAD, OPEN)]
    record(folder / "before", {0: usual, 1: usual})
    record(folder / "after", {0: usual, 1: [(MAIN, LOAD), (MAIN, LOAD, OPEN)]})
    return ["lines", str(folder / "after"), "--baseline", str(folder / "before"), "--html"]


def trace_report(folder: Path) -> list[str]:
    return ["trace-report", str(traces("dlrm_v100_8ranks")), "--html"]


def overview(folder: Path) -> list[str]:
    return ["overview", str(write_many(folder / "run", ranks=2, steps=60)), "--html"]


def one_rank(folder: Path) -> list[str]:
    return ["rank", str(write_many(folder / "run", ranks=2, steps=60)), "1", "--html"]


PAGES = [run_report, comparison, flame_graph, trace_report, overview, one_rank]


def draw_all(page: Page) -> None:
    """Scrolls to each figure, so that it is drawn."""
    page.wait(
        "(() => { const left = [...document.querySelectorAll('.plot')]"
        ".find(e => !e.hidden && !e.dataset.drawn); left?.scrollIntoView(); return !left; })()"
    )


@pytest.mark.parametrize("make", first_of(PAGES, run_report))
def test_page_holds_in_every_mode(
    browser: Callable[[str], Page], tmp_path: Path, make: Callable[[Path], list[str]]
) -> None:
    path = tmp_path / "page.html"
    assert run_command([*make(tmp_path), str(path)]) == 0
    for width, dark in ((NARROW_PX, True), (1280, True), (1280, False)):
        page = opened(browser, path.as_uri(), width=width, dark=dark)
        draw_all(page)
        mode = json.dumps({"width": width, "dark": dark})
        assert page.run("document.documentElement.scrollWidth") <= width, mode
        assert page.run(FAINT) == [], mode
        assert page.run(UNNAMED) == [], mode
        assert page.run(FIGURES) == [], mode
        check_quiet(page, own=1)
    for _ in range(40):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab",
                  windowsVirtualKeyCode=9)  # fmt: skip
        assert page.run(HIDDEN_OUTLINE) is None
    page.call("Emulation.setEmulatedMedia", media="print")
    page.run("dispatchEvent(new Event('beforeprint'))")
    page.wait(f"{LEFT_OUT}.length === 0")
    assert page.run("Math.max(0, ...[...document.querySelectorAll('.main-svg')]"
                    ".map(e => e.clientWidth))") <= 700  # fmt: skip
    assert page.run(FAINT) == []
    check_quiet(page, own=1)
