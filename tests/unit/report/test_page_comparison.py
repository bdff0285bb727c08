"""The comparison with another run on the page: the same claim as the command's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from werkzeug.test import Client

from haiprof.base.local_http import allowed_hosts
from haiprof.cli.app import run_command
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest, write_manifest
from haiprof.show.page.server import CachedPage, PageApp
from haiprof.show.servers import Access
from tests.unit.analysis.test_compare import write
from tests.unit.report.page_parts import PageParts, parts_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return write(tmp_path, "before", seed=1, second=1)


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    command = ["python", "train.py", "--workers", "0"]
    return write(tmp_path, "slower", seed=2, data_ms=7.0, second=2, command=command)


def page_of(run: Path, *words: object) -> PageParts:
    path = run.parent / "page.html"
    assert run_command(["report", str(run), "-o", str(path), *map(str, words)]) == 0
    return parts_of(path.read_text(encoding="utf-8"))


def test_page_claims_what_the_command_claims(
    before: Path, slower: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = page_of(slower, "--baseline", before)
    capsys.readouterr()
    assert run_command(["compare", str(before), str(slower)]) == 0
    claim = capsys.readouterr().out.splitlines()[0]
    assert "more time" in claim
    section = page.by_id("comparison")
    text = " ".join(section.text.replace("\xa0", " ").split())
    assert claim in text
    assert str(before) in text
    assert "Where in the step" in text
    assert "input" in text
    assert "--workers 0" in text
    assert "no traces in the baseline" in text
    links = [e.attributes["href"] for e in page.all("a")]
    assert links.index("#comparison") == links.index("#phases") - 2  # before the charts


def test_figure_shows_both_runs_and_the_part_that_grew(before: Path, slower: Path) -> None:
    figure = page_of(slower, "--baseline", before).numbers()["figures"]["comparison"]
    traces = {trace["name"]: trace for trace in figure["data"]}
    assert {"baseline", "new run", "beyond chance"} <= set(traces)
    sure = dict(zip(traces["beyond chance"]["y"], traces["beyond chance"]["x"], strict=True))
    assert sure["input"] == pytest.approx(3.0, abs=0.1)
    assert "forward" not in sure


def test_page_without_baseline_has_no_comparison(before: Path) -> None:
    page = page_of(before)
    assert "comparison" not in [e.attributes.get("id") for e in page.elements]


def test_last_good_run_is_found_or_the_page_says_why_not(
    before: Path, slower: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = page_of(slower, "--baseline", "last-good").by_id("comparison").text
    assert "the newest earlier run of 'job'" in found
    assert "not compared" not in capsys.readouterr().err
    missing = page_of(before, "--baseline", "last-good").by_id("comparison").text
    assert "no earlier good run named 'job'" in missing
    assert "not compared" in capsys.readouterr().err


def test_baseline_that_is_not_there_or_the_run_itself_is_one_error(
    before: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = before.parent / "page.html"
    words = ["report", str(before), "-o", str(page), "--baseline"]
    assert run_command([*words, str(before.parent / "nowhere")]) == 3
    assert "nowhere" in capsys.readouterr().err
    assert run_command([*words, str(before)]) == 2
    assert "compared with itself" in capsys.readouterr().err
    assert not page.exists()


def test_hostile_surroundings_of_the_other_run_stay_text(before: Path, slower: Path) -> None:
    manifest = read_manifest(RunPaths(before))
    environment = {"git": {"commit": HOSTILE, "branch": HOSTILE}}
    changed = {**vars(manifest), "command": [HOSTILE], "environment": environment}
    write_manifest(RunPaths(before), Manifest(**changed))
    page = page_of(slower, "--baseline", before)
    assert "alert(1)" in page.by_id("comparison").text
    assert len(page.all("script")) == 3
    assert not page.all("img")
    assert "\u202e" not in page.by_id("comparison").text


def test_server_has_the_comparison_as_json(
    before: Path, slower: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def client(baseline: str | None) -> Client:
        access = Access(token="t", cookie="c", hosts=allowed_hosts("127.0.0.1"))
        page = CachedPage(RunPaths(slower), read_traces=False, baseline=baseline)
        found = Client(PageApp(page, access))
        found.set_cookie("c", "t")
        return found

    answer = client(str(before)).get("/comparison.json").get_json()
    assert run_command(["compare", str(before), str(slower), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == said["verdict"]
    assert answer["step_time"] == said["step_time"]
    assert client(None).get("/comparison.json").status_code == 404
