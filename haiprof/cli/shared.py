"""Arguments that several commands share, and the runs, running jobs and traces that they name."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from haiprof.base import options
from haiprof.base.errors import RunNotFoundError, UsageError
from haiprof.base.log_addresses import is_address, note_fetched, run_address
from haiprof.base.messages import print_message
from haiprof.cli.command_line import argument, option

if TYPE_CHECKING:
    from haiprof.cli.output import Output
    from haiprof.linux.processes import Process
    from haiprof.live.find import RunningJob
    from haiprof.run_analysis.run_frames import RankPool, RunFrames
    from haiprof.run_format.layout import RunPaths
    from haiprof.trace_analysis.pool import Pool
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

LOG_DIR: ContextVar[Path | None] = ContextVar("LOG_DIR", default=None)
"""The log directory that the command line names, with `--log-dir`."""
ADDRESS: ContextVar[str] = ContextVar("ADDRESS", default="")
"""The address that `--log-dir` of a command on running jobs names: its recordings are put there."""
COMMAND_NAME: ContextVar[str] = ContextVar("COMMAND_NAME", default="")
"""The name under which the command was called: `diagnose` and `verdict` are one function."""


def name_log_dir(path: Path | None) -> Path | None:
    """Takes `--log-dir` for the rest of the command."""
    if path is not None:
        LOG_DIR.set(path)
    return path


def default_log_dir() -> Path:
    """The one named by `--log-dir`; else where a job started here would write."""
    named = LOG_DIR.get()
    return default_options().log_dir if named is None else named


def default_options() -> options.Options:
    """Where a job started here would write: where, and the administrators; no other options."""
    files = options.options_from_files()
    environment = options.options_from_environment(os.environ)
    names = ("log_dir", "local_dir", "admin_group")
    layers = [{k: v for k, v in layer.items() if k in names} for layer in (files, environment)]
    named: dict[str, object] = {"log_dir": ADDRESS.get()} if ADDRESS.get() else {}
    return options.merge_options(*layers, named)


def working_folder() -> Path | None:
    """The folder that the command was called in; None where it is gone."""
    try:
        return Path.cwd()
    except OSError:
        return None


def existing_log_dir() -> Path:
    """The default log directory; RunNotFoundError where there is none."""
    log_dir = default_log_dir()
    if not log_dir.is_dir():
        raise RunNotFoundError(
            f"{log_dir}: no log directory here",
            hint="name a run directory, or record a run: haiprof train.py",
        )
    return log_dir


def open_target(path: Path | None, *, pool: RankPool | None = None) -> RunFrames:
    """The run of a command: of the default log directory where no path is named."""
    from haiprof.run_analysis.run_frames import RunFrames

    if path is not None and path.is_file():
        is_trace = named_traces(path) is not None
        raise RunNotFoundError(
            f"{path}: a file, where a run directory is expected",
            hint=f"of a trace: haiprof verdict {shlex.quote(str(path))}" if is_trace else
            "haiprof ls shows the runs recorded here",
        )  # fmt: skip
    return RunFrames(existing_log_dir() if path is None else whole_path(path), pool=pool)


def whole_path(path: Path) -> Path:
    """The path of a run that is named by its name, or by as much of it as tells it."""
    from haiprof.run_format.layout import MANIFEST_NAME

    if os.path.lexists(path):
        return path
    folders = [path.parent, *([default_log_dir()] if path.name == str(path) else [])]
    begin = f"{glob.escape(path.name)}*/{MANIFEST_NAME}"
    named = [each.parent for folder in folders for each in folder.glob(begin)]
    named = [each for each in named if each.name == path.name] or named
    if len(named) != 1:
        raise RunNotFoundError(
            f"{path}: {f'{len(named)} runs begin so' if named else 'no such run'}",
            hint=f"of one rank: haiprof verdict rank {path}" if str(path).isdecimal() else
            "haiprof ls shows the runs recorded here",
        )  # fmt: skip
    return named[0]


def run_or_traces(path: Path | None) -> tuple[RunPaths | None, Path]:
    """The run of a viewer, and where its traces are; no run if only traces are named."""
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run

    target = path or default_log_dir()
    if path is not None and not path.exists():
        raise RunNotFoundError(f"{path}: no such file or folder")
    if target.is_file():
        return None, target
    try:
        run = RunPaths(newest_run(target))
    except RunNotFoundError:
        if path is None:
            raise
        return None, path
    return run, run.root


def named_traces(target: str | Path | None) -> Path | None:
    """What is named where that is a trace, or a folder of traces and no run; else None."""
    from haiprof.base.errors import TraceFormatError
    from haiprof.trace_format.find import NSIGHT_ENDING, TRACE_ENDINGS, trace_files

    if target is None or not (path := Path(target)).exists():
        return None
    if path.is_file() and not path.name.endswith((*TRACE_ENDINGS, NSIGHT_ENDING)):
        return None
    run, traces = run_or_traces(path)
    try:
        return traces if run is None and trace_files(traces) else None
    except TraceFormatError:  # neither a run nor traces: the error of a run says so
        return None


def trace_target(path: Path) -> Path:
    """What a trace command means by a path: of a log directory, its newest run."""
    from haiprof.run_format.layout import MANIFEST_NAME
    from haiprof.run_format.manifest import run_folders, start_order

    if not path.is_dir() or os.path.lexists(path / MANIFEST_NAME):
        return path
    try:
        runs = run_folders(path)
    except RunNotFoundError:
        return path  # whoever reads it says why it cannot be read
    return max(runs, key=start_order) if runs else path


_ON_JOBS = frozenset({"ps", "top", "attach", "snapshot", "trace-now"})
"""Commands on jobs that run: these are recorded into a folder of this machine first."""
_WRITE_INTO_RUN = frozenset({"report", "merge", "scalars"})
"""Commands that write into the run directory, where no other file is named."""
_TAKE_ADDRESSES = frozenset({"put", "fetch", "submit", "try-loader", "preflight"})
_OF_OTHERS = ("--cluster", "--endpoint")  # Options whose addresses are not of runs


@contextlib.contextmanager
def fetch_addresses(words: Sequence[str]) -> Iterator[list[str]]:
    """The command line with folders in place of addresses, if any, which are removed at the end."""
    found = list(words)
    if _places(words):
        _check(words)
    with contextlib.ExitStack() as folders:
        for place in _places(words):
            if words[0] in _ON_JOBS:
                if words[place - 1] == "--log-dir":
                    ADDRESS.set(words[place])
                found[place] = str(default_options().log_dir)
            else:
                found[place] = str(_fetch(words[place], folders))
        yield found


def _check(words: Sequence[str]) -> None:
    """Refuses what would be lost with the fetched run, or is not about one run."""
    from haiprof.run_format.secrets import mask_text

    address = mask_text(words[_places(words)[0]])
    if words[0] == "list":
        raise UsageError(
            f"list: {address} is an address: only runs in a folder of this machine are listed",
            hint=f"haiprof verdict {address} judges its newest run",
        )
    if words[0] in _WRITE_INTO_RUN and not {"-o", "--output"} & set(words):
        raise UsageError(
            f"{words[0]} writes into the run, and {address} is fetched for this command alone",
            hint=f"-o FILE, or haiprof copy {address} DIR before it",
        )


def _fetch(address: str, folders: contextlib.ExitStack) -> Path:
    from haiprof.base.safe_files import MadeFolder
    from haiprof.run_analysis.remote_runs import fetch_run
    from haiprof.run_format.secrets import mask_text

    folder = folders.enter_context(MadeFolder.temporary("haiprof-fetched-"))
    run, own = fetch_run(address, folder), address.rstrip("/")
    is_log_dir = not own.endswith(f"/{run.name}")  # it names its newest run
    note_fetched(run, mask_text(run_address(own, run.name) if is_log_dir else own))
    print_message(f"fetched {run.name} for this command; to keep it: haiprof copy "
                  f"{mask_text(address)} DIR")  # fmt: skip
    return run


def _places(words: Sequence[str]) -> list[int]:
    if not words or words[0] in _TAKE_ADDRESSES:
        return []
    return [
        place
        for place, (before, word) in enumerate(itertools.pairwise(words), start=1)
        if is_address(word) and " " not in word and before not in _OF_OTHERS
    ]


RUN_DIR = argument(
    "DIR",
    "A run directory, or a log directory whose newest run is taken. Left out: the log "
    "directory that a job started here would write to.",
)


def _output(as_json: bool) -> Output:
    from haiprof.cli.output import Output  # what draws: a kept answer needs none of it

    return Output(json=as_json)


OUTPUT = option("--json", "Print the data as JSON, and nothing else.", callback=_output)
Form = Literal["text", "markdown", "json"]
OUTPUT_FORM = option(
    "--format FORM", "text, markdown (for a pull request or a job summary), or json.", "text"
)
EVERYTHING = option(
    "--all", "Also all numbers, what could not be measured or judged, and what haiprof cost."
)
HTML_FILE = option(
    "--html FILE", "Write this as a part of the report page, into one self-contained HTML file."
)

JOB_NAME = argument(
    "JOB",
    "A running job: its id, its name, its script's name, the id of one of its processes, "
    "slurm:NUMBER, or its run directory. Left out: the only one of this log directory.",
)
LOG_DIRS = option(
    "--log-dir DIR",
    "Also look for jobs below this log directory (jobs of other nodes); may repeat.",
)


def log_dirs(named: list[Path] | None) -> list[Path]:
    """Where to look for jobs beside this node's processes."""
    return [*(named or []), default_log_dir()]


def sees_others() -> bool:
    """Whether this user may look at jobs of others: root, and the group that the options name."""
    from haiprof.base.users import is_administrator

    return is_administrator(default_options().admin_group)


def job_or_processes(
    name: str | None, named: list[Path] | None
) -> tuple[RunningJob | None, list[Process]]:
    """The job of a command, or own processes of that name if none runs under haiprof."""
    from haiprof.live.external_sampling import training_processes

    try:
        return the_job(name, named), []
    except RunNotFoundError:
        if name is None or Path(name).is_dir():
            raise
        return None, training_processes(name)


def the_job(name: str | None, named: list[Path] | None, *, reads: bool = False) -> RunningJob:
    """The job of a command; with `reads` of one that only looks at it."""
    from haiprof.live.find import find_job, job_names, running_jobs

    if name is not None:
        return find_job(name, log_dirs(named), others=sees_others(), reads=reads)
    folders = [path.resolve() for path in named or [default_log_dir()]]
    running = running_jobs(log_dirs(named))
    jobs = [job for job in running if job.run.root.parent.resolve() in folders]
    if not jobs:
        elsewhere = f"; elsewhere: {job_names(running)}" if running else ""
        raise RunNotFoundError(
            f"no job runs under haiprof in {' or '.join(map(str, folders))}{elsewhere}",
            hint="name one of them" if running else
            "start one: haiprof train.py; or name a run directory",
        )  # fmt: skip
    if len(jobs) > 1:
        raise UsageError(f"several jobs run: {job_names(jobs)}", hint="name one of them")
    print_message(f"{job_names(jobs)}: the only running job of {jobs[0].run.root.parent}")
    return jobs[0]


_RANK_LIMIT = 1 << 20

TRACES = argument(
    "[TRACES]",
    "A trace of torch.profiler (.json, .json.gz), a folder with one file per rank, a run "
    "directory with traces, or a log directory, whose newest run is taken. Left out: the "
    "log directory that a job started here would write to.",
    callback=trace_target,
    factory=existing_log_dir,
)
CSV_FOLDER = option("--csv DIR", "Write each table whole as CSV into this folder.")
FORCE = option("--force", "Replace files that already exist.")
STEP_RANGE = option(
    "--steps A:B", "Only what profiler steps A to before B launched; A alone is one step."
)
PEAK_OPTION = option(
    "--peak GPU|NAME=VALUE,...",
    "What the device can do at most: a GPU of the table (MI300X), or TFLOP/s by precision "
    "and TB/s of memory: bf16=989.4,memory=3.35.",
    env=options.ENV_PEAK,
)
FORMULAS_OPTION = option(
    "--formulas FILE",
    "Your own formulas of FLOPs and bytes, a TOML file (docs/traces.md): operators that "
    "haiprof does not know, or counts otherwise.",
)
BASELINE = option(
    "--baseline DIR|last-good|median", "Also compare with this run, as `haiprof compare`."
)
RANK = option("--rank R", "Only this rank.", low=0)
WINDOW = option(
    "--window W",
    "Of a run with several trace windows, this one: 0 is the first. Default: the last.",
)
CLUSTER = option(
    "--cluster ADDRESS",
    "Read the traces, or the ranks of a run, on the workers of a Dask cluster, such as "
    "tcp://HOST:8786, or of Slurm: slurm, slurm:jobs=4,partition=cpu,time=00:30:00,"
    "memory=8GB. Left out: on this machine.",
)
GEOMETRY = option(
    "--geometry",
    "A kernel of the same name with another grid or block is another kernel, where the "
    "traces have them.",
)
_QUIET_S = 2.0
_EVERY_S = 10.0


def parse_ranks(text: str | None) -> frozenset[int] | None:
    """`0,3-5` as ranks; None for all; raises UsageError for anything else."""
    if text is None:
        return None
    found, hint = set[int](), "--ranks 0,3-5"
    for part in map(str.strip, text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--ranks {text}: expected numbers and ranges", hint=hint)
        ranks = range(int(first), int(last if dash else first) + 1)
        if not ranks or ranks[-1] >= _RANK_LIMIT:
            raise UsageError(f"--ranks {text}: no rank in {part}", hint=hint)
        found.update(ranks)
    return frozenset(found)


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """`A:B` as first step and the one after the last; `A` is that step alone; else UsageError."""
    if text is None:
        return None
    first, colon, after = text.partition(":")
    if not first.isdecimal() or (colon and not after.isdecimal()):
        raise UsageError(f"--steps {text}: expected two numbers", hint="--steps 10:13")
    steps = int(first), int(after) if colon else int(first) + 1
    if steps[0] >= steps[1]:
        raise UsageError(f"--steps {text}: no step in it", hint="--steps 10:13 is 10, 11 and 12")
    return steps


def parse_cluster(address: str | None) -> Pool | None:
    """The pool of `--cluster`; None without that option."""
    if address is None:
        return None
    from haiprof.trace_analysis.pool import cluster_pool

    return cluster_pool(address)


@contextlib.contextmanager
def reading(
    traces: Path, output: Output, *, window: int | None = None, pool: Pool | None = None
) -> Iterator[TraceQuestions]:
    """Questions to traces; says on stderr that they are read, where that takes a while."""
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    with ReadProgress(quiet=output.json):
        yield TraceQuestions(traces, window=window, pool=pool)


class ReadProgress:
    """Reports progress on stderr: after 2 s that traces are read, then how many are done."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._timer = threading.Timer(_QUIET_S, self._first)
        self._timer.daemon = True
        self._last_s: float | None = None

    def __enter__(self) -> ReadProgress:
        """Begins to wait."""
        if not self._quiet:
            self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Ends, whatever happened."""
        self._timer.cancel()

    def __call__(self, done: int, count: int) -> None:
        """So many traces are done."""
        now_s = time.monotonic()
        if self._last_s is not None and now_s - self._last_s >= _EVERY_S and done < count:
            self._last_s = now_s
            print_message(f"{done} of {count} traces read")

    def _first(self) -> None:
        self._last_s = time.monotonic()
        print_message("reading traces; a second time it is faster")
