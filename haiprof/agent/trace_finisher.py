"""What one child process at a time does beside the job: finish raw traces, fold old records."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from haiprof.base.errors import RunFormatError
from haiprof.base.messages import print_message
from haiprof.base.safe_files import remove_file, remove_folder
from haiprof.base.subcommand import end_child
from haiprof.base.version import PACKAGE
from haiprof.linux.procfs import process_exists
from haiprof.run_format.layout import AGREED_PREFIX, RankPaths, RunPaths
from haiprof.run_format.raw_traces import Stem, complete_parts, list_names, parse_stem
from haiprof.run_format.reader import read_json, read_lines, try_read_json

QUIET_S = 2.0
GRACE_S = 60.0  # for a rank to report the result of its window, once the recording is over
LIMIT_S = 600.0  # for all traces of a node, after the job
_PROGRAM = "from haiprof.agent.finish_traces import main; raise SystemExit(main(sys.argv[1:]))"


class Helper:
    """A program of haiprof's that runs beside the job, one process at a time.

    It is in a session of its own, so that Ctrl-C does not end it.
    """

    def __init__(
        self, program: str, in_child: Callable[[], None] | None, *, task: str, otherwise: str
    ) -> None:
        self._program = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {program}"
        self._in_child, self._task, self._otherwise = in_child, task, otherwise
        self.child: subprocess.Popen[bytes] | None = None
        """The process that runs, or ran last."""

    def is_working(self) -> bool:
        """Whether a process of it runs."""
        if self.child is not None and self.child.poll() is not None:
            self.child = None
        return self.child is not None

    def start(self, words: Sequence[str]) -> None:
        """Starts one; says what is left undone where that fails."""
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-I", "-c", self._program, *words], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                preexec_fn=self._in_child,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            print_message(f"cannot {self._task}: {error}; {self._otherwise}")

    def end(self) -> None:
        """Ends the one that runs."""
        child, self.child = self.child, None
        if child is not None and child.poll() is None:
            end_child(child)


@dataclass
class Finisher:
    """Finishes the traces of one host while the job runs, and the rest when it has ended."""

    run: RunPaths
    host: str
    in_child: Callable[[], None] | None = None
    _tried: set[str] = field(default_factory=set)
    _asked_s: float | None = None

    def __post_init__(self) -> None:
        left = f"they stay in {self.run.trace_parts}"
        self._helper = Helper(_PROGRAM, self.in_child, task="compress traces", otherwise=left)

    def tick(self) -> None:
        """Starts a child where a rank has written a trace; called about twice a second."""
        if self._helper.is_working():
            return
        waiting = self._waiting()
        if waiting - self._tried:
            self._tried |= waiting  # what a child could not finish is only tried again at the end
            self._start()

    def is_settled(self) -> bool:
        """Whether every rank of this host is done with its window, and its files are finished.

        Called once the recording is over. A rank that never reports the result of its window is
        waited for at most `GRACE_S`.
        """
        now = time.monotonic()
        self._asked_s = now if self._asked_s is None else self._asked_s
        stems = {stem.text for stem in self._stems() if process_exists(stem.pid)}
        if self._helper.is_working() or stems - self._tried or self._waiting() - self._tried:
            return False
        if now > self._asked_s + GRACE_S:
            return True
        return all(self._is_reported(paths) for _, _, paths in self.run.rank_folders())

    def finish(self, asked_to_end: Callable[[], bool], *, quiet: bool) -> None:
        """Called when the job is over: finishes what is left and prints the progress."""
        try:
            self._finish(asked_to_end, quiet=quiet)
        finally:
            self._tidy()

    def _finish(self, asked_to_end: Callable[[], bool], *, quiet: bool) -> None:
        total = len(self._waiting())
        if not self._helper.is_working() and not self._stems():
            return
        began = said = time.monotonic()
        last = False  # a child that knows that all ranks have ended
        while time.monotonic() < began + LIMIT_S:
            if not self._helper.is_working():
                if last:
                    break
                last = True
                self._start("last")
            if not quiet and time.monotonic() > said + QUIET_S:
                said = time.monotonic()
                print_message(f"writing traces: {total - len(self._waiting())} of {total}")
            if asked_to_end():
                break
        self._helper.end()
        left = len(self._waiting())
        if left and not quiet:
            print_message(f"{left} of {total} traces stay uncompressed in {self.run.trace_parts}")

    def _start(self, *words: str) -> None:
        self._helper.start((str(self.run.root), self.host, *words))

    def _waiting(self) -> set[str]:
        """Stems of this host's whole parts."""
        return {part.stem.text for part in complete_parts(self.run, self.host)}

    def _stems(self) -> list[Stem]:
        """Everything of this host's ranks that is not finished, whole or not."""
        found = (parse_stem(name) for name in list_names(self.run.trace_parts))
        return [stem for stem in found if stem is not None and stem.is_of(self.host)]

    def _tidy(self) -> None:
        """Removes the folder of parts once it holds only the files of agreements."""
        folder = self.run.trace_parts
        names = list_names(folder)
        settled = all(name.startswith(AGREED_PREFIX) for name in names)
        if not settled or any(map(self._may_run, self.run.rank_folders())):
            return
        with suppress(OSError):  # read-only by now, or somebody has just written into it
            for name in names:
                remove_file(folder / name, below=self.run.root)
            remove_folder(folder, below=self.run.root)

    def _may_run(self, found: tuple[int, int, RankPaths]) -> bool:
        """Whether a rank still runs; one of another host may."""
        report = try_read_json(found[2].report)
        return report.get("host") != self.host or process_exists(report.get("pid"))

    def _is_reported(self, paths: RankPaths) -> bool:
        """Whether a rank of this host reported the result of a window, or cannot any more."""
        try:
            report = read_json(paths.report)
            lines, _ = read_lines(paths.events)
        except RunFormatError:
            return True
        if report.get("host") != self.host or not process_exists(report.get("pid")):
            return True
        return any(line.get("type") == "trace_window" for line in lines)


EVERY_S = 3600.0
_FOLD_PROGRAM = (
    "from haiprof.agent.finish_traces import step_back; step_back(); "
    "from haiprof.run_analysis.folding import main; main(sys.argv[1:])"
)


@dataclass
class RunFolder:
    """Folds what one host's ranks and samplers have written, while the job runs.

    The child has the lowest priority, and is what the kernel ends first where memory runs out: what
    it had not put in place by then is folded an hour later.
    """

    run: RunPaths
    host: str
    detail_h: float
    in_child: Callable[[], None] | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._words = (str(self.run.root), self.host, str(self.detail_h))
        task = f"fold old records of {self.run.root}"
        self._helper = Helper(_FOLD_PROGRAM, self.in_child, task=task, otherwise="they are kept")
        detail_s = self.detail_h * 3600.0
        self._every_s = min(EVERY_S, detail_s)
        self._due_s = self.clock() + detail_s + self._every_s

    def tick(self) -> None:
        """Starts a child when it is due, and none runs."""
        if not self._helper.is_working() and self.clock() >= self._due_s:
            self._due_s = self.clock() + self._every_s
            self._helper.start(self._words)

    def close(self) -> None:
        """Ends a child that still works, at the end of the job."""
        self._helper.end()
