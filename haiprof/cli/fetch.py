"""`haiprof copy`: a run from an address such as s3://bucket/runs into a folder of this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import is_address
from haiprof.cli.arguments import AsJson
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import default_options

Address = Annotated[
    str, Arg("ADDRESS", "Of a run, or of a log directory, whose newest run is taken.")
]
Folder = Annotated[
    Path | None,
    Opt("-o --output DIR", "The log directory that it is put into. Left out: the default one."),
]


def fetch(address: Address, output: Folder = None, as_json: AsJson = False) -> None:
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
            f"fetch: {address!r} is no address", hint="haiprof copy s3://BUCKET/RUN DIR"
        )
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
