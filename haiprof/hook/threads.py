"""Threads beside the training: no signal of the job's is ever delivered to one of them."""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable
from typing import Any

# What a thread's own instruction raises comes to that thread, blocked or not.
_OWN_DOING = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT,
    signal.SIGSYS,
}  # fmt: skip


def start_deaf_thread(body: Callable[..., None], *arguments: Any) -> None:
    """Starts a thread that takes no signals.

    The kernel gives a signal of the process to any thread that does not block it. A job that blocks
    SIGTERM while it saves would be ended by it in a thread of ours.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_DOING)
    try:
        _thread.start_new_thread(body, arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
