"""Keys of a terminal, as they are pressed."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from haiprof.show.views.jobs import BACK, DOWN, ENTER, QUIT, UP

_KEYS = {
    b"\x1b[A": UP, b"\x1bOA": UP, b"k": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN, b"j": DOWN,
    b"\r": ENTER, b"\n": ENTER, b"l": ENTER, b"\x1b[C": ENTER, b"\x1bOC": ENTER,
    b"q": BACK, b"h": BACK, b"\x1b": BACK, b"\x1b[D": BACK, b"\x1bOD": BACK, b"\x7f": BACK,
    b"Q": QUIT, b"\x04": QUIT,
}  # fmt: skip
_LONGEST_BYTES = 64
_ESCAPE = b"\x1b"
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)", re.DOTALL)
"""What a key of several bytes sends (ECMA-48: CSI; SS3)."""
_SEQUENCE_S = 0.05
"""Bytes of one key come closer together than this, also through ssh."""


class Keys:
    """Reads keys without an echo; none where stdin is no terminal.

    Keys that were pressed while a frame was drawn are kept, and answered one by one.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._pressed = b""

    def wait(self, seconds: float) -> str | None:
        """The next known key, or None after a timeout."""
        if self._fd is None:
            select.select([], [], [], seconds)
            return None
        if not self._pressed and not self._read(self._fd, seconds):
            return None
        while self._pressed == _ESCAPE or self._pressed in (b"\x1b[", b"\x1bO"):
            if not self._read(self._fd, _SEQUENCE_S):
                break  # the key Escape itself
        if not self._pressed:
            return QUIT  # the terminal is gone
        return _KEYS.get(self._take())

    def _read(self, fd: int, seconds: float) -> bool:
        """Whether there was something within that time; the end of the terminal is, too."""
        ready, _, _ = select.select([fd], [], [], seconds)
        if not ready:
            return False
        found = os.read(fd, _LONGEST_BYTES)
        self._pressed += found
        return bool(found) or not self._pressed

    def _take(self) -> bytes:
        """The first key that was pressed; an unknown sequence is one key, and not Escape."""
        match = _SEQUENCE.match(self._pressed)
        length = match.end() if match else 1
        taken, self._pressed = self._pressed[:length], self._pressed[length:]
        return taken


@contextmanager
def keys() -> Iterator[Keys]:
    """Reads the terminal's keys; restores its mode in any case."""
    import termios
    import tty

    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, AttributeError, termios.error):
        yield Keys(None)
        return
    tty.setcbreak(fd)
    try:
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
