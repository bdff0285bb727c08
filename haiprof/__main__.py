"""The `haiprof` command: launches a job, or hands over to one of the other commands."""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import shutil
import sys
import threading
from typing import NoReturn

from haiprof.cli.names import COMMANDS, FIRST_WORDS, GROUP_NAMES, nearest, resolve, second_words

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun", "python")
_GC_THRESHOLD = 20_000
"""Imports and frames make many objects that stay: looking for garbage at each 700 of them takes a
tenth of a short command's time."""
_EXPLAINED = ("-h", "--help", "--help-all", "-V", "--version")
NOT_FOUND = 127  # as a shell reports a program that does not exist


def run() -> NoReturn:
    """The command as a shell starts it.

    It ends at once: to take numpy and polars apart is 50 ms of work for nothing, and 15 ms for
    whoever waits for the launcher. Where threads or processes are left, it ends as Python does.
    """
    status = main()
    if threading.active_count() > 1 or "multiprocessing" in sys.modules:
        raise SystemExit(status)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # full, or closed: Python says which
        raise SystemExit(status) from None
    os._exit(status)


def main(argv: list[str] | None = None) -> int:
    """Runs haiprof; a first word that names no command is the job's script or program."""
    gc.set_threshold(_GC_THRESHOLD)
    words = list(sys.argv[1:] if argv is None else argv)
    asks_help = words[:1] == ["help"] and not os.path.exists("help")
    if asks_help:
        words = [*words[1:], "--help"]
    if resolve(words) is not None:
        from haiprof.cli import main as command_main

        return command_main(words)
    if words[:1] == ["completion"]:
        return _complete(words[1:])
    if words and words[0] == "run":
        words = words[1:]
    if not words or words[0] in _EXPLAINED or _asks_for_group(words):
        return _explain(words)
    in_trace = words[0] == "trace"
    if _is_trace(words[in_trace]) or (in_trace and os.path.isdir(words[1])):
        from haiprof.cli import main as command_main

        return command_main(["trace-report" if in_trace else "verdict", *words[in_trace:]])
    if in_trace and not is_mistyped(words[1]):
        words = ["--trace", *words[1:]]  # hai-platform's spelling of a traced run
    if is_mistyped(words[0]):
        return _refuse(words, asks_help=asks_help)
    from haiprof.cli.names import own_command
    from haiprof.launch.run import main as launch_main

    status = launch_main(words, own_command)
    if status == NOT_FOUND and words[0].startswith("-"):
        _hint_at_order(words)
    return status


def _asks_for_group(words: list[str]) -> bool:
    """Whether `trace` stands alone, or with `--help`."""
    return words[0] in GROUP_NAMES and words[1:2] in ([], ["-h"], ["--help"])


def _is_trace(word: str) -> bool:
    """Whether the first word is a file of JSON: a trace, and no program."""
    return word.endswith((".json", ".json.gz")) and os.path.isfile(word)


def is_mistyped(word: str) -> bool:
    """Whether the first word is neither an option, nor a program or script that exists."""
    if os.path.isdir(word):
        return True
    if word.startswith("-") or os.sep in word or word.endswith(".py") or os.path.exists(word):
        return False
    beside_python = os.path.join(
        os.path.dirname(sys.executable), word
    )  # as `launch.command` runs it
    return shutil.which(word) is None and not os.path.exists(beside_python)


def _hint_at_order(words: list[str]) -> None:
    """Says so where a program was not found since it is a command, which stands before options."""
    from haiprof.base.messages import print_message
    from haiprof.launch.command import parse_command_line

    line = parse_command_line(words)
    if resolve(line.command) is None or not is_mistyped(line.command[0]):
        return
    options = line.taken if set(line.options) <= {"log_dir"} else ["--help"]
    own = shlex.join([*line.command, *options])
    print_message(f"hint: a command comes before its options: haiprof {own}")


def _refuse(words: list[str], *, asks_help: bool) -> int:
    """Says what was meant; no job is begun and no run directory made."""
    from haiprof.base.messages import print_message
    from haiprof.launch.command import nearest_file

    word = words[0]
    beside = "" if asks_help else " (and no such program or file)"
    if word in GROUP_NAMES:
        print_message(f"error: unknown command '{word} {words[1]}'{beside}")
        near = nearest(words[1], second_words(word))
        print_message(f"did you mean: haiprof {word} {near}" if near else f"hint: haiprof {word}")
        return NOT_FOUND
    if os.path.isdir(word):
        print_message(f"error: {word}: a folder, where a command or a program was expected")
        print_message(f"did you mean: haiprof verdict {word}")
        return NOT_FOUND
    print_message(f"error: unknown command '{word}'{beside}")
    names = (*FIRST_WORDS, *COMMANDS, *LAUNCHERS)
    near = nearest(word, names, alike=0.75) or nearest_file(word) or nearest(word, names)
    near = COMMANDS[near].words if near in COMMANDS else near
    print_message(f"did you mean: haiprof {near}" if near else "hint: haiprof --help")
    return NOT_FOUND


def _complete(words: list[str]) -> int:
    """`haiprof completion SHELL`: prints the shell's completion script."""
    from haiprof.base.messages import print_message
    from haiprof.cli.launch_help import SHELLS, completion_script

    if len(words) != 1 or words[0] not in SHELLS:
        print_message(f"error: completion: name a shell: {', '.join(SHELLS)}")
        print_message('hint: eval "$(haiprof completion bash)"')
        return 2
    sys.stdout.write(completion_script(words[0]))
    return 0


def _explain(words: list[str]) -> int:
    """Help and version; help without being asked for it goes to stderr with status 2."""
    from haiprof.cli import launch_help

    first = words[0] if words else ""
    if first in ("-V", "--version"):
        sys.stdout.write(launch_help.version_text())
        return 0
    if not words:
        sys.stderr.write(launch_help.BRIEF)
        return 2
    columns = shutil.get_terminal_size((launch_help.MAX_WIDTH, 0)).columns
    width = min(launch_help.MAX_WIDTH, max(launch_help.MIN_WIDTH, columns))
    if first in GROUP_NAMES:
        sys.stdout.write(launch_help.group_help_text(first, width))
    elif first == "--help-all":
        sys.stdout.write(launch_help.full_help_text(width))
    else:
        sys.stdout.write(launch_help.help_text(width))
    return 0


if __name__ == "__main__":
    run()
