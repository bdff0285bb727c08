"""haiprof's commands by name: how they are spelled, what they show and where; as processes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from haiprof.base.version import PACKAGE


class Command(NamedTuple):
    """One command."""

    words: str
    """How it is spelled: `verdict`, `trace critical-path`, `export --to chakra`."""
    usage: str
    """What it takes, in short."""
    text: str
    """What it shows, in one line."""
    function: str
    """Its module and function in this package."""


COMMANDS = {
    "verdict": Command("verdict", "[RUN|JOB|TRACES]", "the cause, its evidence, what to change",
                       "verdict:verdict"),
    "overview": Command("verdict overview", "[DIR]", "all ranks: steps, time split, counters",
                        "runs:overview"),
    "rank": Command("verdict rank", "[DIR] [RANK]", "one rank over time, its slowest steps",
                    "runs:rank"),
    "lines": Command("verdict lines", "[DIR]", "which lines of your code take the time",
                     "runs:lines"),
    "compare": Command("compare", "BEFORE AFTER", "two runs or traces: slower or not, and by what",
                       "compare:compare"),
    "trace-diff": Command("compare --traces", "BEFORE AFTER", "the traces of two runs, by kernel "
                          "and operator", "compare:trace_diff"),
    "goodput": Command("goodput", "[JOB|RUN...]", "where a job's wall time went, over restarts and "
                       "runs", "runs:goodput"),
    "report": Command("report", "[DIR|TRACES]", "all of it as one HTML page; --serve: in a browser",
                      "pages:report"),
    "view": Command("report --serve", "[DIR]", "the page on this machine, also while the job runs",
                    "pages:view"),
    "list": Command("ls", "[DIR]", "the recorded runs; --live: the jobs that run now",
                    "runs:list_runs"),
    "top": Command("ls --live", "[JOB]", "the jobs that run now; --once: one look",
                   "running_jobs:top"),
    "snapshot": Command("snapshot", "[JOB]", "what every rank does now, and which one blocks",
                        "job_requests:snapshot"),
    "attach": Command("attach", "[JOB]", "record a running job for a while", "job_requests:attach"),
    "trace-now": Command("trace now", "[JOB]", "trace some steps of a running job, on every rank",
                         "job_requests:trace_now"),
    "trace-report": Command("trace report", "[TRACES]", "GPU time, steps, kernels, launches, "
                            "collectives", "traces:trace_report"),
    "trace-table": Command("trace tables", "TABLE [TRACES]", "one table whole, with HTA's cut-offs",
                           "traces:trace_table"),
    "functions": Command("trace functions", "[TRACES]", "time by function, and which rank differs",
                         "traces:functions"),
    "modules": Command("trace modules", "[TRACES]", "time by layer, forward and backward",
                       "traces:modules"),
    "efficiency": Command("trace efficiency", "[TRACES]", "MFU, and operators against the roofline",
                          "trace_causes:efficiency"),
    "critical-path": Command("trace critical-path", "[TRACES]", "what a step's time consists of",
                             "trace_causes:critical_path"),
    "what-if": Command("trace what-if", "[TRACES]", "how much shorter steps become if something is "
                       "faster", "trace_causes:what_if"),
    "memory-timeline": Command("trace memory", "[TRACES]", "memory over time, and its peak by "
                               "operator", "trace_causes:memory_timeline"),
    "flight-recorder": Command("trace flight-recorder", "DUMPS...", "dumps of the Flight Recorder: "
                               "which collective does not match, and on which ranks",
                               "trace_causes:flight_recorder"),
    "trace-check": Command("trace check", "[TRACES]", "recording errors in traces",
                           "trace_causes:trace_check"),
    "query": Command("trace query", "[TRACES|RUN] SQL", "SQL over the tables of traces or a run",
                     "traces:query"),
    "kineto-agent": Command("trace kineto-agent", "", "lets jobs with KINETO_USE_DAEMON be traced",
                            "job_requests:kineto_agent"),
    "dyno": Command("trace dyno", "COMMAND", "dynolog's own command line, also without its daemon",
                    "dyno:dyno"),
    "export": Command("export", "[DIR] --to FORMAT", "to other tools: see haiprof export --help",
                      "export:export"),
    "tensorboard": Command("export --to tensorboard", "[RUN|TRACES]", "serves TensorBoard: "
                           "scalars and traces", "pages:tensorboard"),
    "perfetto": Command("export --to perfetto", "[TRACE|RUN]", "serves Perfetto's UI on "
                        "this machine", "pages:perfetto"),
    "merge": Command("export --to merged", "[RUN|TRACES]", "one trace with all ranks",
                     "export:merge"),
    "link": Command("export --to linked", "[RUN|TRACES]", "execution traces joined with timelines",
                    "export:link"),
    "chakra": Command("export --to chakra", "[RUN|LINKED]", "Chakra traces, or a picture of the "
                      "graph", "export:chakra"),
    "scalars": Command("export --to scalars", "[DIR]", "scalars for TensorBoard, also live",
                       "export:scalars"),
    "wandb": Command("export --to wandb", "[RUN]", "verdict, ledger and page to Weights & Biases",
                     "export:wandb"),
    "mlflow": Command("export --to mlflow", "[RUN]", "verdict, ledger and page to MLflow",
                      "export:mlflow"),
    "otlp": Command("export --to otlp", "[RUN]", "counters and step times to an OpenTelemetry "
                    "collector", "export:otlp"),
    "put": Command("copy", "RUN ADDRESS", "a run to object storage, or from there to a folder",
                   "run_copies:put"),
    "fetch": Command("copy", "ADDRESS [DIR]", "a run from object storage into a folder",
                     "run_copies:fetch"),
    "submit": Command("submit", "SCRIPT", "start a job here in the background, or on a cluster",
                      "submit:submit"),
    "try-loader": Command("try-loader", "COMMAND", "steps per second with other DataLoaders, tried "
                          "in short runs", "prepare:try_loader"),
    "preflight": Command("preflight", "[COMMAND]", "before a job: slow ranks, nodes and links",
                         "prepare:preflight"),
    "node": Command("node", "[DIR]", "records this node for months without a job; --show",
                    "prepare:node"),
    "doctor": Command("doctor", "", "what can be measured on this node, and what prevents the rest",
                      "prepare:doctor"),
    "mcp": Command("mcp", "", "runs and traces as tools for agents, read-only, over stdio",
                   "mcp:mcp"),
    "skill": Command("skill", "[DIR]", "writes SKILL.md: how an agent works with haiprof",
                     "skill:skill"),
    "ps": Command("ls --running", "", "", "running_jobs:ps"),
    "diagnose": Command("verdict", "", "", "verdict:verdict"),
}  # fmt: skip
"""By the name of the last release, which still works; code uses these names, too."""

TABLES = ("csv", "parquet", "prometheus", "otlp-json")
"""What `export --to` writes itself."""
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

OTHER_NAMES = ("diagnose", "ps")
"""Of a command that is in a group."""
_BY_WORDS = {command.words: name for name, command in reversed(COMMANDS.items())}
GROUP_NAMES = ("trace",)
"""First words that are no command by themselves."""
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
