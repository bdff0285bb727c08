"""`haiprof fetch`: a run from an address such as s3://bucket/runs into a folder of this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import is_address
from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output
from haiprof.cli.target import default_options

Address = Annotated[
    str,
    typer.Argument(
        metavar="ADDRESS",
        help="Of a run, or of a log directory, whose newest run is taken.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="The log directory that it is put into. Left out: the default one.",
        show_default=False,
    ),
]


def fetch(address: Address, output: Folder = None, as_json: AsJson = False) -> None:
    """Fetch a run that was put at an address, to read it more than once or without network.

    Every command that reads runs also takes an address itself, and fetches the run for its time.

    For example:

      haiprof fetch s3://bucket/runs/train-20261123-101500-1f

      haiprof fetch s3://bucket/runs -o runs        the newest run there
    """
    from haiprof.base.safe_files import make_named_folder
    from haiprof.run_analysis.remote_runs import fetch_run

    if not is_address(address):
        raise UsageError(f"fetch: {address!r} is no address", hint="haiprof fetch s3://BUCKET/RUN")
    folder = output if output is not None else default_options().log_dir
    try:
        make_named_folder(folder)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from None
    run = fetch_run(address, folder)
    shown = Output(json=as_json)
    if as_json:
        shown.show(lambda _: "", {"path": run})
    shown.hint(f"fetched into {run}")
    shown.hint(f"next: haiprof verdict {shlex.quote(str(run))}")
