"""Threads beside the training: no signal of the job's is ever delivered to one of them."""

from __future__ import annotations

import _thread
import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

# What a thread's own instruction raises comes to that thread, blocked or not.
_OWN_DOING = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT,
    signal.SIGSYS,
}  # fmt: skip


def start_deaf_thread(body: Callable[..., None], *arguments: Any) -> None:
    """Starts a thread that takes no signals."""
    # The kernel gives a signal of the process to any thread that does not block it. A job that
    # blocks SIGTERM while it saves would be ended by it in a thread of ours.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OWN_DOING)
    try:
        _thread.start_new_thread(body, arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def hold_size_signal() -> Iterator[None]:
    """Lets writes beyond RLIMIT_FSIZE fail with EFBIG, and raise no SIGXFSZ in the job's thread."""
    # The kernel sends it to the thread that writes. Python ignores it, but a job may have gone back
    # to the default, which ends the process, or handle it as its own.
    size_signal = {signal.SIGXFSZ}
    pending = size_signal & signal.sigpending()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, size_signal)
    try:
        yield
    finally:
        try:
            if not pending and size_signal & signal.sigpending():
                signal.sigtimedwait(size_signal, 0)  # ours, of this thread: taken back
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def call_within(
    limit_s: float, body: Callable[..., None], *arguments: Any, or_here: bool = False
) -> bool:
    """Calls something that may hang on a disk, in a thread of its own."""
    # Where no thread can be started any more it is not called, or with `or_here` on this one.
    over = _thread.allocate_lock()
    over.acquire()

    def call() -> None:
        try:
            body(*arguments)
        finally:
            over.release()

    try:
        start_deaf_thread(call)
    except RuntimeError:
        if or_here:
            body(*arguments)
        return or_here
    return over.acquire(timeout=limit_s)
