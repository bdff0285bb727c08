"""Reads the whole text of a file, plain or gzip, with a limit on what gzip may expand to."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path

from haiprof.base.errors import TraceFormatError, UsageError
from haiprof.base.options import ENV_UNPACK_LIMIT

RATIO_LIMIT = 200  # real traces shrink to a tenth or a thirtieth; a gzip bomb reaches one to 1,032
RATIO_FROM_BYTES = 256 << 20  # text up to this size is unpacked whatever the ratio
_READ_BYTES = 1 << 22


def check_expansion(path: Path, *, packed_bytes: int, text_bytes: int) -> None:
    """Refuses a file that expands far more than real ones do."""
    allowed = max(RATIO_FROM_BYTES, limit_from_environment())
    if text_bytes > allowed and text_bytes > RATIO_LIMIT * packed_bytes:
        raise TraceFormatError(
            f"{path}: {packed_bytes} bytes of gzip hold more than {text_bytes >> 20} MiB: no real "
            f"file is packed {RATIO_LIMIT} to one",
            hint=_remedy(text_bytes),
        )


def read_text(path: Path, *, limit_bytes: int) -> bytes:
    """A file's text."""
    limit_bytes = max(limit_bytes, limit_from_environment())
    text = io.BytesIO()
    with open(path, "rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        file = gzip.GzipFile(fileobj=raw, mode="rb") if packed else raw
        try:
            # Not the whole limit at once: `ulimit -v` would refuse to allocate it.
            while block := file.read(_READ_BYTES):
                text.write(block)
                if text.tell() > limit_bytes:
                    raise TraceFormatError(
                        f"{path}: more than {limit_bytes >> 20} MiB of text",
                        hint=_remedy(limit_bytes),
                    )
                if packed:
                    check_expansion(path, packed_bytes=raw.tell(), text_bytes=text.tell())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceFormatError(f"{path}: cannot be read: damaged gzip ({error})") from None
    return text.getvalue()


def limit_from_environment() -> int:
    """The limit of HAIPROF_UNPACK_LIMIT in bytes; 0 where it is not set."""
    if not (raw := os.environ.get(ENV_UNPACK_LIMIT, "")):
        return 0
    if not (raw.isascii() and raw.isdecimal() and len(raw) < 10):
        raise UsageError(f"{ENV_UNPACK_LIMIT}={raw}: expected MiB", hint=f"{ENV_UNPACK_LIMIT}=8192")
    return int(raw) << 20


def _remedy(seen_bytes: int) -> str:
    return f"if you trust it: {ENV_UNPACK_LIMIT}={max(1, seen_bytes >> 19)} allows so many MiB"
