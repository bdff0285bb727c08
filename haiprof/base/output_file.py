"""An output file that the user named: whole or absent, and never over another by mistake."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from haiprof.base import safe_files
from haiprof.base.errors import UsageError, convert_os_errors
from haiprof.base.safe_files import named_file


@contextlib.contextmanager
def output_file(path: Path, *, force: bool, below: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write into that gets its name once all is written."""
    if os.path.lexists(path) and not path.is_file():
        raise UsageError(f"{path}: is not a regular file", hint="without -o: standard output")
    if path.exists() and not force:
        raise UsageError(f"{path}: already exists", hint="--force replaces it")
    target = named_file(path) if below is None else safe_files.whole_file(path, below=below)
    with convert_os_errors(UsageError, f"{path}: cannot be written"), target as file:
        yield file
