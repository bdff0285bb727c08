"""Keeps what torch's profiler prints by itself out of the job's standard error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from haiprof.base.descriptors import Descriptor
from haiprof.in_job.threads import hold_size_signal

# What Kineto says of stages by itself, on every use (torch 2.13: USDT, before: STAGE); the
# execution trace observer; functions that were open when a window with stacks began; ranges of the
# job's own that overlap our step marks.
_OWN_LINES = re.compile(
    rb"(STAGE|USDT):\d|.*(Execution Trace Observer|Python replay stack is empty"
    rb"|\bcollection\.cpp:\d+\] Warning: )"
)
_STDERR = 2


@contextmanager
def quiet() -> Iterator[None]:
    """Leaves out such lines, written by C++ inside; all others go out at the end.

    Around starts and stops alone: other threads' lines wait meanwhile. Kineto's log level would be
    simpler, but it stays, and hides errors from the job's own profilers.
    """
    try:
        saved = Descriptor(os.dup(_STDERR))
    except OSError:  # the job has closed it
        yield
        return
    held = Descriptor(os.memfd_create("haiprof"))
    os.dup2(held.number, _STDERR)
    with hold_size_signal():
        try:
            yield
        finally:
            _let_go(saved, held)


def _let_go(saved: Descriptor, held: Descriptor) -> None:
    """Puts standard error back, unless the job has closed or replaced it meanwhile."""
    if saved.is_ours() and held.is_at(_STDERR):
        os.dup2(saved.number, _STDERR)
    lines = []
    if held.is_ours():
        size = os.lseek(held.number, 0, os.SEEK_END)
        lines = os.pread(held.number, size, 0).splitlines(keepends=True)
    others = b"".join(line for line in lines if not _OWN_LINES.match(line))
    if others and saved.is_ours():
        os.write(saved.number, others)
    saved.close()
    held.close()
