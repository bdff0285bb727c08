"""`haiprof snapshot`, `attach`, `trace now` and `trace kineto-agent`: asking running jobs."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.log_addresses import check_packages
from haiprof.base.messages import print_message
from haiprof.base.trace_options import DEFAULT_STEPS
from haiprof.base.units import NS_PER_S
from haiprof.cli import shared
from haiprof.cli.command_line import option
from haiprof.cli.output import Output
from haiprof.run_format.layout import RunPaths

if TYPE_CHECKING:
    from haiprof.live.attach import Attached
    from haiprof.live.kineto_processes import KinetoJob


TRACE_STEPS = option(
    "--trace-steps N", "How many steps.", DEFAULT_STEPS, old=("--steps",), low=1, high=10000
)
TRACE_STACKS = option("--trace-stacks", "Python stacks (slower).", old=("--stacks",))


def snapshot(
    job: str | None = shared.JOB_NAME,
    hang: bool = option("--hang", "The job hangs: also compare the ranks' last collectives."),
    log_dir: list[Path] | None = shared.LOG_DIRS,
    output: Output = shared.OUTPUT,
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

    found = take_snapshot(shared.the_job(job, log_dir).run, hang=hang, progress=print_message)
    output.show(lambda _: snapshot_view(found), found.as_json())
    output.hint(f"kept in {found.path}")


def attach(
    job: str | None = shared.JOB_NAME,
    seconds: float = option("--time SECONDS", "For how many seconds.", 60.0, low=0.5),
    trace: bool = option("--trace", "Also trace some steps with torch.profiler."),
    steps: int = replace(TRACE_STEPS, help="How many steps to trace."),
    stacks: bool = replace(TRACE_STACKS, help="With Python stacks (slower)."),
    inject: bool = option(
        "--inject",
        "A process that was not started under haiprof: put the hook into it. It has risks, "
        "which are listed before anything is done.",
    ),
    log_dir: list[Path] | None = shared.LOG_DIRS,
    output: Output = shared.OUTPUT,
) -> None:
    """Record a running job for a while, and show what makes it slow.

    A job that is recorded anyway is judged by its next seconds. One whose recording has ended
    records again, into a run directory of its own beside the old one. A process that does not run
    under haiprof is looked at from outside (counters, sampled stacks), or gets the hook with
    --inject; afterwards the hook is out again, and the job runs on as before.

    Such a process is recorded below the first --log-dir. With an address as log directory
    (--log-dir s3://bucket/runs) the recording is put there.

    For example:

      haiprof attach train.py --time 60          the next minute of it
      haiprof attach 4711 --time 30 --trace      with a trace of five steps
      haiprof attach 4711 --inject               a process that was started without haiprof
    """
    from haiprof.cli.run_copies import copies_at, pause
    from haiprof.live.attach import AttachRequest, attach_injecting, attach_job, attach_sampling

    found, processes = shared.job_or_processes(job, log_dir)
    if address := shared.default_options().address:
        check_packages(address)
    if found is None and trace and not inject:
        raise UsageError(
            f"{job}: a process that does not run under haiprof is traced with --inject only",
            hint=f"haiprof attach {job} --inject --trace",
        )
    options = {"count": steps, "time_s": 0, "stacks": stacks} if trace else None
    copies = copies_at(address) if address else None
    folder = log_dir[0] if log_dir and not address else shared.default_log_dir()
    wish = AttachRequest(time_s=seconds, trace=options, log_dir=folder, copies=copies)

    if found is not None:
        done = attach_job(found, wish, print_message)
    else:
        record = attach_injecting if inject else attach_sampling
        done = record(processes, wish, print_message)
    _show(done, output)
    if copies is not None:
        copies(RunPaths(Path(done.run))).finish(pause, quiet=output.json)


def _show(done: Attached, output: Output) -> None:
    from haiprof.diagnosis.engine import diagnose
    from haiprof.diagnosis.verdict import as_document
    from haiprof.live.attach import OUTSIDE, RECORDED
    from haiprof.run_analysis.run_frames import RunFrames
    from haiprof.show.card import save_verdict
    from haiprof.show.run_header import manifest_or_none, run_header
    from haiprof.show.views.requests import attach_view

    whole = done.how != RECORDED
    analyzer = RunFrames(done.run, between=None if whole else done.between)
    found = diagnose(analyzer) if done.how != OUTSIDE else None
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    if whole and found is not None:
        save_verdict(found, header, analyzer.run)
    data = {**done.as_json(), "verdict": as_document(found) if found is not None else None}
    output.show(lambda width: attach_view(done, found, header, analyzer, width=width), data)
    output.hint(f"next: haiprof verdict overview {shlex.quote(str(done.run))}")


DEFAULT_FOLDER = Path("haiprof-traces")
_FAR_S = 86_400.0


def parse_start(text: str | None) -> int:
    """Unix time in ns of `--start-at`, within a day from now; 0 where it is not given."""
    if text is None:
        return 0
    now_s = time.time()
    try:
        start_s = now_s + float(text[1:]) if text.startswith("+") else float(text)
    except ValueError:
        start_s = math.nan
    if not now_s <= start_s <= now_s + _FAR_S:
        raise UsageError(
            f"--start-at {text}: expected a Unix time within a day from now, or +SECONDS",
            hint="--start-at $(($(date +%s) + 30))",
        )
    return round(start_s * NS_PER_S)


def trace_through_kineto(
    job: KinetoJob, options: Mapping[str, Any], *, ranks: tuple[int, ...] | None,
    timeout_s: float | None, endpoint: str | None, folder: Path | None, output: Output,
    start_ns: int,
) -> None:  # fmt: skip
    """Traces the job and shows the result."""
    from haiprof.agent.kineto_daemon import TraceRequest
    from haiprof.live.kineto_processes import parse_endpoint
    from haiprof.live.kineto_trace import trace_processes
    from haiprof.show.views.requests import kineto_view

    if options["execution_trace"]:
        raise UsageError("--execution-trace needs --backend hook: Kineto's side writes none")
    request = TraceRequest(
        steps=options["count"], time_s=options["time_s"], options=options, timeout_s=timeout_s,
        endpoint=None if endpoint is None else parse_endpoint(endpoint), start_wall_ns=start_ns,
    )  # fmt: skip
    if job.elsewhere:
        print_message(
            f"only ranks on this node are asked; run it also on {', '.join(job.elsewhere)}"
        )
    found = trace_processes(
        [each for each in job.processes if ranks is None or each.rank in ranks], request,
        run=job.run, output=folder or (DEFAULT_FOLDER if job.run is None else None),
        progress=print_message,
    )  # fmt: skip
    output.show(lambda _: kineto_view(found), found.as_json())
    if not found.done:
        raise HaiprofError("no process was traced")
    where = found.folder if folder or job.run is None else job.run.root
    output.hint(f"next: haiprof trace report {shlex.quote(str(where))}")


def trace_now(
    job: str | None = shared.JOB_NAME,
    steps: int = TRACE_STEPS,
    seconds: float | None = option("--time SECONDS", "Seconds in place of steps.", low=0.1),
    ranks: str | None = option("--ranks LIST", "Only these: 0,3-5."),
    stacks: bool = TRACE_STACKS,
    shapes: bool = option("--trace-shapes", "Shapes of operators' inputs.", old=("--shapes",)),
    memory: bool = option("--trace-memory", "Allocations.", old=("--memory",)),
    flops: bool = option("--trace-flops", "Floating-point operations.", old=("--flops",)),
    modules: bool = option(
        "--trace-modules",
        "Names of TorchScript modules; of others: --trace-stacks.",
        old=("--modules",),
    ),
    sync: bool = option("--trace-sync", "CUDA synchronisation events.", old=("--sync",)),
    execution_trace: bool = option(
        "--execution-trace", "Also the execution trace, for haiprof export --to linked."
    ),
    timeout: float | None = option("--timeout SECONDS", "Seconds to wait for the ranks.", low=1),
    backend: str = option(
        "--backend NAME",
        "hook: through Python; kineto: without it, for jobs with --kineto or "
        "KINETO_USE_DAEMON; dynolog: a daemon of the site's own; auto: what the job takes.",
        "auto",
    ),
    dynolog: str = option("--dynolog HOST:PORT", "Where dynolog listens.", "localhost:1778"),
    start_at: str | None = option(
        "--start-at TIME",
        "When it begins: Unix time in seconds, the same on all nodes, or +SECONDS from now.",
    ),
    folder: Path | None = option(
        "-o --output DIR",
        "Where the traces go (with kineto and dynolog; default: the run directory, else "
        "haiprof-traces).",
    ),
    log_dir: list[Path] | None = shared.LOG_DIRS,
    output: Output = shared.OUTPUT,
) -> None:
    """Trace a running job with torch.profiler: the same steps on every rank of every node.

    The job must run under haiprof; nothing in it needs to have been prepared. Every rank answers:
    done, refused and why, or it is listed as silent. The traces land in the run directory.

    A job with KINETO_USE_DAEMON is traced through Kineto instead, also one that does not run under
    haiprof (see haiprof trace kineto-agent): JOB is then the id of one of its processes, or
    slurm:NUMBER. haiprof trace dyno takes dynolog's own options.

    For example:

      haiprof trace now                          five steps of the only job that runs here
      haiprof trace now train.py --trace-steps 3 --trace-stacks
      haiprof trace now 4711 --trace-steps 5 -o traces    started with KINETO_USE_DAEMON
      haiprof trace now RUN_DIR --time 10 --ranks 0,8 --json | jq '.ranks[].path'
    """
    from haiprof.live.kineto_processes import kineto_job
    from haiprof.live.trace_now import trace_now as ask_for_trace
    from haiprof.show.views.requests import trace_now_view

    start_ns = parse_start(start_at)
    options = {
        "count": steps, "time_s": seconds or 0, "stacks": stacks, "shapes": shapes,
        "memory": memory, "flops": flops, "modules": modules, "sync": sync,
        "execution_trace": execution_trace,
    }  # fmt: skip
    job = str(shared.the_job(None, log_dir).run.root) if job is None else job
    wanted = shared.parse_ranks(ranks)
    wanted_ranks = None if wanted is None else tuple(sorted(wanted))
    through_kineto = kineto_job(
        job, shared.log_dirs(log_dir), backend=backend, progress=print_message,
        others=shared.sees_others(),
    )  # fmt: skip
    if through_kineto is not None:
        endpoint = dynolog if backend == "dynolog" else None
        trace_through_kineto(
            through_kineto, options, ranks=wanted_ranks, timeout_s=timeout, endpoint=endpoint,
            folder=folder, output=output, start_ns=start_ns,
        )  # fmt: skip
        return
    if folder is not None:
        raise UsageError("-o goes with --backend kineto or dynolog: the hook's are in the run")
    found = ask_for_trace(
        shared.the_job(job, log_dir).run, options, ranks=wanted_ranks, timeout_s=timeout,
        start_wall_ns=start_ns, progress=print_message,
    )  # fmt: skip
    output.show(lambda _: trace_now_view(found), found.as_json())
    if not found.done:
        raise HaiprofError("no rank was traced", hint=f"haiprof snapshot {found.run}")
    output.hint(f"next: haiprof trace report {shlex.quote(str(found.run))} --window {found.window}")


def kineto_agent(
    socket_dir: Path | None = option(
        "--socket-dir DIR",
        "The jobs' KINETO_IPC_SOCKET_DIR, a folder with mode 700 (default: that variable, "
        "else Kineto's abstract address).",
    ),
) -> None:
    """Listen for jobs that run with KINETO_USE_DAEMON=1 and not under haiprof.

    Stands in for the daemon that PyTorch asks for traces every 5 seconds (dynolog's): start it
    before the jobs. Only processes of this user are answered; nothing is opened to the network.
    It ends with Ctrl-C.

    For example:

      haiprof trace kineto-agent &
      KINETO_USE_DAEMON=1 python train.py &
      haiprof trace now $! --trace-steps 5 -o traces
    """
    from haiprof.agent.kineto_daemon import listen, own_address

    address = own_address(os.environ, socket_dir)
    ignored = listen(address, lambda shown: print_message(f"listening on {shown}"))
    if ignored:
        print_message(f"{ignored} datagrams were ignored: malformed, or another user's")
