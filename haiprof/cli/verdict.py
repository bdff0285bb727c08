"""`haiprof verdict`: the cause, the numbers that prove it, what to change, how sure."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.base.errors import HaiprofError, RunNotFoundError, UsageError
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_PEAK
from haiprof.base.trace_options import EXPLAIN_STEPS
from haiprof.base.users import other_uid
from haiprof.cli import shared
from haiprof.cli.command_line import ExitStatus, argument, option
from haiprof.cli.names import OTHER_NAMES, nearest, second_words
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.run_analysis.run_frames import RunFrames
    from haiprof.run_format.layout import RunPaths
    from haiprof.trace_analysis.pool import Pool

_TRACE_STEPS = 5
_ALIKE = 0.75
"""How alike a word must be to name a command: a job may be called train, which is no rank."""


def verdict(
    target: str | None = argument(
        "RUN_OR_JOB",
        "A run or log directory; a trace of torch.profiler or a folder of them; or a running "
        "job: its id, name, script, or a process id. Left out: the newest run, with --collect "
        "the only running job of this log directory.",
    ),
    output: Output = shared.OUTPUT,
    save: bool = option("--save", "Also write report/verdict.json and .txt into the run."),
    svg: Path | None = option("--svg FILE", "Write the card as a picture."),
    last: float | None = option(
        "--last SECONDS", "Only the last seconds of what was recorded.", low=0.1
    ),
    collect: bool = option(
        "--collect",
        "The job runs: watch it for --time, trace two steps of it (the verdict says what that "
        "cost), and judge that part.",
    ),
    seconds: float = option("--time SECONDS", "How long to watch.", 20.0),
    save_traces: bool = option(
        "--save-traces", "With --collect: trace five steps, for the other commands on traces."
    ),
    folder: Path | None = option(
        "--folder DIR",
        "Write everything into a new self-contained folder: card, page, tables, and the "
        "five reports of traced steps (with --collect some are traced).",
    ),
    exit_report: Path | None = option(
        "--exit-report FILE", "Write how the job ended as Markdown, for a ticket. -: to stdout."
    ),
    advice: bool = option(
        "--advice",
        "Only what a job script should do after a death, in the first line and as exit status: "
        "10 RESTART, 11 RESTART WITHOUT (nodes as Slurm's --exclude takes them), 12 STOP, 0 "
        "where nothing died.",
    ),
    everything: bool = shared.EVERYTHING,
    peak: str | None = shared.PEAK_OPTION,
    formulas: Path | None = shared.FORMULAS_OPTION,
    form: shared.Form = shared.OUTPUT_FORM,
    cluster: str | None = shared.CLUSTER,
) -> None:
    """Show why the job died, or what makes it slow, the numbers that prove it, and what to do.

    With --all also what could not be measured or judged and why, and what haiprof itself cost.
    With --collect the next seconds of a running job are judged, and kept as report/diagnosis.json
    in its run directory (docs/diagnosis.md); two of its steps are traced, so that what backward
    does has its line, and left out of all numbers. With --folder all of it is written into a
    self-contained folder: card, page, tables, hardware samples, and PerfTracker's five reports
    where steps were traced.

    `haiprof verdict overview`, `verdict rank` and `verdict lines` show the same run by rank and by
    line of code; each has a --help of its own.

    For example:

      haiprof verdict                             the newest run of the log directory
      haiprof verdict haiprof-logs/train-...      that run, also while it runs
      haiprof verdict train.py --collect          the next 20 s of that running job
      haiprof verdict train.py --collect --save-traces --time 60
      haiprof verdict train.py --collect --folder diagnosis     traces some steps, too
      haiprof verdict --last 60                   of the run's last minute alone
      haiprof verdict --svg card.svg              the card as a picture
      haiprof verdict --exit-report ticket.md     how it ended, for a ticket
      haiprof verdict --advice || status=$?       in a job script: start it again, or not
      haiprof verdict --format markdown >> "$GITHUB_STEP_SUMMARY"
      haiprof verdict --json | jq '.findings[0].remedy'
      haiprof verdict traces/                     of torch.profiler: the device's time, by account

      haiprof verdict trace.json --peak MI300X    a trace that does not name its GPU
    """
    output = Output(json=output.json or form == "json", markdown=form == "markdown")
    pool = shared.parse_cluster(cluster)
    of_part = last is not None
    writes = save or svg or folder or exit_report
    other = "--collect" if collect else "--last"
    for is_wrong, why in (
        ((of_part or collect) and save,
         f"--save keeps the verdict of a whole run: not together with {other}"),
        (of_part and collect,
         "--last judges what was recorded, --collect what comes: give one of them"),
        (save_traces and not collect,
         "--save-traces needs --collect: a job that has ended cannot be traced"),
        (seconds <= 0, f"--time {seconds:g}: expected more than 0 seconds"),
        (advice and (writes or collect or of_part),
         "--advice is of a whole run, and of how it ended: only --json goes with it"),
        (folder is not None and of_part,
         "--folder is of a whole run, or of --collect: not together with --last"),
    ):  # fmt: skip
        if is_wrong:
            raise UsageError(why)
    if not collect and (traces := shared.named_traces(target)) is not None:
        if writes or advice or of_part:
            raise UsageError(
                f"{traces}: traces, and no run: only --json and --all go with them",
                hint="name a run directory, or leave the other options out",
            )
        _show_traces(traces, output, pool, everything=everything, peak=peak, formulas=formulas)
        return
    if peak is not None and not save:  # the launcher's own is no place to complain
        from haiprof.trace_analysis.operator_efficiency import parse_peak

        parse_peak(peak)
        os.environ[ENV_PEAK] = peak
    since = None
    if collect:
        run = shared.the_job(target, None).run
        since = _watch(run, seconds, traces=save_traces or folder is not None)
        analyzer = shared.open_target(run.root, pool=pool)
    else:
        analyzer = _open_run_or_job(target)
        if pool is not None:
            analyzer = shared.open_target(analyzer.run.root, pool=pool)
        if not save and analyzer.files.about.scheduler_may_know:  # a launcher's job is not over
            _ask_schedulers(analyzer.run)
    from haiprof.diagnosis.engine import diagnose
    from haiprof.diagnosis.verdict import as_document, save_document
    from haiprof.show.card import save_card_svg, save_verdict, verdict_card, verdict_markdown
    from haiprof.show.figures.style import write_text
    from haiprof.show.run_header import lead_with_a_stall, manifest_or_none, run_header
    from haiprof.show.views import deaths

    if advice:
        _show_advice(analyzer, output)
        return
    analyzer = analyzer if last is None else analyzer.last(last)
    limit = None
    if save:  # by the launcher while a job ends: it does not wait for large traces there
        from haiprof.trace_analysis.pool import SMALL_BYTES

        limit = SMALL_BYTES
    found = diagnose(analyzer, trace_limit_bytes=limit, since_ns=since)
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    if not (save or collect):
        found = lead_with_a_stall(found, header, analyzer)
    content = as_document(found, since_ns=since)
    if save:
        save_verdict(found, header, analyzer.run)
    if svg is not None:
        output.hint(f"wrote {save_card_svg(found, header, svg)}")
    report = deaths.exit_report(found, header)
    to_stdout = exit_report == Path("-")
    if exit_report is not None and not to_stdout:
        write_text(exit_report, report)
        output.hint(f"wrote {exit_report}")
    if folder is not None:
        from haiprof.api.diagnosis_folder import write_diagnosis_folder

        names = write_diagnosis_folder(folder, analyzer, found, document=content, since_ns=since)
        output.hint(f"wrote {folder}: {', '.join(names)}")
    seen = []
    if analyzer.run.external_samples_json.exists():  # else none of what looks at jobs is loaded
        from haiprof.live.external_sampling import read_samples
        from haiprof.show.views.requests import sampled_run_view

        seen = read_samples(analyzer.run)
    if to_stdout:
        sys.stdout.write(report)
    elif seen:
        output.show(lambda _: sampled_run_view(seen, header, analyzer), content,
                    lambda: verdict_markdown(found, header.name))  # fmt: skip
        output.hint(f"next: haiprof verdict overview {shlex.quote(found.run)}")
    else:
        output.show(
            lambda width: verdict_card(
                found, header, width=width, everything=everything, folder=shared.working_folder()
            ),
            content,
            lambda: report if found.death else verdict_markdown(found, header.name),
        )
    is_own = other_uid(analyzer.run.manifest) is None
    if is_own and (collect or shared.COMMAND_NAME.get() in OTHER_NAMES):
        save_document(content, analyzer.run)
        output.hint(f"kept in {analyzer.run.diagnosis_json}")


def _ask_schedulers(run: RunPaths) -> None:
    """Asks Slurm or Kubernetes of an own run that did not end well; says why there is no answer."""
    if other_uid(run.manifest) is not None:
        return  # the answer is kept in the run
    from haiprof.live.scheduler import ask_schedulers

    for line in ask_schedulers(run):
        print_message(f"how the job ended was asked in vain: {line}")


def _show_advice(analyzer: RunFrames, output: Output) -> None:
    """The advice alone: deaths are looked at, and nothing else."""
    from haiprof.diagnosis.restart_advice import restart_advice
    from haiprof.show.views.deaths import advice_view

    found = restart_advice(analyzer)
    output.show(lambda _: advice_view(found),
                {"advice": None if found is None else asdict(found)})  # fmt: skip
    if found is not None:
        raise ExitStatus(found.exit_status)


def _show_traces(
    path: Path, output: Output, pool: Pool | None, *, everything: bool, peak: str | None,
    formulas: Path | None,
) -> None:  # fmt: skip
    from haiprof.run_format.layout import MANIFEST_NAME
    from haiprof.show.views.device_ledger import device_ledger_data, device_ledger_view
    from haiprof.trace_analysis.device_verdict import device_ledger
    from haiprof.trace_analysis.operator_efficiency import parse_peak
    from haiprof.trace_analysis.operator_work import read_formulas

    own = read_formulas(formulas)
    with shared.ReadProgress(quiet=output.json) as waiting:
        found = device_ledger(
            path, peaks=parse_peak(peak), progress=waiting, formulas=own, pool=pool
        )
    output.show(
        lambda width: device_ledger_view(found, path.name, width=width, everything=everything),
        device_ledger_data(found, path),
    )
    if not found.on_device and (path.parent / MANIFEST_NAME).is_file():
        run = shlex.quote(str(path.parent))
        output.hint(f"haiprof verdict {run}: the whole run, with the lines of its samples")
    output.hint(f"next: haiprof trace report {shlex.quote(str(path))}")


def _watch(run: RunPaths, seconds: float, *, traces: bool) -> int:
    """Watches a job while two steps, or more, are traced with the lines of their operators."""
    from haiprof.live.trace_now import collect

    trace = {"count": _TRACE_STEPS if traces else EXPLAIN_STEPS, "lines": True}
    try:
        (since, _), traced = collect(
            run, seconds, trace=trace, trace_timeout_s=None if traces else seconds,
            progress=print_message,
        )  # fmt: skip
    except HaiprofError as error:
        if traces:
            raise
        print_message(f"no lines of what backward does: {error}")
        (since, _), traced = collect(run, seconds, progress=print_message)
    if traced is not None and not traced.done:
        why = next((rank.reason for rank in traced.ranks if rank.reason), "no rank answered")
        print_message(f"no trace: {why}")
    return since


def _open_run_or_job(target: str | None) -> RunFrames:
    """The run of a directory, of the default log directory, or of a running job of that name."""
    if target is not None and Path(target).is_file():
        with contextlib.suppress(RunNotFoundError, UsageError, OSError):  # a running job's script
            job = shared.the_job(target, None, reads=True)
            scripts = [Path(job.manifest.cwd, word) for word in job.manifest.command]
            if any(os.path.samefile(target, each) for each in scripts if each.is_file()):
                return shared.open_target(job.run.root)
    if target is None or os.sep in target or Path(target).exists():
        return shared.open_target(None if target is None else Path(target))
    if (shared.default_log_dir() / target).is_dir():
        return shared.open_target(shared.default_log_dir() / target)
    from haiprof.live.find import is_unrecorded

    try:
        return shared.open_target(shared.the_job(target, None, reads=True).run.root)
    except RunNotFoundError as error:
        with contextlib.suppress(RunNotFoundError):  # as much of a run's name as tells it
            return shared.open_target(Path(target))
        near = nearest(target, second_words("verdict"), alike=_ALIKE)
        hint = "haiprof ls shows the runs recorded here, haiprof ls --live the running jobs"
        if near is not None:
            hint = f"did you mean haiprof verdict {near}?"
        elif is_unrecorded(target):
            hint = error.hint
        raise RunNotFoundError(f"{target}: no such folder, and {error}", hint=hint) from None
