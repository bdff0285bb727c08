"""Python's garbage collector, paused where much is read and little thrown away."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """No collections until the end of the block, unless the caller had none anyway.

    Reading makes objects by the million: collections, which look at all that live, would take
    longer than the reading. What is in no cycle is freed all the same.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
