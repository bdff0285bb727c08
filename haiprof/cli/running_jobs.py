"""`haiprof ls --live`: the jobs that run now, once or live in the terminal."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live

from haiprof.base.errors import HaiprofError
from haiprof.cli.command_line import option
from haiprof.cli.output import Output, json_text, stdout_console, terminal_width
from haiprof.cli.shared import JOB_NAME, LOG_DIRS, OUTPUT, log_dirs, sees_others
from haiprof.run_format.layout import RunPaths
from haiprof.show.views.jobs import BACK, DOWN, ENTER, QUIT, UP

if TYPE_CHECKING:
    from rich.console import Console

    from haiprof.live.find import RunningJob
    from haiprof.live.follow import Watch
    from haiprof.show.views.jobs import Selection


_LAST_S = 120.0
_NO_JOB = "no job runs under haiprof here\nstart one: haiprof train.py"


def ps(
    log_dir: list[Path] | None = LOG_DIRS,
    verdict: bool = option(
        "--verdict", "Also the verdict on the last two minutes, in one line each."
    ),
    output: Output = OUTPUT,
) -> None:
    """List the jobs that run under haiprof now: their progress and their speed.

    Looks at the processes of this node, and below the log directory for jobs of other nodes.

    For example:

      haiprof ls --live --once                        this node, and ./haiprof-logs
      haiprof ls --live --once --log-dir /shared/logs also the jobs that write there
    """
    from haiprof.live.find import running_jobs

    running = running_jobs(log_dirs(log_dir), others=sees_others())
    if not running:  # no need to load what reads jobs
        output.show(lambda _: _NO_JOB, {"jobs": []})
        return
    from haiprof.live.follow import job_progress
    from haiprof.show.terminal import shows_colors
    from haiprof.show.views.jobs import jobs_view

    jobs = [job_progress(job, verdict=_verdict(job) if verdict else None) for job in running]
    data = {"jobs": [job.as_row() for job in jobs]}
    output.show(lambda _: jobs_view(jobs, colored=shows_colors(stdout_console())), data)


def _verdict(job: RunningJob) -> str | None:
    """Of the last two minutes; None where nothing can be read yet."""
    from haiprof.diagnosis.engine import diagnose
    from haiprof.run_analysis.run_frames import RunFrames

    try:
        found = diagnose(RunFrames(job.run.root).last(_LAST_S), trace_limit_bytes=0)
        return found.headline if found.step_count else None
    except HaiprofError:
        return None


_KEYS = {
    b"\x1b[A": UP, b"\x1bOA": UP, b"k": UP, b"\x1b[B": DOWN, b"\x1bOB": DOWN, b"j": DOWN,
    b"\r": ENTER, b"\n": ENTER, b"l": ENTER, b"\x1b[C": ENTER, b"\x1bOC": ENTER,
    b"q": BACK, b"h": BACK, b"\x1b": BACK, b"\x1b[D": BACK, b"\x1bOD": BACK, b"\x7f": BACK,
    b"Q": QUIT, b"\x04": QUIT,
}  # fmt: skip
_LONGEST_BYTES = 64
_ESCAPE = b"\x1b"
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.)", re.DOTALL)
"""What a key of several bytes sends (ECMA-48: CSI; SS3)."""
_SEQUENCE_S = 0.05  # Bytes of one key come closer together than this, also through ssh


class Keys:
    """Reads keys without an echo; none where stdin is no terminal.

    Keys that were pressed while a frame was drawn are kept, and answered one by one.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._pressed = b""

    def wait(self, seconds: float) -> str | None:
        """The next known key, or None after a timeout."""
        if self._fd is None:
            select.select([], [], [], seconds)
            return None
        if not self._pressed and not self._read(self._fd, seconds):
            return None
        while self._pressed == _ESCAPE or self._pressed in (b"\x1b[", b"\x1bO"):
            if not self._read(self._fd, _SEQUENCE_S):
                break  # the key Escape itself
        if not self._pressed:
            return QUIT  # the terminal is gone
        return _KEYS.get(self._take())

    def _read(self, fd: int, seconds: float) -> bool:
        """Whether there was something within that time; the end of the terminal is, too."""
        ready, _, _ = select.select([fd], [], [], seconds)
        if not ready:
            return False
        found = os.read(fd, _LONGEST_BYTES)
        self._pressed += found
        return bool(found) or not self._pressed

    def _take(self) -> bytes:
        """The first key that was pressed; an unknown sequence is one key, and not Escape."""
        match = _SEQUENCE.match(self._pressed)
        length = match.end() if match else 1
        taken, self._pressed = self._pressed[:length], self._pressed[length:]
        return taken


@contextmanager
def keys() -> Iterator[Keys]:
    """Reads the terminal's keys; restores its mode in any case."""
    import termios
    import tty

    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (OSError, ValueError, AttributeError, termios.error):
        yield Keys(None)
        return
    tty.setcbreak(fd)
    try:
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


REFRESH_S = 1.0


def top(
    job: str | None = JOB_NAME,
    once: bool = option("--once", "Print one frame and end, as where the output is no terminal."),
    follow: bool = option("--follow", "With --json: one line each second until the job ends."),
    log_dir: list[Path] | None = LOG_DIRS,
    output: Output = OUTPUT,
) -> None:
    """Watch running jobs: steps, their time and split, CPU and GPU, each rank, the verdict so far.

    Looks at the processes of this node, and below the log directory for jobs of other nodes. Root
    and a configured group see those of all users (docs/fleet.md). Keys: up and down choose a job or
    a rank, enter looks at it, q goes back and leaves.

    For example:

      haiprof ls --live                      all jobs of this node
      haiprof ls --live --once               them once, with their process ids
      haiprof ls --live train.py             one of them, its ranks
      haiprof ls --live train.py --json --follow | jq .step_ns
    """
    from haiprof.cli.names import own_command
    from haiprof.live.find import find_job
    from haiprof.live.follow import Watch
    from haiprof.show.terminal import shows_colors
    from haiprof.show.views.jobs import JOBS, RANKS, Selection, top_view

    if job is not None and Path(job).is_dir() and not RunPaths(Path(job)).manifest.exists():
        log_dir, job = [Path(job)], None  # as `haiprof ls DIR` takes a log directory
    is_live = not (output.json or once) and sys.stdout.isatty()
    if job is None and not (is_live or output.json):
        ps(log_dir=log_dir, verdict=False, output=output)
        return
    others = sees_others()
    found = None
    if job is not None:
        found = find_job(job, log_dirs(log_dir), others=others, reads=True)
    wants_verdicts = is_live or follow
    watch = Watch(
        log_dirs(log_dir), found, subcommand=own_command if wants_verdicts else None, others=others
    )
    selection = Selection(level=JOBS if found is None else RANKS, alone=found is not None)
    try:
        if output.json and follow:
            _lines(watch)
        elif is_live:
            _live(watch, selection, stdout_console())
        else:
            jobs, colored = watch.look(), shows_colors(stdout_console())
            view = top_view(jobs, selection, height=None, colored=colored)
            output.show(lambda _: view, {"jobs": [job.as_json() for job in jobs]})
    finally:
        watch.stop()


def _lines(watch: Watch) -> None:
    """One line of JSON per second, as long as a job runs."""
    while True:
        jobs = watch.look()
        data = {"wall_ns": time.time_ns(), "jobs": [job.as_json() for job in jobs]}
        sys.stdout.write(json_text(data, indent=None) + "\n")
        sys.stdout.flush()
        if not any(job.running for job in jobs):
            return
        time.sleep(REFRESH_S)


def _live(watch: Watch, selection: Selection, console: Console) -> None:
    """Draws frames until a key leaves or the jobs have ended."""
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
            while key is not None and where is not None:  # all pressed since the last frame
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
