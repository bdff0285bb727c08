"""Creates or joins a run directory, and puts the run at the address of its log directory."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.agent.job_environment import at_launch
from haiprof.base import safe_files
from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import run_address
from haiprof.base.messages import print_message
from haiprof.base.options import SHARES, Options, safe_name
from haiprof.base.subcommand import end_child
from haiprof.base.users import group_id
from haiprof.base.version import __version__
from haiprof.run_format.boot import check_carried
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, has_ended, write_manifest
from haiprof.run_format.secrets import mask_command, mask_text
from haiprof.run_format.writer import write_json

_MAX_REPEATS = 1000


def create_run(
    options: Options, *, command: list[str], name: str, environ: Mapping[str, str],
    launcher_pid: int | None = None,
) -> tuple[RunPaths, Manifest, bool]:  # fmt: skip
    """Makes the run directory with its manifest and the hook's configuration."""
    name = safe_name(options.name or name)
    shared = safe_name(options.run_id) if options.run_id else shared_identity(environ)
    identity = shared or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(8).hex()}"
    root = options.log_dir / f"{name}-{identity}"
    try:
        root = root.absolute()
        cwd = os.getcwd()
        manifest = Manifest(
            haiprof_version=__version__, name=name, command=mask_command(command),
            options=options.as_json(), cwd=cwd, environment=at_launch(cwd, environ),
            host=socket.gethostname(),
            launcher_pid=os.getpid() if launcher_pid is None else launcher_pid,
            start_wall_ns=time.time_ns(),
        )  # fmt: skip
        for attempt in range(1, _MAX_REPEATS):
            run = RunPaths(root if attempt == 1 else root.with_name(f"{root.name}-{attempt}"))
            check_carried(run)
            created = _make(run, manifest, options)
            if created or not has_ended(run):
                return run, manifest, created
    except OSError as error:
        raise UsageError(f"cannot write to {root}: {error.strerror or error}") from None
    raise UsageError(f"cannot write to {root}: {_MAX_REPEATS} runs have that name already")


def shared_identity(environ: Mapping[str, str]) -> str:
    """The identity that launchers of one multi-node Slurm step share; empty elsewhere."""
    if not environ.get("SLURM_STEP_ID") or environ.get("SLURM_NTASKS", "1") == "1":
        return ""
    parts = [environ.get("SLURM_JOB_ID", "job"), environ["SLURM_STEP_ID"]]
    if environ.get("SLURM_RESTART_COUNT", "0") != "0":
        parts.append(f"r{environ['SLURM_RESTART_COUNT']}")
    return safe_name(".".join(parts))


def _make(run: RunPaths, manifest: Manifest, options: Options) -> bool:
    """Fills a temporary folder and renames it, so that no process sees half a run directory."""
    log_dir = run.root.parent
    safe_files.make_named_folder(log_dir)
    made = safe_files.MadeFolder.temporary(
        f".{run.root.name}.", log_dir, mode=SHARES[options.share]
    )
    if options.admin_group:
        _let_administrators_read(made.path, options.admin_group)
    draft = RunPaths(made.path)
    traces = (draft.trace_parts,) if options.traces else ()
    for folder in (draft.boot, draft.ranks, draft.nodes, draft.report, draft.flight, *traces):
        safe_files.make_folder(folder, below=draft.root)
    write_json(draft.boot_config, options.boot_json(), below=draft.root)
    write_manifest(draft, manifest)
    owner = draft.root.stat().st_uid  # ours, as this file system tells it: NFS may map users
    try:
        made.move(run.root)
    except OSError:
        made.remove()
        if not os.path.lexists(run.root):
            raise
        _check_own(run, owner)
        return False
    return True


def _let_administrators_read(folder: Path, group: str) -> None:
    gid = group_id(group)
    why = "" if gid is not None else "there is no such group on this machine"
    try:
        if gid is not None:
            safe_files.let_group_read(folder, gid, below=folder.parent)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        print_message(f"administrators ({group}) cannot read this run: {why}")


def _check_own(run: RunPaths, owner: int) -> None:
    """Checks that an existing run directory belongs to this user alone."""
    # Its name may have been known beforehand (Slurm's and `--run-id`), and the hook, the agents and
    # the reading commands trust what is in it.
    problem = safe_files.find_problem(run.root, owner=owner)
    if not problem and not run.manifest.is_file():
        problem = "is no run directory of haiprof's"
    trusted = {run.manifest, run.boot, run.ranks, run.nodes, run.control}
    for entry in () if problem else sorted(run.root.iterdir()):
        found = safe_files.find_problem(entry, owner=owner, writable=entry not in trusted)
        problem = problem or (found and f"is not safe to join: {entry.name} {found}")
    if problem:
        raise UsageError(
            f"cannot join {run.root}: it {problem}",
            hint="remove it, or choose another place or name: --log-dir, --name, --run-id",
        )


def find_open_folder(folder: Path) -> str:
    """The folder above a log directory in which every user can rename entries; or empty."""
    # Recording goes on there: no code and no request is taken from a run directory that is not the
    # user's own. But others can put their own in its place, and readers would believe it.
    folder = Path(os.path.realpath(folder))
    for part in (folder, *folder.parents):
        mode = part.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return str(part)
    return ""


PUT_EVERY_S = 300.0  # between two copies while the job runs
PUT_SHARE = 0.05  # copies take this share of the time at most: slow ones are made less often
PUT_LIMIT_S = 300.0  # how long the end of the job's launcher may wait for the last copy
_SILENT_S = 3.0
_INTERRUPTED = (130, -signal.SIGINT)

Start = Callable[[Sequence[str], bool], "subprocess.Popen[bytes]"]
"""Starts `put` with further words, in the background or not."""


@dataclass
class RunCopies:
    """Copies of one run at its address, each made by a process of its own."""

    run: RunPaths
    address: str
    start: Start
    words: Sequence[str] = ()
    clock: Callable[[], float] = time.monotonic
    _process: subprocess.Popen[bytes] | None = None
    _has_failed: bool = False

    def __post_init__(self) -> None:
        self._began_s = self.clock()
        self._next_s = self._began_s + PUT_EVERY_S

    def tick(self) -> None:
        """Starts a copy where it is time for one, and says once if one has failed."""
        if self._process is not None:
            self._look_after(self._process)
        elif self.clock() >= self._next_s:
            self._began_s = self.clock()
            # A failure is said once, with its reason; later ones would repeat it.
            words = ["--silent" if self._has_failed else "--quiet"]
            self._process = self._begin([*words, *self.words], background=True)

    def finish(self, asked_to_end: Callable[[], bool], *, quiet: bool) -> None:
        """Puts what is new, and waits for it."""
        deadline_s = self.clock() + PUT_LIMIT_S
        words = ["--quiet", *self.words] if quiet else self.words
        running = self._process
        if running is not None and self._wait(running, deadline_s, asked_to_end) is None:
            return
        last = self._begin(words, background=False)
        status = None if last is None else self._wait(last, deadline_s, asked_to_end)
        if status in _INTERRUPTED:
            self._print_failure("is not complete, as it was interrupted")

    def _begin(self, words: Sequence[str], *, background: bool) -> subprocess.Popen[bytes] | None:
        try:
            return self.start(words, background)
        except OSError as error:
            self._next_s = self.clock() + PUT_EVERY_S
            self._print_failure(f"cannot be put ({error.strerror})")
            return None

    def _look_after(self, process: subprocess.Popen[bytes]) -> None:
        status = process.poll()
        if status is None:
            return
        took_s = self.clock() - self._began_s
        self._next_s = self.clock() + max(PUT_EVERY_S, took_s / PUT_SHARE)
        self._process = None
        if status and not self._has_failed:
            self._has_failed = True
            wait_min = (self._next_s - self.clock()) / 60
            print_message(f"the job is not affected; tried again in {wait_min:.0f} minutes")

    def _wait(
        self, process: subprocess.Popen[bytes], deadline_s: float, asked_to_end: Callable[[], bool]
    ) -> int | None:
        """The exit status; None where it was not waited for any more."""
        why = f"is not complete after {PUT_LIMIT_S:g} s"
        patient_until_s = self.clock() + _SILENT_S
        while process.poll() is None and self.clock() < deadline_s:
            if asked_to_end():
                why = "is not complete, as you ended it"
                break
            if self.clock() > patient_until_s:
                patient_until_s = deadline_s
                print_message(f"putting the run at {self._target()} (Ctrl-C ends that)")
        if process.poll() is not None:
            return process.returncode
        end_child(process)
        self._print_failure(why)
        return None

    def _target(self) -> str:
        return mask_text(run_address(self.address, self.run.root.name))

    def _print_failure(self, why: str) -> None:
        print_message(f"{self._target()} {why}; the run is in {self.run.root}")
        address = shlex.quote(mask_text(self.address))
        print_message(f"hint: haiprof copy {shlex.quote(str(self.run.root))} {address}")
