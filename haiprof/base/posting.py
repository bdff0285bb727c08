"""Requests to servers of others: one answer of one host, wherever that would send us."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from ssl import SSLContext
    from urllib.request import Request


def open_without_redirects(
    request: Request, timeout_s: float, context: SSLContext | None
) -> HTTPResponse:
    """The answer to a request; a redirect is an HTTPError like any other refusal.

    A redirected POST would become a GET without its body, and show its headers to another host.
    """
    from urllib.request import HTTPRedirectHandler, HTTPSHandler, build_opener

    class NoRedirect(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    own = [HTTPSHandler(context=context)] if context is not None else []
    return cast("HTTPResponse", build_opener(NoRedirect, *own).open(request, timeout=timeout_s))
