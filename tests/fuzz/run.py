"""Runs targets side by side, each in processes of its own, and writes down how far they are.

A target's process may crash: that is a finding, with the input that was at hand, and another
process goes on. All that is known lies in the state folder, so a run that was cut off goes on
where it was.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tests.fuzz.sanitized import NATIVE_ENV, NoSanitizerError, build, environment
from tests.fuzz.scratch import SCRATCH_ENV

if TYPE_CHECKING:
    from tests.fuzz.engine import Workplace
    from tests.fuzz.targets import Target

os.environ.setdefault("POLARS_MAX_THREADS", "1")
_BROKEN = 3
"""How a process ends in which the fuzzer itself has failed."""
_HANG_S = 120.0
_CRASH_LIMIT = 20
_REPORT_EVERY_S = 30.0
_LOOK_EVERY_S = 0.2
ROOT = Path(__file__).parents[2]
STATE = ROOT / "build" / "fuzz"


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz", description="Feeds mutated files to every parser of foreign bytes."
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        metavar="N",
        help="of CPU time of each target, earlier runs in the state folder included",
    )
    parser.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="T",
        help="only this one; may be given several times",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="with the scanner built with AddressSanitizer and UBSan",
    )
    parser.add_argument(
        "--state",
        type=Path,
        default=STATE,
        metavar="DIR",
        help=f"tallies, corpora, findings ({STATE.relative_to(ROOT)})",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="a table, written as it goes")
    parser.add_argument("--list", action="store_true", help="the targets")
    found = parser.parse_args(arguments)
    found.words = list(arguments)
    return found


def main(arguments: Sequence[str]) -> int:
    """0 without findings, 1 with some, 2 where it cannot run."""
    asked = parsed(arguments)
    if asked.sanitize and not os.environ.get(NATIVE_ENV):
        _again_sanitized(asked)
    from tests.fuzz.targets import BY_NAME, TARGETS, unavailable  # with the scanner of --sanitize

    unknown = [name for name in asked.target if name not in BY_NAME]
    if unknown:
        print(f"scripts/fuzz: no target {unknown[0]}; there are {', '.join(BY_NAME)}",
              file=sys.stderr)  # fmt: skip
        return 2
    chosen = [BY_NAME[name] for name in asked.target] or list(TARGETS)
    if asked.list:
        print("\n".join(f"{target.name:<12}{target.reads}" for target in chosen))
        return 0
    for target in chosen:
        if unavailable(target):
            print(f"scripts/fuzz: {target.name} is left out: {unavailable(target)}",
                  file=sys.stderr)  # fmt: skip
    return Run(asked, [t for t in chosen if not unavailable(t)]).finish()


def _again_sanitized(asked: argparse.Namespace) -> NoReturn:
    """This program once more, with the sanitizers' libraries loaded first."""
    folder = asked.state.resolve() / ".sanitized"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        variables = environment(build(folder))
    except NoSanitizerError as error:
        print(f"scripts/fuzz --sanitize: {error}", file=sys.stderr)
        sys.exit(2)
    words = [sys.executable, "-m", "tests.fuzz.run", *asked.words]
    os.execve(sys.executable, words, variables)


@dataclass(slots=True)
class Worker:
    """A process that tries one target."""

    target: Target
    place: Workplace
    pid: int
    scratch: Path
    number: int = -1
    """Of the input that was last seen at hand."""
    looks: int = 0
    """How often it was: a run that is stopped and goes on has not hung."""


class Run:
    """All targets that were asked for."""

    def __init__(self, asked: argparse.Namespace, targets: Sequence[Target]) -> None:
        from tests.fuzz import engine

        self.asked, self.engine = asked, engine
        self.places = {t: engine.Workplace(asked.state / t.name) for t in targets}
        self.crashes: Counter[str] = Counter()
        self.broken: list[str] = []
        """Targets that do not run at all, with the reason."""
        self.running: list[Worker] = []
        self._reported_s = time.monotonic()

    def finish(self) -> int:
        """Until every target has had its time."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        waiting = [t for t, p in self.places.items() if p.tally().seconds < self.asked.seconds]
        try:
            while waiting or self.running:
                while waiting and len(self.running) < self.asked.jobs:
                    self.running.append(self._start(waiting.pop(0)))
                time.sleep(_LOOK_EVERY_S)
                for worker in list(self.running):
                    waiting += self._look(worker)
                if time.monotonic() - self._reported_s > _REPORT_EVERY_S:
                    self._report()
        except KeyboardInterrupt:
            print("scripts/fuzz: cut off; the same command goes on from here", file=sys.stderr)
        finally:
            for worker in self.running:
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
                shutil.rmtree(worker.scratch, ignore_errors=True)
            self._report()
        print(self.table(), end="")
        for reason in self.broken:
            print(f"scripts/fuzz: {reason}", file=sys.stderr)
        return 2 if self.broken else int(any(p.tally().findings for p in self.places.values()))

    def table(self) -> str:
        """What each target has had so far, as Markdown."""
        rows = ["| target | reads | executions | CPU seconds | inputs kept | findings |",
                "|---|---|---:|---:|---:|---|"]  # fmt: skip
        for target, place in self.places.items():
            tally = place.tally()
            found = "; ".join(f"{k} ({v})" for k, v in tally.findings.items()) or "none"
            kept = sum(1 for _ in place.corpus.iterdir())
            rows.append(
                f"| {target.name} | {target.reads} | {tally.executions:,} | {tally.seconds:.0f} | "
                f"{kept} | {found} |"
            )
        return "\n".join(rows) + "\n"

    def _start(self, target: Target) -> Worker:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        scratch = Path(tempfile.mkdtemp(prefix="haiprof-fuzz-", dir=memory))
        pid = os.fork()
        if pid == 0:
            self._work(target, scratch)
        return Worker(target, self.places[target], pid, scratch)

    def _work(self, target: Target, scratch: Path) -> NoReturn:
        """In a process of its own."""
        place, status = self.places[target], _BROKEN
        try:
            os.environ[SCRATCH_ENV] = str(scratch)
            log = os.open(place.root / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us ends us
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if not self.engine.is_sanitized():  # which says more of a crash
                faulthandler.enable()
            self.engine.arm()
            session = self.engine.Session(target, place, self.asked.seconds)
            seed = self.asked.seed + self.crashes[target.name]
            self.engine.limit_memory()
            self.engine.fuzz(session, seed)
            place.tell(session.tally)
            status = 0
        except BaseException:  # noqa: BLE001 - the log says what is wrong with the fuzzer itself
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _look(self, worker: Worker) -> list[Target]:
        """Whether a process goes on; its target once more where it has crashed."""
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        number, data = worker.place.at_hand()
        if not pid:
            worker.looks = worker.looks + 1 if number == worker.number else 0
            worker.number = number
            if worker.looks * _LOOK_EVERY_S > _HANG_S:
                os.kill(worker.pid, signal.SIGKILL)
            return []
        self.running.remove(worker)
        shutil.rmtree(worker.scratch, ignore_errors=True)
        code = os.waitstatus_to_exitcode(status)
        log = (worker.place.root / "log").read_text(errors="replace")[-20_000:]
        if code == 0:
            return []
        name = worker.target.name
        if code == _BROKEN:
            self.broken.append(f"{name} does not run: {(log.splitlines() or ['?'])[-1]}")
            return []
        self._keep_crash(worker, code, data, log)
        self.crashes[name] += 1
        return [worker.target] if self.crashes[name] < _CRASH_LIMIT else []

    def _keep_crash(self, worker: Worker, code: int, data: bytes, log: str) -> None:
        said = [line for line in log.splitlines() if line.startswith("SUMMARY:")]
        ended = signal.Signals(-code).name if code < 0 else f"status {code}"
        kind = said[-1].removeprefix("SUMMARY: ") if said else f"ended by {ended}"
        tally = worker.place.tally()
        finding = self.engine.Finding(kind=kind, data=data, details=log)
        worker.place.report(finding, tally)
        worker.place.tell(tally)

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        if self.asked.report is None:
            return
        began = f"by `scripts/fuzz {' '.join(self.asked.words)}`"
        where = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
        how = "with AddressSanitizer and UBSan in the scanner" if self.asked.sanitize else "plain"
        draft = self.asked.report.with_name(f".{self.asked.report.name}.tmp")
        draft.write_text(f"# Fuzzing of every parser\n\nWritten {began}; {where}; {how}.\n"
                         f"SECURITY.md says what is a finding.\n\n{self.table()}")  # fmt: skip
        os.replace(draft, self.asked.report)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
