"""`haiprof attach`: a running job recorded for a while, and what was found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import check_packages
from haiprof.base.messages import print_message
from haiprof.base.trace_options import DEFAULT_STEPS
from haiprof.cli.arguments import AsJson, JobName, LogDirs, job_or_processes
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output
from haiprof.cli.target import default_log_dir, default_options
from haiprof.run_format.layout import RunPaths

if TYPE_CHECKING:
    from haiprof.live.attach import Attached

Seconds = Annotated[float, Opt("--time SECONDS", "For how many seconds.", low=0.5)]
Trace = Annotated[bool, Opt("--trace", "Also trace some steps with torch.profiler.")]
Steps = Annotated[
    int, Opt("--trace-steps N", "How many steps to trace.", low=1, high=10000, old=("--steps",))
]
Stacks = Annotated[bool, Opt("--trace-stacks", "With Python stacks (slower).", old=("--stacks",))]
Inject = Annotated[
    bool,
    Opt(
        "--inject",
        "A process that was not started under haiprof: put the hook into it. It has risks, "
        "which are listed before anything is done.",
    ),
]


def attach(
    job: JobName = None, seconds: Seconds = 60.0, trace: Trace = False,
    steps: Steps = DEFAULT_STEPS, stacks: Stacks = False, inject: Inject = False,
    log_dir: LogDirs = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Record a running job for a while, and show what makes it slow.

    A job that is recorded anyway is judged by its next seconds. One whose recording has ended
    records again, into a run directory of its own beside the old one. A process that does not run
    under haiprof is looked at from outside (counters, sampled stacks), or gets the hook with
    --inject; afterwards the hook is out again, and the job runs on as before.

    With an address as log directory (--log-dir s3://bucket/runs) the recording is put there.

    For example:

      haiprof attach train.py --time 60          the next minute of it
      haiprof attach 4711 --time 30 --trace      with a trace of five steps
      haiprof attach 4711 --inject               a process that was started without haiprof
    """
    from haiprof.cli.run_putting import copies_at, pause
    from haiprof.live.attach import AttachRequest, attach_injecting, attach_job, attach_sampling

    found, processes = job_or_processes(job, log_dir)
    address = default_options().address
    if address:
        check_packages(address)
    if found is None and trace and not inject:
        raise UsageError(
            f"{job}: a process that does not run under haiprof is traced with --inject only",
            hint=f"haiprof attach {job} --inject --trace",
        )
    options = {"count": steps, "time_s": 0, "stacks": stacks} if trace else None
    copies = copies_at(address) if address else None
    wish = AttachRequest(time_s=seconds, trace=options, log_dir=default_log_dir(), copies=copies)

    def progress(text: str) -> None:
        print_message(text)

    if found is not None:
        done = attach_job(found, wish, progress)
    elif inject:
        done = attach_injecting(processes, wish, progress)
    else:
        done = attach_sampling(processes, wish, progress)
    _show(done, Output(json=as_json))
    if copies is not None:
        copies(RunPaths(Path(done.run))).finish(pause, quiet=as_json)


def _show(done: Attached, output: Output) -> None:
    from haiprof.diagnosis.engine import diagnose
    from haiprof.diagnosis.verdict import as_document
    from haiprof.live.attach import OUTSIDE, RECORDED
    from haiprof.run_analysis.run_frames import RunFrames
    from haiprof.show.card import save_verdict
    from haiprof.show.run_header import manifest_or_none, run_header
    from haiprof.show.views.requests import attach_view

    part = done.between if done.how == RECORDED else None
    analyzer = RunFrames(done.run, between=part)
    found = diagnose(analyzer) if done.how != OUTSIDE else None
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    if part is None and found is not None:
        save_verdict(found, header, analyzer.run)
    data = {**done.as_json(), "verdict": as_document(found) if found is not None else None}
    output.show(lambda width: attach_view(done, found, header, analyzer, width=width), data)
    output.hint(f"next: haiprof verdict overview {done.run}")
