"""Keys of a terminal, as they are pressed."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from haiprof.show.views.top import BACK, DOWN, ENTER, QUIT, UP

_KEYS = {
    b"\x1b[A": UP, b"\x1bOA": UP, b"k": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN, b"j": DOWN,
    b"\r": ENTER, b"\n": ENTER, b"l": ENTER, b"\x1b[C": ENTER, b"\x1bOC": ENTER,
    b"q": BACK, b"h": BACK, b"\x1b": BACK, b"\x1b[D": BACK, b"\x1bOD": BACK, b"\x7f": BACK,
    b"Q": QUIT, b"\x04": QUIT,
}  # fmt: skip
_LONGEST_BYTES = 64


class Keys:
    """Reads keys without an echo; none where stdin is no terminal."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def wait(self, seconds: float) -> str | None:
        """The next known key, or None after a timeout."""
        if self._fd is None:
            select.select([], [], [], seconds)
            return None
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return None
        pressed = os.read(self._fd, _LONGEST_BYTES)
        if not pressed:
            return QUIT  # the terminal is gone
        return _KEYS.get(pressed) or _KEYS.get(pressed[:3]) or _KEYS.get(pressed[:1])


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
