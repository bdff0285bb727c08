"""`haiprof snapshot`: what every rank of a running job does now, and who holds the others up."""

from __future__ import annotations

from typing import Annotated

from haiprof.base.messages import print_message
from haiprof.cli.arguments import AsJson, JobName, LogDirs, the_job
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output

Hang = Annotated[bool, Opt("--hang", "The job hangs: also compare the ranks' last collectives.")]


def snapshot(
    job: JobName = None, hang: Hang = False, log_dir: LogDirs = None, as_json: AsJson = False
) -> None:
    """Show what every rank of a running job does now: for a job that hangs, who holds it up.

    Each rank answers with the stacks of its threads and how far its collectives have come; one
    that does not answer is looked at from outside. A healthy job is not slowed. The result is also
    kept in the run directory.

    For example:

      haiprof snapshot                    the only job that runs here
      haiprof snapshot train.py --hang    a job that is known to hang
      haiprof snapshot 4711 --json | jq '.suspects[0]'
    """
    from haiprof.live.snapshot import take_snapshot
    from haiprof.show.views.requests import snapshot_view

    output = Output(json=as_json)
    found = take_snapshot(the_job(job, log_dir).run, hang=hang, progress=print_message)
    output.show(lambda _: snapshot_view(found), found.as_json())
    output.hint(f"kept in {found.path}")
