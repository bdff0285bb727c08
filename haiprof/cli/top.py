"""`haiprof ls --live`: running jobs, live in the terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

from rich.live import Live

from haiprof.cli.arguments import AsJson, JobName, LogDirs, log_dirs
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output, json_line, stdout_console, terminal_width

if TYPE_CHECKING:
    from rich.console import Console

    from haiprof.live.follow import Watch
    from haiprof.show.views.jobs import Selection

REFRESH_S = 1.0
Once = Annotated[
    bool, Opt("--once", "Print one frame and end, as where the output is no terminal.")
]
Follow = Annotated[bool, Opt("--follow", "With --json: one line each second until the job ends.")]


def top(
    job: JobName = None,
    once: Once = False,
    follow: Follow = False,
    log_dir: LogDirs = None,
    as_json: AsJson = False,
) -> None:
    """Watch running jobs: steps, their time and split, CPU and GPU, each rank, the verdict so far.

    Looks at the processes of this node, and below the log directory for jobs of other nodes. Keys:
    up and down choose a job or a rank, enter looks at it, q goes back and leaves.

    For example:

      haiprof ls --live                      all jobs of this node
      haiprof ls --live --once               them once, with their process ids
      haiprof ls --live train.py             one of them, its ranks
      haiprof ls --live train.py --json --follow | jq .step_ns
    """
    from haiprof.cli.own_command import own_command
    from haiprof.cli.ps import ps
    from haiprof.live.find import find_job
    from haiprof.live.follow import Watch
    from haiprof.show.views.jobs import JOBS, RANKS, Selection

    is_live = not (as_json or once) and sys.stdout.isatty()
    if job is None and not (is_live or as_json):
        ps(log_dir=log_dir)
        return
    found = None if job is None else find_job(job, log_dirs(log_dir))
    wants_verdicts = is_live or follow
    watch = Watch(log_dirs(log_dir), found, subcommand=own_command if wants_verdicts else None)
    selection = Selection(level=JOBS if found is None else RANKS, alone=found is not None)
    try:
        if as_json and follow:
            _lines(watch)
        elif is_live:
            _live(watch, selection, stdout_console())
        else:
            _once(watch, selection, as_json)
    finally:
        watch.stop()


def _once(watch: Watch, selection: Selection, as_json: bool) -> None:
    """One frame."""
    from haiprof.show.terminal import shows_colors
    from haiprof.show.views.jobs import top_view

    jobs = watch.look()
    data = {"jobs": [job.as_json() for job in jobs]}
    Output(json=as_json).show(
        lambda _: top_view(jobs, selection, height=None, colored=shows_colors(stdout_console())),
        data,
    )


def _lines(watch: Watch) -> None:
    """One line of JSON per second, as long as a job runs."""
    while True:
        jobs = watch.look()
        data = {"wall_ns": time.time_ns(), "jobs": [job.as_json() for job in jobs]}
        sys.stdout.write(json_line(data) + "\n")
        sys.stdout.flush()
        if not any(job.running for job in jobs):
            return
        time.sleep(REFRESH_S)


def _live(watch: Watch, selection: Selection, console: Console) -> None:
    """Draws frames until a key leaves or the jobs have ended."""
    from haiprof.cli.keys import keys
    from haiprof.show.terminal import shows_colors
    from haiprof.show.views.jobs import move, top_view

    colored = shows_colors(console)
    jobs = watch.look()
    with (
        keys() as pressed,
        Live(console=console, screen=True, auto_refresh=False, transient=True) as screen,
    ):
        looked = time.monotonic()
        while True:
            console.width = terminal_width()  # it may be resized
            frame = top_view(
                jobs, selection, height=console.height, width=console.width, colored=colored
            )
            screen.update(frame, refresh=True)
            where: Selection | None = selection
            key = pressed.wait(max(looked + REFRESH_S - time.monotonic(), 0.0))
            while (
                key is not None and where is not None
            ):  # all that was pressed since the last frame
                where = move(where, key, jobs)
                key = pressed.wait(0.0)
            if where is None:
                break
            selection = where
            if time.monotonic() >= looked + REFRESH_S:
                looked = time.monotonic()
                jobs = watch.look()
                if not any(job.running for job in jobs):
                    break
    console.print(top_view(jobs, selection, height=None, width=console.width, colored=colored))
