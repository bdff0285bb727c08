"""`haiprof trace-now` where the job is traced through Kineto's side, or by a dynolog daemon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.messages import print_message
from haiprof.cli.job_arguments import log_dirs, the_job
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.live.kineto_processes import KinetoJob

DEFAULT_FOLDER = Path("haiprof-traces")


def find_kineto_job(job: str | None, named: list[Path] | None, *, backend: str) -> KinetoJob | None:
    """The job, where it is traced through Kineto's side; None where haiprof's hook traces it."""
    from haiprof.live.kineto_processes import kineto_job

    name = job if job is not None else str(the_job(None, named).run.root)
    return kineto_job(name, log_dirs(named), backend=backend, progress=print_message)


def trace_through_kineto(
    job: KinetoJob, options: Mapping[str, Any], *, ranks: tuple[int, ...] | None,
    timeout_s: float | None, endpoint: str | None, folder: Path | None, output: Output,
) -> None:  # fmt: skip
    """Traces the job and shows the result.

    Raises:
        HaiprofError: No process was traced.
    """
    from haiprof.live.kineto_processes import parse_endpoint
    from haiprof.live.kineto_trace import TraceRequest, trace_processes
    from haiprof.show.views.requests import kineto_view

    if options["execution_trace"]:
        raise UsageError("--execution-trace needs --backend hook: Kineto's side writes none")
    request = TraceRequest(
        steps=options["count"], time_s=options["time_s"], options=options, timeout_s=timeout_s,
        endpoint=None if endpoint is None else parse_endpoint(endpoint),
    )  # fmt: skip
    if job.elsewhere:
        print_message(
            f"only ranks on this node are asked; run it also on {', '.join(job.elsewhere)}"
        )
    found = trace_processes(
        [each for each in job.processes if ranks is None or each.rank in ranks],
        request,
        run=job.run,
        output=folder or (DEFAULT_FOLDER if job.run is None else None),
        progress=print_message,
    )
    output.show(lambda _: kineto_view(found), found.as_json())
    if not found.done:
        raise HaiprofError("no process was traced")
    where = found.folder if folder or job.run is None else job.run.root
    output.hint(f"next: haiprof trace-report {where}")
