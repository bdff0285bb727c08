"""A pool of Dask workers, at a scheduler's address or as jobs on Slurm's nodes."""

from __future__ import annotations

import subprocess
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.base.safe_files import PRIVATE, MadeFolder, make_folder, make_named_folder, write_file
from haiprof.trace_analysis.pool import Pool, Progress, Question, ask, report_progress
from haiprof.trace_format.kineto.cache import user_folder

if TYPE_CHECKING:
    from dask_jobqueue import SLURMCluster
    from distributed import Client, Future
    from distributed.security import Security

_Result = TypeVar("_Result")


class DaskPool(ABC):
    """On the workers of a Dask cluster, which must see the files under the same absolute paths."""

    def map(
        self,
        question: Question[_Result],
        paths: Sequence[Path],
        options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:
        """A task per file; each answer is the same as in one process."""
        with self._client(paths) as client:
            from distributed import as_completed

            tasks = [
                client.submit(ask, question, path.absolute(), dict(options), pure=False)
                for path in paths
            ]
            for done, _ in enumerate(as_completed(tasks, loop=client.loop), start=1):
                report_progress(progress, done, len(tasks))
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


def _result(task: Future, path: Path) -> Any:  # noqa: ANN401 - whatever the question answers
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

    jobs: int = 4
    """How many workers; never more than there are traces."""
    partition: str | None = None
    """None takes Slurm's default."""
    account: str | None = None
    time: str = "00:30:00"
    """Limit of each job, as `sbatch --time` takes it."""
    memory: str = "4GB"
    """Of each job; a worker that needs more is stopped."""
    log: str | None = None
    """Existing folder for the jobs' output, seen by all nodes; None writes none."""
    wait: int = 600
    """Seconds until the first job must run."""

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

    Traces and haiprof's Python must have the same paths on the nodes. Workers and scheduler speak
    TLS with keys made for this one cluster, as a scheduler executes whatever it receives.
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
        keys = _own_folder()
        weakref.finalize(self, keys.remove)
        asked = self.options
        cluster = SLURMCluster(
            cores=1,
            processes=1,
            memory=asked.memory,
            queue=asked.partition,
            account=asked.account,
            walltime=asked.time,
            python=sys.executable,
            job_name="haiprof",
            log_directory=asked.log,
            job_extra_directives=[] if asked.log else ["--output=/dev/null"],
            scheduler_options={"dashboard": False, "dashboard_address": None},
            security=_write_keys(keys.path),
        )
        weakref.finalize(self, cluster.close)
        return cluster

    @contextmanager
    def _client(self, paths: Sequence[Path]) -> Iterator[Client]:
        from distributed import Client

        self._check()
        self._cluster.scale(jobs=min(self.options.jobs, len(paths)))
        with Client(self._cluster, set_as_default=False) as client:
            self._wait_for_worker(client)
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

    def _wait_for_worker(self, client: Client) -> None:
        try:
            client.wait_for_workers(1, timeout=self.options.wait)
        except TimeoutError:
            raise HaiprofError(
                f"--cluster slurm: no job ran within {self.options.wait} s",
                hint="squeue --me shows the jobs named haiprof; slurm:log=DIR keeps their output",
            ) from None


def _own_folder() -> MadeFolder:
    """A new folder for keys, where home folders are: the nodes see it, nobody else may."""
    try:
        home = user_folder()
        caches = home / "haiprof" / "dask"
        make_named_folder(home, mode=PRIVATE)
        make_folder(caches, below=home, mode=PRIVATE, own=True)
        return MadeFolder.temporary("keys-", caches)
    except OSError as error:
        raise HaiprofError(
            f"--cluster slurm: no place for its keys: {error.filename}: {error.strerror}",
            hint="XDG_CACHE_HOME=DIR names a folder of your own that the nodes see",
        ) from None


def _write_keys(folder: Path) -> Security:
    """Writes new keys into `folder`; those of dask-jobqueue itself stay open until collected."""
    from distributed.security import Security

    made = Security.temporary()
    keys = {name: getattr(made, name) for name in made.__slots__ if name.startswith("tls_")}
    keys = {name: text for name, text in keys.items() if isinstance(text, str) and "\n" in text}
    for name, text in keys.items():
        write_file(folder / name, text.encode(), below=folder, mode=0o600)
    paths = {name: str(folder / name) for name in keys}
    return Security(require_encryption=True, **paths)


_SCHEMES = ("tcp://", "tls://", "ucx://", "ws://", "wss://", "inproc://")


def cluster_pool(address: str) -> Pool:
    """The pool of an address as `--cluster` takes it."""
    if address == "slurm" or address.startswith("slurm:"):
        return SlurmCluster(SlurmOptions.parse_options(address))
    if not address.startswith(_SCHEMES):
        raise UsageError(f"--cluster {address}: not an address", hint="tcp://HOST:8786 or slurm")
    return DaskCluster(address)
