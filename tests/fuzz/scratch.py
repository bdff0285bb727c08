"""The folder in which one process of the fuzzer puts the files that readers want to open."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

SCRATCH_ENV = "HAIPROF_FUZZ_SCRATCH"
"""Set by whoever tidies up after a process that may be killed."""
_MEMORY = Path("/dev/shm")


@cache
def folder() -> Path:
    """New for this process, in memory where the machine allows."""
    parent = os.environ.get(SCRATCH_ENV) or (_MEMORY if os.access(_MEMORY, os.W_OK) else None)
    made = Path(tempfile.mkdtemp(prefix="haiprof-fuzz-", dir=parent))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def put(name: str, data: bytes) -> Path:
    """A file with this content; what has stood there is overwritten."""
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
