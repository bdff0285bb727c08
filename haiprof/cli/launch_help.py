"""What `haiprof --help`, `--version` and `completion SHELL` print; loads nothing heavy."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Sequence

from haiprof.base.options import INTERVAL_HELP, OPTIONS, OptionSpec
from haiprof.base.trace_options import TraceOptions
from haiprof.base.version import __version__
from haiprof.cli.names import COMMANDS, GROUPS, WORDS

SHELLS = ("bash", "zsh", "fish")
_COMMON = ("--json", "--log-dir", "--help")

_BASH = """\
_haiprof() {
    local word="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=()
    if [[ $COMP_CWORD -eq 1 && $word != -* ]]; then
        COMPREPLY=($(compgen -W "@WORDS@" -- "$word") $(compgen -f -- "$word"))
    elif [[ " @WORDS@ " == *" ${COMP_WORDS[1]} "* && $word == -* ]]; then
        COMPREPLY=($(compgen -W "@COMMON@" -- "$word"))
    elif [[ ${COMP_WORDS[1]} == help ]]; then
        COMPREPLY=($(compgen -W "@WORDS@" -- "$word"))
    elif [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "@OPTIONS@" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}
complete -o filenames -F _haiprof haiprof
"""
_ZSH = """\
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(shell: str) -> str:
    """The script that a shell evaluates.

    Args:
        shell: One of `SHELLS`.
    """
    if shell == "fish":
        return _fish_script()
    filled = _BASH
    for mark, words in (
        ("@WORDS@", WORDS), ("@COMMON@", _COMMON), ("@OPTIONS@", _options())
    ):  # fmt: skip
        filled = filled.replace(mark, " ".join(words))
    return filled if shell == "bash" else _ZSH + filled


def _options() -> list[str]:
    return [f"--{spec.name}" for spec in OPTIONS]


def _fish_script() -> str:
    first = "__fish_use_subcommand"
    lines = [
        f"complete -c haiprof -n {first} -a {name} -d {_quote(line.split(': ', 1)[-1])}"
        for name, line in COMMANDS.items()
    ]
    lines += [f"complete -c haiprof -n {first} -l {spec.name}" for spec in OPTIONS]
    lines += [f"complete -c haiprof -n 'not {first}' -l {word[2:]}" for word in _COMMON]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_ABOUT = (
    "haiprof finds out why a PyTorch training job is slow, without a changed line of user code."
)
_USAGE = (
    ("haiprof train.py", "record the whole run, end with a verdict"),
    ("haiprof train.py --time 120", "record 120 s, then leave the job alone"),
    ("haiprof --time 120 train.py --lr 0.1", "the same; --lr is the script's"),
    ("haiprof -m pkg.train", "a module, as python -m"),
    ("haiprof torchrun --nproc-per-node 2 train.py", "all ranks of this node"),
    ("haiprof accelerate launch train.py", "any other launcher"),
    ("haiprof bash -c '...'", "or shell"),
    ("haiprof -- any command --time 5", "from -- on everything is the command's own"),
)
_TRACE = (
    ("haiprof --steps 100:105 --trace-stacks train.py", "steps 100 to 104, with Python stacks"),
    (
        "haiprof train.py --trace --warmup 120 --time 15",
        "the steps from 120 s to 135 s of training",
    ),
)
_TRACE_ABOUT = (
    "Tracing: torch.profiler records some steps of every rank, whole, into traces/ of the run:"
)
_REST = (
    "Each option can also be given as --options profile.NAME=VALUE (repeatable), as an environment "
    "variable (HAIPROF_TIME, HAIPROF_WARMUP, HAIPROF_RECORDERS, HAIPROF_LOG_DIR, "
    "HAIPROF_GPU_INTERVAL, ...) and in [tool.haiprof] of pyproject.toml. The command line wins "
    "over the environment, which wins over pyproject.toml. HAIPROF_ENABLED=0 runs the command "
    "without haiprof.",
    "After (or while) a job runs; DIR is a run directory, or a log directory whose newest run is "
    "taken:",
)
MIN_WIDTH, MAX_WIDTH = 60, 100
_LEAST_ROOM = 30
"""Columns that an explanation needs beside what it explains; with fewer it goes below."""


_BRIEF = """\
haiprof finds out why a PyTorch training job is slow, without a changed line of user code.
  haiprof train.py                     record the run, and end with the verdict
  haiprof torchrun --nproc-per-node 8 train.py --time 120
  haiprof verdict                      the verdict on the newest run again
  haiprof overview                     all ranks: steps, time split, counters
  haiprof view                         all of it as a page in the browser
  haiprof top                          the jobs that run now
  haiprof trace-report                 what the newest run's traces say
  haiprof doctor                       what can be measured on this node
Every command and option: haiprof --help; one of them: haiprof help verdict
"""


def brief_text() -> str:
    """What `haiprof` alone prints: ten lines."""
    return _BRIEF


def help_text(commands: dict[str, str], after_script: tuple[str, ...], width: int = 100) -> str:
    """The whole help.

    Args:
        commands: One line per command, by name.
        after_script: Options that are taken after the script, too.
        width: Columns.
    """
    tracing = [spec for spec in OPTIONS if spec.field in TraceOptions.__dataclass_fields__]
    rows = [_row(spec, after_script) for spec in OPTIONS if spec not in tracing]
    rows.append(("--interval.NAME SECONDS*", INTERVAL_HELP))
    rows.append(("--options profile.NAME=VALUE*", "any of these, as the published tool takes them"))
    shown = {name: line.split(": ", 1) for name, line in commands.items()}
    left = max(len(left) for left, _ in shown.values()) + 2
    parts = [
        _paragraph(_ABOUT, width),
        "Usage: put haiprof in front of any training command\n" + _table(_USAGE, width),
        "Options, before the script or (those marked *) after it:\n" + _table(rows, width),
        _paragraph(_TRACE_ABOUT, width)
        + _table(_TRACE, width)
        + _table([_row(spec, after_script) for spec in tracing], width),
        *(_paragraph(text, width) for text in _REST),
    ]
    for title, names in GROUPS.items():
        found = [(shown[n][0], shown[n][1]) for n in names if n in shown]
        parts += [f"{title}\n{_table(found, width, left)}"] if found else []
    return "\n".join(parts)


def version_text() -> str:
    """Versions of haiprof and Python in one line."""
    return f"haiprof {__version__} (Python {platform.python_version()})\n"


def _row(spec: OptionSpec, after_script: tuple[str, ...]) -> tuple[str, str]:
    mark = "*" if spec.name in after_script else ""
    return f"--{spec.name} {spec.metavar}".rstrip() + mark, spec.help


def _paragraph(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_on_hyphens=False) + "\n"


def _table(rows: Sequence[tuple[str, str]], width: int, left: int = 0) -> str:
    """Words and what they mean, side by side, or below each other where that is too narrow."""
    left = left or max(len(words) for words, _ in rows) + 2
    lines = []
    for words, meaning in rows:
        if width - left < _LEAST_ROOM:
            lines += [f"  {words}", *_wrap(meaning, width, indent=6)]
        else:
            first, *rest = _wrap(meaning, width, indent=left + 2)
            lines += [f"  {words:<{left}}{first.lstrip()}", *rest]
    return "".join(f"{line}\n" for line in lines)


def _wrap(text: str, width: int, *, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
    )
