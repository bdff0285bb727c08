"""What `haiprof --help`, `--version` and `completion SHELL` print; loads nothing heavy."""

from __future__ import annotations

import platform

from haiprof.base.options import INTERVAL_HELP, OPTIONS
from haiprof.base.trace_options import OptionSpec, TraceOptions
from haiprof.base.version import PACKAGE, __version__, read_data
from haiprof.cli.command_line import table, wrap
from haiprof.cli.names import COMMANDS, FIRST_WORDS, GROUPS, second_words

SHELLS = ("bash", "zsh", "fish")
MIN_WIDTH, MAX_WIDTH = 60, 100
_COMMON = ("--json", "--log-dir", "--help")
_FOLDER = PACKAGE / "cli"
BRIEF = (_FOLDER / "brief.txt").read_text(encoding="utf-8")
_TEXT = read_data("cli/help.json")
_FREQUENT = ("time", "warmup", "steps", "log-dir", "name")
_OF_VERDICT = ("verdict overview | rank | lines", "the same run by rank, and by line of your code")
_MORE_ROWS = [
    ("trace now | report | ...", "trace a running job; read traces: haiprof trace --help"),
    ("copy A B", COMMANDS["put"].text),
    ("help COMMAND", "options and examples; everything: haiprof --help-all"),
]
_ZSH = """\
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(shell: str) -> str:
    """The script that a shell evaluates, one of `SHELLS`."""
    options = [f"--{spec.name}" for spec in OPTIONS]
    if shell == "fish":
        return _fish_script(options)
    filled = (_FOLDER / "completion.bash").read_text(encoding="utf-8")
    for mark, words in {
        "@WORDS@": FIRST_WORDS, "@TRACE@": second_words("trace"), "@COMMON@": _COMMON,
        "@VERDICT@": second_words("verdict"), "@EXPORT@": second_words("export"),
        "@OPTIONS@": options,
    }.items():  # fmt: skip
        filled = filled.replace(mark, " ".join(words))
    return filled if shell == "bash" else _ZSH + filled


def _fish_script(options: list[str]) -> str:
    first = "__fish_use_subcommand"
    lines = [
        f"complete -c haiprof -n {first} -a {c.words} -d {_quote(c.text)}"
        for c in COMMANDS.values()
        if " " not in c.words and c.text
    ]
    for word in ("trace", "verdict", "export"):
        seen = f"'__fish_seen_subcommand_from {word}'"
        lines.append(f"complete -c haiprof -n {seen} -a '{' '.join(second_words(word))}'")
    lines += [f"complete -c haiprof -n {first} -l {option[2:]}" for option in options]
    lines += [f"complete -c haiprof -n 'not {first}' -l {word[2:]}" for word in _COMMON]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def help_text(width: int = 100) -> str:
    """`haiprof --help`, which fits on a screen."""
    options = [_row(spec) for spec in OPTIONS if spec.name in _FREQUENT]
    commands = [(name, COMMANDS[name]) for names in GROUPS.values() for name in names]
    rows = [(f"{c.words} {c.usage}", c.text) for _, c in commands if len(c.words.split()) == 1
            and c.words != "copy"]  # fmt: skip
    rows.insert(1, _OF_VERDICT)
    rows += _MORE_ROWS
    return (
        f"{wrap(_TEXT['about'], width)}\n\nRecord: put haiprof in front of any training command\n"
        + table(_TEXT["usage"], width, 47)
        + "\nOptions, before the script\n"
        + table(options, width)
        + "\nRead, after or while the job runs\n"
        + table(rows, width, 33)
    )


def full_help_text(width: int = 100) -> str:
    """`haiprof --help-all`: every option of recording, and every command."""
    tracing = [spec for spec in OPTIONS if spec.field in TraceOptions.__dataclass_fields__]
    rows = [_row(spec) for spec in OPTIONS if spec not in tracing]
    rows.append(("--interval.NAME SECONDS", INTERVAL_HELP))
    rows.append(
        ("--options profile.NAME=VALUE", "any of these options, also as hai-platform takes them")
    )
    parts = [
        f"{wrap(_TEXT['about'], width)}\n",
        "Record: put haiprof in front of any training command\n"
        + table([*_TEXT["usage"], *_TEXT["more_usage"]], width, 47),
        f"Options, before the script\n{table(rows, width)}",
        f"{wrap(_TEXT['tracing'], width)}\n{table([_row(spec) for spec in tracing], width)}",
        f"{wrap(_TEXT['layers'], width)}\n",
        f"{wrap(_TEXT['reading'], width)}\n",
    ]
    parts += [f"{title}\n{group_rows(names, width)}" for title, names in GROUPS.items()]
    return "\n".join(parts)


def group_help_text(first: str, width: int = 100) -> str:
    """`haiprof trace --help`: the commands that begin with one word."""
    names = [name for name, command in COMMANDS.items() if command.words.split()[0] == first]
    return (
        f"usage: haiprof {first} COMMAND [OPTIONS]\n\n{group_rows(names, width)}\n"
        f"haiprof {first} COMMAND --help shows the options and examples of one of them.\n"
    )


def group_rows(names: tuple[str, ...] | list[str], width: int) -> str:
    """Commands with what they take and show."""
    found = [COMMANDS[name] for name in names]
    return table([(f"{each.words} {each.usage}".strip(), each.text) for each in found], width, 38)


def version_text() -> str:
    """Versions of haiprof and Python in one line."""
    return f"haiprof {__version__} (Python {platform.python_version()})\n"


def _row(spec: OptionSpec) -> tuple[str, str]:
    return f"--{spec.name} {spec.metavar}".rstrip(), spec.help
