"""Ending a server or a loop on Ctrl-C or TERM: an event that a signal handler may set."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 1.0
"""A signal that the kernel hands to another thread wakes nobody: its handler runs in the main
thread, at the next bytecode there."""


class SignalEvent(threading.Event):
    """An event that a signal handler can set while the same thread begins to wait for it.

    `threading.Event` takes a lock for both: a handler that runs just then, in the thread that
    holds it, waits for ever. `SimpleQueue.put` is made for handlers (reentrant, in C).
    """

    def __init__(self) -> None:
        super().__init__()
        self._happened = False
        self._words: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._happened

    def set(self) -> None:
        """Sets it, for good; wakes one that waits."""
        self._happened = True
        self._words.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or the time is up; whether it was set."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while not self._happened:
            left_s = _LOOK_S if until_s is None else min(until_s - time.monotonic(), _LOOK_S)
            if left_s <= 0:
                break
            with suppress(Empty):
                self._words.get(timeout=left_s)
        return self._happened


@contextmanager
def stop_event() -> Iterator[SignalEvent]:
    """An event that SIGINT and SIGTERM set; their handlers are as before afterwards.

    Handlers can only be set in the main thread: elsewhere only the caller sets the event.
    """
    stop = SignalEvent()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def set_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, set_stop) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
