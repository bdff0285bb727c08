"""run.json: what was run, with which options, when, and how it ended."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, RunFormatError, RunNotFoundError
from haiprof.base.units import visible
from haiprof.run_format.layout import MANIFEST_NAME, RunPaths
from haiprof.run_format.reader import check_version, read_json
from haiprof.run_format.schema import SCHEMA_VERSION
from haiprof.run_format.writer import write_json

_INTEGER_LIMIT = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What run.json holds."""

    version: int = SCHEMA_VERSION  # format version of the whole run directory
    haiprof_version: str  # release that recorded it
    name: str  # the job's name
    command: list[str]  # the job's command line
    options: dict[str, Any] = field(default_factory=dict)  # options in force, by name
    cwd: str = ""  # where the job was started
    environment: dict[str, Any] = field(default_factory=dict)
    """`git` (`root`, `branch`, `commit`, `dirty`, `changed_files`, `changes_digest`, or `reason`),
    `variables` (only listed ones), `script`, `machine`; the last two and `dirty` come once the job
    runs; under Slurm `slurm_job`, `_restart`, `_cluster`, `_nodes` and `_name`; `kubernetes` in
    a pod."""
    host: str = ""  # host of the launcher that created the run
    launcher_pid: int = 0  # its process id
    job_pid: int | None = None
    """Process id of the job's first process, on the same host; null before it has started."""
    start_wall_ns: int = 0  # Unix time at which the job was started
    end_wall_ns: int | None = None  # Unix time; null while it runs, and after a kill of everything
    exit_status: int | None = None  # the job's; null while it runs or when a signal ended it
    signal: str | None = None  # name of the signal that ended the job
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Who reported in: `rank`, `attempt`, `host`, `pid`; written when the job has ended."""
    unreported: list[dict[str, Any]] = field(default_factory=list)
    """Who should have and did not: `pid`, `command`, `reason`, `remedy`."""
    hook_failures: list[str] = field(default_factory=list)
    """Processes in which haiprof's hook could not be loaded, with the error."""

    @property
    def scheduler_may_know(self) -> bool:
        """Whether it did not end well, and Slurm or Kubernetes may say why."""
        ended_well = self.end_wall_ns is not None and self.exit_status == 0
        scheduled = self.environment.get("slurm_job") or self.environment.get("kubernetes")
        return bool(scheduled) and not ended_well


def write_manifest(run: RunPaths, manifest: Manifest) -> None:
    """Writes run.json, replacing it at once."""
    write_json(run.manifest, asdict(manifest), below=run.root)


def read_manifest(run: RunPaths) -> Manifest:
    """Reads run.json; fields that a later minor release added are ignored."""
    if not os.path.lexists(run.manifest):
        raise RunNotFoundError(
            f"{run.root}: no haiprof run here (it has no {MANIFEST_NAME})",
            hint="haiprof ls DIR shows the runs below a log directory",
        )
    content = read_json(run.manifest)
    check_version(run.manifest, content.get("version"))
    known = {k: v for k, v in content.items() if k in Manifest.__dataclass_fields__}
    for name, value in known.items():
        if not _fits(Manifest.__annotations__[name], value):
            raise RunFormatError(
                f"{run.manifest}: {name!r} holds a {type(value).__name__} that does not fit"
            )
    try:
        return Manifest(**known)
    except TypeError as error:
        raise RunFormatError(f"{run.manifest}: {error}") from None


def is_same_job(one: Manifest, other: Manifest) -> bool:
    """Whether two runs are of one job: one --run-id, or one script with the same arguments.

    How it was launched, and on which nodes, is not looked at.
    """
    if one.name != other.name:
        return False
    run_id = one.options.get("run_id")
    same_id = run_id is not None and run_id == other.options.get("run_id")
    return same_id or script_words(one.command) == script_words(other.command)


def script_words(command: Sequence[str]) -> list[str]:
    """The name of a command's script and its arguments; all words where no script is named."""
    first = next((at for at, word in enumerate(command) if word.endswith(".py")), None)
    return list(command) if first is None else [Path(command[first]).name, *command[first + 1 :]]


def _fits(kind: str, value: object) -> bool:
    """Whether a value from JSON is of a type, as a field of `Manifest` is annotated."""
    if kind.endswith(" | None"):
        return value is None or _fits(kind.removesuffix(" | None"), value)
    if kind.startswith("list["):
        inner = kind[len("list[") : -1]
        return isinstance(value, list) and all(_fits(inner, each) for each in value)
    if kind == "int":
        return type(value) is int and abs(value) < _INTEGER_LIMIT
    return isinstance(value, str if kind == "str" else dict)


def has_ended(run: RunPaths) -> bool:
    """Whether a run is over, or is not a run at all; a requeued job starts a new one."""
    try:
        return read_manifest(run).end_wall_ns is not None
    except HaiprofError:
        return True


def find_runs(log_dir: Path) -> list[Path]:
    """Run directories directly below a log directory, oldest first; links are not followed."""
    return sorted(run_folders(log_dir), key=start_order)


def run_folders(log_dir: Path) -> list[Path]:
    """The same in no order, without a look into them."""
    try:
        with os.scandir(log_dir) as entries:
            folders = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    except NotADirectoryError:
        raise RunNotFoundError(f"{log_dir}: a file, where a directory is expected") from None
    except OSError as error:
        raise RunNotFoundError(f"{log_dir}: {error.strerror or error}") from None
    except ValueError as error:  # a zero byte in the path
        raise RunNotFoundError(f"{log_dir}: {error}") from None
    return [folder for folder in folders if os.path.lexists(folder / MANIFEST_NAME)]


_FOLDERS_TO_LOOK_INTO = 500
_NAMED_FOLDERS = 5


def where_runs_are(path: Path) -> str:
    """What to do about a folder without runs: log directories in it, or one deeper, are named."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for depth in ("*", "*/*"):
            folders = itertools.islice(path.glob(depth), _FOLDERS_TO_LOOK_INTO)
            logs = (each for each in folders if next(each.glob(f"*/{MANIFEST_NAME}"), None))
            found += [visible(str(each)) for each in logs]
    if not found and next(path.glob("*.json*"), None):
        return f"for traces of torch.profiler: haiprof verdict {shlex.quote(visible(str(path)))}"
    found.sort()
    more = len(found) - _NAMED_FOLDERS
    named = [*found[:_NAMED_FOLDERS], *([f"{more} more"] if more > 0 else [])]
    return f"runs are in {', '.join(named)}" if found else "record one: haiprof train.py"


def newest_run(path: Path) -> Path:
    """The run directory itself, or the newest run of a log directory."""
    if os.path.lexists(path / MANIFEST_NAME):
        return path
    if not (runs := find_runs(path)):
        raise RunNotFoundError(
            f"{path}: neither a run directory nor a log directory with runs",
            hint=where_runs_are(path),
        )
    return runs[-1]


def start_order(run: Path) -> tuple[int, str]:
    """Start in the manifest, or the folder's own time where that cannot be read."""
    try:
        return (read_manifest(RunPaths(run)).start_wall_ns, run.name)
    except (RunFormatError, RunNotFoundError):
        return (run.lstat().st_mtime_ns if os.path.lexists(run) else 0, run.name)
