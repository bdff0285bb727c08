"""A file that appears whole or not at all, packed in a second thread while the next is read."""

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

from haiprof.errors import HaiprofError, UsageError

STDOUT = Path("-")
_GZIP_LEVEL = 1
_WAITING_PIECES = 8


class Sink:
    """Takes text in pieces; a few of them wait for their turn at most.

    Args:
        file: Where they go.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[int]] = deque()
        self.text_bytes = 0

    def write(self, text: bytes) -> None:
        """Takes a piece; an error of an earlier one comes up here or in `close`."""
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
def whole_file(path: Path) -> Iterator[Sink]:
    """A sink for a file that stands at its place only once it is whole.

    Args:
        path: gzip where it ends in .gz, plain text else; `-` is standard output, plain text.

    Raises:
        HaiprofError: It cannot be written.
    """
    if path == STDOUT:
        yield from _written(sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(unfinished, "xb") as file:
            if path.name.endswith(".gz"):
                with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as packed:
                    yield from _written(packed)  # type: ignore[arg-type]
            else:
                yield from _written(file)
        unfinished.replace(path)
    except OSError as error:
        raise HaiprofError(
            f"{path}: {error.strerror or error}", hint="name a file that can be written: -o FILE"
        ) from None
    finally:
        unfinished.unlink(missing_ok=True)


def _written(file: IO[bytes]) -> Iterator[Sink]:
    sink = Sink(file)
    try:
        yield sink
    finally:
        sink.close()


def check_target(path: Path, inputs: list[Path], *, force: bool) -> None:
    """Refuses a place for the output where something would be lost.

    Raises:
        UsageError: It is an input, a folder, or there already.
    """
    if path == STDOUT:
        return
    for given in inputs:
        if path.exists() and path.samefile(given):
            raise UsageError(f"{path}: it is one of the traces to merge", hint="-o OTHER.json.gz")
    if path.is_dir():
        raise UsageError(f"{path}: it is a folder", hint=f"-o {path / 'merged.json.gz'}")
    if path.exists() and not force:
        raise UsageError(f"{path}: it is there already", hint="--force replaces it")
