"""The `haiprof` command: launches a job, or hands over to one of the other commands."""

from __future__ import annotations

import sys

from haiprof.cli.names import COMMANDS

NOT_FOUND = 127  # as a shell reports a program that does not exist


def main(argv: list[str] | None = None) -> int:
    """Runs haiprof; a first word that names no command is the job's script or program."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        from haiprof.cli import main as command_main

        return command_main(words)
    if words and words[0] == "run":
        words = words[1:]
    if not words or words[0] in ("-h", "--help", "-V", "--version"):
        return _explain(words)
    from haiprof.launch.run import main as launch_main

    status = launch_main(words)
    if status == NOT_FOUND:
        _suggest(words[0])
    return status


def _suggest(word: str) -> None:
    """A mistyped command was taken for a program."""
    import difflib

    for name in difflib.get_close_matches(word, COMMANDS, n=1):
        sys.stderr.write(f"haiprof: did you mean: haiprof {name}\n")


def _explain(words: list[str]) -> int:
    """Help and version; help without being asked for it goes to stderr with status 2."""
    from haiprof.cli.launch_help import help_text, version_text
    from haiprof.launch.command import AFTER_SCRIPT

    if words and words[0] in ("-V", "--version"):
        sys.stdout.write(version_text())
        return 0
    (sys.stdout if words else sys.stderr).write(help_text(COMMANDS, AFTER_SCRIPT))
    return 0 if words else 2


if __name__ == "__main__":
    raise SystemExit(main())
