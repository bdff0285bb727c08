"""The page in a real browser without network: from disk, and served."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from haiprof import TraceAnalysis
from haiprof.base.units import digits_text, duration_text, ratio_text
from haiprof.cli.app import run_command
from tests.browser import Page, chromium
from tests.served import served
from tests.unit.analysis.test_compare import write
from tests.unit.analysis.test_lines import LOAD, MAIN, OPEN, record
from tests.unit.analysis.trace.shared import traces
from tests.unit.report.many_ranks import write_flight, write_many
from tests.unit.report.page_parts import parts_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("report page"),
    pytest.mark.skipif(chromium is None, reason="no Chromium"),
]
RUNS = Path(__file__).parents[2] / "data" / "runs"
LIVE = "document.getElementById('live-text').textContent"
KEPT = (
    "[document.querySelector('#environment details').open, chooser.value, scrollY,"
    " document.querySelector('.zoom-bar span').textContent]"
)
"""What a reader has set: opened, chosen, scrolled and zoomed."""
RANGES = (
    "[...new Set([...document.querySelectorAll('[data-panels=all] .plot')]"
    ".map(e => JSON.stringify(e.layout.xaxis.range)))]"
)
READY = "document.documentElement.dataset.ready === '1'"
LATEST = "document.querySelector('[data-figure=rank]').data"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_many(tmp_path_factory.mktemp("browser") / "run", ranks=8, steps=120)
    write_flight(root, ranks=8, late_rank=5, late_ns=12_000_000)
    return root


@pytest.fixture(scope="module")
def report(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of the page as a file."""
    path = tmp_path_factory.mktemp("report") / "a b.html"
    assert run_command(["report", str(run), "-o", str(path)]) == 0
    return path.as_uri()


def verdict_json(run: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run_command(["verdict", str(run), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def opened(
    browser: Callable[[str], Page], url: str, *, width: int = 1280, dark: bool = False
) -> Page:
    page = browser("about:blank")
    page.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
        mobile=False,
    )  # fmt: skip
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.call("Emulation.setEmulatedMedia", features=[scheme])
    page.open(url)
    page.wait(READY)
    return page


def check_verdict(page: Page, verdict: Any) -> None:
    text = page.run("document.querySelector('#verdict').textContent").replace("\xa0", " ")
    assert text.strip().startswith(verdict["headline"])
    values = page.run("[...document.querySelectorAll('#verdict data')].map(e => e.value)")
    numbers = [float(value) for value in values if value]
    for finding in verdict["findings"]:
        assert finding["title"] in text
        assert finding["remedy"] in text
        assert finding["confidence"] in numbers
        for evidence in finding["evidence"]:
            if evidence["unit"] == "ns" and evidence["value"] == 0:
                continue  # never happened
            assert evidence["name"] in text
            assert evidence["value"] is None or evidence["value"] in numbers
    assert verdict["step_ns"] in numbers
    for ns in verdict["step"]["positions"].values():
        assert ns in numbers


def show(page: Page, selector: str) -> None:
    """Scrolls to a figure and waits until it is drawn."""
    page.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
    page.wait(f"document.querySelector({json.dumps(selector)}).dataset.drawn === '1'")


def check_choosing(page: Page) -> None:
    """Another rank shows other steps and other counters; the keyboard does it, too."""
    show(page, "[data-figure=rank]")
    forward = f"{LATEST}.find(t => t.name === 'forward').y"
    first = page.run(f"Array.from({forward})")
    page.run("document.getElementById('chooser').focus()")
    for _ in range(5):
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="ArrowDown", code="ArrowDown",
                      windowsVirtualKeyCode=40)  # fmt: skip
    page.wait("document.getElementById('chooser').value === '5'")
    second = page.run(f"Array.from({forward})")
    assert sorted(second)[60] == pytest.approx(2 * sorted(first)[60], rel=0.02)
    panels = page.texts("[data-panels=rank] .keys")
    assert "rank 5" in panels[0]
    assert "rank 0" not in panels[0]
    page.click("#previous")
    page.wait("document.getElementById('chooser').value === '4'")
    assert page.run("document.querySelector('#rank-table tr.chosen').cells[0].textContent") == "4"


def known(values: list[float | None]) -> list[float]:
    """In order, without stretches in which no step counts."""
    return sorted(value for value in values if value is not None)


def check_map(page: Page) -> None:
    show(page, "[data-figure=map]")
    row = "Array.from(document.querySelector('[data-figure=map]').data[0].z[5])"
    assert known(page.run(row))[40] == pytest.approx(30, abs=3)
    page.run("(() => { const e = document.getElementById('part'); e.value = 'backward';"
             " e.dispatchEvent(new Event('change', { bubbles: true })); })()")  # fmt: skip
    assert abs(known(page.run(row))[40]) < 2


def check_tables(page: Page) -> None:
    """They are sorted by what their cells mean."""
    column = "[...document.querySelectorAll('#rank-table td:nth-child(7)')].map(e => e.textContent)"
    slowest = page.run("document.querySelector('#rank-table tbody tr').cells[0].textContent")
    assert slowest == "0"
    page.click("#rank-table th:nth-child(7) button")
    waits = page.run(column)
    assert (
        page.run("document.querySelector('#rank-table th:nth-child(7)').ariaSort") == "descending"
    )
    assert waits[0] == max(waits, key=lambda text: float(text.split()[0]))
    page.click("#rank-table th:nth-child(7) button")
    assert page.run(column) == waits[::-1]


def check_charts(page: Page) -> None:
    """They open on the training, and show the whole run on request."""
    shown = "document.querySelector('[data-figure=rank]').layout.xaxis.range"
    begin, end = page.run(shown)
    assert begin > 0
    page.click("#whole")
    page.wait(f"{shown}[0] === 0")
    assert page.run(shown)[1] >= end


def check_numbers(page: Page) -> None:
    """They are written as the terminal does."""
    numbers = [random.Random(place).uniform(1, 10) * 10.0**power
               for power in range(-3, 14) for place in range(40)]  # fmt: skip
    numbers += [0.0, 99.949, 99.951, 999.4, 999.6, 999_499.0, 999_501.0, 6e11, 3.6e13]
    for script, python in (
        ("digitsText", digits_text), ("durationText", duration_text), ("ratioText", ratio_text),
    ):  # fmt: skip
        fits = [number for number in numbers if script != "ratioText" or number < 1e6]
        texts = page.run(f"{json.dumps(fits)}.map({script})")
        assert texts == [python(number) for number in fits], script


def check_quiet(page: Page, *, own: int) -> None:
    """No error, and nothing asked of anybody."""
    assert page.errors == []
    assert page.failed == []
    assert len(page.requests) == own or own < 0
    assert [url for url in page.foreign if not url.startswith("file:")] == []


def test_report_opens_from_disk(
    browser: Callable[[str], Page], run: Path, report: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = opened(browser, report)
    check_verdict(page, verdict_json(run, capsys))
    check_choosing(page)
    check_map(page)
    for name in ("over-time", "late"):
        show(page, f"[data-figure={name}]")
    late = "Array.from(document.querySelector('[data-figure=late]').data[0].y)"
    assert max(page.run(late)) == pytest.approx(12, rel=0.01)
    check_charts(page)
    check_numbers(page)
    check_quiet(page, own=1)


def test_view_follows_the_job_and_keeps_what_the_reader_has_set(
    browser: Callable[[str], Page], run: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(run, root)
    with served("view", root, "--port", "0", "--no-browser") as found:
        page = opened(browser, found.url)
        assert "token" not in page.run("location.href")
        page.wait(f"{LIVE}.includes('running')")
        page.run("document.querySelector('#environment details').open = true")
        page.run("(() => { const e = document.getElementById('chooser'); e.value = '5';"
                 " e.dispatchEvent(new Event('change', { bubbles: true })); })()")  # fmt: skip
        show(page, "[data-figure=rank]")
        drag(page, "[data-figure=rank]")
        page.wait("!document.querySelector('.zoom-bar').hidden")
        page.click("#pause")
        end_job(root)
        page.wait(f"{LIVE}.includes('paused, newer data is there')")
        assert "running" in page.text("h1")
        kept = page.run(KEPT)
        page.click("#pause")
        page.wait("document.querySelector('h1').textContent.includes('ended, exit 3')")
        assert page.run(KEPT) == kept
        page.wait(f"{LIVE}.startsWith('job ended, exit 3')")
        check_quiet(page, own=-1)
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(f"{LIVE}.startsWith('The server does not answer')")
    assert "ended, exit 3" in page.text("h1")


def end_job(root: Path) -> None:
    """Writes down what a launcher writes when its job has ended."""
    manifest = json.loads((root / "run.json").read_text(encoding="utf-8"))
    manifest |= {"end_wall_ns": time.time_ns(), "exit_status": 3}
    (root / "run.json").write_text(json.dumps(manifest), encoding="utf-8")


def mouse(page: Page, kind: str, place: tuple[float, float], *, count: int = 0) -> None:
    pressed = {"button": "left", "buttons": 1, "clickCount": count} if count else {}
    page.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **pressed)


def inside(page: Page, selector: str, part: float) -> tuple[float, float]:
    """A place in a figure's drawing, as a part of its width."""
    left, top = page.run(
        f"(() => {{ const e = document.querySelector({json.dumps(selector)}),"
        " s = e._fullLayout._size, r = e.getBoundingClientRect();"
        f" return [r.left + s.l + {part} * s.w, r.top + s.t + s.h / 2]; }})()"
    )
    return left, top


def drag(page: Page, selector: str) -> None:
    """Draws the pointer across the middle of a figure, to the right."""
    mouse(page, "mousePressed", inside(page, selector, 0.25), count=1)
    for part in (0.3, 0.5, 0.7, 0.75):
        mouse(page, "mouseMoved", inside(page, selector, part), count=1)
    mouse(page, "mouseReleased", inside(page, selector, 0.75), count=1)


def press(page: Page, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def test_figures_over_time_share_one_cursor_and_one_zoom(
    browser: Callable[[str], Page], report: str
) -> None:
    page = opened(browser, report)
    page.run("document.getElementById('counters').scrollIntoView()")
    page.wait(
        "[...document.querySelectorAll('[data-panels=all] .plot')].every(e => e.dataset.drawn)"
    )
    first = "[data-panels=all] .plot"
    mouse(page, "mouseMoved", inside(page, first, 0.5))
    page.wait("document.querySelector('[data-panels=all] .now').textContent !== ''")
    times = page.run(
        "[...document.querySelectorAll('[data-panels=all] .time-cursor')].map(e => e.dataset.time)"
    )
    assert len(times) > 3
    assert len(set(times)) == 1
    assert all(page.texts("[data-panels=all] .now"))
    whole = page.run(RANGES)
    drag(page, first)
    page.wait(f"{RANGES}.length === 1 && {RANGES}[0] !== {json.dumps(whole[0])}")
    is_whole = f"{RANGES}[0] === {json.dumps(whole[0])}"
    for _ in range(5):  # on a busy machine the second click may come too late for a double one
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                mouse(page, kind, inside(page, first, 0.5), count=count)
        with contextlib.suppress(AssertionError):
            page.wait(is_whole, timeout_s=3)
            break
    assert page.run(is_whole)
    page.run(f"document.querySelector('{first} .time-slider').focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="+", text="+")
    page.wait(f"{RANGES}.length === 1 && {RANGES}[0] !== {json.dumps(whole[0])}")
    before = page.run("document.activeElement.getAttribute('aria-valuetext')")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight",
              windowsVirtualKeyCode=39)  # fmt: skip
    page.wait(f"document.activeElement.getAttribute('aria-valuetext') !== {json.dumps(before)}")
    assert "rank 0" in before
    press(page, "Escape")
    page.wait(f"{RANGES}[0] === {json.dumps(whole[0])}")
    check_quiet(page, own=1)


@pytest.mark.proof
def test_map_of_many_ranks_shows_the_slowest_first(
    browser: Callable[[str], Page], tmp_path: Path
) -> None:
    root = write_many(tmp_path / "run", ranks=72, steps=60)
    assert run_command(["report", str(root), "-o", str(tmp_path / "r.html")]) == 0
    page = opened(browser, (tmp_path / "r.html").as_uri())
    show(page, "[data-figure=map]")
    rows = "Array.from(document.querySelector('[data-figure=map]').data[0].y)"
    assert page.run(rows) == list(range(72))
    for part, slowest in (("step", {"2", "5"}), ("forward", {"5"}), ("dataloader", {"2"})):
        page.run(f"(() => {{ for (const [id, value] of [['part', '{part}'], ['rows', '32']]) {{"
                 " const e = document.getElementById(id); e.value = value;"
                 " e.dispatchEvent(new Event('change', { bubbles: true })); } })()")  # fmt: skip
        assert set(page.run(rows)[: len(slowest)]) == slowest
        assert len(page.run(rows)) == 32
    check_quiet(page, own=1)


def test_tables_are_sorted_and_figures_labelled_with_whole_ranks(
    browser: Callable[[str], Page], report: str
) -> None:
    page = opened(browser, report)
    check_tables(page)
    for name in ("over-time", "map", "rank", "late"):
        show(page, f"[data-figure={name}]")
    page.call("Emulation.setEmulatedMedia", media="print")
    page.run("dispatchEvent(new Event('beforeprint'))")
    widest = "Math.max(...[...document.querySelectorAll('.main-svg')].map(e => e.clientWidth))"
    assert page.run(widest) <= 700  # paper
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run(widest) > 700
    page.run("dispatchEvent(new Event('beforeprint'))")
    page.wait("[...document.querySelectorAll('.plot')].every(e => e.hidden || e.dataset.drawn)")
    silent = (
        "[...document.querySelectorAll('main svg')].filter(e => !e.closest('[aria-hidden=true]')"
        " && !e.getAttribute('aria-label')).length"
    )
    assert page.run(silent) == 0
    labels = page.run("[...document.querySelectorAll('.plot svg[role=img]')].map(e => e.ariaLabel)")
    assert len(labels) > 10
    assert any(label.startswith("Phases of each step of rank 0: dataloader ") for label in labels)
    assert any(label.startswith("CPU of ranks: rank 0 ") for label in labels)
    ticks = page.texts("[data-figure=map] .ytick text")
    assert sorted(ticks, key=int) == [str(rank) for rank in range(8)]
    check_quiet(page, own=1)


def check_account(page: Page) -> None:
    """One opens with its series and its code."""
    account = "[...document.querySelectorAll('.accounts details')].find(e => !e.open)"
    page.run(f"(() => {{ const e = {account}; e.id = 'one'; e.firstElementChild.focus(); }})()")
    press(page, "Enter")
    page.run("document.querySelector('#one').open || document.activeElement.click()")
    page.wait("document.querySelector('#one .plot')?.dataset.drawn === '1'")
    times = page.run("Array.from(document.querySelector('#one .plot').data[0].y)")
    assert 40 <= len(times) <= 500
    assert page.texts("#one .flame bdi")[0] == "this account"
    assert page.run("document.querySelectorAll('#one .flame.phase').length") >= 1


def test_page_of_one_rank_is_short_and_has_nothing_empty_or_twice(
    browser: Callable[[str], Page], tmp_path: Path
) -> None:
    record(tmp_path / "run", {0: [(MAIN, LOAD, OPEN), (MAIN,)]})
    assert run_command(["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html")]) == 0
    page = opened(browser, (tmp_path / "r.html").as_uri(), width=1400)
    page.wait("[...document.querySelectorAll('.plot')].every(e => e.dataset.drawn)")  # unscrolled
    assert page.run("document.documentElement.scrollHeight") <= 4000
    sections = page.run("[...document.querySelectorAll('main > section')].map(e => e.id)")
    assert sections == ["verdict", "rank", "lines", "phases", "environment"]
    content = "e.querySelector('table, .plot, .flame, .reasons, .accounts')"
    empty = f"[...document.querySelectorAll('main > section')].filter(e => !{content}).length"
    assert page.run(empty) == 0
    titles = page.texts("main h2, main h3, main h4, main caption")
    assert len(titles) == len(set(titles))
    check_account(page)
    check_quiet(page, own=1)


def test_page_of_a_traced_rank_is_short_and_folds_what_is_not_the_verdict(
    browser: Callable[[str], Page], tmp_path: Path
) -> None:
    shutil.copytree(RUNS / "traced", tmp_path / "run")
    assert run_command(["report", str(tmp_path / "run"), "-o", str(tmp_path / "r.html")]) == 0
    page = opened(browser, (tmp_path / "r.html").as_uri(), width=1400)
    page.wait(
        "[...document.querySelectorAll('.plot')].every(e => e.dataset.drawn || !e.offsetParent)"
    )
    assert page.run("document.documentElement.scrollHeight") <= 4000
    assert all(len(text) > 8 for text in page.texts(".fold > summary > .dim"))
    page.click("nav a", "Traced steps")
    page.wait("document.querySelector('#kernels .fold').open")
    page.wait("document.querySelector('#kernels .plot').dataset.drawn === '1'")
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.run("[...document.querySelectorAll('.plot')].every(e => e.dataset.drawn)")
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run("[...document.querySelectorAll('.fold[open]')].length") == 1
    check_quiet(page, own=1)


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.proof)])
def test_comparison_with_another_run_is_drawn(
    browser: Callable[[str], Page], tmp_path: Path, width: int
) -> None:
    before, after = (write(tmp_path, name, seed=seed, data_ms=ms, second=seed)
                     for name, seed, ms in (("before", 1, 4.0), ("after", 2, 7.0)))  # fmt: skip
    words = ["report", str(after), "-o", str(tmp_path / "r.html"), "--baseline", str(before)]
    assert run_command(words) == 0
    page = opened(browser, (tmp_path / "r.html").as_uri(), width=width)
    show(page, "[data-figure=comparison]")
    keys = page.texts("#comparison .keys li")
    assert keys[:3] == ["baseline", "new run", "beyond chance"]
    assert "input" in page.texts("[data-figure=comparison] .y2tick text")
    assert " % more time (" in page.text("#comparison .claim").replace("\xa0", " ")
    assert page.run("document.documentElement.scrollWidth") <= width
    check_quiet(page, own=1)


@pytest.mark.proof
def test_every_control_can_be_reached_by_keyboard(
    browser: Callable[[str], Page], report: str
) -> None:
    page = opened(browser, report)
    reached = set()
    for _ in range(60):
        for kind in ("keyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab",
                      windowsVirtualKeyCode=9)  # fmt: skip
        reached.add(page.run("document.activeElement.id || document.activeElement.hash"
                             " || document.activeElement.tagName"))  # fmt: skip
    assert {"part", "previous", "chooser", "next", "#counters", "SUMMARY"} <= reached


def test_hostile_names_run_nothing_in_the_browser(
    browser: Callable[[str], Page], run: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(run, root)
    name = "<img src=x onerror=window.bad=1></script><script>window.bad=1</script>"
    for rank in (0, 1):
        path = root / "ranks" / str(rank) / "rank.json"
        facts = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**facts, "host": name, "device": name}), encoding="utf-8")
    manifest = json.loads((root / "run.json").read_text(encoding="utf-8"))
    manifest |= {"name": name, "command": [name]}
    (root / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert run_command(["report", str(root), "-o", str(tmp_path / "r.html")]) == 0
    page = opened(browser, (tmp_path / "r.html").as_uri())
    for figure in ("over-time", "map", "rank", "late"):
        show(page, f"[data-figure={figure}]")
    assert page.run("window.bad") is None
    assert page.run("document.title").startswith("<img")
    assert len(parts_of((tmp_path / "r.html").read_text(encoding="utf-8")).all("script")) == 3
    check_quiet(page, own=1)


def test_every_picture_of_traces_is_drawn_without_a_network(
    browser: Callable[[str], Page], tmp_path: Path
) -> None:
    path = tmp_path / "traces.html"
    TraceAnalysis(traces("dlrm_v100_8ranks")).write_page(path)
    page = opened(browser, path.as_uri(), dark=True)
    places = "[...document.querySelectorAll('figure.plot')]"
    assert page.run(f"{places}.length") == 14
    page.run(f"{places}.forEach(place => place.scrollIntoView())")
    for number in range(14):
        page.run(f"{places}[{number}].scrollIntoView()")
        page.wait(f"({places}[{number}].data || []).length > 0")
    assert page.run("document.getElementById('problem').hidden")
    assert not [url for url in page.foreign if not url.startswith("file:")]
    keys = page.texts(".keys li")
    assert {"computes", "idle", "waits for the host", "exposed"} <= {key.strip() for key in keys}
