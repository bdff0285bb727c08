"""Opens a page in a browser without its token in a command line, which every user can read."""

from __future__ import annotations

import contextlib
import html
import os
import webbrowser
from collections.abc import Callable, Iterator
from typing import Annotated

from haiprof.base.safe_files import MadeFolder, write_file
from haiprof.cli.command_line import Opt

NoBrowser = Annotated[bool, Opt("--no-browser", "Only print the address.")]

_PAGE = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">'


@contextlib.contextmanager
def page_opener(no_browser: bool) -> Iterator[Callable[[str], None]]:
    """What opens an address, where there is a screen and the user wants it.

    The browser is started with a file that sends it on, as Jupyter does: only this user can read
    it, and it goes away at the end of the block. Where a browser may not read the folder for
    temporary files (packed as snap or flatpak), the address that haiprof printed does.
    """
    with contextlib.ExitStack() as stack:

        def open_page(url: str) -> None:
            if no_browser or not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
                return
            folder = stack.enter_context(MadeFolder.temporary("haiprof-"))
            page = _PAGE.format(url=html.escape(url))
            write_file(folder / "open.html", page.encode(), below=folder)
            webbrowser.open((folder / "open.html").as_uri())

        yield open_page
