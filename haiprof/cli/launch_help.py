"""What `haiprof --help`, `--version` and `completion SHELL` print; loads nothing heavy."""

from __future__ import annotations

import platform

from haiprof.base.options import INTERVAL_HELP, OPTIONS
from haiprof.base.trace_options import OptionSpec, TraceOptions
from haiprof.base.version import PACKAGE, __version__
from haiprof.cli.command_line import table, wrap
from haiprof.cli.names import COMMANDS, FIRST_WORDS, GROUPS, second_words

SHELLS = ("bash", "zsh", "fish")
MIN_WIDTH, MAX_WIDTH = 60, 100
_COMMON = ("--json", "--log-dir", "--help")
_ABOUT = "haiprof finds out why a PyTorch training job is slow, without changes to its code."
_USAGE = (
    ("haiprof train.py", "record the whole run, end with a verdict"),
    ("haiprof --time 120 train.py --lr 0.1", "record 120 s; --lr is the script's"),
    ("haiprof torchrun --nproc-per-node 8 train.py", "all ranks of this node; any launcher works"),
    ("srun haiprof torchrun --nnodes 4 ... train.py", "all ranks of all nodes (docs/options.md)"),
    ("haiprof --steps 100:105 train.py", "also trace steps 100 to 104 with torch.profiler"),
)
_MORE_USAGE = (
    ("haiprof -m pkg.train", "a module, as python -m"),
    ("haiprof python -c CODE", "code on the command line"),
    ("haiprof bash -c '...'", "a shell"),
    ("haiprof train.py --time 120", "--time and --options profile.* may follow the script"),
    ("haiprof -- train.py --time 5", "arguments after -- are passed to the command unchanged"),
    ("haiprof trace train.py", "the same as haiprof --trace train.py"),
)
_FREQUENT = ("time", "warmup", "steps", "log-dir", "name")
_OF_VERDICT = ("verdict overview | rank | lines", "the same run by rank, and by line of your code")
_MORE_ROWS = [
    ("trace now | report | ...", "trace a running job; read traces: haiprof trace --help"),
    ("copy A B", COMMANDS["put"].text),
    ("help COMMAND", "options and examples; everything: haiprof --help-all"),
]
_LAYERS = (
    "Each option can also be given as --options profile.NAME=VALUE (repeatable), as an environment "
    "variable (HAIPROF_TIME, HAIPROF_WARMUP, HAIPROF_RECORDERS, HAIPROF_GPU_INTERVAL, ...) and in "
    "[tool.haiprof] of pyproject.toml. The command line wins over the environment, which wins over "
    "pyproject.toml, and that over /etc/haiprof/config.toml. HAIPROF_ENABLED=0 runs the command "
    "without haiprof."
)
_TRACING = (
    "Tracing: torch.profiler records some steps of every rank into the traces/ folder of the run."
)
_READING = (
    "Commands, after or while a job runs. DIR is a run directory, or a log directory whose newest "
    "run is taken; without it, the log directory that a job started here would write to."
)
BRIEF = """\
haiprof finds out why a PyTorch training job is slow, without changes to its code.
  haiprof train.py                     record the run, and end with the verdict
  haiprof torchrun --nproc-per-node 8 train.py
  haiprof verdict                      the verdict on the newest run again
  haiprof verdict overview             all ranks: steps, time split, counters
  haiprof report --serve               all of it as a page in the browser
  haiprof ls --live                    the jobs that run now
  haiprof trace report                 GPU time, kernels, collectives of the newest run's traces
  haiprof doctor                       what can be measured on this node
Every command: haiprof --help; one of them: haiprof help verdict
"""
_ZSH = """\
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(shell: str) -> str:
    """The script that a shell evaluates, one of `SHELLS`."""
    options = [f"--{spec.name}" for spec in OPTIONS]
    if shell == "fish":
        return _fish_script(options)
    filled = (PACKAGE / "cli" / "completion.bash").read_text(encoding="utf-8")
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
        f"{wrap(_ABOUT, width)}\n\nRecord: put haiprof in front of any training command\n"
        + table(_USAGE, width, 47)
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
        f"{wrap(_ABOUT, width)}\n",
        "Record: put haiprof in front of any training command\n"
        + table((*_USAGE, *_MORE_USAGE), width, 47),
        f"Options, before the script\n{table(rows, width)}",
        f"{wrap(_TRACING, width)}\n{table([_row(spec) for spec in tracing], width)}",
        f"{wrap(_LAYERS, width)}\n",
        f"{wrap(_READING, width)}\n",
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
