"""Pages and pictures as files that the user named, and how figures in notebooks behave."""

from __future__ import annotations

from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.base.safe_files import named_file, whole_file

CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False}


def write_text(path: Path, text: str, *, below: Path | None = None) -> Path:
    """Writes a file."""
    try:
        with named_file(path) if below is None else whole_file(path, below=below) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
