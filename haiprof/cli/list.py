"""`haiprof ls`: the runs in a log directory, newest last."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.cli.arguments import AsJson
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import existing_log_dir

LogDir = Annotated[
    Path | None,
    Arg("DIR", "A log directory. Left out: the one that a job started here would write to."),
]


All = Annotated[
    bool,
    Opt(
        "--all",
        "Count the steps of every run, however many there are. Left out: of as many of the "
        "newest as half a second allows; what was counted once is kept in the run.",
    ),
]
LIMIT_S = 0.5


def list_runs(directory: LogDir = None, everything: All = False, as_json: AsJson = False) -> None:
    """List the runs in a log directory, newest last: start, ranks, steps, state, exit status.

    `haiprof ls --live` watches the jobs that run now, and has a --help of its own.

    For example:

      haiprof ls                      runs below the default log directory
      haiprof ls /shared/haiprof      runs below that one
      haiprof ls --json | jq -r '.runs[-1].path'
    """
    from haiprof.show.run_list import list_view, run_list

    log_dir = directory if directory is not None else existing_log_dir()
    runs = run_list(log_dir, limit_s=None if everything else LIMIT_S)
    output = Output(json=as_json)
    output.show(lambda _: list_view(log_dir, runs), {"log_dir": log_dir, "runs": runs})
    if runs:
        output.hint(f"next: haiprof verdict {runs[-1].path}")
