"""A file that the user named: whole or not there at all, and never over another by mistake."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from haiprof.errors import UsageError


@contextlib.contextmanager
def whole_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file to write into; it takes its name when all is written.

    Args:
        path: Where it goes.
        force: Whether a file that is there already may be replaced.

    Raises:
        UsageError: It is there already, or cannot be written; nothing is left behind.
    """
    if os.path.lexists(path) and not path.is_file():
        raise UsageError(f"{path}: is not a regular file", hint="without -o: standard output")
    if path.exists() and not force:
        raise UsageError(f"{path}: is there already", hint="--force replaces it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
