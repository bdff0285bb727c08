"""Puts a run at the address of its log directory: while the job runs, and once it has ended."""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from haiprof.base.log_addresses import run_address
from haiprof.base.messages import print_message
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.secrets import mask_text

PUT_EVERY_S = 300.0
"""Between two copies while the job runs."""
PUT_SHARE = 0.05
"""Copies take this share of the time at most: where they are slow, they are made less often."""
PUT_LIMIT_S = 300.0
"""How long the end of the job's launcher may wait for the last copy."""
_TERMINATE_S = 2.0
_SILENT_S = 3.0
_INTERRUPTED = (130, -signal.SIGINT)

Start = Callable[[Sequence[str], bool], "subprocess.Popen[bytes]"]
"""Starts `put` with further words, in the background or not."""


class RunCopies:
    """Copies of one run at its address, each made by a process of its own."""

    def __init__(
        self,
        run: RunPaths,
        address: str,
        start: Start,
        *,
        words: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._address = run, address
        self._start, self._words, self._clock = start, list(words), clock
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = clock()
        self._next_s = clock() + PUT_EVERY_S
        self._has_failed = False

    def tick(self) -> None:
        """Starts a copy where it is time for one, and says once if one has failed."""
        if self._process is not None:
            self._look_after(self._process)
        elif self._clock() >= self._next_s:
            self._began_s = self._clock()
            # A failure is said once, with its reason; later ones would repeat it.
            words = ["--silent" if self._has_failed else "--quiet"]
            self._process = self._begin([*words, *self._words], background=True)

    def finish(self, asked_to_end: Callable[[], bool], *, quiet: bool) -> None:
        """Puts what is new, and waits for it."""
        deadline_s = self._clock() + PUT_LIMIT_S
        words = ["--quiet", *self._words] if quiet else self._words
        running = self._process
        if running is not None and self._wait(running, deadline_s, asked_to_end) is None:
            return
        last = self._begin(words, background=False)
        status = None if last is None else self._wait(last, deadline_s, asked_to_end)
        if status in _INTERRUPTED:
            self._print_failure("is not complete, as it was interrupted")

    def _begin(self, words: list[str], *, background: bool) -> subprocess.Popen[bytes] | None:
        try:
            return self._start(words, background)
        except OSError as error:
            self._next_s = self._clock() + PUT_EVERY_S
            self._print_failure(f"cannot be put ({error.strerror})")
            return None

    def _look_after(self, process: subprocess.Popen[bytes]) -> None:
        status = process.poll()
        if status is None:
            return
        took_s = self._clock() - self._began_s
        self._next_s = self._clock() + max(PUT_EVERY_S, took_s / PUT_SHARE)
        self._process = None
        if status and not self._has_failed:
            self._has_failed = True
            wait_min = (self._next_s - self._clock()) / 60
            print_message(f"the job is not affected; tried again in {wait_min:.0f} minutes")

    def _wait(
        self, process: subprocess.Popen[bytes], deadline_s: float, asked_to_end: Callable[[], bool]
    ) -> int | None:
        """The exit status; None where it was not waited for any more."""
        why = f"is not complete after {PUT_LIMIT_S:g} s"
        patient_until_s = self._clock() + _SILENT_S
        while process.poll() is None and self._clock() < deadline_s:
            if asked_to_end():
                why = "is not complete, as you ended it"
                break
            if self._clock() > patient_until_s:
                patient_until_s = deadline_s
                print_message(f"putting the run at {self._target()} (Ctrl-C ends that)")
        if process.poll() is not None:
            return process.returncode
        process.terminate()
        try:
            process.wait(_TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._print_failure(why)
        return None

    def _target(self) -> str:
        return mask_text(run_address(self._address, self._run.root.name))

    def _print_failure(self, why: str) -> None:
        print_message(f"{self._target()} {why}; the run is in {self._run.root}")
        address = shlex.quote(mask_text(self._address))
        print_message(f"hint: haiprof put {shlex.quote(str(self._run.root))} {address}")
