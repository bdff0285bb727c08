"""Attacks on the ports of `view`, `perfetto`, `tensorboard` and `--prometheus-port`."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from haiprof.agent import prometheus_endpoint
from haiprof.agent.prometheus_endpoint import Latest
from haiprof.base import local_http
from haiprof.base.errors import UsageError
from haiprof.base.local_http import peer_uid
from haiprof.base.options import Options
from haiprof.compat.torch_profiler.pages import Pages
from haiprof.run_format.layout import RunPaths
from haiprof.show.servers import FIRST_PAGE, new_access, perfetto_served
from tests.browser import Page, chromium
from tests.process.live import within
from tests.served import served
from tests.unit.rundir.small_run import write_small_run

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root, to be another user of this machine"
)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Sockets that are opened meanwhile belong to nobody."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# -- whose connection it is ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_owner_of_a_local_connection_is_known(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"no {host} here: {error.strerror}")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        taken, peer = listener.accept()
        with taken:
            assert peer_uid(peer, taken.getsockname()) == os.geteuid()
            client.close()  # the kernel then names root: nobody is taken for it
            assert peer_uid(peer, taken.getsockname()) is None


def test_an_ipv6_socket_to_an_ipv4_address_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        try:
            client = socket.socket(socket.AF_INET6)
            client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error.strerror}")
        with client:
            taken, peer = listener.accept()
            with taken:
                assert peer_uid(peer, taken.getsockname()) == os.geteuid()


@needs_root
def test_the_owner_is_who_opened_the_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with another_user():
            client = socket.create_connection(listener.getsockname())
        taken, peer = listener.accept()
        with client, taken:
            assert peer_uid(peer, taken.getsockname()) == NOBODY


# -- all servers alike -----------------------------------------------------------------------------


@dataclass
class Port:
    """A server under attack."""

    address: tuple[str, int]
    path: str
    """What answers with 200."""

    def get(self, connection: socket.socket) -> bytes:
        """The whole answer to a request."""
        connection.settimeout(30)
        host = f"{self.address[0]}:{self.address[1]}"
        request = f"GET {self.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(request.encode())
            while piece := connection.recv(1 << 16):
                answer += piece
        return answer

    def status(self) -> int:
        """Of one request."""
        with socket.create_connection(self.address) as connection:
            answer = self.get(connection)
            return int(answer.split()[1]) if answer else 0


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[Port]:
    latest = Latest(RunPaths(folder), "node", lambda: ())
    server = prometheus_endpoint._server(latest, 0, prometheus_endpoint.readers(()))
    with serving(server):
        yield Port(("127.0.0.1", server.server_port), "/metrics")


@contextlib.contextmanager
def perfetto(folder: Path) -> Iterator[Port]:
    (folder / "index.html").write_text("the UI")
    (folder / "trace.json").write_text("{}")
    with perfetto_served(folder / "trace.json", folder, port=19_010) as found:
        address = urlsplit(found.url)
        yield Port(("127.0.0.1", found.port), f"/?{address.query}")


@contextlib.contextmanager
def view(_: Path) -> Iterator[Port]:
    from haiprof.show.page.server import _server

    def app(_environ: Any, start: Callable[..., Any]) -> list[bytes]:
        start("200 OK", [("Content-Length", "0")])
        return [b""]

    server = _server("127.0.0.1", 0, app)  # type: ignore[arg-type]  # any WSGI application
    with serving(server):
        yield Port(("127.0.0.1", server.server_port), "/")


@contextlib.contextmanager
def serving(server: Any) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(params=[prometheus, perfetto, view], ids=lambda make: make.__name__)
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Port]:
    with request.param(tmp_path) as found:
        yield found


@needs_root
def test_another_user_is_refused_even_with_the_token(port: Port) -> None:
    with another_user():
        connection = socket.create_connection(port.address)
    with connection:
        answer = port.get(connection)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"another user's" in answer
    assert port.status() == 200


@needs_root
def test_another_user_takes_no_place(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "MAX_CONNECTIONS", 4)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        with another_user():
            for _ in range(100):
                stack.enter_context(socket.create_connection(port.address))
        assert port.status() == 200
        assert threading.active_count() <= threads + 4


def test_slow_clients_keep_nobody_waiting_and_are_cut_off(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slowloris: connections that say nothing, half a request, or a byte now and then."""
    monkeypatch.setattr(local_http, "HEAD_S", 1.5)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(port.address)) for _ in range(15)]
        for connection in slow[5:]:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert port.status() == 200
        for connection in slow:
            connection.settimeout(0.02)
        within(60, lambda: all(is_cut_off(c, drip=c in slow[10:]) for c in slow))
        assert port.status() == 200


def is_cut_off(connection: socket.socket, *, drip: bool) -> bool:
    """Whether the server has closed; where it has not, one more byte is sent."""
    try:
        if drip:
            connection.sendall(b"1")
        return not connection.recv(4096)
    except TimeoutError:
        return False
    except OSError:
        return True


def test_connections_and_threads_are_bounded(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_http, "HEAD_S", 4.0)
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            stack.enter_context(socket.create_connection(port.address))
        within(60, lambda: port.status() == 503)
        assert threading.active_count() <= threads + local_http.MAX_CONNECTIONS_PER_ADDRESS
        within(60, lambda: port.status() == 200)  # those who said nothing are gone
    within(60, lambda: threading.active_count() <= threads)


def test_broken_clients_print_nothing(
    port: Port, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A traceback per connection went to the job's stderr before."""
    monkeypatch.setattr(local_http, "STALL_S", 0.5)
    packets = [
        b"\r\n" * 100, b"\xff" * 5000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"GET /\0 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\n", f"GET {port.path} HTTP/1.1\r\n".encode(),
        b"GET / HTTP/1.1\r\nHost: [::\r\nCookie: \xff=\xff; a\r\n\r\n",
    ]  # fmt: skip
    for packet in packets:
        with socket.create_connection(port.address) as connection:
            connection.sendall(packet)
            # Closed with a reset, whatever is being read or written.
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert port.status() == 200
    assert capfd.readouterr().err == ""


# -- each by itself --------------------------------------------------------------------------------


def test_a_failing_scrape_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails = [False]

    def streams() -> tuple[()]:
        if fails[0]:
            raise ZeroDivisionError
        return ()

    latest = Latest(RunPaths(tmp_path), "node", streams)
    server = prometheus_endpoint._server(latest, 0, prometheus_endpoint.readers(()))
    fails[0] = True
    with serving(server):
        assert Port(("127.0.0.1", server.server_port), "/metrics").status() == 500
    assert capfd.readouterr().err == ""


@needs_root
def test_prometheus_of_another_user_is_let_in_by_name(tmp_path: Path) -> None:
    assert Options().prometheus_allow == ()
    for words in (("nobody",), (str(NOBODY),), ("all",)):
        server = prometheus_endpoint._server(
            Latest(RunPaths(tmp_path), "node", lambda: ()), 0, prometheus_endpoint.readers(words)
        )
        with serving(server):
            found = Port(("127.0.0.1", server.server_port), "/metrics")
            with another_user():
                connection = socket.create_connection(found.address)
            with connection:
                assert found.get(connection).split()[1] == b"200"


def test_a_user_who_does_not_exist_is_an_error() -> None:
    from haiprof.base.options import parse_value

    with pytest.raises(UsageError, match="no user 'no-such-user' on this machine"):
        parse_value("prometheus-allow", "root,no-such-user", origin="the test")


def test_counters_are_not_for_pages_under_a_name_of_their_own(tmp_path: Path) -> None:
    with prometheus(tmp_path) as found, socket.create_connection(found.address) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: evil.example:9101\r\n\r\n")
        assert connection.recv(4096).split()[1] == b"403"


@pytest.mark.parametrize("cookie", ["", "haiprof-6006=wrong", "=;=\xff", "haiprof-6006"])
def test_tensorboard_on_another_address_wants_the_token(cookie: str) -> None:
    """TensorBoard itself would answer anybody."""
    access = new_access("192.0.2.1", 6006)
    told: list[tuple[str, dict[str, str]]] = []

    def start(status: str, headers: list[tuple[str, str]], *_: object) -> None:
        told.append((status[:3], dict(headers)))

    def board(_environ: dict[str, Any], begin: Callable[..., Any]) -> list[bytes]:
        begin("200 OK", [])
        return [b"scalars"]

    pages = Pages(board, static=None, access=access)
    asked = {"HTTP_HOST": "192.0.2.1:6006", "PATH_INFO": "/data/x", "HTTP_COOKIE": cookie}
    assert b"".join(pages(dict(asked), start)) == b"open the address that haiprof printed"
    assert b"".join(pages({**asked, "QUERY_STRING": "token=wrong"}, start)) != b"scalars"
    assert [status for status, _ in told] == ["403", "403"]
    assert b"".join(pages({**asked, "QUERY_STRING": f"token={access.token}"}, start)) == FIRST_PAGE
    own = told[-1][1]["Set-Cookie"].split(";")[0]
    for others in ("", "a=1; ", 'no name; b={"of": "another"}; '):  # of any server of the machine
        assert b"".join(pages({**asked, "HTTP_COOKIE": others + own}, start)) == b"scalars"


@pytest.mark.proof
@pytest.mark.slow
@needs_root
def test_tensorboard_answers_its_own_user_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'haiprof[tensorboard]'")
    run = write_small_run(tmp_path / "run")
    with served("tensorboard", run.root, "--port", "0") as running:
        assert "for you and root on this machine" in "".join(running.said)
        found = Port(("127.0.0.1", urlsplit(running.url).port or 0), "/data/environment")
        assert found.status() == 200
        with another_user():
            connection = socket.create_connection(found.address)
        with connection:
            assert found.get(connection).split()[1] == b"403"


BROWSER = """#!/bin/sh
file="${1#file://}"
tr '\\0' '\\n' < /proc/$$/cmdline > "$SEEN/command-line"
stat -c '%a %u' "$file" "$(dirname "$file")" > "$SEEN/modes"
cp "$file" "$SEEN/page.html"
printf %s "$1" > "$SEEN/address"
"""


@pytest.mark.slow
@pytest.mark.skipif(chromium is None, reason="needs Chromium")
def test_the_browsers_command_line_has_no_token(
    tmp_path: Path, browser: Callable[[str], Page]
) -> None:
    run = write_small_run(tmp_path / "run")
    seen, scratch = tmp_path / "seen", tmp_path / "tmp"
    for folder in (seen, scratch):
        folder.mkdir()
    program = tmp_path / "the-browser"
    program.write_text(BROWSER)
    program.chmod(0o755)
    env = {"BROWSER": str(program), "DISPLAY": ":0", "SEEN": str(seen), "TMPDIR": str(scratch)}
    with served("view", run.root, "--port", "0", env=env) as running:
        token = urlsplit(running.url).query.partition("=")[2]
        assert len(token) >= 22
        within(60, (seen / "address").exists)
        command = (seen / "command-line").read_text()
        assert "file://" in command
        assert token not in command
        own = os.geteuid()
        assert (seen / "modes").read_text().splitlines() == [f"600 {own}", f"700 {own}"]
        assert running.url in unescape((seen / "page.html").read_text())
        # And the browser gets in, although it comes from a file.
        page = browser((seen / "address").read_text())
        page.wait(f"location.href === '{running.url.partition('?')[0]}'")
        page.wait("document.title.length > 0 && document.body.textContent.length > 500")
    assert list(scratch.iterdir()) == []
