"""The launcher's voice: one line at a time, to stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line to stderr; a closed stderr is not the job's problem."""
    try:
        sys.stderr.write(f"haiprof: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
