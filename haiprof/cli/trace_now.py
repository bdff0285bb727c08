"""`haiprof trace now`: a trace of a running job, by haiprof's hook or through Kineto's side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.messages import print_message
from haiprof.base.trace_options import DEFAULT_STEPS
from haiprof.cli.arguments import AsJson, JobName, LogDirs, log_dirs, parse_ranks, the_job
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.live.kineto_processes import KinetoJob

DEFAULT_FOLDER = Path("haiprof-traces")


def find_kineto_job(name: str, named: list[Path] | None, *, backend: str) -> KinetoJob | None:
    """The job, where it is traced through Kineto's side; None where haiprof's hook traces it."""
    from haiprof.live.kineto_processes import kineto_job

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
    output.hint(f"next: haiprof trace report {where}")


Steps = Annotated[
    int, Opt("--trace-steps N", "How many steps.", old=("--steps",), low=1, high=10000)
]
Seconds = Annotated[float | None, Opt("--time SECONDS", "Seconds in place of steps.", low=0.1)]
Ranks = Annotated[str | None, Opt("--ranks LIST", "Only these: 0,3-5.")]
Stacks = Annotated[bool, Opt("--trace-stacks", "Python stacks (slower).", old=("--stacks",))]
Shapes = Annotated[bool, Opt("--trace-shapes", "Shapes of operators' inputs.", old=("--shapes",))]
Memory = Annotated[bool, Opt("--trace-memory", "Allocations.", old=("--memory",))]
Flops = Annotated[bool, Opt("--trace-flops", "Floating-point operations.", old=("--flops",))]
Modules = Annotated[bool, Opt("--trace-modules", "Names of modules.", old=("--modules",))]
Sync = Annotated[bool, Opt("--trace-sync", "CUDA synchronisation events.", old=("--sync",))]
ExecutionTrace = Annotated[
    bool, Opt("--execution-trace", "Also the execution trace, for haiprof export --to linked.")
]
Timeout = Annotated[float | None, Opt("--timeout SECONDS", "Seconds to wait for the ranks.", low=1)]

Backend = Annotated[
    str,
    Opt(
        "--backend NAME",
        "hook: through Python; kineto: without it, for jobs with --kineto or "
        "KINETO_USE_DAEMON; dynolog: a daemon of the site's own; auto: what the job takes.",
    ),
]
Endpoint = Annotated[str, Opt("--dynolog HOST:PORT", "Where dynolog listens.")]
Folder = Annotated[
    Path | None,
    Opt(
        "-o --output DIR",
        "Where the traces go (with kineto and dynolog; default: the run directory, else "
        "haiprof-traces).",
    ),
]


def trace_now(
    job: JobName = None, steps: Steps = DEFAULT_STEPS, seconds: Seconds = None, ranks: Ranks = None,
    stacks: Stacks = False, shapes: Shapes = False, memory: Memory = False, flops: Flops = False,
    modules: Modules = False, sync: Sync = False, execution_trace: ExecutionTrace = False,
    timeout: Timeout = None, backend: Backend = "auto", dynolog: Endpoint = "localhost:1778",
    folder: Folder = None, log_dir: LogDirs = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Trace a running job with torch.profiler: the same steps on every rank of every node.

    The job must run under haiprof; nothing in it needs to have been prepared. Every rank answers:
    done, refused and why, or it is listed as silent. The traces land in the run directory.

    A job with KINETO_USE_DAEMON is traced through Kineto instead, also one that does not run under
    haiprof (see haiprof trace kineto-agent): JOB is then the id of one of its processes.

    For example:

      haiprof trace now                          five steps of the only job that runs here
      haiprof trace now train.py --trace-steps 3 --trace-stacks
      haiprof trace now 4711 --trace-steps 5 -o traces    started with KINETO_USE_DAEMON
      haiprof trace now RUN_DIR --time 10 --ranks 0,8 --json | jq '.ranks[].path'
    """
    from haiprof.live.trace_now import trace_now as ask_for_trace
    from haiprof.show.views.requests import trace_now_view

    output = Output(json=as_json)
    options = {
        "count": steps, "time_s": seconds or 0, "stacks": stacks, "shapes": shapes,
        "memory": memory, "flops": flops, "modules": modules, "sync": sync,
        "execution_trace": execution_trace,
    }  # fmt: skip
    job = str(the_job(None, log_dir).run.root) if job is None else job
    wanted = parse_ranks(ranks)
    wanted_ranks = None if wanted is None else tuple(sorted(wanted))
    kineto_job = find_kineto_job(job, log_dir, backend=backend)
    if kineto_job is not None:
        endpoint = dynolog if backend == "dynolog" else None
        trace_through_kineto(
            kineto_job, options, ranks=wanted_ranks, timeout_s=timeout, endpoint=endpoint,
            folder=folder, output=output,
        )  # fmt: skip
        return
    if folder is not None:
        raise UsageError("-o goes with --backend kineto or dynolog: the hook's are in the run")
    found = ask_for_trace(
        the_job(job, log_dir).run, options, ranks=wanted_ranks, timeout_s=timeout,
        progress=print_message,
    )  # fmt: skip
    output.show(lambda _: trace_now_view(found), found.as_json())
    if not found.done:
        raise HaiprofError("no rank was traced", hint=f"haiprof snapshot {found.run}")
    output.hint(f"next: haiprof trace report {found.run} --window {found.window}")
