"""`haiprof copy`: a run from a folder of this machine to an address such as s3://bucket/runs."""

from __future__ import annotations

import shlex
import signal
import socket
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.log_addresses import is_address
from haiprof.cli.arguments import AsJson
from haiprof.cli.command_line import Arg, ExitStatus, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import default_options, existing_log_dir

Run = Annotated[
    str | None,
    Arg(
        "RUN",
        "A run directory, or a log directory whose newest run is taken. Left out: the log "
        "directory that a job started here would write to.",
    ),
]
Address = Annotated[
    str | None,
    Arg(
        "ADDRESS",
        "Where runs go, such as s3://bucket/runs. Left out: the one that a job started here "
        "would use.",
    ),
]
OnlyNode = Annotated[bool, Opt("--only-node", "Only what processes of this node wrote.")]
Quiet = Annotated[bool, Opt("--quiet", "Print only what went wrong.")]
Silent = Annotated[
    bool, Opt("--silent", "Print nothing at all; the exit status says whether it worked.")
]


def put(
    run: Run = None, address: Address = None, only_node: OnlyNode = False, quiet: Quiet = False,
    silent: Silent = False, as_json: AsJson = False,
) -> None:  # fmt: skip
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
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run
    from haiprof.run_format.secrets import mask_text

    if run is not None and address is None and is_address(run):
        run, address = None, run
    found = RunPaths(newest_run(existing_log_dir() if run is None else Path(run)))
    address = address or default_options().address
    if not is_address(address):
        raise UsageError(
            f"put: {address!r} is no address" if address else "put: no address",
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
    output = Output(json=as_json, quiet=quiet or silent)
    data = {"address": shown, "files": result.file_count, "bytes": result.size_bytes}
    if as_json:
        output.show(lambda _: "", data)
    output.hint(f"put {result.file_count} files ({bytes_text(result.size_bytes)}) at {shown}")
    output.hint(f"next: haiprof verdict {shlex.quote(shown)}")


def _end(number: int, _: object) -> None:
    """Ends as by Ctrl-C, so that what was put so far is noted, and not put again."""
    raise SystemExit(128 + number)
