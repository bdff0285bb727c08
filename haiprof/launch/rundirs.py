"""Creates a run directory, or joins the one that a launcher on another node created."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import haiprof
from haiprof.config import Options, safe_name
from haiprof.errors import UsageError
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest, write_manifest
from haiprof.rundir.writer import write_json

PACKAGE = Path(haiprof.__file__).resolve().parent


def create_run(
    options: Options, *, command: list[str], name: str, environ: Mapping[str, str]
) -> tuple[RunPaths, Manifest, bool]:
    """Makes the run directory with its manifest and its boot folder.

    Returns:
        The paths, the manifest, and whether this launcher created the run (not joined it).

    Raises:
        UsageError: The directory cannot be written; the message says which and why.
    """
    name = safe_name(options.name or name)
    identity = (
        safe_name(options.run_id or shared_identity(environ))
        if _shared(options, environ)
        else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    )
    run = RunPaths((options.log_dir / f"{name}-{identity}").absolute())
    manifest = Manifest(
        haiprof_version=haiprof.__version__,
        name=name,
        command=command,
        options=options.as_json(),
        cwd=os.getcwd(),
        host=socket.gethostname(),
        launcher_pid=os.getpid(),
        start_wall_ns=time.time_ns(),
    )
    try:
        created = _make(run, manifest, options)
    except OSError as error:
        raise UsageError(f"cannot write to {run.root}: {error.strerror or error}") from None
    return run, manifest, created


def shared_identity(environ: Mapping[str, str]) -> str:
    """What launchers of one multi-node Slurm step have in common; empty elsewhere."""
    if environ.get("SLURM_STEP_ID") and environ.get("SLURM_NTASKS", "1") != "1":
        return f"{environ.get('SLURM_JOB_ID', 'job')}.{environ['SLURM_STEP_ID']}"
    return ""


def _shared(options: Options, environ: Mapping[str, str]) -> bool:
    return bool(options.run_id or shared_identity(environ))


def _make(run: RunPaths, manifest: Manifest, options: Options) -> bool:
    """Fills a temporary folder and renames it, so that nobody meets half a run directory."""
    run.root.parent.mkdir(parents=True, exist_ok=True)
    draft = RunPaths(run.root.with_name(f".{run.root.name}.{os.urandom(3).hex()}"))
    for folder in (draft.boot, draft.ranks, draft.nodes, draft.report):
        folder.mkdir(parents=True)
    source = PACKAGE / "hook" / "boot" / "sitecustomize.py"
    shutil.copyfile(source, draft.boot / source.name)
    write_json(
        draft.boot_config,
        {**options.as_json(), "package": str(PACKAGE), "run_dir": str(run.root)},
    )
    write_manifest(draft, manifest)
    try:
        draft.root.rename(run.root)
    except OSError:
        shutil.rmtree(draft.root)
        if run.manifest.exists():
            return False
        raise
    return True
