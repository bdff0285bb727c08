"""The type of the function with which lower parts start another haiprof command."""

from __future__ import annotations

from collections.abc import Callable

Subcommand = Callable[..., list[str]]
"""Maps a command and its words (`"verdict", RUN, "--json"`) to the words that are executed."""
