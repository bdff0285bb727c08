"""Real jobs under haiprof and bare that are sent signals, and whatever processes they leave."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.process.jobs import environment
from tests.process.live import within

LIMIT_S = 120.0

COUNTS = """
import os, signal, sys, time
def note(number, frame):
    print(signal.Signals(number).name, flush=True)
for number in sys.argv[2].split(","):
    if number:
        signal.signal(getattr(signal, number), note)
print("ready", os.getpid(), flush=True)
beats = open("beats", "ab", buffering=0)
while not os.path.exists("end"):
    beats.write(b".")
    time.sleep(0.02)
print("done", flush=True)
sys.exit(int(sys.argv[1]))
"""
"""Counts until a file `end` is there; says which of the named signals it got; ends with 3, say."""


def _lead_a_group() -> None:
    """As a shell starts a command, also where the tests run under nohup or in the background."""
    os.setpgrp()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Launched:
    """A job that counts, in a group of its own; ends with the `with`, and so do its processes.

    Not in a session of its own: there nobody could continue it, and the kernel ignores SIGTSTP.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bare: bool = False,
        status: int = 3,
        handles: Sequence[str] = (),
        before: Sequence[str] = (),
        inside: Sequence[str] = (),
        log_dir: Path | None = None,
        options: Sequence[str] = (),
        job: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.logs = folder, log_dir or folder / "logs"
        self._mark = f"LAUNCHED={uuid.uuid4().hex}"
        (folder / "counts.py").write_text(COUNTS)
        own = [sys.executable, "-m", "haiprof", "--log-dir", str(self.logs), *options, "--"]
        words = job or [sys.executable, "counts.py", str(status), ",".join(handles)]
        name, _, value = self._mark.partition("=")
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*before, *([] if bare else own), *inside, *words], cwd=folder, stdout=out,
                stderr=err, env=environment({name: value}), preexec_fn=_lead_a_group,
            )  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def alive(self) -> list[int]:
        """All processes that came of it, wherever they hang now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if self._mark.encode() in environ and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def job(self) -> int:
        """The job's own process, once it counts."""
        return int(
            within(LIMIT_S, lambda: re.search(r"ready (\d+)\n", self.out), "the job's start")[1]
        )

    def launcher(self) -> int:
        """The launcher's process, behind what stands in front of it."""
        return int(psutil.Process(self.job()).ppid())

    def beside(self) -> dict[str, int]:
        """The recording process and the canary, once both are there."""
        job, launcher = self.job(), self.launcher()

        def find() -> dict[str, int] | None:
            others = [p.pid for p in psutil.Process(launcher).children() if p.pid != job]
            return {"canary": min(others), "recorder": max(others)} if len(others) == 2 else None

        return within(LIMIT_S, find, "two processes beside the job")

    def beats(self) -> int:
        path = self.folder / "beats"
        return path.stat().st_size if path.exists() else 0

    def goes_on(self) -> None:
        """The job counts on."""
        before = self.beats()
        within(LIMIT_S, lambda: self.beats() > before + 3, "the job's going on")

    def states(self, *pids: int) -> set[str]:
        """Of processes: `stopped`, `sleeping`, ...; gone ones have none."""
        found = set()
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                found.add(psutil.Process(pid).status())
        return found

    def stand_still(self, *pids: int) -> None:
        """Waits until these are stopped."""
        within(LIMIT_S, lambda: self.states(*pids) == {psutil.STATUS_STOPPED}, "standing still")

    def end(self) -> None:
        """Lets the job end by itself."""
        (self.folder / "end").touch()

    def status(self) -> int:
        """How the first process ended, and that nothing of it is left soon."""
        status = self.process.wait(LIMIT_S)
        self.leaves_nothing()
        return status

    def leaves_nothing(self) -> None:
        within(LIMIT_S, lambda: not self.alive(), f"an end of {self.alive()}")

    def got(self) -> list[str]:
        """The signals that the job has noted so far."""
        return [line for line in self.out.splitlines() if line.startswith("SIG")]
