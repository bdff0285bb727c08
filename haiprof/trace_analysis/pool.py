"""Where questions are answered: in this process, in local processes, or on a cluster of Dask."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.base.safe_files import PRIVATE, MadeFolder, make_folder, make_named_folder, write_file
from haiprof.trace_format.kineto.cache import user_folder
from haiprof.trace_format.kineto.rank_trace import Trace

if TYPE_CHECKING:
    from dask_jobqueue import SLURMCluster
    from distributed import Client


_Result = TypeVar("_Result")
Question = Callable[..., _Result]
"""A module-level function: (trace, **options) to something small that can be pickled."""
Progress = Callable[[int, int], None]  # called with (files done, files in all) after each file

SMALL_BYTES = 32 << 20
"""Files smaller than this in total are read in this process: starting others takes longer."""


class Pool(Protocol):
    """Where questions are answered."""

    def map(
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:  # fmt: skip
        """The answer for each file, in order."""


class Serial:
    """Answers in this process; traces stay open for further questions."""

    def __init__(self) -> None:
        self._traces: dict[Path, Trace] = {}

    def map(
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:  # fmt: skip
        """One file after the other."""
        answers = (_answer(question, self.trace(path), options) for path in paths)
        return list(_count_done(answers, len(paths), progress))

    def trace(self, path: Path) -> Trace:
        """The trace of a file, the same at every call."""
        if path not in self._traces:
            self._traces[path] = Trace(path)
        return self._traces[path]


class LocalProcesses:
    """Answers in processes of this machine."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count or len(os.sched_getaffinity(0))

    def map(
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:  # fmt: skip
        """Several files at a time; each answer is the same as in one process."""
        workers = min(self._count, len(paths))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
            with _isolate_main(question):
                # The largest first: at the end it would occupy one process alone.
                started = {
                    at: executor.submit(ask, question, paths[at], dict(options))
                    for at in sorted(range(len(paths)), key=lambda at: -_size(paths[at]))
                }
            tasks = [started[at] for at in range(len(paths))]
            deque(_count_done(as_completed(tasks), len(tasks), progress), maxlen=0)
            try:
                return [task.result() for task in tasks]
            except BrokenProcessPool:
                # Which of the unfinished files a dead worker was reading is not known.
                lost = [path.name for task, path in zip(tasks, paths, strict=True)
                        if task.cancelled() or task.exception() is not None]  # fmt: skip
                raise HaiprofError(
                    f"{paths[0].parent}: a process was killed while it worked on one of: "
                    f"{', '.join(lost)}",
                    hint="if memory is short: TraceAnalysis(path, pool=Serial()), or fewer "
                    "LocalProcesses(1)",
                ) from None
            finally:
                for task in tasks:
                    task.cancel()


_Item = TypeVar("_Item")


def _count_done(items: Iterable[_Item], count: int, progress: Progress | None) -> Iterator[_Item]:
    """Passes on what is done, and says how much that is, if asked to."""
    for done, item in enumerate(items, start=1):
        yield item
        if progress is not None:
            progress(done, count)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # the reader reports it
        return 0


def default_pool(paths: Sequence[Path]) -> Pool:
    """Local processes for several files that are large in total; else this process."""
    large = sum(path.stat().st_size for path in paths) > SMALL_BYTES
    return LocalProcesses() if large and len(paths) > 1 else Serial()


def ask(question: Question[_Result], path: Path, options: dict[str, Any]) -> _Result:
    """The work of a worker: opens one file and answers one question about it."""
    return _answer(question, Trace(path), options)


def _answer(question: Question[_Result], trace: Trace, options: Mapping[str, Any]) -> _Result:
    """Answers a question; an unexpected exception becomes an error that names the file."""
    try:
        return question(trace, **options)
    except HaiprofError:
        raise
    except Exception as error:
        name = getattr(question, "__name__", "question")
        raise HaiprofError(
            f"{trace.path}: {name}: {type(error).__name__}: {error}",
            hint="HAIPROF_DEBUG=1 shows the traceback; please report it",
        ) from error


_MAIN_LOCK = threading.Lock()


@contextmanager
def _isolate_main(question: Question[Any]) -> Iterator[None]:
    """Keeps spawned processes from running the caller's script, which may lack a `__main__` guard.

    A spawned process imports the parent's `__main__`, which would ask the same questions again.
    Only a question that the script itself defines needs that module.
    """
    if getattr(question, "__module__", "") == "__main__":
        yield
        return
    with _MAIN_LOCK:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class DaskPool(ABC):
    """On the workers of a Dask cluster, which must see the files under the same absolute paths."""

    def map(
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:  # fmt: skip
        """A task per file; each answer is the same as in one process."""
        with self._client(paths) as client:
            from distributed import as_completed

            tasks = [client.submit(ask, question, path.absolute(), dict(options), pure=False)
                     for path in paths]  # fmt: skip
            ended = as_completed(tasks, loop=client.loop)
            deque(_count_done(ended, len(tasks), progress), maxlen=0)
            return [_result(task, path) for task, path in zip(tasks, paths, strict=True)]

    @abstractmethod
    def _client(self, paths: Sequence[Path]) -> AbstractContextManager[Client]:
        """A connection to a cluster with a worker, for questions on some files."""


class DaskCluster(DaskPool):
    """On the workers of a Dask cluster that runs already."""

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    @contextmanager
    def _client(self, paths: Sequence[Path]) -> Iterator[Client]:
        try:
            from distributed import Client
        except ImportError:
            raise MissingExtraError(
                "a Dask cluster needs dask.distributed, which is not installed",
                hint="pip install 'haiprof[dask]', here and on the workers",
            ) from None
        try:
            client = Client(self.address, timeout=self._timeout_s, set_as_default=False)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--cluster {self.address}: no Dask scheduler there: {error}",
                hint="dask scheduler prints its address; tcp://HOST:8786 as a rule",
            ) from None
        with client:
            yield client


def _result(task: Any, path: Path) -> Any:  # noqa: ANN401 - whatever the question answers
    from distributed import KilledWorker

    try:
        return task.result()
    except KilledWorker:
        raise HaiprofError(
            f"{path}: the workers that read it were killed", hint="they may be short of memory"
        ) from None


_HINT = "--cluster slurm, or --cluster slurm:jobs=4,partition=cpu,time=00:30:00,memory=8GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What Slurm is asked for: one job per worker, one core each."""

    jobs: int = 4  # How many workers; never more than there are traces, or ranks of a run
    partition: str | None = None  # None takes Slurm's default
    account: str | None = None
    time: str = "00:30:00"  # Limit of each job, as `sbatch --time` takes it
    memory: str = "4GB"  # Of each job; a worker that needs more is stopped
    log: str | None = None
    """Existing folder for the jobs' output, seen by all nodes; None writes none."""
    wait: int = 600  # Seconds until the first job must run

    @classmethod
    def parse_options(cls, text: str) -> SlurmOptions:
        """Options of `slurm:jobs=4,partition=cpu`."""
        found: dict[str, Any] = {}
        for part in filter(None, text.removeprefix("slurm").removeprefix(":").split(",")):
            name, _, value = part.partition("=")
            if name not in {field.name for field in fields(cls)} or not value:
                raise UsageError(f"--cluster {text}: {part} is no option of it", hint=_HINT)
            found[name] = int(value) if name in ("jobs", "wait") and value.isdecimal() else value
        options = cls(**found)
        if not all(isinstance(n, int) and n > 0 for n in (options.jobs, options.wait)):
            raise UsageError(f"--cluster {text}: jobs and wait are whole numbers", hint=_HINT)
        return options


class SlurmCluster(DaskPool):
    """On workers that Slurm starts, and that end with this object or its process.

    Traces, runs and haiprof's Python must have the same paths on the nodes. Workers and scheduler
    speak TLS with keys made for this one cluster, as a scheduler executes whatever it receives.
    """

    def __init__(self, options: SlurmOptions | None = None) -> None:
        self.options = options or SlurmOptions()

    def job_script(self) -> str:
        """What each worker is submitted with."""
        return str(self._cluster.job_script())

    @cached_property
    def _cluster(self) -> SLURMCluster:
        try:
            from dask_jobqueue import SLURMCluster
        except ImportError:
            raise MissingExtraError(
                "--cluster slurm needs dask-jobqueue, which is not installed",
                hint="pip install 'haiprof[dask]', for the Python that the nodes run too",
            ) from None
        from distributed.security import Security

        try:  # a folder for keys, where home folders are: the nodes see it, nobody else may
            home = user_folder()
            caches = home / "haiprof" / "dask"
            make_named_folder(home, mode=PRIVATE)
            make_folder(caches, below=home, mode=PRIVATE, own=True)
            keys = MadeFolder.temporary("keys-", caches)
        except OSError as error:
            raise HaiprofError(
                f"--cluster slurm: no place for its keys: {error.filename}: {error.strerror}",
                hint="XDG_CACHE_HOME=DIR names a folder of your own that the nodes see",
            ) from None
        weakref.finalize(self, keys.remove)
        # New keys, written there; those of dask-jobqueue itself stay open until collected.
        made, paths = Security.temporary(), {}
        for name in (name for name in made.__slots__ if name.startswith("tls_")):
            text = getattr(made, name)
            if isinstance(text, str) and "\n" in text:
                paths[name] = str(keys.path / name)
                write_file(keys.path / name, text.encode(), below=keys.path, mode=0o600)
        asked = self.options
        cluster = SLURMCluster(
            cores=1, processes=1, memory=asked.memory, queue=asked.partition,
            account=asked.account, walltime=asked.time, log_directory=asked.log,
            python=sys.executable, job_name="haiprof",
            job_extra_directives=[] if asked.log else ["--output=/dev/null"],
            scheduler_options={"dashboard": False, "dashboard_address": ":0"},
            security=Security(require_encryption=True, **paths),
        )  # fmt: skip
        weakref.finalize(self, cluster.close)
        return cluster

    @contextmanager
    def _client(self, paths: Sequence[Path]) -> Iterator[Client]:
        from distributed import Client

        self._check()
        self._cluster.scale(jobs=min(self.options.jobs, len(paths)))
        with Client(self._cluster, set_as_default=False) as client:
            try:
                client.wait_for_workers(1, timeout=self.options.wait)
            except TimeoutError:
                raise HaiprofError(
                    f"--cluster slurm: no job ran within {self.options.wait} s",
                    hint="squeue --me shows the jobs named haiprof; slurm:log=DIR keeps their "
                    "output",
                ) from None
            yield client

    def _check(self) -> None:
        """Asks Slurm whether it would take the job."""
        script = self.job_script()
        try:
            done = subprocess.run(
                ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise UsageError(
                f"--cluster slurm: sbatch: {error.strerror}", hint="run it on a node of Slurm's"
            ) from None
        if done.returncode:
            reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
            raise UsageError(f"--cluster slurm: Slurm would not run it: {reason}", hint=_HINT)


_SCHEMES = ("tcp://", "tls://", "ucx://", "ws://", "wss://", "inproc://")


def cluster_pool(address: str) -> Pool:
    """The pool of an address as `--cluster` takes it."""
    if address == "slurm" or address.startswith("slurm:"):
        return SlurmCluster(SlurmOptions.parse_options(address))
    if not address.startswith(_SCHEMES):
        raise UsageError(f"--cluster {address}: not an address", hint="tcp://HOST:8786 or slurm")
    return DaskCluster(address)
