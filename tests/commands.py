"""The command line, run in the tests' own process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Ran(NamedTuple):
    """One command that has run."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What it printed, on one line."""
        return " ".join(self.out.split())

    @property
    def data(self) -> Any:
        """What it printed as JSON."""
        return json.loads(self.out)


Run = Callable[..., Ran]
"""The fixture `run`: takes the words of a command, and `status`: 0, another one, None for any."""
