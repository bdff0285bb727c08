"""Arguments that several commands share: on runs, on running jobs, and on traces."""

from __future__ import annotations

import threading
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.base.errors import RunNotFoundError, UsageError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_PEAK
from haiprof.cli.command_line import argument, option
from haiprof.cli.target import default_log_dir, default_options, existing_log_dir, trace_target

if TYPE_CHECKING:
    from haiprof.linux.processes import Process
    from haiprof.live.find import RunningJob
    from haiprof.trace_analysis.pool import Pool

RUN_DIR = argument(
    "DIR",
    "A run directory, or a log directory whose newest run is taken. Left out: the log "
    "directory that a job started here would write to.",
)
AS_JSON = option("--json", "Print the data as JSON, and nothing else.")


class Form(str, Enum):
    """What `--format` takes."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"


OUTPUT_FORM = option(
    "--format FORM", "text, markdown (for a pull request or a job summary), or json.", Form.TEXT
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
    "slurm:NUMBER, or its run directory. Left out: the only one that runs.",
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
    jobs = running_jobs(log_dirs(named))
    if not jobs:
        raise RunNotFoundError(
            "no job runs under haiprof here",
            hint="start one: haiprof train.py; or name a run directory",
        )
    if len(jobs) > 1:
        raise UsageError(f"several jobs run: {job_names(jobs)}", hint="name one of them")
    print_message(f"{job_names(jobs)}: the only running job found here; others are chosen by name, "
                  "process id or run directory, and listed by haiprof ls --live")  # fmt: skip
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
    env=ENV_PEAK,
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
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--ranks {text}: expected numbers and ranges", hint="--ranks 0,3-5")
        low, high = int(first), int(last) if dash else int(first)
        if low > high or high >= _RANK_LIMIT:
            raise UsageError(f"--ranks {text}: no rank in {part.strip()}", hint="--ranks 0,3-5")
        found |= set(range(low, high + 1))
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
    from haiprof.trace_analysis.pool import cluster_pool

    return cluster_pool(address) if address is not None else None


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
