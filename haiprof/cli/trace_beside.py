"""`haiprof trace-now` where the job is traced through Kineto's side, or by a dynolog daemon."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.cli.job_arguments import log_dirs, the_job
from haiprof.cli.output import Output, say
from haiprof.errors import HaiprofError, UsageError

if TYPE_CHECKING:
    from haiprof.jobs.kineto.choose import KinetoJob

DEFAULT_FOLDER = Path("haiprof-traces")


def find_beside(job: str | None, named: list[Path] | None, *, backend: str) -> KinetoJob | None:
    """The job, where it is traced that way; null where haiprof's hook traces it."""
    from haiprof.jobs.kineto.choose import kineto_job

    name = job if job is not None else str(the_job(None, named).run.root)
    return kineto_job(name, log_dirs(named), backend=backend, progress=_tell)


def trace_beside(
    job: KinetoJob, options: Mapping[str, Any], *, ranks: tuple[int, ...] | None,
    timeout_s: float | None, endpoint: str | None, folder: Path | None, output: Output,
) -> None:  # fmt: skip
    """Traces it and shows what came of it.

    Raises:
        HaiprofError: No process was traced.
    """
    from haiprof.jobs.kineto.dynolog import parse_endpoint
    from haiprof.jobs.kineto.trace import Wanted, trace_processes
    from haiprof.report.kineto_view import kineto_view

    if options["execution_trace"]:
        raise UsageError("--execution-trace needs --backend hook: Kineto's side writes none")
    wanted = Wanted(
        steps=options["count"], time_s=options["time_s"], options=options, timeout_s=timeout_s,
        endpoint=None if endpoint is None else parse_endpoint(endpoint),
    )  # fmt: skip
    if job.elsewhere:
        _tell(f"only ranks on this node are asked; run it also on {', '.join(job.elsewhere)}")
    found = trace_processes(
        [each for each in job.processes if ranks is None or each.rank in ranks],
        wanted,
        run=job.run,
        output=folder or (DEFAULT_FOLDER if job.run is None else None),
        progress=_tell,
    )
    output.show(lambda _: kineto_view(found), found.as_json())
    if not found.done:
        raise HaiprofError("no process was traced")
    where = found.folder if folder or job.run is None else job.run.root
    output.hint(f"next: haiprof trace-report {where}")


def _tell(text: str) -> None:
    say(text, sys.stderr)
