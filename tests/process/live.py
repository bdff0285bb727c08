"""Jobs that go on while a test looks at them, or asks something of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from haiprof.base.errors import HaiprofError, RunNotFoundError
from haiprof.run_analysis.reactions import Reaction, reactions
from haiprof.run_analysis.run_files import open_run
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs
from tests.process.jobs import REPOSITORY, environment, run_command

START_S = 150.0
_Found = TypeVar("_Found")


def plain_ranks(ranks: int, *words: str) -> list[str]:
    """A script as so many ranks, where nobody looks at what starts them."""
    return ["python", str(REPOSITORY / "tests/process/ranks.py"), str(ranks), *words]


def torchrun(ranks: int, *words: str) -> list[str]:
    """A script under torchrun, at any free port."""
    return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), *words]


def within(
    seconds: float, condition: Callable[[], _Found | None], what: str = "the condition"
) -> _Found:
    """What the condition gave once it gave something; `what` is named where it never did."""
    limit, pause_s = time.monotonic() + seconds, 0.01
    while time.monotonic() < limit:
        found = condition()
        if found:
            return found
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)
    raise AssertionError(f"{what}: not within {seconds} s")


class LiveJob:
    """A job that runs, and is killed at the end of the `with`, its ranks too."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *options: str,
        haiprof: bool = True,
        said: str = "TRAINS",
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.logs = folder, folder / "logs"
        words = [sys.executable if word == "python" else word for word in command]
        if haiprof:
            own = [sys.executable, "-m", "haiprof", "--log-dir", str(self.logs)]
            words = [*own, *options, "--", *words]
        self.variables = {"HAIPROF_LOG_DIR": str(self.logs), **(extra or {})}
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                words, env=environment(extra), cwd=folder, text=True,
                stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
            )  # fmt: skip
        line = self.said()
        if not line.startswith(said):
            self.kill()
            raise AssertionError(f"{line!r} in place of {said!r}\n{self.stderr}")

    def said(self) -> str:
        """The next line that the job prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().removesuffix("\n")

    def __enter__(self) -> LiveJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> str:
        """Of the launcher, or of the bare job, as a word."""
        return str(self.process.pid)

    @property
    def run(self) -> RunPaths:
        """Its run directory; those of attached recordings stand beside it."""
        own = [path for path in find_runs(self.logs) if not path.name.startswith("attach-")]
        if not own:
            raise RunNotFoundError("it is not there yet")
        return RunPaths(own[-1])

    @property
    def stderr(self) -> str:
        """What it and haiprof have said so far."""
        return (self.folder / "stderr").read_text()

    def pids(self) -> dict[int, int]:
        """Process ids by rank, of the latest attempts that have reported in."""
        found: dict[int, int] = {}
        with contextlib.suppress(RunNotFoundError):
            for rank, _, paths in self.run.rank_folders():
                with contextlib.suppress(OSError, ValueError):
                    found[rank] = json.loads(paths.report.read_text())["pid"]
        return found

    def reported(self, ranks: int) -> dict[int, int]:
        """The same, once so many ranks have reported in."""
        return within(START_S, lambda: found if len(found := self.pids()) == ranks else None)

    def signal(self, number: int, *ranks: int) -> None:
        """To some ranks, or to all of them and to everything above them."""
        pids = self.pids()
        chosen = [pids[rank] for rank in ranks] if ranks else list(_family(self.process.pid))
        for pid in chosen:
            os.kill(pid, number)

    def ask_any(self, *words: str) -> dict[str, Any]:
        """Runs a haiprof command with `--json`: its answer, its `status` and its `talk`."""
        done = run_command([*words, "--json"], folder=self.folder, extra_environment=self.variables)
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        return {**found, "talk": done.stderr, "status": done.returncode}

    def ask(self, *words: str, status: int = 0) -> dict[str, Any]:
        """What a haiprof command answers that must end with a status."""
        found = self.ask_any(*words)
        assert found["status"] == status, found
        return found

    def listed(self) -> dict[str, Any]:
        """What `haiprof ls --live` says of it."""
        jobs = self.ask("ps")["jobs"]
        own: dict[str, Any] = next(job for job in jobs if job["path"] == str(self.run.root))
        return own

    def reactions(self) -> list[Reaction]:
        """What haiprof has done by itself so far."""
        try:
            return reactions(open_run(self.run.root))
        except HaiprofError:
            return []

    def hangs(self) -> list[Reaction]:
        """Those because of a hang: on a machine with other load steps do become slower."""
        return [reaction for reaction in self.reactions() if reaction.trigger == "hang"]

    def first_hang(self, within_s: float) -> Reaction:
        """The first hang whose outcome is known."""

        def known() -> Reaction | None:
            return next((one for one in self.hangs() if one.state != "begun"), None)

        try:
            return within(within_s, known)
        except AssertionError:
            raise AssertionError(f"no hang within {within_s} s\n{self.stderr}") from None

    def end(self) -> str:
        """Waits until it ends by itself; what it printed."""
        out, _ = self.process.communicate(timeout=120)
        return out

    def kill(self) -> None:
        """Ends it and everything below it, stopped or not."""
        for pid in _family(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=30)


def _family(pid: int) -> list[int]:
    """A process and all that are below it."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    found = [pid]
    for each in found:
        found += parents.get(each, [])
    return found
