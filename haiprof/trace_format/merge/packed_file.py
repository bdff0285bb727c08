"""A file that appears complete or not at all; a second thread packs it."""

from __future__ import annotations

import gzip
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.safe_files import named_file

STDOUT = Path("-")
_GZIP_LEVEL = 1
_WAITING_PIECES = 8


class Sink:
    """Writes text in a second thread; only a few pieces wait in its queue."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[int]] = deque()
        self.text_bytes = 0

    def write(self, text: bytes) -> None:
        """Queues a piece; an error of an earlier one is raised here or in `close`."""
        if len(self._waiting) >= _WAITING_PIECES:
            self._waiting.popleft().result()
        self.text_bytes += len(text)
        self._waiting.append(self._thread.submit(self._file.write, text))

    def close(self) -> None:
        """Waits until all is written."""
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)


@contextmanager
def packed_file(path: Path) -> Iterator[Sink]:
    """A sink for a file that gets its name only once it is complete."""
    if path == STDOUT:
        yield from _open_sink(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    try:
        with named_file(path) as file:
            if path.name.endswith(".gz"):
                with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
                    yield from _open_sink(packed)  # type: ignore[arg-type]
            else:
                yield from _open_sink(file)
    except OSError as error:
        raise HaiprofError(
            f"{path}: {error.strerror or error}", hint="name a file that can be written: -o FILE"
        ) from None


def _open_sink(file: IO[bytes]) -> Iterator[Sink]:
    sink = Sink(file)
    try:
        yield sink
    finally:
        sink.close()


def check_target(path: Path, inputs: list[Path], *, force: bool) -> None:
    """Refuses an output path that would overwrite something."""
    if path == STDOUT:
        return
    for given in inputs:
        if path.exists() and path.samefile(given):
            raise UsageError(f"{path}: it is one of the traces to merge", hint="-o OTHER.json.gz")
    if path.is_dir():
        raise UsageError(f"{path}: it is a folder", hint=f"-o {path / 'merged.json.gz'}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: it already exists", hint="--force replaces it")
