"""Which runs of a log directory are one job: requeues, restarts by hand, runs of one `--run-id`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from haiprof.base.errors import HaiprofError
from haiprof.run_analysis.restarts import Goodput, goodput
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest, run_folders


class JobRun(NamedTuple):
    """One run of a job."""

    start_ns: int
    went_well: bool
    """Whether it is known to have ended with status 0."""
    folder: Path


def identity(manifest: Manifest) -> tuple[object, ...]:
    """What all runs of a job have in common.

    `--run-id`; else the command, and Slurm's job or, where there is none, the folder.
    """
    if manifest.options.get("run_id"):
        return manifest.name, manifest.options["run_id"]
    place = manifest.environment.get("slurm_job") or manifest.cwd
    return manifest.name, place, *manifest.command


def runs_beside(run: RunPaths, own: Manifest) -> list[JobRun]:
    """The other runs of a run's job in its log directory, oldest first; none that is damaged."""
    found = []
    for folder in run_folders(run.root.parent):
        with contextlib.suppress(HaiprofError):
            if folder.name.startswith(f"{own.name}-") and folder.name != run.root.name:
                other = read_manifest(RunPaths(folder))
                if identity(other) == identity(own):
                    found.append(JobRun(other.start_wall_ns, other.exit_status == 0, folder))
    return sorted(found)


def runs_of_job(run: RunPaths) -> tuple[list[Path], str]:
    """All runs of a run's job, oldest first, and what they have in common, for people.

    Where nothing but the command names the job, a run that ended well is the end of it.
    """
    own = read_manifest(run)
    others, at = runs_beside(run, own), own.start_wall_ns
    if own.options.get("run_id"):
        why = f"--run-id {own.options['run_id']}"
    elif own.environment.get("slurm_job"):
        why = f"job {own.environment['slurm_job']} of Slurm"
    else:
        why = "the same command in the same folder, up to a run that ended well"
        ends = [other.start_ns for other in others if other.went_well]
        before = max((start for start in ends if start < at), default=-1)
        after = min((start for start in ends if start > at), default=1 << 63)
        after = at if own.exit_status == 0 else after
        others = [other for other in others if before < other.start_ns <= after]
    own_run = JobRun(at, own.exit_status == 0, run.root)
    return [each.folder for each in sorted([own_run, *others])], why


def job_goodput(runs: Sequence[Path]) -> Goodput:
    """The wall time of a job by account, from its first start to its last end."""
    records = [RunFrames(run).run_record() for run in runs]
    return goodput(sorted(records, key=lambda record: record.start_ns))
