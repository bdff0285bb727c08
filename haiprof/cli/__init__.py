"""The commands that read runs, one module each; nothing is imported until one is called."""

from __future__ import annotations

from collections.abc import Sequence

from haiprof.cli.names import COMMANDS as COMMANDS


def main(argv: Sequence[str]) -> int:
    """Runs one command, such as `["overview", "haiprof-logs"]`, and returns its exit status."""
    from haiprof.cli.app import run_command

    return run_command(argv)
