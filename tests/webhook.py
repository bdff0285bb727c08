"""A local HTTP server that keeps what is posted to it, or never answers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any


class Webhook:
    """Listens at `url` within the `with`."""

    def __init__(
        self, *, answers: bool = True, statuses: Iterable[int] = (), identity: Path | None = None
    ) -> None:
        """`identity`: a certificate for 127.0.0.1 with its key; it is https then."""
        self.bodies: list[dict[str, Any]] = []
        self.types: list[str | None] = []
        self.tokens: list[str | None] = []
        left, over = iter(statuses), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.types.append(self.headers["Content-Type"])
                outer.tokens.append(self.headers["Authorization"])
                outer.bodies.append(json.loads(body))
                if not answers:
                    over.wait()
                    return
                self.send_response(next(left, 200))
                self.send_header("Location", "http://127.0.0.1:9/")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Not at all."""

        self._over = over
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if identity is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(identity)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = (
            f"http{'s' * bool(identity)}://127.0.0.1:{self._server.server_port}/services/T0/B0"
        )

    def __enter__(self) -> Webhook:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def events(self) -> list[str]:
        """Kinds of the events so far, in order."""
        return [body["event"] for body in self.bodies]
