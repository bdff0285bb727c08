"""Follows a job's log until the job is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 1 << 16


def follow(
    log: Path,
    status: Callable[[], int | None],
    out: BinaryIO | None,
    *,
    poll_s: float,
) -> int:
    """Copies a job's log while it grows."""
    offset = 0
    while True:
        ended = status()  # before the log is read, so that the last lines are in it
        offset = _copy(log, offset, out)
        if ended is not None:
            return ended
        time.sleep(poll_s)


def _copy(log: Path, offset: int, out: BinaryIO | None) -> int:
    if out is None:
        return offset
    try:
        with log.open("rb") as file:
            file.seek(offset)
            while block := file.read(_BLOCK_BYTES):
                out.write(block)
                offset += len(block)
    except FileNotFoundError:
        return offset
    out.flush()
    return offset
