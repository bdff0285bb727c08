"""A real browser for tests: headless Chromium without network, driven by its DevTools."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
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

chromium = next((found for found in map(shutil.which, _NAMES) if found), None)


@dataclass
class Page:
    """One tab; the fixture `browser` opens it."""

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
            " const at = [r.left + r.width / 2, r.top + r.height / 2];"
            " const stays = `${window.seenAt}` === `${at}`; window.seenAt = stays ? null : at;"
            " return stays ? at : null; })()"  # what is drawn meanwhile moves it
        )
        x, y = found
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> Path:
        """A PNG of what is visible."""
        found = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def close(self) -> None:
        self._socket.close()

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


class Chromium:
    """A running Chromium, driven by its own DevTools."""

    def __init__(self, port: int) -> None:
        self._websocket = pytest.importorskip("websocket", reason="websocket-client drives it")
        self._port = port
        with urlopen(f"http://127.0.0.1:{port}/json/version") as answer:
            self._whole = Page(self._connect(json.load(answer)["webSocketDebuggerUrl"]))

    @contextlib.contextmanager
    def session(self) -> Iterator[Callable[[str], Page]]:
        """Opens pages in tabs that share cookies with each other alone; closes them at its end."""
        context = self._whole.call("Target.createBrowserContext")["browserContextId"]
        pages: list[Page] = []

        def open_(url: str) -> Page:
            where = {"url": "about:blank", "browserContextId": context}
            target = self._whole.call("Target.createTarget", **where)["targetId"]
            page = Page(self._connect(f"ws://127.0.0.1:{self._port}/devtools/page/{target}"))
            pages.append(page)
            for domain in ("Page", "Runtime", "Network", "Log"):
                page.call(f"{domain}.enable")
            page.open(url)
            return page

        try:
            yield open_
        finally:
            for page in pages:
                page.close()
            self._whole.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        self._whole.close()

    def _connect(self, address: str) -> Any:
        return self._websocket.create_connection(address, timeout=_WAIT_S, max_size=None)


@pytest.fixture(scope="session")
def running_chromium() -> Iterator[Chromium]:
    """One for all tests of a worker, which skip where none is."""
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium")
    profile = tempfile.mkdtemp(prefix="haiprof-chromium-")
    process = subprocess.Popen(
        [chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ, "HOME": profile},
    )  # fmt: skip
    told, end_s = Path(profile, "DevToolsActivePort"), time.monotonic() + _WAIT_S
    try:
        while not (told.exists() and told.read_text()):
            assert process.poll() is None, "Chromium ended before it listened"
            assert time.monotonic() < end_s, "Chromium does not listen"
            time.sleep(0.05)
        running = Chromium(int(told.read_text().split()[0]))
        yield running
        running.close()
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)


@pytest.fixture
def browser(running_chromium: Chromium) -> Iterator[Callable[[str], Page]]:
    """`browser(url)` opens a page in a new tab."""
    with running_chromium.session() as open_:
        yield open_
