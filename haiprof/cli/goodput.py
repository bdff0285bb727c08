"""`haiprof goodput`: where the wall time of a job went, over all its starts and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.cli.arguments import AsJson, Form, OutputForm
from haiprof.cli.command_line import Arg
from haiprof.cli.output import Output
from haiprof.cli.target import existing_log_dir, whole_path

Runs = Annotated[
    list[Path] | None,
    Arg(
        "[JOB|RUN...]",
        "A run, or a log directory for its newest one: all runs of its job are joined. Several "
        "runs: exactly these. Left out: the newest run of the log directory that a job started "
        "here would write to.",
    ),
]


def goodput(runs: Runs = None, as_json: AsJson = False, form: OutputForm = Form.TEXT) -> None:
    """Show where a job's wall time went, from its first start to its last end: it adds up to 100 %.

    Steps that count, input, evaluation, checkpoints, compilation, init and import, waiting for
    ranks, hangs, lost steps, drain, and the queue between runs. Each moment is in one account, and
    the residual is shown.

    Runs of one job are joined: those with the same --run-id, else with the same command in the same
    job of Slurm, else in the same folder up to a run that ended well. Restarts by torchrun are
    starts inside a run.

    Lost steps were trained in vain: a later start went on from an older checkpoint. Which one is
    told by the file that it read: when it had been written. Where no such file was seen, the steps
    before it are said to be steps that may count, and goodput has two bounds.

    For example:

      haiprof goodput                             the job of the newest run
      haiprof goodput haiprof-logs/train-7-3      all runs of that run's job
      haiprof goodput train-41 train-42           these two runs, one after the other
      haiprof goodput --json | jq '.accounts.lost_steps / .wall_ns'
      haiprof goodput --format markdown > ticket.md
    """
    from haiprof.diagnosis.restart_advice import job_goodput, runs_of_job
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run
    from haiprof.show.views.goodput import goodput_data, goodput_markdown, goodput_view

    named = [newest_run(whole_path(run)) for run in runs or [existing_log_dir()]]
    folders, joined = runs_of_job(RunPaths(named[0])) if len(named) == 1 else (named, "as named")
    joined = joined if len(folders) > 1 else ""
    found = job_goodput(list(dict.fromkeys(folders)))
    output = Output(json=as_json or form is Form.JSON, markdown=form is Form.MARKDOWN)
    output.show(
        lambda _: goodput_view(found, joined=joined),
        goodput_data(found, folders, joined=joined),
        lambda: goodput_markdown(found, joined=joined),
    )
    output.hint(f"next: haiprof verdict {folders[-1]}")
