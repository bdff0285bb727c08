"""Compiled helpers of haiprof's own that need no header of Python: loaded by ctypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_own_library(name: str) -> Any | None:
    """A helper of this folder, such as `_terminate`; None where it cannot be loaded.

    It was not compiled then, or for another machine.
    """
    found = sorted(Path(__file__).parent.glob(f"{name}*.so"))
    if not found:
        return None
    try:
        import ctypes

        return ctypes.CDLL(str(found[0]))
    except (ImportError, OSError):
        return None
