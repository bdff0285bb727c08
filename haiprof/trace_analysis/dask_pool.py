"""Questions asked on the workers of a Dask cluster; needs the extra `dask`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.trace_analysis.pool import Progress, Question, ask, report_progress

if TYPE_CHECKING:
    from distributed import Client, Future

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
