"""Messages of haiprof's own: one line at a time, to stderr."""

from __future__ import annotations

import sys

from haiprof.base.units import visible


def print_message(text: str) -> None:
    """Prints one line to stderr, or nothing where stderr is closed: that is no reason to fail."""
    try:
        line = visible(text, keep="\n")  # commands, file names, errors: whatever they hold
        sys.stderr.write(f"haiprof: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return
