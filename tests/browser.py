"""A real browser for tests: headless Chromium without network, driven by its DevTools."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--mute-audio", "--remote-debugging-port=0",
    "--remote-allow-origins=*", "--window-size=1400,1000",
    # No name but loopback's is found, whatever the machine could reach.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip
_LOOPBACK = ("127.0.0.1", "localhost")
_WAIT_S = 60.0
_DEVTOOLS = re.compile(r"ws://127\.0\.0\.1:(\d+)/")

chromium = next((found for found in map(shutil.which, _NAMES) if found), None)


@dataclass
class Page:
    """One tab: `with open_page(url) as page`, or the fixture `browser`."""

    _socket: Any
    requests: list[str] = field(default_factory=list)
    """URLs asked for by the page and its frames, `data:` and `blob:` left out."""
    failed: list[str] = field(default_factory=list)
    """URLs that were not answered, or not with success."""
    errors: list[str] = field(default_factory=list)
    """What the console shows as errors, and exceptions that nobody caught."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _urls: dict[str, str] = field(default_factory=dict)

    @property
    def foreign(self) -> list[str]:
        """Requests to hosts other than this machine."""
        return [url for url in self.requests if urlsplit(url).hostname not in _LOOPBACK]

    def open(self, url: str) -> None:
        """Goes to a page and waits until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = _WAIT_S) -> Any:
        """Waits until a JavaScript expression is true, and returns its value."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            with contextlib.suppress(AssertionError):  # what it looks at is not there yet
                found = self.run(expression)
                if found:
                    return found
            time.sleep(0.1)
        raise AssertionError(
            f"not within {timeout_s} s: {expression}\npage: {self.text()[:2000]}\n"
            f"errors: {self.errors}\nfailed: {self.failed}"
        )

    def text(self, selector: str = "body") -> str:
        """What a reader sees of the first such element; of nothing where there is none."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        """What a reader sees of every such element."""
        query = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
        found: list[str] = self.run(query)
        return found

    def wait_text(self, text: str, timeout_s: float = _WAIT_S) -> None:
        """Waits until the page shows a text."""
        self.wait(f"document.body.innerText.includes({json.dumps(text)})", timeout_s)

    def click(self, selector: str, text: str | None = None) -> None:
        """A real click on the middle of the first such element, with such a text where given."""
        wanted = json.dumps(text)
        found = self.wait(
            f"(() => {{ const e = [...document.querySelectorAll({json.dumps(selector)})]"
            f".find(e => {wanted} === null || e.textContent.trim() === {wanted});"
            " if (!e) return null; e.scrollIntoView({block: 'center'});"
            " const r = e.getBoundingClientRect();"
            " return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        x, y = found
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> Path:
        """A PNG of what is visible."""
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; events on the way are noted."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            self._urls[params["requestId"]] = url
            if urlsplit(url).scheme not in ("data", "blob", "about"):
                self.requests.append(url)
        elif method == "Network.loadingFailed" and not params.get("canceled"):
            self.failed.append(f"{self._urls.get(params['requestId'])}: {params['errorText']}")
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            self.failed.append(f"{params['response']['url']}: {params['response']['status']}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


@contextlib.contextmanager
def open_browser() -> Iterator[Callable[[str], Page]]:
    """Starts Chromium; the function opens a page in a new tab. The test skips where none is."""
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium")
    websocket = pytest.importorskip("websocket", reason="websocket-client drives the browser")
    profile = tempfile.mkdtemp(prefix="haiprof-chromium-")
    command = [chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "HOME": profile},
    )  # fmt: skip
    sockets: list[Any] = []
    try:
        port = _devtools_port(process)

        def open_(url: str) -> Page:
            target = _new_tab(websocket, port)
            socket = websocket.create_connection(target, timeout=_WAIT_S, max_size=None)
            sockets.append(socket)
            page = Page(socket)
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.open(url)
            return page

        yield open_
    finally:
        for socket in sockets:
            socket.close()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        shutil.rmtree(profile, ignore_errors=True)


def _devtools_port(process: subprocess.Popen[str]) -> int:
    assert process.stderr is not None
    for line in process.stderr:
        found = _DEVTOOLS.search(line)
        if found:
            return int(found[1])
    raise AssertionError("Chromium ended before it listened")


def _new_tab(websocket: Any, port: int) -> str:
    """The address of a new, empty tab."""
    with urlopen(f"http://127.0.0.1:{port}/json/version") as answer:
        whole = websocket.create_connection(json.load(answer)["webSocketDebuggerUrl"])
    whole.send(
        json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}})
    )
    target = None
    while target is None:
        message = json.loads(whole.recv())
        target = message.get("result", {}).get("targetId") if message.get("id") == 1 else None
    whole.close()
    return f"ws://127.0.0.1:{port}/devtools/page/{target}"


@pytest.fixture
def browser() -> Iterator[Callable[[str], Page]]:
    """`browser(url)` opens a page; import this fixture where it is used."""
    with open_browser() as open_:
        yield open_
