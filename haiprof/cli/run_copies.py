"""`haiprof copy`: runs from here to an address such as s3://bucket/runs, and back."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from haiprof.base.errors import HaiprofError, UsageError, convert_os_errors
from haiprof.base.log_addresses import is_address
from haiprof.base.options import ENV_LOG_DIR
from haiprof.cli.command_line import ExitStatus, argument, option
from haiprof.cli.names import own_command
from haiprof.cli.output import Output
from haiprof.cli.shared import OUTPUT, default_options, existing_log_dir
from haiprof.launch.run_directories import RunCopies
from haiprof.run_format.layout import RunPaths


def put(
    run: str | None = argument(
        "RUN",
        "A run directory, or a log directory whose newest run is taken. Left out: the log "
        "directory that a job started here would write to.",
    ),
    address: str | None = argument(
        "ADDRESS",
        "Where runs go, such as s3://bucket/runs. Left out: the one that a job started here "
        "would use.",
    ),
    only_node: bool = option("--only-node", "Only what processes of this node wrote."),
    quiet: bool = option("--quiet", "Print only what went wrong."),
    silent: bool = option(
        "--silent", "Print nothing at all; the exit status says whether it worked."
    ),
    output: Output = OUTPUT,
) -> None:
    """Put a run at an address: object storage, or any other file system that fsspec knows.

    Only files that are not there yet or have changed are sent. Jobs with --log-dir s3://... do the
    same by themselves, every five minutes and at the end.

    `haiprof copy ADDRESS DIR` fetches a run from there into a folder.

    For example:

      haiprof copy haiprof-logs/train-20261123-101500-1f s3://bucket/runs
      haiprof copy s3://bucket/runs                  the newest run
    """
    from haiprof.base.units import bytes_text
    from haiprof.run_analysis.remote_runs import put_run
    from haiprof.run_format.manifest import newest_run
    from haiprof.run_format.secrets import mask_text
    from haiprof.show.text import count_text

    if run is not None and address is None and is_address(run):
        run, address = None, run
    found = RunPaths(newest_run(existing_log_dir() if run is None else Path(run)))
    address = address or default_options().address
    if not is_address(address):
        raise UsageError(
            f"copy: {address!r} is no address" if address else "copy: no address",
            hint=f"haiprof copy {shlex.quote(str(found.root))} s3://BUCKET/FOLDER",
        )
    before = signal.signal(signal.SIGTERM, _end)
    try:
        result = put_run(found, address, host=socket.gethostname(), only_node=only_node)
    except HaiprofError as error:
        if silent:
            raise ExitStatus(error.exit_code) from None
        again = f"haiprof copy {shlex.quote(str(found.root))} {shlex.quote(mask_text(address))}"
        hint = f"{error.hint}; " if error.hint else ""
        raise type(error)(f"{error}; the run is in {found.root}", hint=hint + again) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    shown = mask_text(result.target)
    output = Output(json=output.json, quiet=quiet or silent)
    data = {"address": shown, "files": result.file_count, "bytes": result.size_bytes}
    if output.json:
        output.show(lambda _: "", data)
    files = count_text(result.file_count, "file")
    output.hint(f"put {files} ({bytes_text(result.size_bytes)}) at {shown}")
    output.hint(f"next: haiprof verdict {shlex.quote(shown)}")


def _end(number: int, _: object) -> None:
    """Ends as by Ctrl-C, so that what was put so far is noted, and not put again."""
    raise SystemExit(128 + number)


def fetch(
    address: str = argument(
        "ADDRESS", "Of a run, or of a log directory, whose newest run is taken."
    ),
    output: Path | None = option(
        "-o --output DIR", "The log directory that it is put into. Left out: the default one."
    ),
    shown: Output = OUTPUT,
) -> None:
    """Fetch a run that was put at an address, to read it more than once or without network.

    Every command that reads runs also takes an address itself, and fetches the run for its time.

    For example:

      haiprof copy s3://bucket/runs/train-20261123-101500-1f .
      haiprof copy s3://bucket/runs runs        the newest run there
    """
    from haiprof.base.safe_files import make_named_folder
    from haiprof.run_analysis.remote_runs import fetch_run

    if not is_address(address):
        raise UsageError(
            f"copy: {address!r} is no address", hint="haiprof copy s3://BUCKET/RUN DIR"
        )
    folder = output if output is not None else default_options().log_dir
    with convert_os_errors(UsageError, str(folder)):
        make_named_folder(folder)
    run = fetch_run(address, folder)
    if shown.json:
        shown.show(lambda _: "", {"path": run})
    shown.hint(f"fetched into {run}")
    shown.hint(f"next: haiprof verdict {shlex.quote(str(run))}")


_PAUSE_S = 0.1
_NICE = 10


def copies_at(address: str) -> Callable[[RunPaths], RunCopies]:
    """Of a run, its copies at an address: the same ones whenever they are asked for.

    The address, of a log directory, may hold a password: no command line has it.
    """

    @cache
    def copies(run: RunPaths) -> RunCopies:
        def start(words: Sequence[str], background: bool) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                own_command("put", str(run.root), *words),
                env={**os.environ, ENV_LOG_DIR: address},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # what it says goes to stderr
            )
            if background:
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            return process

        return RunCopies(run, address, start)

    return copies


def pause() -> bool:
    """Waits a moment; whether the user ended the waiting with Ctrl-C meanwhile."""
    try:
        time.sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return True
    return False
