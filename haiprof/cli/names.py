"""haiprof's commands by name: how they are spelled, what they show and where; as processes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from haiprof.base.version import PACKAGE


class Command(NamedTuple):
    """One command."""

    words: str  # How it is spelled: `verdict`, `trace critical-path`, `export --to chakra`
    usage: str  # What it takes, in short
    text: str  # What it shows, in one line
    function: str = ""
    """Its module in this package and after a colon its function, where they have other names."""


COMMANDS = {name: Command(*told) for name, told in {
    "verdict": ("verdict", "[RUN|JOB|TRACES]", "the cause, its evidence, what to change"),
    "overview": ("verdict overview", "[DIR]", "all ranks: steps, time split, counters", "runs"),
    "rank": ("verdict rank", "[DIR] [RANK]", "one rank over time, its slowest steps", "runs"),
    "lines": ("verdict lines", "[DIR]", "which lines of your code take the time", "runs"),
    "compare": ("compare", "BEFORE AFTER", "two runs or traces: slower or not, and by what"),
    "trace-diff": ("compare --traces", "BEFORE AFTER", "the traces of two runs, by kernel and "
                   "operator", "compare"),
    "goodput": ("goodput", "[JOB|RUN...]", "where a job's wall time went, over restarts and runs",
                "runs"),
    "report": ("report", "[DIR|TRACES]", "all of it as one HTML page; --serve: in a browser",
               "pages"),
    "view": ("report --serve", "[DIR]", "the page on this machine, also while the job runs",
             "pages"),
    "list": ("ls", "[DIR]", "the recorded runs; --live: the jobs that run now", "runs:list_runs"),
    "top": ("ls --live", "[JOB]", "the jobs that run now; --once: one look", "running_jobs"),
    "snapshot": ("snapshot", "[JOB]", "what every rank does now, and which one blocks",
                 "job_requests"),
    "attach": ("attach", "[JOB]", "record a running job for a while", "job_requests"),
    "trace-now": ("trace now", "[JOB]", "trace some steps of a running job, on every rank",
                  "job_requests"),
    "trace-report": ("trace report", "[TRACES]", "GPU time, steps, kernels, launches, collectives",
                     "traces"),
    "trace-table": ("trace tables", "TABLE [TRACES]", "one table whole, with HTA's cut-offs",
                    "traces"),
    "functions": ("trace functions", "[TRACES]", "time by function, and which rank differs",
                  "traces"),
    "modules": ("trace modules", "[TRACES]", "time by layer, forward and backward", "traces"),
    "efficiency": ("trace efficiency", "[TRACES]", "MFU, and operators against the roofline",
                   "trace_causes"),
    "critical-path": ("trace critical-path", "[TRACES]", "what a step's time consists of",
                      "trace_causes"),
    "what-if": ("trace what-if", "[TRACES]", "how much shorter steps become if something is faster",
                "trace_causes"),
    "memory-timeline": ("trace memory", "[TRACES]", "memory over time, and its peak by operator",
                        "trace_causes"),
    "flight-recorder": ("trace flight-recorder", "DUMPS...", "dumps of the Flight Recorder: which "
                        "collective does not match, and on which ranks", "trace_causes"),
    "trace-check": ("trace check", "[TRACES]", "recording errors in traces", "trace_causes"),
    "query": ("trace query", "[TRACES|RUN] SQL", "SQL over the tables of traces or a run",
              "traces"),
    "kineto-agent": ("trace kineto-agent", "", "lets jobs with KINETO_USE_DAEMON be traced",
                     "job_requests"),
    "dyno": ("trace dyno", "COMMAND", "dynolog's own command line, also without its daemon"),
    "export": ("export", "[DIR] --to FORMAT", "to other tools: see haiprof export --help"),
    "tensorboard": ("export --to tensorboard", "[RUN|TRACES]", "serves TensorBoard: scalars and "
                    "traces", "pages"),
    "perfetto": ("export --to perfetto", "[TRACE|RUN]", "serves Perfetto's UI on this machine",
                 "pages"),
    "merge": ("export --to merged", "[RUN|TRACES]", "one trace with all ranks", "export"),
    "link": ("export --to linked", "[RUN|TRACES]", "execution traces joined with timelines",
             "export"),
    "chakra": ("export --to chakra", "[RUN|LINKED]", "Chakra traces, or a picture of the graph",
               "export"),
    "scalars": ("export --to scalars", "[DIR]", "scalars for TensorBoard, also live", "export"),
    "wandb": ("export --to wandb", "[RUN]", "verdict, ledger and page to Weights & Biases",
              "export"),
    "mlflow": ("export --to mlflow", "[RUN]", "verdict, ledger and page to MLflow", "export"),
    "otlp": ("export --to otlp", "[RUN]", "counters and step times to an OpenTelemetry collector",
             "export"),
    "put": ("copy", "RUN ADDRESS", "a run to object storage, or from there to a folder",
            "run_copies"),
    "fetch": ("copy", "ADDRESS [DIR]", "a run from object storage into a folder", "run_copies"),
    "submit": ("submit", "SCRIPT", "start a job here in the background, or on a cluster"),
    "try-loader": ("try-loader", "COMMAND", "steps per second with other DataLoaders, tried in "
                   "short runs", "prepare"),
    "preflight": ("preflight", "[COMMAND]", "before a job: slow ranks, nodes and links", "prepare"),
    "node": ("node", "[DIR]", "records this node for months without a job; --show", "prepare"),
    "doctor": ("doctor", "", "what can be measured on this node, and what prevents the rest",
               "prepare"),
    "mcp": ("mcp", "", "runs and traces as tools for agents, read-only, over stdio"),
    "skill": ("skill", "[DIR]", "writes SKILL.md: how an agent works with haiprof"),
    "ps": ("ls --running", "", "", "running_jobs"),
    "diagnose": ("verdict", "", "", "verdict:verdict"),
}.items()}  # fmt: skip
"""By the name of the last release, which still works; code uses these names, too."""

TABLES = ("csv", "parquet", "prometheus", "otlp-json")  # What `export --to` writes itself
WRITE_NO_FILE = {
    "export --to tensorboard": "it serves until Ctrl-C; haiprof export --to scalars writes files "
                               "for TensorBoard into the run",
    "export --to perfetto": "it serves until Ctrl-C; haiprof export --to merged -o FILE writes a "
                            "trace for Perfetto",
    "export --to scalars": "it writes into RUN/tensorboard; haiprof export --to csv -o FILE writes "
                           "a table",
    "report --serve": "it serves until Ctrl-C; haiprof report -o FILE writes the page",
}  # fmt: skip
"""By how commands without `-o FILE` are spelled: what they do, and which one writes a file."""
GROUPS = {
    "Read a run": ("verdict", "overview", "rank", "lines", "compare", "goodput", "report",
                   "list"),
    "Look into a running job": ("snapshot", "attach", "top"),
    "Read traces of torch.profiler": (
        "trace-now", "trace-report", "trace-table", "functions", "modules", "efficiency",
        "critical-path", "what-if", "memory-timeline", "flight-recorder", "trace-check", "query",
        "kineto-agent", "dyno", "trace-diff",
    ),
    "Use other tools": (
        "export", "tensorboard", "perfetto", "merge", "link", "chakra", "scalars", "wandb",
        "mlflow", "otlp", "put", "mcp", "skill",
    ),
    "Prepare": ("submit", "try-loader", "preflight", "node", "doctor"),
    "Other forms": ("view", "fetch"),
}  # fmt: skip
"""The commands by what one wants to do, as `haiprof --help-all` lists them."""

OTHER_NAMES = ("diagnose", "ps")  # Of a command that is in a group
_BY_WORDS = {command.words: name for name, command in reversed(COMMANDS.items())}
GROUP_NAMES = ("trace",)  # First words that are no command by themselves
FIRST_WORDS = tuple(dict.fromkeys([*(c.words.split()[0] for c in COMMANDS.values()),
                                   "help", "completion"]))  # fmt: skip
"""What the first word of a command line can be, apart from a program or an old name."""


def resolve(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """A command's name and its arguments, in either release's spelling; None for other words."""
    if not words:
        return None
    first, *rest = words
    if rest and f"{first} {rest[0]}" in _BY_WORDS and not rest[0].startswith("-"):
        return _BY_WORDS[f"{first} {rest[0]}"], rest[1:]
    if first == "copy":
        return _copy(rest)
    if first == "export":
        return _export(rest)
    for place, word in enumerate(rest):
        if word == "--":
            break
        if f"{first} {word}" in _BY_WORDS:
            return _BY_WORDS[f"{first} {word}"], rest[:place] + rest[place + 1 :]
    name = _BY_WORDS.get(first, first)
    return (name, rest) if name in COMMANDS else None


def second_words(first: str) -> list[str]:
    """What may follow the first word of a command: `report` and others of `trace`."""
    found = [command.words.split() for command in COMMANDS.values()]
    tables = TABLES if first == "export" else ()
    return list(dict.fromkeys([*(w[-1] for w in found if w[0] == first and len(w) > 1), *tables]))


def _copy(rest: list[str]) -> tuple[str, list[str]]:
    """`copy ADDRESS [DIR]` fetches a run, `copy [RUN] ADDRESS` puts one."""
    named = [word for word in rest if not word.startswith("-")]
    if len(named) < 2 or "://" not in named[0]:
        return "put", rest
    place = rest.index(named[1])
    return "fetch", [*rest[:place], *([] if "-o" in rest[:place] else ["-o"]), *rest[place:]]


def _export(rest: list[str]) -> tuple[str, list[str]]:
    """`export --to FORM`: a command of its own for most forms, a table for the others."""
    for place, word in enumerate(rest):
        switch, equals, form = word.partition("=")
        if switch != "--to":
            continue
        count = 1 if equals else 2
        form = form if equals else "".join(rest[place + 1 : place + 2])
        others = rest[:place] + rest[place + count :]
        name = _BY_WORDS.get(f"export --to {form}")
        return (name, others) if name else ("export", ["--to", form, *others])
    return "export", rest


def nearest(word: str, names: Iterable[str], *, alike: float = 0.6) -> str | None:
    """The name that a mistyped word most likely means; None where none is so much alike."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(names), n=1, cutoff=alike)), None)


# The working directory is the user's: a calendar.py there must not be taken for Python's.
_PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    f"sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    "from haiprof.__main__ import run; run()"
)


def own_command(*words: str) -> list[str]:
    """Another command of this haiprof, in a process of its own."""
    return [sys.executable, "-c", _PROGRAM, *words]


def installed_haiprof() -> tuple[str, ...]:
    """The command haiprof of this interpreter, as other nodes can start it."""
    command = Path(sys.executable).parent / "haiprof"
    return (str(command),) if command.exists() else (sys.executable, "-m", "haiprof")
