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
from haiprof.errors import HaiprofError, UsageError
from haiprof.launch.surroundings import at_launch
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest, read_manifest, write_manifest
from haiprof.rundir.writer import write_json

_MAX_REPEATS = 1000
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
    shared = safe_name(options.run_id) if options.run_id else shared_identity(environ)
    identity = shared or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    root = options.log_dir / f"{name}-{identity}"
    try:
        root = root.absolute()
        manifest = _new_manifest(options, command=command, name=name, environ=environ)
        for attempt in range(1, _MAX_REPEATS):
            run = RunPaths(root if attempt == 1 else root.with_name(f"{root.name}-{attempt}"))
            if os.pathsep in str(run.boot):
                raise OSError(f"PYTHONPATH cannot carry a path with {os.pathsep!r}")
            created = _make(run, manifest, options)
            if created or not _has_ended(run):
                return run, manifest, created
    except OSError as error:
        raise UsageError(f"cannot write to {root}: {error.strerror or error}") from None
    raise UsageError(f"cannot write to {root}: {_MAX_REPEATS} runs have that name already")


def _new_manifest(
    options: Options, *, command: list[str], name: str, environ: Mapping[str, str]
) -> Manifest:
    cwd = os.getcwd()
    return Manifest(
        haiprof_version=haiprof.__version__,
        name=name,
        command=command,
        options=options.as_json(),
        cwd=cwd,
        environment=at_launch(cwd, environ),
        host=socket.gethostname(),
        launcher_pid=os.getpid(),
        start_wall_ns=time.time_ns(),
    )


def _has_ended(run: RunPaths) -> bool:
    """Whether the run that stands there is over: a requeued job starts a new one beside it."""
    try:
        return read_manifest(run).end_wall_ns is not None
    except HaiprofError:
        return True


def shared_identity(environ: Mapping[str, str]) -> str:
    """What launchers of one multi-node Slurm step have in common; empty elsewhere."""
    if not environ.get("SLURM_STEP_ID") or environ.get("SLURM_NTASKS", "1") == "1":
        return ""
    parts = [environ.get("SLURM_JOB_ID", "job"), environ["SLURM_STEP_ID"]]
    if environ.get("SLURM_RESTART_COUNT", "0") != "0":
        parts.append(f"r{environ['SLURM_RESTART_COUNT']}")
    return safe_name(".".join(parts))


def _make(run: RunPaths, manifest: Manifest, options: Options) -> bool:
    """Fills a temporary folder and renames it, so that nobody meets half a run directory."""
    run.root.parent.mkdir(parents=True, exist_ok=True)
    draft = RunPaths(run.root.with_name(f".{run.root.name}.{os.urandom(3).hex()}"))
    for folder in (draft.boot, draft.ranks, draft.nodes, draft.report):
        folder.mkdir(parents=True)
    if options.traces:
        draft.trace_parts.mkdir(parents=True)
    source = PACKAGE / "hook" / "boot" / "sitecustomize.py"
    shutil.copyfile(source, draft.boot / source.name)
    write_json(
        draft.boot_config,
        {**options.boot_json(), "package": str(PACKAGE), "run_dir": str(run.root)},
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
